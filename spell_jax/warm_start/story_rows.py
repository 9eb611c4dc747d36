"""Demonstrations of document reconstruction on tiny stories: its warm start.

A row works the order out or guesses it. Who works it out names for each gap who holds the letter
then, and the option that says so. Who guesses thinks nothing, and boxes the letters in any order.
Their proportions are what reinforcement can still teach: of few options most rows work it out, of
many most guess, so that what the tuned policy does most often is to guess, and what it does now and
then is rewarded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from spell_jax.data import tiny_stories
from spell_jax.selfplay import puzzles
from spell_jax.selfplay.prompts import Prompts
from spell_jax.warm_start.demonstrations import Row

TASK = "reconstruction"


@dataclasses.dataclass(frozen=True)
class StoryMixture:
    """What the demonstrations hold; every share is a probability.

    Attributes:
      lines: a story has one of these numbers of lines.
      options: values of K...
      shares: ...the share of rows with each...
      guessed: ...and the share of these that guess.
    """

    lines: tuple[int, ...] = (5, 6, 7)
    options: tuple[int, ...] = (2, 3, 4)
    shares: tuple[float, ...] = (0.4, 0.3, 0.3)
    guessed: tuple[float, ...] = (0.35, 0.6, 0.65)


def rows(prompts: Prompts, mixture: StoryMixture, seed: int, start: int = 0) -> Iterator[Row]:
    """An endless stream of demonstrations; row i depends on (seed, i) alone."""
    index = start
    while True:
        yield _row(prompts, mixture, np.random.default_rng([seed, index, 6]))
        index += 1


def _row(prompts: Prompts, mixture: StoryMixture, rng: np.random.Generator) -> Row:
    kind = rng.choice(len(mixture.options), p=np.asarray(mixture.shares) / sum(mixture.shares))
    story = tiny_stories.make_story(rng, int(rng.choice(mixture.lines)))
    shortest = tiny_stories.SHORTEST_LINE
    puzzle, reason = puzzles.make_puzzle(rng, story, mixture.options[kind], shortest, len(story))
    assert puzzle is not None, reason
    order, thought = puzzle.truth, _thought(puzzle)
    if rng.random() < mixture.guessed[kind]:
        order, thought = tuple(rng.permutation(puzzle.truth).tolist()), ""
    prompt = prompts.reconstruction(puzzle.document, puzzle.options)
    completion = f"<think>{thought}</think>\\boxed{{{','.join(order)}}}"
    return Row(prompt, completion, "responder", TASK)


def _thought(puzzle: puzzles.Puzzle) -> str:
    """For each gap its number, who has the letter, and the option that says so.

    In tokens: what stands in the gap's name, what stands before the gap, what opens an option.
    """
    holders = [puzzle.options[letter].split()[0] for letter in puzzle.truth]
    return "".join(
        f" {number} {holder}({letter})"
        for number, (holder, letter) in enumerate(zip(holders, puzzle.truth, strict=True), 1)
    )
