"""Multi-host runs: joining processes, and exchange of host data.

All processes must call these functions in the same order; so must each thread that has devices of
its own for the exchanges (`exchanging_on`). An error on one process becomes a RuntimeError on all,
so none waits for a process that will never arrive. (On a single process, `broadcast` and
`fail_together` raise the error itself.)
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import secrets
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import clusters  # no public API reports what initialize() would detect
from jax._src import distributed as jax_distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spell_jax.runtime.hosts import peers, sigterm

_POLL_S = 0.1  # pause between two looks at a barrier
# Barriers of this process that stay in jax's service. A save has fewer than 20, and starts when all
# processes have ended the save before, so no process still waits at an older barrier.
_KEPT_BARRIERS = 20
# Minimum size of an exchange in bytes: texts and small JSON values share one compiled program.
_SMALLEST = 1024
# Maximum bytes of one process: a wrong size must not exhaust the memory of all processes.
_LARGEST = 1 << 32

# Position of this process; all three are set or none.
COORDINATOR, PROCESSES, PROCESS = "SPELL_COORDINATOR", "SPELL_PROCESSES", "SPELL_PROCESS"
# Whole seconds from 1: for the other processes to join, and until a process without heartbeats is
# lost. Heartbeats continue while it compiles or writes; a machine's migration may take 100 s.
JOIN_SECONDS, LOST_SECONDS = "SPELL_JOIN_SECONDS", "SPELL_LOST_SECONDS"
_DEFAULT_SECONDS = {JOIN_SECONDS: 300, LOST_SECONDS: 100}
# jax's variables for the address of its service, and for a certificate, which names an address.
_SERVICE_VARIABLES = ("JAX_COORDINATOR_BIND_ADDRESS", "JAX_MTLS_CERT_FILE")
_TOKEN_KEY, _TOKEN_BYTES = "spell_jax/token", 32


@dataclasses.dataclass(frozen=True)
class _Position:
    address: str  # host:port of process 0
    count: int  # number of processes
    index: int  # of this process, from 0
    devices: Sequence[int] | None = None  # ids of its devices on this machine; None for all


def join() -> None:
    """Join a multi-process run if the environment describes one; else do nothing.

    Must be called before any device is touched. The environment has SPELL_COORDINATOR (host:port of
    process 0), SPELL_PROCESSES and SPELL_PROCESS (0 to SPELL_PROCESSES - 1), or is a cluster that
    jax recognizes: a TPU slice of several hosts, Slurm, Open MPI. The call waits SPELL_JOIN_SECONDS
    (300) for the other processes; TimeoutError names the missing processes. Afterwards a process
    that fails, or is not heard for SPELL_LOST_SECONDS (100), ends all others: they name it and exit
    with peers.EXIT_CODE. ValueError if a variable is missing or out of range.
    """
    if jax.distributed.is_initialized():
        return
    limit, lost = _seconds(JOIN_SECONDS), lost_seconds()
    position = _configured_position() or _detected_position(limit)
    if position is None or position.count == 1:
        return
    _log_stderr(
        f"waiting for {position.count} processes at {position.address}, up to {limit} seconds: "
        f"this is process {position.index} of {position.count}, counted from 0"
    )
    try:
        meeting = peers.wait_for_all(position.address, position.count, position.index, limit)
    except TimeoutError as error:
        raise TimeoutError(f"{JOIN_SECONDS} = {limit}: time is up; {error}") from None
    # Heartbeats come first: an error inside of jax.distributed.initialize then reaches all.
    peers.start(meeting, lost)
    address, bound = _service_address(position, meeting)
    with peers.announced():
        jax.distributed.initialize(
            address,
            position.count,
            position.index,
            position.devices,
            cluster_detection_method="deactivate",
            initialization_timeout=limit,
            # Longer than the heartbeats' limit: jax ends a process without naming the lost process.
            heartbeat_timeout_seconds=3 * lost,
            coordinator_bind_address=bound,
        )
        peers.trust(_share_token(position.index, limit))
    sigterm.reclaim()  # jax's handler would note the signal for Orbax, and nothing else
    atexit.register(_leave_if_failed)
    _log_stderr(f"all {position.count} are there; if one is lost, all end within {lost} seconds")


def _service_address(position: _Position, meeting: peers.Meeting) -> tuple[str, str | None]:
    """Return the address that processes call jax's service by, and its listening address.

    A listening address of None means all addresses of process 0, the default of jax's service.
    """
    # jax's service authenticates nobody. If all other processes have reached process 0 at one
    # address, the service listens at that address only. Process 0 must then call the service there
    # too: Debian gives a machine's own name to 127.0.1.1.
    is_chosen = any(name in os.environ for name in _SERVICE_VARIABLES)
    if position.index != 0 or is_chosen or len(meeting.hub) != 1:
        return position.address, None
    (hub,) = meeting.hub
    assert isinstance(hub, socket.socket)
    host, port = hub.getsockname()[0], peers.split(position.address)[1]
    bound = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return bound, bound


def _share_token(index: int, limit: int) -> bytes:
    """Return the run's random token, which process 0 makes and shares through jax's service."""
    client = _client()
    if index == 0:
        token = secrets.token_bytes(_TOKEN_BYTES)
        client.key_value_set_bytes(_TOKEN_KEY, token)
    else:
        token = client.blocking_key_value_get_bytes(_TOKEN_KEY, 1000 * limit)
    client.wait_at_barrier(_TOKEN_KEY, 1000 * limit)
    # All processes have the token now. Later callers of the service must not find it.
    if index == 0:
        client.key_value_delete(_TOKEN_KEY)
    return token


def _leave_if_failed() -> None:
    """End a process that failed by an exception, at its exit, by `leave`."""
    # Python keeps the exception that ended the program here, for debuggers.
    if (error := getattr(sys, "last_value", None)) is not None:
        leave(1, error)
    peers.note(is_done=True)


def leave(status: int, error: BaseException) -> None:
    """End this process by an error if it is one of several, without the wait of jax's shutdown."""
    if peers.is_running():
        peers.fail(error)
        sys.stdout.flush()
        # Without jax's shutdown, which would wait minutes for the other processes.
        os._exit(status)


def _log_stderr(text: str) -> None:
    print(f"spell_jax: {text}", file=sys.stderr, flush=True)


def lost_seconds() -> int:
    """Return SPELL_LOST_SECONDS: a process is lost after these seconds without a sign of life."""
    return _seconds(LOST_SECONDS)


def _seconds(name: str) -> int:
    return _number(name, 1) if name in os.environ else _DEFAULT_SECONDS[name]


def _number(name: str, least: int) -> int:
    text = os.environ[name]
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{name} = {text!r}: must be a whole number, at least {least}")
    return int(text)


def _configured_position() -> _Position | None:
    """Return the position in SPELL_COORDINATOR, SPELL_PROCESSES and SPELL_PROCESS; None without."""
    names = (COORDINATOR, PROCESSES, PROCESS)
    missing = [name for name in names if name not in os.environ]
    if len(missing) == len(names):
        return None
    if missing:
        raise ValueError(f"{missing[0]}: is missing, must be set where another of {names} is")
    address = os.environ[COORDINATOR]
    if not re.fullmatch(r".+:\d+", address):
        raise ValueError(f"{COORDINATOR} = {address!r}: must be host:port of process 0")
    count, index = _number(PROCESSES, 1), _number(PROCESS, 0)
    if index >= count:
        raise ValueError(f"{PROCESS} = '{index}': must be below {PROCESSES} = {count}")
    return _Position(address, count, index)


def _detected_position(limit: int) -> _Position | None:
    """Return the position that jax detects from a cluster's environment; None on one host."""
    find = clusters.ClusterEnv.auto_detect_unset_distributed_params
    address, count, index, devices = find(None, None, None, None, None, limit)
    if address is None or count is None or index is None:
        return None
    return _Position(address, count, index, devices)


class Barriers:
    """Barriers for Orbax; all end with an error as soon as one process has called `fail`.

    Every process makes one for each checkpoint manager, in the same order.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._prefix = f"spell_jax/barriers/{next(self._numbers)}"
        self._uses: Counter[str] = Counter()  # of each name
        self._passed: deque[str] = deque()  # keys of this process

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait for all processes; RuntimeError if one failed, TimeoutError at the time limit."""
        client, deadline = _client(), time.monotonic() + timeout_ms / 1000
        # Orbax's threads come here with an error that they raise only afterwards. (In the main
        # thread it may be one of ours, after which a checkpoint is saved.)
        error = sys.exc_info()[1]
        if error is not None and threading.current_thread() is not threading.main_thread():
            self.fail(error)
            raise RuntimeError(self.failure())
        # Orbax uses a key again in each save, but a barrier must not count the processes of an
        # earlier use.
        self._uses[key] += 1
        folder = f"{self._prefix}/reached/{key}/{self._uses[key]}"
        client.key_value_set(mine := f"{folder}/{jax.process_index()}", "")
        # Polled instead of jax's own barrier, which would wait until its time limit for a process
        # that has failed.
        while len(client.key_value_dir_get(f"{folder}/")) < jax.process_count():
            if failure := self.failure():
                raise RuntimeError(failure)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all processes have reached {key}")
            time.sleep(_POLL_S)
        self._passed.append(mine)
        if len(self._passed) > _KEPT_BARRIERS:
            client.key_value_delete(self._passed.popleft())

    def fail(self, error: BaseException) -> None:
        # Only the first failure counts: further failures follow from it.
        if jax.process_count() == 1 or self.failure():
            return
        text = f"host {jax.process_index()}: {type(error).__name__}: {error}"
        key = f"{self._prefix}/failed/{jax.process_index()}"
        _client().key_value_set(key, text, allow_overwrite=True)

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """Give an error of the block to `fail`, then raise it."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    def failure(self) -> str:
        """Return the texts of the errors given to `fail` on any process; "" without one."""
        if jax.process_count() == 1:
            return ""
        return "; ".join(text for _, text in _client().key_value_dir_get(f"{self._prefix}/failed/"))


def _client() -> Any:
    """Return the client of jax's coordination service; jax makes only a part of it public."""
    return jax_distributed.global_state.client


def gather_bytes(items: Sequence[bytes]) -> list[list[bytes]]:
    """Gather the items of every process, in process order; their numbers may differ.

    RuntimeError on all processes names a process that has more than 4 GiB, or sends no list of
    items.
    """
    if jax.process_count() == 1:
        return [list(items)]
    part = np.frombuffer(_join_items(items), np.uint8)
    # The size is sent as bytes: without jax_enable_x64, int64 would be truncated to 32 bits.
    sizes = _gather(np.array([part.size], "<i8").view(np.uint8)).view("<i8").ravel()
    for index, size in enumerate(sizes):
        if not 0 <= size <= _LARGEST:
            raise RuntimeError(f"process {index} has {size:,} bytes to send: at most {_LARGEST:,}")
    # A power of two: otherwise each new size would compile another program.
    padded = np.zeros(max(_SMALLEST, 1 << (int(sizes.max()) - 1).bit_length()), np.uint8)
    padded[: part.size] = part
    rows = [row[:size].tobytes() for row, size in zip(_gather(padded), sizes, strict=True)]
    return [_split_items(row, index) for index, row in enumerate(rows)]


def _join_items(items: Sequence[bytes]) -> bytes:
    """Return the number of items, their lengths, and the items; numbers as uint64."""
    # Lengths instead of a separator, because items are arbitrary bytes.
    return struct.pack(f"<{1 + len(items)}Q", len(items), *map(len, items)) + b"".join(items)


def _split_items(data: bytes, index: int) -> list[bytes]:
    """Return the items that process `index` has joined; RuntimeError for other bytes."""
    # Items are copied, and never unpickled: a process under a false name runs no code here.
    count = int.from_bytes(data[:8], "little")
    start = 8 * (1 + count)
    if len(data) >= start:
        lengths = struct.unpack_from(f"<{count}Q", data, 8)
        ends = list(itertools.accumulate(lengths, initial=start))
        if ends[-1] == len(data):
            return [data[i:j] for i, j in itertools.pairwise(ends)]
    raise _foreign(index, f"{len(data):,} bytes that are no list of items")


def _foreign(index: int, contents: str) -> RuntimeError:
    return RuntimeError(
        f"process {index} sent {contents}: do all processes run the same version, and can nobody "
        "else reach the port of process 0?"
    )


def gather_text(text: str) -> list[str]:
    """Gather a text of every process, in process order."""
    return [_first_text(items, i) for i, items in enumerate(gather_bytes([_encode(text)]))]


def _encode(text: str) -> bytes:
    # A message may quote a file name with bytes that are no UTF-8.
    return text.encode("utf-8", "replace")


def _first_text(items: Sequence[bytes], index: int) -> str:
    """Return the first item as text; RuntimeError names process `index` if it is none."""
    try:
        return items[0].decode()
    except (LookupError, UnicodeDecodeError):
        raise _foreign(index, "no text where a text belongs") from None


def make_together(make: Callable[[], Sequence[bytes]]) -> list[list[bytes]]:
    """Call `make` on every host; return the items of all hosts, in host order.

    RuntimeError on all hosts names the hosts on which `make` failed.
    """
    failure: Exception | None = None
    items: Sequence[bytes] = ()
    status = ""
    try:
        items = make()
    except Exception as error:
        # Any kind: the other hosts wait in the exchange below, and must hear of the failure.
        failure, status = error, f"{type(error).__name__}: {error}"
    parts = gather_bytes([_encode(status), *items])
    statuses = [_first_text(part, host) for host, part in enumerate(parts)]
    failed = [f"host {host}: {text}" for host, text in enumerate(statuses) if text]
    if failed:
        raise RuntimeError("; ".join(failed)) from failure
    return [part[1:] for part in parts]


def broadcast(make: Callable[[], Any]) -> Any:
    """Call `make` on process 0 only; return its result, a JSON value, on all processes."""
    if jax.process_count() == 1:
        return make()
    is_first = jax.process_index() == 0
    parts = make_together(lambda: [json.dumps(make()).encode()] if is_first else [])
    return parse_json(_first_text(parts[0], 0), 0)


def parse_json(data: str | bytes, index: int) -> Any:
    """Parse a JSON value sent by process `index`; RuntimeError names the process for other data."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise _foreign(index, "no JSON value where a JSON value belongs") from None


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """Fail on all hosts if the block fails on one host, after all have left the block."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        failure = error

    def reraise() -> Sequence[bytes]:
        if failure is not None:
            raise failure
        return ()

    make_together(reraise)


def fetch_global(array: Any) -> np.ndarray:
    """Fetch an array as one numpy array; every device briefly holds the whole array."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


@contextlib.contextmanager
def exchanging_on(devices: Sequence[Any]) -> Iterator[None]:
    """Exchange data over the first of `devices` of each process, in this thread and block.

    By default the exchanges run on each process's first device.
    """
    # A device runs its programs in the order of their dispatch. If two threads dispatched exchanges
    # to one device, the processes might dispatch them in different orders, and wait forever.
    before = _exchange_devices()
    _thread.devices = _first_devices(devices)
    try:
        yield
    finally:
        _thread.devices = before


_thread = threading.local()  # `devices`: the devices of a thread's exchanges, one of each process


def _exchange_devices() -> tuple[Any, ...]:
    """Return the device of each process on which this thread's exchanges run."""
    return getattr(_thread, "devices", None) or _first_devices(jax.devices())


def _first_devices(devices: Sequence[Any]) -> tuple[Any, ...]:
    """Return the first device of each process, in process order."""
    by_process = {device.process_index: device for device in reversed(devices)}
    return tuple(by_process[index] for index in sorted(by_process))


@functools.cache
def _all_gather(devices: tuple[Any, ...]) -> tuple[NamedSharding, jax.stages.Wrapped]:
    """Return the sharding of rows, one on each device, and a program that gathers all rows."""
    mesh = Mesh(np.array(devices), ("hosts",))
    rows, replicated = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("hosts", None))
    return rows, jax.jit(lambda x: x, out_shardings=replicated)


def _gather(row: np.ndarray) -> np.ndarray:
    """Gather uint8 [n] of each host into [hosts, n]."""
    sharding, gather = _all_gather(_exchange_devices())
    rows = jax.make_array_from_process_local_data(sharding, row[None])
    return np.ascontiguousarray(gather(rows).addressable_data(0))
