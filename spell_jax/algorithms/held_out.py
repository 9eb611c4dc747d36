"""Held-out evaluation: the interface, means with intervals, and a set of questions with answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from spell_jax.algorithms.base import AlgorithmContext
from spell_jax.data.config import DataConfig
from spell_jax.data.questions import Question
from spell_jax.rollout.replies import AskModels
from spell_jax.selfplay import rules
from spell_jax.selfplay.prompts import Prompts

# {section: {row: {column: (mean, half width of the 95 % interval)}}}
Report = dict[str, dict[str, dict[str, tuple[float, float]]]]


# With more lengths, each row would have few questions and a wide interval.
MOST_LENGTHS = 8  # different numbers of documents that get a row each


class Evaluated(NamedTuple):
    """A report, and a record of each answer that it counts, where an evaluation keeps records.

    The record of an answer is {"question", "reference", "answer", "documents": their number,
    "scores": {measure: value}}. Records have the order of the questions.
    """

    report: Report
    answers: Sequence[Mapping[str, Any]] = ()


class Evaluation(Protocol):
    """Held-out evaluation of a policy, as the trainer calls it."""

    def full(self, ask: AskModels) -> Evaluated:
        """Evaluate everything that is reported before and after a run."""
        ...

    def quick(self, ask: AskModels) -> tuple[float, dict[str, float]]:
        """Return (score, larger is better; numbers by name), cheap enough for every few steps."""
        ...


class MakeEvaluation(Protocol):
    """A function that makes a held-out evaluation; algorithm.evaluation may name the user's own."""

    def __call__(
        self, config: Any, context: AlgorithmContext, data: DataConfig, /
    ) -> Evaluation | None:
        """Make the evaluation of a run; None if its data holds nothing out.

        Large files are read when the evaluation is first used.

        Args:
          config: config of the algorithm, an AlgorithmConfig.
          context: inputs of the algorithm, with its prompts.
          data: section `data` of the run's config.
        """
        ...


def share(outcomes: Sequence[bool | float]) -> tuple[float, float]:
    """Return (mean, half width of the mean's normal 95 % interval); ValueError without outcomes."""
    if not outcomes:
        raise ValueError("a share of no outcomes")
    mean = sum(outcomes) / len(outcomes)
    variance = sum((x - mean) ** 2 for x in outcomes) / len(outcomes)
    return mean, 1.96 * math.sqrt(variance / len(outcomes))


def by_row(cells: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Collect measures by name: row -> name -> values; row "all" has the values of all rows."""
    rows: dict[str, dict[str, list[float]]] = {"all": {}}
    for row, measures in cells:
        for name, value in measures.items():
            rows["all"].setdefault(name, []).append(value)
            rows.setdefault(row, {}).setdefault(name, []).append(value)
    return rows


def _score_answer(text: str, question: Question, extract: str) -> dict[str, float]:
    """Return measures of an answer, each the best over the question's right answers.

    Exact match and the words' F1 are among the measures if the question lists all right answers.
    """
    task, references = question.task, question.right
    scores = {"": max(rules.score(text, answer, task, extract=extract) for answer in references)}
    # Exact match needs all right answers: a right text that the question does not list would count
    # as wrong.
    if question.answers:
        prediction = rules.extract_answer(text, task, extract) or ""
        is_exact = any(
            rules.same_answer(prediction, answer, task, extract) for answer in references
        )
        scores["exact match"] = float(is_exact)
        scores["F1"] = max(
            rules.score_answer(prediction, answer, task, "f1", extract) for answer in references
        )
    return scores


@dataclasses.dataclass(frozen=True)
class HeldOutQuestions:
    """Greedy answers to given questions; a prompt over the cap counts as the answer "".

    Prompts are by default the responder's. `measure` makes measures by name from (answer,
    question, extract), accuracy first; `extract` is AlgorithmConfig.extract.
    """

    prompts: Prompts
    questions: tuple[Question, ...]
    section: str = "responder accuracy (rule)"  # title in the report
    make_prompt: Callable[[Question], str] | None = None
    measure: Callable[[str, Question, str], Mapping[str, float]] = _score_answer
    extract: str = "lenient"

    def full(self, ask: AskModels) -> Evaluated:
        """Report measures by task, and by number of documents if few different numbers occur."""
        texts = self._answer(ask)
        measured = self._measure(texts)
        rows = by_row((question.task, measures) for question, measures in measured)
        lengths = sorted({len(question.documents) for question in self.questions})
        if 1 < len(lengths) <= MOST_LENGTHS:
            for length in lengths:
                of_length = [pair for pair in measured if len(pair[0].documents) == length]
                rows[f"documents: {length}"] = by_row(("", m) for _, m in of_length)["all"]
        section = {
            row: {name: share(values) for name, values in measures.items()}
            for row, measures in rows.items()
        }
        answers = [
            {
                "question": question.question,
                "documents": len(question.documents),
                "reference": question.answer,
                "answer": text,
                "scores": {name or "accuracy": float(value) for name, value in measures.items()},
            }
            for text, (question, measures) in zip(texts, measured, strict=True)
        ]
        return Evaluated({self.section: section}, answers)

    def quick(self, ask: AskModels) -> tuple[float, dict[str, float]]:
        """Return (accuracy, numbers): accuracies by task and "all", and means of other measures."""
        measured = self._measure(self._answer(ask))
        outcomes = by_row((question.task, measures) for question, measures in measured)
        accuracy, *other_measures = outcomes["all"]
        numbers = {task: share(measures[accuracy])[0] for task, measures in outcomes.items()}
        return numbers["all"], numbers | {n: share(outcomes["all"][n])[0] for n in other_measures}

    def _answer(self, ask: AskModels) -> list[str]:
        """Answer the questions; "" where a prompt is over the cap."""
        make_prompt = self.make_prompt or self._responder_prompt
        prompts = [make_prompt(question) for question in self.questions]
        # Greedy: two evaluations of a run differ by the weights alone.
        replies = ask("responder", prompts, temperature=0.0)
        # A refused prompt counts as wrong. Leaving it out would favor a policy with a short
        # context.
        return ["" if reply is None else reply.texts[0] for reply in replies]

    def _measure(self, texts: Sequence[str]) -> list[tuple[Question, Mapping[str, float]]]:
        pairs = zip(self.questions, texts, strict=True)
        return [(question, self.measure(text, question, self.extract)) for question, text in pairs]

    def _responder_prompt(self, question: Question) -> str:
        return self.prompts.responder(question.task, question.documents, question.question)
