"""Tests of the lock of a workdir: refusal, stale locks, races, heartbeats, release.

python -m tests.runtime.files.test_workdir_lock PORT PROCESS WORKDIR    # one of two processes
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from spell_jax.runtime import entry
from spell_jax.runtime.files import workdir_lock
from spell_jax.runtime.files.workdir_lock import (
    FILE,
    HEARTBEAT_S,
    STALE_S,
    WATCHED_S,
    Holder,
    WorkdirLock,
    locked,
)
from tests.runtime.hosts.test_distributed import connect, end_two

NOW = 1_800_000_000.0
ELSEWHERE = Holder("far", "another boot", 12, "345", "token", NOW - 7200, NOW)


class Clock(SimpleNamespace):
    """A clock that stands still unless somebody sleeps; then `during` may do something."""

    def __init__(self, during: Callable[[], object] = lambda: None):
        super().__init__(now=NOW, during=during, strftime=time.strftime, gmtime=time.gmtime)

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.during()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(workdir_lock, "time", clock := Clock())
    return clock


def write(folder: pathlib.Path, holder: Holder, **changes: Any) -> Holder:
    holder = dataclasses.replace(holder, **changes)
    (folder / FILE).write_text(json.dumps(dataclasses.asdict(holder)))
    return holder


def read(folder: pathlib.Path) -> Holder:
    holder = Holder.parse((folder / FILE).read_bytes())
    assert holder is not None
    return holder


def test_second_run_is_refused_until_the_first_has_ended(tmp_path: pathlib.Path) -> None:
    with locked(tmp_path):
        holder = read(tmp_path)
        assert holder.pid == os.getpid() and holder.is_local and holder.is_alive
        pattern = (
            rf"^workdir = {re.escape(str(tmp_path))}: is in use by pid {os.getpid()} on host "
            rf"{re.escape(holder.host)}, since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC, last seen "
            r"\d+ seconds ago; end that process or give another workdir$"
        )
        for _ in range(2):
            with pytest.raises(ValueError, match=pattern), locked(tmp_path):
                pass
        assert read(tmp_path) == holder  # the refused runs have not touched it
    assert [*tmp_path.iterdir()] == []
    with locked(tmp_path):
        assert read(tmp_path).token != holder.token


@pytest.mark.parametrize("error", [ValueError("a crash"), SystemExit(75), KeyboardInterrupt()])
def test_lock_is_released_after_any_error(error: BaseException, tmp_path: pathlib.Path) -> None:
    with pytest.raises(type(error)), locked(tmp_path):
        raise error
    assert [*tmp_path.iterdir()] == []


def ended_process(tmp_path: pathlib.Path) -> Holder:
    process = subprocess.Popen(["true"])
    start = workdir_lock._process_start(process.pid) or "1"  # "" if it has ended already
    process.wait()
    return dataclasses.replace(WorkdirLock(tmp_path)._holder, pid=process.pid, process_start=start)


def unreaped_process(tmp_path: pathlib.Path) -> Holder:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    start = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    return dataclasses.replace(WorkdirLock(tmp_path)._holder, pid=process.pid, process_start=start)


def reused_pid(tmp_path: pathlib.Path) -> Holder:
    return dataclasses.replace(WorkdirLock(tmp_path)._holder, process_start="1")


@pytest.mark.parametrize("make", [ended_process, unreaped_process, reused_pid])
def test_lock_of_a_dead_process_is_taken_at_once(make, tmp_path: pathlib.Path, clock) -> None:
    clock.during = lambda: pytest.fail("waited")
    write(tmp_path, make(tmp_path), seen=NOW)
    with locked(tmp_path):
        assert read(tmp_path).is_alive


def test_old_heartbeat_of_another_machine_is_stale(tmp_path: pathlib.Path, clock: Clock) -> None:
    write(tmp_path, ELSEWHERE, seen=NOW - STALE_S)
    lock = WorkdirLock(tmp_path, clock.sleep)
    assert lock.take() == "" and clock.now - NOW == WATCHED_S
    lock.release()


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_was_set_does_not_take_a_living_lock(
    hours: int, tmp_path: pathlib.Path, clock: Clock
) -> None:
    """The heartbeats of the holder seem an hour old, or still to come."""
    offset = 3600.0 * hours

    def beat() -> None:
        if clock.now - NOW >= HEARTBEAT_S:
            write(tmp_path, ELSEWHERE, seen=clock.now + offset)

    clock.during = beat
    write(tmp_path, ELSEWHERE, seen=NOW + offset)
    assert "is in use by pid 12 on host far" in WorkdirLock(tmp_path, clock.sleep).take()
    assert read(tmp_path).token == ELSEWHERE.token


def test_a_clock_set_back_while_another_run_waits_does_not_prolong_the_wait(
    tmp_path: pathlib.Path, clock: Clock
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.now -= 600.0

    write(tmp_path, ELSEWHERE, seen=NOW)
    lock = WorkdirLock(tmp_path, sleep)
    assert lock.take() == "" and sum(waits) == STALE_S
    lock.release()


def test_silent_machine_loses_the_lock_at_the_stated_age(
    tmp_path: pathlib.Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, ELSEWHERE, seen=NOW - 20)
    lock = WorkdirLock(tmp_path, clock.sleep)
    assert lock.take() == ""
    assert STALE_S - 20 <= clock.now - NOW < STALE_S - 10
    assert read(tmp_path).since == read(tmp_path).seen == clock.now
    lock.release()
    [waits] = [record.getMessage() for record in caplog.records]
    assert "pid 12 on host far, since" in waits and "last seen 20 seconds ago" in waits
    assert "waits up to 160 s for its next heartbeat" in waits


def test_clock_that_is_ahead_does_not_prolong_the_wait(tmp_path: pathlib.Path, clock) -> None:
    write(tmp_path, ELSEWHERE, seen=NOW + 86_400)
    lock = WorkdirLock(tmp_path, clock.sleep)
    assert lock.take() == "" and clock.now - NOW == STALE_S
    lock.release()


@pytest.mark.parametrize("changes", [{"seen": NOW + 10}, {"token": "of a faster run"}])
def test_heartbeat_of_another_machine_refuses_the_run(
    changes: dict, tmp_path: pathlib.Path, clock: Clock
) -> None:
    write(tmp_path, ELSEWHERE)
    clock.during = lambda: clock.now < NOW + 10 or write(tmp_path, ELSEWHERE, **changes)
    lock = WorkdirLock(tmp_path, clock.sleep)
    assert "is in use by pid 12 on host far" in lock.take()
    assert clock.now < NOW + 30
    lock.release()
    assert read(tmp_path).machine == "another boot"


@pytest.mark.parametrize("stale", [False, True], ids=["no lock", "stale lock"])
def test_one_of_several_racing_runs_gets_the_lock(stale: bool, tmp_path: pathlib.Path) -> None:
    for _ in range(5):
        if stale:
            write(tmp_path, ELSEWHERE, seen=0.0)
        locks = [WorkdirLock(tmp_path, sleep=lambda seconds: None) for _ in range(8)]
        start = threading.Barrier(8)

        def take(lock: WorkdirLock, start: threading.Barrier = start) -> str:
            start.wait()
            return lock.take()

        with ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(take, locks)]
        assert sorted("is in use" in answer for answer in answers) == [False] + [True] * 7
        assert read(tmp_path).token == locks[answers.index("")]._holder.token
        for lock in locks:
            lock.release()
        assert not (tmp_path / FILE).exists()


def test_heartbeats_are_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workdir_lock, "HEARTBEAT_S", 0.01)
    with locked(tmp_path):
        first, deadline = read(tmp_path), time.monotonic() + 60
        while (now := read(tmp_path)).seen == first.seen:
            assert time.monotonic() < deadline
        assert dataclasses.replace(now, seen=first.seen) == first
    assert [*tmp_path.iterdir()] == []


def test_run_whose_lock_was_taken_over_ends(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[int] = []
    lock = WorkdirLock(tmp_path, end=codes.append)
    assert lock.take() == ""
    lock.renew()
    assert codes == []
    other_holder = write(tmp_path, ELSEWHERE)
    lock.renew()
    lock.release()
    assert codes == [1] and read(tmp_path) == other_holder
    assert "by pid 12 on host far" in caplog.text and "It took over from this run" in caplog.text


def test_removed_file_is_written_again(tmp_path: pathlib.Path) -> None:
    lock = WorkdirLock(tmp_path, end=lambda code: pytest.fail("ended"))
    assert lock.take() == ""
    (tmp_path / FILE).unlink()
    lock.renew()
    lock.renew()
    assert read(tmp_path).token == lock._holder.token
    lock.release()
    assert [*tmp_path.iterdir()] == []


def test_failed_heartbeat_is_logged_and_repeated(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workdir_lock, "HEARTBEAT_S", 0.01)
    write_file, failed = WorkdirLock._write_lock, threading.Semaphore(0)

    def fail(lock: WorkdirLock, *arguments: Any) -> bytes:
        failed.release()
        raise ValueError("UNAVAILABLE: no network")

    with locked(tmp_path):
        monkeypatch.setattr(WorkdirLock, "_write_lock", fail)
        assert failed.acquire(timeout=60) and failed.acquire(timeout=60)
        monkeypatch.setattr(WorkdirLock, "_write_lock", write_file)
    assert f"workdir = {tmp_path}: lock.json could not be renewed (UNAVAIL" in caplog.text
    assert [*tmp_path.iterdir()] == []


FIELDS = dataclasses.asdict(ELSEWHERE)


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        None,
        7,
        "text",
        [["host", "far"]],
        FIELDS | {"pid": "12"},
        FIELDS | {"pid": None},
        FIELDS | {"pid": 2**70},
        FIELDS | {"since": "yesterday"},
        FIELDS | {"since": 1e300},
        FIELDS | {"since": float("nan")},
        FIELDS | {"seen": float("inf")},
        FIELDS | {"seen": [1]},
        FIELDS | {"machine": 3},
        FIELDS | {"host": {"a": 1}},
        FIELDS | {"other": 1},
    ],
)
def test_a_lock_of_another_form_is_refused_with_one_line(value, tmp_path: pathlib.Path) -> None:
    (tmp_path / FILE).write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"its lock.json is damaged; remove"), locked(tmp_path):
        pass


def test_unusable_lock_files_are_refused(tmp_path: pathlib.Path) -> None:
    for content in (b"", b"\xff", b"[" * 100_000, b"\0" * 100):
        (tmp_path / FILE).write_bytes(content)
        with pytest.raises(ValueError, match=r"its lock.json is damaged; remove"), locked(tmp_path):
            pass
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match=r"^workdir = .*/file: lock.json could not be"),
        locked(tmp_path / "file"),
    ):
        pass


@pytest.mark.slow
def test_all_processes_of_a_refused_run_end_with_one_line(tmp_path: pathlib.Path) -> None:
    with locked(tmp_path):
        for code, output, error in end_two("tests.runtime.files.test_workdir_lock", str(tmp_path)):
            assert code == entry.EXIT_CODE and "got it" not in output
            [line] = [line for line in error.splitlines() if line.startswith("error: ")]
            assert f"workdir = {tmp_path}: is in use by pid {os.getpid()} on host" in line
            assert "Traceback" not in error
    for code, output, error in end_two("tests.runtime.files.test_workdir_lock", str(tmp_path)):
        assert code == 0 and output.endswith("got it\n"), error
    assert [*tmp_path.iterdir()] == []


def main() -> None:
    port, process, workdir = sys.argv[1:]
    connect(port, process)
    with entry.user_errors(), locked(workdir):
        print("got it", flush=True)


if __name__ == "__main__":
    main()
