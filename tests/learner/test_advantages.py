"""Tests of advantages: reference cases, finite and centered values, NumPy and jit."""

import functools
import json
import math
import typing
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from spell_jax.learner.advantages import group_advantages, questioner_advantages
from tests.paths import REFERENCE_CASES


def read(name: str) -> list[dict]:
    def decode(value: dict) -> object:
        return float(value["__float__"]) if "__float__" in value else value

    return json.loads((REFERENCE_CASES / f"{name}.json").read_text(), object_hook=decode)["cases"]


def test_group_advantages_match_reference_cases():
    for case in read("grpo_advantages"):
        given_ = case["in"]
        scores, names = np.array(given_["scores"]), np.array(given_["uids"])
        for name in set(given_["uids"]):
            rows = names == name
            actual = group_advantages(scores[rows], divide_by_deviation=given_["norm_by_std"])
            # The reference works in float32 throughout.
            np.testing.assert_allclose(actual, np.array(case["out"])[rows], rtol=2e-5, atol=1e-6)


def _by_group(rows: list[dict]) -> dict[tuple[str, str], list[int]]:
    """Group row numbers by (role, question); all questioner rows are one group."""
    groups = defaultdict(list)
    for at, row in enumerate(rows):
        groups[row["role"], "" if row["role"] == "questioner" else row["uid"]].append(at)
    return groups


def test_advantages_of_each_role_match_reference_cases():
    single_rows = 0
    for case in read("spell_advantages"):
        if "error" in case:
            continue  # an unknown role: roles are not known here, callers choose the function
        rows = case["in"]["rows"]
        expected = np.array(case["advantage_per_row"])
        rewards = np.array(case["reward_per_row"])
        for (role, _), at in _by_group(rows).items():
            if role != "questioner":
                advantages = group_advantages(rewards[at])
            elif case["in"]["group"] == "batch":
                advantages = questioner_advantages(rewards[at], [rows[row]["task"] for row in at])
            else:
                continue  # raw rewards as advantages: a mode that is off in that code's own runs
            expected_advantages = expected[at]
            # A task with a single questioner row is NaN there, which poisons the step (spec 8).
            single_rows += int(np.isnan(expected_advantages).sum())
            assert np.isfinite(advantages).all()
            is_finite = np.isfinite(expected_advantages)
            np.testing.assert_allclose(
                advantages[is_finite], expected_advantages[is_finite], rtol=2e-5, atol=1e-6
            )
    assert single_rows > 0


def test_group_advantages_by_hand():
    actual = group_advantages([[1, 0, 0, 1], [1, 1, 1, 1]])
    assert actual.dtype == np.float32
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    np.testing.assert_allclose(actual, [[expected, -expected, -expected, expected], [0] * 4])


def test_plain_deviation_by_hand():
    """Eq. 3, 8 and 9: the sum of squares is divided by G, here 4 and 2."""
    expected_advantages = np.array([3, -1, -1, -1]) / math.sqrt(3)
    for actual in (
        group_advantages([1, 0, 0, 0], ddof=0),
        questioner_advantages([1, 0, 0, 0], ddof=0),
    ):
        np.testing.assert_allclose(actual, expected_advantages, rtol=4e-6)
    by_task = questioner_advantages([1, 0, 0, 1], ["a", "b", "a", "b"], ddof=0)
    np.testing.assert_allclose(by_task, [1, -1, -1, 1], rtol=4e-6)
    jitted_advantages = jitted(group_advantages, ddof=0)(np.array([1.0, 0, 0, 0]))
    np.testing.assert_allclose(jitted_advantages, expected_advantages, rtol=4e-6)
    assert group_advantages([1.0], ddof=0).tolist() == pytest.approx([1], rel=1e-5)


def test_group_of_one_keeps_its_reward():
    np.testing.assert_allclose(group_advantages([[1.0], [0.0], [-0.5]]), [[1], [0], [-0.5]], 1e-5)


def test_task_with_one_row_is_normalized_over_the_whole_batch():
    rewards, tasks = [1.0, 0.0, 0.5, -1.0], ["a", "a", "a", "b"]
    actual = questioner_advantages(rewards, tasks)
    np.testing.assert_allclose(actual[:3], [1, -1, 0], atol=1e-5)
    assert actual[3] == group_advantages(rewards)[3]


def test_questioner_advantages_without_tasks_are_normalized_over_the_batch():
    """Eq. 9: the deviation is the sample's (ddof 1)."""
    advantages = questioner_advantages([1.0, 0.0, 0.5, -1.0])
    expected_advantages = (np.array([1.0, 0.0, 0.5, -1.0]) - 0.125) / math.sqrt(2.1875 / 3)
    np.testing.assert_allclose(advantages, expected_advantages, rtol=1e-5)


@pytest.mark.parametrize("tasks", ["a", None])
def test_single_questioner_row_has_zero_advantage(tasks):
    assert questioner_advantages([0.7], tasks).tolist() == [0]
    assert questioner_advantages([], tasks and []).shape == (0,)


def test_invalid_rewards_and_shapes_are_rejected():
    for value in (math.nan, math.inf, -math.inf, None, "1", "text", [], {}, 10**400, 1j):
        with pytest.raises(ValueError, match=r"^rewards"):
            group_advantages(typing.cast(Any, [1.0, value]))
    with pytest.raises(ValueError, match=r"^rewards\[1\] = nan: must be a finite number$"):
        group_advantages([1.0, math.nan])
    with pytest.raises(ValueError, match=r"^rewards\[1\] = None: must be a finite number$"):
        questioner_advantages(typing.cast(Any, [1.0, None]))
    assert group_advantages([True, False]).tolist() == [-x for x in group_advantages([0, 1])]
    with pytest.raises(ValueError, match="rewards: a scalar"):
        group_advantages(1.0)
    with pytest.raises(ValueError, match=r"rewards: shape \(2,\).*\(1,\)"):
        questioner_advantages([1.0, 0.0], ["a"])
    with pytest.raises(ValueError, match=r"rewards: shape \(1, 2\).*\(2,\)"):
        questioner_advantages([[1.0, 0.0]])


rewards = st.floats(-1, 1, width=32)


@given(npst.arrays(np.float32, npst.array_shapes(max_dims=3, max_side=5), elements=rewards))
def test_group_advantages_are_finite_and_centered(values):
    actual = group_advantages(values)
    assert actual.shape == values.shape
    assert np.isfinite(actual).all()
    if values.shape[-1] > 1:
        np.testing.assert_allclose(actual.sum(axis=-1), 0, atol=1e-4)


@given(st.lists(st.tuples(rewards, st.sampled_from("abc")), max_size=12))
def test_questioner_advantages_are_finite_and_zero_for_equal_rewards(rows):
    values, tasks = [row[0] for row in rows], [row[1] for row in rows]
    for names in (tasks, None):
        assert np.isfinite(questioner_advantages(values, names)).all()
        np.testing.assert_allclose(questioner_advantages([0.1] * len(rows), names), 0, atol=1e-9)


# ----------------------------------------------------------------------------- Under jit


def jitted(function, **static):
    return jax.jit(functools.partial(function, **static))


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("shape", [(8,), (5, 4), (2, 3, 7), (3, 1)])
def test_group_advantages_under_jit_equal_numpy(shape, divide):
    values = np.random.default_rng(len(shape)).choice([0.0, 0.3, 1.0], size=shape)
    expected_advantages = group_advantages(values, divide_by_deviation=divide)
    advantages = jitted(group_advantages, divide_by_deviation=divide)(values)
    assert isinstance(advantages, jax.Array)
    assert advantages.dtype == expected_advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, expected_advantages, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tasks", ["aabba", "aabac", "abcde", "aaaaa", "a", "", None])
def test_questioner_advantages_under_jit_equal_numpy(tasks):
    names = None if tasks is None else tuple(tasks)
    values = np.random.default_rng(1).random(5 if names is None else len(names))
    advantages = jitted(questioner_advantages, tasks=names)(values)
    assert isinstance(advantages, jax.Array)
    expected_advantages = questioner_advantages(values, names)
    np.testing.assert_allclose(advantages, expected_advantages, rtol=1e-6, atol=1e-6)


def test_equal_rewards_have_exactly_zero_advantage():
    groups = np.repeat(np.random.default_rng(0).random((100, 1)), 7, axis=1)
    assert not group_advantages(groups).any()
    assert not jitted(group_advantages)(groups).any()


def test_result_is_a_jax_array_only_for_jax_inputs():
    assert isinstance(group_advantages(jnp.ones(3)), jax.Array)
    assert isinstance(group_advantages([jnp.float32(1), 0.0]), jax.Array)
    assert isinstance(group_advantages([1.0, 0.0]), np.ndarray)


def test_shapes_are_checked_while_tracing():
    with pytest.raises(ValueError, match="rewards: a scalar"):
        jitted(group_advantages)(1.0)
    with pytest.raises(ValueError, match=r"rewards: shape \(2,\).*\(1,\)"):
        jitted(questioner_advantages, tasks=("a",))(np.ones(2))
