"""Tests of a run's log: no waiting for a slow disk, and times that add up."""

from __future__ import annotations

import json
import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from spell_jax.runtime.files.episodes import read_episodes
from spell_jax.runtime.log import metrics as runtime_metrics
from spell_jax.runtime.log import run_logger as run_logger
from spell_jax.runtime.log.metrics import Metrics, read_metrics
from spell_jax.runtime.log.run_logger import (
    PhaseTimer,
    RunLogger,
    device_memory,
    explain_all_empty,
)


def loss(value: float) -> Metrics:
    metrics = Metrics()
    metrics.add("train/loss", value)
    return metrics


def test_slow_disk_does_not_delay_steps(tmp_path, monkeypatch):
    write_lines, gate = runtime_metrics.write_lines, threading.Event()

    def slow(path, lines):
        assert gate.wait(60)
        write_lines(path, lines)

    with RunLogger(tmp_path, 9, episodes=1000) as logger:
        monkeypatch.setattr(runtime_metrics, "write_lines", slow)
        for step in (1, 2, 3):
            logger.write(step, loss(step), [{"question": f"q{step}"}])
            lines = [json.loads(line) for line in logger.tail()]
            assert [line["step"] for line in lines] == list(range(1, step + 1))
        assert read_metrics(tmp_path) == [] and not list(read_episodes(tmp_path))
        threading.Timer(0.1, gate.set).start()
        logger.flush()
        lines = read_metrics(tmp_path)
        assert [line["train/loss"] for line in lines] == [1, 2, 3]
        assert [step for step, _ in read_episodes(tmp_path)] == [1, 2, 3]
        (events,) = (tmp_path / "tensorboard").iterdir()
        assert events.read_bytes().count(b"train/loss") == 3


def test_run_of_empty_updates_alone_is_explained():
    hints = {"rollout/bad_format": "warm-start it", "rollout/accepted": "all equal"}
    lines: list[dict] = [
        {"train/empty_update": 1.0, "rollout/bad_format": 0.9, "rollout/accepted": 0.1},
        {"train/empty_update": 1.0, "rollout/bad_format": 0.5, "rollout/accepted": 0.5},
    ]
    assert explain_all_empty(lines, hints) == (
        "all 2 updates were empty, the weights did not change. rollout/bad_format = 0.70: "
        "warm-start it"
    )
    assert explain_all_empty(lines[:1], {}) == (
        "the only update was empty, the weights did not change."
    )
    # A metric of one line is a mean of that line.
    rare = [{**lines[0], "rollout/accepted": None}, {**lines[1], "rollout/accepted": 0.8}]
    assert "rollout/accepted = 0.80: all equal" in explain_all_empty(rare, hints)
    assert explain_all_empty(lines, {}).endswith("did not change.")
    assert not explain_all_empty([], hints)
    assert not explain_all_empty([*lines, {"train/empty_update": 0.0}], hints)


@pytest.mark.parametrize(
    ("shares", "cause"),
    [
        ({"overlong": 0.9, "accepted": 0.1}, r"rollout/overlong = 0\.90: too long$"),
        ({"accepted": 1.0}, r"rollout/accepted = 1\.00: all equal$"),
    ],
)
def test_third_empty_update_in_a_row_is_explained(tmp_path, caplog, shares, cause):
    hints = {"rollout/overlong": "too long", "rollout/accepted": "all equal"}
    with RunLogger(tmp_path, 9, hints=hints) as logger:
        for step, empty in enumerate((1, 1, 0, 1, 1, 1, 1), 1):
            metrics = Metrics()
            metrics.add("train/empty_update", empty)
            for name, share in shares.items():
                metrics.add(f"rollout/{name}", share)
            assert not caplog.text or step > 6
            logger.write(step, metrics)
    (record,) = caplog.records
    assert re.search(cause, record.getMessage())


def test_write_copies_episodes_immediately(tmp_path, monkeypatch):
    gate, episode = threading.Event(), {"question": "then"}
    with RunLogger(tmp_path, 9, episodes=1000) as logger:
        logger._background.submit(gate.wait)
        logger.write(1, loss(1), (dict(episode) for _ in range(1)))
        episode["question"] = "now"
        gate.set()
    ((_, record),) = read_episodes(tmp_path)
    assert record["question"] == "then"


def test_full_disk_is_reported_by_flush_and_next_write(tmp_path, monkeypatch):
    def full(path, lines):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), RunLogger(tmp_path, 9) as logger:
        monkeypatch.setattr(runtime_metrics, "write_lines", full)
        logger.write(1, loss(1))
        with pytest.raises(OSError, match="No space left"):
            logger.flush()
        with pytest.raises(OSError, match="No space left"):
            logger.write(2, loss(2))
        # The tail for a checkpoint still has both steps.
        assert [json.loads(line)["step"] for line in logger.tail()] == [1, 2]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_second_is_counted_in_one_phase():
    clock = Clock()
    timer = PhaseTimer(clock)
    clock.now += 1
    timer.enter("rollout")
    clock.now += 10
    timer.reassign({"questioner": 4.0, "responder": 3.0})
    timer.enter("update")
    clock.now += 20
    timer.reassign({"responder": 5.0, "rollout": 2.0})  # rollout meanwhile
    assert timer.take() == {
        "start": 1.0,
        "rollout": 5.0,
        "questioner": 4.0,
        "responder": 8.0,
        "update": 13.0,
    }
    clock.now += 2
    timer.enter("rollout")
    clock.now += 1
    timer.enter("update")
    assert timer.take() == {"update": 2.0, "rollout": 1.0}


def test_seconds_reassigned_to_the_current_phase_change_nothing():
    clock = Clock()
    timer = PhaseTimer(clock)
    timer.enter("rollout")
    clock.now += 3
    timer.reassign({"rollout": 2.0})
    assert timer.take() == {"start": 0.0, "rollout": 3.0}


def test_phase_times_add_up_to_the_step_time(tmp_path):
    timer, began = PhaseTimer(), time.monotonic()
    with RunLogger(tmp_path, 9, timer=timer) as logger:
        for step in (1, 2):
            for phase in ("rollout", "update", "save"):
                logger.enter(phase, step - 1)
                time.sleep(0.02)
            timer.reassign({"responder": 0.01})
            logger.write(step, loss(step))
        gone = time.monotonic() - began
    lines = read_metrics(tmp_path)
    for line in lines:
        parts = {n: v for n, v in line.items() if n.startswith("time/seconds/")}
        assert {"rollout", "update", "save", "responder"} <= {n.split("/")[-1] for n in parts}
        assert sum(parts.values()) == pytest.approx(line["time/step_seconds"])
        assert all(parts[f"time/seconds/{name}"] >= 0.01 for name in ("rollout", "update", "save"))
    assert gone - 0.02 < sum(line["time/step_seconds"] for line in lines) <= gone


def test_metrics_line_includes_process_statistics(tmp_path):
    with RunLogger(tmp_path, 1) as logger:
        logger.write(1, loss(1))
    (line,) = read_metrics(tmp_path)
    assert line["process/resident_mib"] > 10 and line["process/programs"] == 0


def device(**stats: int) -> Any:
    return SimpleNamespace(memory_stats=lambda: stats or None)


def test_device_memory_is_the_maximum_over_devices():
    full = [
        device(bytes_in_use=2**20, peak_bytes_in_use=2**23),
        device(bytes_in_use=2**21, peak_bytes_in_use=2**22),
    ]
    assert device_memory(full) == {"device_mib": 2, "device_peak_mib": 8}
    assert device_memory([device(bytes_in_use=2**20)]) == {"device_mib": 1}
    assert device_memory([device()]) == device_memory(jax.local_devices()[:1]) == {}


def test_progress_keeps_the_latest_numbers_across_phases(tmp_path):
    shown = []
    with RunLogger(tmp_path, 9, finished_steps=2) as logger:
        logger.progress.update = lambda *arguments: shown.append(
            (arguments[0], arguments[1], dict(arguments[2]))
        )
        logger.enter("rollout", 2)
        logger.enter("update", 2, {"solved": 0.5})
        logger.enter("save", 3)
    assert shown == [
        (2, "rollout", {}),
        (2, "update", {"solved": 0.5}),
        (3, "save", {"solved": 0.5}),
    ]


class Double:
    """Stand-in for Wandb, the progress line or the process statistics."""

    def __init__(self, *arguments):
        self.arguments, self.closed = arguments, 0

    def write(self, step, numbers):
        pass

    def close(self):
        self.closed += 1


@pytest.fixture
def wandb_doubles(monkeypatch) -> list[Double]:
    """Replace Wandb by stand-ins; return the list of stand-ins."""
    doubles: list[Double] = []
    monkeypatch.setattr(
        run_logger, "Wandb", lambda *arguments: doubles.append(Double(*arguments)) or doubles[-1]
    )
    return doubles


def test_exit_closes_wandb_progress_and_process_stats(tmp_path, wandb_doubles):
    logger = RunLogger(tmp_path, 9, 3, wandb="reading", config={"seed": 1})
    logger._process_stats.close()
    logger.progress, logger._process_stats = Double(), Double()  # type: ignore[assignment]
    with logger:
        assert logger.progress.closed == wandb_doubles[0].closed == 0
    assert wandb_doubles[0].arguments == ("reading", tmp_path, 3, {"seed": 1})
    assert wandb_doubles[0].closed == logger.progress.closed == logger._process_stats.closed == 1


def test_failed_run_is_not_finished_in_wandb(tmp_path, wandb_doubles):
    """wandb reports the failure itself; the progress line is still closed."""
    logger = RunLogger(tmp_path, 9, wandb="reading")
    logger.progress = Double()  # type: ignore[assignment]
    with pytest.raises(KeyError), logger:
        raise KeyError("a mistake")
    assert wandb_doubles[0].closed == 0 and logger.progress.closed == 1


def test_only_process_0_writes_and_episodes_are_optional(tmp_path, wandb_doubles, monkeypatch):
    with RunLogger(tmp_path / "first", 9) as logger:
        logger.write(1, loss(1), [{"question": "q"}])
    assert not (tmp_path / "first" / "episodes").exists() and not wandb_doubles
    monkeypatch.setattr(run_logger.jax, "process_index", lambda: 1)
    with RunLogger(tmp_path / "second", 9, episodes=True, wandb="reading") as logger:
        logger.write(1, loss(1), [{"question": "q"}])
        assert logger.tail() == []
    assert not (tmp_path / "second").exists() and not wandb_doubles
