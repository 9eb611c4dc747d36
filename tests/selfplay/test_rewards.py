"""Tests of majority votes, combined rewards and questioner rewards, with reference cases."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spell_jax.selfplay.rewards import (
    BAD_FORMAT,
    MAPPINGS,
    UNGROUNDED,
    combine,
    majority,
    questioner_reward,
    verifier_rewards,
)

VOTE = {"Y": 1, "N": 0, "M": -1}
MAPPING = {"gaussian": "gaussian", "reverse": "azr", "rzero": "r_zero", "unknown": "unknown"}
votes = st.lists(st.sampled_from([1, 0, -1]), min_size=1, max_size=16)


def differs_on_purpose(text: str) -> bool:
    """Return whether the reference breaks a tie or accepts a non-majority yes (Eq. 4, spec 12)."""
    ordered = sorted((text.count(kind) for kind in "YNM"), reverse=True)
    return ordered[0] == ordered[1] or (
        text.count("Y") == ordered[0] and 2 * ordered[0] <= len(text)
    )


def test_majority_and_verifier_rewards_match_the_reference(cases):
    deviations = 0
    for case in cases("verifier_groups"):
        text = case["in"]["votes"]
        group = [VOTE[letter] for letter in text]
        if majority(group) != case["out"]["llm_reward"]:
            assert differs_on_purpose(text), case
            deviations += 1
        elif case["out"]["vote_rewards"] is not None:
            assert verifier_rewards(group) == case["out"]["vote_rewards"], case
    assert 0 < deviations < 50


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("YYYYYNNN", 1),
        ("YYYYNNNN", 0),  # not more than half
        ("NNNNYYYY", 0),
        ("YYYYNMMM", 0),  # a plurality is no majority: malformed counts as not-yes
        ("MMMMYYYY", 0),  # malformed must outnumber strictly
        ("MMMMNNNN", 0),
        ("MMMYYYNN", 0),
        ("MMMMYYYN", -1),
        ("MMMYYNN", -1),
        ("M", -1),
        ("Y", 1),
        ("", -1),  # nobody judged
    ],
)
def test_majority_handles_ties_and_malformed_votes(text, verdict):
    assert majority([VOTE[letter] for letter in text]) == verdict


def test_groups_without_a_verdict_reward_only_the_format():
    assert verifier_rewards([-1, -1, -1, 1, 0]) == [-1, -1, -1, 0, 0]
    assert verifier_rewards([-1, 1, 1, 1, 0], malformed=0.0) == [0, 1, 1, 1, 0]


@pytest.mark.slow
@given(votes, st.randoms())
def test_majority_does_not_depend_on_the_order(group, random):
    shuffled = list(group)
    random.shuffle(shuffled)
    assert majority(shuffled) == majority(group)


@given(votes)
def test_yes_needs_a_strict_majority(group):
    assert (majority(group) == 1) == (group.count(1) > len(group) / 2)
    assert all(reward in (-1, 0, 1) for reward in verifier_rewards(group))


def test_combined_reward_is_the_maximum_of_rule_and_vote():
    assert [combine(rule, vote) for rule in (0.0, 1.0) for vote in (-1, 0, 1)] == [0, 0, 1, 1, 1, 1]


def test_questioner_reward_matches_the_reference(cases):
    for case in cases("questioner_reward_mapping"):
        mapping, score = MAPPING[case["in"]["function"]], case["in"]["score"]
        if case.get("error") == "NotImplementedError":
            with pytest.raises(ValueError, match=r"mapping.*unknown.*gaussian"):
                questioner_reward(score, mapping)
        elif case["in"].get("python_float"):
            # The reference code needs a tensor here and raises; ours accepts numbers.
            assert case["error"] == "TypeError"
            assert 0 < questioner_reward(score, mapping) <= 1
        else:
            assert questioner_reward(score, mapping) == pytest.approx(case["out"], rel=1e-12), case


def test_gaussian_reward_depends_on_mu_and_sigma():
    assert questioner_reward(0.3, mu=0.3, sigma=0.1) == 1
    assert questioner_reward(0.4, mu=0.3, sigma=0.1) == pytest.approx(math.exp(-0.5))


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_questioner_reward_keeps_penalties_and_zero(mapping):
    for reward in (BAD_FORMAT, UNGROUNDED, 0.0):
        assert questioner_reward(reward, mapping) == reward
    assert questioner_reward(1.0, mapping) == 0
