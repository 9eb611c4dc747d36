"""Tests of a step with several updates: against updates by hand, resumed, and refused configs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

from spell_jax import config as configs
from spell_jax.learner import packing
from spell_jax.learner.loss import LossConfig
from spell_jax.learner.non_finite import NonFinite
from spell_jax.learner.packing import TrainGroup
from spell_jax.runtime.checkpoint import Checkpoints
from spell_jax.trainer import loop
from spell_jax.trainer import state as runs
from spell_jax.trainer.build import make_run
from spell_jax.trainer.rollouts import Rollout, Rollouts
from spell_jax.trainer.step_update import StepUpdate
from tests import noise

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
        noise.draw_nothing(monkeypatch)
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
def played(policy) -> Rollout:
    """Rollouts of a step do not depend on the number of its updates."""
    run = make_run(make_config(policy, "rollout"))
    played = Rollouts(run, runs.first_models(run), lambda: False).take(1)
    assert played and len(played.groups) > 2
    return played


@pytest.mark.slow
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_step_in_parts_is_as_by_hand(policy, played, tmp_path, correction):
    run = make_run(make_config(policy, correction))
    models = runs.first_models(run)
    begun = runs.copy(models["policy"].params)
    numbers = StepUpdate(run, models, played.groups).finish(epath.Path(tmp_path), 1)
    assert list(numbers) == ["policy"] and len(numbers["policy"]) == 2
    assert int(models["policy"].step) == 2

    learner, rows = run.learner, played.groups
    state = learner.fns.init(begun)
    if correction == "recompute":
        rows = learner.recompute(state, rows)
    by_hand = []
    for part in packing.in_parts(rows, 2):
        state, found = learner.update(state, part)
        by_hand.append(found)
    jax.tree.map(np.testing.assert_array_equal, models["policy"].params, state.params)
    assert numbers["policy"] == by_hand
    # Samples of before the first update are off-policy in the second.
    assert by_hand[1]["approx_kl"] != 0 or correction == "tis"
    if correction == "recompute":
        assert abs(by_hand[0]["approx_kl"]) < 1e-6


NOWHERE, BROKEN = epath.Path("unused"), [7]


class Recorded:
    """A learner that records the states of its updates; a state is a number."""

    def __init__(self, correction: str):
        self.loss = LossConfig(**CORRECTIONS[correction])
        self.begun: list[tuple[int, list[list[int]], Any]] = []
        self.gone_on = 0

    def recompute(self, state: int, groups: list[TrainGroup]) -> list[TrainGroup]:
        return [dataclasses.replace(g, old_logprobs=[np.full(1, -2.0)]) for g in groups]

    def start(self, state: int, groups: list[TrainGroup], reference: Any = None) -> Any:
        self.begun.append((state, [list(group.prompt) for group in groups], reference))
        return self

    def advance(self) -> None:
        self.gone_on += 1

    def finish(self) -> tuple[int, dict[str, float]]:
        state, groups, _ = self.begun[-1]
        if groups == [BROKEN]:
            raise NonFinite(1, [one(7, "other")], [], alone=True)
        return state + 1, {"groups": len(groups)}


def learn(
    rows: list[TrainGroup], correction: str = "recompute", workdir: epath.Path = NOWHERE
) -> Any:
    """(Learners, models, the update, its metrics) of a step in two parts with two models."""
    own = {
        name: SimpleNamespace(
            learner=Recorded(correction),
            tokenizer=SimpleNamespace(decode=lambda ids, name=name: f"{name} {ids}"),
        )
        for name in ("policy", "other")
    }
    config = SimpleNamespace(minibatches=2)
    run: Any = SimpleNamespace(
        own=own, trained=own, config=config, learner=own["policy"].learner, algorithm=None
    )
    models = {"policy": 0, "other": 10, "reference": "frozen"}
    step = StepUpdate(run, models, rows)
    step.advance()
    numbers = step.finish(workdir, 1)
    step.advance()
    return {name: model.learner for name, model in own.items()}, models, step, numbers


def one(prompt: int, model: str) -> TrainGroup:
    return TrainGroup([prompt], [[5]], [1.0], old_logprobs=[np.full(1, -1.0)], model=model)


def test_each_model_learns_its_own_rows() -> None:
    """The policy in parts and with a reference, another model at once and without."""
    rows = [one(1, "policy"), one(2, "other"), one(3, "policy"), one(4, "other"), one(5, "policy")]
    learners, models, step, numbers = learn(rows)
    assert learners["policy"].begun == [(0, [[1], [5]], "frozen"), (1, [[3]], "frozen")]
    assert learners["other"].begun == [(10, [[2], [4]], None)]
    assert models == {"policy": 2, "other": 11, "reference": "frozen"}
    assert numbers == {"policy": [{"groups": 2}, {"groups": 1}], "other": [{"groups": 2}]}
    assert learners["policy"].gone_on == 1, "of the first part, while it is the newest"
    difference, weight = step.rollout_difference["sampler_difference"]
    assert difference / weight == pytest.approx(1.0)
    assert not learn(rows, "rollout")[2].rollout_difference


def test_without_rows_the_policys_update_is_empty() -> None:
    learners, models, _, numbers = learn([])
    assert learners["policy"].begun == [(0, [], "frozen")] and not learners["other"].begun
    assert numbers == {"policy": [{"groups": 0}]} and models["other"] == 10


def test_rows_that_go_wrong_are_told_in_their_models_words(tmp_path) -> None:
    with pytest.raises(NonFinite):
        learn([one(1, "policy"), one(7, "other")], workdir=epath.Path(tmp_path))
    (line,) = (tmp_path / "non_finite" / "1.jsonl").read_text().splitlines()
    assert json.loads(line)["prompt"] == "other [7]"


def test_a_run_in_parts_is_resumed_to_the_bit(policy, tmp_path):
    config = make_config(policy, "recompute")
    whole = loop.train(config, epath.Path(tmp_path / "whole"))
    halved = noise.end_earlier(whole, epath.Path(tmp_path / "halved"), 2)
    loop.train(config, halved)
    assert [*map(noise.steady, lines_of(whole))] == [*map(noise.steady, lines_of(halved))]
    states = []
    for workdir in (whole, halved):
        with Checkpoints(workdir) as checkpoints:
            states.append(runs.restore_or_init(make_run(config), checkpoints)[0]["policy"])
    taught = sum(line["train/empty_update"] == 0 for line in lines_of(whole))
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
        ({"staleness": 1}, r"staleness = 1: must be 0 for minibatches = 2"),
    ],
)
def test_what_does_not_go_is_said(policy, overrides, message):
    with pytest.raises(ValueError, match=message):
        configs.read(make_config(policy, "rollout", **overrides))
