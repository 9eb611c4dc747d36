"""Tests of a run's log: no waiting for a slow disk, and times that add up."""

from __future__ import annotations

import json
import threading
import time

import pytest

from spell_jax.runtime import metrics as runtime_metrics
from spell_jax.runtime import run_logger as recorders
from spell_jax.runtime.episodes import read_episodes
from spell_jax.runtime.metrics import Metrics, read_metrics
from spell_jax.runtime.run_logger import Recorder
from spell_jax.runtime.timers import Stopwatch


def loss(value: float) -> Metrics:
    metrics = Metrics()
    metrics.add("train/loss", value)
    return metrics


def test_a_slow_disk_holds_no_step_up(tmp_path, monkeypatch):
    write_lines, gate = runtime_metrics.write_lines, threading.Event()

    def slow(path, lines):
        assert gate.wait(60)
        write_lines(path, lines)

    with Recorder(tmp_path, 9, episodes=1000) as recorder:
        monkeypatch.setattr(runtime_metrics, "write_lines", slow)
        for step in (1, 2, 3):
            recorder.write(step, loss(step), [{"question": f"q{step}"}])
            lines = [json.loads(line) for line in recorder.tail()]
            assert [line["step"] for line in lines] == list(range(1, step + 1))
        assert read_metrics(tmp_path) == [] and not list(read_episodes(tmp_path))
        threading.Timer(0.1, gate.set).start()
        recorder.flush()
        lines = read_metrics(tmp_path)
        assert [line["train/loss"] for line in lines] == [1, 2, 3]
        assert [step for step, _ in read_episodes(tmp_path)] == [1, 2, 3]
        (events,) = (tmp_path / "tensorboard").iterdir()
        assert events.read_bytes().count(b"train/loss") == 3


def test_an_episode_is_taken_as_it_is_when_it_is_handed_in(tmp_path, monkeypatch):
    gate, episode = threading.Event(), {"question": "then"}
    with Recorder(tmp_path, 9, episodes=1000) as recorder:
        recorder._background.submit(gate.wait)
        recorder.write(1, loss(1), (dict(episode) for _ in range(1)))
        episode["question"] = "now"
        gate.set()
    ((_, record),) = read_episodes(tmp_path)
    assert record["question"] == "then"


def test_a_full_disk_is_told_to_who_writes_next(tmp_path, monkeypatch):
    def full(path, lines):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), Recorder(tmp_path, 9) as recorder:
        monkeypatch.setattr(runtime_metrics, "write_lines", full)
        recorder.write(1, loss(1))
        with pytest.raises(OSError, match="No space left"):
            recorder.flush()
        with pytest.raises(OSError, match="No space left"):
            recorder.write(2, loss(2))
        # The lines in a checkpoint have both steps.
        assert [json.loads(line)["step"] for line in recorder.tail()] == [1, 2]


def test_parts_of_a_step_add_up_to_its_wall_time(tmp_path):
    watch, began = Stopwatch(), time.monotonic()
    with Recorder(tmp_path, 9, watch=watch) as recorder:
        for step in (1, 2):
            for phase in ("rollout", "update", "save"):
                recorder.enter(phase, step - 1)
                time.sleep(0.02)
            watch.spend({"responder": 0.01})
            recorder.write(step, loss(step))
        gone = time.monotonic() - began
    lines = read_metrics(tmp_path)
    for line in lines:
        parts = {n: v for n, v in line.items() if n.startswith("time/seconds/")}
        assert {"rollout", "update", "save", "responder"} <= {n.split("/")[-1] for n in parts}
        assert sum(parts.values()) == pytest.approx(line["time/step_seconds"])
        assert all(parts[f"time/seconds/{name}"] >= 0.01 for name in ("rollout", "update", "save"))
    assert gone - 0.02 < sum(line["time/step_seconds"] for line in lines) <= gone


def test_a_line_says_what_the_process_takes(tmp_path):
    with Recorder(tmp_path, 1) as recorder:
        recorder.write(1, loss(1))
    (line,) = read_metrics(tmp_path)
    assert line["process/resident_mib"] > 10 and line["process/programs"] == 0


def test_the_newest_numbers_are_shown_in_every_phase(tmp_path):
    shown = []
    with Recorder(tmp_path, 9, done=2) as recorder:
        recorder.progress.update = lambda *given: shown.append((given[0], given[1], dict(given[2])))
        recorder.enter("rollout", 2)
        recorder.enter("update", 2, {"solved": 0.5})
        recorder.enter("save", 3)
    assert shown == [
        (2, "rollout", {}),
        (2, "update", {"solved": 0.5}),
        (3, "save", {"solved": 0.5}),
    ]


class Double:
    """Stand-in for Wandb, the progress line or the process statistics."""

    def __init__(self, *given):
        self.given, self.closed = given, 0

    def write(self, step, numbers):
        pass

    def close(self):
        self.closed += 1


@pytest.fixture
def made(monkeypatch) -> list[Double]:
    """The stand-ins for wandb's runs that were made."""
    doubles: list[Double] = []
    monkeypatch.setattr(
        recorders, "Wandb", lambda *given: doubles.append(Double(*given)) or doubles[-1]
    )
    return doubles


def test_at_the_end_all_is_closed(tmp_path, made):
    recorder = Recorder(tmp_path, 9, 3, wandb="reading", config={"seed": 1})
    recorder._footprint.close()
    recorder.progress, recorder._footprint = Double(), Double()  # type: ignore[assignment]
    with recorder:
        assert recorder.progress.closed == made[0].closed == 0
    (board,) = made
    assert board.given == ("reading", tmp_path, 3, {"seed": 1})
    assert board.closed == recorder.progress.closed == recorder._footprint.closed == 1


def test_a_run_that_fails_is_not_finished_there(tmp_path, made):
    """wandb then reports the failure itself; the progress line is closed all the same."""
    recorder = Recorder(tmp_path, 9, wandb="reading")
    recorder.progress = Double()  # type: ignore[assignment]
    with pytest.raises(KeyError), recorder:
        raise KeyError("a mistake")
    assert made[0].closed == 0 and recorder.progress.closed == 1


def test_only_the_first_process_writes_and_episodes_are_asked_for(tmp_path, made, monkeypatch):
    with Recorder(tmp_path / "first", 9) as recorder:
        recorder.write(1, loss(1), [{"question": "q"}])
    assert not (tmp_path / "first" / "episodes").exists() and not made
    monkeypatch.setattr(recorders.jax, "process_index", lambda: 1)
    with Recorder(tmp_path / "second", 9, episodes=True, wandb="reading") as recorder:
        recorder.write(1, loss(1), [{"question": "q"}])
        assert recorder.tail() == []
    assert not (tmp_path / "second").exists() and not made
