"""Similarity of documents by their words: cosines of TF-IDF vectors, from an inverted index."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy import sparse

_WORD = re.compile(r"\w+|[^\w\s]")  # a run of letters and digits, or one other symbol


class WordIndex:
    """The words of documents, none of which is blank, in lower case."""

    def __init__(self, documents: Sequence[str]):
        counts = [Counter(_WORD.findall(text.lower())) for text in documents]
        # In alphabetical order, so that sums over words do not depend on the order of documents.
        columns = {word: place for place, word in enumerate(sorted(set().union(*counts)))}
        entries = [columns[word] for count in counts for word in count]
        ends = np.cumsum([0, *map(len, counts)])
        # 1 + ln c: a long document that repeats its words does not dominate.
        weights = 1 + np.log([number for count in counts for number in count.values()])
        shape = (len(documents), len(columns))
        vectors = sparse.csr_array((weights, entries, ends), shape=shape)
        vectors.sort_indices()
        document_counts = np.bincount(vectors.indices, minlength=len(columns))
        rarity = 1 + np.log((1 + len(documents)) / (1 + document_counts))
        vectors.data *= rarity[vectors.indices]
        rows = np.repeat(np.arange(len(documents)), np.diff(ends))
        vectors.data /= np.sqrt(np.bincount(rows, vectors.data**2))[rows]
        self._vectors = vectors
        self._postings = sparse.csr_array(vectors.T)  # inverted index: word -> documents

    def similarities(self, document: int) -> np.ndarray:
        """Return the cosine of a document's vector with every document's, float64 [documents].

        The cost grows with the number of documents that share a word with this one.
        """
        return (self._vectors[[document]] @ self._postings).toarray()[0]
