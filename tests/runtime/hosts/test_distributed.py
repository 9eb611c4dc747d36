"""Tests of joining processes and exchanging data, with two real processes.

Both processes get the same data, and fail together.

python -m tests.runtime.hosts.test_distributed PORT PROCESS        # prints the data as JSON
python -m tests.runtime.hosts.test_distributed PORT PROCESS FAILS  # process FAILS fails
python -m tests.runtime.hosts.test_distributed PORT PROCESS bomb FILE  # a pickle would make FILE
python -m tests.runtime.hosts.test_distributed PORT PROCESS token  # prints who knows what
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pathlib
import pickle
import re
import socket
import struct
import subprocess
import sys
import types
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from spell_jax.runtime.hosts import distributed, listener, peers
from spell_jax.runtime.hosts.peers import Meeting


def run_two(module: str, *arguments: str) -> list[Any]:
    """Run two processes of a module; return the last line of each, parsed as JSON.

    Arguments of a process are a port, its number and `arguments`.
    """
    ended = end_two(module, *arguments)
    assert [code for code, *_ in ended] == [0, 0], ended
    return [json.loads(text.splitlines()[-1]) for _, text, _ in ended]


def end_two(module: str, *arguments: str) -> list[tuple[int, str, str]]:
    """Run two processes of a module; return (exit code, stdout, stderr) of each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, port, str(process), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(running, outputs, strict=True)]


def connect(port: str, process: str) -> int:
    """Make this process one of two, with two devices each; return its number."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    os.environ |= {distributed.COORDINATOR: f"localhost:{port}", distributed.PROCESSES: "2"}
    os.environ |= {
        distributed.PROCESS: process,
        distributed.JOIN_SECONDS: "100",
        distributed.LOST_SECONDS: "20",
    }
    distributed.join()
    return jax.process_index()


# Items of both processes: different numbers and sizes, some above the minimum exchange size.
ITEMS = (
    ([b""], [b"a", b"\x00\xff" * 5, b""]),
    ([], []),
    ([b"x" * 3000, b"yy"], [b"z" * 17]),
    ([bytes(1008)], []),  # with its length exactly the minimum size; the next is above
    ([bytes(1009)], []),
)


@pytest.mark.slow
def test_two_processes_exchange_data_and_fail_together() -> None:
    first, second = run_two("tests.runtime.hosts.test_distributed")
    gathered = [[[item.hex() for item in part] for part in parts] for parts in ITEMS]
    assert first["gathered"] == second["gathered"] == gathered
    assert first["made"] == second["made"] == [["00"], ["01"]]
    assert first["one"] == second["one"] == "host 1: ValueError: gone größer"
    assert first["both"] == second["both"] == "host 0: KeyError: 'b'; host 1: OSError: a"
    assert (first["cause"], second["cause"]) == ("NoneType", "ValueError")
    assert first["after"] == second["after"] == [["00"], ["01"]]
    # Process 0 alone does the work of a broadcast; all get the result.
    assert first["broadcast"] == second["broadcast"] == {"verdicts": [1, 0, -1]}
    assert (first["asked"], second["asked"]) == ([0], [])
    assert first["refused"] == second["refused"] == "host 0: OSError: no server"
    # An error in a block on one host is raised on all hosts after the block.
    assert first["blocks"] == second["blocks"] == ["", "host 1: OSError: disk full"]
    # Of a barrier with the same name each use is another one; a failure ends all that wait.
    failure = "host 1: OSError: disk full"
    assert first["barriers"] == second["barriers"] == ["", "", failure, failure]
    assert first["whole"] == second["whole"] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_error_of_one_process_ends_both_and_is_printed(failing: int) -> None:
    """Both end at once: by default jax lets the failed process wait five minutes for the other."""
    ended = end_two("tests.runtime.hosts.test_distributed", str(failing))
    assert [ended[failing][0], ended[1 - failing][0]] == [1, peers.EXIT_CODE], ended
    assert "ValueError: its own\n" in ended[failing][2]
    where = f"host {socket.gethostname()}, 127.0.0.1"
    for _, _, errors in ended:
        assert f"process {failing} of 2 ({where}) failed during setup" in errors
        assert "ValueError: its own; " in errors


class Bomb:
    """An object that makes a file where its pickle is read."""

    def __init__(self, canary: pathlib.Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return pathlib.Path.touch, (self._canary,)


@pytest.mark.slow
def test_process_under_a_false_name_runs_no_code_on_the_others(tmp_path) -> None:
    """A stranger joins as process 1 and sends pickles in place of its items."""
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(Bomb(canary)))
    assert canary.exists()  # the bomb works
    canary.unlink()
    first, _ = run_two("tests.runtime.hosts.test_distributed", "bomb", str(canary))
    assert not canary.exists() and len(first) == 2
    for error in first:
        assert re.match(r"process 1 sent \d+ bytes that are no list of items: .* version", error)


TOKEN = b"a token of this test, and no sec"


@pytest.mark.slow
def test_token_is_shared_and_forgotten_and_only_this_machine_is_listened_to() -> None:
    ended = end_two("tests.runtime.hosts.test_distributed", "token")
    assert [code for code, *_ in ended] == [0, 0], ended
    for _, stdout, errors in ended:
        assert json.loads(stdout.splitlines()[-1]) == {"knows": True, "finds": False, "open": []}
        for text in (TOKEN.decode(), TOKEN.hex(), base64.b64encode(TOKEN).decode()):
            assert text not in stdout + errors


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps([b"a", b"b"]),
        b"",
        b"\x00" * 7,
        struct.pack("<2Q", 1, 4) + b"abc",  # shorter than its lengths say
        struct.pack("<2Q", 1, 4) + b"abcde",  # longer
        struct.pack("<3Q", 2, 2**64 - 1, 5) + b"abcd",  # the sum would wrap around
        struct.pack("<Q", 2**64 - 1),
        struct.pack("<Q", 2**61),  # 8 times this would wrap around
    ],
)
def test_bytes_that_are_no_items_name_the_process(data: bytes) -> None:
    with pytest.raises(RuntimeError, match=f"process 5 sent {len(data)} bytes that are no list"):
        distributed._split_items(data, 5)


@pytest.mark.parametrize("items", [[], [b""], [b"a", b"", b"\x80\x04."], [bytes(5000)] * 3])
def test_items_are_split_as_they_were_joined(items: list[bytes]) -> None:
    assert distributed._split_items(distributed._join_items(items), 1) == items


@pytest.mark.parametrize("size", [-1, (1 << 32) + 1, 2**63 - 1])
def test_wrong_size_of_a_process_is_named_before_memory_is_taken(size: int, monkeypatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    row = np.array([size], "<i8").view(np.uint8)
    monkeypatch.setattr(distributed, "_gather", lambda size_row: np.stack([size_row, row]))
    with pytest.raises(RuntimeError, match=f"process 1 has {size:,} bytes to send: at most"):
        distributed.gather_bytes([b"a"])


@pytest.mark.parametrize(
    ("items", "fault"),
    [
        ([], "no text"),
        ([b"\xff"], "no text"),
        ([b""], "no text"),  # no result
        ([b"", b"{"], "no JSON value"),
        ([b"", b"[" * 100_000], "no JSON value"),
    ],
)
def test_foreign_items_of_process_0_are_named(items: list[bytes], fault: str, monkeypatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(distributed, "gather_bytes", lambda items_1: [items, items_1])
    with pytest.raises(RuntimeError, match=f"process 0 sent {fault}"):
        distributed.broadcast(lambda: 1)


def test_single_process_needs_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_gather", None)
    assert distributed.gather_bytes([b"a", b""]) == [[b"a", b""]]
    assert distributed.make_together(lambda: [b"c"]) == [[b"c"]]
    with pytest.raises(RuntimeError, match="host 0: ValueError: no"):
        distributed.make_together(lambda: _fail(ValueError("no")))
    assert distributed.broadcast(lambda: (1, 2)) == (1, 2)
    with pytest.raises(KeyError), distributed.fail_together():
        raise KeyError("its own")


# ------------------------------------------------------------------------------------------ Joining

GIVEN = {
    distributed.COORDINATOR: "10.0.0.1:1234",
    distributed.PROCESSES: "4",
    distributed.PROCESS: "3",
}
SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "node[3-5]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.9,10.0.0.8:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Record calls of wait_for_all and of jax.distributed, which are both replaced."""
    calls = types.SimpleNamespace(
        met=[], started=[], peers=[], trusted=[], is_initialized=lambda: False
    )
    calls.initialize = lambda *arguments, **options: calls.started.append((arguments, options))

    def wait_for_all(address: str, count: int, index: int, limit: int) -> Meeting:
        calls.met.append((address, count, index, limit))
        host = peers.split(address)[0]
        return Meeting(index, count, (host, 4711), {0: host})

    monkeypatch.setattr(peers, "wait_for_all", wait_for_all)
    monkeypatch.setattr(peers, "start", lambda *arguments: calls.peers.append(arguments))
    monkeypatch.setattr(peers, "trust", calls.trusted.append)
    monkeypatch.setattr(distributed, "_share_token", lambda *_: b"token")
    monkeypatch.setattr(distributed.atexit, "register", lambda *_: None)
    monkeypatch.setattr(jax, "distributed", calls)
    for name in (*GIVEN, *SLURM, *OPEN_MPI, distributed.JOIN_SECONDS, distributed.LOST_SECONDS):
        monkeypatch.delenv(name, raising=False)
    return calls


def _set(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (GIVEN, ("10.0.0.1:1234", 4, 3, None)),
        (SLURM, ("node3:62344", 3, 2, [1])),  # port 61440 + 5000 % 4096
        (OPEN_MPI, ("10.0.0.9:61441", 2, 1, [0])),
        # stated values take precedence over detected ones
        (SLURM | GIVEN, ("10.0.0.1:1234", 4, 3, None)),
    ],
)
def test_join_uses_environment_variables(variables, place, joined, monkeypatch, capsys) -> None:
    _set(monkeypatch, variables | {distributed.JOIN_SECONDS: "7", distributed.LOST_SECONDS: "5"})
    distributed.join()
    address, count, index, _ = place
    assert joined.met == [(address, count, index, 7)]
    ((arguments, options),) = joined.started
    assert arguments == place
    assert (options["initialization_timeout"], options["heartbeat_timeout_seconds"]) == (7, 15)
    host = address.partition(":")[0]
    assert joined.peers == [(Meeting(index, count, (host, 4711), {0: host}), 5)]
    assert joined.trusted == [b"token"] and options["coordinator_bind_address"] is None
    error_lines = capsys.readouterr().err.splitlines()
    assert f"waiting for {count} processes at {address}, up to 7 seconds" in error_lines[0]
    assert f"process {index} of {count}" in error_lines[0] and "within 5 seconds" in error_lines[1]


@pytest.mark.parametrize(
    ("reached", "variable", "address", "bound"),
    [
        (["127.0.0.1"], None, "127.0.0.1:1234", "127.0.0.1:1234"),
        (["::1"], None, "[::1]:1234", "[::1]:1234"),
        (["127.0.0.1", "127.0.0.2"], None, "host:1234", None),  # all addresses
        # as jax's variables say
        (["127.0.0.1"], "JAX_COORDINATOR_BIND_ADDRESS", "host:1234", None),
        (["127.0.0.1"], "JAX_MTLS_CERT_FILE", "host:1234", None),
    ],
)
def test_service_of_jax_listens_where_all_others_called(
    reached, variable, address, bound, monkeypatch
) -> None:
    for name in distributed._SERVICE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "any")
    with contextlib.ExitStack() as stack:
        hub = [stack.enter_context(listener.listen(host)) for host in reached]
        meeting = Meeting(0, 3, hub, {})
        position = distributed._Position("host:1234", 3, 0)
        assert distributed._service_address(position, meeting) == (address, bound)
    position = distributed._Position("host:1234", 3, 1)
    meeting = Meeting(1, 3, ("host", 1), {})
    assert distributed._service_address(position, meeting) == ("host:1234", None)


@pytest.mark.parametrize(
    "variables", [{}, GIVEN | {distributed.PROCESSES: "1", distributed.PROCESS: "0"}]
)
def test_single_process_does_not_join(variables, joined, monkeypatch, capsys) -> None:
    _set(monkeypatch, variables)
    distributed.join()
    assert (joined.met, joined.started, capsys.readouterr().err) == ([], [], "")


def test_initialized_process_does_not_join_again(joined, monkeypatch) -> None:
    _set(monkeypatch, GIVEN)
    joined.is_initialized = lambda: True
    distributed.join()
    assert joined.met == []


def test_join_timeout_names_variable_and_missing_process(joined, monkeypatch) -> None:
    def wait_for_all(*_) -> None:
        raise TimeoutError("missing: process 2 of 4")

    monkeypatch.setattr(peers, "wait_for_all", wait_for_all)
    _set(monkeypatch, GIVEN)
    with pytest.raises(TimeoutError, match=r"SPELL_JOIN_SECONDS = 300: .*process 2 of 4"):
        distributed.join()
    assert joined.started == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (distributed.COORDINATOR, None, r"SPELL_COORDINATOR: is missing"),
        (distributed.PROCESS, None, r"SPELL_PROCESS: is missing"),
        (distributed.COORDINATOR, "10.0.0.1", r"SPELL_COORDINATOR = '10.0.0.1': must be host:port"),
        (distributed.PROCESSES, "0", r"SPELL_PROCESSES = '0': must be a whole number, at least 1"),
        (distributed.PROCESS, "-1", r"SPELL_PROCESS = '-1': must be a whole number, at least 0"),
        (distributed.PROCESS, "4", r"SPELL_PROCESS = '4': must be below SPELL_PROCESSES = 4"),
        (distributed.JOIN_SECONDS, "0", r"SPELL_JOIN_SECONDS = '0': must be"),
        (distributed.LOST_SECONDS, "1.5", r"SPELL_LOST_SECONDS = '1.5': must be"),
    ],
)
def test_invalid_join_variables_are_rejected(name, value, message, joined, monkeypatch) -> None:
    variables = GIVEN | ({} if value is None else {name: value})
    _set(monkeypatch, {key: text for key, text in variables.items() if key != name or value})
    with pytest.raises(ValueError, match=message):
        distributed.join()
    assert (joined.met, joined.started) == ([], [])


def _fail(error: Exception) -> Sequence[bytes]:
    raise error


def _error(make) -> RuntimeError:
    try:
        distributed.make_together(make)
    except RuntimeError as error:
        return error
    raise AssertionError("no error")


def _error_of_block(failing: bool) -> str:
    try:
        with distributed.fail_together():
            if failing:
                raise OSError("disk full")
    except RuntimeError as error:
        return str(error)
    return ""


def _error_of_broadcast() -> str:
    try:
        distributed.broadcast(lambda: _fail(OSError("no server")))
    except RuntimeError as error:
        return str(error)
    return ""


def _barriers(me: int) -> list[str]:
    """Return the errors of four barriers; process 1 fails before it reaches the third barrier."""
    barriers = distributed.Barriers()

    def reach(key: str) -> str:
        try:
            barriers(key=key, timeout_ms=100_000)
        except RuntimeError as error:
            return str(error)
        return ""

    errors = [reach("saving"), reach("saving")]
    if me == 1:
        with pytest.raises(OSError), barriers.announced():
            raise OSError("disk full")
        return [*errors, *[barriers.failure()] * 2]
    return [*errors, reach("saving"), reach("saved")]


def _split_rows() -> jax.Array:
    """Return a float32 array [4, 2] with a row per device."""
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    place = NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec("x"))
    return jax.make_array_from_callback(rows.shape, place, lambda index: rows[index])


def attack(process: int, canary: pathlib.Path) -> list[str]:
    """Let process 1 send pickles in two exchanges; return the errors of this process."""
    bombs = pickle.dumps(Bomb(canary)), pickle.dumps([Bomb(canary)] * 2, protocol=0)
    errors = []
    for bomb in bombs:
        with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(RuntimeError) as error:
            if process == 1:
                monkeypatch.setattr(distributed, "_join_items", lambda _, bomb=bomb: bomb)
            distributed.gather_bytes([b"an item"])
        errors.append(str(error.value))
    return errors


def share(port: str, process: str) -> dict[str, Any]:
    """Join with TOKEN; tell whether this process knows it, and finds it in jax's service.

    `open` lists ports at which this process listens to all addresses.
    """
    tokens: list[bytes] = []
    trust = peers.trust
    with pytest.MonkeyPatch.context() as monkeypatch:
        if process == "0":
            monkeypatch.setattr(distributed.secrets, "token_bytes", lambda size: TOKEN[:size])
        monkeypatch.setattr(peers, "trust", lambda token: (tokens.append(token), trust(token)))
        connect(port, process)
    distributed.gather_bytes([b"process 0 has removed the token"])
    values = distributed._client().key_value_dir_get_bytes("spell_jax/")
    return {"knows": tokens == [TOKEN], "finds": bool(values), "open": _ports_of_all_addresses()}


def _ports_of_all_addresses() -> list[int]:
    sockets = set()
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of the loop itself
            sockets.add(os.readlink(entry))
    ports = []
    for table in ("tcp", "tcp6"):
        for row in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, endpoint, _, state, *_, inode = row.split()[:10]
            address, _, port = endpoint.partition(":")
            is_listening = state == "0A"
            if is_listening and not int(address, 16) and f"socket:[{inode}]" in sockets:
                ports.append(int(port, 16))
    return ports


def main() -> None:
    port, process, *failing = sys.argv[1:]
    if failing == ["token"]:
        print(json.dumps(share(port, process)))
        return
    me = connect(port, process)
    if failing and failing[0] == "bomb":
        print(json.dumps(attack(me, pathlib.Path(failing[1]))))
        return
    if [str(me)] == failing:
        raise ValueError("its own")
    asking_processes: list[int] = []

    def ask() -> dict[str, list[int]]:
        asking_processes.append(me)
        return {"verdicts": [1, 0, -1]}

    def good() -> list[bytes]:
        return [bytes([me])]

    def as_hex(parts: list[list[bytes]]) -> list[list[str]]:
        return [[item.hex() for item in part] for part in parts]

    single_error = _error(good if me == 0 else lambda: _fail(ValueError("gone größer")))
    joint_error = _error(lambda: _fail([KeyError("b"), OSError("a")][me]))
    result = {
        "gathered": [as_hex(distributed.gather_bytes(parts[me])) for parts in ITEMS],
        "made": as_hex(distributed.make_together(good)),
        "one": str(single_error),
        "cause": type(single_error.__cause__).__name__,
        "both": str(joint_error),
        "after": as_hex(distributed.make_together(good)),
        "broadcast": distributed.broadcast(ask),
        "asked": asking_processes,
        "refused": _error_of_broadcast(),
        "blocks": [_error_of_block(False), _error_of_block(me == 1)],
        "barriers": _barriers(me),
        "whole": distributed.fetch_global(_split_rows()).tolist(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
