"""Teaches the tiny policy to answer in sections: the warm start of tiny_eapo.py.

    python -m spell_jax.warm_start.evidence_rows --out=runs/evidence_rows
    python -m spell_jax.sft --config=configs/tiny_eapo_policy.py --workdir=runs/tiny_eapo_policy

In the rows (warm_start/evidence_rows.py), about 3 to 6 documents, two of three answers to two-hop
questions quote the first line alone and are mostly right all the same: format is learned, evidence
and, in part, outcome are left to be.
Hardware: 1 CPU core, 4.2 minutes, 2.9 of them processor time (measured at commit 851b03b).
Expected: the row "before" in docs/algorithms.md, EAPO.
"""

from typing import Any

from configs import tiny_warm_start


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config = tiny_warm_start.get_config()
    config.seed = 0
    config.steps = 400
    config.rows_per_step = 24
    config.checkpoint_every = 400
    config.source = "runs/evidence_rows/policy.jsonl"
    config.policy.folder = "spell_jax/data/tiny_policy"
    config.optimizer.learning_rate = 1e-3
    return config
