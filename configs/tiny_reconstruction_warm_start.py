"""The policy that tiny_reconstruction.py starts from: the shipped one, tuned on puzzles of stories.

    python -m spell_jax.sft --config=configs/tiny_reconstruction_warm_start.py \
        --workdir=runs/tiny_reconstruction_warm_start
"""

from typing import Any

from ml_collections import ConfigDict

from configs import tiny_warm_start


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config = tiny_warm_start.get_config()
    config.steps = 500
    config.rows_per_step = 26
    config.source = "tiny_stories"  # selfplay/story_rows.py
    config.policy.folder = "spell_jax/data/tiny_policy"
    config.optimiser.learning_rate = 1.5e-3
    config.packing.buckets = ((256, 112),)
    config.packing.token_budget = 2048
    return config
