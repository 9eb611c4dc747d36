"""Numerics of clustering: deterministic functions from arrays to arrays."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

from spell_jax.runtime.config import check_least

# Rows with cosines in memory at once: 1.6 MB for 410 centroids, one per 20 of 8,192 documents.
BLOCK = 1024
# Iterations of k-means. It mostly converges after 10; the limit bounds the time of bad starts.
MAX_PASSES = 30
# Power iterations. `_split` needs a direction of large spread, not exactly the first component.
ROUNDS = 16
# Largest relative rounding error of one float32 operation.
HALF_ULP = 2.0**-24
# A mean shorter than this has no direction: its vectors cancel up to rounding errors.
TINY = 1e-6

_one_thread_lock = threading.RLock()


@dataclass(frozen=True)
class ClusterConfig:
    """Settings of clustering.

    Attributes:
      documents_per_cluster: Average number of documents in a cluster that k-means aims at. No
        cluster has more than twice as many.
      min_documents: Least size of a cluster in documents. Smaller clusters are merged with others
        that have room.
      max_cluster_tokens: Largest number of tokens in a cluster, so that the policy can read it as
        one prompt; at least cut.max_document_tokens.
      node_documents: Largest number of documents in a node that one worker clusters in memory.
      fit_documents: Number of documents of a larger node that its centroids are fitted to.
      levels: Largest number of times that large nodes are split.
      seed: Seed of k-means.
    """

    documents_per_cluster: int = 20
    min_documents: int = 5
    max_cluster_tokens: int = 14_000
    node_documents: int = 8_192
    fit_documents: int = 16_384
    levels: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"documents_per_cluster": 1, "min_documents": 1, "max_cluster_tokens": 16}
        check_least(self, "cluster.", **least, fit_documents=2, levels=0, seed=0)
        if self.min_documents > self.documents_per_cluster:
            raise ValueError(
                f"cluster.min_documents = {self.min_documents}: must be at most "
                f"documents_per_cluster = {self.documents_per_cluster}"
            )
        if self.node_documents < self.max_documents:
            raise ValueError(
                f"cluster.node_documents = {self.node_documents}: must be at least "
                f"{self.max_documents}, twice documents_per_cluster"
            )

    @property
    def max_documents(self) -> int:
        """Largest number of documents in a cluster."""
        return 2 * self.documents_per_cluster


def fit_centroids(vectors: np.ndarray, k: int, seed: int, at_least: int = 1) -> np.ndarray:
    """Fit unit centroids, float32 [1 to k, D], by k-means; distances order like cosines.

    `vectors` are unit vectors, float32 [n, D], n >= 1, in a reproducible order; `seed` is below
    2**32. Centroids nearest to fewer than `at_least` rows are dropped, and so are repeated
    centroids, which have no rows. At least the largest centroid is kept.
    """
    k = min(k, len(vectors))
    # Full-batch k-means, because the sample is small. On 8192 rows of 410 mixed Gaussians,
    # mini-batches (10 rows per centroid) gave purity 0.958 in 15 s, full batches 0.969 in 13 s.
    fit = KMeans(k, max_iter=MAX_PASSES, random_state=seed)
    with one_thread():
        centroids = fit.fit(vectors).cluster_centers_.astype(np.float64)
    lengths = np.linalg.norm(centroids, axis=1, keepdims=True)
    has_direction = lengths[:, 0] > TINY
    if not has_direction.any():
        return vectors[:1]
    centroids = (centroids[has_direction] / lengths[has_direction]).astype(np.float32)
    members = np.bincount(assign(vectors, centroids), minlength=len(centroids))
    # The remaining centroids can only gain rows, so all of them have at least `at_least` rows then.
    # min() keeps the largest if no centroid has enough.
    return centroids[members >= min(at_least, members.max())]


def assign(vectors: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Return the index of the first centroid of largest cosine for each row, int32 [n].

    `vectors`, float32 [n, D], have length 1 within 1%; `centroids`, float32 [k, D], are unit
    vectors. A row's result does not depend on the other rows.
    """
    # A matrix product is fast, but its last bits depend on its shape and on the processor. So it
    # only selects the centroids that can be nearest: its error is at most D half-ulps, and a
    # difference has it twice. Exact products summed in float64 decide among these.
    margin = 2.1 * (vectors.shape[1] + 8) * HALF_ULP
    labels = np.empty(len(vectors), np.int32)
    for start in range(0, len(vectors), BLOCK):
        rows = vectors[start : start + BLOCK]
        cosines = rows @ centroids.T
        may_be_nearest = cosines >= cosines.max(axis=1, keepdims=True) - margin
        labels[start : start + BLOCK] = may_be_nearest.argmax(axis=1)
        for index in np.flatnonzero(may_be_nearest.sum(axis=1) > 1):
            candidates = np.flatnonzero(may_be_nearest[index])
            products = rows[index].astype(np.float64) * centroids[candidates]
            labels[start + index] = candidates[np.argmax([row.sum() for row in products])]
    return labels


def make_leaves(
    vectors: np.ndarray, tokens: np.ndarray, config: ClusterConfig, seed: int
) -> list[np.ndarray]:
    """Group the documents of a node into clusters: ascending indices, sorted by their first one.

    1. k-means makes one group per documents_per_cluster documents.
    2. A group over a limit is halved along its first principal direction until it fits.
    3. A group below min_documents joins the nearest group with room for all its documents, if any.

    `vectors` are unit vectors, float32 [n, D], n >= 1, in a reproducible order; `tokens` is int64
    [n], each at most max_cluster_tokens; `seed` is below 2**32.
    """
    count = max(1, round(len(vectors) / config.documents_per_cluster))
    labels = assign(vectors, fit_centroids(vectors, count, seed))
    with one_thread():
        groups = [
            part
            for label in np.unique(labels)
            for part in _split(np.flatnonzero(labels == label), vectors, tokens, config)
        ]
        groups = _merge(groups, vectors, tokens, config)
    return sorted(groups, key=lambda group: int(group[0]))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limit matrix products to one thread, so that their bits do not depend on the core count.

    The limit applies to the whole process, so a lock admits one thread of the worker at a time.
    """
    with _one_thread_lock, threadpool_limits(1):
        yield


def _split(
    group: np.ndarray, vectors: np.ndarray, tokens: np.ndarray, config: ClusterConfig
) -> Iterator[np.ndarray]:
    """Halve a group, by documents or by tokens depending on the limit exceeded, until it fits."""
    pending = [group]
    while pending:
        group = pending.pop()
        too_many_documents = len(group) > config.max_documents
        if len(group) == 1 or not (
            too_many_documents or tokens[group].sum() > config.max_cluster_tokens
        ):
            yield np.sort(group)
            continue
        # Halves, not a 2-means split, which may cut off single documents: a group of n documents is
        # halved about log2(n / limit) times, and neighbors along the direction stay together.
        group = group[np.argsort(_spread(vectors[group]), kind="stable")]
        middle = len(group) // 2
        if not too_many_documents:
            # Too many tokens: the cut nearest to half of the tokens, with a document on either
            # side.
            total = np.cumsum(tokens[group])
            middle = int(np.abs(total[:-1] - total[-1] / 2).argmin()) + 1
        pending += [group[middle:], group[:middle]]


def _spread(vectors: np.ndarray) -> np.ndarray:
    """Project rows onto their first principal direction, by power iteration; [n]."""
    centered = vectors - vectors.mean(axis=0, keepdims=True)
    # A fixed start, the row farthest from the mean, instead of a random one: the result is a
    # function of the rows.
    direction = centered[np.argmax((centered**2).sum(axis=1))]
    for _ in range(ROUNDS):
        length = np.linalg.norm(direction)
        if length < TINY:  # all rows are equal
            break
        # Left to right: two products with vectors, and never the D x D covariance.
        direction = (direction / length) @ centered.T @ centered
    return centered @ direction


def _merge(
    groups: Sequence[np.ndarray], vectors: np.ndarray, tokens: np.ndarray, config: ClusterConfig
) -> list[np.ndarray]:
    """Merge small groups, the smallest first, into the nearest group with enough room."""
    groups = list(groups)
    # Sums of unit vectors, not means, so that a merger adds them. The cosine needs no length of the
    # smallest group: it scales all cosines of a step alike.
    means = np.stack([vectors[group].sum(axis=0, dtype=np.float64) for group in groups])
    documents = np.array([len(group) for group in groups])
    total = np.array([tokens[group].sum() for group in groups])
    alive = np.ones(len(groups), dtype=bool)
    may_move = alive.copy()
    while len(small := np.flatnonzero(may_move & alive & (documents < config.min_documents))):
        smallest = small[np.argmin(documents[small])]
        room = alive & (documents + documents[smallest] <= config.max_documents)
        room &= total + total[smallest] <= config.max_cluster_tokens
        room[smallest] = False
        # No group will have room later either, because groups only grow.
        if not room.any():
            may_move[smallest] = False
            continue
        lengths = np.maximum(np.linalg.norm(means, axis=1), TINY)
        cosines = np.where(room, means @ means[smallest] / lengths, -np.inf)
        target = int(np.argmax(cosines))
        groups[target] = np.sort(np.concatenate([groups[target], groups[smallest]]))
        means[target] += means[smallest]
        documents[target] += documents[smallest]
        total[target] += total[smallest]
        alive[smallest] = False
    return [group for group, stays in zip(groups, alive, strict=True) if stays]
