"""QwenLong-L1 in the generated world: clusters of 8 documents first, then clusters of 12.

    python -m spell_jax.train --config=configs/tiny_qwenlong.py --workdir=runs/tiny_qwenlong

The shipped policy writes the questions in the first step, as in RLVR. Everything but the algorithm
equals configs/tiny.py. Hardware: one CPU core, 5 minutes (measured).
Expected: .40 before and .78 after at 8 documents (docs/algorithms.md, baselines in the tiny world).
"""

from spell_jax.config import default_config
from spell_jax.configs import tiny
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = tiny.get_config()
    config.policy.compute_dtype = "float32"
    config.update(steps=60, max_minutes=0.0)
    # The sizes of the demo's questions and rounds, so that the table compares algorithms alone.
    demo, config.algorithm = config.algorithm, default_config("qwenlong_l1").algorithm
    for field in ("prompts", "questions", "generation_batch", "max_generations"):
        config.algorithm[field] = demo[field]
    for field in ("documents", "distinct_options"):
        config.algorithm.questioner[field] = demo.questioner[field]
    config.algorithm.phase_tokens = (70, 160)  # 8 documents have 48 tokens, 12 have 72
    return config
