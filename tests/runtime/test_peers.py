"""Tests of heartbeats between processes (objects in one process here, with real connections).

All that remain end and name the process that is missing or has failed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from spell_jax.runtime import peers, rendezvous
from spell_jax.runtime.peers import EXIT_CODE, Peers

LONG, SHORT = 120.0, 2.0  # limits that a test does not reach, or waits for


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_LONGEST_BEAT_S", 0.02)
    monkeypatch.setattr(peers, "_GRACE_S", 0.1)


class Run:
    """A run of `count` processes of which `members` are there; `ended` has (index, status)."""

    def __init__(self, count: int, members: tuple[int, ...], limit: float) -> None:
        self.server = rendezvous.listen(0)
        self.address = "localhost", self.server.getsockname()[1]
        self.ended: queue.Queue[tuple[int, int]] = queue.Queue()
        self.members: dict[int, Peers] = {}
        for index in members:
            hub = self.server if index == 0 else self.address
            end = functools.partial(self._end, index)
            member = Peers(index, count, hub, limit, end)
            member.state |= {"host": f"h{index}", "phase": "rollout", "step": 3, "saved": 2}
            self.members[index] = member
            member.start()

    def _end(self, index: int, status: int) -> None:
        self.ended.put((index, status))

    def fail(self, index: int, error: Exception) -> threading.Thread:
        """Let the main thread of a member fail; the result ends when `Peers.fail` returns."""
        thread = threading.Thread(target=self.members[index].fail, args=(error,))
        thread.start()
        return thread

    def statuses(self, count: int) -> dict[int, int]:
        return dict(self.ended.get(timeout=60) for _ in range(count))


@contextlib.contextmanager
def stranger(run: Run, index: int) -> Iterator[socket.socket]:
    """A process that has said its state once."""
    with socket.create_connection(run.address, timeout=60) as line:
        state = run.members[0].state | {"index": index, "host": f"h{index}", "phase": "update"}
        line.sendall(json.dumps(state).encode() + b"\n")
        answer = json.loads(line.makefile().readline())
        assert answer["index"] == 0 and answer["verdict"] is None
        yield line


REMEDY = "end what is left of it, start all again: the run resumes from checkpoint 2 or a later one"


@pytest.mark.slow
@pytest.mark.parametrize("is_closed", [True, False])
def test_silent_process_ends_all_others_which_name_it(is_closed: bool, capsys: Any) -> None:
    run = Run(4, (0, 1), SHORT)
    with stranger(run, 3), stranger(run, 2) as line:
        if is_closed:
            line.close()
        assert run.statuses(2) == {0: EXIT_CODE, 1: EXIT_CODE}
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and told[0] == told[1]
    assert "process 2 of 4 (host h2) is missing: last heard during update after step 3," in told[0]
    assert ("process 3 of 4" in told[0]) == (not is_closed)
    assert told[0].startswith("spell_jax: ") and told[0].endswith(REMEDY)


@pytest.mark.slow
def test_process_that_never_connects_is_missing(capsys: Any) -> None:
    run = Run(3, (0, 1), SHORT)
    assert run.statuses(2) == {0: EXIT_CODE, 1: EXIT_CODE}
    assert (
        "process 2 of 3 is missing: last heard during setup after step 0" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_all_processes_name_a_silent_process_0(capsys: Any) -> None:
    run = Run(3, (1, 2), SHORT)  # nobody accepts connections at the port
    assert run.statuses(2) == {1: EXIT_CODE, 2: EXIT_CODE}
    told = capsys.readouterr().err
    assert told.count("process 0 of 3 is missing: last heard during setup") == 2


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_error_of_one_process_ends_all_at_once(failing: int, capsys: Any) -> None:
    run = Run(3, (0, 1, 2), 2 * SHORT)
    run.fail(failing, OSError("disk full")).join(60)
    others = {index: EXIT_CODE for index in (0, 1, 2) if index != failing}
    assert run.statuses(3) == others | {failing: 1}
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3 and told[0] == told[1] == told[2]
    where = f"process {failing} of 3 (host h{failing}) failed during rollout after step 3"
    assert f"{where}: OSError: disk full; {REMEDY}" in told[0]


def test_error_of_process_0_is_known_to_all_before_it_is_raised(capsys: Any) -> None:
    run = Run(2, (0, 1), LONG)
    run.fail(0, ValueError("bad")).join(60)
    assert run.statuses(1) == {1: EXIT_CODE}
    assert "process 0 of 2 (host h0) failed during rollout after step 3: ValueError: bad" in (
        capsys.readouterr().err
    )


@pytest.mark.slow
def test_errors_of_all_processes_are_raised_on_all(capsys: Any) -> None:
    run = Run(2, (0, 1), 2 * SHORT)
    threads = [run.fail(index, RuntimeError("host 1: disk full")) for index in (0, 1)]
    for thread in threads:
        thread.join(60)
    assert run.statuses(2) == {0: 1, 1: 1}
    told = capsys.readouterr().err
    for index in (0, 1):
        assert told.count(f"process {index} of 2 (host h{index}) failed during rollout") == 2


@pytest.mark.slow
def test_error_that_follows_from_a_killed_process_names_that_process(capsys: Any) -> None:
    run = Run(3, (0, 1), 2 * SHORT)
    with stranger(run, 2):
        thread = run.fail(1, ConnectionError("closed by peer"))
    thread.join(60)
    assert (1, EXIT_CODE) in [run.ended.get(timeout=60) for _ in range(3)]
    told = capsys.readouterr().err
    assert "ConnectionError: closed by peer\n" in told
    assert told.count("process 2 of 3 (host h2) is missing: last heard during update") == 2
    assert "failed" not in told


@pytest.mark.slow
def test_process_that_is_done_may_close_its_connection() -> None:
    run = Run(3, (0, 1), SHORT)
    with stranger(run, 2) as line:
        state = run.members[0].state | {"index": 2, "is_done": True}
        line.sendall(json.dumps(state).encode() + b"\n")
        line.makefile().readline()
    with pytest.raises(queue.Empty):
        run.ended.get(timeout=SHORT)


def test_broken_connections_are_made_again() -> None:
    """Every connection of process 1 breaks after one answer."""
    with rendezvous.listen(0) as relay:
        run = Run(2, (0,), LONG)
        Peers(1, 2, ("localhost", relay.getsockname()[1]), LONG, lambda _: None).start()
        for _ in range(5):
            with relay.accept()[0] as line, socket.create_connection(run.address) as onward:
                onward.sendall(line.makefile().readline().encode())
                line.sendall(onward.makefile().readline().encode())
    assert run.ended.empty()


def test_strangers_are_disconnected() -> None:
    run = Run(2, (0, 1), LONG)
    for text in (b'{"index": 7}\n', b'{"index": 0}\n', b"[]\n", b"\xff\n", b"GET / HTTP/1.1\r\n"):
        with socket.create_connection(run.address, timeout=60) as line:
            line.sendall(text)
            assert line.recv(100) == b"", text
    assert run.ended.empty()


def test_stopped_time_of_a_process_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([100.0, 101.0, 101.5, 700.0, 701.0])
    monkeypatch.setattr(peers.time, "monotonic", lambda: next(seconds))
    clock = peers._Clock(longest=5.0)
    assert [clock.now() for _ in range(4)] == [1.0, 1.5, 6.5, 7.5]


def test_single_process_has_no_peers() -> None:
    assert not peers.is_running()
    peers.note(phase="rollout")
    with pytest.raises(KeyError), peers.announced():
        raise KeyError("its own")
