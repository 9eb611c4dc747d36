"""RLVR on given questions from one of SPELL's models: its baseline, with SPELL's values.

    python -m spell_jax.question_sets.teacher --source=DOCUMENTS \
        --out=runs/questions --attempts=4000 \
        --teacher_policy=FOLDER --agreement=rule
    python -m spell_jax.train --config=configs/rlvr.py --workdir=DIR \
        --config.policy.folder=FOLDER --config.data.questions=runs/questions/questions.jsonl

The model is qwen2.5-7b-instruct, or NAME of configs/paper.py by --config=configs/rlvr.py:NAME. Any
.jsonl of {"task", "documents", "question", "answer"} will do. Rewards are the rule's;
--config.algorithm.rule=judge asks an external judge (algorithm.judge_url, algorithm.judge_model)
instead, match_or_judge takes the maximum of both (QwenLong-L1), and
--config.algorithm.responder.reward=max asks the policy's own verifier as well.
Hardware: configs/paper.py. The paper's own baseline of this model (Table 1): average of four
benchmarks 38.2 before and 45.9 after, with inputs of up to 16K tokens (this code has not run it).
docs/algorithms.md, "Training of the baselines", has the epochs.
"""

from spell_jax.config import default_config
from spell_jax.configs import paper
from spell_jax.runtime.config import Config

# Questions of the paper's static set, about (Appendix E.5). A run reads data.questions.
QUESTIONS = 3000


def get_config(model: str = "qwen2.5-7b-instruct") -> Config:
    config = paper.get_config(model)
    config.algorithm = default_config("rlvr").algorithm
    config.algorithm.extract = "paper"
    # SPELL's hyper-parameters stay (section 4.1), as in configs/paper.py: Eq. 3 has the plain
    # deviation.
    config.algorithm.deviation = "population"
    # RLVR asks the rule alone, no trained verifier.
    config.algorithm.responder.reward = "rule"
    return config
