"""Tests of loss.routing from the config to the update: the rollout records experts for it."""

from __future__ import annotations

import pytest
from etils import epath

from spell_jax.trainer import state
from spell_jax.trainer.build import make_run
from spell_jax.trainer.rollouts import SharedRollouts
from spell_jax.trainer.step_update import StepUpdate
from tests import noise


@pytest.mark.slow
def test_update_uses_the_experts_of_the_rollout(tmp_path, monkeypatch) -> None:
    noise.use_one_device(monkeypatch)
    noise.give_meaning(monkeypatch)
    parts = {"qkv_bias": False, "qk_norm": True, "experts": 4, "experts_per_token": 2}
    policy = noise.save_policy(tmp_path / "policy", **parts)
    run = make_run(noise.small_config(policy, **{"loss.routing": "sampled"}))
    states = state.first_states(run)
    rollout = SharedRollouts(run, lambda: False).take(states, 1)
    assert rollout
    assert {group.name for group in rollout.groups} > {"responder"}
    for group in rollout.groups:
        for sample in group.samples:
            assert sample.prompt_experts is not None
            assert sample.prompt_experts.shape == (len(group.prompt), 1, 2)
    _, numbers = StepUpdate(run, states, rollout.groups).finish(epath.Path(tmp_path), 1)
    (line,) = numbers["policy"]
    assert line["router_difference"] == 0.0 and line["sampler_difference"] < 1e-4
