"""Tests of an episode's record: prompt without documents, advantages, and use in training."""

from __future__ import annotations

import collections
import dataclasses
import json

import pytest

from tests.algorithms.scripted import (
    CHOICE,
    MATH,
    QA,
    Rollout,
    Row,
    Script,
    read,
    roll_out,
    to_records,
)

EVERYTHING = {"verifier__share": 9.0, "questioner__negatives": 9}


@pytest.mark.parametrize("step", [1, 2])
def test_record_prompt_has_placeholders_for_documents(step):
    rollout = Rollout()
    episodes = rollout.episodes
    if step == 2:  # the memory holds questions
        episodes = roll_out(rollout.algorithm, rollout.ask, 2)
    episode_records = to_records(rollout.algorithm, episodes, step)
    for episode, record in zip(episodes, episode_records, strict=True):
        documents = episode.cluster.documents
        filled = record["prompt"]
        for i, document in enumerate(documents):
            filled = filled.replace(f"{{documents[{i}]}}", document)
        assert filled == episode.questioner_prompt != record["prompt"]
        assert not any(document in record["prompt"] for document in documents)
    assert any(episode.history for episode in episodes) == (step == 2)


@pytest.mark.parametrize(
    "options",
    [
        EVERYTHING,
        EVERYTHING | {"questions": 4, "verifier__share": 0.5},
        {"questions": 4, "keep_surplus": True},
        {"questioner__train": False, "verifier__train": False},
    ],
)
def test_record_marks_exactly_the_trained_rows_as_used(options):
    rollout = Rollout(**options)
    used = collections.defaultdict(list)
    for record in rollout.records():
        advantages, use = record["advantages"], record["used"]
        for role, texts in (("questioner", [record["proposal"]]), ("responder", record["answers"])):
            assert (use[role] == "used") == (role in advantages)
            if role in advantages:
                used[role].append((tuple(texts), advantages[role]))
        for i, (why, row_advantages) in enumerate(
            zip(use["verifier"], advantages["verifier"], strict=True)
        ):
            assert (why == "used") == bool(row_advantages)
            if row_advantages:
                verdicts = ["[[YES]]" if vote else "[[NO]]" for vote in record["votes"][i]]
                used["verifier"].append((tuple(verdicts), row_advantages))
        assert json.loads(json.dumps(record)) == record
    for role, groups in rollout.groups.items():
        trained_rows = [read(group)[1:] for group in groups]
        used_rows = [
            (texts, tuple(round(a, 4) for a in row_advantages))
            for texts, row_advantages in used[role]
        ]
        assert sorted(used_rows) == sorted(trained_rows), role
    assert used["responder"]


def test_record_gives_the_reason_for_unused_rows():
    rollout = Rollout(questions=4, questioner__negatives=0, verifier__share=0.5)
    episode_records = rollout.records()
    why = {int(record["cluster"].removeprefix("d")): record["used"] for record in episode_records}
    assert [why[n]["responder"] for n in (0, 1, 2, 12)] == ["used"] * 4
    assert {why[n]["responder"] for n in (13, 14, 16, 17)} == {"surplus"}
    assert {why[n]["responder"] for n in (10, 11, 15)} == {"equal_rewards"}
    assert [why[n]["responder"] for n in (3, 4, 5, 8)] == [
        "bad_format", "bad_format", "declined", "ungrounded"
    ]  # fmt: skip
    assert {why[n]["questioner"] for n in (0, 1, 2, 12)} == {"used"}
    assert {why[n]["questioner"] for n in (13, 14, 16, 17)} == {"surplus"}
    assert {why[n]["questioner"] for n in (3, 8, 10, 11)} == {"not_sampled"}
    assert {why[n]["questioner"] for n in (5, 6)} == {"no_reward"}
    verdicts = collections.Counter(use for n in why for use in why[n]["verifier"])
    assert verdicts["used"] == 2 and verdicts["not_sampled"] == 8
    predictions = [prediction for record in episode_records for prediction in record["predictions"]]
    assert verdicts["not_judged"] == predictions.count(None) > 0
    assert verdicts["nothing_to_learn"] == len(predictions) - 10 - predictions.count(None)


def test_record_marks_frozen_roles_as_not_trained():
    for record in Rollout(questioner__train=False, verifier__train=False).records():
        assert record["used"]["questioner"] == "not_trained"
        assert set(record["used"]["verifier"]) <= {"not_trained", "not_judged"}


def test_episode_with_overlong_prompt_has_no_proposal():
    rows = [Row(QA, "ok", 0, 2, 1, 4), Row(MATH, "ok", 0, 2, 1, 4), Row(CHOICE, "ok", 0, 2, 1, 4)]
    rollout = Rollout(rows, script=Script(rows))
    first, *later_episodes = rollout.episodes
    first = dataclasses.replace(first, proposal=None, status="overlong", response=None)
    use = to_records(rollout.algorithm, [first, *later_episodes])[0]["used"]
    assert use["questioner"] == "no_proposal" and use["responder"] == "overlong"


def test_building_groups_does_not_change_episodes():
    rollout = Rollout(**EVERYTHING)
    first = rollout.records()
    assert to_records(rollout.algorithm, rollout.episodes) == first
    rollout.algorithm.config = dataclasses.replace(
        rollout.algorithm.config,
        questions=1,
        verifier=dataclasses.replace(rollout.algorithm.config.verifier, share=0.0),
    )
    rebuilt_records = to_records(rollout.algorithm, rollout.episodes)
    assert rollout.records() == first
    with pytest.raises(dataclasses.FrozenInstanceError):
        rollout.episodes[0].status = "accepted"  # type: ignore[misc]
    assert [r["used"]["responder"] for r in rebuilt_records].count("used") == 1
    assert all("used" not in r["used"]["verifier"] for r in rebuilt_records)
