"""Teaches the tiny policy to score evidence: the reward model of tiny_eapo.py.

    python -m spell_jax.warm_start.evidence_rows --out=runs/evidence_rows
    python -m spell_jax.sft --config=configs/tiny_eapo_reward.py --workdir=runs/tiny_eapo_reward

It thinks before it scores: of each line, the name that is looked for and the one that it has, side
by side. Without such thoughts it learned nothing of the names in 850 steps.
Hardware: 1 CPU core, 5 minutes, 3.5 of them processor time (measured at commit 851b03b). Expected:
rollout/scoring_order of .69 in the first five steps of tiny_eapo.py (mean of three seeds; a guess
has .5). It does not read the documents, as in the paper: it cannot see figures that are copied
wrongly.
"""

from typing import Any

from configs import tiny_warm_start


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config = tiny_warm_start.get_config()
    config.seed = 0
    config.steps = 1000
    config.rows_per_step = 12
    config.checkpoint_every = 250
    config.source = "runs/evidence_rows/reward.jsonl"
    config.policy.folder = "spell_jax/data/tiny_policy"
    config.packing.buckets = ((192, 64),)
    config.packing.token_budget = 1920
    config.optimizer.learning_rate = 2e-3
    return config
