"""Held-out evaluation of EAPO: format, accuracy and quoted evidence of structured answers.

1. Each question is answered once, greedily, with EAPO's prompt.
2. An answer of bad format counts as wrong and without quotes. All numbers are therefore means over
   the same questions before and after a run.
3. Precision and recall compare the quotes with the supporting sentences of the questions that have
   them (Question.evidence).
"""

from __future__ import annotations

import dataclasses

from spell_jax.algorithms.base import Models
from spell_jax.algorithms.held_out import Report, share
from spell_jax.data.questions import Question
from spell_jax.selfplay import evidence, rules
from spell_jax.selfplay.prompts import Prompts

Outcomes = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class EvidenceEvaluation:
    """Greedy structured answers to given questions.

    Attributes:
      prompts: the prompt set.
      questions: questions with their answers, documents and, if known, supporting sentences.
    """

    prompts: Prompts
    questions: tuple[Question, ...]

    def full(self, models: Models) -> Report:
        """Means over all questions and by task."""
        by_task = self._outcomes(models)
        rows = {
            task: {name: share(o) for name, o in some.items()} for task, some in by_task.items()
        }
        return {"structured answers": rows}

    def quick(self, models: Models) -> tuple[float, dict[str, float]]:
        """(accuracy; accuracies by task and "all", and the other means over all questions)."""
        by_task = self._outcomes(models)
        accuracies = {task: share(some.pop("accuracy"))[0] for task, some in by_task.items()}
        others = {name: share(outcomes)[0] for name, outcomes in by_task["all"].items()}
        return accuracies["all"], accuracies | others

    def _outcomes(self, models: Models) -> dict[str, Outcomes]:
        """Task or "all" -> name of a measure -> outcomes."""
        texts = [self.prompts.evidence(q.documents, q.question) for q in self.questions]
        replies = models("responder", texts, temperature=0.0)
        found: dict[str, Outcomes] = {"all": {}}
        for question, reply in zip(self.questions, replies, strict=True):
            numbers = judge_answer("" if reply is None else reply.texts[0], question)
            for task in ("all", question.task):
                outcomes = found.setdefault(task, {})
                for name, value in numbers.items():
                    outcomes.setdefault(name, []).append(value)
        return found


def judge_answer(text: str, question: Question) -> dict[str, float]:
    """Measures of one answer by name, numbers from 0 to 1; see the module."""
    answer = evidence.parse_answer(text)
    quoted, accuracy = "", 0.0
    if answer is not None:
        quoted = answer.evidence
        said = evidence.with_answer_phrase(answer.answer, question.task)
        accuracy = rules.score(said, question.answer, question.task)
    numbers = {
        "accuracy": accuracy,
        "well_formed": float(answer is not None),
        "verbatim": evidence.verbatim_share(quoted, evidence.searchable(question.documents)),
    }
    if question.evidence:
        precision, recall = evidence.precision_and_recall(quoted, question.evidence)
        numbers |= {"evidence_precision": precision, "evidence_recall": recall}
    return numbers
