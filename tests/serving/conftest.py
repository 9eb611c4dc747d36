"""A server that the tests of this folder share."""

from collections.abc import Iterator

import pytest

pytest.importorskip("uvicorn", reason="needs the extra 'serve'")
pytest.importorskip("starlette", reason="needs the extra 'serve'")
pytest.importorskip("prometheus_client", reason="needs the extra 'serve'")

from tests.serving.running import RunningServer, running


@pytest.fixture(scope="module")
def demo() -> Iterator[RunningServer]:
    """Run a server of the demo's policy."""
    with running() as demo_server:
        yield demo_server
