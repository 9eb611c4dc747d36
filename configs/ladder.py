"""The ladder: a world in which adaptive questions should pay, and the arms that would show it.

    python -m spell_jax.sft --config=configs/ladder_warm_start.py --workdir=runs/ladder_warm_start
    python -m spell_jax.train --config=configs/ladder.py:ARM --workdir=runs/ladder/ARM/0

ARM is one of ARMS. `python -m launch.ladder commands` prints the commands of all arms and seeds,
those that write the questions of some arms first. docs/ladder.md has the protocol and the results.
Hardware: one CPU core, about 5 minutes for a run of the full arm (estimated).
"""

from collections.abc import Mapping
from typing import Any

from spell_jax.config import default_config
from spell_jax.configs import tiny
from spell_jax.runtime.config import Config

_STATIC = {"name": "rlvr"}
_NO_MEMORY = {"memory": 0}
_FROZEN = {"train_questioner": False}
# Arm -> changed fields of the algorithm. The arms of QUESTIONS train on a file, data.questions.
ARMS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "frozen": _FROZEN,
    "no_memory": _NO_MEMORY,
    "frozen_no_memory": _FROZEN | _NO_MEMORY,
    "static": _STATIC,
    "uniform": _STATIC,
    "random": {"responder_reward": "random"},
    "yoked": _STATIC,
    "yoked_shuffled": _STATIC,
    "shallow": _STATIC,
}
QUESTIONS = ("uniform", "yoked", "yoked_shuffled", "shallow")


def get_config(arm: str = "full") -> Config:
    if arm not in ARMS:
        raise ValueError(f"configs/ladder.py:{arm}: must be one of {', '.join(ARMS)}")
    config = tiny.get_config()
    config.update(steps=120, evaluate=False, validate_every=10, checkpoint_every=30)
    config.update(max_minutes=0.0, keep_checkpoints=10)
    config.policy.folder = "runs/ladder_warm_start/policy"

    config.data.update(source="ladder", tasks=("general_qa",), task_weights=(1.0,))
    config.data.shuffle = arm != "yoked"
    config.data.tiny.update(clusters=192, documents=(9,))
    config.data.tiny.evaluation.update(documents=(9,), quick_documents=(9,), per_cell=256)

    algorithm = default_config(ARMS[arm].get("name", "spell")).algorithm
    algorithm.update(prompts="compact", questions=48, generation_batch=48, max_generations=1)
    # All roles read all documents: what is hard about a question is its depth.
    algorithm.update(documents=(9,), unread_documents=0, grounding_samples=0)
    algorithm.update(memory=2, memory_solved=True, reference_source="frozen_reader")
    algorithm.update(reader_by_hop=True, reader_unanimous=True, verifier_group_size=3)
    algorithm.update(ARMS[arm])
    config.algorithm = algorithm

    # Room for depth 8: an answer has 45 tokens then.
    config.sampler.update(max_prompt=144, max_tokens=52, kv_cache_tokens=24_576)
    config.optimizer.learning_rate = 1.5e-4
    config.packing.update(buckets=((256, 192),), token_budget=4096)
    return config
