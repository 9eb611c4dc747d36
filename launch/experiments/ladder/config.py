"""The ladder: a world in which adaptive questions should pay, and the arms that would show it.

    python -m spell_jax.sft --config=launch/experiments/ladder/warm_start_config.py \
        --workdir=runs/ladder_warm_start
    python -m spell_jax.train --config=launch/experiments/ladder/config.py:ARM \
        --workdir=runs/ladder/ARM/0

ARM is one of ARMS or of STABILIZERS. `python -m launch.experiments.ladder commands` prints the
commands of all arms and seeds; the commands that write an arm's questions come first.
docs/ladder.md has the results, notebook.md the protocol and the times. Hardware: one CPU core.
"""

from collections.abc import Mapping
from typing import Any

from spell_jax.config import default_config
from spell_jax.configs import tiny
from spell_jax.launch.experiments.ladder import world
from spell_jax.runtime.config import Config

_STATIC = {"name": "rlvr", "static_temperature": 1.0}
_NO_MEMORY = {"questioner.memory": 0}
_FROZEN = {"questioner.train": False}
# Arm -> changed fields of the algorithm. The arms of QUESTIONS train on a file, data.questions.
ARMS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "frozen": _FROZEN,
    "no_memory": _NO_MEMORY,
    "frozen_no_memory": _FROZEN | _NO_MEMORY,
    "static": _STATIC,
    "uniform": _STATIC,
    "random": {"responder.reward": "random"},
    "yoked": _STATIC,
    "yoked_shuffled": _STATIC,
    "shallow": _STATIC,
}
QUESTIONS = ("uniform", "yoked", "yoked_shuffled", "shallow")
# The full arm with one more switch -> the switch's fields.
STABILIZERS: Mapping[str, Mapping[str, Any]] = {
    "leak_05": {"algorithm.reader.gate_leak": 0.05},
    "leak_10": {"algorithm.reader.gate_leak": 0.1},
    "leak_20": {"algorithm.reader.gate_leak": 0.2},
    "leak_40": {"algorithm.reader.gate_leak": 0.4},
    "cluster": {
        "algorithm.questioner.questions_per_cluster": 4,
        "algorithm.questioner.normalization": "cluster",
    },
    "progress": {"algorithm.questioner.mapping": "progress"},
    "dropout": {"algorithm.questioner.vocabulary_dropout": 0.1},
}
# Steps of about equal totals of sampled tokens: with a trained questioner, which asks for longer
# answers; with a frozen one; with given questions, which no frozen reader answers.
STEPS, FROZEN_STEPS, STATIC_STEPS = 60, 70, 120


def get_config(arm: str = "full") -> Config:
    if arm in STABILIZERS:
        config = get_config()
        config.update_from_flattened_dict(STABILIZERS[arm])
        return config
    if arm not in ARMS:
        arm_names = ", ".join([*ARMS, *STABILIZERS])
        raise ValueError(f"launch/experiments/ladder/config.py:{arm}: must be one of {arm_names}")
    config = tiny.get_config()
    config.steps = STEPS if ARMS[arm].get("questioner.train", True) else FROZEN_STEPS
    if ARMS[arm].get("name") == "rlvr":
        config.steps = STATIC_STEPS
    config.update(evaluate=False, validate_every=10, checkpoint_every=20)
    # Cross-play asks every checkpoint the questions of all steps, so none is deleted. A limit of
    # minutes would end arms at different numbers of tokens.
    config.update(max_minutes=0.0, keep_checkpoints=10)
    # bfloat16 is chosen by the machine's CPU; float32 keeps the arms comparable between machines.
    config.policy.update(folder="runs/ladder_warm_start/policy", compute_dtype="float32")

    config.data.source = "spell_jax.launch.experiments.ladder.world:make_clusters"
    config.data.update(tasks=("general_qa",), task_weights=(1.0,))
    config.data.shuffle = arm != "yoked"  # which trains in the order of the full arm's questions
    config.data.tiny.update(clusters=192, documents=(9,))
    config.data.tiny.evaluation.update(documents=(9,), quick_documents=(9,))
    config.data.tiny.evaluation.update(per_cell=256, quick_per_cell=64)

    algorithm = default_config(ARMS[arm].get("name", "spell")).algorithm
    questioner, reader = algorithm.questioner, algorithm.reader
    algorithm.evaluation = "spell_jax.launch.experiments.ladder.evaluation:held_out"
    algorithm.update(prompts="compact", questions=48, generation_batch=48, max_generations=1)
    # All roles read all documents: what is hard about a question is its depth.
    questioner.update(documents=(9,), unread_documents=0, grounding_samples=0)
    # The prompt shows solved questions: one more relation in front of one is one more hop.
    algorithm.verifier.max_tokens = 4
    reader.source = "frozen_reader"
    if "memory" in questioner:
        questioner.update(memory=2, memory_solved=True)
    # Without a cue, each full run came to ask mostly for one relation, and learned that alone.
    questioner.cues = world.CUES
    # Hop by hop the reader needs depth 1 alone, so references stay right at depths that it could
    # not answer at once.
    reader.update(by_hop=True, unanimous=True)
    # An answer is one word, so the rule is exact. A verifier that trains too may go astray and
    # reward wrong answers (notebook.md), which is not what the arms compare.
    algorithm.responder.reward = "rule"
    # A guess is right once in 9 times, and a single right answer of 8 would get the most weight.
    # At depth 6 and more, most right answers reach the right person by a wrong walk.
    algorithm.divide_by_deviation = False
    algorithm.update_from_flattened_dict(ARMS[arm])
    config.algorithm = algorithm

    # At the paper's temperature of .7 nearly all groups of answers are alike, and the update, which
    # is for temperature 1, sharpens the policy further.
    config.sampler.update(temperature=1.0, top_p=1.0)
    # An answer of depth 8 has 45 tokens.
    config.sampler.update(max_prompt=144, max_tokens=52, kv_cache_tokens=24_576)
    # In trials accuracy fell at 8e-4 (.45 to .43), and at 1e-3 (depth 2 to .84).
    config.optimizer.update(learning_rate=3e-4, b2=0.99)
    config.packing.update(buckets=((256, 192),), token_budget=4096)
    return config
