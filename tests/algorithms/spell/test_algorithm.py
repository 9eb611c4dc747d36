"""One step of SPELL with scripted models: every switch, rewards, and the rows of the update."""

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
    Played,
    Row,
    Script,
    by_role,
    number,
    read,
)

ANSWERED = {"calls", "status", "rule", "votes", "scores", "rewards", "memory"}
REWARDED = {"scores", "rewards", "memory"}
UPDATE = {"responder", "questioner", "verifier"}
# Switch -> the facts that it changes; all others must stay as they are.
SWITCHES = {
    "memory": ({"memory": 0}, {"memory"}),
    "memory_low": ({"memory_low": 0.5}, {"memory"}),
    "memory_high": ({"memory_high": 0.9}, {"memory"}),
    "documents": ({"documents": (3,)}, {"shown", "memory", "questioner"}),
    "frozen questioner": ({"train_questioner": False}, {"questioner"}),
    "no format penalty": ({"format_penalty": False}, {"rewards", "questioner"}),
    "skip penalty": ({"skip_penalty": True}, {"rewards", "questioner"}),
    "no grounding filter": ({"grounding_samples": 0}, ANSWERED | UPDATE),
    "two samples to filter": ({"grounding_samples": 2}, {"calls"}),
    "long answers": (
        {"max_answer_tokens": 50},
        {"calls", "status", "reference", "rule", "votes", "scores", "rewards", "questioner"},
    ),
    "azr": ({"mapping": "azr"}, {"rewards", "questioner"}),
    "r_zero": ({"mapping": "r_zero"}, {"rewards", "questioner"}),
    "sigma": ({"sigma": 0.5 / 2}, {"rewards", "questioner"}),
    "mu": ({"mu": 0.4}, {"rewards", "questioner"}),
    "fewer negatives": ({"negatives": 0.5}, {"questioner"}),
    "no negatives": ({"negatives": 0}, {"questioner"}),
    "frozen verifier": ({"train_verifier": False}, {"verifier"}),
    "verifier share": ({"verifier_share": 0.5}, {"verifier"}),
    "no consistency gate": ({"consistency_gate": False}, {"verifier"}),
    "balance": ({"balance_verdicts": True}, {"verifier"}),
    "no verifier": ({"responder_reward": "rule"}, {"calls", "votes"} | REWARDED | UPDATE),
    "random": ({"responder_reward": "random"}, {"calls", "votes"} | REWARDED | UPDATE),
    "verifier alone": ({"responder_reward": "verifier"}, REWARDED | {"responder", "questioner"}),
    "mean": ({"responder_reward": "mean"}, {"scores", "rewards", "responder", "questioner"}),
    "min": ({"responder_reward": "min"}, REWARDED | {"responder", "questioner"}),
    "fewer questions": ({"questions": 4}, UPDATE),
    "no deviation": ({"divide_by_deviation": False}, {"responder", "verifier"}),
    "surplus": ({"questions": 4, "keep_surplus": True}, UPDATE),
    "G": ({"group_size": 3}, {"calls", "rule", "votes", "scores", "rewards"} | UPDATE),
    "single verdict": (
        {"verifier_group_size": 1},
        {"calls", "votes", "scores", "rewards"} | UPDATE,
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_changes_what_it_should_and_nothing_else(name):
    options, expected = SWITCHES[name]
    plain, other = Played().facts(), Played(**options).facts()
    assert {fact for fact in plain if plain[fact] != other[fact]} == expected


# ------------------------------------------------------------------------------ rewards and rows


def gaussian(mean: float, mu: float = 0.5, sigma: float = 0.5 / 3) -> float:
    return math.exp(-((mean - mu) ** 2) / (2 * sigma**2))


def test_rewards_of_each_outcome():
    played = Played()
    assert played.of(0).scores == [1, 1, 1, 0]
    assert played.of(0).reward == pytest.approx(gaussian(3 / 4))
    assert played.of(16).reward == pytest.approx(1.0)  # half solved
    assert played.of(10).reward == 0.0 and played.of(11).reward == 0.0  # all and none
    assert played.of(3).reward == -1.0 and played.of(4).reward == -1.0
    assert played.of(8).reward == -0.5 and played.of(9).reward == -0.5
    for at in (5, 6, 7):  # a zero, a long answer, an unfinished thought: neither good nor bad
        assert (played.of(at).status, played.of(at).reward) == ("skipped", None)
        assert Played(skip_penalty=True).of(at).reward == -1.0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mapping": "azr"}, 1 - 3 / 4),
        ({"mapping": "r_zero"}, 1 - 2 * (3 / 4 - 1 / 2)),
        ({"sigma": 0.5 / 2}, gaussian(3 / 4, sigma=0.5 / 2)),
        ({"mu": 0.75}, 1.0),
    ],
)
def test_questioner_reward_of_each_mapping(options, expected):
    assert Played(**options).of(0).reward == pytest.approx(expected)


# Row 14: two right answers that the verifier rejects, one wrong one that it rejects, none.
# Row 16: two paraphrases that only the verifier knows. Row 2: malformed verdicts on right answers.
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
def test_how_rule_and_majority_combine(how, of_14, of_16):
    played = Played(responder_reward=how)
    assert played.of(14).scores == of_14
    assert played.of(16).scores == of_16
    assert played.of(2).scores == [1, 1, 1, 0]  # an ignored verifier leaves the rule


def test_random_rewards_are_coins():
    played = Played(responder_reward="random", group_size=64)
    scores = np.concatenate([e.scores for e in played.episodes if e.scores])
    assert set(scores) == {0.0, 1.0}
    assert abs(scores.mean() - 0.5) < 4 * 0.5 / math.sqrt(len(scores))


def test_responder_rows_are_the_first_mixed_questions():
    played = Played()
    mixed = [e for e in played.episodes if e.mixed]
    assert [number(e) for e in mixed] == [0, 1, 2, 12, 13, 14, 16, 17]
    for episode, group in zip(mixed, played.groups["responder"], strict=False):
        prompt, answers, advantages = read(group)
        assert prompt == PROMPTS.responder(
            episode.task, episode.cluster.documents, episode.question
        )
        assert answers == tuple(episode.response.texts)
        scores = np.array(episode.scores)  # Eq. 8
        wanted = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
        assert advantages == pytest.approx(wanted, abs=1e-4)
    assert len(played.groups["responder"]) == 6
    assert len(Played(keep_surplus=True).groups["responder"]) == 8
    assert [read(g) for g in Played(questions=4).groups["responder"]] == [
        read(g) for g in played.groups["responder"][:4]
    ]


def test_without_the_deviation_advantages_are_distances_from_the_mean():
    """Dr. GRPO's, of responder and verifier alike."""
    played = Played(divide_by_deviation=False)
    mixed = [e for e in played.episodes if e.mixed]
    for episode, group in zip(mixed, played.groups["responder"], strict=False):
        wanted = np.array(episode.scores) - np.mean(episode.scores)
        assert read(group)[2] == pytest.approx(wanted, abs=1e-4)
    rows = verifier_verdicts(played)
    assert rows
    for _, answers, advantages in rows:
        yes = np.array([a == "[[YES]]" for a in answers])
        right = yes == (yes.sum() > 2)
        assert advantages == pytest.approx(right - right.mean(), abs=1e-4)


def test_questioner_rows_are_normalized_by_task():
    played = Played()
    written = {e.proposal.texts[0]: e for e in played.episodes}
    rows = [read(group) for group in played.groups["questioner"]]
    found = [written[answers[0]] for _, answers, _ in rows]
    assert [number(e) for e in found[:6]] == [0, 1, 2, 12, 13, 14]  # the kept questions
    bad = found[6:]
    assert len(bad) == len({number(e) for e in bad}) == 6  # as many bad ones
    assert all(e.reward is not None and e.reward <= 0 and not e.mixed for e in bad)
    for task in TASKS:  # Eq. 9
        rewards = np.array([e.reward for e in found if e.task == task])
        wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        given = [row[2][0] for row, e in zip(rows, found, strict=True) if e.task == task]
        assert given == pytest.approx(wanted, abs=1e-4)


def test_questioner_rows_by_switch():
    def bad(**options) -> list[int]:
        played = Played(**options)
        trained = {read(group)[1][0] for group in played.groups["questioner"]}
        return [
            number(e) for e in played.episodes if e.proposal.texts[0] in trained and not e.mixed
        ]

    assert len(bad(negatives=0.5)) == 1 + 1 + 0  # int(half) of 2, 1 and 3 kept ones, by task
    assert bad(negatives=0) == []
    assert Played(train_questioner=False).groups["questioner"] == []
    assert {3, 4} & set(bad(negatives=9)) and not {3, 4} & set(
        bad(negatives=9, format_penalty=False)
    )
    assert {8, 9} & set(bad(negatives=9))
    assert not {5, 6, 7} & set(bad(negatives=9))  # skipped ones never


def verifier_verdicts(played: Played) -> list[tuple[int, tuple[str, ...], tuple[float, ...]]]:
    found = []
    for group in played.groups["verifier"]:
        prompt, answers, advantages = read(group)
        found.append((int(prompt.split("Q")[1][:2]), answers, advantages))
    return found


def test_verifier_rows():
    everything = {"verifier_share": 9.0}
    rows = verifier_verdicts(Played(**everything))
    # One-sided or tied votes teach nothing, and by the gate a majority must be the rule's. Row 15
    # (all right) is no use to the responder, but its verdicts are to the verifier.
    assert [at for at, *_ in rows] == [1, 12, 13, 15, 15, 15, 17, 17, 17, 17]
    for _, answers, advantages in rows:
        yes = np.array([a == "[[YES]]" for a in answers])
        right = yes == (yes.sum() > 2)  # Eq. 5
        wanted = (right - right.mean()) / (right.std(ddof=1) + 1e-6)
        assert advantages == pytest.approx(wanted, abs=1e-4)
    without_gate = [
        at for at, *_ in verifier_verdicts(Played(**everything, consistency_gate=False))
    ]
    assert without_gate == [1, 12, 13, 13, 13, 15, 15, 15, 17, 17, 17, 17]
    balanced = verifier_verdicts(Played(**everything, balance_verdicts=True))
    majorities = [answers.count("[[YES]]") > 2 for _, answers, _ in balanced]
    assert sorted(majorities) == [False, False, True, True]
    assert Played(train_verifier=False).groups["verifier"] == []
    # One verdict is always of one mind: the single-verdict ablation does not train the verifier.
    assert Played(**everything, verifier_group_size=1).groups["verifier"] == []


@pytest.mark.parametrize("penalty", [True, False])
def test_malformed_votes_are_punished_inside_a_usable_group(penalty):
    rows = [Row(QA, "ok", 0, 1, 1, 0)]
    script = Script(rows, verdicts={0: ("[[YES]]", "[[YES]]", "[[YES]]", "[[NO]]", "?")})
    options = {"verifier_group_size": 5, "verifier_share": 9.0, "malformed_penalty": penalty}
    played = Played(rows, script=script, **options)
    assert played.of(0).votes[0] == [1, 1, 1, 0, -1]
    rewards = np.array([1, 1, 1, 0, -penalty])
    wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert read(played.groups["verifier"][0])[2] == pytest.approx(wanted, abs=1e-4)


def test_a_switch_of_one_role_leaves_the_draws_of_another():
    share = {"verifier_share": 0.5}  # 3 of 10 groups are drawn
    drawn = verifier_verdicts(Played(**share))
    assert len(drawn) == 3
    assert drawn == verifier_verdicts(Played(**share, negatives=0.5))
    assert drawn == verifier_verdicts(Played(**share, train_questioner=False))


def test_rows_do_not_depend_on_how_often_they_are_asked_for():
    played = Played()
    again = by_role(played.algorithm.rows(played.episodes))
    assert [read(g) for g in again["questioner"]] == [read(g) for g in played.groups["questioner"]]
    assert [read(g) for g in again["verifier"]] == [read(g) for g in played.groups["verifier"]]


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
def test_a_step_without_usable_rows_gives_no_groups(row):
    played = Played([row] * 3)
    assert played.algorithm.rows(played.episodes) == []
    assert played.algorithm.metrics(played.episodes).means()["bad_format"] in (0.0, 1.0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"questions": 0}, "questions"),
        ({"generation_batch": 0}, "generation_batch"),
        ({"max_generations": 0}, "max_generations"),
        ({"group_size": 1}, "group_size"),
        ({"verifier_group_size": 0}, "verifier_group_size"),
        ({"documents": ()}, "documents"),
        ({"documents": (3, 0)}, "documents"),
        ({"memory": -1}, "memory"),
        ({"memory_low": 0.9, "memory_high": 0.1}, "memory_low"),
        ({"mapping": "linear"}, "mapping"),
        ({"sigma": 0.0}, "sigma"),
        ({"max_answer_tokens": 0}, "max_answer_tokens"),
        ({"grounding_samples": -1}, "grounding_samples"),
        ({"grounding_samples": 1, "grounding_threshold": 2}, "grounding_threshold"),
        ({"reference_source": "oracle"}, "reference_source"),
        ({"reader_samples": 1}, "reader_samples"),
        ({"responder_reward": "sum"}, "responder_reward"),
        ({"rule": "gpt"}, "rule"),
        ({"negatives": -1}, "negatives"),
        ({"verifier_share": -0.1}, "verifier_share"),
    ],
)
def test_a_bad_setting_is_named(options, field):
    with pytest.raises(ValueError, match=rf"algorithm\.{field} = "):
        SpellConfig(**options)
