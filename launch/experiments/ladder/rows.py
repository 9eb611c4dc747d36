"""Demonstrations of the ladder world (source): shallow questions, and a thin tail of deeper ones.

A responder walks the chain: for each hop, the relation and the person's line. A questioner writes
no thought: its own reference is a guess, which the frozen reader replaces.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import numpy as np

from spell_jax.launch.experiments.ladder import world
from spell_jax.question_sets.rows import Row, seeded_rows
from spell_jax.selfplay.memory import Entry
from spell_jax.selfplay.prompts import Prompts

TASK = "general_qa"
_STREAM = 8  # separates the random stream of these rows from the streams of other generated rows


@dataclasses.dataclass(frozen=True)
class LadderMixture:
    """Composition of the ladder world's demonstrations; every share is a probability."""

    questioner: float = 0.3
    verifier: float = 0.15  # the responder has the rest
    documents: tuple[int, ...] = (9,)  # possible numbers of documents
    shallow: tuple[int, ...] = (1, 2)  # depths of most rows, of all roles
    # Share of deeper rows, up to depth `deepest`. Without deeper rows nothing is rewarded: in an
    # earlier version of the world no right answer of depth 3 or more was sampled (0 of 624). In
    # trials the start solved .98 of depth 4 with .12, and .66 with .09 (docs/ladder.md).
    deeper: float = 0.09
    deepest: int = 8
    history: float = 0.6  # questioner rows with one or two known questions in the prompt
    # Share of rows with a history in which the question adds one hop to the last known question,
    # about the same person.
    one_more: float = 0.6


def demonstrations(
    prompts: Prompts, *, seed: int, start: int = 0, mixture: LadderMixture = LadderMixture()
) -> Iterator[Row]:
    """Yield endless demonstrations of the ladder world; row i depends on (seed, i) alone."""

    def make_row(rng: np.random.Generator) -> Row:
        documents = world.make_documents(rng, int(rng.choice(mixture.documents)))
        at, depth = rng.random(), _sample_depth(rng, mixture)
        if at < mixture.questioner:
            return _questioner_row(prompts, mixture, rng, documents, depth)
        question = world.sample_question(rng, documents, depth)
        if at < mixture.questioner + mixture.verifier:
            return verifier_row(prompts, rng, question)
        # Whole lines. In a trial with the result of each hop alone, look-up was not learned: .19 of
        # the questions of depth 1 were answered (docs/ladder.md).
        thought = f"<think> {' '.join(question.evidence)}</think>"
        prompt = prompts.responder(TASK, documents, question.text)
        return Row(prompt, f"{thought}answer is {question.answer}", "responder", TASK)

    return seeded_rows(make_row, seed, start, _STREAM)


def _sample_depth(rng: np.random.Generator, mixture: LadderMixture) -> int:
    if rng.random() >= mixture.deeper:
        return int(rng.choice(mixture.shallow))
    # Each depth has half the rows of the depth before: a thin tail that fades, not a second peak.
    shares = 0.5 ** np.arange(mixture.deepest - max(mixture.shallow))
    return max(mixture.shallow) + 1 + int(rng.choice(len(shares), p=shares / shares.sum()))


def _questioner_row(
    prompts: Prompts,
    mixture: LadderMixture,
    rng: np.random.Generator,
    documents: tuple[str, ...],
    depth: int,
) -> Row:
    question = world.sample_question(rng, documents, depth)
    past_questions, fixed = [], depth
    if rng.random() < mixture.history:
        # Known questions are no deeper than the new one, which is to be harder.
        depths = [min(depth, _sample_depth(rng, mixture)) for _ in range(rng.integers(1, 3))]
        past_questions = [world.sample_question(rng, documents, earlier) for earlier in depths]
        if depth > 1 and rng.random() < mixture.one_more:
            past_questions[-1], fixed = world.shorten(rng, question.text, documents), 1
    history = [Entry((), earlier.text, earlier.answer) for earlier in past_questions]
    prompt = prompts.questioner(
        TASK, documents, history, cue=world.sample_cue(rng, question.text, fixed)
    )
    # A space in front: the name has the same token as inside a document.
    record = {"question": question.text, "answer": " " + question.answer}
    return Row(prompt, json.dumps(record, separators=(",", ":")), "questioner", TASK)


def verifier_row(prompts: Prompts, rng: np.random.Generator, question: world.LadderQuestion) -> Row:
    """Sample a verifier row: two answers, equal in half of the rows, and the verdict."""
    answer, same = question.answer, rng.random() < 0.5
    if not same:
        names, cities = world.NAMES, [city for city, _ in world.CITIES]
        # Of the same kind, a name or a city: otherwise the form alone would give the verdict away.
        wrong_answers = [
            value for value in (names if answer in names else cities) if value != answer
        ]
        answer = wrong_answers[rng.integers(len(wrong_answers))]
    prompt = prompts.verifier(question.text, answer, question.answer)
    return Row(prompt, "[[YES]]" if same else "[[NO]]", "verifier", TASK)
