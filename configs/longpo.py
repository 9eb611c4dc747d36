"""LongPO on questions about short contexts, from Qwen2.5-7B-Instruct.

    python -m spell_jax.question_sets.teacher --source=DOCUMENTS \
        --out=runs/questions --attempts=4000 \
        --teacher_policy=FOLDER --agreement=rule
    python -m spell_jax.train --config=configs/longpo.py --workdir=DIR \
        --config.policy.folder=FOLDER --config.data.questions=runs/questions/questions.jsonl

Any questions with "shown" or "evidence" will do; without data.questions the starting policy writes
them from clusters (data.source). Hardware: configs/paper.py; the reference model is one more copy
of the policy in float32. LongPO is a baseline of SPELL's Table 9: average of four benchmarks 38.2
before and 42.8 after training by SPELL's authors (this code has not run it). The steps are one
epoch of SPELL's 3,000 questions; other numbers of questions need other `steps` and
`optimizer.warmup_steps` (docs/algorithms.md, "Training of the baselines").
"""

import math

from spell_jax.config import default_config
from spell_jax.configs import paper, rlvr
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = paper.get_config("qwen2.5-7b-instruct")
    config.algorithm = default_config("longpo").algorithm
    config.algorithm.extract = "paper"
    config.algorithm.generation_batch = 8
    config.steps = math.ceil(rlvr.QUESTIONS / config.algorithm.generation_batch)  # one epoch
    # Beta, lambda (preference_weight), batch, epochs and optimizer equal the authors' training
    # script (DAMO-NLP-SG/LongPO, README.md at commit 3a4673a, for Mistral-7B).
    config.loss.update(objective="dpo", old_logprobs="reference", aggregation="sequence_mean")
    config.loss.update(beta=0.01, preference_weight=0.01, nll_weight=1.0)
    # torch's RMSprop, with its default decay.
    config.optimizer.update(name="rmsprop", b2=0.99, learning_rate=5e-7, weight_decay=0.0)
    config.optimizer.update(schedule="cosine", warmup_steps=math.ceil(config.steps / 10))
    return config
