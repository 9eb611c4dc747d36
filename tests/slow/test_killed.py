"""Tests that a run that is killed or told to stop resumes as if it had not been interrupted.

Processes and signals are real; signals are sent at fault points (runtime/fault_injection.py).
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from spell_jax.runtime import fault_injection
from spell_jax.runtime.files import hashes
from spell_jax.runtime.files.episodes import read_episodes
from spell_jax.runtime.hosts.preemption import EXIT_CODE
from tests import noise
from tests.slow import killed
from tests.slow.killed import STEP

KILLED = -signal.SIGKILL
QUESTION = 5  # of a step's nine or eighteen
PHASES = ("proposed", "answered", "verified")  # passed once per question; others once per step


def play(
    policy: pathlib.Path, workdir: pathlib.Path, fault: str = "", how: str = "", **settings
) -> tuple[int, str]:
    """Run in a process of its own; return (exit code, standard error)."""
    command = [sys.executable, "-m", "tests.slow.killed", str(policy), str(workdir)]
    ended = subprocess.run(
        [*command, json.dumps(settings), how],
        env=os.environ | {fault_injection.VARIABLE: fault},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        timeout=600,
    )
    return ended.returncode, ended.stderr


def expect(
    code: int, resumed: int, policy: pathlib.Path, workdir: pathlib.Path, *fault: str, **settings
) -> str:
    """Run until a fault and check the resumed step (0: none); return the run's standard error."""
    exit_code, error = play(policy, workdir, *fault, **settings)
    assert exit_code == code, error[-3000:]
    start_line = f"resumed at step {resumed}\n" if resumed else "begins with the weights of"
    assert start_line in error, (fault, error[-3000:])
    return error


def passings(point: str, uninterrupted_run: pathlib.Path, step: int = STEP) -> int:
    """Count a point's passings from the run's start to the middle of a step."""
    if point not in PHASES:
        return step
    return sum(number < step for number, _ in read_episodes(uninterrupted_run)) + QUESTION


def checkpoint_files(workdir: pathlib.Path) -> set[str]:
    """Return the names of the files that show how far the save of STEP came."""
    folder = workdir / "checkpoints"
    return {path.name for path in folder.iterdir()} | {
        path.parent.name + "!" for path in folder.glob(f"*/{hashes.FILE}")
    }


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


@pytest.fixture(scope="module")
def uninterrupted_run(policy, tmp_path_factory) -> pathlib.Path:
    """Return the workdir of an uninterrupted run."""
    workdir = tmp_path_factory.mktemp("whole")
    expect(0, 0, policy, workdir)
    return workdir


# -------------------------------------------------------------------------------------------- kill


def test_run_killed_at_every_point_ends_bit_identical(policy, uninterrupted_run, tmp_path) -> None:
    """Run in one workdir, with processes that are killed in turn, except for the last.

    Each is killed in the step after the last saved one. The first is killed one step later, when
    metrics and episodes of that step are written.
    """
    expect(KILLED, 0, policy, tmp_path, f"updated:{STEP + 1}", checkpoint_every=3)
    for point in (*PHASES, "rolled_out", "updated"):
        expect(KILLED, 3, policy, tmp_path, f"{point}:{QUESTION if point in PHASES else 1}")
    # The checkpoint of step 3 stays until the checkpoint of step 4 is whole, with its hashes ("!").
    expect(KILLED, 3, policy, tmp_path, "saving:1", f"hold:{STEP}")
    assert checkpoint_files(tmp_path) == {"3", "3!", "4.orbax-checkpoint-tmp"}
    expect(KILLED, 3, policy, tmp_path, "written:1")
    assert checkpoint_files(tmp_path) == {"3", "3!", "4"}
    expect(KILLED, 3, policy, tmp_path, "saved:1")
    assert checkpoint_files(tmp_path) == {"3", "3!", "4", "4!"}
    expect(0, 4, policy, tmp_path)
    killed.assert_same_run(killed.make_config(policy), tmp_path, uninterrupted_run)


@pytest.mark.long
@pytest.mark.parametrize("point", fault_injection.TRAINING_POINTS)
def test_run_killed_in_the_fourth_step_ends_bit_identical(
    point, policy, uninterrupted_run, tmp_path
) -> None:
    """Run three steps and a part of the fourth in one process, the rest in another."""
    fault = (
        f"{point}:{passings(point, uninterrupted_run)}",
        f"hold:{STEP}" if point == "saving" else "",
    )
    expect(KILLED, 0, policy, tmp_path, *fault)
    expect(0, STEP if point == "saved" else STEP - 1, policy, tmp_path)
    killed.assert_same_run(killed.make_config(policy), tmp_path, uninterrupted_run)


@pytest.mark.long
@pytest.mark.parametrize("point", fault_injection.TRAINING_POINTS)
def test_run_killed_in_the_first_step_ends_bit_identical(
    point, policy, uninterrupted_run, tmp_path
) -> None:
    """Kill the run in its first step; only at "saved" does a checkpoint exist."""
    expect(KILLED, 0, policy, tmp_path, f"{point}:1", "hold:1" if point == "saving" else "")
    expect(0, int(point == "saved"), policy, tmp_path)
    killed.assert_same_run(killed.make_config(policy), tmp_path, uninterrupted_run)


# ----------------------------------------------------------------------------------------- SIGTERM


def test_run_saves_on_sigterm_and_resumes_bit_identically(
    policy, uninterrupted_run, tmp_path
) -> None:
    """Send SIGTERM to a run that otherwise saves rarely.

    It arrives in the middle of a rollout, which saves the step before, or after an update, which
    saves that step. A second SIGTERM ends a hanging save at once.
    """
    rarely = {"checkpoint_every": 100}
    fault = f"answered:{passings('answered', uninterrupted_run)}:term"
    error = expect(EXIT_CODE, 0, policy, tmp_path, fault, **rarely)
    assert "SIGTERM: will stop" in error and "ends at once" not in error
    assert checkpoint_files(tmp_path) == {"3", "3!"}

    patient = {"preemption_limit_s": 3600.0}
    error = expect(
        EXIT_CODE, 3, policy, tmp_path, "rolled_out:1:term", "hang:1", **rarely, **patient
    )
    assert "a second SIGTERM: ends at once" in error
    assert checkpoint_files(tmp_path) == {"3", "3!"}

    error = expect(EXIT_CODE, 3, policy, tmp_path, "updated:1:term", **rarely)
    assert "ends at once" not in error
    assert checkpoint_files(tmp_path) == {"4", "4!"}
    expect(0, 4, policy, tmp_path, **rarely)
    killed.assert_same_run(killed.make_config(policy), tmp_path, uninterrupted_run)


@pytest.mark.long
def test_run_that_hangs_after_sigterm_ends_at_the_time_limit(
    policy, uninterrupted_run, tmp_path
) -> None:
    """The run hangs where it should save, so the previous checkpoint is resumed."""
    short = {"preemption_limit_s": 0.5}
    fault = f"verified:{passings('verified', uninterrupted_run)}:term", "hang:0"
    error = expect(EXIT_CODE, 0, policy, tmp_path, *fault, **short)
    assert "not ended within 0.5 s: ends at once" in error
    expect(0, 3, policy, tmp_path)
    killed.assert_same_run(killed.make_config(policy), tmp_path, uninterrupted_run)


@pytest.mark.long
@pytest.mark.parametrize("point", fault_injection.TRAINING_POINTS)
def test_run_stopped_at_any_point_resumes_bit_identically(
    point, policy, uninterrupted_run, tmp_path
) -> None:
    expect(EXIT_CODE, 0, policy, tmp_path, f"{point}:{passings(point, uninterrupted_run)}:term")
    code, error = play(policy, tmp_path)
    assert code == 0, error[-3000:]
    # A notice in the background of a step is seen at the end of a phase of the next step.
    assert any(f"resumed at step {step}\n" in error for step in (STEP - 1, STEP, STEP + 1))
    killed.assert_same_run(killed.make_config(policy), tmp_path, uninterrupted_run)
