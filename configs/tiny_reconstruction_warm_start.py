"""The policy that tiny_reconstruction.py starts from: the shipped one, tuned on puzzles of stories.

    python -m spell_jax.sft --config=configs/tiny_reconstruction_warm_start.py \
        --workdir=runs/tiny_reconstruction_warm_start

Its demonstrations (question_sets/tiny_world_rows.py) work the order out, or guess it; of 3 and 4
lines most guess. So the tuned policy guesses when it is decoded greedily, and when it is sampled it
is sometimes rewarded. Hardware: one CPU core, 4 minutes of its time (measured: 193 s, and 44 s of
the system's). Held-out, greedy, 128 puzzles each, of 2, 3 and 4 lines: dense reward 1.00, .35, .29
(a guess: .50, .33, .25), sparse reward 1.00, .20, .05 (.50, .17, .04).
"""

from spell_jax.configs import tiny_warm_start
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = tiny_warm_start.get_config()
    config.update(steps=500, rows_per_step=26, source="tiny_stories")
    config.policy.folder = "tiny"
    config.optimizer.learning_rate = 1.5e-3
    config.packing.update(buckets=((256, 112),), token_budget=2048)
    return config
