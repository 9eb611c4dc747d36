"""Tests of held-out questions with structured answers, against a scripted policy."""

from __future__ import annotations

import pytest

from spell_jax.algorithms.eapo.evaluation import held_out_evidence
from spell_jax.algorithms.held_out import Share
from spell_jax.data.clusters import PAPER_TASKS
from spell_jax.data.questions import Question
from spell_jax.selfplay.evidence import StructuredAnswer, write_answer
from tests.algorithms.scripted import PROMPTS, ScriptedModels

QA, MATH, _ = PAPER_TASKS
DOCUMENTS = ("Arvo lives in Oslo.", "Oslo has rain.", "Bela lives in Rome.")
QUESTIONS = (
    Question(QA, DOCUMENTS, "Q0 where?", "Oslo", DOCUMENTS[:1]),
    Question(QA, DOCUMENTS, "Q1 rain?", "yes", DOCUMENTS[:2]),
    Question(MATH, DOCUMENTS, "Q2 how many?", "3"),
    Question(QA, DOCUMENTS, "Q3 who?", "Bela", DOCUMENTS[2:]),
)
ANSWERS = (
    write_answer(StructuredAnswer("a", "- Arvo lives in Oslo.", "r", "Oslo")),
    write_answer(StructuredAnswer("a", "Oslo has rain.\n14 more letters", "r", "no")),
    write_answer(StructuredAnswer("a", "Arvo lives ... Rome.", "r", "3")),
    "Bela lives in Rome. The answer is Bela",
)


def write(role: str, prompt: str, sibling: int, model: str) -> str | None:
    assert (role, model, sibling) == ("responder", "policy", 0)
    return ANSWERS[int(prompt.split("Q")[1][0])]


def test_metrics_of_held_out_structured_answers() -> None:
    models = ScriptedModels(write)
    score, numbers = held_out_evidence(PROMPTS, QUESTIONS).quick(models)
    (call,) = models.calls
    assert (call.temperature, call.group) == (0.0, 1)
    assert call.prompts == tuple(PROMPTS.evidence(q.documents, q.question) for q in QUESTIONS)
    assert score == numbers["all"] == 0.5 and "accuracy" not in numbers
    assert (numbers[QA], numbers[MATH]) == (pytest.approx(1 / 3), 1.0)
    assert numbers["well_formed"] == 0.75
    quoted = 14 + len("14 more letters")
    assert numbers["verbatim"] == pytest.approx((1 + 14 / quoted + 1 + 0) / 4)
    assert numbers["evidence_precision"] == pytest.approx((1 + 14 / quoted + 0) / 3)
    assert numbers["evidence_recall"] == pytest.approx((1 + 1 / 2 + 0) / 3)


def test_report_has_one_row_per_task() -> None:
    rows = (
        held_out_evidence(PROMPTS, QUESTIONS)
        .full(ScriptedModels(write))
        .report["structured answers"]
    )
    assert set(rows) == {"all", QA, MATH}
    assert rows["all"]["accuracy"][0] == 0.5 and rows["all"]["accuracy"][1] > 0
    assert "evidence_recall" not in rows[MATH]
    assert rows[QA]["evidence_recall"][0] == pytest.approx(0.5)


def test_overlong_prompt_counts_as_malformed_answer() -> None:
    score, numbers = held_out_evidence(PROMPTS, QUESTIONS).quick(ScriptedModels(lambda *_: None))
    assert score == 0 and set(numbers.values()) == {0.0}
    shares = {name for name, number in numbers.items() if isinstance(number, Share)}
    assert shares == {"all", QA, MATH, "well_formed"}
