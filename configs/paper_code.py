"""SPELL with the choices of the paper's public code where it departs from the paper's text.

    python -m spell_jax.train --config=configs/paper_code.py:qwen2.5-7b-instruct --workdir=DIR \
        --config.policy.folder=FOLDER --config.data.source=DOCUMENTS

They are the documents shown, memory, advantages and aggregation. All else is as in
configs/paper.py, which follows the text in these. docs/algorithm.md lists all differences of text
and code (points 2, 3, 8 and 12).
"""

from spell_jax.configs import paper
from spell_jax.runtime.config import Config


def get_config(model: str = "") -> Config:
    config = paper.get_config(model)
    config.algorithm.update(memory_documents="shown", memory_solved=True, unread_documents=0)
    config.algorithm.questioner_normalization = "task"
    config.loss.aggregation = "token_mean"  # there of each micro-batch, so it depends on packing
    return config
