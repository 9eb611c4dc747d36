"""Tests of the hops of a chained question."""

from __future__ import annotations

import pytest

from spell_jax.selfplay.hops import join_hop, split_hops
from spell_jax.selfplay.memory import Entry

KNOWN = (Entry((), "B of X", "Y"), Entry((), "A of B of X", "Z"), Entry((), "A of W", "V"))


@pytest.mark.parametrize(
    ("question", "known_questions", "expected"),
    [
        ("A of X", (), ("A of X", [])),
        ("C of A of B of X", (), ("B of X", ["A", "C"])),
        ("C of B of X", KNOWN, ("C of Y", [])),
        ("C of A of B of X", KNOWN, ("C of Z", [])),  # the longest known question counts
        ("C of D of B of X", KNOWN, ("D of Y", ["C"])),
        ("A of B of X", KNOWN, ("A of Y", [])),  # a repeated question is read again
        ("B of X", KNOWN, ("B of X", [])),
        ("C of B of W", KNOWN, ("B of W", ["C"])),
        ("X", KNOWN, ("X", [])),
        ("", KNOWN, ("", [])),
    ],
)
def test_first_hop_and_links_that_remain(question, known_questions, expected):
    assert split_hops(question, known_questions) == expected


def test_hop_is_a_question():
    assert join_hop("city", "Arvo") == "city of Arvo"
