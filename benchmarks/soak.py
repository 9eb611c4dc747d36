"""Soak test: memory growth and late compilation in a long run of the demo's config.

On a CPU, XLA frees its temporary buffers (some 300 MB here) shortly before or after a step ends,
and glibc keeps freed memory. The benchmark therefore tells glibc to return blocks at once, which
slows the run, and takes the minimum memory over many steps, which is what stays allocated.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from typing import Annotated, Any

from etils import epath

from benchmarks.base import BenchmarkCommand
from spell_jax.configs import tiny
from spell_jax.runtime.log.metrics import read_metrics
from spell_jax.trainer import loop

SETTLED = 50  # updates after which a run has executed every kind of work at least once
WINDOW = 50  # updates over which the minimum memory is taken
# mallopt's parameter, and the size in bytes from which freed blocks go back to the system at once.
_M_MMAP_THRESHOLD, _BLOCK = -3, 4 << 20


@dataclasses.dataclass
class Soak(BenchmarkCommand):
    """Memory early and late in a training run, which is new or the run in --workdir, resumed.

    "resident_mib" and "last_mib" are the minimum resident MiB of the first window after update 50
    and of the last window of 50 updates; "growth" is last_mib / resident_mib - 1.
    "most_mib" is the maximum after update 50. "programs" counts the compiled programs, and
    "last_built" is the step of the last compilation. "hours" is the total time of the steps.

    Raises:
      ValueError: if there are fewer updates than SETTLED + 2 WINDOW.
    """

    steps: Annotated[int, "updates"] = 520
    proposals: Annotated[int, "questions proposed for each update; 48 in the demo"] = 16
    workdir: Annotated[str, "folder of the run, which is resumed; empty: a temporary one"] = ""

    def run(self) -> dict[str, Any]:
        if self.steps < SETTLED + 2 * WINDOW:
            raise ValueError(f"steps = {self.steps}: must be at least {SETTLED + 2 * WINDOW}")
        if sys.platform == "linux":
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _BLOCK)
        # Without evaluation and a limit of minutes, every step does the same work.
        config = tiny.get_config()
        config.update(steps=self.steps, max_minutes=0.0, evaluate=False)
        config.algorithm.questions = config.algorithm.generation_batch = self.proposals
        with tempfile.TemporaryDirectory() as scratch:
            workdir = epath.Path(self.workdir or scratch)
            with contextlib.redirect_stdout(sys.stderr):  # stdout has the benchmark's one line
                loop.train(config, workdir)
            return measures(read_metrics(workdir))


def measures(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compute memory growth and compilation counts from all lines of metrics of one process."""
    resident = [line["process/resident_mib"] for line in lines[SETTLED:]]
    first, last = min(resident[:WINDOW]), min(resident[-WINDOW:])
    programs = [line["process/programs"] for line in lines]
    return {
        "updates": len(lines),
        "empty": sum(line["train/empty_update"] for line in lines),
        "resident_mib": round(first),
        "last_mib": round(last),
        "growth": last / first - 1,
        "most_mib": round(max(resident)),
        "programs": programs[-1],
        "last_built": lines[programs.index(programs[-1])]["step"],
        "hours": sum(line["time/step_seconds"] for line in lines) / 3600,
    }
