"""Tests of the shapes that packing.buckets = "auto" chooses from the sizes of a step's trees."""

import itertools
import re
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from spell_jax.learner import shapes
from spell_jax.learner.packing import PackingConfig
from spell_jax.learner.shapes import AUTO, MOST_PADDING, Bucket
from spell_jax.learner.trees import GroupTree, TokenCounts
from spell_jax.runtime.config import build, section


def _trees(sizes: list[tuple[int, int]]) -> list[GroupTree]:
    return [GroupTree((i,), (0,), TokenCounts(*size)) for i, size in enumerate(sizes)]


def _fill(laid_out: list[shapes.MicroRows]) -> float:
    trees = [tree for *_, rows in laid_out for row in rows for tree in row]
    slots = sum(bucket.length * count for bucket, count, _ in laid_out)
    return sum(tree.size.tokens for tree in trees) / slots


def _draw(seed: int, count: int, longest: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, longest + 1, count)
    return [(int(n), int(rng.integers(1, n + 1))) for n in tokens]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 60),
    budget=st.integers(64, 9000),
    share=st.sampled_from([0.05, 0.3, 1.0]),  # of the longest row that the longest tree may take
    multiple=st.sampled_from([1, 2, 8]),
    devices=st.sampled_from([1, 3, 4]),
)
def test_every_tree_is_in_one_row_of_the_ladder(
    seed, count, budget, share, multiple, devices
) -> None:
    longest = shapes.longest_row(budget, devices)
    trees = _trees(_draw(seed, count, max(1, int(share * longest))))
    laid_out = shapes.choose(trees, budget, multiple, devices)
    packed = [tree for *_, rows in laid_out for row in rows for tree in row]
    assert sorted(tree.members[0] for tree in packed) == list(range(count))
    rungs = shapes.lengths(budget, devices)
    for bucket, rows_of_batch, rows in laid_out:
        assert bucket.length in rungs and bucket.length % devices == 0
        assert bucket.answers in shapes.answer_slots(bucket.length, devices)
        assert bucket.answers % devices == rows_of_batch % multiple == 0
        assert 1 <= len(rows) <= rows_of_batch
        assert rows_of_batch == multiple or rows_of_batch * bucket.length <= budget
        for row in rows:
            assert sum((tree.size for tree in row), TokenCounts(0, 0)).fits(bucket.size)
    with mock.patch.object(shapes, "_ANSWER_COST", 0.0):  # padding of tokens alone
        fill = _fill(shapes.choose(trees, budget, multiple, devices))
    if fill <= 1 - MOST_PADDING:  # then no length alone fills more, in as few rows as it needs
        tokens, longest = (f(tree.size.tokens for tree in trees) for f in (sum, max))
        for length in filter(longest.__le__, rungs):
            row_number = len(shapes.first_fit(trees, TokenCounts(length, length)))
            assert tokens / (-(-row_number // multiple) * multiple * length) <= fill + 1e-9


@pytest.mark.parametrize("devices", [1, 3, 16])
def test_neighbors_of_the_ladder_are_less_than_the_padding_apart(devices: int) -> None:
    rungs = list(shapes.lengths(51_200, devices))
    assert rungs[0] == shapes.longest_row(51_200, devices) > 51_200 - 128 * 3
    assert rungs == sorted(rungs, reverse=True) and rungs[-1] == np.lcm(16, devices)
    assert all(length % (128 if length > 2048 else 16) == length % devices == 0 for length in rungs)
    for longer, shorter in itertools.pairwise(rungs):
        unit = np.lcm(128 if longer > 2048 else 16, devices)
        assert shorter + unit > (1 - MOST_PADDING) * longer
    assert {51_200 // 2**i for i in range(5)} <= set(rungs) or devices == 3
    for length in rungs:
        slots = shapes.answer_slots(length, devices)
        assert slots == sorted(slots) and slots[-1] == length and len(slots) <= 5


@pytest.mark.parametrize(("budget", "longest"), [(7, 7), (100, 96), (5000, 4992), (1023, 1008)])
def test_longest_row_is_the_budget_rounded_down(budget: int, longest: int) -> None:
    assert shapes.longest_row(budget) == longest == PackingConfig(AUTO, budget).largest().length
    assert shapes.longest_row(shapes.round_up(budget)) >= budget
    assert shapes.choose(_trees([(longest, 1)]), budget)[0].bucket.length == longest
    with pytest.raises(ValueError, match=rf"a group of {longest + 1} tokens, .* does not fit"):
        shapes.choose(_trees([(longest + 1, 1)]), budget)


def test_small_step_is_one_micro_batch_of_about_its_tokens() -> None:
    (shape,) = shapes.choose(_trees([(1500, 500)] * 8), 51_200)
    assert shape.count * shape.bucket.length <= 12_000 / (1 - MOST_PADDING)
    (alone,) = shapes.choose(_trees([(300, 20)]), 51_200)
    assert (alone.count, alone.bucket) == (1, Bucket(304, 40))
    assert shapes.choose([], 51_200) == []


def test_large_step_has_one_or_two_shapes() -> None:
    for seed in range(5):
        laid_out = shapes.choose(_trees(_draw(seed, 200, 9000)), 16_384)
        assert len({(bucket, count) for bucket, count, _ in laid_out}) == 1 and len(laid_out) > 20
        assert _fill(laid_out) > 1 - MOST_PADDING
    # Rows of two lengths: five groups fill a row each, five need a bit more than half of one.
    laid_out = shapes.choose(_trees([(16_000, 900)] * 5 + [(9000, 900)] * 5), 16_384)
    assert len({(bucket, count) for bucket, count, _ in laid_out}) == 2
    assert _fill(laid_out) > 1 - MOST_PADDING


def test_shapes_depend_on_the_sizes_alone() -> None:
    sizes = _draw(3, 40, 2000)
    buckets_and_counts = [
        (bucket, count) for bucket, count, _ in shapes.choose(_trees(sizes), 8192)
    ]
    shapes.choose(_trees(_draw(4, 90, 5000)), 8192)
    reversed_shapes = shapes.choose(_trees(sizes[::-1]), 8192)
    assert buckets_and_counts == [(bucket, count) for bucket, count, _ in reversed_shapes]


def test_answers_have_as_many_slots_as_rows_need() -> None:
    narrow_bucket, wide_bucket = (
        shapes.choose(_trees([(1000, n)] * 8), 8192)[0].bucket for n in (100, 990)
    )
    assert narrow_bucket == Bucket(8192, 1024) and wide_bucket == Bucket(8192, 8192)
    # A row that is full of answers does not widen other rows.
    mixed = shapes.choose(_trees([(4000, 4000), *[(4000, 100)] * 15]), 8192)
    assert max(bucket.answers for bucket, *_ in mixed) <= 6144


# ---------------------------------------------------------------------------------------- Config


def test_default_is_auto_and_both_forms_survive_a_config_dict() -> None:
    fields = section(PackingConfig)
    assert fields.buckets == AUTO and build(PackingConfig, fields, "packing") == PackingConfig()
    fields.buckets = ((64, 16), (128, 32))  # another type than the default's
    listed = build(PackingConfig, fields, "packing")
    assert listed.listed == (Bucket(64, 16), Bucket(128, 32)) and listed.largest().length == 128
    saved = ConfigDict({"buckets": AUTO, "token_budget": 256})
    assert build(PackingConfig, saved, "packing").largest(3).length == 240
    assert build(PackingConfig, saved, "packing").listed == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"buckets": "best"}, "packing.buckets = 'best': must be 'auto', or tuples"),
        ({"buckets": 7}, "packing.buckets = 7: must be "),
        ({"buckets": ((8,),)}, r"packing.buckets[0] = (8,): must be a tuple of length, answers"),
        ({"token_budget": 0}, "packing.token_budget = 0: must be at least 1"),
    ],
)
def test_bad_fields_are_one_line(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        build(PackingConfig, fields, "packing")
    assert "\n" not in str(error.value)


def test_budget_below_the_context_axis_is_rejected() -> None:
    PackingConfig(AUTO, 4).check_splits(4)
    with pytest.raises(ValueError, match=r"token_budget = 3: must be at least mesh.context = 4"):
        PackingConfig(AUTO, 3).check_splits(4)
