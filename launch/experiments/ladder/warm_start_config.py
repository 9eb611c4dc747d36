"""The policy that config.py starts from: the shipped policy, tuned on shallow questions.

    python -m spell_jax.sft --config=launch/experiments/ladder/warm_start_config.py \
        --workdir=runs/ladder_warm_start

Its demonstrations (rows.py) have questions of depth 1 and 2, and a share of .09
of depths 3 to 8. notebook.md has the resulting accuracies. Hardware: one CPU core, 3 minutes of its
time (measured).
"""

from spell_jax.configs import tiny_warm_start
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = tiny_warm_start.get_config()
    config.update(steps=480, source="spell_jax.launch.experiments.ladder.rows:demonstrations")
    config.policy.folder = "tiny"
    config.optimizer.learning_rate = 1.5e-3
    config.packing.update(buckets=((256, 144),), token_budget=2048)
    return config
