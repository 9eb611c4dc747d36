"""EAPO with the paper's hyper-parameters, from one of its policies (table below).

    python -m spell_jax.train --config=configs/eapo.py:qwen3-14b --workdir=DIR \
        --config.policy.folder=FOLDER --config.reward_model.folder=FOLDER \
        --config.data.questions=QUESTIONS.jsonl \
        --config.algorithm.rule=judge --config.algorithm.judge_template=grades \
        --config.algorithm.judge_url=URL --config.algorithm.judge_model=NAME

QUESTIONS.jsonl has lines {"task", "documents", "question", "answer"}; question_sets/padded.py
makes them from multi-hop rows and from tables (docs/data.md). The folders are local copies of the
models of Hugging Face, by default below models/; the reward model of all policies is
Qwen3-30B-A3B-Thinking-2507. In the paper an LLM judges the outcome (R_a, section 3.2), as the last
two lines of the command ask; without them the task's rule does. Without a policy
(`--config=configs/eapo.py`) it is qwen3-14b.
Hardware: 18 bytes per parameter, 266 GB for the policy's 14.8e9 and 549 GB for the reward model's
30.5e9 (estimated). Devices share 6 of the 18 bytes, their hosts' memory the other 12. Devices hold
one model at a time.
Expected: the table's last columns, the average of eight benchmarks as the paper reports it (Table
1; this code has not run it).

    python -m spell_jax.evaluate --workdir=DIR --data=BENCHMARKS --out=OUT --columns=separate \
        --benchmarks=seal_0,seal_hard,musique,hotpotqa,2wikimqa,longbench_v2_sdq,\
longbench_v2_mdq,longbench_v2_lsa --max_input=122880 --max_tokens=8192 \
        --answer_format=sections --rule=judge --judge_template=grades --judge_url=URL \
        --judge_model=NAME

Where the table's factor `yarn` is above 1, the evaluation also needs --rope_scaling=yarn
--rope_factor=YARN.
"""

from typing import NamedTuple

from spell_jax.config import default_config, extra_model
from spell_jax.runtime.config import Config


class EapoModel(NamedTuple):
    """One policy of the paper.

    Attributes:
      folder: name of its Hugging Face repository, without the owner.
      yarn: factor by which YaRN extends a context that is too short for the longest prompt and
        answer; 1: it is long enough.
      before: the paper's average before the run, in percent.
      outcome: the paper's average after GRPO by outcome alone, in percent
        (--config.algorithm.reward_model=none, or =logged, which also measures the evidence).
      after: the paper's average after EAPO, in percent.
    """

    folder: str
    yarn: float
    before: float
    outcome: float
    after: float


MODELS = {
    "qwen3-14b": EapoModel("Qwen3-14B", 4.0, 53.2, 53.8, 55.0),
    "qwen3-30b-a3b-instruct": EapoModel("Qwen3-30B-A3B-Instruct-2507", 1.0, 48.1, 53.1, 55.6),
    "qwen3-30b-a3b-thinking": EapoModel("Qwen3-30B-A3B-Thinking-2507", 1.0, 58.0, 59.2, 63.1),
}


def get_config(model: str = "qwen3-14b") -> Config:
    if model not in MODELS:
        raise ValueError(f"configs/eapo.py:{model}: must be one of {', '.join(MODELS)}")
    row = MODELS[model]
    config = default_config("eapo")
    config.steps = 73  # of 64: 4,664 questions once
    config.minibatches = 2  # of 32 questions
    # The paper's scores were computed from fewer forms of an answer than the default reads.
    config.algorithm.extract = "paper"
    config.algorithm.keep_equal = True  # its GRPO leaves no group out
    config.algorithm.deviation = "population"  # Eq. 1 divides by the plain deviation
    config.policy.folder = f"models/{row.folder}"
    if row.yarn > 1:  # the longest prompt and answer have 131,072 positions
        config.policy.update(rope_scaling="yarn", rope_factor=row.yarn)

    with config.unlocked():
        config.reward_model = extra_model()
    config.reward_model.folder = "models/Qwen3-30B-A3B-Thinking-2507"
    # Ours, since the paper gives only the time, two GPU hours: 40 updates of 1,280 kept replies.
    config.reward_model.update(epochs=2, groups_per_update=64)
    config.reward_model.optimizer.learning_rate = 1e-5
    # One of the two models is in use at a time: the offload frees the devices' memory of the idle
    # model.
    for optimizer in (config.optimizer, config.reward_model.optimizer):
        optimizer.offload = optimizer.offload_weights = True

    config.data.update(tasks=("general_qa", "financial_math"), task_weights=(1.0, 1.0))
    config.sampler.update(temperature=1.0, top_p=1.0, max_prompt=122_880, max_tokens=8192)
    # Room for 24 of the longest prompts with six full answers each. A smaller pool stalls decoding.
    config.sampler.update(prefill_tokens=16_384, kv_cache_tokens=4_194_304)
    config.sampler.samples_per_prompt_batch = 6  # the paper's group size G
    # Eq. 1 as printed: the ratio of a whole answer (a product over its tokens), the mean over a
    # group's G answers, no dual clip. configs/eapo_code.py has the public framework's loss.
    config.loss.update(ratio="sequence", aggregation="sequence_mean", dual_clip=0.0)
    # The second mini-batch of a step is off-policy, so its ratios need the logprobs of the weights
    # before the step.
    config.loss.update(old_logprobs="recompute", clip_high=0.28)
    config.packing.token_budget = 131_072  # one row: the longest prompt with one full answer
    config.mesh.context = 8  # a row is too long for the memory of one device
    return config
