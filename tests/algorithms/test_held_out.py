"""Tests of held-out questions from a file, scored by the rule, with confidence intervals."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import re

import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.algorithms.held_out import (
    Exam,
    ExamPrompt,
    HeldOut,
    Share,
    mean_outcome,
    on_questions,
)
from spell_jax.data.questions import Question, read_questions
from spell_jax.runtime import intervals
from tests.algorithms.scripted import PROMPTS, ScriptedModels

QUESTIONS = (
    Question("general_qa", ("Oslo is a town.",), "Which town?", "Oslo"),
    Question("financial_math", ("Sales 3.", "Costs 4."), "How much?", "7"),
    Question("financial_math", ("Sales 5.",), "How much more?", "8"),
    Question("multiple_choice", ("x",), "Which?\n(A) a\n(B) b\n", "B"),
)


def make(questions=QUESTIONS) -> HeldOut:
    return on_questions(questions, lambda q: PROMPTS.responder(q.task, q.documents, q.question))


def right(role: str, prompt: str, sibling: int, model: str) -> str:
    question = next(q for q in QUESTIONS if prompt.endswith(q.question))
    return f"answer is {question.answer}"


def test_scores_of_right_and_wrong_answers():
    evaluation = make()
    ask = ScriptedModels(right)
    assert evaluation.quick(ask) == (
        1.0,
        {"all": 1.0, "general_qa": 1.0, "financial_math": 1.0, "multiple_choice": 1.0},
    )
    (call,) = ask.calls
    assert (call.role, call.temperature, call.group) == ("responder", 0.0, 1)
    assert call.prompts[1] == PROMPTS.responder(
        "financial_math", ("Sales 3.", "Costs 4."), "How much?"
    )
    score, numbers = evaluation.quick(ScriptedModels(lambda *_: "answer is 7"))
    assert score == 0.25 and numbers["financial_math"] == 0.5 and numbers["general_qa"] == 0
    assert evaluation.quick(ScriptedModels(lambda *_: None))[0] == 0.0  # over the cap


def test_the_measure_says_whether_it_is_a_share_not_its_values():
    """Before training F1 is 0 for every question, and yet no share of right answers."""
    questions = (Question("general_qa", ("x",), "What?", "red fox", answers=("red fox",)),) * 4
    intervals_of = []
    for text in ("none", "answer is red hat"):
        models = ScriptedModels(lambda *_, text=text: text)
        _, numbers = make(questions).quick(models)
        assert isinstance(numbers["all"], Share) and isinstance(numbers["exact match"], Share)
        assert not isinstance(numbers["F1"], Share)
        (rows,) = make(questions).full(models).report.values()
        intervals_of.append(rows["all"])
    none, half = intervals_of
    assert none["F1"] == (0.0, 0.0, 0.0) and half["F1"] == (0.5, 0.5, 0.5)  # bootstraps
    assert none["exact match"] == half["exact match"] == intervals.wilson(0.0, 4)


@pytest.mark.parametrize("score", [True, 0.5, np.float32(0.5), jnp.float32(0.5)])
def test_scores_may_be_numbers_of_any_kind(score):
    prompts = [ExamPrompt(("all",), "p", lambda text: {"score": score})]
    evaluation = HeldOut(lambda is_quick: [Exam("counting", prompts)])
    assert evaluation.quick(ScriptedModels(lambda *_: "7"))[0] == score


@pytest.mark.parametrize("score", [float("nan"), float("inf"), None])
def test_a_score_that_is_no_finite_number_is_named_with_its_exam(score):
    prompts = [ExamPrompt(("all",), f"p{i}", lambda text: {"score": score}) for i in range(2)]
    evaluation = HeldOut(lambda is_quick: [Exam("counting", prompts)])
    message = (
        f"^exam 'counting': 'score' = {score} for the answer '7' to the prompt 'p0'; must be a "
        "finite number$"
    )
    for evaluate in (evaluation.full, evaluation.quick):
        with pytest.raises(ValueError, match=message):
            evaluate(ScriptedModels(lambda *_: "7"))


@pytest.mark.parametrize(
    ("sections", "row"), [([], "all"), (["a", "b"], "all"), (["a"], "general_qa")]
)
def test_score_without_one_table_of_all_answers_is_an_error_with_a_remedy(sections, row):
    prompt = ExamPrompt((row,), "p", lambda text: {"score": 1.0})
    evaluation = HeldOut(lambda is_quick: [Exam(section, [prompt]) for section in sections])
    message = rf"^quick evaluation: has the sections {re.escape(str(sections))}; must have one"
    with pytest.raises(ValueError, match=message):
        evaluation.quick(ScriptedModels(lambda *_: "7"))


def test_report_has_one_row_per_task_and_number_of_documents():
    report = make().full(ScriptedModels(lambda *_: "answer is 7")).report
    (rows,) = report.values()
    assert rows["all"][""] == intervals.wilson(0.25, 4)
    tasks = {"all", "general_qa", "financial_math", "multiple_choice"}
    assert set(rows) == tasks | {"documents: 1", "documents: 2"}
    assert (
        rows["documents: 2"][""] == intervals.wilson(1.0, 1) and rows["documents: 1"][""][0] == 0.0
    )
    report = make(QUESTIONS[2:]).full(ScriptedModels(right)).report
    (rows,) = report.values()
    assert not any(row.startswith("documents") for row in rows)  # all have one document


def line(**changes) -> str:
    record = {
        "task": "general_qa",
        "documents": ["one\u2028two", "three"],
        "question": "What?",
        "answer": "one",
    }
    return json.dumps(record | changes, ensure_ascii=False)


def test_invalid_lines_are_skipped_and_logged(tmp_path, caplog):
    bad = [
        "no JSON",
        "[]",
        "3",
        line(task="poetry"),
        line(task=["general_qa"]),
        line(documents="one text"),
        line(documents=[1]),
        line(question=None),
        json.dumps(json.loads(line(question="\ud800"))),
        json.dumps({"task": "general_qa"}),
        "[" * 100_000,
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join([line(), *bad, line(answer="two")]) + "\n", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        questions = read_questions(path, "data.validation")
    assert [q.answer for q in questions] == ["one", "two"]
    assert questions[0].documents == ("one\u2028two", "three")
    for number in range(2, 2 + len(bad)):
        assert f"{path}:{number}: skipped" in caplog.text


def test_file_without_questions_is_rejected(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("no\n")
    with pytest.raises(ValueError, match=r"data\.validation = .*questions\.jsonl: none of its 1"):
        read_questions(path, "data.validation")


def test_a_share_of_right_answers_knows_its_questions():
    share, f1 = mean_outcome([True, False, False]), mean_outcome([0.0, 1.0, 0.0])
    assert isinstance(share, Share) and share == f1 == pytest.approx(1 / 3)
    assert share.questions == 3 and not isinstance(f1, Share)
    for copied in (copy.deepcopy(share), pickle.loads(pickle.dumps(share))):
        assert isinstance(copied, Share) and copied == share and copied.questions == 3
    with pytest.raises(ValueError, match="no outcomes"):
        mean_outcome([])
