"""Bytes between hosts: two real processes get the same, and fail together.

python -m tests.runtime.test_hosts PORT PROCESS        # prints what it was told, as JSON
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from spell_jax.runtime import hosts


def run_two(module: str, *arguments: str) -> list[Any]:
    """What two processes of a module print last, given a port, their number and more arguments."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, port, str(process), *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in (0, 1)
    ]
    try:
        told = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in told]


def connect(port: str, process: str) -> int:
    """Makes this process one of two, with two devices each; returns its number."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, int(process))
    return jax.process_index()


# Items of both hosts: of other numbers and sizes, and more than the smallest exchange.
ITEMS = (
    ([b""], [b"a", b"\x00\xff" * 5, b""]),
    ([], []),
    ([b"x" * 3000, b"yy"], [b"z" * 17]),
    ([bytes(1008)], []),  # with its lengths just the smallest exchange, and one more
    ([bytes(1009)], []),
)


def test_two_hosts_get_all_items_and_fail_together() -> None:
    first, second = run_two("tests.runtime.test_hosts")
    gathered = [[[item.hex() for item in part] for part in parts] for parts in ITEMS]
    assert first["gathered"] == second["gathered"] == gathered
    assert first["made"] == second["made"] == [["00"], ["01"]]
    assert first["one"] == second["one"] == "host 1: ValueError: gone größer"
    assert first["both"] == second["both"] == "host 0: KeyError: 'b'; host 1: OSError: a"
    assert (first["cause"], second["cause"]) == ("NoneType", "ValueError")
    assert first["after"] == second["after"] == [["00"], ["01"]]


def test_one_host_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_gather", None)
    assert hosts.gather_bytes([b"a", b""]) == [[b"a", b""]]
    assert hosts.make_together(lambda: [b"c"]) == [[b"c"]]
    with pytest.raises(RuntimeError, match="host 0: ValueError: no"):
        hosts.make_together(lambda: _fail(ValueError("no")))


def _fail(error: Exception) -> Sequence[bytes]:
    raise error


def _error(make) -> RuntimeError:
    try:
        hosts.make_together(make)
    except RuntimeError as error:
        return error
    raise AssertionError("no error")


def main() -> None:
    me = connect(*sys.argv[1:])

    def good() -> list[bytes]:
        return [bytes([me])]

    def told(parts: list[list[bytes]]) -> list[list[str]]:
        return [[item.hex() for item in part] for part in parts]

    one = _error(good if me == 0 else lambda: _fail(ValueError("gone größer")))
    both = _error(lambda: _fail([KeyError("b"), OSError("a")][me]))
    result = {
        "gathered": [told(hosts.gather_bytes(parts[me])) for parts in ITEMS],
        "made": told(hosts.make_together(good)),
        "one": str(one),
        "cause": type(one.__cause__).__name__,
        "both": str(both),
        "after": told(hosts.make_together(good)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
