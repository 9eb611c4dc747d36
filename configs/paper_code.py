"""SPELL with the choices of the paper's public code where it departs from the paper's text.

    python -m spell_jax.train --config=configs/paper_code.py:qwen2.5-7b-instruct --workdir=DIR \
        --config.policy.folder=FOLDER --config.data.source=DOCUMENTS

Everything else equals configs/paper.py, which follows the text. docs/algorithm.md (text, code and
defaults) lists both beside the defaults, with differences that no field can choose.
"""

from spell_jax.configs import paper
from spell_jax.runtime.config import Config


def get_config(model: str = "") -> Config:
    config = paper.get_config(model)
    # Equal shares of the tasks in every round, and room for a template around 16K of documents.
    config.data.task_choice = "shares"
    config.sampler.max_prompt = 18_000
    # A remembered question brings all its documents, so the questioner's context grows 5, 10, 15...
    # The text's memory holds only the new documents, and only partly solved questions.
    questioner, verifier = config.algorithm.questioner, config.algorithm.verifier
    questioner.update(memory_documents="shown", memory_solved=True, unread_documents=0)
    # A general reference may have 40 tokens. A longer one, a zero or a number that cannot be read
    # is dropped without a penalty; a malformed vote earns -1.
    questioner.update(max_answer_tokens=40, decline_penalty=False)
    verifier.malformed_penalty = True
    # Each task has negatives of its own and its own mean; deviations are the sample's (ddof 1).
    questioner.update(negatives_by_task=True, normalization="task")
    config.algorithm.deviation = "sample"
    # Votes conflict if 51 to 99 % of the well-formed ones agree, not if one vote is malformed.
    verifier.conflict = "well_formed"
    # The public code takes the mean over each micro-batch, so a token's weight depends on packing.
    config.loss.update(aggregation="token_mean", dual_clip=3.0)
    return config
