"""Tests of durable writes: their order, a disk that is full for a while, a folder that is gone.

The full disk is a tmpfs, which needs root; the order is read from the calls of the system.
"""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator

import pytest
from etils import epath

from spell_jax.policy.formats import safetensors
from spell_jax.runtime.files import durable, episodes
from spell_jax.runtime.files.durable import DiskError, FolderWatch, GoneError
from spell_jax.runtime.files.episodes import EpisodeWriter, read_episodes
from spell_jax.runtime.files.jsonl import append_records, read_records, write_json, write_records
from spell_jax.runtime.log.loggers import TensorBoard
from spell_jax.runtime.log.metrics import read_metrics
from spell_jax.runtime.log.run_logger import RunLogger
from tests.runtime.log.test_run_logger import loss
from tests.small_disk import mounted

SIZE = 256 << 10  # bytes of the small disk


class Calls(list):
    """Calls of the system in order: ("fsync" | "rename" | "remove", path)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()

        def record(module, name: str, kind: str, place: Callable) -> None:
            real = getattr(module, name)

            def call(*args, **options):
                path = place(*args)
                result = real(*args, **options)
                self.append((kind, os.fspath(path)))
                return result

            monkeypatch.setattr(module, name, call)

        record(os, "fsync", "fsync", lambda file: os.readlink(f"/proc/self/fd/{file}"))
        for name in ("rename", "replace"):
            record(os, name, "rename", lambda source, target: target)
        for name in ("remove", "unlink"):
            record(os, name, "remove", lambda path, *_: path)


def test_file_is_on_disk_before_its_name(tmp_path, monkeypatch):
    calls, path = Calls(monkeypatch), tmp_path / "new" / "folder" / "value.json"
    write_json(path, 1)
    assert calls == [
        ("fsync", f"{tmp_path}/new"),
        ("fsync", f"{tmp_path}"),
        ("fsync", f"{path}.tmp"),
        ("rename", f"{path}"),
        ("fsync", f"{path.parent}"),
    ]


def test_appended_lines_are_on_disk_when_the_call_returns(tmp_path, monkeypatch):
    calls, path = Calls(monkeypatch), tmp_path / "lines.jsonl"
    append_records(path, [1])
    append_records(path, [2])
    assert calls == [("fsync", f"{path}"), ("fsync", f"{tmp_path}"), ("fsync", f"{path}")]


def test_exported_folder_is_on_disk_before_its_name(tmp_path, monkeypatch):
    calls = Calls(monkeypatch)
    with safetensors.replacing(tmp_path / "policy") as scratch:
        (scratch / "model.safetensors").write_bytes(b"weights")
    kinds = [kind for kind, _ in calls]
    last = kinds.index("rename")
    assert {path.rpartition("/")[2] for _, path in calls[:last]} >= {"model.safetensors"}
    assert ("fsync", str(scratch)) in calls[:last]
    assert calls[last:] == [("rename", f"{tmp_path}/policy"), ("fsync", f"{tmp_path}")]


# --------------------------------------------------------------------------------------- Full disks


@pytest.fixture
def small_disk(tmp_path) -> Iterator[pathlib.Path]:
    with mounted(tmp_path / "small", str(SIZE)) as folder:
        yield folder


@pytest.fixture
def full_disk(small_disk, monkeypatch) -> Iterator[pathlib.Path]:
    """Yield a disk that has space again after the second failed try."""
    ballast, waits = small_disk / "ballast", []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            ballast.unlink()

    monkeypatch.setattr(durable, "sleep", sleep)
    fill(ballast)
    yield small_disk
    assert waits == [2.0, 4.0]


def fill(ballast: pathlib.Path) -> None:
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))


RECORDS = [{"text": "x" * 5000}] * 4


def write_tensors(folder: pathlib.Path) -> None:
    import numpy as np

    safetensors.save_file({"w": np.ones(5000, np.float32)}, folder / "model.safetensors")
    [tensor] = safetensors.scan(folder)[1].values()
    assert tensor.read((slice(0, 5000),)).sum() == 5000


def append_twice(folder: pathlib.Path) -> None:
    for record in RECORDS[:2]:
        append_records(folder / "lines.jsonl", [record])
    assert read_records(folder / "lines.jsonl", dict) == (RECORDS[:2], 0)


def write_lines(folder: pathlib.Path) -> None:
    write_records(folder / "lines.jsonl", RECORDS)
    assert read_records(folder / "lines.jsonl", dict) == (RECORDS, 0)


def write_events(folder: pathlib.Path) -> None:
    board = TensorBoard(epath.Path(folder))
    for step in range(1, 6):
        board.write(step, {f"a_long_name_{number}": 1.0 for number in range(20)})
    board.close()
    events = [p.read_bytes() for p in sorted((folder / "tensorboard").iterdir())]
    assert b"".join(events).count(b"a_long_name_19") >= 5


@pytest.mark.parametrize("write", [write_tensors, append_twice, write_lines, write_events])
def test_write_waits_for_a_full_disk(full_disk, write):
    write(full_disk)
    assert not list(full_disk.rglob("*.tmp"))


def test_run_goes_on_when_a_full_disk_has_space_again(full_disk):
    with RunLogger(full_disk, 9, episodes=10**6) as logger:
        for step in (1, 2, 3):
            logger.write(step, loss(step), [{"question": f"q{step}"}])
        logger.flush()
        assert logger.state()["episodes"] == {}
        assert [line["step"] for line in read_metrics(full_disk)] == [1, 2, 3]
        assert [step for step, _ in read_episodes(full_disk)] == [1, 2, 3]


def test_disk_that_stays_full_is_an_error_with_its_path(small_disk, monkeypatch):
    waits = []
    monkeypatch.setattr(durable, "sleep", waits.append)
    write_json(small_disk / "value.json", 1)
    fill(small_disk / "ballast")
    with pytest.raises(DiskError, match=r"value\.json: No space left on device, 4 tries"):
        write_json(small_disk / "value.json", list(range(9999)))
    assert waits == [2.0, 4.0, 8.0]
    assert (small_disk / "value.json").read_text() == "1\n"
    with pytest.raises(DiskError, match="4 tries"):
        append_records(small_disk / "value.json", list(range(9999)))
    assert (small_disk / "value.json").read_text() == "1\n"


def test_other_errors_are_not_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "sleep", pytest.fail)
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", pathlib.Path("/proc/none/value.json")):
        with pytest.raises(OSError) as error:
            write_json(path, 1)
        assert not isinstance(error.value, DiskError)


def test_unwritten_episodes_stay_queued_and_are_written_by_the_resumed_run(tmp_path, monkeypatch):
    logger = RunLogger(tmp_path, 9, episodes=1000)
    monkeypatch.setattr(episodes, "write_records", no_space)
    with pytest.raises(OSError, match="No space"), logger:
        for step in (1, 2):  # the error of step 1 is raised at step 2, which is queued too
            logger.write(step, loss(step), [{"question": f"q{step}"}])
            logger._background._queue.join()
    monkeypatch.undo()
    state = logger.state()
    assert state["episodes"] == {"1": [{"question": "q1"}], "2": [{"question": "q2"}]}
    assert list(read_episodes(tmp_path)) == []
    with RunLogger(tmp_path, 9, 2, state, episodes=1000) as resumed:
        assert resumed.state()["episodes"] == {}
    EpisodeWriter(tmp_path / "other", 1000).write(1, [{"question": "q1"}])
    resumed_file, plain_file = (
        folder / "episodes" / "step_000001.jsonl.gz" for folder in (tmp_path, tmp_path / "other")
    )
    assert resumed_file.read_bytes() == plain_file.read_bytes()
    assert [episode["question"] for _, episode in read_episodes(tmp_path)] == ["q1", "q2"]


def no_space(*_) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---------------------------------------------------------------------------------------- Watching


def rename(folder: pathlib.Path) -> None:
    folder.rename(folder.with_name("renamed"))


def replace_by_folder(folder: pathlib.Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def replace_by_file(folder: pathlib.Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


@pytest.mark.parametrize(
    "change, reason",
    [
        (shutil.rmtree, "No such file or directory"),
        (rename, "No such file or directory"),
        (replace_by_folder, "another folder is there"),
        (replace_by_file, "Not a directory"),
    ],
)
def test_folder_that_is_gone_is_noticed_before_a_write(tmp_path, change, reason):
    folder = tmp_path / "run"
    folder.mkdir()
    watch = FolderWatch(folder)
    watch.check_folder()
    with pytest.raises(GoneError, match="was removed or renamed"), RunLogger(folder, 9) as logger:
        logger.write(1, loss(1))
        logger.flush()
        change(folder)
        logger.write(2, loss(2))
        logger.flush()
    with pytest.raises(GoneError, match=reason):
        watch.check_folder()
    assert not folder.is_dir() or not list(folder.iterdir())


def test_watch_closes_its_folder_and_ignores_buckets(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    watch = FolderWatch(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del watch
    assert len(os.listdir("/proc/self/fd")) == before
    FolderWatch("gs://bucket/run").check_folder()


def test_pipe_without_a_reader_is_an_error_and_not_a_wait_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "sleep", lambda seconds: None)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(durable.DiskError, match="pipe: is a pipe that no process reads, 4 tries"):
        durable.write_file(tmp_path / "pipe", b"1")


def test_pipes_and_devices_are_removed_as_files_are(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link", "missing"):
        durable.remove(epath.Path(tmp_path / name))
    assert not any(tmp_path.iterdir()) and os.path.exists("/dev/zero")
