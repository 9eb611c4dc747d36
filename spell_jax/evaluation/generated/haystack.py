"""Texts that hide something, cut to a number of tokens: what RULER and the needle grid share.

1. `Pile` draws pieces of text (sentences, documents) one by one and counts each once.
2. `bury` puts needles between pieces, at depths that are shares of the pieces' tokens.
3. `fit` finds the prompt that has 0.95 to 1 of the wanted length, mostly at the first attempt.
4. `match_all` and `match_part` score what is found.
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

# A prompt has at least this share of the tokens that were asked for.
SHORTEST = 0.95

# Said over and over where a haystack is to be nothing but noise.
NOISE = "The river runs slow. The wind is mild. The road is long. We walk on. Home is not far."


@dataclasses.dataclass(frozen=True)
class Source:
    """What prompts are made of.

    Attributes:
      length: tokens of a prompt, at most.
      count: prompt -> its tokens, as the policy is asked it.
      cost: piece of a prompt -> its tokens; each is counted once.
      text: prose as it was given, "" where there is none.
      sentences: the same in pieces.
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
        """The sentences from a random one on, over and over; ValueError where there are none."""
        if not self.sentences:
            raise ValueError("text: has no words; the haystack is made of its sentences")
        start = int(rng.integers(len(self.sentences)))
        around = itertools.chain(self.sentences[start:], itertools.cycle(self.sentences))
        return Pile(self.priced(around, before=" "))

    def noise(self) -> Pile:
        return Pile(self.priced(itertools.repeat(NOISE), behind="\n"))

    def priced(
        self, pieces: Iterable[str], before: str = "", behind: str = ""
    ) -> Iterator[tuple[str, int]]:
        """Each piece with its tokens, and those of what stands between it and the next.

        Which side that is on matters: of Qwen's tokens, " The" is one, and so is ".\\n".
        """
        return ((piece, self.cost(before + piece + behind)) for piece in pieces)


@dataclasses.dataclass(frozen=True)
class Draft:
    """An item that is not yet cut to its length; the attributes are those of `Item`."""

    prompt: str
    question: str
    references: tuple[str, ...]
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def item(self, id: str, **fields: Any) -> Item:
        return Item(id, self.prompt, self.question, self.references, {**self.fields, **fields})


class Pile:
    """Pieces that are drawn when they are needed, and kept: another cut draws them no more."""

    # Pieces that are tried for the gap that the first one too many leaves.
    _TRIED = 32

    def __init__(self, priced: Iterator[tuple[str, int]]):
        self._priced = priced
        self._pieces: list[tuple[str, int]] = []
        self._ends = [0]  # tokens up to each piece

    def take(self, budget: int) -> list[tuple[str, int]]:
        """(piece, its tokens) from the first on, of at most `budget` tokens together."""
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
        while wanted() and (drawn := next(self._priced, None)) is not None:
            self._pieces.append(drawn)
            self._ends.append(self._ends[-1] + max(drawn[1], 1))


def split_sentences(text: str) -> tuple[str, ...]:
    """Sentences with single spaces, the long ones in pieces of at most 400 characters.

    400 characters are a hundred tokens: half of what 4,096 tokens may be short of.
    """
    wrap = functools.partial(textwrap.wrap, width=400, break_on_hyphens=False)
    sentences = re.split(r"(?<=[.!?])\s+|(?<=[。！？])", text)
    return tuple(piece for sentence in sentences for piece in wrap(sentence))


def bury(
    pieces: Sequence[tuple[str, int]], needles: Sequence[str], depths: Sequence[float]
) -> list[str]:
    """The pieces with the needles among them, in the order of their depths.

    Args:
      pieces: (text, tokens).
      needles, depths: what to hide and where: behind the pieces that have at most this share of
        all tokens, 0 before all pieces and 1 behind all.
    """
    ends = list(itertools.accumulate((cost for _, cost in pieces), initial=0))
    texts = [piece for piece, _ in pieces]
    # From the last to the first, so that what is put in moves no place that is yet to be used.
    by_depth = sorted(zip(depths, needles, strict=True), key=lambda pair: pair[0])
    for depth, needle in reversed(by_depth):
        texts.insert(bisect.bisect_right(ends, depth * ends[-1]) - 1, needle)
    return texts


def fit(make: Callable[[int], Draft], source: Source) -> tuple[Draft, int]:
    """The draft with the most filling that the length allows, and its tokens.

    Args:
      make: tokens of filling, as the sum of its pieces -> draft. With 0 it is as short as can be.

    Raises:
      ValueError: even that is too long, or all there is to fill it with is not enough.
    """
    length = source.length
    frame = source.count(make(0).prompt)
    if frame > length:
        raise ValueError(f"length = {length}: must be at least {frame}, the prompt without filling")
    budget, tokens = length - frame, frame
    # A whole text has seldom more or fewer tokens than its pieces: one attempt is enough. Counts
    # that add a token to every text (a beginning, a space) need another.
    for _ in range(8):
        draft = make(budget)
        tokens = source.count(draft.prompt)
        if SHORTEST * length <= tokens <= length:
            return draft, tokens
        budget = int(0.99 * budget * (length - frame) / max(tokens - frame, 1))
    raise ValueError(f"length = {length}: the filling there is makes a prompt of {tokens} tokens")


def extract(text: str, item: Item) -> str | None:
    """What the answer says behind its thoughts; None where that is nothing."""
    return rules.visible_text(text) or None


def match_all(text: str, item: Item) -> float:
    """Share of the references that the answer says, in any case (RULER's string_match_all)."""
    said = (extract(text, item) or "").lower()
    return sum(wanted.lower() in said for wanted in item.references) / len(item.references)


def match_part(text: str, item: Item) -> float:
    """1 if the answer says one of the references, in any case, else 0 (string_match_part)."""
    said = (extract(text, item) or "").lower()
    return float(any(wanted.lower() in said for wanted in item.references))
