"""Warm start of the demo: the tiny policy that ships with the package, tuned on demonstrations.

    python -m spell_jax.sft --config=configs/tiny_warm_start.py --workdir=runs/warm_start

The demonstrations leave room to improve (question_sets/tiny_world_rows.py, DemonstrationMixture):
few documents, and for the verifier a strict teacher, who answers no to .42 of the pairs that are
equal in other words. Hardware: 2 CPU cores. Time, seed and resulting accuracies: docs/results.md.
The shipped policy is a copy of the result, the Hugging Face folder runs/warm_start/policy.
"""

from spell_jax.config import default_supervised_config
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = default_supervised_config()
    config.update(seed=3, steps=6000)
    config.optimizer.update(learning_rate=3e-3, schedule="cosine", warmup_steps=50)
    config.optimizer.update(final_fraction=0.05, b2=0.98)
    config.packing.update(buckets=((160, 96),), token_budget=4096)
    return config
