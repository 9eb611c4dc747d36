"""SPELL with the choices of the paper's text, from one of the paper's models (table below).

    python -m spell_jax.train --config=configs/paper.py:qwen2.5-7b-instruct --workdir=DIR \
        --config.policy.folder=FOLDER --config.data.source=DOCUMENTS

FOLDER is a local copy of the model's Hugging Face folder, by default models/NAME; DOCUMENTS are
yours (docs/howto/your_documents.md). Without a model (`--config=configs/paper.py`) the config has
the paper's values and no policy. docs/algorithm.md (text, code and defaults) lists the choices
beside the public code's (configs/paper_code.py) and the defaults.
Hardware: weights, gradient, optimizer state and the rollout copy take 18 bytes per parameter
(137 GB for 7.6e9; estimated), split over all devices. The paper's own 7B run took 8 hours on 8 A100
of 80 GB (section F.1).
Expected scores: the table's columns `before` and `after`, as the paper reports them (Table 1,
average of four benchmarks with inputs of up to 16K tokens). This code has not run them.

    python -m spell_jax.evaluate --workdir=DIR --data=BENCHMARKS --out=OUT --max_input=100000 \
        --benchmarks=docmath,frames,2wikimqa,hotpotqa,musique,longbench_v2 --judge_url=... \
        --max_tokens=MAX_TOKENS --rope_scaling=yarn --rope_factor=YARN

MAX_TOKENS is the model's in the table: in the paper a model may write as much in evaluation as in
training (Appendix E.2), 4096 tokens, and reasoning models, the distilled and the thinking ones,
20480. Without the flag the limit is a benchmark's own, 4096 here: reasoning models need
--max_tokens=20480. Qwen2.5's instruct models have 32,768 positions, too few for the prompt and an
answer. `yarn` is the factor by which YaRN extends them, from the models' cards, because the paper
names no method. Other models need no scaling.
"""

from typing import NamedTuple

from spell_jax.config import default_config
from spell_jax.runtime.config import Config


class SpellModel(NamedTuple):
    """One model of the paper.

    Attributes:
      folder: name of its Hugging Face repository, without the owner.
      parameters: number of parameters, in billions.
      before: the paper's average before SPELL, in percent.
      after: the paper's average after SPELL, in percent.
      max_tokens: longest answer, in training and as --max_tokens of spell_jax.evaluate; reasoning
        models may write 20K tokens (paper section 4.1 and Appendix E.2).
      expert: devices that the experts are split over.
      yarn: --rope_factor of the evaluation at 100K tokens; 1: the context is long enough.
    """

    folder: str
    parameters: float
    before: float
    after: float
    max_tokens: int = 4096
    expert: int = 1
    yarn: float = 1.0


MODELS = {
    "qwen2.5-7b": SpellModel("Qwen2.5-7B", 7.6, 26.7, 40.6),
    "qwen2.5-14b": SpellModel("Qwen2.5-14B", 14.8, 37.3, 51.7),
    "qwen2.5-32b": SpellModel("Qwen2.5-32B", 32.8, 43.0, 52.1),
    "qwen2.5-7b-instruct": SpellModel("Qwen2.5-7B-Instruct", 7.6, 38.2, 47.2, yarn=4.0),
    "qwen2.5-14b-instruct": SpellModel("Qwen2.5-14B-Instruct", 14.8, 50.8, 57.8, yarn=4.0),
    "qwen2.5-32b-instruct": SpellModel("Qwen2.5-32B-Instruct", 32.8, 51.8, 59.5, yarn=4.0),
    "llama-3.1-8b-instruct": SpellModel("Meta-Llama-3.1-8B-Instruct", 8.0, 40.1, 44.5),
    "qwen3-30b-a3b-instruct": SpellModel("Qwen3-30B-A3B-Instruct-2507", 30.5, 56.3, 60.7, expert=8),
    "r1-distill-llama-8b": SpellModel("DeepSeek-R1-Distill-Llama-8B", 8.0, 46.8, 50.2, 20_480),
    "r1-distill-qwen-14b": SpellModel("DeepSeek-R1-Distill-Qwen-14B", 14.8, 56.4, 59.8, 20_480),
    "qwen3-4b-thinking": SpellModel("Qwen3-4B-Thinking-2507", 4.0, 54.5, 56.7, 20_480),
    "qwen3-30b-a3b-thinking": SpellModel(
        "Qwen3-30B-A3B-Thinking-2507", 30.5, 60.7, 62.7, 20_480, 8
    ),
}


def get_config(model: str = "") -> Config:
    config = default_config()
    # Section 4.1: the task of each rollout is sampled at random, an input has at most 16K tokens.
    config.data.task_choice = "random"
    config.sampler.max_prompt = 16_384
    # Appendix E.1 cuts no document: its texts have at most 32,768 characters, of up to four bytes,
    # and a byte has at most one token. The default, 3200, would cut most long texts.
    config.data.max_document_tokens = 4 * 32_768
    # Appendix G: an answer is stated in one phrase (the default reads more forms of it, and scores
    # would not compare with the paper's), and a general reference of over 20 tokens is forbidden.
    config.algorithm.extract = "paper"
    questioner = config.algorithm.questioner
    questioner.max_answer_tokens = 20
    # Eq. 7: every error of format earns -1, also an over-long, zero or non-numeric reference.
    questioner.decline_penalty = True
    # Eq. 5: a vote that differs from the majority, such as a malformed one, earns 0.
    config.algorithm.verifier.malformed_penalty = False
    # Section 3.3: as many negatives as positives, of any task.
    questioner.negatives_by_task = False
    # Eq. 3, 8 and 9 have the plain standard deviation.
    config.algorithm.deviation = "population"
    # Eq. 10 with Eq. 12, which give most of the gradient to the few tokens of the verdicts. The
    # default, token_mean, does not (docs/algorithm.md, aggregation of the loss).
    config.loss.aggregation = "role_group_mean"
    # Eq. 2 has no second bound. It would act only with several updates per step.
    config.loss.dual_clip = 0.0
    if not model:
        return config
    if model not in MODELS:
        raise ValueError(f"configs/paper.py:{model}: must be one of {', '.join(MODELS)}")
    row = MODELS[model]
    config.policy.folder = f"models/{row.folder}"
    # The paper's verdicts have the same cap as answers (section 4.1 names one maximum output).
    config.sampler.max_tokens = row.max_tokens
    config.mesh.expert = row.expert
    return config
