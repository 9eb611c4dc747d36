"""Document-reconstruction puzzles: paragraphs are removed and must be put back in order.

K paragraphs become numbered gaps and are offered as shuffled, lettered options. Filling the gaps
with the right options restores the original text exactly, white space included. Source: document
reconstruction, sections 3.1 to 3.3, 5.2 and 5.6.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spell_jax.data.clusters import BORDERS, CountTokens
from spell_jax.selfplay.braces import last_box
from spell_jax.selfplay.prompts import Prompts
from spell_jax.selfplay.rules import visible_text

LABELS = tuple("ABCDEFGH")  # letters of the options; the paper's largest K is 8
FEWEST_OPTIONS, MOST_OPTIONS = 2, len(LABELS)

# Reasons why a text yields no puzzle.
HAS_GAPS = "has_gaps"  # the text already contains a gap marker
FEW_PARAGRAPHS = "few_paragraphs"  # no paragraph would remain
FEW_OPTIONS = "few_options"  # too few unique paragraphs of suitable length
OVERLONG = "overlong"  # no prompt made from the text fits the cap

# Attempts to cut the text until the prompt fits. A prompt may have more tokens than its parts, so
# the first window can be too long.
_CUT_ATTEMPTS = 3


@dataclass(frozen=True)
class Puzzle:
    """A document with gaps.

    Attributes:
      document: text with gap markers.
      options: letter -> removed paragraph, in the order of the letters.
      truth: K letters, in the order of the gaps.
      spans: [first, last) characters of the removed paragraphs, in the order of the gaps.
    """

    document: str
    options: dict[str, str]
    truth: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PromptedPuzzle:
    """A puzzle and its prompt.

    Attributes:
      puzzle: puzzle; None if the text yields none.
      reason: one word for why there is no puzzle.
      prompt: text of the prompt.
      window: [first, last) characters of the text that the puzzle is made from.
      cut: whether the window is shorter than the text.
    """

    puzzle: Puzzle | None = None
    reason: str = ""
    prompt: str = ""
    window: tuple[int, int] = (0, 0)
    cut: bool = False

    @property
    def truth(self) -> tuple[str, ...]:
        """The truth of the puzzle; empty if there is no puzzle."""
        return self.puzzle.truth if self.puzzle else ()


@dataclass(frozen=True)
class Order:
    """The letters stated in an answer.

    Attributes:
      letters: letters in the order of the gaps; empty without a box, or with anything else in it.
      is_permutation: whether every option occurs exactly once (ValidPermutation of Eq. 1).
    """

    letters: tuple[str, ...] = ()
    is_permutation: bool = False


def split_paragraphs(text: str) -> list[tuple[int, int]]:
    """Return the [first, last) character ranges of a text's paragraphs, without outer white space.

    Paragraphs end at blank lines. In a text without blank lines, every line is a paragraph.
    """
    spans = _split_at(BORDERS[0], text)
    return spans if len(spans) > 1 else _split_at(BORDERS[1], text)


def _split_at(border: re.Pattern[str], text: str) -> list[tuple[int, int]]:
    spans, start = [], 0
    for end, next_start in [
        *(border_match.span() for border_match in border.finditer(text)),
        (len(text),) * 2,
    ]:
        unit = text[start:end]
        first = start + len(unit) - len(unit.lstrip())
        last = first + len(unit.strip())
        if first < last:
            spans.append((first, last))
        start = next_start
    return spans


def cut_window(
    rng: np.random.Generator, text: str, count_tokens: CountTokens, most_tokens: int
) -> tuple[int, int]:
    """Choose neighboring paragraphs of at most `most_tokens` tokens.

    If not all paragraphs fit, the window starts at a random one, extends forward as far as the
    budget allows, and then backward with the rest. Return the [first, last) character range; (0, 0)
    if not even one paragraph fits.
    """
    spans = split_paragraphs(text)
    if not spans:
        return 0, 0
    ends = [first for first, _ in spans[1:]] + [len(text)]  # including the white space after it
    start = int(rng.integers(len(spans)))
    first, last, room = start, start, most_tokens

    # Counted on demand, so that paragraphs of a long book far from the window are not tokenized.
    def tokens(at: int) -> int:
        return count_tokens(text[spans[at][0] : ends[at]])

    while last < len(spans) and (after := tokens(last)) <= room:
        last, room = last + 1, room - after
    while last > start and first > 0 and (before := tokens(first - 1)) <= room:
        first, room = first - 1, room - before
    if first == last:
        return 0, 0
    return spans[first][0] if first else 0, len(text) if last == len(spans) else spans[last - 1][1]


def gap_marker(number: int) -> str:
    """Return the marker of a gap in the compact prompts; numbers start at 1."""
    return f"<gap {number}>"


def make_puzzle(
    rng: np.random.Generator,
    text: str,
    options: int,
    min_paragraph: int,
    max_paragraph: int,
    adjacent: bool = True,
    gap: Callable[[int], str] = gap_marker,
) -> tuple[Puzzle | None, str]:
    """Remove K = `options` paragraphs of `min_paragraph` to `max_paragraph` characters from a text.

    Paragraphs are sampled uniformly from all that occur once in the text, by their words. Unless
    gaps may be `adjacent`, only every other paragraph is taken. At least one paragraph remains.
    `gap` maps a gap's number, from 1, to its marker. Return (puzzle, ""), or (None, reason) where
    reason is HAS_GAPS, FEW_PARAGRAPHS or FEW_OPTIONS.
    """
    # A marker in the text itself could not be told from a gap.
    if any(gap(number) in text for number in range(1, MOST_OPTIONS + 1)):
        return None, HAS_GAPS
    spans = split_paragraphs(text)
    if len(spans) <= options:
        return None, FEW_PARAGRAPHS
    # Unique by words, so that no option equals another option or a remaining paragraph, even with
    # other white space: the truth is then the only right order.
    words = [" ".join(text[first:last].split()) for first, last in spans]
    counts = Counter(words)
    suitable = [
        i
        for i, ((first, last), paragraph) in enumerate(zip(spans, words, strict=True))
        if min_paragraph <= last - first <= max_paragraph and counts[paragraph] == 1
    ]
    if not adjacent:
        # The other parity only if this parity has too few paragraphs.
        parity = rng.integers(2)
        alternate = [[i for i in suitable if i % 2 == p] for p in (parity, 1 - parity)]
        suitable = next((part for part in alternate if len(part) >= options), [])
    if len(suitable) < options:
        return None, FEW_OPTIONS
    removed = [spans[suitable[i]] for i in sorted(rng.permutation(len(suitable))[:options])]
    truth = tuple(LABELS[i] for i in rng.permutation(options))
    paragraphs = {label: text[slice(*span)] for label, span in zip(truth, removed, strict=True)}
    pieces, start = [], 0
    for number, (first, last) in enumerate(removed, 1):
        pieces += [text[start:first], gap(number)]
        start = last
    document = "".join([*pieces, text[start:]])
    return Puzzle(document, dict(sorted(paragraphs.items())), truth, tuple(removed)), ""


def pose(
    rng: np.random.Generator,
    text: str,
    options: int,
    lengths: tuple[int, int],
    adjacent: bool,
    prompts: Prompts,
    count_tokens: CountTokens,
    prompt_cap: int,
    cut: bool = True,
) -> PromptedPuzzle:
    """Make a puzzle with a prompt that fits the token cap, from a text or (`cut`) a window.

    `lengths` are the fewest and most characters of an option; see make_puzzle.
    """
    # The prompt of an empty puzzle has the words that every prompt needs.
    room = prompt_cap - count_tokens(prompts.reconstruction("", {}))
    for _ in range(_CUT_ATTEMPTS if cut else 1):
        first, last = cut_window(rng, text, count_tokens, room) if cut else (0, len(text))
        if first == last:
            break
        window = text[first:last]
        puzzle, reason = make_puzzle(rng, window, options, *lengths, adjacent, prompts.gap)
        if puzzle is None:
            return PromptedPuzzle(reason=reason)
        prompt = prompts.reconstruction(puzzle.document, puzzle.options)
        excess = count_tokens(prompt) - prompt_cap
        if excess <= 0:
            return PromptedPuzzle(puzzle, "", prompt, (first, last), last - first < len(text))
        # The markers and letters of this puzzle take as much room in the next.
        room = count_tokens(window) - excess
    return PromptedPuzzle(reason=OVERLONG)


def parse_order(text: str, options: int) -> Order:
    r"""Parse an answer: the letters in the last \boxed{...} after all thoughts, for K = `options`.

    Letters are upper case, between commas or white space. Accepts any string; takes linear time.
    """
    visible = visible_text(text)
    boxed = None if visible is None else last_box(visible)
    letters = tuple((boxed or "").replace(",", " ").split())
    if not all(letter in LABELS for letter in letters):
        return Order()
    return Order(letters, sorted(letters) == sorted(LABELS[:options]))


def dense_reward(order: Order, truth: Sequence[str]) -> float:
    """Return the share of letters in their right places; 0 if not a permutation (Eq. 1)."""
    # Otherwise "A, A, A" would earn 1/K without any reading (Eq. 1).
    if not order.is_permutation:
        return 0.0
    right = sum(stated == true for stated, true in zip(order.letters, truth, strict=True))
    return right / len(truth)


def sparse_reward(order: Order, truth: Sequence[str]) -> float:
    """Return 1 for the truth, else 0 (Eq. 2)."""
    return float(order.letters == tuple(truth))


def chance_rewards(options: int) -> tuple[float, float]:
    """Return the expected (dense, sparse) reward of a random permutation: 1/K and 1/K!."""
    return 1 / options, 1 / math.factorial(options)


def options_of(share: float, options: Sequence[int], weights: Sequence[float]) -> int:
    """Return the number of options K at the quantile `share` of a mixture of values of K.

    The curriculum passes the completed fraction of the run, its shuffled variant a uniform random
    number. `weights` holds a positive weight for each of `options`, which may be unsorted.
    """
    values = sorted(zip(options, weights, strict=True))
    bounds = np.cumsum([weight for _, weight in values]) / sum(weights)
    at = int(np.searchsorted(bounds, share, side="right"))
    return values[min(at, len(values) - 1)][0]
