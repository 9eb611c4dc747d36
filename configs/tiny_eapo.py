"""EAPO in the generated world: a small policy and a small reward model, which learns with it.

    python -m spell_jax.train --config=configs/tiny_eapo.py --workdir=runs/tiny_eapo

after the commands of tiny_eapo_policy.py and tiny_eapo_reward.py, which make both models and the
questions: look-ups and two-hop questions about 5 documents. The controls are
--config.algorithm.reward_model=static and =none (by outcome alone).
Hardware: 1 CPU core, 5.6 minutes of processor time (measured, as all below, at commit cd9dc09).
Expected on 256 held-out questions, greedy, seed 0: right .59 before, .87 after (static .88), recall
of evidence .67 and .81 (.82). launch/experiments/notebooks/eapo_tiny.md has three seeds with the
loss of eapo_code.py, by outcome alone too, and why the three are equal here.
"""

from spell_jax.config import default_config, extra_model
from spell_jax.configs import tiny
from spell_jax.runtime.config import Config


def get_config() -> Config:
    config = tiny.get_config()
    config.update(steps=60, minibatches=2, validate_every=0, checkpoint_every=60, max_minutes=0.0)

    config.policy.update(folder="runs/tiny_eapo_policy/policy", compute_dtype="float32")
    with config.unlocked():
        config.reward_model = extra_model()
    config.reward_model.folder = "runs/tiny_eapo_reward/policy"
    config.reward_model.update(compute_dtype="float32", remat="none")
    config.reward_model.optimizer.learning_rate = 1e-4

    config.data.update(source="", tasks=("general_qa",), task_weights=(1.0,))
    config.data.questions = "runs/evidence_rows/train.jsonl"
    config.data.validation = "runs/evidence_rows/held_out.jsonl"

    config.algorithm = default_config("eapo").algorithm
    config.algorithm.update(prompts="compact", questions=24, refresh_every=10)
    # The reward model's warm start has at most 4 sets of evidence to compare (the paper: 6).
    config.algorithm.group_size = 4

    config.sampler.update(temperature=1.0, top_p=1.0, max_tokens=96)
    config.sampler.update(samples_per_prompt_batch=4, slots=96)
    config.optimizer.learning_rate = 3e-4
    # As in configs/eapo.py: Eq. 1, and the second of the two mini-batches is off-policy.
    config.loss.update(ratio="sequence", aggregation="sequence_mean", dual_clip=0.0)
    config.loss.update(old_logprobs="recompute", clip_high=0.28)
    config.packing.update(buckets=((416, 352),), token_budget=4992)
    return config
