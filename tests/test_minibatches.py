"""A step that is learned from in several updates: as by hand, resumed, and what does not go."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

from spell_jax import catalogue, train
from spell_jax import run as runs
from spell_jax.learner import packing
from spell_jax.runtime.checkpoint import Checkpoints
from tests import noise

BEHAVIOURS = ("recomputed", "sampler", "truncated")


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


def make_config(policy: pathlib.Path, behaviour: str, **overrides) -> Any:
    fields = {"minibatches": 2, "loss.behaviour": behaviour, "validate_every": 0}
    return noise.small_config(policy, **(fields | overrides))


def lines_of(workdir: epath.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def played(policy) -> train.Played:
    """A step: how it is learned from is no matter."""
    run = runs.make_run(make_config(policy, "sampler"))
    played = train.play(run, runs.first_models(run), 1)
    assert played and len(played.rows) > 2
    return played


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_a_step_in_parts_is_as_by_hand(policy, played, tmp_path, behaviour):
    run = runs.make_run(make_config(policy, behaviour))
    models = runs.first_models(run)
    begun = runs.copy(models["policy"].params)
    numbers = runs.StepUpdate(run, models, played.rows).finish(epath.Path(tmp_path), 1)
    assert list(numbers) == ["policy"] and len(numbers["policy"]) == 2
    assert int(models["policy"].step) == 2

    learner, rows = run.learner, played.rows
    state = learner.start(begun)
    if behaviour == "recomputed":
        rows = learner.recompute(state, rows)
    by_hand = []
    for part in packing.in_parts(rows, 2):
        state, found = learner.update(state, part)
        by_hand.append(found)
    jax.tree.map(np.testing.assert_array_equal, models["policy"].params, state.params)
    assert numbers["policy"] == by_hand
    # What was drawn before the first update is no longer on-policy in the second.
    assert by_hand[1]["approx_kl"] != 0 or behaviour == "truncated"
    if behaviour == "recomputed":
        assert abs(by_hand[0]["approx_kl"]) < 1e-6


def test_a_run_in_parts_is_resumed_to_the_bit(policy, tmp_path):
    config = make_config(policy, "recomputed")
    whole = train.train(config, epath.Path(tmp_path / "whole"))
    halved = noise.end_earlier(whole, epath.Path(tmp_path / "halved"), 2)
    train.train(config, halved)
    assert [*map(noise.steady, lines_of(whole))] == [*map(noise.steady, lines_of(halved))]
    states = []
    for workdir in (whole, halved):
        with Checkpoints(workdir) as checkpoints:
            states.append(runs.begin(runs.make_run(config), checkpoints)[0]["policy"])
    taught = sum(line["train/empty_update"] == 0 for line in lines_of(whole))
    assert taught and int(states[0].step) == 2 * taught
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"minibatches": 0}, r"minibatches = 0: must be at least 1"),
        ({"loss.behaviour": "current"}, r'loss\.behaviour = "current": must be "recomputed"'),
        ({"staleness": 1}, r"staleness = 1: must be 0 for minibatches = 2"),
    ],
)
def test_what_does_not_go_is_said(policy, overrides, message):
    with pytest.raises(ValueError, match=message):
        catalogue.check(make_config(policy, "sampler", **overrides))
