"""Tests of training runs with a disk that is full for a while, or a workdir that is taken away.

Runs are processes; the small disk is a tmpfs, which needs root.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from spell_jax.runtime.files import hashes
from spell_jax.runtime.files.episodes import episode_files
from spell_jax.runtime.log.metrics import read_metrics
from tests import noise, small_disk
from tests.paths import ROOT
from tests.slow import killed

DISK_MIB = 64
FULL_S = 3.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


@pytest.fixture(scope="module")
def uninterrupted_run(policy, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("whole")
    assert play(policy, workdir)[0] == 0
    return workdir


@pytest.fixture
def disk(tmp_path) -> Iterator[pathlib.Path]:
    with small_disk.mounted(tmp_path / "disk", f"{DISK_MIB}m") as folder:
        yield folder


def play(
    policy: pathlib.Path,
    workdir: pathlib.Path,
    disturb: Callable[[pathlib.Path], None] = lambda workdir: None,
) -> tuple[int, str]:
    """Run, and disturb after the first complete checkpoint; return (exit code, standard error)."""
    error = workdir.parent.parent / f"{workdir.name}_error"
    temporary = workdir.parent.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.slow.killed", str(policy), str(workdir), "{}", "free"]
    with error.open("w") as out:
        run = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(temporary)},
            stdout=subprocess.DEVNULL,
            stderr=out,
        )
        while run.poll() is None and not list(workdir.glob(f"checkpoints/*/{hashes.FILE}")):
            time.sleep(0.1)
        if run.poll() is None:
            disturb(workdir)
        run.wait(600)
    return run.returncode, error.read_text(errors="replace")


def fill_for_seconds(workdir: pathlib.Path) -> None:
    ballast = workdir.parent / "ballast"
    end = time.monotonic() + FULL_S
    while time.monotonic() < end:  # deleted checkpoints free some space
        try:
            with ballast.open("ab", buffering=0) as file:
                file.write(bytes(4096))
        except OSError:
            time.sleep(0.01)
    ballast.unlink()


@pytest.mark.long
def test_run_on_a_disk_that_is_full_for_seconds_ends_bit_identical(
    policy, uninterrupted_run, disk
) -> None:
    code, error = play(policy, disk / "run", fill_for_seconds)
    assert code == 0, error[-3000:]
    assert "No space left on device" in error
    killed.assert_same_run(killed.make_config(policy), disk / "run", uninterrupted_run)


def rename(workdir: pathlib.Path) -> None:
    workdir.rename(workdir.with_name("renamed"))


def remove(workdir: pathlib.Path) -> None:
    """Remove the folder at once; a run may write to it while its files are deleted one by one."""
    rename(workdir)
    shutil.rmtree(workdir.with_name("renamed"), ignore_errors=True)


@pytest.mark.long
@pytest.mark.parametrize("disturb", [remove, rename])
def test_run_without_its_workdir_ends_with_one_line(
    policy, uninterrupted_run, tmp_path, disturb
) -> None:
    """The line names a folder from which the run goes on, and best/ is made there."""
    workdir = tmp_path / "a" / "run"
    code, error = play(policy, workdir, disturb)
    assert code == 2 and "Traceback" not in error, error[-3000:]
    line = error.strip().splitlines()[-1]
    assert line.startswith("error: ") and "was removed or renamed" in line
    assert not workdir.exists()
    fallback = pathlib.Path(line.partition("go on from there with --workdir=")[2])
    assert fallback.parent == tmp_path / "temporary"
    code, error = play(policy, fallback)
    assert code == 0, error[-3000:]
    assert f"these steps ended in {workdir}" in error
    lines = list(map(noise.steady, read_metrics(fallback)))
    assert lines == list(map(noise.steady, read_metrics(uninterrupted_run)))
    killed.assert_same_state(killed.make_config(policy), fallback, uninterrupted_run)
    first = min(episode_files(fallback))
    assert f"no episodes of steps 1{f'-{first - 1}' if first > 2 else ''};" in error
    assert (fallback / "best" / "config.json").exists()
