"""Teaches a copy of the tiny EAPO policy to score evidence: the reward model of tiny_eapo.py.

    python -m spell_jax.sft --config=configs/tiny_eapo_reward.py --workdir=runs/tiny_eapo_reward

after the commands of tiny_eapo_policy.py, from whose result it begins.
Hardware: 1 CPU core, 6 minutes (estimated). Expected: nothing of use yet. Behind 850 steps (of a
trial, not of this config's whole run), on 96 new rows of 4 sets, .01 of the replies were malformed
and .58 of the scores right, where .63 is what the number of lines alone tells: their correlation
with the true score was .15, and among the sets of one question there was none.
"""

from typing import Any

from configs import tiny_warm_start


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config = tiny_warm_start.get_config()
    config.seed = 0
    config.steps = 1500
    config.rows_per_step = 12
    config.checkpoint_every = 250
    config.source = "runs/evidence_rows/reward.jsonl"
    config.policy.folder = "runs/tiny_eapo_policy/policy"
    config.packing.buckets = ((192, 64),)
    config.packing.token_budget = 1920
    config.optimiser.learning_rate = 2e-3
    return config
