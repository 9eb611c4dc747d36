"""Cost of a checkpoint that survives a loss of power: time of its fsync and of its hashes."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Annotated, Any
from unittest import mock

import jax.numpy as jnp
import numpy as np

from benchmarks.base import BenchmarkCommand
from spell_jax.runtime import durable, hashes
from spell_jax.runtime.checkpoint import Checkpoints

ARRAYS = 32  # arrays of a checkpoint, of equal sizes


@dataclasses.dataclass
class Durability(BenchmarkCommand):
    """Saves of random numbers to checkpoints, and appends to a log, on a local disk.

    "save_ms" is the median time of a complete save. Within a save, "fsync_ms" is the median time to
    bring the files to the disk, and "hash_ms" the median time to read and hash them. "append_ms" is
    the median time to append a line to a log. "bytes" is the size of a checkpoint.
    """

    mib: Annotated[int, "MiB of the arrays"] = 12
    saves: Annotated[int, "saves"] = 9
    folder: Annotated[str, "folder on the disk; empty: the system's temporary folder"] = ""

    def run(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=self.folder or None) as scratch:
            return self._measure(pathlib.Path(scratch))

    def _measure(self, scratch: pathlib.Path) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        size = max(1, (self.mib << 20) // 4 // ARRAYS)
        fsyncs, hashing, saves, appends = [], [], [], []
        with (
            mock.patch.object(durable, "sync_tree", _timed(durable.sync_tree, fsyncs)),
            mock.patch.object(hashes, "write", _timed(hashes.write, hashing)),
            Checkpoints(scratch, keep=1) as store,
        ):
            for step in range(1, self.saves + 1):
                arrays = {str(i): jnp.asarray(rng.random(size), jnp.float32) for i in range(ARRAYS)}
                clock = time.perf_counter()
                store.save(step, arrays, {}, force=True)
                saves.append(time.perf_counter() - clock)
                clock = time.perf_counter()
                durable.append(scratch / "log", b"a line\n")
                appends.append(time.perf_counter() - clock)
            last_checkpoint = scratch / "checkpoints" / str(self.saves)
            nbytes = sum(
                path.stat().st_size for path in last_checkpoint.rglob("*") if path.is_file()
            )
        hashed = [write_s - fsync_s for write_s, fsync_s in zip(hashing, fsyncs, strict=True)]
        numbers = {"save": saves, "fsync": fsyncs, "hash": hashed, "append": appends}
        medians = {f"{name}_ms": 1000 * statistics.median(x) for name, x in numbers.items()}
        return {"bytes": nbytes, **medians}


def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        clock = time.perf_counter()
        result = call(*args)
        seconds.append(time.perf_counter() - clock)
        return result

    return timed
