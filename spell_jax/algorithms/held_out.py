"""Held-out evaluation: the interface, means with intervals, and a set of questions with answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
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


def _score_answer(text: str, question: Question) -> dict[str, float]:
    """The only measure of a plain answer: its score by the rule."""
    return {"": rules.score(text, question.answer, question.task)}


@dataclasses.dataclass(frozen=True)
class HeldOutQuestions:
    """Greedy answers to given questions; a prompt over the cap counts as the answer "".

    Attributes:
      prompts: the prompt set.
      questions: questions with their answers and documents.
      section: title in the report.
      make_prompt: prompt of a question; None: the responder's.
      measure: function from (answer, question) to measures by name, accuracy first.
    """

    prompts: Prompts
    questions: tuple[Question, ...]
    section: str = "responder accuracy (rule)"
    make_prompt: Callable[[Question], str] | None = None
    measure: Callable[[str, Question], Mapping[str, float]] = _score_answer

    def full(self, models: Models) -> Report:
        """Means of all measures over all questions and by task."""
        rows = {
            task: {name: share(values) for name, values in measures.items()}
            for task, measures in self._outcomes(models).items()
        }
        return {self.section: rows}

    def quick(self, models: Models) -> tuple[float, dict[str, float]]:
        """(accuracy; accuracies by task and "all", and the other means over all questions)."""
        outcomes = self._outcomes(models)
        accuracy, *others = outcomes["all"]
        numbers = {task: share(measures[accuracy])[0] for task, measures in outcomes.items()}
        return numbers["all"], numbers | {n: share(outcomes["all"][n])[0] for n in others}

    def _outcomes(self, models: Models) -> dict[str, dict[str, list[float]]]:
        """Task or "all" -> name of a measure -> its values."""
        make_prompt = self.make_prompt or self._responder_prompt
        texts = [make_prompt(question) for question in self.questions]
        replies = models("responder", texts, temperature=0.0)
        outcomes: dict[str, dict[str, list[float]]] = {"all": {}}
        for question, reply in zip(self.questions, replies, strict=True):
            measures = self.measure("" if reply is None else reply.texts[0], question)
            for task in ("all", question.task):
                for name, value in measures.items():
                    outcomes.setdefault(task, {}).setdefault(name, []).append(value)
        return outcomes

    def _responder_prompt(self, question: Question) -> str:
        return self.prompts.responder(question.task, question.documents, question.question)
