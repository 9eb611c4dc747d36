"""A small run of an entry by one process, or as one of several (SPELL_COORDINATOR, ...).

python -m tests.slow.several_hosts train POLICY WORKDIR [SETTINGS]
python -m tests.slow.several_hosts sft POLICY WORKDIR SOURCE

SETTINGS are config fields by dotted name, in JSON. A stand-in for an external judge, which only
process 0 may ask, judges answers.
"""

from __future__ import annotations

import json
import pathlib
import sys
import zlib
from collections.abc import Sequence

import jax
import pytest

from spell_jax.configs import tiny_warm_start
from spell_jax.runtime import setup as start
from spell_jax.trainer import build as trainer_build
from spell_jax.trainer import loop, supervised
from tests import noise

STEPS = 3


def make_config(policy: pathlib.Path, **settings):
    """Make the run's config: shard weights over all devices; save every step and the best."""
    fields = {
        "steps": STEPS,
        "checkpoint_every": 1,
        "algorithm.rule": "judge",
        "algorithm.judge_url": "http://judge",
        "algorithm.judge_model": "noise",
    }
    return noise.small_config(policy, **(fields | settings))


def judge(items: Sequence[tuple[str, str, str]]) -> list[int]:
    """Return verdicts by checksum; some are missing."""
    assert jax.process_index() == 0, "the judge is asked twice"
    return [zlib.crc32("".join(item).encode(errors="replace")) % 3 - 1 for item in items]


def tune(policy: str, workdir: pathlib.Path, source: str) -> None:
    config = tiny_warm_start.get_config()
    fields = {
        "policy.folder": policy,
        "source": source,
        "steps": STEPS,
        "rows_per_step": 2,
        "log_every": 1,
        "checkpoint_every": 2,
        "optimizer.warmup_steps": 1,
        "packing.buckets": ((64, 24),),
        "packing.token_budget": 128,
    }
    supervised.fine_tune(noise.with_fields(config, fields), workdir)


def main() -> None:
    entry, policy, path, *arguments = sys.argv[1:]
    workdir = pathlib.Path(path)
    jax.config.update("jax_disable_most_optimizations", True)  # less to compile
    start.setup()
    if entry == "sft":
        tune(policy, workdir, *arguments)
        return
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.give_meaning(monkeypatch)
        noise.skip_plots(monkeypatch)
        monkeypatch.setattr(trainer_build, "_make_judge", lambda *_: judge)
        settings = json.loads(arguments[0]) if arguments else {}
        loop.train(make_config(pathlib.Path(policy), **settings), workdir)


if __name__ == "__main__":
    main()
