"""Tests of processes (threads here) that wait for each other: all arrive, or some are missing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator

import pytest

from spell_jax.runtime.hosts import listener
from spell_jax.runtime.hosts.peers import Meeting, wait_for_all


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def close(meeting: Meeting) -> None:
    for server in meeting.hub:
        if isinstance(server, socket.socket):
            server.close()


def meeting_errors(port: int, count: int, indices: Iterable[int], limit: float) -> dict[int, str]:
    """Let these processes of `count` wait; return each one's error text, "" for success."""
    answers: dict[int, str] = {}

    def run(index: int) -> None:
        try:
            meeting = wait_for_all(f"localhost:{port}", count, index, limit)
            answers[index] = ""
            close(meeting)
        except TimeoutError as error:
            answers[index] = str(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in indices]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(30)
    return answers


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_processes_continue_once_all_have_joined(order, port: int) -> None:
    assert meeting_errors(port, 3, order, 20) == {0: "", 1: "", 2: ""}
    with socket.create_server(("localhost", port)):
        pass  # free again


@pytest.mark.slow
def test_timeout_on_all_processes_names_missing_ones(port: int) -> None:
    answers = meeting_errors(port, 5, (0, 1, 3), 1)
    assert answers == dict.fromkeys((0, 1, 3), "missing: process 2 of 5, process 4 of 5")


def test_timeout_names_an_unreachable_process_0(port: int) -> None:
    text = f"missing: process 0, which does not answer at localhost:{port}"
    assert meeting_errors(port, 3, (1, 2), 0.6) == {1: text, 2: text}


def test_connections_of_strangers_and_other_runs_are_ignored(port: int) -> None:
    answers: dict[int, str] = {}
    waiting = threading.Thread(target=lambda: answers.update(meeting_errors(port, 2, (0,), 20)))
    waiting.start()
    for text in (b"process 1 of 3\n", b"process 0 of 2\n", b"\xff\xfe\n", b"process 1 of 2", b""):
        _say(port, text)
    assert meeting_errors(port, 2, (1,), 20) == {1: ""}
    waiting.join(30)
    assert answers == {0: ""}


def test_restarted_process_is_counted_once_and_answered(port: int) -> None:
    """A process died while it waited, and was started again."""
    answers: dict[int, str] = {}
    waiting = threading.Thread(target=lambda: answers.update(meeting_errors(port, 3, (0,), 20)))
    waiting.start()
    _say(port, b"process 1 of 3\n")
    assert meeting_errors(port, 3, (1, 2), 20) == {1: "", 2: ""}
    waiting.join(30)
    assert answers == {0: ""}


def test_port_in_use_raises() -> None:
    with socket.create_server(("", 0)) as server, pytest.raises(OSError, match="in use"):
        wait_for_all(f"localhost:{server.getsockname()[1]}", 2, 0, 5)


@contextlib.contextmanager
def meeting_of_two(port: int, host: str = "localhost") -> Iterator[list[Meeting]]:
    """Let process 0 of two wait at a host; its meeting is in the list at the end."""
    meetings: list[Meeting] = []
    waiting = threading.Thread(
        target=lambda: meetings.append(wait_for_all(f"{host}:{port}", 2, 0, 20))
    )
    waiting.start()
    yield meetings
    waiting.join(30)
    close(meetings[0])


def test_silent_strangers_do_not_delay_the_meeting(port: int) -> None:
    with meeting_of_two(port), contextlib.ExitStack() as stack:
        _say(port, b"")
        for _ in range(100):
            stack.enter_context(socket.create_connection(("localhost", port), timeout=5))
        start = time.monotonic()
        assert meeting_errors(port, 2, (1,), 20) == {1: ""}
        assert time.monotonic() - start < 3


def test_process_takes_its_place_back_from_a_stranger(port: int) -> None:
    answers: dict[int, str] = {}
    waiting = threading.Thread(target=lambda: answers.update(meeting_errors(port, 3, (0,), 20)))
    waiting.start()
    first = threading.Thread(target=lambda: answers.update(meeting_errors(port, 3, (1,), 20)))
    first.start()
    time.sleep(0.2)
    with socket.create_connection(("localhost", port), timeout=5) as stranger:
        stranger.sendall(b"process 1 of 3\n")
        assert stranger.recv(100) == b""  # when process 1 has called again
    assert meeting_errors(port, 3, (2,), 20) == {2: ""}
    for thread in (waiting, first):
        thread.join(30)
    assert answers == {0: "", 1: ""}


def test_heartbeats_listen_where_the_others_called(port: int) -> None:
    with meeting_of_two(port, host="cluster") as meetings:
        host, hub_port = wait_for_all(f"127.0.0.3:{port}", 2, 1, 20).hub
        assert host == "127.0.0.3"
        with socket.create_connection((host, hub_port), timeout=5):
            pass
        with pytest.raises(ConnectionRefusedError):  # no other address
            socket.create_connection(("127.0.0.1", hub_port), timeout=5)
    assert meetings[0].addresses == {1: "127.0.0.1"}


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("localhost", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("192.0.2.1", "::"),  # of another machine: a service of the cluster that leads here
        ("cluster-0.example", "::"),
    ],
)
def test_listeners_are_bound_to_addresses_of_this_machine(host: str, bound: str) -> None:
    with listener.listen(host) as server:
        assert server.getsockname()[0] in (bound, bound.replace("::", "0.0.0.0"))


@pytest.mark.parametrize(
    "answer",
    [b"\x00\x00\x12\x04\x00\n", b"all there \x1b[2J\n", b"missing: \x1b[2J\n", b"all there "],
)
def test_answers_of_other_servers_are_ignored(answer: bytes, port: int) -> None:
    """Such as jax's, which listens at the port afterwards."""
    with socket.create_server(("localhost", port)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as line:
                        line.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        text = f"missing: process 0, which does not answer at localhost:{port}"
        assert meeting_errors(port, 2, (1,), 0.4) == {1: text}


def _say(port: int, text: bytes) -> None:
    """Connect to process 0, which may not be listening yet, and hang up."""
    for _ in range(100):
        try:
            with socket.create_connection(("localhost", port), timeout=5) as line:
                line.sendall(text)
            return
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise AssertionError("nobody listens")
