"""Held-out evaluation of SPELL's roles, on given questions or in the tiny world with its oracle.

1. Responder: greedy answers to questions. In the tiny world by kind and number of documents, and
   with the letters that it prefers.
2. Verifier: greedy verdicts on labeled pairs of answers, by what makes a pair hard.
3. Questioner: sampled questions: the share that is accepted; in the tiny world also without and
   with a remembered question, and the shares that the documents answer and that have a right
   reference.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spell_jax.algorithms.base import AlgorithmContext
from spell_jax.algorithms.held_out import (
    GREEDY,
    Exam,
    ExamPrompt,
    HeldOut,
    Share,
    Tables,
    mean_outcome,
    on_questions,
    score_answer,
)
from spell_jax.algorithms.spell.config import QuestionsConfig
from spell_jax.data import tiny_world as world
from spell_jax.data.clusters import LETTERS
from spell_jax.data.config import TinyEvaluationConfig
from spell_jax.data.questions import Question
from spell_jax.question_sets import tiny_world_rows
from spell_jax.selfplay import parsing, rules
from spell_jax.selfplay.memory import Entry

_SEED = 0  # of the letters that multiple-choice questions shall have


class Proposal(NamedTuple):
    """A questioner's prompt, and what an oracle measures of an accepted question."""

    rows: Sequence[str]
    task: str
    prompt: str
    judge: Callable[[parsing.Parsed], Mapping[str, float]] = lambda _: {}


@dataclasses.dataclass(frozen=True)
class RoleExams:
    """Makers of exams of the three roles, for given questions and for worlds with an oracle."""

    config: QuestionsConfig
    context: AlgorithmContext

    def make_prompt(self, question: Question) -> str:
        documents = self.config.as_read(question.documents)
        return self.context.prompts.responder(question.task, documents, question.question)

    def responder(
        self,
        questions: Iterable[Question],
        rows: Callable[[Question], Sequence[str]],
        measure: Callable[[str | None, Question], Mapping[str, float]],
        section: str = "responder accuracy, by documents",
        first_rows: Sequence[str] = (),
    ) -> Exam:
        """Make an exam of greedy answers; `measure` reads what a reply states as the answer."""

        def read(question: Question, text: str) -> Mapping[str, float]:
            answer = rules.extract_answer(text, question.task, self.config.extract)
            return measure(answer, question)

        exam_prompts = [
            ExamPrompt(rows(q), self.make_prompt(q), functools.partial(read, q)) for q in questions
        ]
        return Exam(section, exam_prompts, first_rows)

    def verifier(
        self, pairs: Iterable[tuple[str, str, int]], section: str = "verifier accuracy, by pair"
    ) -> Exam:
        """Make an exam of verdicts on pairs (column besides "all", prompt, right verdict)."""

        def measure(column: str, verdict: int, text: str) -> dict[str, float]:
            is_right = parsing.parse_verdict(text) == verdict
            return {"all": is_right, column: is_right}

        exam_prompts = [
            ExamPrompt(("",), prompt, functools.partial(measure, column, verdict))
            for column, prompt, verdict in pairs
        ]
        options = {**GREEDY, **self.config.verdict_options}
        return Exam(section, exam_prompts, role="verifier", options=options)

    def questioner(self, proposals: Iterable[Proposal]) -> Exam:
        """Make an exam of written questions: the share accepted, and measures of the oracle."""

        def measure(proposal: Proposal, text: str) -> dict[str, float]:
            written = self.config.parse_question(text, proposal.task, self.context.count_tokens)
            accepted = written.status == "accepted"
            return {"accepted": accepted, **(proposal.judge(written) if accepted else {})}

        exam_prompts = [
            ExamPrompt(p.rows, p.prompt, functools.partial(measure, p)) for p in proposals
        ]
        # Sampled at sampler.temperature, as training samples questions.
        options = self.config.questioner.options
        return Exam("questioner", exam_prompts, role="questioner", options=options)


def mean_of_rows(tables: Tables) -> tuple[float, dict[str, float]]:
    """Return (mean of the responder's rows, numbers): the rows, and a verifier's accuracy."""
    answers, *verdicts = tables.values()
    numbers = {
        row: mean_outcome([*itertools.chain(*columns.values())]) for row, columns in answers.items()
    }
    score = sum(numbers.values()) / len(numbers)
    shares = [number for number in numbers.values() if isinstance(number, Share)]
    if len(shares) == len(numbers):
        score = Share(score, sum(share.questions for share in shares))
    numbers["responder"] = score
    if verdicts:
        numbers["verifier"] = mean_outcome(verdicts[0][""]["all"])
    return score, numbers


def evaluate_questions(
    exams: RoleExams, questions: Sequence[Question], questioner_tasks: Sequence[str]
) -> HeldOut:
    """Make the evaluation on given questions; the questioner writes for `questioner_tasks`."""
    config, prompts = exams.config, exams.context.prompts

    def make_role_exams() -> Iterator[Exam]:
        # No model writes these pairs: their labels are as right as the questions' answers.
        pairs = (
            (kind, prompts.verifier(question.question, answer, question.answer), verdict)
            for question in questions
            for kind, verdict, answers in (
                ("same", 1, question.right[1:]),
                ("different", 0, question.wrong),
            )
            for answer in answers[:1]
        )
        if config.has_verifier:
            yield exams.verifier(pairs)
        if questioner_tasks:
            yield exams.questioner(propose())

    def propose() -> Iterator[Proposal]:
        rng = np.random.default_rng(_SEED)
        for task in questioner_tasks:
            # Several questions may have the same documents, after which the prompts would be equal.
            for documents in dict.fromkeys(question.documents for question in questions):
                letter = LETTERS[rng.integers(4)] if task == "multiple_choice" else None
                # The largest m of training, and the first documents: every evaluation shows the
                # same text.
                shown = documents[: max(config.questioner.documents)]
                prompt = prompts.questioner(task, shown, (), letter)
                yield Proposal(("all", task), task, prompt)

    measure = functools.partial(score_answer, extract=config.extract)
    return on_questions(questions, exams.make_prompt, measure, role_exams=make_role_exams)


def evaluate_tiny_world(exams: RoleExams, sizes: TinyEvaluationConfig) -> HeldOut:
    """Make the evaluation; ValueError if the world has too few documents for the questioner."""
    documents = exams.config.questioner.documents
    # One known question has m documents, and the questioner reads m new documents too.
    if 2 * max(documents) > len(world.NAMES):
        raise ValueError(
            f"algorithm.questioner.documents = {documents}: the tiny world has "
            f"{len(world.NAMES)} documents, of which a questioner with a known question reads "
            "twice as many"
        )
    return HeldOut(functools.partial(_make_exams, exams, sizes), summarize=mean_of_rows)


def _make_exams(exams: RoleExams, sizes: TinyEvaluationConfig, is_quick: bool) -> Iterator[Exam]:
    def rows(question: Question) -> tuple[str, ...]:
        kind = world.question_kind(question.question)
        return (f"{kind}/{len(question.documents)}",) if is_quick else (kind, "all")

    def measure(answer: str | None, question: Question) -> dict[str, bool]:
        is_right = is_true(answer, question.answer, question.task)
        return {str(len(question.documents)): is_right}

    first_rows = () if is_quick else (*world.KINDS, "all")
    for documents in sizes.quick_documents if is_quick else sizes.documents:
        count = sizes.quick_per_cell if is_quick else sizes.per_cell
        cells = [make_questions(documents, kind, count, sizes.seed) for kind in world.KINDS]
        yield exams.responder(itertools.chain(*cells), rows, measure, first_rows=first_rows)
    if not is_quick:
        yield exams.responder(
            make_questions(_usual_documents(sizes), "choice", sizes.per_cell, sizes.seed),
            lambda question: (f"{len(question.documents)} documents",),
            lambda answer, _: {letter: answer == letter for letter in LETTERS},
            "multiple choice, share of each letter among answers",
        )
        yield exams.verifier(_pairs(exams, sizes))
        yield exams.questioner(_proposals(exams, sizes))


def _usual_documents(sizes: TinyEvaluationConfig) -> int:
    """Return the number of documents where only one is evaluated: the second, as in training."""
    return sizes.documents[min(1, len(sizes.documents) - 1)]


def _pairs(exams: RoleExams, sizes: TinyEvaluationConfig) -> Iterator[tuple[str, str, int]]:
    # Streams of their own for verifier (1) and questioner (2): sizes of one part leave the other
    # part's questions alone.
    rng = np.random.default_rng([sizes.seed, 1])
    for _ in range(2 * sizes.per_cell):
        row, kind = tiny_world_rows.verifier_row(exams.context.prompts, rng, len(world.CITIES))
        yield kind, row.prompt, parsing.parse_verdict(row.completion)


def _proposals(exams: RoleExams, sizes: TinyEvaluationConfig) -> Iterator[Proposal]:
    """Propose questions after m new documents, or after m new and m of a known question."""
    rng = np.random.default_rng([sizes.seed, 2])
    m = max(exams.config.questioner.documents)
    kind_of_task = {task: kind for kind, task in reversed(world.TASK_OF_KIND.items())}
    for has_known in (False, True) if exams.config.examines_known else (False,):
        for task in (task for task in reversed(kind_of_task) for _ in range(sizes.per_cell)):
            shown = 2 * m if has_known else m
            # Generated with the usual number and cut: in training the questioner reads a part of
            # a cluster.
            documents = world.make_documents(rng, max(shown, _usual_documents(sizes)))[:shown]
            history = []
            if has_known:
                kind = kind_of_task[task]
                text, _, answer = tiny_world_rows.responder_question(rng, documents[:m], kind)
                history.append(Entry((), text, answer))
            letter = LETTERS[rng.integers(4)] if task == "multiple_choice" else None
            prompt = exams.context.prompts.questioner(task, documents, history, letter)
            # Not "all": a mean over tasks with and without a known question has no meaning.
            row = f"{task}, one known" if has_known else task
            judge = functools.partial(_judge, task=task, documents=documents)
            yield Proposal((row,), task, prompt, judge)


def _judge(written: parsing.Parsed, task: str, documents: Sequence[str]) -> dict[str, float]:
    """Return whether the documents answer a written question and, if so, the reference is right."""
    truth = true_answer(written.question, task, documents)
    if truth is None:
        return {"answerable, of accepted": False}
    is_right = is_true(written.answer, truth, task)
    return {"answerable, of accepted": True, "reference right, of answerable": is_right}


def make_questions(
    documents: int, kind: str, count: int, seed: int = TinyEvaluationConfig.seed
) -> list[Question]:
    """Generate `count` questions of one of world.KINDS, each about its own documents.

    Answers are canonical texts, numbers or letters.
    """
    questions = []
    for index in range(count):
        # A seed per question: a validation asks the first questions of the report, whatever the
        # sizes are.
        rng = np.random.default_rng([seed, documents, world.KINDS.index(kind), index])
        sampled = None
        # Few documents may allow no two-hop question.
        while sampled is None or sampled.kind != kind:
            texts = world.make_documents(rng, documents)
            text, sampled, answer = tiny_world_rows.responder_question(rng, texts, kind)
        truth = answer if kind == "choice" else world.canonical(answer)
        questions.append(Question(world.TASK_OF_KIND[kind], texts, text, truth))
    return questions


def true_answer(question: str, task: str, documents: Sequence[str]) -> str | None:
    """Return the oracle's answer to a question that a model wrote; None if there is none."""
    if task == "multiple_choice":
        return world.oracle_choice(question, documents)
    return world.oracle(question, documents)


def is_true(answer: str | None, truth: str, task: str) -> bool:
    """Return whether an extracted answer equals the true answer, in any surface form."""
    if answer is None:
        return False
    if task == "financial_math":
        return rules.same_answer(answer, truth, task)
    if task == "multiple_choice":
        return answer == truth
    return world.canonical(answer) == truth
