"""A long run of the demo's config: whether memory grows, and whether anything compiles on the way.

1. Nothing is measured from outside: what is said stands in the run's metrics.jsonl.
2. XLA's temporary buffers on a CPU, some 300 MB here, are freed a moment sooner or later than a
   step ends, and glibc keeps what is freed. So it is told to give blocks back at once (which makes
   this run slower), and the least of many steps counts: what stays.
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
from spell_jax import train
from spell_jax.runtime.metrics import read_metrics

SETTLED = 50  # updates after which a run has seen all that it does
WINDOW = 50  # updates of which the least memory counts
_M_MMAP_THRESHOLD, _BLOCK = -3, 4 << 20  # blocks from so many bytes on are given back when freed


def bench_soak(options: argparse.Namespace) -> dict[str, Any]:
    """Plays the run, or goes on with the one in options.workdir, and returns its `measures`.

    Raises:
      ValueError: fewer updates than SETTLED and two windows.
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
            train.train(config, workdir)
        lines = read_metrics(workdir)
    return {"bench": "soak", "proposals": options.proposals} | measures(lines)


def measures(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How a run went on after it had settled.

    Args:
      lines: its metrics, of one process from start to end; SETTLED + 2 WINDOW at least.

    Returns:
      "updates", of them "empty" ones; "resident_mib", the least of the first window behind SETTLED,
      "last_mib", that of the last window, and "growth" from one to the other as a share; "most_mib"
      behind SETTLED; "programs" built in all, "last_built", the step in which the last one was;
      "hours".
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
