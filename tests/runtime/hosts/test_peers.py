"""Tests of heartbeats between processes (objects in one process here, with real connections).

All that remain end and name the process that is missing or has failed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from spell_jax.runtime.hosts import listener, peers
from spell_jax.runtime.hosts.peers import EXIT_CODE, Heartbeats, Meeting, Verdict

LONG, SHORT = 120.0, 2.0  # limits that a test does not reach, or waits for
TOKEN = bytes(range(32))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_LONGEST_BEAT_S", 0.02)
    monkeypatch.setattr(peers, "_GRACE_S", 0.1)


@pytest.fixture(autouse=True)
def closed_listeners() -> Iterator[None]:
    """Close the listeners of a test with it: they log strangers up to a minute later."""
    yield
    while Run.listening:
        run = Run.listening.pop()
        for member in run.members.values():
            member._patience = 0.0
            member._verdict = member._verdict or Verdict("the test is over", ())
        deadline = time.monotonic() + 10
        while run.server.fileno() >= 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert run.server.fileno() < 0


class Run:
    """A run of `count` processes of which `members` are there; `ended` has (index, status).

    All members know the token, except the members in `waiting`.
    """

    listening: ClassVar[list[Run]] = []

    def __init__(
        self, count: int, members: tuple[int, ...], limit: float, waiting: tuple[int, ...] = ()
    ) -> None:
        self.server = listener.listen("localhost")
        self.address = self.server.getsockname()
        self.ended: queue.Queue[tuple[int, int]] = queue.Queue()
        self.members: dict[int, Heartbeats] = {}
        for index in members:
            hub = [self.server] if index == 0 else self.address
            end = functools.partial(self._end, index)
            member = Heartbeats(Meeting(index, count, hub, {}), limit, end)
            member.state |= {"host": f"h{index}", "phase": "rollout", "step": 3, "saved": 2}
            self.members[index] = member
            member.start()
            if index not in waiting:
                member.trust(TOKEN)
        if 0 in members:
            Run.listening.append(self)

    def _end(self, index: int, status: int) -> None:
        self.ended.put((index, status))

    def fail(self, index: int, error: Exception) -> threading.Thread:
        """Let a member's main thread fail; the returned thread ends when `Heartbeats.fail` ends."""
        thread = threading.Thread(target=self.members[index].fail, args=(error,))
        thread.start()
        return thread

    def statuses(self, count: int) -> dict[int, int]:
        return dict(self.ended.get(timeout=60) for _ in range(count))


@contextlib.contextmanager
def scripted(run: Run, index: int) -> Iterator[socket.socket]:
    """Yield the connection of a process of the run after the process has sent a state once."""
    with socket.create_connection(run.address, timeout=60) as line:
        with line.makefile("rb") as answers:
            proof = peers._prove(TOKEN, answers.readline().strip(), index)
            state = run.members[0].state | {"index": index, "host": f"h{index}", "phase": "update"}
            line.sendall(proof + b"\n" + json.dumps(state).encode() + b"\n")
            answer = json.loads(answers.readline())
        assert answer["index"] == 0 and answer["verdict"] is None
        yield line


REMEDY = "end what is left of it, start all again: the run resumes from checkpoint 2 or a later one"


@pytest.mark.slow
@pytest.mark.parametrize("is_closed", [True, False])
def test_silent_process_ends_all_others_which_name_it(is_closed: bool, capsys: Any) -> None:
    run = Run(4, (0, 1), SHORT)
    with scripted(run, 3), scripted(run, 2) as line:
        if is_closed:
            line.close()
        assert run.statuses(2) == {0: EXIT_CODE, 1: EXIT_CODE}
    error_lines = capsys.readouterr().err.splitlines()
    assert len(error_lines) == 2 and error_lines[0] == error_lines[1]
    assert (
        "process 2 of 4 (host h2, 127.0.0.1) is missing: last heard during update after step 3,"
        in error_lines[0]
    )
    assert ("process 3 of 4" in error_lines[0]) == (not is_closed)
    assert error_lines[0].startswith("spell_jax: ") and error_lines[0].endswith(REMEDY)


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
    error_text = capsys.readouterr().err
    assert error_text.count("process 0 of 3 is missing: last heard during setup") == 2


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_error_of_one_process_ends_all_at_once(failing: int, capsys: Any) -> None:
    run = Run(3, (0, 1, 2), 2 * SHORT)
    run.fail(failing, OSError("disk full")).join(60)
    exit_codes = {index: EXIT_CODE for index in (0, 1, 2) if index != failing}
    assert run.statuses(3) == exit_codes | {failing: 1}
    error_lines = capsys.readouterr().err.splitlines()
    assert len(error_lines) == 3 and error_lines[0] == error_lines[1] == error_lines[2]
    where = (
        f"process {failing} of 3 (host h{failing}, 127.0.0.1) failed during rollout after step 3"
    )
    assert f"{where}: OSError: disk full; {REMEDY}" in error_lines[0]


def test_error_of_process_0_is_known_to_all_before_it_is_raised(capsys: Any) -> None:
    run = Run(2, (0, 1), LONG)
    run.fail(0, ValueError("bad")).join(60)
    assert run.statuses(1) == {1: EXIT_CODE}
    assert (
        "process 0 of 2 (host h0, 127.0.0.1) failed during rollout after step 3: ValueError: bad"
        in (capsys.readouterr().err)
    )


@pytest.mark.slow
def test_errors_of_all_processes_are_raised_on_all(capsys: Any) -> None:
    run = Run(2, (0, 1), 2 * SHORT)
    threads = [run.fail(index, RuntimeError("host 1: disk full")) for index in (0, 1)]
    for thread in threads:
        thread.join(60)
    assert run.statuses(2) == {0: 1, 1: 1}
    error_text = capsys.readouterr().err
    for index in (0, 1):
        assert (
            error_text.count(
                f"process {index} of 2 (host h{index}, 127.0.0.1) failed during rollout"
            )
            == 2
        )


@pytest.mark.slow
def test_error_that_follows_from_a_killed_process_names_that_process(capsys: Any) -> None:
    run = Run(3, (0, 1), 2 * SHORT)
    with scripted(run, 2):
        thread = run.fail(1, ConnectionError("closed by peer"))
    thread.join(60)
    assert (1, EXIT_CODE) in [run.ended.get(timeout=60) for _ in range(3)]
    error_text = capsys.readouterr().err
    assert "ConnectionError: closed by peer\n" in error_text
    assert (
        error_text.count("process 2 of 3 (host h2, 127.0.0.1) is missing: last heard during update")
        == 2
    )
    assert "failed" not in error_text


@pytest.mark.slow
def test_process_that_is_done_may_close_its_connection() -> None:
    run = Run(3, (0, 1), SHORT)
    with scripted(run, 2) as line:
        state = run.members[0].state | {"index": 2, "is_done": True}
        line.sendall(json.dumps(state).encode() + b"\n")
        line.makefile().readline()
    with pytest.raises(queue.Empty):
        run.ended.get(timeout=SHORT)


def test_broken_connections_are_made_again() -> None:
    """Every connection of process 1 breaks after one answer."""
    with listener.listen("localhost") as relay:
        run = Run(2, (0,), LONG)
        process = Heartbeats(Meeting(1, 2, relay.getsockname(), {}), LONG, lambda _: None)
        process.start()
        process.trust(TOKEN)
        for _ in range(5):
            with (
                relay.accept()[0] as line,
                line.makefile("rb") as lines,
                socket.create_connection(run.address) as onward,
                onward.makefile("rb") as answers,
            ):
                line.sendall(answers.readline())
                onward.sendall(lines.readline() + lines.readline())
                line.sendall(answers.readline())
    assert run.ended.empty()


# --------------------------------------------------------------------------------------- Strangers

STATE = json.dumps(
    {"index": 1, "host": "h", "phase": "x", "step": 1, "saved": 1, "error": "dead", "is_done": True}
).encode()


def hello(line: socket.socket) -> bytes:
    """Return the challenge of process 0."""
    return line.makefile("rb").readline().strip()


@pytest.mark.parametrize(
    "text",
    [
        STATE,  # as of the time when any caller was believed
        b'{"index": 1, "error": "dead"}',
        b"1",
        b"1 " + b"0" * 64,
        b"0 " + b"0" * 64,
        b"7 " + b"0" * 64,
        b"9" * 200 + b" 0",
        b"\xb2 \xff",
        b"[" * 200,
        b"[" * 100_000,
        b"GET / HTTP/1.1\r",
        b"",
    ],
)
def test_line_of_a_stranger_ends_its_connection_and_nothing_else(text: bytes) -> None:
    run = Run(2, (0, 1), LONG)
    with socket.create_connection(run.address, timeout=60) as line:
        hello(line)
        with contextlib.suppress(OSError):  # a long text is not read to its end
            line.sendall(text + b"\n" + STATE + b"\n")
            assert line.recv(100) == b""
    with scripted(run, 1):  # process 0 still listens
        assert run.ended.empty()


def test_wrong_and_repeated_tokens_are_refused() -> None:
    run = Run(2, (0,), LONG)
    with scripted(run, 1) as member, socket.create_connection(run.address, timeout=60) as line:
        old_proof = peers._prove(TOKEN, hello(line), 1)
        for make_proof in (
            lambda _: old_proof,  # heard on the network and said again
            lambda challenge: peers._prove(bytes(32), challenge, 1),  # of another run
            lambda challenge: peers._prove(b"", challenge, 1),
            lambda challenge: peers._prove(TOKEN, challenge, 2).replace(b"2 ", b"1 "),
            lambda _: b"1 " + TOKEN.hex().encode(),
        ):
            with socket.create_connection(run.address, timeout=60) as stranger:
                stranger.sendall(make_proof(hello(stranger)) + b"\n" + STATE + b"\n")
                assert stranger.recv(100) == b""
        member.sendall(json.dumps(run.members[0].state | {"index": 1}).encode() + b"\n")
        assert json.loads(member.makefile("rb").readline())["verdict"] is None
    assert run.ended.empty()


def test_invalid_states_of_a_process_do_not_end_the_heartbeats() -> None:
    run = Run(3, (0, 1), LONG)
    good = json.loads(STATE)
    for bad in (
        b"[" * 60_000,
        b"null",
        b"[]",
        b'{"index": 2}',
        json.dumps(good | {"step": "{x.__class__}"}).encode(),
        json.dumps(good | {"index": 2, "phase": 3}).encode(),
        b"x" * 70_000,
    ):
        with scripted(run, 2) as line, contextlib.suppress(OSError):
            line.sendall(bad + b"\n")
            assert line.recv(100) == b"", bad
    assert run.ended.empty()


def test_control_characters_of_an_error_do_not_reach_the_terminal(capsys: Any) -> None:
    run = Run(2, (0, 1), LONG)
    run.members[0].state["host"] = "h\x1b[2J0"
    run.fail(0, ValueError("\x1b]0;title\x07 größer")).join(60)
    assert run.statuses(1) == {1: EXIT_CODE}
    error_text = capsys.readouterr().err
    assert (
        r"ValueError: \x1b]0;title\x07 größer; end what" in error_text
        and r"h\x1b[2J0" in error_text
    )
    assert "\x1b" not in error_text and "\x07" not in error_text


@pytest.mark.slow
def test_a_thousand_idle_connections_keep_no_process_outside(caplog: Any) -> None:
    run = Run(3, (0, 1), LONG)
    with contextlib.ExitStack() as stack:
        idle = []
        for _ in range(1000):
            source = ("127.0.0.2", 0)
            line = socket.create_connection(run.address, 60, source_address=source)
            idle.append(stack.enter_context(line))
        with scripted(run, 2):  # comes last, and is answered
            held = open_descriptors(run.server.getsockname()[1])
            assert held <= 64 + 2 + 1  # strangers, processes, and the port itself
    assert run.ended.empty()
    (refused, *later) = [record for record in caplog.records if record.name.endswith("listener")]
    assert "127.0.0.2 was one of 64 that did not say who they are" in refused.getMessage()
    assert not later  # once a minute


def open_descriptors(port: int) -> int:
    """Count the sockets of this process that have this local port."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as line:
            count += line.family == socket.AF_INET and line.getsockname()[1] == port
    return count


def test_slow_line_of_a_stranger_is_cut_off_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_NAME_S", 0.3)
    run = Run(2, (0, 1), LONG)
    start = time.monotonic()
    with socket.create_connection(run.address, timeout=60) as line, pytest.raises(OSError):
        while time.monotonic() < start + 30:  # a byte at a time, of a line without end
            line.sendall(b"1")
            time.sleep(0.05)
    assert 0.3 <= time.monotonic() - start < 5
    assert run.ended.empty()


@pytest.mark.slow
def test_lost_process_is_noticed_in_time_during_a_flood(capsys: Any) -> None:
    """A quarter of the limit after its connection was closed, as without strangers."""
    run = Run(2, (0,), 4 * SHORT)
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(run.address, 5) as line:
                line.sendall(STATE + b"\n")

    thread = threading.Thread(target=flood)
    thread.start()
    with scripted(run, 1):
        pass
    start = time.monotonic()
    assert run.statuses(1) == {0: EXIT_CODE}
    assert SHORT - 0.1 < time.monotonic() - start < SHORT + 1
    over.set()
    thread.join()
    assert "process 1 of 2 (host h1, 127.0.0.1) is missing: last heard during update" in (
        capsys.readouterr().err
    )


# ------------------------------------------------------------------------------- Without a token


@pytest.mark.slow
def test_process_that_gets_no_token_names_process_0_after_the_limit(capsys: Any) -> None:
    run = Run(2, (0, 1), SHORT, waiting=(1,))
    assert run.statuses(2) == {0: EXIT_CODE, 1: EXIT_CODE}
    error_text = capsys.readouterr().err
    assert "process 0 of 2 is missing" in error_text and "process 1 of 2 is missing" in error_text


def test_error_of_a_process_without_a_token_waits_for_nobody() -> None:
    run = Run(2, (0, 1), LONG, waiting=(1,))
    run.members[1].fail(ValueError("its own"))
    assert run.ended.empty()


def test_token_comes_after_the_start() -> None:
    run = Run(2, (0, 1), LONG, waiting=(0, 1))
    for index in (1, 0):
        run.members[index].trust(TOKEN)
    run.fail(0, ValueError("its own")).join(60)
    assert run.statuses(1) == {1: EXIT_CODE}


def test_verdict_names_the_address_of_a_process_that_was_never_heard() -> None:
    meeting = Meeting(0, 3, [listener.listen("localhost")], {2: "10.0.0.66"})
    process = Heartbeats(meeting, LONG, print)
    verdict = process._judge(list(process._peers.values()), 1e9)
    assert "process 1 of 3 is missing" in verdict.text
    assert "process 2 of 3 (10.0.0.66) is missing: last heard during setup" in verdict.text


def test_verdict_on_many_processes_fits_into_a_line() -> None:
    meeting = Meeting(0, 1000, [listener.listen("localhost")], {})
    process = Heartbeats(meeting, LONG, print)
    for peer in process._peers.values():
        peer.state = json.loads(STATE) | {"host": "h" * 64, "error": "\u2028" * 600}
    verdict = process._judge(list(process._peers.values()), 1.0)
    assert len(json.dumps(verdict.text)) < listener.LONGEST_LINE
    assert "; 989 more processes; end what is left" in verdict.text
    assert len(verdict.to_blame) == 999


def test_stopped_time_of_a_process_is_not_counted() -> None:
    seconds = iter([100.0, 101.0, 101.5, 700.0, 701.0])
    clock = peers._Clock(longest=5.0, seconds=lambda: next(seconds))
    assert [clock.now() for _ in range(4)] == [1.0, 1.5, 6.5, 7.5]


def test_single_process_has_no_peers() -> None:
    assert not peers.is_running()
    peers.note(phase="rollout")
    with pytest.raises(KeyError), peers.announced():
        raise KeyError("its own")
