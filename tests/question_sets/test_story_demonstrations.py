"""Tests of tiny-story demonstrations: correct reasoning, uniform guesses, short rows."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict

import pytest

from spell_jax.policy import tokenizer
from spell_jax.policy.model import TINY_POLICY
from spell_jax.question_sets.tiny_world_rows import StoryMixture, story_demonstrations
from spell_jax.selfplay import prompts, puzzles
from tests.algorithms.posing import solution

PROMPTS = prompts.load("compact")
COUNT = 1500


def take(mixture: StoryMixture | None = None, seed: int = 0, start: int = 0, count: int = COUNT):
    row_stream = story_demonstrations(PROMPTS, mixture or StoryMixture(), seed=seed, start=start)
    return list(itertools.islice(row_stream, count))


@pytest.fixture(scope="module")
def rows():
    return take()


def options_of(row) -> int:
    return row.prompt.count("<gap ")


def test_reasoning_states_the_correct_order(rows):
    thought = [row for row in rows if "<think></think>" not in row.completion]
    for row in thought:
        expected_letters = solution(row.prompt).split(", ")
        stated = re.findall(r" (\d) (\w+)\((\w)\)", row.completion.partition("</think>")[0])
        assert [letter for *_, letter in stated] == expected_letters
        assert [int(number) for number, *_ in stated] == [*range(1, len(expected_letters) + 1)]
        for _, holder, letter in stated:
            assert f"\n({letter}) {holder} to " in row.prompt
        order = puzzles.parse_order(row.completion, options_of(row))
        assert list(order.letters) == expected_letters
    assert len(thought) > COUNT / 3


def test_guesses_are_uniform(rows):
    guess_counts, right = defaultdict(Counter), Counter()
    for row in rows:
        if "<think></think>" in row.completion:
            order = puzzles.parse_order(row.completion, options_of(row))
            assert order.is_permutation
            guess_counts[options_of(row)][order.letters] += 1
            right[options_of(row)] += ", ".join(order.letters) == solution(row.prompt)
    assert [len(guess_counts[k]) for k in (2, 3, 4)] == [2, 6, 24]
    for k in (2, 3, 4):
        share = right[k] / guess_counts[k].total()
        assert share == pytest.approx(puzzles.chance_rewards(k)[1], abs=0.08)
    assert max(guess_counts[3].values()) < 2.5 * min(guess_counts[3].values())


def test_rows_follow_the_proportions_of_the_mixture(rows):
    mixture = StoryMixture()
    for k, share, guessed in zip(mixture.options, mixture.shares, mixture.guessed, strict=True):
        matching_rows = [row for row in rows if options_of(row) == k]
        assert len(matching_rows) / COUNT == pytest.approx(share, abs=0.05)
        guesses = sum("<think></think>" in row.completion for row in matching_rows)
        assert guesses / len(matching_rows) == pytest.approx(guessed, abs=0.07)
    assert {(row.role, row.task) for row in rows} == {("responder", "reconstruction")}


def test_row_depends_only_on_seed_and_number(rows):
    assert take(start=90, count=5) == rows[90:95]
    assert take(seed=1, count=5) != rows[:5]
    custom_rows = take(
        StoryMixture(lines=(9,), options=(5,), shares=(1.0,), guessed=(0.0,)), count=3
    )
    assert {options_of(row) for row in custom_rows} == {5}


def test_rows_fit_the_tiny_policys_token_limits(rows):
    shipped = tokenizer.load(TINY_POLICY)
    assert max(len(shipped.chat(row.prompt)) for row in rows) <= 72
    assert max(len(shipped.encode(row.completion)) for row in rows) < 32
