"""Tests of replies after a prompt that ended inside a thought: unfinished thoughts state nothing.

The templates of thinking models write "<think>" into the prompt. The sampled text never contains
the tag, so that only the flag tells a thought that was cut off from an answer.
"""

import json
from typing import Any

import pytest

from spell_jax.selfplay import evidence, puzzles, verdicts
from spell_jax.selfplay.parsing import parse_question, parse_verdict
from spell_jax.selfplay.rules import EXTRACTS, TASKS, extract_answer, score, visible_text
from tests.paths import ROOT

CASES = json.loads((ROOT / "tests" / "cases" / "thoughts.json").read_text())["cases"]


def of_role(role: str) -> list[Any]:
    return [pytest.param(case, id=case["text"][:20]) for case in CASES if case["role"] == role]


@pytest.mark.parametrize("case", of_role("responder"))
@pytest.mark.parametrize("extract", EXTRACTS)
def test_cut_off_thought_earns_no_score(case, extract):
    assert visible_text(case["text"], in_thought=True) == case["visible"]
    for reference, reward in case["score"].items():
        for rule in ("match", "exact"):
            arguments = (case["text"], reference, case["task"], rule, extract)
            assert score(*arguments, in_thought=True) == reward
    if not case["visible"]:
        assert extract_answer(case["text"], case["task"], extract, in_thought=True) is None


@pytest.mark.parametrize("begin", ["", "<think>\n"], ids=["flag", "text"])
def test_second_thought_that_is_cut_off_is_no_answer_either(begin):
    text = f"{begin}Hm.</think>The answer is <think>Paris, or is the answer is Lyon"
    options: dict[str, Any] = {"in_thought": not begin}
    assert visible_text(text, **options) is None
    assert all(score(text, "Lyon", "general_qa", extract=way, **options) == 0 for way in EXTRACTS)
    assert parse_verdict(f"{begin}a</think><think>[[YES]] only if", **options) == -1
    assert visible_text(f"{text}</think> Lyon", **options) == "Lyon"


@pytest.mark.parametrize("case", of_role("verifier"))
def test_verdict_drafted_inside_a_thought_does_not_count(case):
    assert parse_verdict(case["text"], in_thought=True) == case["verdict"]


@pytest.mark.parametrize("case", of_role("questioner"))
def test_question_drafted_inside_a_thought_is_not_accepted(case):
    assert case["status"] == "not accepted"
    assert parse_question(case["text"], case["task"], len).status == "accepted"
    parsed = parse_question(case["text"], case["task"], len, in_thought=True)
    assert (parsed.status, parsed.reason) == ("declined", "unfinished_thought")


def test_structured_answers_and_orders_inside_a_thought_do_not_count():
    sections = "".join(f"<{name}>x</{name}>" for name in evidence.SECTIONS)
    for text, parse in (
        (sections, evidence.parse_answer),
        (sections, evidence.answer_section),
        ("1 4\n2 3", lambda text: evidence.parse_scores(text, 2)),
        (r"\boxed{B, A}", lambda text: puzzles.parse_order(text, 2).letters),
        ("YES", lambda text: verdicts.parse_judgement(text) == 1),
        ("A", lambda text: verdicts.parse_grade(text) == 1),
    ):
        assert parse(text)
        assert not parse(f"<think>\n{text}")  # replies begin with what the template wrote
        assert parse(f"<think>\npondering</think>{text}") == parse(text)


def test_unknown_way_of_extraction_is_an_error():
    for task in TASKS:
        with pytest.raises(ValueError, match=r"extract.*loose.*lenient"):
            extract_answer("The answer is 5", task, "loose")
        with pytest.raises(ValueError, match=r"extract.*loose.*lenient"):
            score("</think>", "5", task, extract="loose")
