"""Tests of a step with several updates: equality to manual updates, resume, invalid configs."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

from spell_jax.config import read
from spell_jax.learner import packing, statistics
from spell_jax.learner.learner import Update
from spell_jax.learner.non_finite import NonFinite
from spell_jax.learner.packing import TrainGroup
from spell_jax.runtime.files.checkpoint import Checkpoints
from spell_jax.trainer import loop
from spell_jax.trainer import state as runs
from spell_jax.trainer.build import make_run
from spell_jax.trainer.rollouts import Rollout, SharedRollouts
from spell_jax.trainer.step_update import StepUpdate
from tests import noise, tiny

CORRECTIONS = {
    "recompute": {"old_logprobs": "recompute"},
    "rollout": {"old_logprobs": "rollout"},
    "tis": {"tis_cap": 2.0},
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


@pytest.fixture(autouse=True, scope="module")
def _small_and_quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        noise.use_one_device(monkeypatch)
        noise.give_meaning(monkeypatch)
        noise.skip_plots(monkeypatch)
        noise.share_programs(monkeypatch)
        yield


def make_config(policy: pathlib.Path, correction: str, **overrides) -> Any:
    fields = {
        "minibatches": 2,
        **{f"loss.{k}": v for k, v in CORRECTIONS[correction].items()},
        "validate_every": 0,
    }
    return noise.small_config(policy, **(fields | overrides))


def lines_of(workdir: epath.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def rollout(policy) -> Rollout:
    """Take one step's rollout, which does not depend on the number of the step's updates."""
    run = make_run(make_config(policy, "rollout"))
    rollout = SharedRollouts(run, lambda: False).take(runs.first_states(run), 1)
    assert rollout and len(rollout.groups) > 2
    return rollout


@pytest.mark.slow
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_minibatches_equal_manual_updates(policy, rollout, tmp_path, correction):
    run = make_run(make_config(policy, correction))
    states = runs.first_states(run)
    first_params = runs.copy(states.params("policy"))
    states, numbers = StepUpdate(run, states, rollout.groups).finish(epath.Path(tmp_path), 1)
    assert list(numbers) == ["policy"] and len(numbers["policy"]) == 2
    assert int(states.trained["policy"].step) == 2

    learner, groups = run.learner, rollout.groups
    state, difference = learner.fns.init(first_params), {}
    if correction == "recompute":
        groups = learner.recompute(state, groups)
        difference = statistics.sampler_difference(rollout.groups, groups)
    update_numbers = []
    for part in packing.in_parts(groups, 2):
        state, (one_step,) = Update(learner, state, [part], None, {}).finish()
        update_numbers.append(one_step)
    update_numbers[0] |= difference
    jax.tree.map(np.testing.assert_array_equal, states.params("policy"), state.params)
    assert numbers["policy"] == update_numbers
    # Samples from before the first update are off-policy in the second.
    assert update_numbers[1]["approx_kl"] != 0 or correction == "tis"
    if correction == "recompute":
        assert abs(update_numbers[0]["approx_kl"]) < 1e-6


BROKEN = [7]


class Recorded:
    """A learner that records the states of its updates; a state is a number."""

    def __init__(self):
        self.started: list[tuple[int, list[list[int]], Any, int]] = []

    def start(
        self, state: int, groups: list[TrainGroup], reference: Any = None, minibatches: int = 1
    ) -> Any:
        prompts = [list(group.prompt) for group in groups]
        self.started.append((state, prompts, reference, minibatches))
        return self

    def finish(self) -> tuple[int, list[dict[str, float]]]:
        state, prompts, _, minibatches = self.started[-1]
        if BROKEN in prompts:
            raise NonFinite(1, [(make_group(7, "other"), [1.0])], [], alone=True)
        return state + minibatches, [{"groups": len(prompts)}]


def learn(groups: list[TrainGroup], workdir: epath.Path) -> Any:
    """Update two models in two mini-batches; return (learners, states, numbers) of the step."""
    trained_models = {
        name: SimpleNamespace(
            learner=Recorded(),
            tokenizer=SimpleNamespace(decode=lambda ids, name=name: f"{name} {ids}"),
        )
        for name in ("policy", "other")
    }
    other_config = SimpleNamespace(epochs=2, groups_per_update=2)
    config = SimpleNamespace(seed=0, minibatches=2, models={"other": other_config})
    run: Any = SimpleNamespace(
        trained=trained_models, config=config, learner=trained_models["policy"].learner
    )
    trained: Any = {"policy": 0, "other": 10}
    frozen: Any = {"reference": "frozen"}
    first_states = runs.States(trained, frozen)
    states, numbers = StepUpdate(run, first_states, groups).finish(workdir, 1)
    with pytest.raises(RuntimeError, match="an update has donated these states"):
        first_states.params("other")
    learners = {name: model.learner for name, model in trained_models.items()}
    return learners, states.tree(), numbers


def make_group(prompt: int, model: str) -> TrainGroup:
    return tiny.group([prompt], [[5]], [1.0], logprobs=[np.full(1, -1.0)], model=model)


def test_each_model_is_trained_on_its_own_groups(tmp_path) -> None:
    """The policy has mini-batches and a KL reference; the other model has two epochs."""
    groups = [
        make_group(1, "policy"),
        make_group(3, "policy"),
        *(make_group(n, "other") for n in (2, 4, 6)),
    ]
    learners, states, numbers = learn(groups, epath.Path(tmp_path))
    assert learners["policy"].started == [(0, [[1], [3]], "frozen", 2)]
    first, second = learners["other"].started
    assert first[:1] + first[2:] == (10, None, 2) and second[:1] + second[2:] == (12, None, 2)
    assert sorted(first[1]) == sorted(second[1]) == [[2], [4], [6]]
    assert first[1] != second[1]
    assert states == {"policy": 2, "other": 14, "reference": "frozen"}
    assert numbers == {"policy": [{"groups": 2}], "other": [{"groups": 3}, {"groups": 3}]}


def test_group_of_a_model_that_is_not_trained_is_refused(tmp_path) -> None:
    message = r"^group\.model = 'othr': must be one of \['policy', 'other'\]$"
    with pytest.raises(ValueError, match=message):
        learn([make_group(1, "policy"), make_group(2, "othr")], epath.Path(tmp_path))


def test_only_the_policy_is_updated_without_groups(tmp_path) -> None:
    learners, states, numbers = learn([], epath.Path(tmp_path))
    assert learners["policy"].started == [(0, [], "frozen", 2)] and not learners["other"].started
    assert numbers == {"policy": [{"groups": 0}]} and states["other"] == 10


def test_non_finite_rows_are_decoded_by_their_models_tokenizer(tmp_path) -> None:
    with pytest.raises(NonFinite):
        learn([make_group(1, "policy"), make_group(7, "other")], epath.Path(tmp_path))
    (line,) = (tmp_path / "non_finite" / "1.jsonl").read_text().splitlines()
    assert json.loads(line)["prompt"] == "other [7]"


@pytest.mark.slow
def test_run_with_minibatches_resumes_bit_identically(policy, tmp_path):
    """With buckets and a dtype that the run chooses itself."""
    config = make_config(policy, "recompute")
    config = noise.with_fields(config, {"packing.buckets": "auto", "policy.compute_dtype": "auto"})
    uninterrupted_run = loop.train(config, epath.Path(tmp_path / "whole"))
    halved = noise.end_earlier(uninterrupted_run, epath.Path(tmp_path / "halved"), 2)
    loop.train(config, halved)
    assert [*map(noise.steady, lines_of(uninterrupted_run))] == [
        *map(noise.steady, lines_of(halved))
    ]
    states = []
    for workdir in (uninterrupted_run, halved):
        with Checkpoints(workdir) as checkpoints:
            states.append(runs.restore_or_init(make_run(config), checkpoints)[0].trained["policy"])
    taught = sum(line["train/empty_update"] == 0 for line in lines_of(uninterrupted_run))
    assert taught and int(states[0].step) == 2 * taught
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"minibatches": 0}, r"minibatches = 0: must be at least 1"),
        (
            {"loss.old_logprobs": "on_policy"},
            r'loss\.old_logprobs = "on_policy": must be "recompute"',
        ),
        ({"staleness": 1}, r"staleness = 1: must be 0 for minibatches = 2 without"),
    ],
)
def test_invalid_minibatch_settings_are_rejected(policy, overrides, message):
    with pytest.raises(ValueError, match=message):
        read(make_config(policy, "rollout", **overrides))
