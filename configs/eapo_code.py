"""EAPO with the loss of the framework that the paper names (VeRL, Appendix A).

    python -m spell_jax.train --config=configs/eapo_code.py:qwen3-14b --workdir=DIR \
        --config.policy.folder=FOLDER --config.reward_model.folder=FOLDER \
        --config.data.questions=QUESTIONS.jsonl

The framework's default loss has a ratio for each token, the mean over all tokens, a dual clip of 3
and advantages with the sample's deviation (ddof 1). The paper's Eq. 1 prints none of the four, but
does not say that it changed them. Everything else equals configs/eapo.py, which follows the text.
"""

from spell_jax.configs import eapo
from spell_jax.runtime.config import Config


def get_config(model: str = "qwen3-14b") -> Config:
    config = eapo.get_config(model)
    # The ratio of a token stays in the clipping range longer than Eq. 1's product over an answer.
    config.loss.update(ratio="token", aggregation="token_mean", dual_clip=3.0)
    config.algorithm.deviation = "sample"
    return config
