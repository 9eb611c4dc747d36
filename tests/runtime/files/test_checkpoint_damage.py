"""Tests of checkpoints on failing disks.

Damaged steps are skipped, failed saves are retried and then written to another folder, and two
processes agree on the step to restore.

python -m tests.runtime.files.test_checkpoint_damage PORT PROCESS WORKDIR       # prints JSON
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from spell_jax.runtime.files import hashes
from spell_jax.runtime.files.checkpoint import Checkpoints, DamagedError, SaveError
from spell_jax.runtime.files.episodes import EpisodeWriter
from spell_jax.runtime.files.jsonl import read_json, write_json
from tests.runtime.files.test_durable import Calls
from tests.runtime.hosts.test_distributed import connect, run_two

FOLDER = "checkpoints"


def arrays_of(step: int) -> dict[str, Any]:
    """Return random arrays. They do not compress: their files have more than a few bytes."""
    return {"policy": {"w": jax.random.normal(jax.random.key(step), (64, 8))}, "n": jnp.ones(3)}


def assert_restores(checkpoints: Checkpoints, step: int) -> None:
    arrays, host_state = checkpoints.restore(step, arrays_of(0))
    assert host_state == {"step": step}
    expected_arrays = arrays_of(step)
    for leaf, expected_leaf in zip(
        jax.tree.leaves(arrays), jax.tree.leaves(expected_arrays), strict=True
    ):
        assert np.asarray(leaf).tobytes() == np.asarray(expected_leaf).tobytes()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """Save steps 1 and 2 of a run."""
    workdir = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(workdir)
    for step in (1, 2):
        checkpoints.save(step, arrays_of(step), {"step": step})
    checkpoints.close()
    return workdir


# ----------------------------------------------------------------------------------------- Damage

# Pattern of a kind of file -> minimum number of files. Names of array data are random.
KINDS = {
    "hashes.txt": 1,
    "_CHECKPOINT_METADATA": 1,
    "commit_success.txt": 1,
    "host/metadata": 1,
    "host/commit_success.txt": 1,
    "arrays/_METADATA": 1,
    "arrays/_sharding": 1,
    "arrays/commit_success.txt": 1,
    "arrays/manifest.ocdbt": 1,
    "arrays/array_metadatas/*": 1,
    "arrays/d/*": 1,
    "arrays/ocdbt.process_0/manifest.ocdbt": 1,
    "arrays/ocdbt.process_0/d/*": 2,
}


def test_kinds_cover_all_files_of_a_checkpoint(run_folder):
    step = run_folder / FOLDER / "2"
    files = {path for path in step.rglob("*") if path.is_file()}
    files_by_kind = {kind: set(step.glob(kind)) for kind in KINDS}
    assert set().union(*files_by_kind.values()) == files
    assert all(len(files_by_kind[kind]) >= least for kind, least in KINDS.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", ["missing", "truncated", "altered"])
def test_damaged_step_is_logged_skipped_and_replaced(run_folder, tmp_path, caplog, kind, damage):
    workdir = tmp_path / "run"
    for path in sorted((run_folder / FOLDER / "2").glob(kind)):
        shutil.copytree(run_folder, workdir)
        name = path.relative_to(run_folder / FOLDER / "2").as_posix()
        file = workdir / FOLDER / "2" / name
        content = file.read_bytes()
        if damage == "missing":
            file.unlink()
        elif damage == "truncated":
            file.write_bytes(content[:-1])
        else:
            middle = len(content) // 2
            file.write_bytes(
                content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            )
        caplog.clear()
        checkpoints = Checkpoints(workdir)
        assert checkpoints.newest_intact() == 1
        [record] = [r for r in caplog.records if r.name == "spell_jax.runtime.files.checkpoint"]
        assert record.levelno == logging.WARNING
        message_start = f"{workdir}/checkpoints/2 is skipped: {name}: "
        message_start += "truncated" if name == "hashes.txt" and damage == "altered" else damage
        assert record.getMessage().startswith(message_start)
        assert checkpoints.latest_step() == 1
        assert_restores(checkpoints, 1)
        with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 2"):
            checkpoints.restore(2, arrays_of(0))
        # A resumed run reaches this step again and replaces the damaged files.
        assert checkpoints.save(2, arrays_of(2), {"step": 2}, force=True)
        assert checkpoints.newest_intact() == 2
        assert_restores(checkpoints, 2)
        checkpoints.close()
        shutil.rmtree(workdir)


def make_unreadable(file: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make reads of a file fail with the error `number`."""
    real = open

    def fail(path, *args, **options):
        if os.fspath(path) == str(file):
            raise OSError(number, os.strerror(number), path)
        return real(path, *args, **options)

    monkeypatch.setattr("builtins.open", fail)
    monkeypatch.setattr("io.open", fail)


def put_folder(file: Path) -> None:
    file.unlink()
    (file / "inside").mkdir(parents=True)


def put_dangling_link(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.with_name("nowhere"))


def put_endless_link(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def put_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def put_endless_device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", ["hashes.txt", "arrays/_METADATA", "host/metadata"])
@pytest.mark.parametrize(
    "damage, text",
    [
        (put_pipe, "cannot be read (a pipe, a socket or a device)"),
        (put_endless_device, "cannot be read (a pipe, a socket or a device)"),
        (put_folder, "cannot be read (Is a directory)"),
        (put_endless_link, "cannot be read (Too many levels of symbolic links)"),
        (put_dangling_link, None),
        (errno.EIO, "cannot be read (Input/output error)"),
        (errno.EACCES, "cannot be read (Permission denied)"),
    ],
)
def test_unreadable_file_is_named_and_the_older_step_used(
    run_folder, tmp_path, caplog, monkeypatch, name, damage, text
):
    workdir = tmp_path / "run"
    shutil.copytree(run_folder, workdir)
    file = workdir / FOLDER / "2" / name
    with monkeypatch.context() as patches:
        if isinstance(damage, int):
            make_unreadable(file, patches, damage)
        else:
            damage(file)
        with Checkpoints(workdir) as checkpoints:
            assert checkpoints.newest_intact() == 1
            assert_restores(checkpoints, 1)
    no_file = "cannot be read (No such file or directory)" if name == "hashes.txt" else "missing"
    assert f"{workdir}/checkpoints/2 is skipped: {name}: {text or no_file}" in caplog.text
    if not isinstance(damage, int):  # the resumed run reaches this step again
        with Checkpoints(workdir) as checkpoints:
            assert checkpoints.newest_intact() == 1
            assert checkpoints.save(2, arrays_of(2), {"step": 2}, force=True)
            assert checkpoints.newest_intact() == 2
            assert_restores(checkpoints, 2)


@pytest.mark.parametrize("put", [put_dangling_link, put_endless_link, Path.unlink, None])
def test_step_that_is_no_folder_is_skipped_and_replaced(run_folder, tmp_path, caplog, put):
    workdir = tmp_path / "run"
    shutil.copytree(run_folder, workdir)
    step = workdir / FOLDER / "2"
    shutil.rmtree(step)
    step.write_text("")
    if put:
        put(step)
    with Checkpoints(workdir) as checkpoints:
        assert checkpoints.newest_intact() == 1
        assert (f"{step} is skipped: hashes.txt: " in caplog.text) == (put is not Path.unlink)
        assert checkpoints.save(2, arrays_of(2), {"step": 2}, force=True)
    with Checkpoints(workdir) as checkpoints:
        assert checkpoints.newest_intact() == 2
        assert_restores(checkpoints, 2)


def test_renamed_step_is_skipped_by_its_hashes(run_folder, tmp_path, caplog):
    """Weights of step 1 as step 7 would train steps 2 to 7 of the data again, or never."""
    workdir = tmp_path / "run"
    shutil.copytree(run_folder, workdir)
    shutil.copytree(workdir / FOLDER / "1", workdir / FOLDER / "7")
    checkpoints = Checkpoints(workdir)
    assert checkpoints.latest_step() == checkpoints.newest_intact() == 2
    text = "checkpoints/7 is skipped: hashes.txt: of step 1, the folder was renamed"
    assert text in caplog.text
    with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 7"):
        checkpoints.check_intact(7)


def test_damage_of_a_named_step_is_an_error(run_folder, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(run_folder, workdir)
    (workdir / FOLDER / "2" / "host" / "metadata").unlink()
    checkpoints = Checkpoints(workdir)
    checkpoints.check_intact(1)
    with pytest.raises(DamagedError, match=r"checkpoints/2: .*host/metadata: missing"):
        checkpoints.check_intact(2)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data())
def test_any_flipped_byte_or_truncation_is_detected(run_folder, data):
    folder = run_folder / FOLDER / "2"
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    path = folder / data.draw(st.sampled_from(names))
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    flip = data.draw(st.integers(0, 255))
    path.write_bytes(
        content[:at] + (bytes([content[at] ^ flip]) + content[at + 1 :] if flip else b"")
    )
    try:
        assert Checkpoints(run_folder).newest_intact() == 1
    finally:
        path.write_bytes(content)


def test_undamaged_step_is_intact_without_warnings(run_folder, caplog):
    checkpoints = Checkpoints(run_folder)
    assert checkpoints.newest_intact() == 2 and not caplog.records
    assert_restores(checkpoints, 2)


def test_error_lists_the_damage_if_no_step_is_intact(run_folder, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(run_folder, workdir)
    (workdir / FOLDER / "1" / "arrays" / "_METADATA").write_bytes(b"")
    (workdir / FOLDER / "2" / "host" / "metadata").unlink()
    with pytest.raises(DamagedError) as error:
        Checkpoints(workdir).newest_intact()
    first, *lines = str(error.value).splitlines()
    assert first == f"{workdir}/checkpoints: no step can be used:"
    assert lines[0] == "  step 2: host/metadata: missing"
    assert lines[1].startswith("  step 1: arrays/_METADATA: truncated to 0 of ")
    for step in "12":  # not restarted because of files that were removed
        (workdir / FOLDER / step / "hashes.txt").unlink()
    with pytest.raises(DamagedError, match=r"step 2: hashes\.txt: missing"):
        Checkpoints(workdir).newest_intact()


# ----------------------------------------------------------------------------------- Failing saves


class Disk:
    """A disk that can be full: this process then fails to write a file beyond 100 bytes."""

    def __init__(self) -> None:
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, self.limits[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


@pytest.fixture
def disk():
    disk = Disk()
    yield disk
    disk.free()


def test_failed_save_is_retried_with_backoff(tmp_path, disk):
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            disk.free()

    checkpoints = Checkpoints(tmp_path, retries=3, backoff_s=0.5, sleep=sleep)
    checkpoints.save(1, arrays_of(1), {"step": 1}, force=True)
    disk.fill()
    assert checkpoints.save(2, arrays_of(2), {"step": 2}, force=True)
    assert waits == [0.5, 1.0, 2.0]
    assert checkpoints.newest_intact() == 2
    assert_restores(checkpoints, 2)
    checkpoints.close()


def test_save_is_retried_if_writing_the_hashes_fails(tmp_path, monkeypatch):
    """By then Orbax has finished the step, and would reject a second save."""
    write, errors = hashes.write_hashes, [OSError(errno.ENOSPC, "full")]
    monkeypatch.setattr(
        hashes, "write_hashes", lambda *a: fail(errors.pop()) if errors else write(*a)
    )
    checkpoints = Checkpoints(tmp_path, retries=1, sleep=lambda _: None)
    assert checkpoints.save(1, arrays_of(1), {"step": 1}, force=True) and not errors
    assert checkpoints.newest_intact() == 1
    checkpoints.close()


def fail(error: Exception) -> None:
    raise error


def test_background_save_failure_is_logged_by_the_next_save(tmp_path, disk, caplog):
    checkpoints = Checkpoints(tmp_path, sleep=lambda _: pytest.fail())
    disk.fill()
    assert checkpoints.save(1, arrays_of(1), {"step": 1})
    assert checkpoints._pending and checkpoints._pending.job.exception()  # waits
    disk.free()
    assert checkpoints.save(2, arrays_of(2), {"step": 2})
    text = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("spell_jax"))
    assert f"{tmp_path}/checkpoints/1 could not be saved" in text and "File too large" in text
    assert "step 2 is saved instead" in text
    assert checkpoints._pending is None  # the save waited for this one
    assert checkpoints.newest_intact() == 2
    assert_restores(checkpoints, 2)
    checkpoints.close()


@pytest.mark.parametrize("call", ["wait", "close", "newest_intact"])
def test_background_save_failure_is_raised_by_waiting_calls(tmp_path, disk, call):
    checkpoints = Checkpoints(tmp_path)
    disk.fill()
    checkpoints.save(1, arrays_of(1), {"step": 1})
    with pytest.raises(SaveError, match=r"checkpoints/1 could not be saved: .*File too large"):
        getattr(checkpoints, call)()
    disk.free()
    assert checkpoints.latest_step() is None
    if call != "close":
        assert checkpoints.save(1, arrays_of(1), {"step": 1}, force=True)
        assert_restores(checkpoints, 1)


def remove_access(workdir: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make the creation of folders in the workdir fail with the error `number`."""
    mkdir = os.mkdir

    def fail(path, *args, **options):
        if os.fspath(path).startswith(f"{workdir}/"):
            raise OSError(number, os.strerror(number), path)
        mkdir(path, *args, **options)

    monkeypatch.setattr(os, "mkdir", fail)


def unmount(workdir: Path) -> None:
    """Remove the folder, and put a file in its place."""
    shutil.rmtree(workdir)
    workdir.write_text("")


@pytest.mark.parametrize(
    "number, message",
    [
        (errno.EACCES, "Permission denied"),
        (errno.ENOSPC, "No space left on device"),
        (errno.EHOSTUNREACH, "No route to host"),
        (None, "Not a directory"),
    ],
)
def test_failed_save_is_written_to_the_fallback_folder(tmp_path, monkeypatch, number, message):
    """A run resumes from the folder that the error names."""
    workdir, fallback, waits = tmp_path / "run", tmp_path / "other", []
    (fallback / "run_step3").mkdir(parents=True)  # of an earlier failure: must stay untouched
    options = {"retries": 2, "backoff_s": 1.0, "fallback": fallback, "sleep": waits.append}
    checkpoints = Checkpoints(workdir, **options)
    checkpoints.save(1, arrays_of(1), {"step": 1}, force=True)
    with monkeypatch.context() as patches:
        remove_access(workdir, patches, number) if number else unmount(workdir)
        with pytest.raises(SaveError) as error:
            checkpoints.save(3, arrays_of(3), {"step": 3})
    error_text = str(error.value)
    assert "could not be saved" in error_text and message in error_text
    assert "3 tries" in error_text and waits == [1.0, 2.0]
    assert error_text.endswith(f"go on from there with --workdir={fallback}/run_step3_2")
    resumed = Checkpoints(error_text.partition("--workdir=")[2])
    assert resumed.newest_intact() == 3
    assert_restores(resumed, 3)
    assert not list((fallback / "run_step3").iterdir())


def test_fallback_folder_gets_the_best_weights_and_names_the_episodes(tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    options = {"retries": 0, "fallback": tmp_path / "other"}
    checkpoints = Checkpoints(workdir, **options)
    (workdir / "best").mkdir()
    (workdir / "best" / "model.safetensors").write_bytes(b"weights")
    write_json(workdir / "config.json", {"seed": 1})
    for step in (1, 2, 4):
        EpisodeWriter(workdir, 1000, step).write(step, [{}])
    (workdir / "evaluation.json").mkdir()
    (workdir / "evaluation.json" / "odd\n").symlink_to("evaluation.json")
    with monkeypatch.context() as patches:
        remove_access(workdir, patches, errno.ENOSPC)
        with pytest.raises(SaveError) as error:
            checkpoints.save(4, arrays_of(4), {"step": 4}, force=True)
    fallback = tmp_path / "other" / "run_step4"
    assert f"episodes of steps 1-2, 4 stay in {workdir}/episodes; it was saved" in str(error.value)
    assert (fallback / "best" / "model.safetensors").read_bytes() == b"weights"
    assert read_json(fallback / "config.json") == {"seed": 1}
    assert Checkpoints(fallback).newest_intact() == 4


def test_what_cannot_be_copied_to_the_fallback_folder_is_named(tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    checkpoints = Checkpoints(workdir, retries=0, fallback=tmp_path / "other")
    (workdir / "best").mkdir()
    (workdir / "best" / "model.safetensors").write_bytes(b"weights")
    with monkeypatch.context() as patches:
        remove_access(workdir, patches, errno.EIO)
        make_unreadable(workdir / "best" / "model.safetensors", patches, errno.EIO)
        with pytest.raises(SaveError, match=r"best could not be copied \(.*Input/output error"):
            checkpoints.save(4, arrays_of(4), {"step": 4}, force=True)
    assert not (tmp_path / "other" / "run_step4" / "best").exists()


def test_older_step_is_deleted_after_the_new_one_is_on_disk(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, arrays_of(1), {"step": 1}, force=True)
        calls = Calls(monkeypatch)
        checkpoints.save(2, arrays_of(2), {"step": 2}, force=True)
    folder = tmp_path / FOLDER
    deleted = calls.index(("remove", f"{folder}/1/hashes.txt"))
    named = calls.index(("rename", f"{folder}/2/hashes.txt"))
    first, last = (
        [path for kind, path in part if kind == "fsync"]
        for part in (calls[:named], calls[named:deleted])
    )
    tree = {folder / "2", *(folder / "2").rglob("*")} - {folder / "2" / "hashes.txt"}
    assert {*map(str, tree), f"{folder}/2/hashes.txt.tmp"} <= {*first}
    assert last == [f"{folder}/2", f"{folder}", f"{tmp_path}", f"{tmp_path.parent}"]


def test_failed_fallback_save_is_reported(tmp_path, disk):
    fallback = tmp_path / "other"
    checkpoints = Checkpoints(tmp_path / "run", retries=0, fallback=fallback)
    checkpoints.save(1, arrays_of(1), {"step": 1}, force=True)
    disk.fill()
    with pytest.raises(SaveError, match=r"run_step2.*File too large.*last step saved is 1$"):
        checkpoints.save(2, arrays_of(2), {"step": 2}, force=True)
    disk.free()  # pytest writes about this test, maybe to a file, before fixtures end


def test_default_fallback_is_in_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    checkpoints = Checkpoints(tmp_path / "run", retries=1, sleep=lambda _: None)
    remove_access(tmp_path / "run", monkeypatch, errno.EACCES)
    with pytest.raises(SaveError, match=f"--workdir={tmp_path}/temporary/run_step5$"):
        checkpoints.save(5, arrays_of(5), {"step": 5}, force=True)


# ------------------------------------------------------------------------------------ Two processes


@pytest.mark.slow
def test_two_processes_agree_on_the_intact_step(tmp_path):
    first, second = run_two("tests.runtime.files.test_checkpoint_damage", str(tmp_path))
    assert first == second
    assert first == {"newest": 2, "latest": 2, "saved": 3, "sums": [56.0, 84.0]}


def main() -> None:
    """Save steps 1 to 3 in both processes; process 0 damages step 3; both resume from step 2."""
    port, process, workdir = sys.argv[1:]
    me = connect(port, process)
    mesh = jax.make_mesh((4,), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))

    def state(step: int) -> dict[str, jax.Array]:
        return {"x": jax.jit(lambda: jnp.arange(8.0) * step, out_shardings=place)()}

    def total(checkpoints: Checkpoints, step: int) -> float:
        arrays, _ = checkpoints.restore(step, state(0))
        return float(jax.jit(jnp.sum)(arrays["x"]))

    checkpoints = Checkpoints(workdir, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), {"step": step}, score=-step)
    checkpoints.close()
    if me == 0:
        (Path(workdir) / FOLDER / "3" / "host" / "metadata").write_bytes(b"{}")
    checkpoints = Checkpoints(workdir, keep=2)
    steps = {"newest": checkpoints.newest_intact(), "latest": checkpoints.latest_step()}
    before = total(checkpoints, 2)
    checkpoints.save(3, state(3), {"step": 3})
    steps["saved"] = checkpoints.newest_intact()
    sums = [before, total(checkpoints, 3)]
    checkpoints.close()
    print(json.dumps(steps | {"sums": sums}))


if __name__ == "__main__":
    main()


ODD_HASHES = (
    *(b"null", b"[]", b"{}", b'{"files": {}}', b'{"score": null, "files": null}', b"[" * 100_000),
    *(b'{"score": "x", "files": {}}', b'{"score": NaN, "files": {}}'),
    *(b'{"score": null, "files": {"a": 5}}', b'{"score": null, "files": {"../a": [1, "x"]}}'),
    b'{"score": null, "files": {"/a": [1, "x"]}}',
    b'{"score": null, "files": {"\\ud800": [1, "x"]}}',
)


@pytest.mark.parametrize("content", ODD_HASHES)
def test_hashes_of_another_form_are_damage(tmp_path, content):
    folder = epath.Path(tmp_path / "1")
    folder.mkdir()
    head = hashlib.blake2b(content, digest_size=16).hexdigest().encode()
    (folder / hashes.FILE).write_bytes(head + b"\n" + content)
    assert hashes.score(folder) == (False, None)
    assert "hashes.txt: not written by a run" in hashes.damage(folder)
