"""A server that the tests of this folder share."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.serving.running import RunningServer

# Without the extra "serve", only the checks of requests can be tested.
_EXTRA = ("prometheus_client", "starlette", "uvicorn")
collect_ignore = []
if not all(map(importlib.util.find_spec, _EXTRA)):
    folder = pathlib.Path(__file__).parent
    collect_ignore = [p.name for p in folder.glob("test_*.py") if p.name != "test_protocol.py"]


@pytest.fixture(scope="module")
def demo() -> Iterator[RunningServer]:
    """Run a server of the demo's policy."""
    from tests.serving.running import running

    with running() as demo_server:
        yield demo_server
