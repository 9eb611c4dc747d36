"""Warm start of tiny_eapo.py: the tiny policy, tuned to answer in sections.

    python -m spell_jax.question_sets.evidence_rows --out=runs/evidence_rows
    python -m spell_jax.sft --config=configs/tiny_eapo_policy.py --workdir=runs/tiny_eapo_policy

The rows (question_sets/evidence_rows.py) are about 3 to 6 documents. Two of three answers to
two-hop questions quote the first line alone, and most are right all the same. They teach the format
and leave evidence and, in part, outcome to the run.
Hardware: 1 CPU core, 4.2 minutes (2.9 of processor time; measured at commit 851b03b).
Expected: the row "before" in launch/experiments/notebooks/eapo_tiny.md.
"""

from spell_jax.configs import tiny_warm_start
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = tiny_warm_start.get_config()
    config.update(seed=0, steps=400, rows_per_step=24, checkpoint_every=400)
    config.source = "runs/evidence_rows/policy.jsonl"
    config.policy.folder = "tiny"
    config.optimizer.learning_rate = 1e-3
    return config
