"""Held-out evaluation: the interface, means with intervals, and a set of questions with answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

from spell_jax.algorithms.base import Models
from spell_jax.data.questions import Question
from spell_jax.selfplay import rules
from spell_jax.selfplay.prompts import Prompts

# {section: {row: {column: (mean, half width of the 95 % interval)}}}
Report = dict[str, dict[str, dict[str, tuple[float, float]]]]


class Evaluation(Protocol):
    """Held-out evaluation of a policy, as the trainer calls it."""

    def full(self, models: Models) -> Report:
        """Everything that is reported before and after a run."""
        ...

    def quick(self, models: Models) -> tuple[float, dict[str, float]]:
        """(score, larger is better; numbers by name), cheap enough to run every few steps."""
        ...


def share(outcomes: Sequence[bool | float]) -> tuple[float, float]:
    """Mean of outcomes and half width of its normal 95 % interval.

    Raises:
      ValueError: if there are no outcomes.
    """
    if not outcomes:
        raise ValueError("a share of no outcomes")
    mean = sum(outcomes) / len(outcomes)
    variance = sum((x - mean) ** 2 for x in outcomes) / len(outcomes)
    return mean, 1.96 * math.sqrt(variance / len(outcomes))


@dataclasses.dataclass(frozen=True)
class HeldOutQuestions:
    """Greedy answers to given questions, scored by the rule.

    Attributes:
      prompts: the prompt set.
      questions: questions with their answers and documents.
    """

    prompts: Prompts
    questions: tuple[Question, ...]

    def full(self, models: Models) -> Report:
        """Accuracy over all questions and by task."""
        outcomes = self._outcomes(models)
        rows = {task: {"": share(cells)} for task, cells in outcomes.items()}
        return {"responder accuracy (rule)": rows}

    def quick(self, models: Models) -> tuple[float, dict[str, float]]:
        """(accuracy over all questions; accuracies by task, and "all")."""
        outcomes = self._outcomes(models)
        numbers = {task: share(cells)[0] for task, cells in outcomes.items() if cells}
        return numbers["all"], numbers

    def _outcomes(self, models: Models) -> dict[str, list[float]]:
        texts = [self.prompts.responder(q.task, q.documents, q.question) for q in self.questions]
        outcomes: dict[str, list[float]] = {"all": []}
        replies = models("responder", texts, temperature=0.0)
        for question, reply in zip(self.questions, replies, strict=True):
            text = "" if reply is None else reply.texts[0]
            score = rules.score(text, question.answer, question.task)
            outcomes["all"].append(score)
            outcomes.setdefault(question.task, []).append(score)
        return outcomes
