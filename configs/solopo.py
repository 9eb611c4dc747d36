"""SoLoPO on questions about short contexts, from Qwen2.5-7B-Instruct.

    python -m spell_jax.question_sets.teacher --source=DOCUMENTS \
        --out=runs/questions --attempts=4000 \
        --teacher_policy=FOLDER --agreement=rule
    python -m spell_jax.train --config=configs/solopo.py --workdir=DIR \
        --config.policy.folder=FOLDER --config.data.questions=runs/questions/questions.jsonl

Any questions with "shown" or "evidence" will do; without data.questions the starting policy writes
them from clusters (data.source). Hardware: configs/paper.py; the reference model is one more copy
of the policy in float32. SoLoPO is a baseline of SPELL's Table 9: average of four benchmarks 38.2
before and 44.2 after training by SPELL's authors (this code has not run it). The steps are one
epoch of SPELL's 3,000 questions; other numbers of questions need other `steps` (docs/algorithms.md,
"Training of the baselines").
"""

import math

from spell_jax.config import default_config
from spell_jax.configs import paper, rlvr
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = paper.get_config("qwen2.5-7b-instruct")
    config.algorithm = default_config("solopo").algorithm
    config.algorithm.extract = "paper"
    config.algorithm.generation_batch = 64
    config.steps = math.ceil(rlvr.QUESTIONS / config.algorithm.generation_batch)  # one epoch
    # The paper's hyper-parameters are not known to us: beta is DPO's usual value, alpha
    # (align_weight) is 1, and epochs and learning rate are LongPO's.
    config.loss.update(objective="dpo", old_logprobs="reference", aggregation="sequence_mean")
    config.loss.update(beta=0.1, align_weight=1.0)
    config.optimizer.update(learning_rate=5e-7, schedule="cosine", weight_decay=0.0)
    return config
