"""Reward model of tiny_eapo.py: the tiny policy, tuned to score evidence.

    python -m spell_jax.question_sets.evidence_rows --out=runs/evidence_rows
    python -m spell_jax.sft --config=configs/tiny_eapo_reward.py --workdir=runs/tiny_eapo_reward

It thinks before it scores: for each line, it writes the wanted name beside the line's name.
Without such thoughts it did not learn to compare the names in 850 steps.
Hardware: 1 CPU core, 5 minutes (3.5 of processor time; measured at commit 851b03b). Expected:
rollout/scoring_order of .65 in the first five steps of tiny_eapo.py (seed 0, commit cd9dc09; .69
with greedy replies, mean of three seeds; a guess has .5). It does not read the documents, as in the
paper: it cannot see figures that are copied wrongly.
"""

from spell_jax.configs import tiny_warm_start
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = tiny_warm_start.get_config()
    config.update(seed=0, steps=1000, rows_per_step=12)
    config.source = "runs/evidence_rows/reward.jsonl"
    config.policy.folder = "tiny"
    config.packing.update(buckets=((192, 64),), token_budget=1920)
    config.optimizer.learning_rate = 2e-3
    return config
