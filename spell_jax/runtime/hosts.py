"""What hosts tell each other besides what devices compute: bytes, and that one of them failed.

1. Every host makes its part; one that fails says so instead.
2. Sizes are exchanged, then the parts, padded to one size: two collectives over all devices.
3. If any host failed, all raise: none waits for one that will never come.

All hosts must call these functions in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

_SMALLEST = 1024  # bytes that are exchanged at least, so that small parts share a program


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


def _gather(row: np.ndarray) -> np.ndarray:
    """uint8 [n] of each host -> [hosts, n]."""
    return np.ascontiguousarray(multihost_utils.process_allgather(row))


def _items(part: bytes) -> list[bytes]:
    count = int.from_bytes(part[:8], "little")
    lengths = np.frombuffer(part[8 : 8 + 8 * count], "<i8")
    ends = 8 + 8 * count + np.cumsum(lengths)
    return [part[end - length : end] for end, length in zip(ends, lengths, strict=True)]
