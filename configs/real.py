"""A real language model trained without labels: methods and controls as arms of one table.

    python -m spell_jax.train --config=configs/real.py:ARM --workdir=runs/real/ARM_SEED \
        --config.policy.folder=START

ARM is one of ARMS, START a policy that answers in the format of the reward's rule (docs/smollm2.md
says how it is tuned). Documents and questions are made by data_pipeline.article_questions and
data_pipeline.cloze_questions. Hardware: 2 CPU cores.
"""

from collections.abc import Mapping
from typing import Any

from spell_jax.config import default_config
from spell_jax.runtime.config import Config

_RLVR = {"algorithm.name": "rlvr", "algorithm.responder_reward": "rule", "algorithm.rule": "exact"}
# Arm -> changed fields.
ARMS: Mapping[str, Mapping[str, Any]] = {
    # Control: what right labels are worth.
    "labelled": {**_RLVR, "data.questions": "runs/real/labelled.jsonl"},
    # Sentences with a gap, whose words stand elsewhere in the documents.
    "cloze": {**_RLVR, "data.questions": "runs/real/cloze.jsonl"},
    # The starting policy, reading what a question was written from, scores each token.
    "distillation": {
        "algorithm.name": "self_distillation",
        "algorithm.static_questions": 960,
        "algorithm.questions_per_cluster": 4,
        "algorithm.documents": (1,),
        "loss.distillation_weight": 1.0,
        "loss.kl_weight": 0.0,
        "data.source": "runs/real/articles8.jsonl",
    },
    # The same with people's questions, whose answers it does not see.
    "distillation_asked": {
        "algorithm.name": "self_distillation",
        "loss.distillation_weight": 1.0,
        "loss.kl_weight": 0.0,
        "data.questions": "runs/real/labelled8.jsonl",
    },
}


def get_config(arm: str = "cloze") -> Config:
    if arm not in ARMS:
        raise ValueError(f"configs/real.py:{arm}: must be one of {', '.join(ARMS)}")
    config = default_config(ARMS[arm]["algorithm.name"])
    config.update(steps=100, evaluate=True, validate_every=25, checkpoint_every=10)
    config.preemption_limit_s = 600.0
    config.data.update(tasks=("general_qa",), task_weights=(1.0,), shuffle=False)
    config.data.validation = "runs/real/held_out.jsonl"
    config.algorithm.update(prompts="compact", max_generations=1, group_size=8)
    config.algorithm.update(questions=32, generation_batch=32)
    config.sampler.update(max_prompt=4096, max_tokens=32, page_size=64, kv_cache_tokens=131_072)
    config.sampler.update(temperature=1.0, top_p=1.0, prefill_tokens=512, slots=64)
    config.sampler.update(decode_tokens=16)
    config.optimizer.update(learning_rate=5e-6, b2=0.95, weight_decay=0.0, warmup_steps=5)
    config.loss.update(kl_weight=1e-3)
    config.packing.update(token_budget=4096)
    config.update_from_flattened_dict(ARMS[arm])
    return config
