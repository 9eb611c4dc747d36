"""Held-out questions with known answers; and what every evaluation offers."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from spell_jax.algorithms.base import Models
from spell_jax.algorithms.scoring import Report, share
from spell_jax.data.questions import Question
from spell_jax.selfplay import rules
from spell_jax.selfplay.prompts import Prompts


class Evaluation(Protocol):
    """Held-out evaluation, as the trainer calls it."""

    def full(self, ask: Models) -> Report:
        """Everything that is reported before and after a run."""
        ...

    def quick(self, ask: Models) -> tuple[float, dict[str, float]]:
        """(a score, larger is better; named numbers), cheap enough for every few steps."""
        ...


@dataclasses.dataclass(frozen=True)
class HeldOutQuestions:
    """Greedy answers to given questions, scored by the rule."""

    prompts: Prompts
    questions: tuple[Question, ...]

    def full(self, ask: Models) -> Report:
        outcomes = self._outcomes(ask)
        rows = {task: {"": share(cells)} for task, cells in outcomes.items()}
        return {"responder accuracy (rule)": rows}

    def quick(self, ask: Models) -> tuple[float, dict[str, float]]:
        outcomes = self._outcomes(ask)
        numbers = {task: share(cells)[0] for task, cells in outcomes.items() if cells}
        return numbers["all"], numbers

    def _outcomes(self, ask: Models) -> dict[str, list[float]]:
        texts = [self.prompts.responder(q.task, q.documents, q.question) for q in self.questions]
        outcomes: dict[str, list[float]] = {"all": []}
        replies = ask("responder", texts, temperature=0.0)
        for question, reply in zip(self.questions, replies, strict=True):
            text = "" if reply is None else reply.texts[0]
            score = rules.score(text, question.answer, question.task)
            outcomes["all"].append(score)
            outcomes.setdefault(question.task, []).append(score)
        return outcomes
