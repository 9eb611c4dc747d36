"""Tests of questions from a file: answers that can never score are named, counted and skipped."""

import json
import logging
import re

import pytest

from spell_jax.data.questions import Question
from spell_jax.selfplay.given_questions import check_answer, read_scorable
from tests.paths import ROOT

REFERENCES = ROOT / "tests" / "cases" / "references.jsonl"
GOOD = {"question": "Who?", "answer": "Ann", "task": "general_qa", "documents": ["Ann."]}


def test_lines_that_can_never_score_are_named_and_skipped(tmp_path, caplog):
    path, bad = tmp_path / "questions.jsonl", REFERENCES.read_text()
    path.write_text(json.dumps(GOOD) + "\n" + bad + "\n" + json.dumps(GOOD) + "\n{\n")
    first, second = read_scorable(path, "data.questions")
    assert first == second == Question("general_qa", ("Ann.",), "Who?", "Ann")
    named = {int(line) for line in re.findall(rf"{re.escape(str(path))}:(\d+): ", caplog.text)}
    lines = path.read_text().split("\n")
    assert named == {n for n, line in enumerate(lines, 1) if line and line != json.dumps(GOOD)}
    assert caplog.text.count("can never score") == len(bad.split("\n")) - bad.endswith("\n")
    assert "2 questions, 7 lines skipped" in caplog.text


def test_file_without_any_line_that_can_score_is_an_error(caplog):
    with pytest.raises(ValueError, match=r"data\.validation = .*none of its 6 lines"):
        read_scorable(REFERENCES, "data.validation")
    assert all(f"{REFERENCES}:{line}: " in caplog.text for line in range(1, 7))


def test_question_is_scorable_as_the_run_extracts_answers(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    path = tmp_path / "questions.jsonl"
    rows = [("financial_math", "five million"), ("multiple_choice", "c"), ("general_qa", "Ann")]
    path.write_text(
        "".join(json.dumps(GOOD | {"task": task, "answer": text}) + "\n" for task, text in rows)
    )
    assert [q.answer for q in read_scorable(path, "f")] == ["five million", "c", "Ann"]
    assert [q.answer for q in read_scorable(path, "f", "paper")] == ["Ann"]
    # A judge may accept what the rule cannot read, but is not asked about letters.
    judged = read_scorable(path, "f", "paper", "match_or_judge")
    assert [q.answer for q in judged] == ["five million", "Ann"]


@pytest.mark.parametrize(
    ("question", "answer", "reason"),
    [
        ("Which?\n(A) one\n(B) two\n(C) three\n", "D", "none of the options A, B, C"),
        ("Which?\nA. one\nB. two", "C", "none of the options A, B"),
        ("Which?\n(A) one\n(B) two\n(C) three\n(D) four\n(E) five", "E", "no letter from A to D"),
        ("Which?\n(A) one\n(B) two\n", "B", ""),
        ("Which?", "B", ""),  # its documents may have the options
    ],
)
def test_letter_must_be_one_of_the_options(question, answer, reason):
    record = Question("multiple_choice", ("x",), question, answer)
    if reason:
        with pytest.raises(ValueError, match=f"answer = '{answer}' can never score.*{reason}"):
            check_answer(record)
    else:
        check_answer(record)
