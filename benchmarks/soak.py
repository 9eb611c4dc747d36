"""Soak test: memory growth and late compilation in a long run of the demo's config.

1. All measurements come from the run's own metrics.jsonl.
2. On a CPU, XLA frees its temporary buffers (some 300 MB here) shortly before or after a step ends,
   and glibc keeps freed memory. The benchmark therefore tells glibc to return blocks at once, which
   slows the run, and takes the minimum memory over many steps, which is what stays allocated.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from etils import epath

from configs import tiny
from spell_jax.runtime.metrics import read_metrics
from spell_jax.trainer import loop

SETTLED = 50  # updates after which a run has executed every kind of work at least once
WINDOW = 50  # updates over which the minimum memory is taken
# mallopt's parameter, and the size in bytes from which freed blocks go back to the system at once.
_M_MMAP_THRESHOLD, _BLOCK = -3, 4 << 20


def bench_soak(options: argparse.Namespace) -> dict[str, Any]:
    """Run training, or resumes the run in options.workdir, and return its `measures`.

    Args:
      options: parsed options of "soak".

    Returns:
      The measurements, JSON-able.

    Raises:
      ValueError: if there are fewer updates than SETTLED + 2 WINDOW.
    """
    if options.steps < SETTLED + 2 * WINDOW:
        raise ValueError(f"steps = {options.steps}: must be at least {SETTLED + 2 * WINDOW}")
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _BLOCK)
    config = tiny.get_config()
    config.steps = options.steps
    config.max_minutes = 0.0
    config.evaluate = False
    config.algorithm.questions = config.algorithm.generation_batch = options.proposals
    with tempfile.TemporaryDirectory() as scratch:
        workdir = epath.Path(options.workdir or scratch)
        with contextlib.redirect_stdout(sys.stderr):
            loop.train(config, workdir)
        lines = read_metrics(workdir)
    return {"bench": "soak", "proposals": options.proposals} | measures(lines)


def measures(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compute memory growth and compilation counts of a run.

    Args:
      lines: lines of metrics from the run's start to its end, all from one process; at least
        SETTLED + 2 WINDOW.

    Returns:
      "updates": number of updates; "empty": number of empty updates among them.
      "resident_mib": minimum resident MiB of the first window after SETTLED.
      "last_mib": minimum resident MiB of the last window.
      "growth": relative growth from the former to the latter.
      "most_mib": maximum resident MiB after SETTLED.
      "programs": number of programs compiled; "last_built": step of the last compilation.
      "hours": total time of the steps.
    """
    resident = [line["process/resident_mib"] for line in lines[SETTLED:]]
    first, last = min(resident[:WINDOW]), min(resident[-WINDOW:])
    programs = [line["process/programs"] for line in lines]
    seconds = sum(line["time/step_seconds"] for line in lines)
    return {
        "updates": len(lines),
        "empty": sum(line["train/empty_update"] for line in lines),
        "resident_mib": round(first),
        "last_mib": round(last),
        "growth": last / first - 1,
        "most_mib": round(max(resident)),
        "programs": programs[-1],
        "last_built": lines[programs.index(programs[-1])]["step"],
        "hours": seconds / 3600,
    }
