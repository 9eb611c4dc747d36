"""Warm-start demonstrations of document reconstruction on tiny stories.

A row either solves the puzzle or guesses. A solving row names, for each gap, the person who holds
the letter at that point and the option that says so. A guessing row has an empty thought and boxes
the letters in random order. The proportions leave room for reinforcement learning: with few options
most rows solve the puzzle, with many most guess. The tuned policy thus mostly guesses, but
sometimes solves the puzzle, which is rewarded.
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
    """Composition of the demonstrations; every share is a probability.

    Attributes:
      lines: possible numbers of lines of a story.
      options: possible values of K, the number of options.
      shares: share of rows for each value of K.
      guessed: share of guessing rows for each value of K.
    """

    lines: tuple[int, ...] = (5, 6, 7)
    options: tuple[int, ...] = (2, 3, 4)
    shares: tuple[float, ...] = (0.4, 0.3, 0.3)
    guessed: tuple[float, ...] = (0.35, 0.6, 0.65)


def rows(prompts: Prompts, mixture: StoryMixture, seed: int, start: int = 0) -> Iterator[Row]:
    """Yield an endless stream of demonstrations; row i depends on (seed, i) alone."""
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
    """Return, for each gap, its number, the person who has the letter, and the option's letter.

    In tokens: the number in the gap's name, the name that stands before the gap, and the label that
    opens an option.
    """
    holders = [puzzle.options[letter].split()[0] for letter in puzzle.truth]
    return "".join(
        f" {number} {holder}({letter})"
        for number, (holder, letter) in enumerate(zip(holders, puzzle.truth, strict=True), 1)
    )
