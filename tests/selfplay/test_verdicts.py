"""Tests of the parsers of a judge's replies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spell_jax.selfplay.verdicts import MALFORMED, parse_grade, parse_judgement


def test_parsed_verdicts_match_the_reference(cases):
    for case in cases("eval_judge_parse"):
        verdict = {"YES": 1, "NO": 0, "INVALID": -1}[case["out"]["judge_pred"]]
        assert parse_judgement(*case["in"]) == verdict, case


@given(st.text())
def test_any_reply_gives_a_verdict(text):
    assert parse_judgement(text) in (-1, 0, 1)
    assert parse_grade(text) in (-1, 0, 1)


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("A", 1),
        ("B", 0),
        ("C", 0),  # not attempted
        ("<think>B? No.</think>\n**A**", 1),
        ("(A): correct", 1),
        ("[[C]]", 0),
        ("A or B", MALFORMED),
        ("CORRECT", MALFORMED),
        ("<think>A", MALFORMED),
        ("", MALFORMED),
    ],
)
def test_grades_are_verdicts(reply, verdict):
    assert parse_grade(reply) == verdict
