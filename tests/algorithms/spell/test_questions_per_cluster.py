"""Tests of several questions about one cluster, sampled from one questioner prompt."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest

from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.learner.advantages import questioner_advantages
from spell_jax.selfplay import selection
from tests.algorithms.scripted import QA, Rollout, Row, Script, make_config, read

ROWS = (
    Row(QA, "ok", 0, 2, 1, 4),  # 3/4
    Row(QA, "ok", 0, 1, 1, 0),  # 1/4
    Row(QA, "ok", 0, 2, 0, 0),  # 1/2
    Row(QA, "bad_json", 0, 0, 0, 0),
)


class Variants(Script):
    """A questioner that asks another question about a cluster each time."""

    def __init__(self, rows):
        super().__init__(rows)
        self._asked = defaultdict(itertools.count)

    def proposal(self, at: int) -> str:
        return super().proposal(at).replace("?", f" {next(self._asked[at])}?")


def make_rollout(script: Script | None = None, **options) -> Rollout:
    options = {"questioner__questions_per_cluster": 2, "generation_batch": 8} | options
    return Rollout(ROWS, script=script or Variants(ROWS), **options)


def test_questions_of_a_cluster_are_sampled_from_one_prompt():
    rollout = make_rollout()
    assert [e.cluster.id for e in rollout.episodes] == [f"d{i // 2}" for i in range(8)]
    for first, second in zip(rollout.episodes[::2], rollout.episodes[1::2], strict=True):
        assert first.questioner_prompt == second.questioner_prompt and first.shown == second.shown
        assert first.question != second.question or first.status == "bad_format"
    assert sum(e.response is not None for e in rollout.episodes) == 6
    assert [e.status for e in rollout.episodes[6:]] == ["bad_format"] * 2


def test_repeated_question_of_a_cluster_is_dropped_and_counted():
    rollout = make_rollout(Script(ROWS))
    assert [e.status for e in rollout.episodes] == ["accepted", "duplicate"] * 3 + [
        "bad_format"
    ] * 2
    duplicate_episodes = [e for e in rollout.episodes if e.status == "duplicate"]
    assert all(e.response is None and e.reward is None for e in duplicate_episodes)
    assert rollout.algorithm.metrics(rollout.episodes).means()["duplicate"] == 3 / 8
    responder_calls = [
        call for call in rollout.ask.calls if call.role == "responder" and call.group > 1
    ]
    assert sum(len(call.prompts) for call in responder_calls) == 3
    used = [record["used"]["questioner"] for record in rollout.records()]
    assert used[1] == "no_reward"


def test_question_of_another_cluster_is_no_duplicate():
    questions = [
        ("a", "Who sails to Oslo?"),
        ("b", "Who sails to Oslo?"),
        ("a", "who sails, to oslo"),
    ]
    assert selection.duplicates(questions) == [2]
    question = "In which year did the ship Aurora sail from Bergen to the old port of Oslo"
    assert selection.duplicates([("a", question), ("a", f"{question} then")]) == [1]
    assert selection.duplicates([("a", "sum of 1 and 2"), ("a", "sum of 1 and 3")]) == []
    assert selection.duplicates([("a", "?"), ("a", "!"), ("a", "?")]) == [2]


@pytest.mark.parametrize("kind", ["batch", "cluster", "batch+cluster"])
def test_questioner_is_normalized_over_batch_and_cluster(kind):
    rollout = make_rollout(questioner__normalization=kind)
    groups = rollout.groups["questioner"]
    advantages = [advantage for group in groups for advantage in read(group)[2]]
    rows = [e for e in rollout.episodes if e.mixed] + [
        e for e in rollout.episodes if e.reward == -1
    ]
    values = [e.reward or 0.0 for e in rows]
    by_batch = questioner_advantages(values)
    by_cluster = questioner_advantages(values, [e.cluster.id for e in rows])
    expected_advantages = {
        "batch": by_batch,
        "cluster": by_cluster,
        "batch+cluster": (by_batch + by_cluster) / 2,
    }[kind]
    assert len(advantages) == 8
    np.testing.assert_allclose(sorted(advantages), sorted(expected_advantages.tolist()), atol=1e-4)


def test_batch_must_be_a_multiple_of_the_questions_of_a_cluster():
    message = r"algorithm.generation_batch = 6: must be a multiple of .*questions_per_cluster = 4"
    with pytest.raises(ValueError, match=message):
        make_config(SpellConfig, generation_batch=6, questioner__questions_per_cluster=4)
