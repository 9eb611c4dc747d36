"""Structured answers with quoted evidence: parsing, evidence quality and rewards (EAPO).

Source: EAPO, sections 2.1 and 3.2. `verbatim_share` and `precision_and_recall` are logged and
evaluated, never rewarded. Parsers accept any string and run in linear time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from spell_jax.selfplay.json_records import find_record
from spell_jax.selfplay.rules import find_answer, visible_text

SECTIONS = ("analysis", "evidence", "reasoning", "answer")
LOWEST, HIGHEST = 1, 5  # range of a reward model's scores of evidence
HIGHEST_REASONING = 4  # a judge's highest score of a reasoning (EAPO, Appendix E)
NEUTRAL = 0.5  # evidence reward if no comparison is possible
# Choices of what selects the branches of a tree of evidence (algorithms/eapo/evidence_tree.py).
EVIDENCE_BY = ("none", "similarity", "reranker", "judge", "oracle")
REASONING_BY = ("none", "judge")
MOST_QUOTES = 256  # quotes looked up per answer; text after them counts as invented

# "NUMBER SCORE": the number of a set, as in the prompt, and its score. Possessive quantifiers, so
# that a long reply that does not match takes linear time.
_LABELED = re.compile(r"([0-9]{1,4}) ++([0-9])(?:\s++|\Z)")
_LABELED_LINES = re.compile(rf"(?:{_LABELED.pattern})++")
_SCORE_LIST = re.compile(r'"scores"\s*+:\s*+\[([^\[\]]*+)\]')
_DIGITS = re.compile(r"[0-9]++")
_NUMBER = re.compile(r"\s*+\[([0-9]{1,4})\]")
_BULLET = re.compile(r"(?:[-*•]|[0-9]{1,3}[.)])\s+")
_ELLIPSIS = re.compile(r"\.\.\.|…")
_MARKS = "\"'“”‘’ "


@dataclass(frozen=True)
class StructuredAnswer:
    """The sections of a well-formed answer, stripped and non-empty."""

    analysis: str
    evidence: str
    reasoning: str
    answer: str


@dataclass(frozen=True)
class Weights:
    """Weights of the format, evidence and outcome rewards (Eq. 2: alpha, beta, gamma)."""

    # The paper's coefficients. Beta = 0.3 has its best overall accuracy (EAPO, Figure 8).
    format: float = 0.1
    evidence: float = 0.3
    outcome: float = 0.6


def write_answer(answer: StructuredAnswer) -> str:
    """Return the text that `parse_answer` parses into these sections."""
    pairs = zip(SECTIONS, astuple(answer), strict=True)
    return "".join(f"<{name}>{content}</{name}>" for name, content in pairs)


def number_documents(documents: Sequence[str]) -> tuple[str, ...]:
    """Return the documents, each after its number "[k]" from 1."""
    return tuple(f"[{number}] {text}" for number, text in enumerate(documents, 1))


def named_document(text: str) -> int | None:
    """Return the document index k - 1 if a response begins with the number "[k]", else None."""
    match = _NUMBER.match(visible_text(text) or "")
    return int(match[1]) - 1 if match else None


def parse_answer(text: str) -> StructuredAnswer | None:
    """Parse a whole answer into its sections; None if its format is bad.

    Thoughts are dropped. The rest must contain each of the eight tags exactly once and in order,
    with text in every section and only white space around the sections.
    """
    # As strict as the prompt. A looser format would allow a second set of evidence elsewhere.
    sections = parse_sections(text, len(SECTIONS))
    return None if sections is None else StructuredAnswer(*sections)


def parse_sections(text: str, count: int) -> tuple[str, ...] | None:
    """Parse an answer that consists of the first `count` sections; None if its format is bad."""
    tail = visible_text(text)
    if tail is None:
        return None
    contents = []
    for name in SECTIONS[:count]:
        before, opened, tail = tail.partition(f"<{name}>")
        content, closed, tail = tail.partition(f"</{name}>")
        content = content.strip()
        has_tag = any(f"<{tag}>" in content or f"</{tag}>" in content for tag in SECTIONS)
        if before.strip() or not (opened and closed and content) or has_tag:
            return None
        contents.append(content)
    return None if tail.strip() else tuple(contents)


def answer_section(text: str) -> str | None:
    """Return the content of the last answer section, whatever is around it; None without one."""
    _, opened, tail = (visible_text(text) or "").rpartition("<answer>")
    content, closed, _ = tail.partition("</answer>")
    return content.strip() or None if opened and closed else None


def with_answer_phrase(answer: str, task: str, extract: str = "paper") -> str:
    """Prefix an answer with "The answer is", unless the rules of `task` find an answer in it."""
    return answer if find_answer(answer, task, extract) is not None else f"The answer is {answer}"


def parse_scores(text: str, count: int, highest: int = HIGHEST) -> tuple[int, ...] | None:
    """Parse a reward model's scores of `count` evidence sets, in prompt order.

    Two formats are accepted: a JSON object with a list "scores" (see json_records), or only pairs
    of a set's number and its score, such as "1 4", "2 2" and "3 5" on three lines. Returns `count`
    integers from 1 to `highest`, or None for anything else, such as labels out of order or an
    unfinished thought.
    """
    visible = visible_text(text)
    if visible is None:
        return None
    # Labels must be in order: a reward model that mixes up the sets would score the wrong answers.
    if _LABELED_LINES.fullmatch(visible):
        labels, scores = zip(*((int(a), int(b)) for a, b in _LABELED.findall(visible)), strict=True)
        if labels != tuple(range(1, len(labels) + 1)):
            return None
    else:
        scores = _judgment(visible).get("scores")
    if not isinstance(scores, tuple | list) or len(scores) != count:
        return None
    # type(), because True is an int for isinstance.
    if not all(type(score) is int and LOWEST <= score <= highest for score in scores):
        return None
    return tuple(scores)


def parse_best_choice(text: str, count: int) -> int | None:
    """Parse the index, from 0, of the candidate that a judge prefers among `count`.

    It stands under "best_choice" in the JSON object of the scores. None without a valid index.
    """
    choice = _judgment(visible_text(text) or "").get("best_choice")
    return choice if type(choice) is int and 0 <= choice < count else None


def _judgment(visible: str) -> dict[str, Any]:
    """Return the JSON object that a judge's text presents; empty without a readable object."""
    try:
        return find_record(visible) or {}
    except RecursionError:  # JSON nested more than braces.DEEPEST levels deep
        return {}


def find_scores(text: str, scores: Sequence[int]) -> tuple[int, ...]:
    """Return the place in `text` of each of the scores that `parse_scores` read from it.

    Each score is one digit. Empty if no list of them is found, because the JSON escapes its key.
    """
    head, closed, visible = text.rpartition("</think>")
    start = len(head + closed)
    if _LABELED_LINES.fullmatch(visible.strip()):
        return tuple(match.start(2) for match in _LABELED.finditer(text, start))
    digits = [*map(str, scores)]
    # The last list counts, as in find_record: an earlier list may be a draft.
    for score_list in reversed([*_SCORE_LIST.finditer(text, start)]):
        numbers = [*_DIGITS.finditer(text, *score_list.span(1))]
        if [number[0] for number in numbers] == digits:
            return tuple(number.start() for number in numbers)
    return ()


def pairs_in_order(truth: Sequence[float], scores: Sequence[int]) -> list[float]:
    """Compare the order of evidence scores with the truth, for each pair that differs in truth.

    A pair is 1.0 if its scores have the same order, 0.0 if the opposite, 0.5 if they are equal.
    """
    pairs = itertools.combinations(zip(truth, scores, strict=True), 2)
    return [0.5 if a == b else float((t > u) == (a > b)) for (t, a), (u, b) in pairs if t != u]


def best_chosen(truth: Sequence[float], scores: Sequence[float]) -> float | None:
    """Return the probability that the top-scored set is the best set (best-of-N selection).

    Several sets may be best. Among equal scores the choice is random. None if all sets are equally
    good, so that no choice is wrong.
    """
    if not truth or min(truth) == max(truth):
        return None
    top = [t for t, score in zip(truth, scores, strict=True) if score == max(scores)]
    return top.count(max(truth)) / len(top)


def normalize_scores(scores: Sequence[int] | None, count: int) -> list[float]:
    """Return the evidence rewards R_e of a group's `count` well-formed answers, each in [0, 1].

    (score - min) / (max - min) within the group. All are 0.5 if all scores are equal or `scores` is
    None because the scoring failed.
    """
    # Equal rewards give no advantage, so a failed scoring leaves the outcome to decide.
    if not scores or min(scores) == max(scores):
        return [NEUTRAL] * count
    low, high = min(scores), max(scores)
    return [(score - low) / (high - low) for score in scores]


def total_reward(
    well_formed: bool, evidence: float, outcome: float, weights: Weights = Weights()
) -> float:
    """Return the weighted sum of the rewards (Eq. 2); 0 for a badly formatted answer."""
    # The paper ends the evaluation of an invalid format: a right answer does not make up for it.
    if not well_formed:
        return 0.0
    return weights.format + weights.evidence * evidence + weights.outcome * outcome


def find_quotes(evidence: str) -> list[str]:
    """Split an evidence section into at most MOST_QUOTES quotes, and a quote of the remaining text.

    A quote is a line without its bullet and quotation marks, with single spaces. A line with an
    ellipsis is split there into fragments.
    """
    # A quote is searched in all documents, so their number is bounded. The remaining text counts as
    # one quote, so that its characters lower the share.
    lines = evidence.split("\n", MOST_QUOTES)
    tail = lines.pop() if len(lines) > MOST_QUOTES else ""
    fragments: list[str] = []
    for line in lines:
        fragments += _ELLIPSIS.split(_BULLET.sub("", line.strip(), count=1))
    quotes = [flat for text in fragments if (flat := " ".join(text.strip(_MARKS).split()))]
    tail = " ".join([*quotes[MOST_QUOTES:], *tail.split()])
    return [*quotes[:MOST_QUOTES], *([tail] if tail else [])]


def searchable(documents: Sequence[str]) -> str:
    """Format documents for `verbatim_share`: one document per line, with single spaces."""
    return "\n".join(" ".join(text.split()) for text in documents)


def verbatim_share(evidence: str, documents: str) -> float:
    """Return the share of quoted characters in quotes that occur verbatim in `documents`.

    Return 0.0 if the evidence section quotes nothing.
    """
    # Our addition to EAPO, and never rewarded: copying a whole document would score 1.
    quotes = find_quotes(evidence)
    total = sum(map(len, quotes))
    verbatim_characters = sum(len(quote) for quote in quotes if quote in documents)
    return verbatim_characters / total if total else 0.0


def precision_and_recall(evidence: str, supporting: Sequence[str]) -> tuple[float, float]:
    """Compare the quotes of an answer with its supporting sentences.

    Precision is the share of quoted characters that belong to supporting sentences. Recall is the
    share of supporting sentences that are quoted: a quote contains the sentence, or at least half
    of the sentence in one piece. Both are 0.0 without quotes or without supporting sentences.
    """
    quotes = find_quotes(evidence)
    overlaps = [_overlap(" ".join(sentence.split()), quotes) for sentence in supporting]
    if not quotes or not overlaps:
        return 0.0, 0.0
    # At most 1, because one quote may count for several supporting sentences.
    precision = min(1.0, sum(overlaps) / sum(map(len, quotes)))
    return precision, sum(overlap > 0 for overlap in overlaps) / len(overlaps)


def _overlap(sentence: str, quotes: Sequence[str]) -> int:
    """Return the number of characters of a sentence that the quotes cover."""
    if any(sentence in quote for quote in quotes):
        return len(sentence)
    parts = (len(quote) for quote in quotes if quote in sentence)
    return max((size for size in parts if 2 * size >= len(sentence)), default=0)
