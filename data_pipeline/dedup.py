"""Documents that repeat another one go: equal texts, and near-equal ones by MinHash.

1. A text is a node: 24 bytes whose order says which one of near-equal texts stays: the one of
   higher quality, then the longer one, then the one of the smaller id.
2. Nodes are grouped by the keys of their signatures' bands. What shares a group is a candidate
   pair; of a group over `largest_group` all pairs of its first nodes are, and each further node
   with the first one alone. Such groups are counted.
3. The shingles of candidates are compared exactly; pairs of at least `threshold` are edges.
4. Edges become components in `rounds` rounds of large-star and small-star steps (Kiveris et al.
   2014): by each node's larger, then by its smaller neighbors, all move to the smallest one.
5. The first node of a component stays. Every other one is removed as its near duplicate, and of
   equal texts every one but the first as an exact duplicate.

There is no step over all pairs. Bands travel packed: a value has the 32-byte rows (key of the band,
node) of up to 2,048 documents for one of 256 parts of the keys. Texts are shuffled twice: to meet
those that ask for their shingles, and to meet what removes them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.window import GlobalWindows

from data_pipeline import signatures
from data_pipeline.records import Document, make_removed, order, sized

# A part of 1,000,000 documents' bands has 2 MB at 16 bands, one of 100,000,000 has 200 MB.
PARTS = 256
PACKED = 2048
NODE = 24
RANK = 8  # bytes of a node in front of its document's id


@dataclass(frozen=True)
class DedupConfig:
    """How near-equal texts are found.

    Attributes:
      permutations: values of a signature.
      bands: that a signature is cut into; more find more, and compare more in vain.
      threshold: the least Jaccard similarity of near duplicates.
      shingle_words: tokens in a shingle.
      largest_group: nodes of a band's group of which all pairs are compared.
      rounds: of large-star and small-star steps. 8 settle chains of up to 200 texts whatever their
        order, of about 1,000 in a random one; what is not settled is counted.
      seed: of the permutations.
    """

    permutations: int = 128
    bands: int = 16
    threshold: float = 0.8
    shingle_words: int = 5
    largest_group: int = 64
    rounds: int = 8
    seed: int = 1

    def __post_init__(self):
        for name in ("permutations", "bands", "shingle_words", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"dedup.{name} = {getattr(self, name)}: must be at least 1")
        if self.permutations % self.bands:
            raise ValueError(
                f"dedup.bands = {self.bands}: must divide permutations = {self.permutations}"
            )
        if not 0 < self.threshold <= 1:
            raise ValueError(f"dedup.threshold = {self.threshold}: must be above 0 and at most 1")
        if self.largest_group < 2:
            raise ValueError(f"dedup.largest_group = {self.largest_group}: must be at least 2")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"dedup.seed = {self.seed}: must be at least 0 and below 2^32")


def make_dedup(documents: beam.PCollection, config: DedupConfig) -> dict[str, beam.PCollection]:
    """One document of each component of near-equal texts.

    Events of "counts", of source "" where a source is not said:
      ("documents read", source), ("documents kept", source),
      ("documents removed: exact duplicate", source), ("...: near duplicate", source);
      ("groups capped", ""), ("documents beyond the cap", ""): see `largest_group`; once a band;
      ("candidate pairs", ""), ("pairs above the threshold", ""), of texts that are not equal;
      ("component size = N", ""): N texts, the one that stayed with them;
      ("components unconverged", ""): texts whose component was not settled after `rounds` rounds.
      Such a text goes as a duplicate of its smallest neighbor, which may go itself. The first text
      of a component stays in any case.

    Args:
      documents: of records.Document.

    Returns:
      PCollections by table: "documents", "removed", "counts".
    """
    groups: Any = (
        documents
        | "pack bands" >> beam.ParDo(_PackBands(config))
        | "group bands" >> beam.GroupByKey()
        | "pair groups"
        >> beam.FlatMap(_pairs, config.largest_group).with_outputs("events", main="pairs")
    )
    pairs = groups.pairs | "distinct pairs" >> beam.Distinct()
    shingled, compared = _compare(documents, pairs, config)
    stars = connect(compared.edges, config.rounds)
    named: Any = (
        {"children": stars.children, "names": shingled.names}
        | "join names" >> beam.CoGroupByKey()
        | "name survivors" >> beam.FlatMapTuple(_name).with_outputs("events", main="removed")
    )
    whole = documents | "key documents" >> beam.Map(_by_id)
    kept: Any = (
        {"documents": whole, "because": named.removed}
        | "join documents" >> beam.CoGroupByKey()
        | "keep one" >> beam.FlatMapTuple(_keep).with_outputs("events", "removed", main="documents")
    )
    read = documents | "count read" >> beam.Map(_count_read)
    events = (groups.events, compared.events, stars.events, named.events, kept.events, read)
    return {
        "documents": kept.documents,
        "removed": kept.removed,
        "counts": events | "all events" >> beam.Flatten(),
    }


def node_of(document: Document) -> bytes:
    """24 bytes: the smaller ones' documents stay.

    Quality in float32, falling, a missing one behind all others; length in characters, falling;
    id.
    """
    return _rank(document["quality"], len(document["text"])) + bytes.fromhex(document["id"])


def _rank(quality: float | None, length: int) -> bytes:
    score = -math.inf if quality is None or math.isnan(quality) else quality + 0.0  # no -0.0
    with np.errstate(over="ignore"):  # beyond float32's range: infinite
        bits = int(np.float32(score).view(np.uint32))
    # The bits of floats rise with them from 0 up and fall below; these fall everywhere.
    falling = bits if bits >> 31 else 0x7FFFFFFF - bits
    return struct.pack(">II", falling, max(0, 2**32 - 1 - length))


# ------------------------------------------------------------------------------------------- pairs


class _PackBands(beam.DoFn):
    """Document -> (part of the keys, rows of 32 bytes: the key of a band and the node)."""

    def __init__(self, config: DedupConfig):
        self.config = config

    def start_bundle(self):
        self.keys: list[np.ndarray] = []
        self.nodes: list[bytes] = []

    def process(self, document: Document) -> Iterator[tuple[int, bytes]]:
        c = self.config
        found = signatures.shingles(document["text"], c.shingle_words)
        made = signatures.signature(found, c.permutations, c.seed)
        self.keys.append(signatures.band_keys(made, c.bands))
        self.nodes.append(node_of(document))
        if len(self.nodes) == PACKED:
            yield from self._flush()

    def finish_bundle(self):
        for element in self._flush():
            yield GlobalWindows.windowed_value(element)

    def _flush(self) -> Iterator[tuple[int, bytes]]:
        if not self.nodes:
            return
        keys = np.concatenate(self.keys)
        nodes = np.frombuffer(b"".join(self.nodes), ">u8").reshape(-1, NODE // 8)
        rows = np.column_stack([keys, np.repeat(nodes, self.config.bands, axis=0)])
        parts = keys % np.uint64(PARTS)
        rows = rows[np.argsort(parts, kind="stable")]
        ends = np.cumsum(np.bincount(parts.astype(np.int64), minlength=PARTS))
        self.keys, self.nodes = [], []
        for part, (first, last) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if last > first:
                yield part, rows[first:last].astype(">u8").tobytes()


def _pairs(part: tuple[int, Iterable[bytes]], largest: int) -> Iterator[Any]:
    """(smaller node, larger node) of the documents that share the key of a band."""
    data = b"".join(part[1])
    rows = np.frombuffer(data, ">u8").reshape(-1, 1 + NODE // 8).astype(np.uint64)
    rows = rows[np.lexsort(rows.T[::-1])]
    keys = rows[:, 0]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    sizes = np.diff(np.append(starts, len(keys)))
    for start, size in zip(starts[sizes > 1], sizes[sizes > 1], strict=True):
        nodes = _distinct_texts(rows[start : start + size, 1:].astype(">u8").tobytes())
        for i, first in enumerate(nodes[:largest]):
            for second in nodes[i + 1 : largest]:
                yield first, second
        if len(nodes) > largest:
            yield _event("groups capped")
            for further in nodes[largest:]:
                yield nodes[0], further
                yield _event("documents beyond the cap")


def _distinct_texts(nodes: bytes) -> list[bytes]:
    """Of sorted nodes the first one of each id: equal texts may have come with other qualities."""
    first: dict[bytes, bytes] = {}
    for start in range(0, len(nodes), NODE):
        node = nodes[start : start + NODE]
        first.setdefault(node[RANK:], node)
    return list(first.values())


def _compare(
    documents: beam.PCollection, pairs: beam.PCollection, config: DedupConfig
) -> tuple[Any, Any]:
    """Outputs "shingles" with "names", and "edges" with "events".

    names: (node, "SOURCE:PLACE") of every candidate; edges: (smaller node, larger node).
    """
    texts = documents | "key texts" >> beam.Map(_text_by_id)
    asked = pairs | "ask for both" >> beam.FlatMapTuple(_ask)
    shingled: Any = (
        {"texts": texts, "asked": asked}
        | "join texts" >> beam.CoGroupByKey()
        | "cut shingles"
        >> beam.FlatMap(_shingle, config.shingle_words).with_outputs("names", main="shingles")
    )
    edges: Any = (
        shingled.shingles
        | "group pairs" >> beam.GroupByKey()
        | "compare pairs"
        >> beam.FlatMap(_edge, config.threshold).with_outputs("events", main="edges")
    )
    return shingled, edges


def _text_by_id(document: Document) -> tuple[bytes, tuple[bytes, str, str, str]]:
    node = node_of(document)
    return node[RANK:], (node, document["source"], document["place"], document["text"])


def _ask(first: bytes, second: bytes) -> Iterator[tuple[bytes, bytes]]:
    yield first[RANK:], first + second
    yield second[RANK:], first + second


def _shingle(joined: tuple[bytes, dict[str, Iterable]], words: int) -> Iterator[Any]:
    groups = joined[1]
    asked = sorted(groups["asked"])
    if not asked:
        return
    node, source, place, text = min(groups["texts"])
    yield TaggedOutput("names", (node, f"{source}:{place}"))
    found = signatures.shingles(text, words).tobytes()
    for pair in asked:
        yield pair, found


def _edge(compared: tuple[bytes, Iterable[bytes]], threshold: float) -> Iterator[Any]:
    pair, sets = compared
    a, b = (np.frombuffer(found, np.uint64) for found in sets)
    yield _event("candidate pairs")
    if signatures.jaccard(a, b) >= threshold:
        yield _event("pairs above the threshold")
        yield pair[:NODE], pair[NODE:]


# -------------------------------------------------------------------------------------- components


def connect(edges: Any, rounds: int) -> Any:
    """Stars of the components of a graph.

    Args:
      edges: (node, other node); nodes are bytes.

    Returns:
      Outputs "children", (center, other node of its component), and "events": one
      ("components unconverged", "") for each node that has more than a center, or has others around
      it and is not the smallest of its neighbors. Without them every component is one star around
      its smallest node. With them some centres are nodes of another star.
    """
    for number in range(1, rounds + 1):
        edges = (
            edges
            | f"see all neighbors {number}" >> beam.FlatMapTuple(_both)
            | f"group all neighbors {number}" >> beam.GroupByKey()
            | f"large star {number}" >> beam.FlatMapTuple(_large_star)
            | f"group smaller neighbors {number}" >> beam.GroupByKey()
            | f"small star {number}" >> beam.FlatMapTuple(_small_star)
        )
    return (
        edges
        | "see stars" >> beam.FlatMapTuple(_both)
        | "group stars" >> beam.GroupByKey()
        | "find centres" >> beam.FlatMapTuple(_centre).with_outputs("events", main="children")
    )


def _both(a: bytes, b: bytes) -> Iterator[tuple[bytes, bytes]]:
    yield a, b
    yield b, a


def _large_star(node: bytes, others: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Larger neighbors move to the smallest of all: (larger node, smallest)."""
    near = sorted(set(others))
    least = min(node, near[0])
    return ((other, least) for other in near if other > node)


def _small_star(node: bytes, smaller: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """A node and its smaller neighbors move to the smallest: (larger node, smallest)."""
    least, *others = sorted(set(smaller))
    return ((other, least) for other in [*others, node])


def _centre(node: bytes, others: Iterable[bytes]) -> Iterator[Any]:
    near = sorted(set(others))
    smaller = [other for other in near if other < node]
    if not smaller:
        return
    yield smaller[0], node
    if len(near) > 1:
        yield _event("components unconverged")


# --------------------------------------------------------------------------------------- survivors


def _name(_: bytes, groups: dict[str, Iterable]) -> Iterator[Any]:
    """(id of a near duplicate, "SOURCE:PLACE" of what stayed)."""
    children = sorted(groups["children"])
    if not children:
        return
    (name,) = groups["names"]
    yield _event(sized("component size", len(children) + 1))
    for child in children:
        yield child[RANK:], name


def _by_id(document: Document) -> tuple[bytes, Document]:
    return bytes.fromhex(document["id"]), document


def _keep(_: bytes, groups: dict[str, Iterable]) -> Iterator[Any]:
    """Of equal texts the first one, if no near duplicate goes before it."""
    best, *copies = sorted(groups["documents"], key=_order)
    name = f"{best['source']}:{best['place']}"
    near = [("near duplicate", best, because) for because in groups["because"]]
    gone = [*(("exact duplicate", copy, name) for copy in copies), *near]
    for reason, document, because in gone:
        yield _event(f"documents removed: {reason}", document["source"])
        removed = make_removed(document, reason, because)
        yield TaggedOutput("removed", removed)
    if not near:
        yield _event("documents kept", best["source"])
        yield best


def _order(document: Document) -> tuple[bytes, tuple[str, str, int, str]]:
    return node_of(document), order(document)


def _count_read(document: Document) -> tuple[str, str]:
    return "documents read", document["source"]


def _event(what: str, source: str = "") -> TaggedOutput:
    return TaggedOutput("events", (what, source))
