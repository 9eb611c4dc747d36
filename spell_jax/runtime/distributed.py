"""Several hosts as one run: how they find each other, and what they tell each other besides what
devices compute.

1. `join` reads from the environment whether this process is one of several, says so, waits for the
   others up to a limit, and lets all stop when one of them is lost.
2. Each process runs the same program on the same data. `gather_bytes` exchanges bytes: sizes, then
   the parts, padded to one size, in two collectives over all devices.
3. What process 0 alone may do (ask a judge) goes through `broadcast`: the others get what it got.
4. An error of one is an error of all (`make_together`, `fail_together`): none waits for one that
   will never come.

All processes must call these functions in the same order.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import clusters  # nothing public tells what initialize() would find
from jax.experimental import multihost_utils

from spell_jax.runtime import rendezvous

_SMALLEST = 1024  # bytes that are exchanged at least, so that small parts share a program

# Where this process stands among others; all three or none.
COORDINATOR, PROCESSES, PROCESS = "SPELL_COORDINATOR", "SPELL_PROCESSES", "SPELL_PROCESS"
# Seconds, whole numbers from 1: how long to wait for the others at the start, and for a process
# that gives no sign of life before it counts as lost. A process lives on through compiling and
# writing, which its heartbeats do not wait for; 100 s is what a machine's migration may take.
JOIN_SECONDS, LOST_SECONDS = "SPELL_JOIN_SECONDS", "SPELL_LOST_SECONDS"
_DEFAULT_SECONDS = {JOIN_SECONDS: 300, LOST_SECONDS: 100}


@dataclasses.dataclass(frozen=True)
class _Place:
    """A process among others.

    Attributes:
      address: host:port at which process 0 is met.
      count: of processes.
      index: of this one, from 0.
      devices: which of the machine's devices are its own; None: all.
    """

    address: str
    count: int
    index: int
    devices: Sequence[int] | None = None


def join() -> None:
    """Makes this process one of several where the environment says so; called before any device is
    touched. Called again, or on a single host, it does nothing.

    The environment says so by SPELL_COORDINATOR (host:port of process 0), SPELL_PROCESSES and
    SPELL_PROCESS (0 to SPELL_PROCESSES - 1), or as jax knows it: a TPU slice of several hosts,
    Slurm, Open MPI. It waits SPELL_JOIN_SECONDS (300) for the others. After that, one that fails,
    is killed or cut off ends all others within SPELL_LOST_SECONDS (100): those that talk with it
    when the connection breaks by an error, the others by an abort (SIGABRT) that names it.

    Raises:
      ValueError: a variable is missing or out of range.
      TimeoutError: not all came in time; names those that did not.
    """
    if jax.distributed.is_initialized():
        return
    limit, lost = _seconds(JOIN_SECONDS), _seconds(LOST_SECONDS)
    place = _given_place() or _found_place(limit)
    if place is None or place.count == 1:
        return
    _say(
        f"waiting for {place.count} processes at {place.address}, up to {limit} seconds: this is "
        f"process {place.index} of {place.count}, counted from 0"
    )
    try:
        rendezvous.meet(place.address, place.count, place.index, limit)
    except TimeoutError as error:
        raise TimeoutError(f"{JOIN_SECONDS} = {limit}: time is up; {error}") from None
    jax.distributed.initialize(
        place.address,
        place.count,
        place.index,
        place.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=limit,
        heartbeat_timeout_seconds=lost,
    )
    atexit.register(_leave_if_failed, place)
    _say(f"all {place.count} are there; if one is lost, all end within {lost} seconds")


def _leave_if_failed(place: _Place) -> None:
    """Ends a process that an error has ended, without jax's shutdown: in that it would wait for the
    others, which wait for it, for minutes."""
    if hasattr(sys, "last_value"):
        _say(
            f"process {place.index} of {place.count} stops by the error above; if that is a broken "
            "connection, another process died first"
        )
        sys.stdout.flush()
        os._exit(1)


def _say(text: str) -> None:
    print(f"spell_jax: {text}", file=sys.stderr, flush=True)


def _seconds(name: str) -> int:
    return _number(name, 1) if name in os.environ else _DEFAULT_SECONDS[name]


def _number(name: str, least: int) -> int:
    text = os.environ[name]
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{name} = {text!r}: must be a whole number, at least {least}")
    return int(text)


def _given_place() -> _Place | None:
    """As SPELL_COORDINATOR, SPELL_PROCESSES and SPELL_PROCESS say; None without them."""
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
    return _Place(address, count, index)


def _found_place(limit: int) -> _Place | None:
    """As jax finds it in what a cluster's software has set; None on a single host."""
    find = clusters.ClusterEnv.auto_detect_unset_distributed_params
    address, count, index, devices = find(None, None, None, None, None, limit)
    if address is None or count is None or index is None:
        return None
    return _Place(address, count, index, devices)


def gather_bytes(mine: Sequence[bytes]) -> list[list[bytes]]:
    """The items of every host, in the order of the hosts; with one host nothing is exchanged.

    Args:
      mine: this host's items; other hosts may have more or fewer.
    """
    if jax.process_count() == 1:
        return [list(mine)]
    # Numbers travel as bytes: without jax_enable_x64 int64 would be cut to 32 bits.
    lengths = np.array([len(mine), *map(len, mine)], "<i8").tobytes()
    part = np.frombuffer(lengths + b"".join(mine), np.uint8)
    sizes = _gather(np.array([part.size], "<i8").view(np.uint8)).view("<i8")
    # A power of two: otherwise every batch would compile a program of its own.
    padded = np.zeros(max(_SMALLEST, 1 << (int(sizes.max()) - 1).bit_length()), np.uint8)
    padded[: part.size] = part
    return [_items(row.tobytes()) for row in _gather(padded)]


def make_together(make: Callable[[], Sequence[bytes]]) -> list[list[bytes]]:
    """What `make` returns on every host, in the order of the hosts.

    Raises:
      RuntimeError: on all hosts, if it raised on any; names them and their errors.
    """
    failure: Exception | None = None
    mine: Sequence[bytes] = ()
    try:
        mine = make()
    except Exception as error:  # whatever it is: the others wait in the collective
        failure = error
    status = "" if failure is None else f"{type(failure).__name__}: {failure}"
    parts = gather_bytes([status.encode("utf-8", "replace"), *mine])
    failed = [f"host {host}: {part[0].decode()}" for host, part in enumerate(parts) if part[0]]
    if failed:
        raise RuntimeError("; ".join(failed)) from failure
    return [part[1:] for part in parts]


def broadcast(make: Callable[[], Any]) -> Any:
    """What `make` returns on process 0, which alone calls it, on all; with one host just that.

    Args:
      make: returns what JSON gives back unchanged.

    Raises:
      RuntimeError: on all hosts, if it raised, with its error; with one host that error itself.
    """
    if jax.process_count() == 1:
        return make()
    is_first = jax.process_index() == 0
    parts = make_together(lambda: [json.dumps(make()).encode()] if is_first else [])
    return json.loads(parts[0][0])


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """What fails in the block on one host fails on all, when all are through.

    Raises:
      RuntimeError: on all hosts, if the block raised on any; with one host its error itself.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        failure = error

    def report() -> Sequence[bytes]:
        if failure is not None:
            raise failure
        return ()

    make_together(report)


def whole(array: Any) -> np.ndarray:
    """All of a numpy or jax array; the part that other hosts hold is fetched from them, for which
    every device holds all of it for a moment."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def _gather(row: np.ndarray) -> np.ndarray:
    """uint8 [n] of each host -> [hosts, n]."""
    return np.ascontiguousarray(multihost_utils.process_allgather(row))


def _items(part: bytes) -> list[bytes]:
    count = int.from_bytes(part[:8], "little")
    lengths = np.frombuffer(part[8 : 8 + 8 * count], "<i8")
    ends = 8 + 8 * count + np.cumsum(lengths)
    return [part[end - length : end] for end, length in zip(ends, lengths, strict=True)]
