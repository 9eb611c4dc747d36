"""Similarity of documents by their words: cosines of TF-IDF vectors, from an inverted index.

A word is a run of letters and digits, or one other symbol, in lower case. In a document that has
the word c times, the word weighs (1 + ln c) (1 + ln((1 + N) / (1 + n))), where n of all N documents
have the word. Vectors have length 1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

_WORD = re.compile(r"\w+|[^\w\s]")


class WordIndex:
    """The words of documents, none of which is blank."""

    def __init__(self, documents: Sequence[str]):
        number_of: dict[str, int] = {}
        word_parts, count_parts = [], []
        for text in documents:
            counts = Counter(_WORD.findall(text.lower()))
            numbers = [number_of.setdefault(word, len(number_of)) for word in counts]
            word_parts.append(np.array(numbers, np.int64))
            count_parts.append(np.array(list(counts.values()), np.float64))
        lengths = [len(part) for part in word_parts]
        words, counts = np.concatenate(word_parts), np.concatenate(count_parts)
        rows = np.repeat(np.arange(len(documents)), lengths)
        # In alphabetical order, so that sums over words do not depend on the order of documents.
        ranks = np.empty(len(number_of), np.int64)
        ranks[[number_of[word] for word in sorted(number_of)]] = np.arange(len(number_of))
        words = ranks[words]
        order = np.lexsort((words, rows))
        words, counts = words[order], counts[order]

        document_counts = np.bincount(words, minlength=len(number_of))
        rarity = 1 + np.log((1 + len(documents)) / (1 + document_counts))
        # 1 + ln c: a long document that repeats its words does not dominate.
        weights = (1 + np.log(counts)) * rarity[words]
        norms = np.sqrt(np.bincount(rows, weights**2, len(documents)))
        weights /= norms[rows]

        self._size = len(documents)
        self._words, self._weights = words, weights
        self._row_ends = np.cumsum([0, *lengths])
        # The same entries by word: the documents that have a word lie together.
        by_word = np.argsort(words, kind="stable")
        self._posted_rows, self._posted_weights = rows[by_word], weights[by_word]
        self._word_ends = np.cumsum([0, *document_counts])

    def similarities(self, document: int) -> np.ndarray:
        """Return the cosine of a document's vector with every document's, float64 [documents]."""
        result = np.zeros(self._size)
        start, end = self._row_ends[document : document + 2]
        # Costs no more than the documents that share a word with this one.
        for word, weight in zip(self._words[start:end], self._weights[start:end], strict=True):
            place = slice(self._word_ends[word], self._word_ends[word + 1])
            result[self._posted_rows[place]] += weight * self._posted_weights[place]
        return result
