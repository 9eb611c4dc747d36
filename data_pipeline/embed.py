"""Computes document vectors for clustering, float32 [D].

Method "tfidf" needs no weights and no accelerator:
1. A document's words are hashed to `features` numbers and counted. A word that occurs in d of n
   sampled documents has the weight log((1 + n) / (1 + d)), which finds stop words in any language.
   A word in only one sampled document is dropped.
2. A truncated SVD of the sample gives at most `dimensions` - 1 directions in the space of words.
3. Word counts, damped to 1 + log(count) and weighted, are projected onto the directions and scaled
   to length 1. Documents without any informative word get the last axis.

Method "policy" uses an embedding model such as Qwen3-Embedding (spell_jax/policy/embedder.py).
Documents are split by id into `shards` groups, so the batches do not depend on the workers.

Vectors are bit-identical for any number of workers and, with "tfidf", of cores. With "policy" they
depend on a worker's kind and number of devices.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.pvalue import AsList
from apache_beam.utils.shared import Shared

from data_pipeline.balance import LostRowsError
from data_pipeline.records import Document, event, order
from spell_jax.runtime.config import check_choice, check_least

METHODS = ("tfidf", "policy")
DTYPES = ("float32", "bfloat16")
EMBEDDED = "documents embedded"
TRUNCATED = "documents truncated for embedding"
WORDLESS = "documents without telling words"
# Every document gets a vector, and every sampled one counts for the directions.
BALANCES = (
    "in:documents = out:documents",
    f"{EMBEDDED} = out:documents",
    "documents sampled = documents fitted",
)
# Chinese and Japanese put no spaces between words, so each of their characters is a word. Other
# words have at least two letters or digits.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD = f"[{_CJK}]|[^\\W{_CJK}]{{2,}}"
# Power iterations of the SVD. With 2, 4 and 7 iterations equally many of 381 speech pieces (77 to
# 79 %) have their nearest neighbor within ten years.
ROUNDS = 4
# Share of the largest singular value. Smaller values are rounding errors, so their directions are
# noise.
NEGLIGIBLE = 1e-4
# The directions are sent in blocks of this size, because runners limit the size of an element.
BLOCK_BYTES = 4 << 20
# Documents with tokens and vectors in memory at once: 1024 x 4096 float32 are 16 MB of vectors.
EMBED_AT_ONCE = 1024

Words = tuple[str, bytes, bytes]  # document id, hashed words (int32), their counts (float32)
# Number from 0, number of all blocks, hashed words (int32 [n]), their rows (float32 [n, k]).
Block = tuple[int, int, bytes, bytes]


@dataclass(frozen=True)
class MeshSizes:
    """Mesh axis sizes of a worker's devices; at most one axis may be -1: all remaining devices."""

    data: int = 1
    fsdp: int = -1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                raise ValueError(f"embed.mesh.{axis} = {size}: must be at least 1, or -1")
        if list(sizes.values()).count(-1) > 1:
            raise ValueError(f"embed.mesh = {sizes}: at most one axis must be -1")


@dataclass(frozen=True)
class EmbedConfig:
    """Settings of the embed stage. Each field below `method` belongs to the method in brackets.

    Attributes:
      method: "tfidf" or "policy".
      seed: [tfidf] Seed of the SVD.
      features: [tfidf] Number of hash values of words.
      dimensions: [tfidf] Largest D.
      fit_documents: [tfidf] Number of sampled documents for the SVD. All of their words are in
        memory at once and take half the size of the texts.
      folder: [policy] Hugging Face folder, at the same local path on every worker.
      max_tokens: [policy] Number of tokens at which a document is truncated.
      token_budget: [policy] Number of tokens in a batch, padding included.
      compute_dtype: [policy] "float32" or "bfloat16".
      mesh: [policy] Mesh of a worker's devices.
      shards: [policy] Number of groups of documents. A worker processes whole groups and holds one
        in memory at a time. Use few shards for few documents, so that batches are full.
    """

    method: str = "tfidf"
    seed: int = 0
    features: int = 2**18
    dimensions: int = 256
    fit_documents: int = 20_000
    folder: str = ""
    max_tokens: int = 8192
    token_budget: int = 65_536
    compute_dtype: str = "bfloat16"
    mesh: MeshSizes = MeshSizes()
    shards: int = 64

    def __post_init__(self):
        check_choice(self, "embed.", method=METHODS, compute_dtype=DTYPES)
        least = {"features": 2, "dimensions": 2, "fit_documents": 1}
        check_least(self, "embed.", **least, max_tokens=2, token_budget=1, shards=1)
        if self.method == "policy" and not self.folder:
            raise ValueError("embed.folder = '': method 'policy' must have a Hugging Face folder")


def make_embed(
    documents: beam.PCollection, total: int, config: EmbedConfig
) -> dict[str, beam.PCollection]:
    """Add vectors to documents; `total`, their number, determines the share that is sampled."""
    if config.method == "tfidf":
        # The number of ids below a threshold is random. A margin of 4 standard deviations makes
        # sure that there are enough.
        sample_size = config.fit_documents + 4 * config.fit_documents**0.5 + 16
        share = min(1.0, sample_size / max(total, 1))
        sample: Any = documents | "count sample's words" >> beam.FlatMap(
            _sample_words, share, config.features
        ).with_outputs("counts", main="words")
        directions: Any = (
            sample.words
            | "gather sample" >> beam.GroupByKey()
            | "find directions"
            >> beam.FlatMap(_directions, config).with_outputs("counts", main="blocks")
        )
        embedded: Any = documents | "embed by words" >> beam.FlatMap(
            _embed_by_words, AsList(directions.blocks), Shared(), config.features
        ).with_outputs("counts", main="documents")
        counts = (
            sample.counts,
            directions.counts,
            embedded.counts,
        ) | "all counts" >> beam.Flatten()
    else:
        embedded = (
            documents
            # Groups by id, not by worker: a batch's shape changes the last bits of its vectors, and
            # the clusters depend on these bits.
            | "assign to shards" >> beam.Map(_with_shard, config.shards)
            | "gather shards" >> beam.GroupByKey()
            | "embed by policy"
            >> beam.ParDo(_EmbedByPolicy(config)).with_outputs("counts", main="documents")
        )
        counts = embedded.counts
    return {"documents": embedded.documents, "counts": counts}


@functools.cache
def _vectorizer(features: int) -> Any:
    from sklearn.feature_extraction.text import HashingVectorizer  # slow to import

    make: Any = HashingVectorizer  # its type stubs lack norm=None
    return make(n_features=features, alternate_sign=False, norm=None, token_pattern=WORD)


def _count_words(text: str, features: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a text's hashed words, ascending, and their counts: int32 [n], float32 [n]."""
    row = _vectorizer(features).transform([text])
    return row.indices.astype(np.int32), row.data.astype(np.float32)


def _sample_words(document: Document, share: float, features: int) -> Iterator[Any]:
    """Yield (0, Words) of a document with a small id: slightly more documents than the sample.

    The only key is 0, because one worker fits the directions.
    """
    # Ids are uniform hashes. 48 bits: a float64 compares integers below 2^53 exactly.
    if int(document["id"][:12], 16) < share * 2**48:
        yield event("documents sampled")
        words, counts = _count_words(document["text"], features)
        yield 0, (document["id"], words.tobytes(), counts.tobytes())


def _directions(sample: tuple[int, Iterable[Words]], config: EmbedConfig) -> Iterator[Any]:
    """Yield blocks of the weighted projection: one row of k values per informative word.

    There is at least one block, also without any such word.
    """
    from scipy.sparse import csr_array
    from sklearn.decomposition import TruncatedSVD
    from sklearn.preprocessing import normalize
    from threadpoolctl import threadpool_limits

    # Sorted by id: rows arrive in any order, and the smallest ids are the sample.
    gathered = sorted(sample[1])
    for _ in gathered:
        yield event("documents fitted")
    fitted_documents = gathered[: config.fit_documents]
    words = np.frombuffer(b"".join(data for _, data, _ in fitted_documents), np.int32)
    counts = np.frombuffer(b"".join(data for *_, data in fitted_documents), np.float32)
    ends = np.cumsum([0, *(len(data) // words.itemsize for _, data, _ in fitted_documents)])
    shape = len(fitted_documents), config.features
    table: Any = csr_array((1 + np.log(counts), words, ends), shape=shape)
    document_counts = np.bincount(table.indices, minlength=config.features)
    # A word of one document compares it with no other; a word of all documents has weight log(1) =
    # 0.
    informative = np.flatnonzero(
        (document_counts > 1) & (document_counts < len(fitted_documents))
    ).astype(np.int32)
    if not len(informative):
        yield 0, 1, b"", b""
        return
    weights = np.log((1 + len(fitted_documents)) / (1 + document_counts[informative])).astype(
        np.float32
    )
    # Unit rows, so that a long document does not dominate the directions.
    table = normalize(table[:, informative] * weights)
    # One dimension less: the last axis is for documents without an informative word.
    components = min(config.dimensions - 1, *table.shape)
    svd: Any = TruncatedSVD(components, n_iter=ROUNDS, random_state=config.seed)
    with threadpool_limits(1):  # the result of a multi-threaded sum depends on the thread count
        svd.fit(table)
    kept_components = svd.singular_values_ > NEGLIGIBLE * svd.singular_values_[0]
    # The weights are multiplied into the directions, so that embedding a document is one sparse
    # product.
    rows = np.ascontiguousarray((svd.components_[kept_components] * weights).T, np.float32)
    step = max(1, BLOCK_BYTES // rows[0].nbytes)
    starts = range(0, len(rows), step)
    for number, start in enumerate(starts):
        part = slice(start, start + step)
        yield number, len(starts), informative[part].tobytes(), rows[part].tobytes()


class _Directions:
    """Projection from word counts to a vector, assembled from its blocks."""

    def __init__(self, blocks: Iterable[Block], features: int):
        blocks = sorted(blocks)
        if not blocks or [block[0] for block in blocks] != list(range(blocks[0][1])):
            raise LostRowsError(f"stage embed: {len(blocks)} blocks of directions came, not all")
        words = np.frombuffer(b"".join(words for *_, words, _ in blocks), np.int32)
        rows = np.frombuffer(b"".join(rows for *_, rows in blocks), np.float32)
        self._rows = rows.reshape(len(words), -1) if len(words) else np.zeros((0, 0), np.float32)
        self._number = np.full(features, -1, np.int32)  # hashed word -> row; -1: not informative
        self._number[words] = np.arange(len(words))

    def vector(self, words: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, bool]:
        """Return a unit vector, float32 [k + 1], and whether any word is informative."""
        from scipy.sparse import csr_array

        numbers = self._number[words]
        is_informative = numbers >= 0
        row = (
            1 + np.log(counts[is_informative]),
            numbers[is_informative],
            [0, np.count_nonzero(is_informative)],
        )
        vector = np.zeros(self._rows.shape[1] + 1, np.float32)
        # A sparse product sums word by word; BLAS would split the sum among threads.
        vector[:-1] = (csr_array(row, shape=(1, len(self._rows))) @ self._rows)[0]
        length = np.sqrt(np.sum(vector * vector))
        if length > 0:
            return vector / length, True
        # An axis that no other document uses: such documents are alike, and unlike all others. A
        # zero vector would have no cosine.
        vector[-1] = 1
        return vector, False


def _embed_by_words(
    document: Any, blocks: list[Block], shared: Shared, features: int
) -> Iterator[Any]:
    directions = shared.acquire(lambda: _Directions(blocks, features))  # one copy per process
    vector, has_words = directions.vector(*_count_words(document["text"], features))
    yield document | {"vector": vector.tobytes()}
    yield event(EMBEDDED, document["source"])
    if not has_words:
        yield event(WORDLESS, document["source"])


def _with_shard(document: Document, shards: int) -> tuple[int, Document]:
    return int(document["id"][:12], 16) % shards, document


class _SharedEmbedder:
    """Embedder that a process's threads use in turn: two programs at once may deadlock."""

    def __init__(self):
        self._lock, self._users, self._embedder = threading.Lock(), 0, None

    def acquire(self, config: EmbedConfig) -> None:
        from spell_jax.policy.embedder import Embedder  # takes seconds; "tfidf" does not need it
        from spell_jax.runtime.mesh import make_mesh

        with self._lock:
            if self._embedder is None:
                limits = config.max_tokens, config.token_budget, config.compute_dtype
                mesh = make_mesh(dataclasses.asdict(config.mesh))
                self._embedder = Embedder(config.folder, mesh, *limits)
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._embedder = None

    def embed(self, documents: list[Document]) -> tuple[np.ndarray, list[bool]]:
        """Return vectors, float32 [B, D], and for each document whether it was truncated."""
        with self._lock:
            assert self._embedder is not None, "call acquire() first"
            encoded = [self._embedder.encode(document["text"]) for document in documents]
            return self._embedder.embed([ids for ids, _ in encoded]), [cut for _, cut in encoded]


class _EmbedByPolicy(beam.DoFn):
    """Map from (shard, its documents) to documents with the policy's vectors, and events."""

    def __init__(self, config: EmbedConfig):
        self._config = config
        self._shared = Shared()

    def setup(self):
        self._embedder = self._shared.acquire(_SharedEmbedder)
        self._embedder.acquire(self._config)

    def teardown(self):
        self._embedder.release()

    def process(self, shard):
        # Sorted by length, so that batches are full. The other keys make the order unique.
        documents = sorted(shard[1], key=lambda d: (d["tokens"], d["id"], order(d)))
        for start in range(0, len(documents), EMBED_AT_ONCE):
            batch = documents[start : start + EMBED_AT_ONCE]
            for document, vector, is_cut in zip(batch, *self._embedder.embed(batch), strict=True):
                yield document | {"vector": vector.tobytes()}
                yield event(EMBEDDED, document["source"])
                if is_cut:
                    yield event(TRUNCATED, document["source"])
