"""A long run of the demo's config: whether memory grows, and whether anything compiles on the way.

Nothing is measured from outside: what is said stands in the run's metrics.jsonl.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

from etils import epath

from configs import tiny
from spell_jax import train
from spell_jax.runtime.metrics import read_metrics

SETTLED = 50  # updates after which a run has seen all that it does


def bench_soak(options: argparse.Namespace) -> dict[str, Any]:
    """Plays the run, or goes on with the one in options.workdir, and returns its `measures`.

    Raises:
      ValueError: fewer than SETTLED + 1 updates.
    """
    if options.steps <= SETTLED:
        raise ValueError(f"steps = {options.steps}: must be above {SETTLED}")
    config = tiny.get_config()
    config.steps = options.steps
    config.max_minutes = 0.0
    config.evaluate = False
    config.game.questions = config.game.generation_batch = options.proposals
    with tempfile.TemporaryDirectory() as scratch:
        workdir = epath.Path(options.workdir or scratch)
        train.train(config, workdir)
        lines = read_metrics(workdir)
    return {"bench": "soak", "proposals": options.proposals} | measures(lines)


def measures(lines: Sequence[dict[str, Any]], settled: int = SETTLED) -> dict[str, Any]:
    """How a run went on after it had settled.

    Args:
      lines: its metrics, of one process from start to end.
      settled: the step that memory is compared with.

    Returns:
      "updates", of them "empty" ones; "resident_mib" at the settled step and "most_mib" after it,
      "growth" as a share of the former; "programs" built in all, "last_built", the step in which
      the last one was; "hours".
    """
    at, *after = lines[settled - 1 :]
    most = max(line["process/resident_mib"] for line in after)
    programs = [line["process/programs"] for line in lines]
    seconds = sum(line["train/play_seconds"] + line["train/update_seconds"] for line in lines)
    return {
        "updates": len(lines),
        "empty": sum(line["train/empty_update"] for line in lines),
        "resident_mib": round(at["process/resident_mib"]),
        "most_mib": round(most),
        "growth": most / at["process/resident_mib"] - 1,
        "programs": programs[-1],
        "last_built": lines[programs.index(programs[-1])]["step"],
        "hours": seconds / 3600,
    }
