"""Environment set before any import of jax: eight fake devices and a shared compilation cache.

Test processes and the programs that they start share the cache.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

from tests import shape_checks
from tests.paths import ROOT

FAKE_DEVICES = "--xla_force_host_platform_device_count=8"
# XLA ends a process if one device waits 40 s for the others in a collective. On two busy cores,
# eight devices with interpreted kernels take longer.
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=300"


def _set_environment() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FAKE_DEVICES} {PATIENT}".strip()


_set_environment()
# Shapes and dtypes of annotated arrays are checked in tests; outside they cost nothing.
install_import_hook(
    [f"spell_jax.{room}" for room in ("attention", "learner", "policy", "sampler")],
    f"{shape_checks.__name__}.check",
)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell lets its background jobs ignore Ctrl-C, and programs that tests start would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.load_profile("deterministic")


@pytest.fixture(autouse=True)
def _in_repository_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in the checkout, like configs/ and launch/."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(autouse=True)
def _no_signal_status() -> Iterator[None]:
    """Keep a test that ends a command by a signal from deciding pytest's own exit status."""
    yield
    if entry := sys.modules.get("spell_jax.runtime.entry"):
        entry._signal_status = None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in tests/slow as slow."""
    for item in items:
        if (ROOT / "tests" / "slow") in item.path.parents:
            item.add_marker(pytest.mark.slow)


MAPS = Path("/proc/self/maps")
MOST_MAPS = 20_000


@pytest.fixture(autouse=True, scope="module")
def _few_programs() -> Iterator[None]:
    """Clear compiled programs when the process has many memory maps.

    XLA maps about 13 areas of memory per program compiled for CPUs, and a process may have 65,530
    (vm.max_map_count). After 5,000 programs it ends with a segmentation fault.
    """
    yield
    if "jax" in sys.modules and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        sys.modules["jax"].clear_caches()


@pytest.fixture(scope="session")
def spell_data() -> Path:
    """Return the folder of real documents; skip the test if SPELL_DATA is not set."""
    folder = os.environ.get("SPELL_DATA")
    if not folder:
        pytest.skip("SPELL_DATA is not set: it names the folder of real documents")
    path = Path(folder)
    if not path.is_dir():
        raise NotADirectoryError(f"SPELL_DATA is {folder!r}, want an existing folder")
    return path
