"""Held-out evaluation of SPELL in the ladder world (algorithm.evaluation), against the oracle.

1. Responder: questions of each depth, by number of documents.
2. Verifier: pairs of answers; half of the pairs are equal.
3. Questioner: without and with a known question: the shares that are accepted, that the documents
   answer, that are deeper than the known one, and their mean depth.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from spell_jax.algorithms.base import AlgorithmContext
from spell_jax.algorithms.held_out import Exam, HeldOut
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.evaluation import Proposal, RoleExams, mean_of_rows
from spell_jax.data.config import DataConfig, TinyEvaluationConfig
from spell_jax.data.questions import Question
from spell_jax.launch.experiments.ladder import world
from spell_jax.launch.experiments.ladder.rows import TASK, verifier_row
from spell_jax.selfplay import parsing
from spell_jax.selfplay.memory import Entry


def held_out(config: SpellConfig, context: AlgorithmContext, data: DataConfig) -> HeldOut:
    """Make the evaluation, also of algorithms that train on given questions of the ladder world."""
    if data.validation:
        raise ValueError(f"data.validation = {data.validation!r}: must be '' in the ladder world")
    sizes = data.tiny.evaluation
    for field in ("documents", "quick_documents"):
        counts = getattr(sizes, field)
        if max(counts) > world.MOST_DOCUMENTS:
            raise ValueError(
                f"data.tiny.evaluation.{field} = {counts}: each must be 2 to "
                f"{world.MOST_DOCUMENTS} in the ladder world"
            )
    make_exams = functools.partial(_make_exams, RoleExams(config, context), sizes)
    return HeldOut(make_exams, summarize=mean_of_rows)


def _make_exams(exams: RoleExams, sizes: TinyEvaluationConfig, is_quick: bool) -> Iterator[Exam]:
    def rows(question: Question) -> tuple[str, ...]:
        depth = world.depth_of(question.question)
        return (f"depth/{depth}",) if is_quick else (f"depth {depth}", "all")

    def measure(answer: str | None, question: Question) -> dict[str, bool]:
        return {str(len(question.documents)): answer == question.answer}

    count = sizes.quick_per_cell if is_quick else sizes.per_cell
    first_rows = () if is_quick else (*(f"depth {depth}" for depth in world.DEPTHS), "all")
    for depth in world.DEPTHS:
        for documents in sizes.quick_documents if is_quick else sizes.documents:
            questions = _make_questions(sizes.seed, documents, depth, count)
            yield exams.responder(questions, rows, measure, first_rows=first_rows)
    yield exams.verifier(_pairs(exams, sizes, 2 * count), "verifier accuracy")
    if not is_quick:
        yield exams.questioner(_proposals(exams, sizes))


def _make_questions(seed: int, documents: int, depth: int, count: int) -> Iterator[Question]:
    for index in range(count):
        # A seed per question: `quick` asks the first questions of `full`.
        rng = np.random.default_rng([seed, documents, depth, index])
        cluster = world.make_documents(rng, documents)
        question = world.sample_question(rng, cluster, depth)
        yield Question(TASK, cluster, question.text, question.answer)


def _pairs(
    exams: RoleExams, sizes: TinyEvaluationConfig, count: int
) -> Iterator[tuple[str, str, int]]:
    rng = np.random.default_rng([sizes.seed, 1])
    for index in range(count):
        documents = world.make_documents(rng, max(sizes.documents))
        # Depths in turn: each has an equal share of the pairs.
        depth = world.DEPTHS[index % len(world.DEPTHS)]
        question = world.sample_question(rng, documents, depth)
        row = verifier_row(exams.context.prompts, rng, question)
        yield "all", row.prompt, parsing.parse_verdict(row.completion)


def _proposals(exams: RoleExams, sizes: TinyEvaluationConfig) -> Iterator[Proposal]:
    rng = np.random.default_rng([sizes.seed, 2])
    for known_depth in (0, *world.DEPTHS) if exams.config.examines_known else (0,):
        # Not "all": a mean over rows would mix known depths, to which "deeper" refers.
        row = f"one known, of depth {known_depth}" if known_depth else "none known"
        for _ in range(sizes.per_cell):
            documents = world.make_documents(rng, max(sizes.documents))
            history = []
            if known_depth:
                question = world.sample_question(rng, documents, known_depth)
                history.append(Entry((), question.text, question.answer))
            # As in training, where the prompt ends with a sampled relation (config.cues).
            cue = world.CUES[rng.integers(len(world.CUES))]
            prompt = exams.context.prompts.questioner(TASK, documents, history, cue=cue)
            judge = functools.partial(_judge, documents=documents, known_depth=known_depth)
            yield Proposal((row,), TASK, prompt, judge)


def _judge(written: parsing.Parsed, documents: Sequence[str], known_depth: int) -> dict[str, float]:
    if world.oracle(written.question, documents) is None:
        return {"answerable, of accepted": False}
    depth = world.depth_of(written.question)
    deeper = depth > known_depth
    return {"answerable, of accepted": True, "depth": depth, "deeper than the known one": deeper}
