"""Answers in four sections, how good the evidence in them is, and what both are worth.

1. `parse_answer` finds the sections analysis, evidence, reasoning and answer; a text that is not
   made of these four alone, in this order, has a bad format.
2. `parse_scores` reads what a reward model says of all evidence sets of a group.
3. `normalize` sets the scores of a group in relation; `total_reward` adds format, evidence and
   outcome up.
4. `verbatim_share` and `precision_and_recall` compare quotes with documents and with the sentences
   that the answer rests on; they are logged and evaluated, never rewarded.

Source: EAPO, sections 2.1 and 3.2. Parsers are total: any string in, a result out, in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from spell_jax.selfplay.parsing import find_record
from spell_jax.selfplay.rules import find_answer, visible_text

SECTIONS = ("analysis", "evidence", "reasoning", "answer")
LOWEST, HIGHEST = 1, 5  # scores of a reward model
NEUTRAL = 0.5  # evidence that nobody could compare
MOST_QUOTES = 256  # of an answer that are looked up; what is behind them counts as invented

# A score behind the number of its set, as the prompt numbers them.
_LABELLED = re.compile(r"([0-9]{1,4}) +([0-9])(?:\s+|\Z)")
_BULLET = re.compile(r"(?:[-*•]|[0-9]{1,3}[.)])\s+")
_ELLIPSIS = re.compile(r"\.\.\.|…")
_MARKS = "\"'“”‘’ "


@dataclass(frozen=True)
class Structured:
    """A well-formed answer: its sections, stripped, none of them empty."""

    analysis: str
    evidence: str
    reasoning: str
    answer: str


@dataclass(frozen=True)
class Weights:
    """What format, evidence and outcome are worth (Eq. 2: alpha, beta, gamma)."""

    format: float = 0.1
    evidence: float = 0.3
    outcome: float = 0.6


# ------------------------------------------------------------------------------------- The sections


def write_answer(structured: Structured) -> str:
    """The text that `parse_answer` reads as these sections."""
    pairs = zip(SECTIONS, astuple(structured), strict=True)
    return "".join(f"<{name}>{content}</{name}>" for name, content in pairs)


def parse_answer(text: str) -> Structured | None:
    """The sections of a whole answer; None where its format is bad.

    Thoughts are dropped. Of what is left, each of the eight tags must be there exactly once, in
    order, with some text in each section and nothing but white space around them: so the prompt
    asks, and a second set of evidence cannot hide outside of the first.
    """
    sections = parse_sections(text, len(SECTIONS))
    return None if sections is None else Structured(*sections)


def parse_sections(text: str, count: int) -> tuple[str, ...] | None:
    """The first `count` sections of an answer that ends behind them; None for a bad format."""
    rest = visible_text(text)
    if rest is None:
        return None
    contents = []
    for name in SECTIONS[:count]:
        before, opened, rest = rest.partition(f"<{name}>")
        content, closed, rest = rest.partition(f"</{name}>")
        content = content.strip()
        if before.strip() or not (opened and closed and content) or _has_tag(content):
            return None
        contents.append(content)
    return None if rest.strip() else tuple(contents)


def _has_tag(text: str) -> bool:
    return any(f"<{name}>" in text or f"</{name}>" in text for name in SECTIONS)


def as_sentence(answer: str, task: str) -> str:
    """An answer section as the rules read it: with "The answer is" before it, unless it says so
    itself. Raises ValueError for an unknown task, and nothing for any text."""
    return answer if find_answer(answer, task) is not None else f"The answer is {answer}"


# --------------------------------------------------------------------------------- What it is worth


def parse_scores(text: str, count: int) -> tuple[int, ...] | None:
    """A reward model's scores, 1 to 5, of `count` sets in the order of its prompt.

    Either a JSON object with a list "scores", found as parsing.find_record does, or nothing but
    "1 4\n2 2\n3 5", each score behind its set's number. None for anything else: other numbers of
    scores, scores out of range, labels out of order, an unfinished thought.
    """
    visible = visible_text(text)
    if visible is None:
        return None
    labeled = _read_labeled(visible)
    if labeled is None:
        try:
            record = find_record(visible)
        except RecursionError:  # JSON nested a thousand deep
            return None
        labeled = (record or {}).get("scores")
    if not isinstance(labeled, list) or len(labeled) != count:
        return None
    if not all(type(s) is int and LOWEST <= s <= HIGHEST for s in labeled):
        return None
    return tuple(labeled)


def _read_labeled(text: str) -> list[int] | None:
    scores, at = [], 0
    while match := _LABELLED.match(text, at):
        if int(match[1]) != len(scores) + 1:
            return None
        scores.append(int(match[2]))
        at = match.end()
    return scores if scores and at == len(text) else None


def normalize(scores: Sequence[int] | None, count: int) -> list[float]:
    """Evidence rewards [count] in [0, 1] of a group's well-formed siblings (R_e).

    (score - lowest) / (highest - lowest) among them; 0.5 for all where all are equal, or where the
    scoring failed (None).
    """
    if not scores or min(scores) == max(scores):
        return [NEUTRAL] * count
    low, high = min(scores), max(scores)
    return [(score - low) / (high - low) for score in scores]


def total_reward(
    well_formed: bool, evidence: float, outcome: float, weights: Weights = Weights()
) -> float:
    """Eq. 2; of a bad format nothing else is looked at, and the total is 0."""
    if not well_formed:
        return 0.0
    return weights.format + weights.evidence * evidence + weights.outcome * outcome


# ------------------------------------------------------------------------------------------- Quotes


def find_quotes(evidence: str) -> list[str]:
    """The quotes of an evidence section: its lines without bullets and quotation marks, cut where
    an ellipsis links fragments, with single spaces; at most MOST_QUOTES + 1, the last one being the
    whole rest."""
    lines = evidence.split("\n", MOST_QUOTES)
    *lines, rest = lines if len(lines) > MOST_QUOTES else (*lines, "")
    fragments: list[str] = []
    for line in lines:
        fragments += _ELLIPSIS.split(_BULLET.sub("", line.strip(), count=1))
    quotes = [flat for text in fragments if (flat := " ".join(text.strip(_MARKS).split()))]
    rest = " ".join([*quotes[MOST_QUOTES:], *rest.split()])
    return [*quotes[:MOST_QUOTES], *([rest] if rest else [])]


def searchable(documents: Sequence[str]) -> str:
    """Documents as `verbatim_share` takes them: one a line, with single spaces."""
    return "\n".join(" ".join(text.split()) for text in documents)


def verbatim_share(evidence: str, documents: str) -> float:
    """How many of the quoted characters are in quotes that stand in the documents (`searchable`)
    word for word; 0.0 where nothing is quoted. An addition of ours."""
    quotes = find_quotes(evidence)
    total = sum(map(len, quotes))
    found = sum(len(quote) for quote in quotes if quote in documents)
    return found / total if total else 0.0


def precision_and_recall(evidence: str, supporting: Sequence[str]) -> tuple[float, float]:
    """How much of what is quoted is supporting sentences, in characters; and how many of these are
    quoted.

    A sentence is quoted if a quote holds it, or at least half of it and nothing else. Without
    supporting sentences both are 0.0.
    """
    quotes = find_quotes(evidence)
    overlaps = [_overlap(" ".join(sentence.split()), quotes) for sentence in supporting]
    if not quotes or not overlaps:
        return 0.0, 0.0
    precision = min(1.0, sum(overlaps) / sum(map(len, quotes)))
    return precision, sum(overlap > 0 for overlap in overlaps) / len(overlaps)


def _overlap(sentence: str, quotes: Sequence[str]) -> int:
    """Characters of a sentence that quotes hold."""
    if any(sentence in quote for quote in quotes):
        return len(sentence)
    parts = (len(quote) for quote in quotes if quote in sentence)
    return max((size for size in parts if 2 * size >= len(sentence)), default=0)
