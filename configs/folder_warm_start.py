"""Warm start on a folder of texts: supervised tuning on rows that rules make from it.

    python -m spell_jax.question_sets.facts --source=PATH --out=runs/folder_rows
    python -m spell_jax.sft --config=configs/folder_warm_start.py --workdir=runs/folder_warm_start

configs/folder.py starts from runs/folder_warm_start/policy. For self-play from random weights, use
--config.steps=1 --config.optimizer.schedule=constant (the warm-up begins at rate 0).
Hardware: 2 CPU cores; time and accuracies: docs/results.md.
"""

from spell_jax.configs import tiny_warm_start
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = tiny_warm_start.get_config()
    config.update(steps=2500, rows_per_step=18, source="runs/folder_rows/rows.jsonl")
    config.policy.update(tokenizer="runs/folder_rows", feed_forward=512)
    config.optimizer.warmup_steps = 100
    # Of 100 rows, one or two long rows of the questioner do not fit. They are counted, not cut.
    config.packing.update(buckets=((384, 376),), token_budget=3072)
    return config
