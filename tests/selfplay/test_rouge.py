"""Tests of ROUGE-L: a textbook implementation, values by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spell_jax.selfplay.rouge import rouge_l, rouge_l_recall


def longest_common(first: list[str], second: list[str]) -> int:
    """Compute the length of the longest common subsequence by dynamic programming."""
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, ours in enumerate(first):
        for j, theirs in enumerate(second):
            best = max(table[i][j + 1], table[i + 1][j])
            table[i + 1][j + 1] = table[i][j] + 1 if ours == theirs else best
    return table[-1][-1]


words = st.lists(st.sampled_from(["a", "b", "c", "d1"]), max_size=80)


@given(words, words)
def test_rouge_l_matches_a_textbook_implementation(first, second):
    rouge_score = rouge_l(" ".join(first), ", ".join(second).upper())
    total = len(first) + len(second)
    common = longest_common(first, second)
    assert rouge_score == pytest.approx(2 * common / total if first and second else 0.0)
    recall = rouge_l_recall(" ".join(first), " ".join(second))
    assert recall == pytest.approx(common / len(second) if second else 0.0)


def test_rouge_l_matches_values_by_hand():
    # "police ... the gunman" of Lin (2004): three of four words in common.
    assert rouge_l("police kill the gunman", "police killed the gunman") == 0.75
    assert rouge_l("the gunman kill police", "police killed the gunman") == 0.5
    assert rouge_l_recall("the police killed", "police killed the gunman") == 0.5
    assert rouge_l_recall("a", "") == rouge_l_recall("", "a") == 0.0
    assert rouge_l("", "a") == rouge_l("a", "!") == 0.0
    assert rouge_l("x " * 20_000, "y " * 1_500) == 0.0
