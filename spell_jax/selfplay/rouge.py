"""Scores of the words that a text has in common with a reference: ROUGE-L, and F1 of SQuAD.

ROUGE-L (Lin 2004) is the longest common subsequence. Its words are runs of a-z and 0-9 in lower
case, as in the package rouge-score, without stemming.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_WORD = re.compile(r"[a-z0-9]+")


def word_f1(words: Sequence[str], reference: Sequence[str]) -> float:
    """Return the F1 of common words in any order (Rajpurkar et al. 2016), in [0, 1]; 0 if none."""
    # 2 P R / (P + R) with P = common / words and R = common / reference words.
    common = (Counter(words) & Counter(reference)).total()
    return 2 * common / max(len(words) + len(reference), 1)


def rouge_l(text: str, reference: str) -> float:
    """Return the F1 of the common subsequence, in [0, 1]; 0 without words."""
    common, ours, theirs = _count_words(text, reference)
    return 2 * common / (ours + theirs) if common else 0.0


def rouge_l_recall(text: str, reference: str) -> float:
    """Return the share of the reference's words in the common subsequence; 0 without words."""
    common, _, theirs = _count_words(text, reference)
    return common / theirs if common else 0.0


def _count_words(text: str, reference: str) -> tuple[int, int, int]:
    """Count words: in the common subsequence, in the text, and in the reference."""
    # Bit-parallel (Hyyro 2004): bit i of an integer stands for word i of the reference. Memory is
    # linear, and time is linear in the text for a given reference. A table would be quadratic.
    ours, theirs = _WORD.findall(text.lower()), _WORD.findall(reference.lower())
    positions: dict[str, int] = {}
    for i, word in enumerate(theirs):
        positions[word] = positions.get(word, 0) | 1 << i
    full = (1 << len(theirs)) - 1
    unmatched = full
    for word in ours:
        matched = unmatched & positions.get(word, 0)
        unmatched = ((unmatched + matched) | (unmatched - matched)) & full
    return len(theirs) - unmatched.bit_count(), len(ours), len(theirs)
