"""Prompts of a given length in tokens that hide needles; shared by RULER and the needle grid.

1. `Pile` takes pieces of text (sentences, documents) one by one and counts the tokens of each once.
2. `bury` puts needles between pieces, at depths given as fractions of the pieces' tokens.
3. `fit` finds a prompt of 0.95 to 1 times the maximum length, usually at the first attempt.
4. `match_all` and `match_part` score answers.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spell_jax.evaluation.benchmarks.base import Item
from spell_jax.selfplay import rules

# Minimum prompt length as a fraction of the maximum length.
SHORTEST = 0.95

# Repeated to fill a haystack of pure noise.
NOISE = "The river runs slow. The wind is mild. The road is long. We walk on. Home is not far."


@dataclasses.dataclass(frozen=True)
class Source:
    """Maximum length, token counters and prose for building prompts.

    Attributes:
      length: maximum number of tokens in a prompt.
      count: prompt -> number of tokens that the policy receives.
      cost: piece of a prompt -> number of tokens; cached.
      text: prose as given, or "".
      sentences: prose split into sentences.
    """

    length: int
    count: Callable[[str], int]
    cost: Callable[[str], int]
    text: str = ""
    sentences: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        length: int,
        count_tokens: Callable[[str], int],
        count_prompt: Callable[[str], int] | None = None,
        text: str = "",
    ) -> Source:
        count, cost = count_prompt or count_tokens, functools.cache(count_tokens)
        return cls(length, count, cost, text, split_sentences(text))

    def prose(self, rng: np.random.Generator) -> Pile:
        """Pile of sentences from a random start, cyclic; raises ValueError without sentences."""
        if not self.sentences:
            raise ValueError("text: has no words; the haystack is made of its sentences")
        start = int(rng.integers(len(self.sentences)))
        around = itertools.chain(self.sentences[start:], itertools.cycle(self.sentences))
        return Pile(self.priced(around, before=" "))

    def noise(self) -> Pile:
        return Pile(self.priced(itertools.repeat(NOISE), after="\n"))

    def priced(
        self, pieces: Iterable[str], before: str = "", after: str = ""
    ) -> Iterator[tuple[str, int]]:
        """Yield (piece, number of its tokens, including its separator).

        The side of the separator matters: in Qwen's vocabulary " The" is one token, and so is
        ".\\n".

        Args:
          pieces: texts without separators.
          before: separator before each piece.
          after: separator after each piece.
        """
        return ((piece, self.cost(before + piece + after)) for piece in pieces)


@dataclasses.dataclass(frozen=True)
class Draft:
    """A prompt with some amount of filling, not yet an `Item`; attributes as in `Item`."""

    prompt: str
    question: str
    references: tuple[str, ...]
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def item(self, id: str, **fields: Any) -> Item:
        return Item(id, self.prompt, self.question, self.references, {**self.fields, **fields})


class Pile:
    """Pieces of an iterator, read on demand and kept, so that each `take` sees the same pieces."""

    # Pieces tried for the gap that remains when the next piece no longer fits.
    _TRIED = 32

    def __init__(self, priced: Iterator[tuple[str, int]]):
        self._priced = priced
        self._pieces: list[tuple[str, int]] = []
        self._ends = [0]  # cumulative tokens up to each piece

    def take(self, budget: int) -> list[tuple[str, int]]:
        """(piece, tokens) pairs from the first on, with at most `budget` tokens in total."""
        self._draw(lambda: self._ends[-1] <= budget)
        whole = bisect.bisect_right(self._ends, budget) - 1
        self._draw(lambda: len(self._pieces) < whole + self._TRIED)
        taken, room = self._pieces[:whole], budget - self._ends[whole]
        for piece, cost in self._pieces[whole : whole + self._TRIED]:
            if cost <= room:
                taken.append((piece, cost))
                room -= cost
        return taken

    def _draw(self, wanted: Callable[[], bool]) -> None:
        while wanted() and (piece := next(self._priced, None)) is not None:
            self._pieces.append(piece)
            self._ends.append(self._ends[-1] + max(piece[1], 1))


def split_sentences(text: str) -> tuple[str, ...]:
    """Split a text into sentences with single spaces, and long ones into pieces.

    A piece has at most 400 characters, about a hundred tokens. That is half of the tokens by which
    a prompt of 4,096 tokens may be too short.
    """
    wrap = functools.partial(textwrap.wrap, width=400, break_on_hyphens=False)
    sentences = re.split(r"(?<=[.!?])\s+|(?<=[。！？])", text)
    return tuple(piece for sentence in sentences for piece in wrap(sentence))


def bury(
    pieces: Sequence[tuple[str, int]], needles: Sequence[str], depths: Sequence[float]
) -> list[str]:
    """Insert the needles between the pieces at their depths, and return all texts in order.

    Args:
      pieces: (text, number of tokens) pairs.
      needles: texts to insert.
      depths: position of each needle as a fraction of all tokens, in [0, 1]. A needle is placed at
        the last boundary of pieces up to there: 0 is before all pieces, 1 is after all.
    """
    ends = list(itertools.accumulate((cost for _, cost in pieces), initial=0))
    texts = [piece for piece, _ in pieces]
    # Insert from the last to the first, so that an insertion does not shift positions used later.
    by_depth = sorted(zip(depths, needles, strict=True), key=lambda pair: pair[0])
    for depth, needle in reversed(by_depth):
        texts.insert(bisect.bisect_right(ends, depth * ends[-1]) - 1, needle)
    return texts


def fit(make: Callable[[int], Draft], source: Source) -> tuple[Draft, int]:
    """Find a draft that fills `SHORTEST` to 1 times the maximum length.

    Args:
      make: tokens of filling, summed over its pieces -> draft; 0 gives the shortest draft.
      source: token counters and maximum length.

    Returns:
      The draft and the number of tokens in its prompt.

    Raises:
      ValueError: if the shortest draft is too long, or there is not enough filling.
    """
    length = source.length
    frame = source.count(make(0).prompt)
    if frame > length:
        raise ValueError(f"length = {length}: must be at least {frame}, the prompt without filling")
    budget, tokens = length - frame, frame
    # The count of a whole text seldom differs from the sum over its pieces, so one attempt usually
    # suffices. Tokenizers that add a token to every text (a start token, a space) need another.
    for _ in range(8):
        draft = make(budget)
        tokens = source.count(draft.prompt)
        if SHORTEST * length <= tokens <= length:
            return draft, tokens
        budget = int(0.99 * budget * (length - frame) / max(tokens - frame, 1))
    raise ValueError(f"length = {length}: the filling there is makes a prompt of {tokens} tokens")


def extract(text: str, item: Item) -> str | None:
    """Answer after its thinking; None if it is empty."""
    return rules.visible_text(text) or None


def match_all(text: str, item: Item) -> float:
    """Fraction of references in the answer, ignoring case (RULER's string_match_all)."""
    said = (extract(text, item) or "").lower()
    return sum(wanted.lower() in said for wanted in item.references) / len(item.references)


def match_part(text: str, item: Item) -> float:
    """1.0 if a reference is in the answer, ignoring case, else 0.0 (RULER's string_match_part)."""
    said = (extract(text, item) or "").lower()
    return float(any(wanted.lower() in said for wanted in item.references))
