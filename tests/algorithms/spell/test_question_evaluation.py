"""Tests of the held-out evaluation of SPELL's roles on questions with human answers."""

from __future__ import annotations

import json

import pytest

from spell_jax.algorithms.held_out import HeldOut
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.evaluation import RoleExams, evaluate_questions
from spell_jax.data.clusters import PAPER_TASKS
from spell_jax.data.questions import Question
from spell_jax.runtime import intervals
from tests.algorithms.scripted import PROMPTS, ScriptedModels, make_config, make_context

QUESTIONS = (
    Question(
        "general_qa",
        ("Oslo lies in Norway.", "Lima does not.", "Nor does Rome."),
        "Where is Oslo?",
        "in Norway",
        answers=("in Norway", "Norway"),
        wrong=("Peru", "Italy"),
    ),
    Question("general_qa", ("Ada wrote it.",), "Who wrote it?", "Ada", answers=("Ada",)),
    Question("general_qa", ("It was 3.",), "How much was it?", "3", wrong=("4",)),
)


def make(questions=QUESTIONS, tasks=PAPER_TASKS) -> HeldOut:
    exams = RoleExams(make_config(SpellConfig, questioner__documents=(2,)), make_context())
    return evaluate_questions(exams, questions, tasks)


def script(role: str, prompt: str, sibling: int, model: str) -> str | None:
    if role == "questioner":
        record = {"question": "What?", "answer": "4"}
        return json.dumps(record) if "Oslo" in prompt else "no JSON"
    if role == "verifier":
        return "[[YES]]"
    return "The answer is Norway." if "Oslo" in prompt else "The answer is it was Ada"


def test_answers_are_scored_by_the_best_right_answer():
    rows = make().full(ScriptedModels(script)).report["responder accuracy (rule)"]
    # "Norway" equals the second right answer; "it was Ada" covers "Ada" without being equal.
    assert rows["general_qa"][""][0] == pytest.approx(2 / 3)
    assert rows["general_qa"]["exact match"][0] == pytest.approx(1 / 2)


def test_verifier_is_asked_about_labeled_pairs():
    models = ScriptedModels(script)
    (pairs,) = make().full(models).report["verifier accuracy, by pair"].values()
    verifier_prompts = next(call.prompts for call in models.calls if call.role == "verifier")
    assert verifier_prompts == (
        PROMPTS.verifier("Where is Oslo?", "Norway", "in Norway"),
        PROMPTS.verifier("Where is Oslo?", "Peru", "in Norway"),
        PROMPTS.verifier("How much was it?", "4", "3"),
    )
    assert {kind: share.mean for kind, share in pairs.items()} == {
        "all": pytest.approx(1 / 3),
        "same": 1.0,
        "different": 0.0,
    }


def test_questioner_reads_the_first_documents_for_every_task():
    models = ScriptedModels(script)
    rows = make().full(models).report["questioner"]
    questioner_prompts = next(call.prompts for call in models.calls if call.role == "questioner")
    assert len(questioner_prompts) == 9
    assert questioner_prompts[0] == PROMPTS.questioner("general_qa", QUESTIONS[0].documents[:2])
    assert rows["general_qa"]["accepted"][0] == rows["financial_math"]["accepted"][0] == 1 / 3
    assert rows["multiple_choice"]["accepted"][0] == 0  # no options


def test_questions_without_other_answers_have_no_verifier_section():
    plain = (Question("general_qa", ("x",), "What?", "x"),)
    evaluation = make(plain, ("general_qa",))
    report = evaluation.full(ScriptedModels(lambda *_: "The answer is x")).report
    assert set(report) == {"responder accuracy (rule)", "questioner"}
    assert report["responder accuracy (rule)"]["all"] == {"": intervals.wilson(1.0, 1)}
