"""Puzzles from documents: paragraphs are taken out, and an order of options puts them back.

1. `make_puzzle` takes K paragraphs out. <gap 1>, <gap 2>, ... stand in their places, and the
   paragraphs are shuffled options with letters. The truth is their letters in order of the gaps.
2. `pose` makes one whose prompt is under the cap: of a long document, `cut_window` takes
   neighboring paragraphs first.
3. `parse_order` reads the letters in the last box of an answer.
4. `dense_reward` and `sparse_reward` compare them with the truth; `chance` is what guessing earns.
5. `options_of` says how many paragraphs the next puzzle of a run takes: by a mixture, sorted for
   the curriculum, or drawn.

Document reconstruction, sections 3.1 to 3.3, 5.2 and 5.6. No text is changed: a document whose gaps
are filled with the right options is the document that it was, white space and all.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spell_jax.data.clusters import BORDERS, CountTokens
from spell_jax.selfplay.rules import last_box, visible_text

LABELS = tuple("ABCDEFGH")  # of options
FEWEST_OPTIONS, MOST_OPTIONS = 2, len(LABELS)
GAP = re.compile(r"<gap \d+>")

# Why a text gives no puzzle.
HAS_GAPS = "has_gaps"  # it holds what looks like a gap
FEW_PARAGRAPHS = "few_paragraphs"  # not more than are to be taken out
FEW_OPTIONS = "few_options"  # too few of fit length that occur once
OVERLONG = "overlong"  # no part of it makes a prompt under the cap

_PASSES = 3  # of cutting, until the prompt fits


@dataclass(frozen=True)
class Puzzle:
    """A document with gaps.

    Attributes:
      document: the text with gaps.
      options: letter -> a paragraph that was taken out, in the order of the letters.
      truth: K letters, in the order of the gaps.
      spans: [first, last) characters of what was taken out of the text, in the same order.
    """

    document: str
    options: dict[str, str]
    truth: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Order:
    """The letters that an answer states.

    Attributes:
      letters: in the order of the gaps; empty where there is no box, or something else in it.
      is_permutation: whether every option is there once (ValidPermutation of Eq. 1).
    """

    letters: tuple[str, ...] = ()
    is_permutation: bool = False


# --------------------------------------------------------------------------------- From a document


def split_paragraphs(text: str) -> list[tuple[int, int]]:
    """[first, last) characters of a text's paragraphs, without white space around them.

    They end at blank lines; in a text without blank lines every line is one.
    """
    spans = _between(BORDERS[0], text)
    return spans if len(spans) > 1 else _between(BORDERS[1], text)


def _between(border: re.Pattern[str], text: str) -> list[tuple[int, int]]:
    spans, start = [], 0
    for end, behind in [*(found.span() for found in border.finditer(text)), (len(text),) * 2]:
        unit = text[start:end]
        first = start + len(unit) - len(unit.lstrip())
        last = first + len(unit.strip())
        if first < last:
            spans.append((first, last))
        start = behind
    return spans


def cut_window(
    rng: np.random.Generator, text: str, count_tokens: CountTokens, most_tokens: int
) -> tuple[int, int]:
    """[first, last) characters of neighboring paragraphs of a text: of all, if they have at most
    so many tokens together.

    Else those behind one that is drawn, as many as there is room for, and if there is room left
    those before it. What is far from them is not counted. Empty where not even one fits.
    """
    spans = split_paragraphs(text)
    if not spans:
        return 0, 0
    ends = [first for first, _ in spans[1:]] + [len(text)]  # with the white space behind it
    drawn = int(rng.integers(len(spans)))
    first, last, room = drawn, drawn, most_tokens

    def tokens(at: int) -> int:
        return count_tokens(text[spans[at][0] : ends[at]])

    while last < len(spans) and (behind := tokens(last)) <= room:
        last, room = last + 1, room - behind
    while last > drawn and first > 0 and (before := tokens(first - 1)) <= room:
        first, room = first - 1, room - before
    if first == last:
        return 0, 0
    return spans[first][0] if first else 0, len(text) if last == len(spans) else spans[last - 1][1]


def make_puzzle(
    rng: np.random.Generator, text: str, options: int, min_paragraph: int, max_paragraph: int
) -> tuple[Puzzle | None, str]:
    """Takes paragraphs out of a text.

    They are drawn evenly from those of `min_paragraph` to `max_paragraph` characters whose words
    occur once in the text: no option is equal to another one or to what stays, be it in other white
    space. Gaps may be neighbors. At least one paragraph stays.

    Args:
      rng: of the draw and of the letters.
      text: the document.
      options: K, 2 to 8.
      min_paragraph, max_paragraph: characters.

    Returns:
      (puzzle, ""), or (None, reason), one of HAS_GAPS, FEW_PARAGRAPHS and FEW_OPTIONS.
    """
    if GAP.search(text):
        return None, HAS_GAPS
    spans = split_paragraphs(text)
    if len(spans) <= options:
        return None, FEW_PARAGRAPHS
    words = [" ".join(text[first:last].split()) for first, last in spans]
    times = Counter(words)
    fit = [
        span
        for span, said in zip(spans, words, strict=True)
        if min_paragraph <= span[1] - span[0] <= max_paragraph and times[said] == 1
    ]
    if len(fit) < options:
        return None, FEW_OPTIONS
    taken = [fit[i] for i in sorted(rng.permutation(len(fit))[:options])]
    places = rng.permutation(options)  # of each paragraph among the options
    shown = {LABELS[place]: text[slice(*span)] for place, span in zip(places, taken, strict=True)}
    pieces, start = [], 0
    for number, (first, last) in enumerate(taken, 1):
        pieces += [text[start:first], gap(number)]
        start = last
    truth = tuple(LABELS[place] for place in places)
    document = "".join([*pieces, text[start:]])
    return Puzzle(document, dict(sorted(shown.items())), truth, tuple(taken)), ""


def gap(number: int) -> str:
    """What stands in the place of a paragraph; numbers count from 1."""
    return f"<gap {number}>"


@dataclass(frozen=True)
class Posed:
    """A puzzle as it is asked.

    Attributes:
      puzzle: None where the text gives none...
      reason: ...and a word that says why, for counting.
      prompt: which asks it.
      window: [first, last) characters of the text that it is of.
      cut: whether these are not the whole text.
    """

    puzzle: Puzzle | None = None
    reason: str = ""
    prompt: str = ""
    window: tuple[int, int] = (0, 0)
    cut: bool = False

    @property
    def truth(self) -> tuple[str, ...]:
        """The puzzle's; empty where there is none."""
        return self.puzzle.truth if self.puzzle else ()


def pose(
    make: Callable[[str], tuple[Puzzle | None, str]],
    ask: Callable[[str, Mapping[str, str]], str],
    rng: np.random.Generator,
    text: str,
    count_tokens: CountTokens,
    prompt_cap: int,
) -> Posed:
    """A puzzle from a text, or from neighboring paragraphs of it, with a prompt under the cap.

    Args:
      make: text -> (puzzle, reason), as make_puzzle.
      ask: (document, options) -> prompt.
      rng: of where a long text is cut.
      text: the document.
      count_tokens: tokens of a text.
      prompt_cap: tokens that the prompt may have.
    """
    room = prompt_cap - count_tokens(ask("", {}))
    for _ in range(_PASSES):
        first, last = cut_window(rng, text, count_tokens, room)
        if first == last:
            break
        puzzle, reason = make(text[first:last])
        if puzzle is None:
            return Posed(reason=reason)
        prompt = ask(puzzle.document, puzzle.options)
        over = count_tokens(prompt) - prompt_cap
        if over <= 0:
            return Posed(puzzle, "", prompt, (first, last), last - first < len(text))
        room = count_tokens(text[first:last]) - over
    return Posed(reason=OVERLONG)


# ---------------------------------------------------------------------------------- From an answer


def parse_order(text: str, options: int) -> Order:
    r"""The letters in the last \boxed{...} behind all thoughts, of so many options.

    They are upper case, with commas or white space between them. Total: any text has an order, be
    it the empty one; linear in its length.
    """
    visible = visible_text(text)
    boxed = None if visible is None else last_box(visible)
    if boxed is None:
        return Order()
    letters = tuple(boxed.replace(",", " ").split())
    if not all(letter in LABELS for letter in letters):
        return Order()
    return Order(letters, sorted(letters) == sorted(LABELS[:options]))


def dense_reward(order: Order, truth: Sequence[str]) -> float:
    """1 for the truth, the share of letters in their places for another permutation, else 0 (1)."""
    if not order.is_permutation:
        return 0.0
    right = sum(said == true for said, true in zip(order.letters, truth, strict=True))
    return right / len(truth)


def sparse_reward(order: Order, truth: Sequence[str]) -> float:
    """1 for the truth, else 0 (2)."""
    return float(order.letters == tuple(truth))


def chance(options: int) -> tuple[float, float]:
    """(dense, sparse) reward that a permutation drawn evenly earns on average: 1/K and 1/K!.

    On average one letter of a permutation is in its place, whatever K is.
    """
    return 1 / options, 1 / math.factorial(options)


# -------------------------------------------------------------------------------- How many options


def options_of(share: float, options: Sequence[int], weights: Sequence[float]) -> int:
    """K at a quantile of a mixture.

    Args:
      share: of the mixture that lies before it, in [0, 1]. For the curriculum it is how much of
        the run is over, for its shuffled variant a uniform draw.
      options: the values of K, in any order.
      weights: a positive number for each.
    """
    values = sorted(zip(options, weights, strict=True))
    bounds = np.cumsum([weight for _, weight in values]) / sum(weights)
    place = int(np.searchsorted(bounds, share, side="right"))
    return values[min(place, len(values) - 1)][0]
