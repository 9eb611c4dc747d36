"""Tests of the order of questions that share their documents."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from spell_jax.data.questions import in_blocks


@pytest.mark.parametrize("size", [1, 2, 4, 99])
def test_items_of_a_key_stay_together_in_blocks(size: int) -> None:
    items = [(name, i) for name, count in (("a", 7), ("b", 4), ("c", 1)) for i in range(count)]
    ordered = in_blocks(items, lambda item: item[0], size, np.random.default_rng(0))
    assert sorted(ordered) == sorted(items)
    runs = [len(list(run)) for _, run in itertools.groupby(ordered, key=lambda item: item[0])]
    blocks = sum(-(-count // size) for count in (7, 4, 1))  # neighbours may have the same key
    assert len(runs) <= blocks
    in_full_blocks = sum(count // size for count in (7, 4, 1)) * size
    names = [name for name, _ in ordered[:in_full_blocks]]
    assert names == [names[i - i % size] for i in range(in_full_blocks)]
    if size == 99:
        assert sorted(runs) == [1, 4, 7]
    repeated_order = in_blocks(items, lambda item: item[0], size, np.random.default_rng(0))
    other_order = in_blocks(items, lambda item: item[0], size, np.random.default_rng(1))
    assert repeated_order == ordered != other_order
