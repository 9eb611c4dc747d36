"""EAPO in the generated world: a small policy and a small reward model, which learns with it.

    python -m spell_jax.train --config=configs/tiny_eapo.py --workdir=runs/tiny_eapo

after the commands of tiny_eapo_policy.py and tiny_eapo_reward.py, which make both models and the
questions: look-ups and two-hop questions about 8 documents. The controls are
--config.game.reward_model=static and =none (by outcome alone).
Hardware: 1 CPU core, 1.3 minutes of processor time (measured, as all below, with seed 0 and a
reward model of 850 steps). Expected: too little, in so few steps. Answers drawn in the first and
the last five steps: well-formed .72 and .81, right .32 and .40 (by outcome alone .73, .82, .32,
.42); greedy accuracy on 128 held-out questions .65 and .65 (.65, .63). The reward model does not
compare names yet (tiny_eapo_reward.py), so what it gives for evidence is noise.
"""

from typing import Any

from configs import base, eapo, tiny


def get_config() -> Any:  # a ConfigDict, whose fields have no static types
    config = tiny.get_config()
    config.steps = 60
    config.minibatches = 2
    config.validate_every = 0
    config.checkpoint_every = 60
    config.max_minutes = 0.0

    config.policy.folder = "runs/tiny_eapo_policy/policy"
    config.reward_model = tiny.get_config().policy
    config.reward_model.folder = "runs/tiny_eapo_reward/policy"
    config.reward_model.optimiser = base.get_config().optimiser
    config.reward_model.optimiser.learning_rate = 1e-4

    del config.data.tiny
    config.data.source = ""
    config.data.questions = "runs/evidence_rows/train.jsonl"
    config.data.validation = "runs/evidence_rows/held_out.jsonl"
    config.data.tasks = ("general_qa",)
    config.data.task_weights = (1.0,)

    config.game = eapo.game()
    config.game.prompts = "compact"
    config.game.questions = 24
    config.game.group_size = 4  # of the reward model's warm start, at most
    config.game.refresh_every = 10

    config.sampler.temperature = 1.0
    config.sampler.top_p = 1.0
    config.sampler.siblings = 4
    config.sampler.slots = 96
    config.sampler.max_tokens = 96
    config.optimiser.learning_rate = 3e-4
    config.loss.behaviour = "recomputed"
    config.loss.clip_high = 0.28
    config.packing.buckets = ((416, 352),)
    config.packing.token_budget = 4992
    return config
