"""EAPO from Qwen3-14B, with Qwen3-30B-A3B-Thinking-2507 as reward model: the paper's values.

    python -m spell_jax.train --config=configs/eapo.py --workdir=DIR \
        --config.policy.folder=FOLDER --config.reward_model.folder=FOLDER \
        --config.data.questions=QUESTIONS.jsonl

QUESTIONS.jsonl has lines {"task", "documents", "question", "answer"}; data_pipeline.long_questions
makes them from multi-hop rows and from tables (docs/data.md). The folders are local copies of the
models of Hugging Face, by default below models/.
Hardware: 18 bytes for each of the policy's 14.8e9 parameters, 266 GB, and as many for each of the
reward model's 30.5e9, 549 GB (estimated), split over all devices and, 12 bytes of each, over their
hosts' memory; a device holds what one of the models needs at a time.
Expected, as the paper reports (Table 1; nothing of it was run with this code): average of eight
benchmarks 53.2 before, 53.8 by outcome alone (algorithm.reward_model=none), 55.0 after.
"""

from spell_jax.config import default_config, extra_model
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = default_config("eapo")
    config.steps = 73  # of 64: 4,664 questions once
    config.minibatches = 2  # of 32 questions
    config.policy.update(folder="models/Qwen3-14B", rope_scaling="yarn", rope_factor=4.0)

    with config.unlocked():
        config.reward_model = extra_model()
    config.reward_model.folder = "models/Qwen3-30B-A3B-Thinking-2507"
    for optimizer in (config.optimizer, config.reward_model.optimizer):
        optimizer.offload = optimizer.offload_weights = True

    config.data.update(tasks=("general_qa", "financial_math"), task_weights=(1.0, 1.0))
    config.sampler.update(temperature=1.0, top_p=1.0, max_prompt=122_880, max_tokens=8192)
    config.sampler.update(prefill_tokens=16_384, kv_cache_tokens=4_194_304)
    config.sampler.samples_per_prompt_batch = 6
    # The ratio is a token's; its Eq. 1 has that of a whole answer: ratio="sequence",
    # aggregation="sequence_mean", dual_clip=0.
    config.loss.update(old_logprobs="recompute", clip_high=0.28)
    config.packing.buckets = ((32_768, 16_384), (131_072, 49_152))
    config.packing.token_budget = 131_072
    config.mesh.context = 8
    return config
