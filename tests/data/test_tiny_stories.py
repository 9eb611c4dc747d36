"""Tests of generated stories: a chain of names that determines every line's place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from spell_jax.data import tiny_stories
from spell_jax.data.tiny_world import NAMES
from spell_jax.policy import tokenizer
from spell_jax.policy.model import TINY_POLICY


@pytest.mark.parametrize("count", [1, 7, tiny_stories.MOST_LINES])
def test_each_line_starts_with_the_last_name_of_the_previous_one(count):
    for seed in range(20):
        opening, *lines = tiny_stories.make_story(np.random.default_rng(seed), count).split("\n")
        assert len(lines) == count and len(opening.strip()) < tiny_stories.SHORTEST_LINE
        line_words = [line.split() for line in (f"- to {opening}", *lines)]
        assert all(a[2] == b[0] and b[1] == "to" for a, b in itertools.pairwise(line_words))
        givers = [giver for giver, _, _ in line_words[1:]]
        assert len({*givers, line_words[-1][2]}) == count + 1  # so only one order is a chain
        assert all(len(line.strip()) >= tiny_stories.SHORTEST_LINE for line in lines)


@pytest.mark.parametrize("count", [0, tiny_stories.MOST_LINES + 1])
def test_line_count_out_of_range_is_rejected(count):
    with pytest.raises(ValueError, match=rf"lines = {count}: must be 1 to"):
        tiny_stories.make_story(np.random.default_rng(0), count)


def test_stories_are_a_function_of_the_seed():
    first = tiny_stories.make_stories(0, 6, (5, 7))
    assert first == tiny_stories.make_stories(0, 6, (5, 7))
    assert [cluster.documents[0].count("\n") for cluster in first] == [5, 7] * 3
    other_stories = tiny_stories.make_stories(1, 6, (5, 7))
    everything = [*first, *other_stories]
    assert len({c.id for c in everything}) == len({c.documents for c in everything}) == 12
    assert tiny_stories.make_stories(0, 1, (5,), "own")[0].id == "own-0-0"


def test_a_name_is_one_token():
    shipped = tokenizer.load(TINY_POLICY)
    for name in NAMES:
        assert len(shipped.encode(f"\n {name} to {name}")) == 4
