"""Warm start on a folder of texts: supervised tuning on rows that rules make from it.

    python -m spell_jax.warm_start.folder_rows --source=PATH --out=runs/folder_rows
    python -m spell_jax.sft --config=configs/folder_warm_start.py --workdir=runs/folder_warm_start

runs/folder_warm_start/policy is what configs/folder.py starts from. A policy with random weights,
to see what self-play makes of it, takes --config.steps=1 --config.optimizer.schedule=constant (the
warm-up begins at rate 0). Hardware: 2 CPU cores; time and accuracies: README, section "Results".
"""

from ml_collections import ConfigDict

from configs import tiny_warm_start


def get_config() -> ConfigDict:
    config = tiny_warm_start.get_config()
    config.steps = 2500
    config.rows_per_step = 18
    config.source = "runs/folder_rows/rows.jsonl"

    config.policy.tokenizer = "runs/folder_rows"
    config.policy.feed_forward = 512

    config.optimizer.warmup_steps = 100
    # Long rows of the questioner, one or two in a hundred, do not fit; they are counted.
    config.packing.buckets = ((384, 376),)
    config.packing.token_budget = 3072
    return config
