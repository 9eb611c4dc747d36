"""A small run of the trainer on one device, which SPELL_FAULT may end.

python -m tests.slow.killed POLICY WORKDIR [SETTINGS [hold:STEP | hang:SIGNALS | free]]

SETTINGS are config fields by dotted name, in JSON. Saves before step STEP are waited for, so that
it is known which one is resumed; not with "free". With "hold" the save of that step never ends.
With "hang" the trainer hangs where it would save after a notice to stop, having sent itself SIGNALS
more SIGTERMs.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import threading
from typing import Any

import jax
import pytest

from spell_jax.runtime import entry
from spell_jax.runtime import setup as start
from spell_jax.runtime.files.checkpoint import Checkpoints
from spell_jax.runtime.hosts.preemption import Preemption
from spell_jax.runtime.log.metrics import read_metrics
from spell_jax.trainer import loop
from spell_jax.trainer.build import Run, make_run
from spell_jax.trainer.state import restore_or_init
from tests import noise

STEPS = 6
STEP = 4  # in which runs are ended


def make_config(policy: pathlib.Path, **settings):
    """Make the run's config: each step is saved and one checkpoint kept (and the best).

    The fourth step renews the frozen reader.
    """
    options = {"checkpoint_every": 1, "keep_checkpoints": 1, "algorithm.reader.refresh": 4}
    return noise.small_config(policy, **({"steps": STEPS} | options | settings))


# ---------------------------------------------------------------------------------- Output of a run


def newest_checkpoint(config, workdir: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (arrays, host state) of a run's newest checkpoint; "step" is the step."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.use_one_device(monkeypatch)
        run: Run = make_run(config)
    with Checkpoints(workdir) as checkpoints:
        states, step, host_state = restore_or_init(run, checkpoints)
    assert step > 0
    fields = {"algorithm": host_state.algorithm, "best": host_state.best, "step": step}
    return states.tree(), fields


def assert_same_state(config, workdir: pathlib.Path, other_workdir: pathlib.Path) -> None:
    """Assert that the newest checkpoints of two runs are equal to the bit.

    These are weights, optimizer, frozen reader, memory, data position and best score.
    """
    (arrays, state), (expected_arrays, expected_state) = (
        newest_checkpoint(config, run) for run in (workdir, other_workdir)
    )
    assert state == expected_state, "host state"
    assert state["algorithm"]["memory"]["clusters"], (
        "a memory that holds nothing is easily the same"
    )
    leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
    for (path, array), expected_array in zip(leaves, jax.tree.leaves(expected_arrays), strict=True):
        name = jax.tree_util.keystr(path)
        assert (
            array.dtype == expected_array.dtype and array.tobytes() == expected_array.tobytes()
        ), name


def assert_same_run(config, workdir: pathlib.Path, other_workdir: pathlib.Path) -> None:
    """Assert equal output of two runs of STEPS steps, but for times and the list of checkpoints."""
    lines, expected_lines = (
        list(map(noise.steady, read_metrics(run))) for run in (workdir, other_workdir)
    )
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines == expected_lines, "metrics"
    for name in ("episodes", "policy", "best"):
        assert files(workdir / name) == files(other_workdir / name), name
    assert_same_state(config, workdir, other_workdir)


def files(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ------------------------------------------------------------------------------------------ Program


def wait_for_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    save = Checkpoints.save

    def save_and_wait(self: Checkpoints, step: int, *arguments, **options) -> bool:
        is_written = save(self, step, *arguments, **options)
        if step < STEP:
            self.wait()
        return is_written

    monkeypatch.setattr(Checkpoints, "save", save_and_wait)


def hang(signals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    should_stop = Preemption.should_stop

    def stop_or_hang(self: Preemption) -> bool:
        if not should_stop(self):
            return False
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
        while True:
            signal.pause()

    monkeypatch.setattr(Preemption, "should_stop", stop_or_hang)


def hold(step: int) -> None:
    """Block Orbax at the rename of a step's temporary folder: the step's name never appears."""
    last = f"/checkpoints/{step}.orbax-checkpoint-tmp"

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and os.fspath(arguments[0]).endswith(last):
            threading.Event().wait()

    sys.addaudithook(audit)


def main() -> None:
    policy, workdir, settings, how = [*sys.argv[1:], *("{}", "")[len(sys.argv) - 3 :]]
    config = make_config(pathlib.Path(policy), **json.loads(settings))
    jax.config.update("jax_disable_most_optimizations", True)  # less to compile
    start.setup()
    what, _, number = how.partition(":")
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.use_one_device(monkeypatch)
        noise.give_meaning(monkeypatch)
        noise.skip_plots(monkeypatch)
        if what != "free":
            wait_for_saves(monkeypatch)
        if what == "hang":
            hang(int(number), monkeypatch)
        elif what == "hold":
            hold(int(number))
        with entry.user_errors():
            loop.train(config, pathlib.Path(workdir))


if __name__ == "__main__":
    main()
