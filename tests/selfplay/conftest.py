"""Fixtures of the selfplay tests: reference cases, our task names, a limit on running time."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.paths import REFERENCE_CASES

TASKS = {
    "doc_general_qa": "general_qa",
    "docmath_qa": "financial_math",
    "doc_mc": "multiple_choice",
}


def _decode(value: dict[str, Any]) -> Any:
    if "__float__" in value:
        return float(value["__float__"])
    return complex(*value["__complex__"]) if "__complex__" in value else value


@pytest.fixture(scope="session")
def cases() -> Callable[[str], list[dict[str, Any]]]:
    """Read the cases of one file by its name without suffix."""

    def read(name: str) -> list[dict[str, Any]]:
        recorded_cases = json.loads(
            (REFERENCE_CASES / f"{name}.json").read_text(), object_hook=_decode
        )["cases"]
        assert recorded_cases, name
        return recorded_cases

    return read


@pytest.fixture(scope="session")
def our_task() -> Callable[[str], str]:
    """Return the function from a task name of the reference files to the project's task name."""
    return TASKS.__getitem__


@contextmanager
def _alarm() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError("still running after 20 s: not linear in the length of its input")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def linear() -> Iterator[None]:
    """Interrupt a test that would take hours on a long input.

    Linear code needs far less than 1 s.
    """
    with _alarm():
        yield
