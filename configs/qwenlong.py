"""QwenLong-L1 on given questions from Qwen2.5-7B-Instruct: RLVR, shorter inputs first.

    python -m spell_jax.question_sets.teacher --source=DOCUMENTS \
        --out=runs/questions --attempts=4000 \
        --teacher_policy=FOLDER --agreement=rule
    python -m spell_jax.train --config=configs/qwenlong.py --workdir=DIR \
        --config.policy.folder=FOLDER --config.data.questions=runs/questions/questions.jsonl

The fields equal SPELL's RLVR (configs/rlvr.py), with the reward max(rule, verifier). Hardware:
configs/paper.py. QwenLong-L1 is a baseline of SPELL's Table 9: average of four benchmarks 38.2
before and 46.1 after training by SPELL's authors (this code has not run it). docs/algorithms.md,
"Training of the baselines", has the epochs.
"""

from spell_jax.config import default_config
from spell_jax.configs import paper
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = paper.get_config("qwen2.5-7b-instruct")
    config.algorithm = default_config("qwenlong_l1").algorithm
    config.algorithm.update(extract="paper", deviation="population")
    # For SPELL's inputs of up to 16K tokens. QwenLong-L1's own phases, 20K and 60K tokens, are the
    # field's default and need a longer sampler.max_prompt.
    config.algorithm.phase_tokens = (8192, 16_384)
    return config
