"""Demonstrations of document reconstruction on tiny stories: its warm start.

A row either works the order out or guesses it. Who works it out names for each gap who has the
letter then, with the option's letter, then boxes the order. Who guesses thinks
nothing and boxes the letters in any order. How many do which is what self-play can still teach: of
few options most rows think, of many most guess, so that the best guess of the tuned policy is a
guess, and a thought is drawn often enough to be rewarded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from spell_jax.data import tiny_stories
from spell_jax.selfplay import puzzles
from spell_jax.selfplay.demonstrations import Row
from spell_jax.selfplay.prompts import Prompts

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
    guessed: tuple[float, ...] = (0.4, 0.65, 0.75)


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
    order, thought = puzzle.truth, [_found(puzzle, letter) for letter in puzzle.truth]
    if rng.random() < mixture.guessed[kind]:
        order, thought = tuple(rng.permutation(puzzle.truth).tolist()), []
    prompt = prompts.reconstruction(puzzle.document, puzzle.options)
    return Row(prompt, _completion(thought, order), "responder", TASK)


def _found(puzzle: puzzles.Puzzle, letter: str) -> str:
    """The person of an option with its letter, as a token that opens the option's line."""
    return f"{puzzle.options[letter].split()[1]}({letter})"


def _completion(thought: Sequence[str], order: Sequence[str]) -> str:
    said = f" {', '.join(thought)}" if thought else ""
    return f"<think>{said}</think>\\boxed{{{','.join(order)}}}"
