"""Tests that a run outlives a loss of power: its disk is copied while it runs.

A run writes to an ext4 image that is mounted through a loop device. A copy of the image's file is
what the disk holds if the power fails at that moment. The copy is mounted, which replays its
journal, and must hold every checkpoint that the run had announced, with the metrics and episodes of
its steps. The tests need root and loop devices.

    python -m tests.slow.test_power_loss WORKDIR [contents | names | tree]    # prints its steps

The run lacks the fsync of files, of folders, or of Orbax's files if that is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from spell_jax.runtime import setup
from spell_jax.runtime.files import durable, jsonl
from spell_jax.runtime.files.checkpoint import Checkpoints
from spell_jax.runtime.files.episodes import episode_files, read_episodes
from spell_jax.runtime.log.metrics import Metrics, read_metrics
from spell_jax.runtime.log.run_logger import RunLogger
from tests import noise
from tests.paths import ROOT
from tests.slow import killed

IMAGE_MIB = 64
STEPS = 10
SNAPSHOTS = 10
CONFIG = {"steps": STEPS}


class Disk:
    """An ext4 image mounted at `folder`."""

    def __init__(self, image: pathlib.Path, folder: pathlib.Path):
        self.image, self.folder = image, folder

    @contextlib.contextmanager
    def mounted(self) -> Iterator[pathlib.Path]:
        self.folder.mkdir(exist_ok=True)
        subprocess.run(["mount", "-o", "loop", self.image, self.folder], check=True)
        try:
            yield self.folder
        finally:
            subprocess.run(["umount", self.folder], check=True)

    def snapshot(self, target: pathlib.Path) -> None:
        """Copy the image as of one moment: two equal copies in a row have no write in between."""
        content = self.image.read_bytes()
        while (later := self.image.read_bytes()) != content:
            content = later
        target.write_bytes(content)


@pytest.fixture
def disk(tmp_path) -> Iterator[Disk]:
    if os.geteuid() or not shutil.which("mkfs.ext4"):
        pytest.skip("mounting an image needs root and mkfs.ext4")
    disk_image = Disk(tmp_path / "disk.img", tmp_path / "mounted")
    with disk_image.image.open("wb") as file:
        file.truncate(IMAGE_MIB << 20)
    subprocess.run(["mkfs.ext4", "-q", disk_image.image], check=True)
    try:
        with disk_image.mounted():
            pass
    except subprocess.CalledProcessError:
        pytest.skip("no loop device can be mounted here")
    yield disk_image


def take_snapshots(
    disk: Disk, command: list[str], number: int, pause_s: float
) -> list[tuple[pathlib.Path, int]]:
    """Copy the disk while a command runs; return (copy, last step printed before it) pairs."""
    output, snapshots = disk.image.parent / "said", []
    with disk.mounted(), output.open("w") as out:
        run = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True)
        while run.poll() is None:
            lines = output.read_text().split("\n")[:-1]
            if lines and len(snapshots) < number:
                copy = disk.image.with_name(f"copy_{len(snapshots)}.img")
                disk.snapshot(copy)
                snapshots.append((copy, int(lines[-1])))
            time.sleep(pause_s)
        error = run.stderr.read() if run.stderr else ""
    assert run.returncode == 0, error
    return snapshots


def losses(copies: list[tuple[pathlib.Path, int]]) -> list[str]:
    """Describe the output that the copies lack."""
    descriptions = []
    for image, announced in copies:
        folder = image.with_suffix("")
        with Disk(image, folder).mounted():
            descriptions += [
                f"after {announced}: {text}" for text in lacks(folder / "run", announced)
            ]
    return descriptions


def lacks(workdir: pathlib.Path, announced: int) -> Iterator[str]:
    try:
        with Checkpoints(workdir) as checkpoints:
            step = checkpoints.newest_intact()
            if step is None or step < announced:
                yield f"the newest checkpoint is {step}"
                return
            arrays, saved = checkpoints.restore(step, arrays_of(0))
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
        return
    if not np.array_equal(arrays["w"], arrays_of(step)["w"]):
        yield "wrong weights"
    lines = [line["step"] for line in read_metrics(workdir)]
    if lines[:step] != list(range(1, step + 1)) or len(saved["metrics"]) != step:
        yield f"metrics of {lines}"
    if list(episode_files(workdir))[:step] != list(range(1, step + 1)):
        yield f"episodes of {list(episode_files(workdir))}"
    if [n for n, _ in read_episodes(workdir) if n <= step] != list(range(1, step + 1)):
        yield "empty episodes"
    if not (workdir / "config.json").read_text() or not jsonl.read_json(workdir / "config.json"):
        yield "empty config.json"


def arrays_of(step: int) -> dict:
    return {"w": jnp.asarray(np.random.default_rng(step).random((64, 64)), jnp.float32)}


def run_command(disk: Disk, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "tests.slow.test_power_loss", str(disk.folder / "run")]
    return [*command, *arguments]


@pytest.mark.slow
def test_no_announced_step_is_lost(disk) -> None:
    copies = take_snapshots(disk, run_command(disk), SNAPSHOTS, 0.3)
    assert len(copies) >= 5 and {0, STEPS} - {step for _, step in copies}
    assert losses(copies) == []


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["contents", "names", "tree"])
def test_steps_are_lost_without_fsync(disk, missing) -> None:
    """Show that the snapshots see what each missing fsync loses."""
    copies = take_snapshots(disk, run_command(disk, missing), SNAPSHOTS, 0.3)
    assert losses(copies)


@pytest.mark.long
def test_training_resumes_from_a_snapshot_to_the_bit(disk, tmp_path) -> None:
    """The trainer itself, resumed from the copies; it ends like a run without a loss of power."""
    policy = noise.save_policy(tmp_path / "noise")
    command = [sys.executable, "-m", "tests.slow.killed", str(policy)]
    subprocess.run([*command, str(tmp_path / "whole")], cwd=ROOT, check=True)
    copies_folder = disk.image.with_name("copies")
    copies_folder.mkdir()
    with disk.mounted():
        run = subprocess.Popen([*command, str(disk.folder / "run")], cwd=ROOT)
        copies, steps = [], set()
        while run.poll() is None:
            time.sleep(0.5)
            hash_files = {*(disk.folder / "run" / "checkpoints").glob("*/hashes.txt")}
            if hash_files and hash_files != steps:
                steps = hash_files
                copies.append(copies_folder / f"{len(copies)}.img")
                disk.snapshot(copies[-1])
        assert run.returncode == 0
    assert len(copies) >= 2
    for image in (copies[0], copies[-1]):
        with Disk(image, image.with_suffix("")).mounted() as folder:
            (folder / "run" / "lock.json").unlink(missing_ok=True)  # of another boot after a loss
            subprocess.run([*command, str(folder / "run")], cwd=ROOT, check=True)
            killed.assert_same_run(killed.make_config(policy), folder / "run", tmp_path / "whole")


def main(workdir: str, missing: str = "") -> None:
    if missing == "contents":
        durable.os = types.SimpleNamespace(**vars(os) | {"fsync": lambda descriptor: None})
    elif missing:
        setattr(durable, {"names": "sync", "tree": "sync_tree"}[missing], lambda path: None)
    folder = pathlib.Path(workdir)
    folder.mkdir()
    setup.write_config(CONFIG, epath.Path(folder))
    with Checkpoints(folder, keep=1) as store, RunLogger(folder, STEPS, episodes=1000) as logger:
        for step in range(1, STEPS + 1):
            logger.write(step, Metrics(), [{"text": json.dumps(step)}])
            logger.flush()
            store.save(step, arrays_of(step), logger.state(), force=True)
            print(step, flush=True)
            time.sleep(0.3)


if __name__ == "__main__":
    main(*sys.argv[1:])
