"""Held-out evaluation of EAPO: format, accuracy and quoted evidence of greedy answers.

An answer of bad format counts as wrong and without quotes, so that all numbers are means over the
same questions before and after a run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from spell_jax.algorithms.held_out import HeldOut, on_questions
from spell_jax.data.questions import Question
from spell_jax.selfplay import evidence, rules
from spell_jax.selfplay.prompts import Prompts


def held_out_evidence(
    prompts: Prompts, questions: Sequence[Question], extract: str = "lenient"
) -> HeldOut:
    def make_prompt(question: Question) -> str:
        return prompts.evidence(question.documents, question.question)

    measure = functools.partial(measure_answer, extract=extract)
    return on_questions(questions, make_prompt, measure, "structured answers")


def measure_answer(text: str, question: Question, extract: str) -> dict[str, bool | float]:
    """Return an answer's measures, in [0, 1]; precision and recall need Question.evidence."""
    answer = evidence.parse_answer(text)
    # As in training, where an answer of bad format earns nothing (Eq. 2).
    quoted, is_right = "", False
    if answer is not None:
        quoted = answer.evidence
        answer_text = evidence.with_answer_phrase(answer.answer, question.task, extract)
        is_right = rules.score(answer_text, question.answer, question.task, extract=extract) == 1
    measures: dict[str, bool | float] = {
        "accuracy": is_right,
        "well_formed": answer is not None,
        "verbatim": evidence.verbatim_share(quoted, evidence.searchable(question.documents)),
    }
    if question.evidence:
        precision, recall = evidence.precision_and_recall(quoted, question.evidence)
        measures |= {"evidence_precision": precision, "evidence_recall": recall}
    return measures
