"""Removes duplicate documents: equal texts, and near-equal texts found by MinHash.

1. A text is a node of a graph, with a 24-byte sort key. Of near-equal texts the smallest node is
   kept: the text of highest quality; among equals the text with the most characters of content
   minus boilerplate (boilerplate.py), then the smallest id.
2. Nodes that share a band key are candidate pairs. In a group of more than `largest_group` nodes,
   every further node is paired with the first node only.
3. A candidate pair gets an edge if the Jaccard similarity of its shingles is at least `threshold`.
4. Edges become connected components in `rounds` rounds of large-star and small-star steps (Kiveris
   et al. 2014).
5. Of equal texts, all but the first are removed as exact duplicates.

No step compares all pairs. Bands are shuffled in packed form, and texts twice.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.pvalue import TaggedOutput

from data_pipeline import balance, boilerplate, signatures
from data_pipeline.records import Document, event, order, remove, sized
from spell_jax.runtime.config import check_least

# Partitions of the band keys. With 16 bands a partition has 2 MB for 1,000,000 documents, and
# 200 MB for 100,000,000.
PARTS = 256
# Documents with bands that are packed together. Of 2048 x 16 bands, a partition gets 128 rows of 32
# bytes on average, and the runner shuffles one value instead of 128.
PACKED = 2048
# Bytes of a node: 8 of quality and worth, which decide first, then 16 of the id.
NODE = 24
RANK = 8  # bytes before the id
BALANCES = balance.KEPT_OR_REMOVED


@dataclass(frozen=True)
class DedupConfig:
    """Settings of the dedup stage.

    Attributes:
      permutations: Number of values in a MinHash signature.
      bands: Number of bands of a signature; divides `permutations`. More bands find more near
        duplicates, and compare more pairs in vain.
      threshold: Least Jaccard similarity of near duplicates, above 0 and at most 1.
      shingle_words: Number of tokens in a shingle.
      largest_group: Largest band group in which all pairs are compared, in nodes.
      rounds: Number of large-star and small-star rounds. 8 rounds settle chains of up to 200 texts
        in any order, and of about 1,000 texts in random order. Unsettled texts are counted.
      seed: Seed of the permutations, from 0 to 2^32 - 1.
    """

    permutations: int = 128
    bands: int = 16
    threshold: float = 0.8
    shingle_words: int = 5
    largest_group: int = 64
    rounds: int = 8
    seed: int = 1

    def __post_init__(self):
        least = {"permutations": 1, "bands": 1, "shingle_words": 1, "rounds": 1, "largest_group": 2}
        check_least(self, "dedup.", **least)
        if self.permutations % self.bands:
            raise ValueError(
                f"dedup.bands = {self.bands}: must divide permutations = {self.permutations}"
            )
        if not 0 < self.threshold <= 1:
            raise ValueError(f"dedup.threshold = {self.threshold}: must be above 0 and at most 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"dedup.seed = {self.seed}: must be at least 0 and below 2^32")

    def band_keys(self, shingles: np.ndarray) -> np.ndarray:
        """Return the band keys of a text's shingles, uint64 [bands]."""
        signature = signatures.signature(shingles, self.permutations, self.seed)
        return signatures.band_keys(signature, self.bands)


def make_dedup(documents: beam.PCollection, config: DedupConfig) -> dict[str, beam.PCollection]:
    """Keep one document of each component of near-equal texts.

    Events by source: "documents read", "documents kept", "documents removed: exact duplicate" or
    "near duplicate". Events of source "": "groups capped", band groups over `largest_group`;
    "documents beyond the cap", the nodes beyond it, once per band; "candidate pairs" of texts that
    are not equal; "pairs above the threshold"; "component size = N", the kept text included;
    "components unconverged", texts in a component that `rounds` rounds did not settle. Such a text
    is removed as a duplicate of its smallest neighbor, which may be removed itself. The first text
    of a component is always kept.
    """
    groups: Any = (
        documents
        | "band keys" >> beam.Map(_bands, config)
        | "batch bands" >> beam.BatchElements(PACKED, PACKED)
        | "pack bands" >> beam.FlatMap(_pack_bands)
        | "group bands" >> beam.GroupByKey()
        | "pair groups"
        >> beam.FlatMap(_pairs, config.largest_group).with_outputs("counts", main="pairs")
    )
    # Texts that are nearly equal share many of their 16 bands, and each gives the same pair.
    pairs = groups.pairs | "distinct pairs" >> beam.Distinct()
    shingled, compared = _compare(documents, pairs, config)
    stars = connect(compared.edges, config.rounds)
    # Edges carry 24-byte nodes only. The names of the kept texts, for the report, are joined here.
    named: Any = (
        {"children": stars.children, "names": shingled.names}
        | "join names" >> beam.CoGroupByKey()
        | "name survivors" >> beam.FlatMapTuple(_name).with_outputs("counts", main="because")
    )
    # The second shuffle of the texts. Keys are ids, not nodes: equal texts of different quality
    # have different nodes and must meet here.
    by_id = documents | "key documents" >> beam.Map(lambda d: (bytes.fromhex(d["id"]), d))
    tables: Any = (
        {"documents": by_id, "because": named.because}
        | "join documents" >> beam.CoGroupByKey()
        | "keep one" >> beam.FlatMapTuple(_keep).with_outputs("counts", "removed", main="documents")
    )
    read = documents | "count read" >> beam.Map(lambda d: ("documents read", d["source"]))
    events = (groups.counts, compared.counts, stars.counts, named.counts, tables.counts, read)
    return {
        "documents": tables.documents,
        "removed": tables.removed,
        "counts": events | "all events" >> beam.Flatten(),
    }


def node_of(document: Document) -> bytes:
    """Return a 24-byte sort key: quality (missing last) and worth, descending, then the id."""
    worth = boilerplate.worth(document["text"])
    return _rank(document["quality"], worth) + bytes.fromhex(document["id"])


def _rank(quality: float | None, worth: int) -> bytes:
    # Adding 0.0 turns -0.0 into 0.0.
    score = -math.inf if quality is None or math.isnan(quality) else quality + 0.0
    with np.errstate(over="ignore"):  # a score beyond float32's range becomes infinite
        bits = int(np.float32(score).view(np.uint32))
    # As integers, the bits of positive floats rise with the value and those of negative floats
    # fall. `falling` falls with the value everywhere.
    falling = bits if bits >> 31 else 0x7FFFFFFF - bits
    # A worth may be negative.
    return struct.pack(">II", falling, min(max(0, 2**31 - worth), 2**32 - 1))


def _bands(document: Document, config: DedupConfig) -> tuple[np.ndarray, bytes]:
    shingles = signatures.shingles(document["text"], config.shingle_words)
    return config.band_keys(shingles), node_of(document)


def _pack_bands(batch: Sequence[tuple[np.ndarray, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield (key partition, 32-byte rows of band key and node) for a batch of documents."""
    keys = np.concatenate([keys for keys, _ in batch])
    nodes = np.frombuffer(b"".join(node for _, node in batch), ">u8").reshape(-1, NODE // 8)
    rows = np.column_stack([keys, np.repeat(nodes, len(keys) // len(nodes), axis=0)])
    # Band keys are uniform hashes, so their remainders fill the partitions evenly.
    parts = keys % np.uint64(PARTS)
    for part in np.unique(parts).tolist():
        yield part, rows[parts == part].astype(">u8").tobytes()


def _pairs(part: tuple[int, Iterable[bytes]], largest: int) -> Iterator[Any]:
    """Yield (smaller node, larger node) for documents that share a band key."""
    data = b"".join(part[1])
    rows = np.frombuffer(data, ">u8").reshape(-1, 1 + NODE // 8).astype(np.uint64)
    # lexsort takes its last key first, so the band key leads and the node's three words follow: a
    # group is a run of rows, and its smallest node comes first.
    rows = rows[np.lexsort(rows.T[::-1])]
    keys = rows[:, 0]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    sizes = np.diff(np.append(starts, len(keys)))
    for start, size in zip(starts[sizes > 1], sizes[sizes > 1], strict=True):
        nodes = _distinct_texts(rows[start : start + size, 1:].astype(">u8").tobytes())
        for i, first in enumerate(nodes[:largest]):
            for second in nodes[i + 1 : largest]:
                yield first, second
        # All pairs of n nodes are n (n - 1) / 2: 2,016 for 64 nodes, 50 million for a boilerplate
        # text on 10,000 pages. Beyond the cap, pairs with the first node keep the number linear.
        if len(nodes) > largest:
            yield event("groups capped")
            for further in nodes[largest:]:
                yield nodes[0], further
                yield event("documents beyond the cap")


def _distinct_texts(nodes: bytes) -> list[bytes]:
    """Return the first node of each id; equal texts may differ in quality. Input is sorted."""
    first: dict[bytes, bytes] = {}
    for start in range(0, len(nodes), NODE):
        node = nodes[start : start + NODE]
        first.setdefault(node[RANK:], node)
    return list(first.values())


def _compare(
    documents: beam.PCollection, pairs: beam.PCollection, config: DedupConfig
) -> tuple[Any, Any]:
    """Compare the shingles of candidate pairs.

    Returns:
      Two sets of outputs: the first has "names", the pair (node, "SOURCE:PLACE") of each document;
      the second has "edges", the two nodes of each pair of near duplicates, and "counts".
    """
    # The first shuffle of the texts. Shingles take 8 bytes per word, more than the words
    # themselves, so they are computed again for the texts in a pair instead of being shuffled for
    # all texts.
    texts = documents | "key texts" >> beam.Map(_text_by_id)
    pairs_by_node = pairs | "ask for both" >> beam.FlatMapTuple(
        lambda first, second: [(first[RANK:], first + second), (second[RANK:], first + second)]
    )
    shingled: Any = (
        {"texts": texts, "asked": pairs_by_node}
        | "join texts" >> beam.CoGroupByKey()
        | "cut shingles"
        >> beam.FlatMap(_shingle, config.shingle_words).with_outputs("names", main="shingles")
    )
    edges: Any = (
        shingled.shingles
        | "group pairs" >> beam.GroupByKey()
        | "compare pairs"
        >> beam.FlatMap(_edge, config.threshold).with_outputs("counts", main="edges")
    )
    return shingled, edges


def _text_by_id(document: Document) -> tuple[bytes, tuple[bytes, str, str, str]]:
    node = node_of(document)
    return node[RANK:], (node, document["source"], document["place"], document["text"])


def _shingle(joined: tuple[bytes, dict[str, Iterable]], words: int) -> Iterator[Any]:
    groups = joined[1]
    pairs = sorted(groups["asked"])
    if not pairs:
        return
    # Equal texts of several places: the smallest node is the text that `_keep` keeps.
    node, source, place, text = min(groups["texts"])
    yield TaggedOutput("names", (node, f"{source}:{place}"))
    shingles = signatures.shingles(text, words).tobytes()
    for pair in pairs:
        yield pair, shingles


def _edge(compared: tuple[bytes, Iterable[bytes]], threshold: float) -> Iterator[Any]:
    pair, sets = compared
    a, b = (np.frombuffer(shingles, np.uint64) for shingles in sets)
    yield event("candidate pairs")
    if signatures.jaccard(a, b) >= threshold:
        yield event("pairs above the threshold")
        yield pair[:NODE], pair[NODE:]


def connect(edges: Any, rounds: int) -> Any:
    """Turn the connected components of a graph of (node, other node), bytes, into stars.

    Output "children": (center, other node of its component). Output "counts": one event
    ("components unconverged", "") for each node that has a smaller neighbor and at least one more
    neighbor. Without such events, every component is one star around its smallest node; with them,
    some centers are nodes of another star.
    """
    # A Beam graph has no loops, so the rounds are unrolled. It cannot stop early either: the cost
    # of a settled round is a shuffle of its stars.
    for number in range(1, rounds + 1):
        edges = (
            edges
            | f"see all neighbors {number}" >> beam.FlatMapTuple(_both_directions)
            | f"group all neighbors {number}" >> beam.GroupByKey()
            | f"large star {number}" >> beam.FlatMapTuple(_large_star)
            | f"group smaller neighbors {number}" >> beam.GroupByKey()
            | f"small star {number}" >> beam.FlatMapTuple(_small_star)
        )
    return (
        edges
        | "see stars" >> beam.FlatMapTuple(_both_directions)
        | "group stars" >> beam.GroupByKey()
        | "find centers" >> beam.FlatMapTuple(_center).with_outputs("counts", main="children")
    )


def _both_directions(a: bytes, b: bytes) -> Iterator[tuple[bytes, bytes]]:
    yield a, b
    yield b, a


def _large_star(node: bytes, neighbors: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Link larger neighbors to the smallest node of the neighborhood: (larger node, smallest)."""
    distinct_neighbors = set(neighbors)
    smallest_node = min(node, *distinct_neighbors)
    return ((neighbor, smallest_node) for neighbor in distinct_neighbors if neighbor > node)


def _small_star(node: bytes, smaller: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Link a node and its smaller neighbors to the smallest neighbor: (larger node, smallest)."""
    smallest_node, *larger_neighbors = sorted(set(smaller))
    return ((larger_node, smallest_node) for larger_node in [*larger_neighbors, node])


def _center(node: bytes, neighbors: Iterable[bytes]) -> Iterator[Any]:
    distinct_neighbors = set(neighbors)
    if min(distinct_neighbors) < node:
        yield min(distinct_neighbors), node
        # A settled node has its center as only neighbor.
        if len(distinct_neighbors) > 1:
            yield event("components unconverged")


def _name(_: bytes, groups: dict[str, Iterable]) -> Iterator[Any]:
    """Yield (id of a near duplicate, "SOURCE:PLACE" of the kept text)."""
    children = sorted(groups["children"])
    if not children:
        return
    (name,) = groups["names"]
    yield event(sized("component size", len(children) + 1))
    for child in children:
        yield child[RANK:], name


def _keep(_: bytes, groups: dict[str, Iterable]) -> Iterator[Any]:
    """Yield the first of equal texts, unless it is a near duplicate; remove its copies."""
    # `order` decides between copies of equal quality, so that the survivor does not depend on the
    # order in which the runner delivers them.
    best, *copies = sorted(groups["documents"], key=lambda d: (node_of(d), order(d)))
    name = f"{best['source']}:{best['place']}"
    for copy in copies:
        yield from remove(copy, "exact duplicate", name)
    if kept_names := list(groups["because"]):
        yield from remove(best, "near duplicate", kept_names[0])
    else:
        yield event("documents kept", best["source"])
        yield best
