"""Tests of the word index: its cosines are scikit-learn's."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from spell_jax.data.word_index import WordIndex


def random_documents(count: int) -> list[str]:
    """Return documents of random words, some of them equal, with symbols and capitals."""
    chance = random.Random(0)
    words = [chance.choice("abcdé") * chance.randint(1, 3) for _ in range(30)] + [
        "A",
        "%",
        "é",
        "7",
    ]
    documents = [" ".join(chance.choices(words, k=chance.randint(1, 40))) for _ in range(count)]
    return [*documents, documents[0], documents[0].upper()]


def test_cosines_equal_scikit_learns():
    text = pytest.importorskip("sklearn.feature_extraction.text")
    documents = random_documents(50)
    vectorizer = text.TfidfVectorizer(token_pattern=r"\w+|[^\w\s]", sublinear_tf=True)
    vectors = vectorizer.fit_transform(documents)
    index = WordIndex(documents)
    cosines = np.stack([index.similarities(i) for i in range(len(documents))])
    np.testing.assert_allclose(cosines, (vectors @ vectors.T).toarray(), rtol=1e-12, atol=1e-15)
    # The nearest documents are the same to the bit: equal documents stay tied.
    assert cosines[1, 0] == cosines[1, 50] == cosines[1, 51]


def test_cosine_of_two_documents_by_hand():
    """a a b and b c: b is in both (weight 1), a and c in one of two."""
    rare = 1 + math.log(3 / 2)
    first, second = (1 + math.log(2)) * rare, rare
    expected = 1 / math.hypot(first, 1) / math.hypot(second, 1)
    index = WordIndex(["a A b", "b c"])
    np.testing.assert_allclose(index.similarities(0), [1, expected], rtol=1e-12)


def test_order_of_documents_does_not_count():
    documents = random_documents(20)
    backwards = WordIndex(documents[::-1]).similarities(len(documents) - 1)
    np.testing.assert_array_equal(WordIndex(documents).similarities(0), backwards[::-1])
