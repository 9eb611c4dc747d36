"""Tests of k-means: exact assignment in any batch, and leaves within their limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from data_pipeline import kmeans
from data_pipeline.kmeans import ClusterConfig, assign, fit_centroids, make_leaves

SMALL = ClusterConfig(
    documents_per_cluster=4, min_documents=2, max_cluster_tokens=100, node_documents=64
)
REPEATED = pytest.mark.filterwarnings("ignore:Number of distinct clusters")  # vectors that repeat


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def topics(count, each, dimensions=32, noise=0.1, seed=0):
    """Sample vectors around random directions; return them with their topics, shuffled."""
    random = np.random.default_rng(seed)
    centers = unit(random.normal(size=(count, dimensions)))
    labels = random.permutation(np.repeat(np.arange(count), each))
    return unit(centers[labels] + noise * random.normal(size=(len(labels), dimensions))), labels


def exact(vectors, centroids):
    return np.argmax(vectors.astype(np.float64) @ centroids.T.astype(np.float64), axis=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents_per_cluster": 0}, r"cluster.documents_per_cluster = 0: must be at least 1"),
        ({"min_documents": 21}, r"cluster.min_documents = 21: must be at most .* = 20"),
        ({"max_cluster_tokens": 15}, r"cluster.max_cluster_tokens = 15: must be at least 16"),
        ({"node_documents": 39}, r"cluster.node_documents = 39: must be at least 40"),
        ({"fit_documents": 1}, r"cluster.fit_documents = 1: must be at least 2"),
        ({"levels": -1}, r"cluster.levels = -1: must be at least 0"),
        ({"seed": -1}, r"cluster.seed = -1: must be at least 0"),
    ],
)
def test_error_names_invalid_setting(change, message):
    with pytest.raises(ValueError, match=message):
        ClusterConfig(**change)


def test_centroids_recover_the_topics():
    """A single start of k-means++ may miss one or two of ten topics."""
    vectors, labels = topics(10, 40)
    for seed in range(3):
        centroids = fit_centroids(vectors, 10, seed)
        assert centroids.dtype == np.float32 and len(centroids) == 10
        np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-6)
        nearest = assign(vectors, centroids)
        pure = sum(np.bincount(labels[nearest == label]).max() for label in range(10))
        assert pure / len(vectors) >= 0.8
    centroids = fit_centroids(vectors, 60, seed=0)  # no centroid mixes two topics
    nearest = assign(vectors, centroids)
    assert all(len(set(labels[nearest == label])) == 1 for label in range(len(centroids)))


@REPEATED
def test_centroids_of_few_equal_or_opposite_vectors():
    row = unit(np.ones((1, 8)))
    np.testing.assert_allclose(fit_centroids(np.repeat(row, 30, axis=0), 5, seed=0), row, atol=1e-6)
    assert len(fit_centroids(unit(np.eye(3, 8)), 7, seed=0)) == 3
    opposite = np.concatenate([row, -row])  # the mean of the two vectors has no direction
    np.testing.assert_array_equal(fit_centroids(opposite, 1, seed=0), row)


def test_centroids_with_too_few_members_are_dropped():
    random = np.random.default_rng(0)
    sizes = [40, 30, 3, 1]
    vectors = unit(np.repeat(np.eye(4, 8), sizes, axis=0) + 0.01 * random.normal(size=(74, 8)))
    assert len(fit_centroids(vectors, 4, seed=0)) == 4
    members = np.bincount(assign(vectors, fit_centroids(vectors, 4, seed=0, at_least=5)))
    assert len(members) == 2 and members.min() >= 30
    assert len(fit_centroids(vectors, 4, seed=0, at_least=1000)) == 1


def test_centroids_are_bit_identical_for_any_thread_count():
    vectors, _ = topics(8, 300, dimensions=64, noise=0.3)
    bits = []
    for threads in (1, 2, 4):
        with threadpool_limits(threads):
            bits.append(fit_centroids(vectors, 20, seed=3).tobytes())
    assert bits[0] == bits[1] == bits[2]
    assert bits[0] != fit_centroids(vectors, 20, seed=4).tobytes()


def test_one_thread_limits_all_thread_pools():
    with threadpool_limits(2), kmeans.one_thread():
        assert {pool["num_threads"] for pool in threadpool_info()} == {1}


@pytest.fixture
def near_ties():
    """Return rows halfway between two of 12 centroids, and the centroids: two are equal.

    The distances differ by about 1e-9, and float32 products have an error of 1e-7.
    """
    random = np.random.default_rng(0)
    centroids = unit(random.normal(size=(12, 256)))
    centroids[7] = centroids[3]
    pairs = random.integers(0, 12, size=(400, 2))
    rows = centroids[pairs[:, 0]] + centroids[pairs[:, 1]]
    return unit(rows), centroids


def test_assignment_is_exact_where_float32_is_not(near_ties):
    vectors, centroids = near_ties
    wide = (vectors.astype(np.float64)[:, None] * centroids.astype(np.float64)).sum(axis=2)
    labels = assign(vectors, centroids)
    assert labels.dtype == np.int32
    best = wide.max(axis=1)
    label_scores = wide[np.arange(len(labels)), labels]
    assert (best - label_scores).max() < 1e-14
    rough = (vectors @ centroids.T).argmax(axis=1)
    assert (rough != labels).sum() > 10  # float32 is wrong for many rows, as intended
    assert 3 in labels and 7 not in labels  # the first of equal centroids


@pytest.mark.parametrize("size", [1, 3, 64, 399])
def test_assignment_does_not_depend_on_the_batch(near_ties, monkeypatch, size):
    vectors, centroids = near_ties
    labels = assign(vectors, centroids)
    parts = [vectors[start : start + size] for start in range(0, len(vectors), size)]
    np.testing.assert_array_equal(np.concatenate([assign(p, centroids) for p in parts]), labels)
    shuffled = np.random.default_rng(size).permutation(len(vectors))
    np.testing.assert_array_equal(assign(vectors[shuffled], centroids), labels[shuffled])
    monkeypatch.setattr(kmeans, "BLOCK", size)
    np.testing.assert_array_equal(assign(vectors, centroids), labels)


@pytest.mark.slow
@REPEATED
@settings(max_examples=60)
@given(st.data())
def test_leaves_partition_documents_within_limits(data):
    count = data.draw(st.integers(1, 60), label="documents")
    places = data.draw(st.integers(1, count), label="places")
    seed = data.draw(st.integers(0, 1000), label="seed")
    tokens = np.array(data.draw(st.lists(st.integers(1, 100), min_size=count, max_size=count)))
    random = np.random.default_rng(seed)
    vectors = unit(random.normal(size=(places, 6)))[random.integers(0, places, size=count)]
    leaves = make_leaves(vectors, tokens, SMALL, seed)
    assert sorted(np.concatenate(leaves).tolist()) == list(range(count))
    assert [leaf[0] for leaf in leaves] == sorted(leaf[0] for leaf in leaves)
    sums = [tokens[leaf].sum() for leaf in leaves]
    for leaf, total in zip(leaves, sums, strict=True):
        assert (np.diff(leaf) > 0).all()
        assert len(leaf) <= SMALL.max_documents and total <= SMALL.max_cluster_tokens
        if len(leaf) < SMALL.min_documents:  # then no other leaf has room for it
            rooms = [
                len(leaf) + len(other_leaf) <= SMALL.max_documents and total + s <= 100
                for other_leaf, s in zip(leaves, sums, strict=True)
                if other_leaf is not leaf
            ]
            assert not any(rooms)


def test_leaves_are_mostly_of_one_topic():
    vectors, labels = topics(40, 20)
    leaves = make_leaves(vectors, np.full(len(vectors), 100), ClusterConfig(), seed=0)
    pure = sum(np.bincount(labels[leaf]).max() for leaf in leaves)
    assert pure / len(vectors) > 0.9
    assert 30 <= len(leaves) <= 50


def test_group_of_two_topics_is_split_between_them():
    """19 and 21 documents of two topics, one group of k-means for its k is 1.

    A split along the first principal direction separates them, except for the document that makes
    the halves equal.
    """
    vectors, labels = topics(2, 20, noise=0.05)
    config = ClusterConfig(
        documents_per_cluster=10, min_documents=1, max_cluster_tokens=100_000, node_documents=64
    )
    halves = list(kmeans._split(np.arange(40), vectors, np.ones(40, int), config))
    assert [len(half) for half in halves] == [20, 20]
    assert [len(set(labels[half])) for half in halves] == [1, 1]


def test_group_over_the_token_limit_is_split_by_tokens():
    angles = np.linspace(0, 1, 10)
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    tokens = np.array([10, 10, 10, 10, 10, 10, 10, 10, 10, 90])
    config = ClusterConfig(max_cluster_tokens=100, min_documents=1)
    parts = sorted(kmeans._split(np.arange(10), vectors, tokens, config), key=len)
    assert [part.tolist() for part in parts] == [[9], list(range(9))]


def test_small_group_joins_the_nearest_group_with_room():
    angles = np.array([0, 0.01, 0.02, 0.03, 0.2, 1.0, 1.01, 1.5])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    groups = [np.array([0, 1, 2, 3]), np.array([4]), np.array([5, 6]), np.array([7])]
    config = ClusterConfig(documents_per_cluster=4, min_documents=2, max_cluster_tokens=100)

    def merge(tokens):
        merged = kmeans._merge(groups, vectors, np.array(tokens), config)
        return [group.tolist() for group in merged]

    assert merge([10] * 8) == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert merge([20, 20, 20, 20, 30, 10, 10, 10]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert merge([20, 20, 20, 20, 30, 40, 40, 30]) == [[0, 1, 2, 3], [5, 6], [4, 7]]
    assert merge([20, 20, 20, 20, 90, 40, 40, 30]) == [[0, 1, 2, 3], [4], [5, 6], [7]]


def test_small_group_does_not_join_a_full_group():
    vectors = unit(np.array([[1.0, 0.0]] * 9 + [[0.0, 1.0]] * 5))
    groups = [np.arange(8), np.array([8]), np.arange(9, 14)]
    config = ClusterConfig(documents_per_cluster=4, min_documents=2, node_documents=64)
    merged = kmeans._merge(groups, vectors, np.ones(14, int), config)
    assert [group.tolist() for group in merged] == [list(range(8)), [8, *range(9, 14)]]


def test_leaves_do_not_depend_on_threads():
    vectors, _ = topics(10, 60, dimensions=128, noise=0.5)
    tokens = np.random.default_rng(0).integers(100, 3000, size=len(vectors))
    results = []
    for threads in (1, 2):
        with threadpool_limits(threads):
            leaves = make_leaves(vectors, tokens, ClusterConfig(), seed=5)
            results.append([leaf.tolist() for leaf in leaves])
    assert results[0] == results[1]
