"""SPELL with the choices of the paper's public code where it departs from the paper's text.

    python -m spell_jax.train --config=configs/paper_code.py:qwen2.5-7b-instruct --workdir=DIR \
        --config.policy.folder=FOLDER --config.data.source=DOCUMENTS

The choices concern documents shown, memory, advantages and aggregation. Everything else equals
configs/paper.py, which follows the text. docs/algorithm.md lists all differences of text and code
(points 2, 3, 8 and 12).
"""

from spell_jax.configs import paper
from spell_jax.runtime.config import Config


def get_config(model: str = "") -> Config:
    config = paper.get_config(model)
    # A remembered question brings all its documents, so the questioner's context grows 5, 10, 15...
    # The text's memory holds only the new documents, and only partly solved questions.
    config.algorithm.update(memory_documents="shown", memory_solved=True, unread_documents=0)
    config.algorithm.questioner_normalization = "task"
    # The public code takes the mean over each micro-batch, so a token's weight depends on packing.
    config.loss.aggregation = "token_mean"
    return config
