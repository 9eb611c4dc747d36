"""Tests of trees: prompts that begin alike share one copy of their first tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from spell_jax.learner import trees
from spell_jax.learner.packing import Bucket, MicroBatch, TrainGroup
from spell_jax.learner.trees import GroupTree, TokenCounts
from tests import tiny

DOCUMENTS = [7, 7, 8, 9]


def group(question: list[int], *answers: list[int], **fields) -> TrainGroup:
    return tiny.group([*DOCUMENTS, *question], answers, [1.0] * len(answers), **fields)


def grow(prompts: list[list[int]], room: int = 100) -> list[GroupTree]:
    arrays = [np.array(prompt) for prompt in prompts]
    return trees.grow(
        arrays, [TokenCounts(len(p) + 1, 1) for p in prompts], TokenCounts(room, room)
    )


def test_layout_of_a_tree() -> None:
    """Documents once, then each question with its answers."""
    (batch,) = tiny.pack([group([2], [31, 32]), group([1, 5], [21], [22])], Bucket(12, 8))
    np.testing.assert_array_equal(batch.tokens, [[*DOCUMENTS, 1, 5, 21, 22, 2, 31, 32, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 4, 5, 6, 6, 4, 5, 6, 0]])
    np.testing.assert_array_equal(batch.last_query, [[10] * 4 + [7, 7, 6, 7] + [10] * 3 + [-1]])
    np.testing.assert_array_equal(batch.source[0, :4], [5, 5, 8, 9])
    np.testing.assert_array_equal(batch.target[0, :4], [21, 22, 31, 32])
    np.testing.assert_array_equal(batch.answer[0, :5], [0, 1, 2, 2, -1])
    np.testing.assert_array_equal(batch.group[0, :5], [0, 0, 1, 1, -1])


def test_shared_tokens_have_the_experts_of_the_first_prompt() -> None:
    groups = [
        tiny.change_samples(
            group([2 * value], [31]),
            prompt_experts=[np.full((5, 1, 1), value)],
            experts=[np.full((1, 1, 1), value)],
        )
        for value in (2, 1)
    ]
    nothing = np.full((1, 1), -1, np.int8)
    (batch,) = tiny.pack(groups, Bucket(9, 4), no_experts=nothing)
    np.testing.assert_array_equal(batch.tokens, [[*DOCUMENTS, 2, 31, 4, 31, 0]])
    np.testing.assert_array_equal(batch.experts[0, :, 0, 0], [1] * 6 + [2, 2, -1])


def test_prompt_that_begins_another_and_equal_prompts_are_laid_out_once() -> None:
    (batch,) = tiny.pack([group([1, 2], [31]), group([], [21]), group([1, 2], [32])], Bucket(10, 8))
    np.testing.assert_array_equal(batch.tokens, [[*DOCUMENTS, 21, 1, 2, 31, 32, 0]])
    np.testing.assert_array_equal(batch.source[0, :3], [3, 6, 6])
    np.testing.assert_array_equal(batch.last_query, [[8] * 4 + [4, 8, 8, 7, 8, -1]])


def test_trees_have_every_depth() -> None:
    """Documents, then questions, then answers to verify: three levels."""
    prompts = [[1, 1, 1, 1, 2, 2, i, 3] for i in (4, 5)] + [[1, 1, 1, 1, 9, 9]]
    (tree,) = grow(prompts)
    assert tree == GroupTree((0, 1, 2), (0, 6, 4), TokenCounts(9 + 3 + 3, 3))


def test_prompts_share_nothing_below_half_of_the_shorter_one() -> None:
    assert trees.common(np.array([1, 1, 2, 2]), np.array([1, 1, 3, 3, 3])) == 2
    assert trees.common(np.array([1, 2, 2, 2]), np.array([1, 3, 3, 3])) == 0
    assert [tree.members for tree in grow([[1, 2, 2, 2], [1, 3, 3, 3]])] == [(0,), (1,)]


def test_tree_that_is_too_large_is_cut_where_least_is_shared() -> None:
    prompts = [[1] * 6 + [2, 2, i] for i in range(3)] + [[1] * 6 + [3, 3, i] for i in range(3)]
    whole_trees = grow(prompts)
    assert [tree.size.tokens for tree in whole_trees] == [6 + 2 * (2 + 3 * 2)]
    halves = grow(prompts, room=21)
    assert [tree.members for tree in halves] == [(0, 1, 2), (3, 4, 5)]
    assert [tree.shared for tree in halves] == [(0, 8, 8)] * 2
    assert halves == grow(prompts, room=21)


def test_equal_cuts_are_made_in_the_middle() -> None:
    prompts = [[1] * 6 + [i] for i in range(8)]
    assert [tree.members for tree in grow(prompts, room=14)] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_order_of_groups_does_not_matter() -> None:
    prompts = [[1] * 6 + [i] for i in (3, 0, 2, 1)]
    (tree,) = grow(prompts)
    assert tree.members == (1, 3, 2, 0)


def test_group_with_an_aligned_one_stays_alone() -> None:
    pair = group([1], [21], [22], aligned=tiny.group([*DOCUMENTS, 3], [[21]], [0.0]))
    (batch,) = tiny.pack([pair, group([2], [31])], Bucket(32, 8))
    assert int((batch.last_query >= 0).sum()) == (5 + 2) + (5 + 1) + (5 + 1)


@pytest.mark.parametrize("with_trees", [True, False])
def test_tree_saves_the_shared_tokens(with_trees: bool) -> None:
    groups = [group([i], [20 + i] * 2, [30 + i]) for i in range(4)]
    batches = tiny.pack(groups, Bucket(48, 16), with_trees=with_trees)
    count = sum(int((batch.last_query >= 0).sum()) for batch in batches)
    assert count == 4 * (1 + 3) + 4 * (1 if with_trees else 4)


def test_packing_of_tiny_groups_is_deterministic() -> None:
    groups = [dataclasses.replace(g, prompt=np.asarray(g.prompt) % 2) for g in tiny.groups(9)]
    first, second = (tiny.pack(groups, Bucket(48, 24)) for _ in range(2))
    for first_batch, second_batch in zip(first, second, strict=True):
        for field in dataclasses.fields(MicroBatch):
            np.testing.assert_array_equal(
                getattr(first_batch, field.name), getattr(second_batch, field.name)
            )
