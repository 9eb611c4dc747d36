"""Tests of processes (threads here) that wait for each other: all arrive, or some are missing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable

import pytest

from spell_jax.runtime.rendezvous import wait_for_all


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def told(port: int, count: int, indices: Iterable[int], limit: float) -> dict[int, str]:
    """Let these processes of `count` wait; return each one's error text, "" for success."""
    answers: dict[int, str] = {}

    def run(index: int) -> None:
        try:
            wait_for_all(f"localhost:{port}", count, index, limit)
            answers[index] = ""
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
    assert told(port, 3, order, 20) == {0: "", 1: "", 2: ""}
    with socket.create_server(("localhost", port)):
        pass  # free again


@pytest.mark.slow
def test_timeout_on_all_processes_names_missing_ones(port: int) -> None:
    answers = told(port, 5, (0, 1, 3), 1)
    assert answers == dict.fromkeys((0, 1, 3), "missing: process 2 of 5, process 4 of 5")


def test_timeout_names_an_unreachable_process_0(port: int) -> None:
    text = f"missing: process 0, which does not answer at localhost:{port}"
    assert told(port, 3, (1, 2), 0.6) == {1: text, 2: text}


def test_connections_of_strangers_and_other_runs_are_ignored(port: int) -> None:
    answers: dict[int, str] = {}
    waiting = threading.Thread(target=lambda: answers.update(told(port, 2, (0,), 20)))
    waiting.start()
    for text in (b"process 1 of 3", b"\xff\xfe", b""):
        _say(port, text)
    assert told(port, 2, (1,), 20) == {1: ""}
    waiting.join(30)
    assert answers == {0: ""}


def test_restarted_process_is_counted_once_and_answered(port: int) -> None:
    """A process died while it waited, and was started again."""
    answers: dict[int, str] = {}
    waiting = threading.Thread(target=lambda: answers.update(told(port, 3, (0,), 20)))
    waiting.start()
    _say(port, b"process 1 of 3")
    assert told(port, 3, (1, 2), 20) == {1: "", 2: ""}
    waiting.join(30)
    assert answers == {0: ""}


def test_port_in_use_raises() -> None:
    with socket.create_server(("", 0)) as server, pytest.raises(OSError, match="in use"):
        wait_for_all(f"localhost:{server.getsockname()[1]}", 2, 0, 5)


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
