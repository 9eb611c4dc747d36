"""Teaches the tiny policy to answer in sections: the warm start of tiny_eapo.py.

    python -m spell_jax.selfplay.evidence_rows --out=runs/evidence_rows
    python -m spell_jax.sft --config=configs/tiny_eapo_policy.py --workdir=runs/tiny_eapo_policy

The rows (selfplay/evidence_rows.py) have 3 to 6 documents, and .35 of them the wrong lines: format
is learned, evidence and outcome are left to be. tiny_eapo.py asks about 8 documents.
Hardware: 1 CPU core, 2.3 minutes of processor time (measured, in two parts, with .6 two-hop
questions). Expected on 128 held-out questions about 8 documents: greedy .99 well-formed and .65
right, recall of evidence .61; about 6 documents 1.0, .84, .77. Drawn at temperature 1 (8 documents,
the 48 answers of a step) .73 well-formed and .19 right.
"""

from typing import Any

from configs import tiny_warm_start


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config = tiny_warm_start.get_config()
    config.seed = 0
    config.steps = 260
    config.rows_per_step = 24
    config.checkpoint_every = 260
    config.source = "runs/evidence_rows/policy.jsonl"
    config.policy.folder = "spell_jax/data/tiny_policy"
    config.optimiser.learning_rate = 1e-3
    return config
