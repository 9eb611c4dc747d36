"""Prompts of a given length in tokens that hide needles; shared by RULER and the needle grid.

`Names` samples the keys and values of needles. `Pile` takes pieces of text (sentences, documents)
one by one and counts the tokens of each once. `insert_needles` puts needles between pieces. `fit`
finds a prompt of 0.95 to 1 times the maximum length, usually at the first attempt.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import pathlib
import re
import textwrap
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from spell_jax.evaluation.benchmarks.base import BenchmarkItem
from spell_jax.selfplay import rules

# Minimum prompt length as a fraction of the room. A score must not be credited to a longer context
# than the policy has read.
SHORTEST = 0.95
NOISE = "The river runs slow. The wind is mild. The road is long. We walk on. Home is not far."

# 256 adjectives x 256 nouns are 65,536 names, enough for a haystack of a million tokens made of
# needles, 18 tokens each. No adjective is the end of another and no noun is the beginning of
# another, so no name is part of another.
_WORDS = pathlib.Path(__file__).with_name("words.txt").read_text().split("\n\n")
ADJECTIVES, NOUNS = (tuple(words.split()) for words in _WORDS)


class Names:
    """Random names without repetition that do not occur in `text`."""

    def __init__(self, rng: np.random.Generator, text: str = ""):
        self._text = text
        self._used_names: set[str] = set()
        self._order = iter(rng.permutation(len(ADJECTIVES) * len(NOUNS)).tolist())
        self._makers: dict[str, Callable[[], str]] = {
            "word": self._word,
            "number": lambda: str(rng.integers(10**6, 10**7)),
            "uuid": lambda: str(uuid.UUID(bytes=rng.bytes(16), version=4)),
            "code": lambda: letters(rng, 6),
            "variable": lambda: letters(rng, 5).upper(),
        }

    def sample(self, kind: str) -> str:
        """Sample a "word", "number" (7 digits), "uuid", "code" (6 letters) or "variable" (5)."""
        # A name that occurs twice would have two values, and a name of the text is no needle.
        while (name := self._makers[kind]()) in self._used_names or name in self._text:
            pass
        self._used_names.add(name)
        return name

    def _word(self) -> str:
        if (index := next(self._order, None)) is None:
            raise ValueError(f"length: needs more than the {len(ADJECTIVES) * len(NOUNS)} names")
        return f"{ADJECTIVES[index // len(NOUNS)]}-{NOUNS[index % len(NOUNS)]}"


def letters(rng: np.random.Generator, count: int) -> str:
    """Return a random string of `count` letters a to z."""
    return bytes(rng.integers(ord("a"), ord("z") + 1, count).tolist()).decode()


@dataclasses.dataclass(frozen=True)
class HaystackSource:
    """Maximum length, token counters and prose for building prompts."""

    length: int  # maximum number of tokens in a prompt and its answer
    count: Callable[[str], int]  # tokens of a prompt as the policy receives it
    cost: Callable[[str], int]  # tokens of a piece of a prompt; cached
    text: str = ""  # prose

    def prose(self, rng: np.random.Generator) -> Pile:
        """Pile up sentences from a random start, cyclic; raise ValueError without sentences."""
        sentences = split_sentences(self.text)
        if not sentences:
            raise ValueError("text: has no words; the haystack is made of its sentences")
        # A random start: prompts of one length must not all begin with the same page.
        start = int(rng.integers(len(sentences)))
        cyclic = itertools.chain(sentences[start:], itertools.cycle(sentences))
        return self.pile(cyclic, before=" ")

    def noise(self) -> Pile:
        return self.pile(itertools.repeat(NOISE), after="\n")

    def pile(self, pieces: Iterable[str], before: str = "", after: str = "") -> Pile:
        """Pile up pieces, each counted with its separator: " The" is one token of Qwen."""
        return Pile((piece, self.cost(before + piece + after)) for piece in pieces)


class Pile:
    """(text, tokens) pairs of an iterator, kept so that each `take` sees the same pieces."""

    # Pieces tried for the gap that remains when the next piece no longer fits.
    _TRIED = 32

    def __init__(self, pieces: Iterator[tuple[str, int]]):
        self._unread = pieces
        self._pieces: list[tuple[str, int]] = []
        self._ends = [0]  # cumulative tokens up to each piece

    def take(self, budget: int) -> list[tuple[str, int]]:
        """Return (piece, tokens) pairs from the first on, with at most `budget` tokens in total."""
        self._read_while(lambda: self._ends[-1] <= budget)
        count = bisect.bisect_right(self._ends, budget) - 1
        self._read_while(lambda: len(self._pieces) < count + self._TRIED)
        pairs, room = self._pieces[:count], budget - self._ends[count]
        for piece, cost in self._pieces[count : count + self._TRIED]:
            if cost <= room:
                pairs.append((piece, cost))
                room -= cost
        return pairs

    def _read_while(self, condition: Callable[[], bool]) -> None:
        while condition() and (piece := next(self._unread, None)) is not None:
            self._pieces.append(piece)
            # At least one token per piece, or pieces without tokens would be read without end.
            self._ends.append(self._ends[-1] + max(piece[1], 1))


@functools.cache
def split_sentences(text: str) -> tuple[str, ...]:
    """Split a text into sentences with single spaces, and long sentences into pieces."""
    # 400 characters are about 100 tokens: half of the 5 % that a prompt of 4,096 tokens may lack.
    wrap = functools.partial(textwrap.wrap, width=400, break_on_hyphens=False)
    sentences = re.split(r"(?<=[.!?])\s+|(?<=[。！？])", text)
    return tuple(piece for sentence in sentences for piece in wrap(sentence))


def insert_needles(
    pieces: Sequence[tuple[str, int]], needles: Sequence[str], depths: Sequence[float]
) -> list[str]:
    """Insert the needles between the pieces at their depths, and return all texts in order.

    Pieces are (text, number of tokens) pairs. A depth in [0, 1] is a fraction of all tokens: 0 is
    before all, 1 is after all. A needle is placed at the last boundary of pieces up to its depth.
    """
    ends = list(itertools.accumulate((cost for _, cost in pieces), initial=0))
    texts = [piece for piece, _ in pieces]
    # Insert from the last to the first, so that an insertion does not shift positions used later.
    by_depth = sorted(zip(depths, needles, strict=True), key=lambda pair: pair[0])
    for depth, needle in reversed(by_depth):
        texts.insert(bisect.bisect_right(ends, depth * ends[-1]) - 1, needle)
    return texts


# Tokens of filling, summed over its pieces -> question without an id; 0 gives the shortest prompt.
Make = Callable[[int], BenchmarkItem]


def fit(
    make_item: Make, source: HaystackSource, id: str, answer: int, **fields: Any
) -> BenchmarkItem:
    """Find a question with a prompt of `SHORTEST` to 1 times the room for prompts, in tokens.

    The room is the length less `answer`, the number of tokens that a policy may answer with. So a
    length of 131,072 fits a policy of as many positions. The question gets `id`, `fields`, and the
    fields "length" (the maximum) and "tokens" (of the prompt). Raises ValueError if the shortest
    prompt is too long, or there is not enough filling.
    """
    room = source.length - answer
    frame = source.count(make_item(0).prompt)
    if frame > room:
        raise ValueError(
            f"length = {source.length}: must be at least {frame + answer}, for the prompt without "
            f"filling and {answer} tokens of the answer"
        )
    budget, tokens = room - frame, frame
    # One attempt usually suffices. Tokenizers that add a token to every text (a start token, a
    # space) need another.
    for _ in range(8):
        item = make_item(budget)
        tokens = source.count(item.prompt)
        if SHORTEST * room <= tokens <= room:
            fields |= {**item.fields, "length": source.length, "tokens": tokens}
            return dataclasses.replace(item, id=id, fields=fields)
        # In proportion to the overshoot, and 1 % less, because sums of pieces and whole prompts
        # differ by some tokens.
        budget = int(0.99 * budget * (room - frame) / max(tokens - frame, 1))
    raise ValueError(
        f"length = {source.length}: all the filling makes a prompt of only {tokens} tokens"
    )


def extract(text: str, item: BenchmarkItem) -> str | None:
    """Extract the answer after the thinking; None if it is empty."""
    return rules.visible_text(text) or None


def match_all(text: str, item: BenchmarkItem) -> float:
    """Return the fraction of references in the answer, ignoring case (RULER's string_match_all)."""
    answer = (extract(text, item) or "").lower()
    return sum(reference.lower() in answer for reference in item.references) / len(item.references)


def match_part(text: str, item: BenchmarkItem) -> float:
    """Match any reference in the answer, ignoring case: 1.0 or 0.0 (RULER's string_match_part)."""
    return float(match_all(text, item) > 0)
