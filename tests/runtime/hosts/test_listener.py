"""Tests of a listener that strangers reach: bounds on connections, lines and time, and its log."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from spell_jax.runtime.hosts import listener
from spell_jax.runtime.hosts.listener import Connection, Listener


class Echo:
    """A listener of callers named "me", to whom every further line is sent back."""

    def __init__(self) -> None:
        self.server = listener.listen("localhost")
        self.address = self.server.getsockname()
        self.lost: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        with Listener([self.server], self._answer, self._lose, lambda: b"hello") as door:
            while not self._over.is_set():
                door.exchange(0.01)

    def _answer(self, connection: Connection, line: bytes) -> bytes:
        if connection.caller is not None:
            return line + b"\n"
        if line != b"me":
            raise ValueError("is not me")
        connection.caller = "me"
        return b""

    def _lose(self, connection: Connection) -> None:
        self.lost.append(connection.caller)

    def __enter__(self) -> Echo:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def caller(echo: Echo, name: bytes = b"me\n", source: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.create_connection(echo.address, 10, source_address=(source, 0)) as line:
        with line.makefile("rb") as answers:
            assert answers.readline() == b"hello\n"
        line.sendall(name)
        yield line


def is_closed(line: socket.socket) -> bool:
    line.settimeout(0.05)
    try:
        return line.recv(1) == b""
    except TimeoutError:
        return False


def says(line: socket.socket, text: bytes) -> bytes:
    line.sendall(text)
    return line.recv(1 << 17)


def test_lines_are_answered_however_they_arrive() -> None:
    with Echo() as echo, caller(echo, b"me\none\ntw") as line:
        assert line.recv(100) == b"one\n"
        assert says(line, b"o\n") == b"two\n"
    with Echo() as echo:
        with caller(echo) as line:
            assert says(line, b"a\n") == b"a\n"
        deadline = time.monotonic() + 10
        while not echo.lost and time.monotonic() < deadline:
            time.sleep(0.01)
    assert echo.lost == ["me"]


@pytest.mark.parametrize("text", [b"you\n", b"x" * 257, b"x" * 300 + b"\n"])
def test_strangers_are_closed_and_not_lost(text: bytes) -> None:
    with Echo() as echo, caller(echo, text) as line, contextlib.suppress(ConnectionResetError):
        assert line.recv(100) == b""
    assert echo.lost == []


def test_long_line_of_a_known_caller_closes_its_connection() -> None:
    with Echo() as echo, caller(echo) as line, contextlib.suppress(ConnectionError):
        line.sendall(b"x" * (listener.LONGEST_LINE + 1))
        assert line.recv(100) == b""


def test_strangers_of_one_address_leave_those_of_others(monkeypatch) -> None:
    monkeypatch.setattr(listener, "_MOST_UNKNOWN", 4)
    with Echo() as echo, contextlib.ExitStack() as stack:
        slow = stack.enter_context(caller(echo, b"", source="127.0.0.3"))
        flood = [stack.enter_context(caller(echo, b"", source="127.0.0.2")) for _ in range(20)]
        assert says(slow, b"me\na\n") == b"a\n"  # the oldest of all
        assert [is_closed(line) for line in flood] == [True] * 17 + [False] * 3


def test_known_callers_are_never_replaced(monkeypatch) -> None:
    monkeypatch.setattr(listener, "_MOST_UNKNOWN", 2)
    with Echo() as echo, contextlib.ExitStack() as stack:
        lines = [stack.enter_context(caller(echo)) for _ in range(5)]
        for _ in range(5):
            stack.enter_context(caller(echo, b""))
        assert [says(line, b"a\n") for line in lines] == [b"a\n"] * 5


def test_refusals_are_logged_at_once_and_then_once_a_while(monkeypatch, caplog) -> None:
    monkeypatch.setattr(listener, "_LOG_EVERY_S", 0.3)
    with Echo() as echo:
        for _ in range(3):
            with caller(echo, b"\x1b[2J\n", source="127.0.0.2") as line:
                assert line.recv(100) == b""
        time.sleep(0.4)
        with caller(echo, b"\x1b[2J\n", source="127.0.0.2") as line:
            assert line.recv(100) == b""
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    port = echo.address[1]
    why = "the last because 127.0.0.2 is not me"
    assert texts == [f"port {port} of this run: closed connections: {n}, {why}" for n in (1, 2, 1)]


def test_address_of_another_machine_stands_for_all_addresses_and_a_used_port_is_an_error() -> None:
    with listener.listen("192.0.2.1") as server, socket.socket() as client:
        client.connect(("127.0.0.1", server.getsockname()[1]))
        with pytest.raises(OSError, match="in use"):
            listener.listen("127.0.0.1", server.getsockname()[1])


def test_lack_of_descriptors_does_not_end_the_listener(monkeypatch) -> None:
    """Callers wait until there are some."""
    with Echo() as echo:
        accept, failures = socket.socket.accept, [OSError(24, "Too many open files")] * 3

        def accept_later(server: socket.socket):
            if failures:
                raise failures.pop()
            return accept(server)

        monkeypatch.setattr(socket.socket, "accept", accept_later)
        with caller(echo) as line:
            assert says(line, b"a\n") == b"a\n"
    assert not failures


@pytest.mark.parametrize(
    ("address", "text"),
    [("::ffff:10.0.0.2", "10.0.0.2"), ("10.0.0.2", "10.0.0.2"), ("fe80::1%2", "fe80::1%2")],
)
def test_addresses_are_shown_plainly(address: str, text: str) -> None:
    assert listener.plain(address) == text
