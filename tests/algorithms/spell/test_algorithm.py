"""Tests of one SPELL step with scripted models: every switch, rewards, training rows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.data.clusters import TASKS
from tests.algorithms.scripted import (
    CHOICE,
    MATH,
    PROMPTS,
    QA,
    Rollout,
    Row,
    Script,
    by_role,
    make_config,
    number,
    read,
    to_groups,
)

ANSWERED = {"calls", "status", "rule", "votes", "scores", "rewards", "memory"}
REWARDED = {"scores", "rewards", "memory"}
UPDATE = {"responder", "questioner", "verifier"}
# Switch -> the results that it changes; all others must stay the same.
SWITCHES = {
    "memory": ({"questioner__memory": 0}, {"memory"}),
    "memory of solved questions": ({"questioner__memory_solved": True}, {"memory"}),
    "documents": ({"questioner__documents": (1,)}, {"shown", "memory", "questioner"}),
    "unread documents": (
        {"questioner__documents": (3,), "questioner__unread_documents": 0},
        {"shown", "memory", "questioner"},
    ),
    "frozen questioner": ({"questioner__train": False}, {"questioner"}),
    "no format penalty": ({"questioner__format_penalty": False}, {"rewards", "questioner"}),
    "decline penalty": ({"questioner__decline_penalty": True}, {"rewards", "questioner"}),
    "no grounding filter": ({"questioner__grounding_samples": 0}, ANSWERED | UPDATE),
    "two samples to filter": ({"questioner__grounding_samples": 2}, {"calls"}),
    "long answers": (
        {"questioner__max_answer_tokens": 50},
        {"calls", "status", "reference", "rule", "votes", "scores", "rewards", "questioner"},
    ),
    "azr": ({"questioner__mapping": "azr"}, {"rewards", "questioner"}),
    "r_zero": ({"questioner__mapping": "r_zero"}, {"rewards", "questioner"}),
    "sigma": ({"questioner__sigma": 0.5 / 2}, {"rewards", "questioner"}),
    "mu": ({"questioner__mu": 0.4}, {"rewards", "questioner"}),
    "fewer negatives": ({"questioner__negatives": 0.5}, {"questioner"}),
    "no negatives": ({"questioner__negatives": 0}, {"questioner"}),
    "normalized per task": ({"questioner__normalization": "task"}, {"questioner"}),
    "frozen verifier": ({"verifier__train": False}, {"verifier"}),
    "verifier share": ({"verifier__share": 0.5}, {"verifier"}),
    "no consistency gate": ({"verifier__consistency_gate": False}, {"verifier"}),
    "balance": ({"verifier__balance": True}, {"verifier"}),
    "no verifier": ({"responder__reward": "rule"}, {"calls", "votes"} | REWARDED | UPDATE),
    "random": ({"responder__reward": "random"}, {"calls", "votes"} | REWARDED | UPDATE),
    "verifier alone": ({"responder__reward": "verifier"}, REWARDED | {"responder", "questioner"}),
    "mean": ({"responder__reward": "mean"}, REWARDED | {"responder", "questioner"}),
    "min": ({"responder__reward": "min"}, REWARDED | {"responder", "questioner"}),
    "fewer questions": ({"questions": 4}, UPDATE),
    "no deviation": ({"divide_by_deviation": False}, {"responder", "verifier"}),
    "surplus": ({"questions": 4, "keep_surplus": True}, UPDATE),
    "G": ({"group_size": 3}, {"calls", "rule", "votes"} | REWARDED | UPDATE),
    "single verdict": (
        {"verifier__group_size": 1},
        {"calls", "votes"} | REWARDED | UPDATE,
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switch_changes_only_the_expected_results(name):
    options, expected = SWITCHES[name]
    plain, switched_facts = Rollout().facts(), Rollout(**options).facts()
    assert {fact for fact in plain if plain[fact] != switched_facts[fact]} == expected


# ------------------------------------------------------------------------------ Rewards and rows


def gaussian(mean: float, mu: float = 0.5, sigma: float = 0.5 / 3) -> float:
    return math.exp(-((mean - mu) ** 2) / (2 * sigma**2))


def test_rewards_of_each_question_outcome():
    rollout = Rollout()
    assert rollout.of(0).scores == (1, 1, 1, 0)
    assert rollout.of(0).reward == pytest.approx(gaussian(3 / 4))
    assert rollout.of(16).reward == pytest.approx(1.0)  # half solved
    assert rollout.of(10).reward == 0.0 and rollout.of(11).reward == 0.0  # all and none
    assert rollout.of(3).reward == -1.0 and rollout.of(4).reward == -1.0
    assert rollout.of(8).reward == -0.5 and rollout.of(9).reward == -0.5
    for at in (5, 6, 7):  # a zero, a long answer, an unfinished thought: no reward
        assert (rollout.of(at).status, rollout.of(at).reward) == ("declined", None)
        assert Rollout(questioner__decline_penalty=True).of(at).reward == -1.0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"questioner__mapping": "azr"}, 1 - 3 / 4),
        ({"questioner__mapping": "r_zero"}, 1 - 2 * (3 / 4 - 1 / 2)),
        ({"questioner__sigma": 0.5 / 2}, gaussian(3 / 4, sigma=0.5 / 2)),
        ({"questioner__mu": 0.75}, 1.0),
    ],
)
def test_questioner_reward_of_each_mapping(options, expected):
    assert Rollout(**options).of(0).reward == pytest.approx(expected)


# Row 14: two right answers that the verifier rejects, one wrong answer that it rejects, none. Row
# 16: two paraphrases that only the verifier accepts. Row 2: malformed verdicts on right answers.
@pytest.mark.parametrize(
    ("how", "of_14", "of_16"),
    [
        ("max", [1, 1, 0, 0], [1, 1, 0, 0]),
        ("rule", [1, 1, 0, 0], [0, 0, 0, 0]),
        ("verifier", [0, 0, 0, 0], [1, 1, 0, 0]),
        ("mean", [0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]),
        ("min", [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_rule_and_verifier_majority_combine_as_configured(how, of_14, of_16):
    rollout = Rollout(responder__reward=how)
    assert rollout.of(14).scores == tuple(of_14)
    assert rollout.of(16).scores == tuple(of_16)
    assert rollout.of(2).scores == (1, 1, 1, 0)  # an ignored verifier leaves the rule's reward


def test_random_rewards_are_fair_coin_flips():
    rollout = Rollout(responder__reward="random", group_size=64)
    scores = np.concatenate([e.scores for e in rollout.episodes if e.scores])
    assert set(scores) == {0.0, 1.0}
    assert abs(scores.mean() - 0.5) < 4 * 0.5 / math.sqrt(len(scores))


def test_responder_rows_are_the_first_mixed_questions():
    rollout = Rollout()
    mixed = [e for e in rollout.episodes if e.mixed]
    assert [number(e) for e in mixed] == [0, 1, 2, 12, 13, 14, 16, 17]
    for episode, group in zip(mixed, rollout.groups["responder"], strict=False):
        prompt, answers, advantages = read(group)
        assert prompt == PROMPTS.responder(
            episode.task, episode.cluster.documents, episode.question
        )
        assert answers == tuple(episode.response.texts)
        scores = np.array(episode.scores)  # Eq. 8
        expected_advantages = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
        assert advantages == pytest.approx(expected_advantages, abs=1e-4)
    assert len(rollout.groups["responder"]) == 6
    assert len(Rollout(keep_surplus=True).groups["responder"]) == 8
    assert [read(g) for g in Rollout(questions=4).groups["responder"]] == [
        read(g) for g in rollout.groups["responder"][:4]
    ]


def test_advantages_without_deviation_are_centered_rewards():
    """Advantages of Dr. GRPO, for responder and verifier."""
    rollout = Rollout(divide_by_deviation=False)
    mixed = [e for e in rollout.episodes if e.mixed]
    for episode, group in zip(mixed, rollout.groups["responder"], strict=False):
        expected_advantages = np.array(episode.scores) - np.mean(episode.scores)
        assert read(group)[2] == pytest.approx(expected_advantages, abs=1e-4)
    rows = verifier_verdicts(rollout)
    assert rows
    for _, answers, advantages in rows:
        yes = np.array([a == "[[YES]]" for a in answers])
        right = yes == (yes.sum() > 2)
        assert advantages == pytest.approx(right - right.mean(), abs=1e-4)


@pytest.mark.parametrize("rows", ["batch", "task"])
def test_questioner_advantages_are_normalized_over_batch_or_task(rows):
    rollout = Rollout(questioner__normalization=rows)
    written = {e.proposal.texts[0]: e for e in rollout.episodes}
    read_rows = [read(group) for group in rollout.groups["questioner"]]
    row_episodes = [written[answers[0]] for _, answers, _ in read_rows]
    assert [number(e) for e in row_episodes[:6]] == [0, 1, 2, 12, 13, 14]  # the kept questions
    bad = row_episodes[6:]
    assert len(bad) == len({number(e) for e in bad}) == 6  # an equal number of bad ones
    assert all(e.reward is not None and e.reward <= 0 and not e.mixed for e in bad)
    for tasks in [TASKS] if rows == "batch" else [[task] for task in TASKS]:  # Eq. 9
        rewards = np.array([e.reward for e in row_episodes if e.task in tasks])
        expected_advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        advantages = [
            row[2][0] for row, e in zip(read_rows, row_episodes, strict=True) if e.task in tasks
        ]
        assert advantages == pytest.approx(expected_advantages, abs=1e-4)


def test_questioner_negatives_follow_the_switches():
    def bad(**options) -> list[int]:
        rollout = Rollout(**options)
        trained = {read(group)[1][0] for group in rollout.groups["questioner"]}
        return [
            number(e) for e in rollout.episodes if e.proposal.texts[0] in trained and not e.mixed
        ]

    assert (
        len(bad(questioner__negatives=0.5)) == 1 + 1 + 0
    )  # int(half) of 2, 1 and 3 kept questions, by task
    assert bad(questioner__negatives=0) == []
    assert Rollout(questioner__train=False).groups["questioner"] == []
    assert {3, 4} & set(bad(questioner__negatives=9)) and not {3, 4} & set(
        bad(questioner__negatives=9, questioner__format_penalty=False)
    )
    assert {8, 9} & set(bad(questioner__negatives=9))
    assert not {5, 6, 7} & set(bad(questioner__negatives=9))  # declined questions are never used


def verifier_verdicts(rollout: Rollout) -> list[tuple[int, tuple[str, ...], tuple[float, ...]]]:
    verdict_rows = []
    for group in rollout.groups["verifier"]:
        prompt, answers, advantages = read(group)
        verdict_rows.append((int(prompt.split("Q")[1][:2]), answers, advantages))
    return verdict_rows


def test_verifier_trains_on_split_votes_that_agree_with_the_rule():
    everything = {"verifier__share": 9.0}
    rows = verifier_verdicts(Rollout(**everything))
    # Unanimous or tied votes are not trained on, and the gate requires that the majority agrees
    # with the rule. Row 15 (all right) gives no responder rows, but its verdicts give verifier
    # rows.
    assert [at for at, *_ in rows] == [1, 12, 13, 15, 15, 15, 17, 17, 17, 17]
    for _, answers, advantages in rows:
        yes = np.array([a == "[[YES]]" for a in answers])
        right = yes == (yes.sum() > 2)  # Eq. 5
        expected_advantages = (right - right.mean()) / (right.std(ddof=1) + 1e-6)
        assert advantages == pytest.approx(expected_advantages, abs=1e-4)
    without_gate = [
        at for at, *_ in verifier_verdicts(Rollout(**everything, verifier__consistency_gate=False))
    ]
    assert without_gate == [1, 12, 13, 13, 13, 15, 15, 15, 17, 17, 17, 17]
    balanced = verifier_verdicts(Rollout(**everything, verifier__balance=True))
    majorities = [answers.count("[[YES]]") > 2 for _, answers, _ in balanced]
    assert sorted(majorities) == [False, False, True, True]
    assert Rollout(verifier__train=False).groups["verifier"] == []
    # Single verdicts never disagree, so the single-verdict ablation does not train the verifier.
    assert Rollout(**everything, verifier__group_size=1).groups["verifier"] == []


@pytest.mark.parametrize("penalty", [True, False])
def test_malformed_votes_are_penalized_in_usable_groups(penalty):
    rows = [Row(QA, "ok", 0, 1, 1, 0)]
    script = Script(rows, verdicts={0: ("[[YES]]", "[[YES]]", "[[YES]]", "[[NO]]", "?")})
    options = {
        "verifier__group_size": 5,
        "verifier__share": 9.0,
        "verifier__malformed_penalty": penalty,
    }
    rollout = Rollout(rows, script=script, **options)
    assert rollout.of(0).votes[0] == (1, 1, 1, 0, -1)
    rewards = np.array([1, 1, 1, 0, -penalty])
    expected_advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert read(rollout.groups["verifier"][0])[2] == pytest.approx(expected_advantages, abs=1e-4)


@pytest.mark.parametrize(("conflict", "groups"), [("any", 1), ("well_formed", 0)])
@pytest.mark.parametrize("malformed_penalty", [True, False])
def test_one_malformed_vote_is_a_conflict_in_the_papers_text_alone(
    conflict, groups, malformed_penalty
):
    rows = [Row(QA, "ok", 0, 1, 0, 0)]
    script = Script(rows, verdicts={0: (*["[[YES]]"] * 7, "?")})
    options = {"verifier__group_size": 8, "verifier__share": 9.0, "group_size": 2}
    options |= {"verifier__malformed_penalty": malformed_penalty, "verifier__conflict": conflict}
    rollout = Rollout(rows, script=script, **options)
    trained = rollout.groups["verifier"]
    assert len(trained) == groups
    for group in trained:
        assert np.sign(read(group)[2]).tolist() == [1] * 7 + [-1]
    assert SpellConfig().verifier.conflict == "any"


def test_questioner_switches_keep_the_sampled_verifier_groups():
    share = {"verifier__share": 0.5}  # 3 of 10 groups are chosen
    sampled_groups = verifier_verdicts(Rollout(**share))
    assert len(sampled_groups) == 3
    assert sampled_groups == verifier_verdicts(Rollout(**share, questioner__negatives=0.5))
    assert sampled_groups == verifier_verdicts(Rollout(**share, questioner__train=False))


def test_building_groups_twice_gives_the_same_groups():
    rollout = Rollout()
    groups = by_role(to_groups(rollout.algorithm, rollout.episodes))
    assert [read(g) for g in groups["questioner"]] == [
        read(g) for g in rollout.groups["questioner"]
    ]
    assert [read(g) for g in groups["verifier"]] == [read(g) for g in rollout.groups["verifier"]]


@pytest.mark.parametrize(
    "row",
    [
        Row(QA, "bad_json", 0, 0, 0, 0),
        Row(MATH, "zero", 0, 0, 0, 0),
        Row(CHOICE, "ok", 1, 0, 0, 0),
        Row(QA, "ok", 0, 4, 0, 0),
        Row(QA, "ok", 0, 0, 0, 0),
    ],
    ids=lambda row: f"{row.written}{row.blind}{row.right}",
)
def test_step_without_usable_rows_gives_no_groups(row):
    rollout = Rollout([row] * 3)
    assert to_groups(rollout.algorithm, rollout.episodes) == []
    assert rollout.algorithm.metrics(rollout.episodes).means()["bad_format"] in (0.0, 1.0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"questions": 0}, "questions"),
        ({"generation_batch": 0}, "generation_batch"),
        ({"max_generations": 0}, "max_generations"),
        ({"group_size": 1}, "group_size"),
        ({"verifier__group_size": 0}, "verifier.group_size"),
        ({"questioner__documents": ()}, "questioner.documents"),
        ({"questioner__documents": (3, 0)}, "questioner.documents"),
        ({"questioner__unread_documents": -1}, "questioner.unread_documents"),
        ({"questioner__memory": -1}, "questioner.memory"),
        ({"questioner__memory_documents": "all"}, "questioner.memory_documents"),
        ({"questioner__mapping": "linear"}, "questioner.mapping"),
        ({"questioner__sigma": 0.0}, "questioner.sigma"),
        ({"questioner__max_answer_tokens": 0}, "questioner.max_answer_tokens"),
        ({"questioner__grounding_samples": -1}, "questioner.grounding_samples"),
        (
            {"questioner__grounding_samples": 1, "questioner__grounding_threshold": 2},
            "questioner.grounding_threshold",
        ),
        ({"reader__source": "oracle"}, "reader.source"),
        ({"reader__samples": 1}, "reader.samples"),
        ({"responder__reward": "sum"}, "responder.reward"),
        ({"questioner__normalization": "role"}, "questioner.normalization"),
        ({"rule": "gpt"}, "rule"),
        ({"questioner__negatives": -1}, "questioner.negatives"),
        ({"verifier__share": -0.1}, "verifier.share"),
        ({"verifier__conflict": "majority"}, "verifier.conflict"),
    ],
)
def test_invalid_setting_is_named_in_the_error(options, field):
    with pytest.raises(ValueError, match=rf"algorithm\.{field} = "):
        make_config(SpellConfig, **options)
