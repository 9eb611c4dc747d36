"""Held-out evaluation: the interface, and exams of a policy's roles with a report of means."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from spell_jax.algorithms.base import AlgorithmContext
from spell_jax.data.config import DataConfig
from spell_jax.data.questions import Question
from spell_jax.rollout.replies import AskModels
from spell_jax.runtime import intervals
from spell_jax.runtime.finite import is_finite
from spell_jax.runtime.intervals import Estimate
from spell_jax.selfplay import rules

# {section: {row: {column: mean with its 95 % interval}}}
Report = dict[str, dict[str, dict[str, Estimate]]]
# {section: {row: {column: values}}}
Tables = dict[str, dict[str, dict[str, list[float]]]]

# Greedy: two evaluations of a run differ by the weights alone.
GREEDY: Mapping[str, Any] = {"temperature": 0.0}
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
        """Return (score, larger is better; numbers by name), cheap enough for every few steps.

        A number that is a Share gets an interval in the report.
        """
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


class Share(float):
    """The share of questions that got a right answer, and the number of all questions."""

    questions: int

    def __new__(cls, mean: float, questions: int) -> Share:
        share = super().__new__(cls, mean)
        share.questions = questions
        return share

    def __getnewargs__(self) -> tuple[float, int]:  # type: ignore[override]
        return float(self), self.questions


def mean_outcome(outcomes: Sequence[bool | float]) -> float:
    """Return the mean of the questions' outcomes, a Share if the outcomes are bools."""
    if not outcomes:
        raise ValueError("a mean of no outcomes")
    mean = sum(outcomes) / len(outcomes)
    return Share(mean, len(outcomes)) if _are_right_or_wrong(outcomes) else mean


def _are_right_or_wrong(outcomes: Sequence[bool | float]) -> bool:
    # The types, not the values: before training an F1 may be 0 for every question, and it would
    # have the interval of a share at first and another one later.
    return all(isinstance(outcome, bool) for outcome in outcomes)


class ExamPrompt(NamedTuple):
    """A prompt of an exam, and how its reply counts."""

    rows: Sequence[str]  # rows of the table in which the reply counts
    text: str
    # From the reply's text to values by column: bools in columns of right or wrong answers, which
    # have a Wilson interval, else numbers.
    measure: Callable[[str], Mapping[str, bool | float]]
    question: Question | None = None  # the question of an answer that is recorded


class Exam(NamedTuple):
    """Prompts of one role, in one call. Exams of the same section fill one table."""

    section: str
    prompts: Sequence[ExamPrompt]
    first_rows: Sequence[str] = ()  # other rows follow in the order of the prompts
    role: str = "responder"
    options: Mapping[str, Any] = GREEDY  # of the call (replies.Ask)


def to_report(tables: Tables) -> Report:
    """Return the mean of the values in each cell."""
    return {
        section: {
            row: {column: estimate_outcome(values) for column, values in columns.items()}
            for row, columns in table.items()
        }
        for section, table in tables.items()
    }


def estimate_outcome(outcomes: Sequence[bool | float]) -> Estimate:
    """Return the mean of the outcomes, with a Wilson interval if they are bools."""
    return intervals.estimate(outcomes, is_share=_are_right_or_wrong(outcomes))


def accuracy_by_row(tables: Tables) -> tuple[float, dict[str, float]]:
    """Return (accuracy, numbers): the first column by row, and means of the others in row "all".

    ValueError if the tables are not one with a row "all".
    """
    table, *other_tables = tables.values() or [{}]
    if other_tables or not table.get("all"):
        raise ValueError(
            f"quick evaluation: has the sections {[*tables]}; must have one, with answers in a row "
            "'all', or HeldOut.summarize must make the score"
        )
    accuracy, *other_measures = table["all"]
    numbers = {row: mean_outcome(columns[accuracy]) for row, columns in table.items()}
    return numbers["all"], numbers | {n: mean_outcome(table["all"][n]) for n in other_measures}


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out evaluation of a policy by exams: about given questions, or by a world's oracle.

    Attributes:
      exams: function that makes the exams of `full` or, for True, of `quick`.
      report: function from the tables of `full` to its report.
      summarize: function from the tables of `quick` to (score, numbers by name).
    """

    exams: Callable[[bool], Iterable[Exam]]
    report: Callable[[Tables], Report] = to_report
    summarize: Callable[[Tables], tuple[float, dict[str, float]]] = accuracy_by_row

    def full(self, ask: AskModels) -> Evaluated:
        tables, answers = _hold(self.exams(False), ask)
        return Evaluated(self.report(tables), answers)

    def quick(self, ask: AskModels) -> tuple[float, dict[str, float]]:
        return self.summarize(_hold(self.exams(True), ask)[0])


def _hold(exams: Iterable[Exam], ask: AskModels) -> tuple[Tables, list[dict[str, Any]]]:
    """Ask all prompts; return the tables of sections with prompts, and the recorded answers.

    ValueError for a measure that is no finite number.
    """
    tables: Tables = {}
    answers = []
    for exam in exams:
        replies = ask(exam.role, [prompt.text for prompt in exam.prompts], **exam.options)
        for prompt, reply in zip(exam.prompts, replies, strict=True):
            # A prompt over the cap counts as the answer "". Leaving it out would favor a policy
            # with a short context.
            text = "" if reply is None else reply.texts[0]
            measures = prompt.measure(text)
            table = tables.setdefault(exam.section, {row: {} for row in exam.first_rows})
            for column, value in measures.items():
                if not is_finite(np.asarray(value).item()):
                    raise ValueError(
                        f"exam {exam.section!r}: {column!r} = {value!r} for the answer "
                        f"{text!r:.80} to the prompt {prompt.text!r:.80}; must be a finite number"
                    )
            for row, column in itertools.product(prompt.rows, measures):
                table.setdefault(row, {}).setdefault(column, []).append(measures[column])
            if prompt.question:
                answers.append(_record(text, prompt.question, measures))
    return tables, answers


def _record(text: str, question: Question, measures: Mapping[str, bool | float]) -> dict[str, Any]:
    return {
        "question": question.question,
        "documents": len(question.documents),
        "reference": question.answer,
        "answer": text,
        "scores": {name or "accuracy": float(value) for name, value in measures.items()},
    }


def score_answer(
    text: str, question: Question, extract: str = "lenient"
) -> dict[str, bool | float]:
    """Return measures of an answer, each the best over the question's right answers.

    Exact match and the words' F1 are among the measures if the question lists all right answers.
    """
    task, references = question.task, question.right
    is_right = any(rules.score(text, answer, task, extract=extract) == 1 for answer in references)
    scores: dict[str, bool | float] = {"": is_right}
    # Exact match needs all right answers: a right text that the question does not list would count
    # as wrong.
    if question.answers:
        prediction = rules.extract_answer(text, task, extract) or ""
        scores["exact match"] = any(
            rules.same_answer(prediction, answer, task, extract) for answer in references
        )
        scores["F1"] = max(
            rules.score_answer(prediction, answer, task, "f1", extract) for answer in references
        )
    return scores


def on_questions(
    questions: Sequence[Question],
    make_prompt: Callable[[Question], str],
    measure: Callable[[str, Question], Mapping[str, bool | float]] = score_answer,
    section: str = "responder accuracy (rule)",
    role_exams: Callable[[], Iterable[Exam]] = lambda: (),
) -> HeldOut:
    """Make the evaluation of greedy answers to given questions; it records the answers.

    Rows are tasks, in the report also numbers of documents if few different numbers occur.
    `measure` makes measures by name from (answer, question), accuracy first, as in ExamPrompt;
    `role_exams` makes the other roles' exams of the report.
    """
    lengths = sorted({len(question.documents) for question in questions})

    def make_exams(is_quick: bool) -> Iterator[Exam]:
        by_length = not is_quick and 1 < len(lengths) <= MOST_LENGTHS
        first_rows = ["all", *dict.fromkeys(question.task for question in questions)]
        first_rows += [f"documents: {length}" for length in lengths if by_length]

        def make_exam_prompt(question: Question) -> ExamPrompt:
            rows = ["all", question.task]
            if by_length:
                rows.append(f"documents: {len(question.documents)}")
            text = make_prompt(question)
            return ExamPrompt(rows, text, lambda answer: measure(answer, question), question)

        yield Exam(section, [make_exam_prompt(question) for question in questions], first_rows)
        if not is_quick:
            yield from role_exams()

    return HeldOut(make_exams)
