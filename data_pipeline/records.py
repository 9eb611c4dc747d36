"""Records that stages exchange (dicts, which Beam's runners encode), and schemas of tables."""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypedDict, get_type_hints

import pyarrow as pa
from apache_beam.pvalue import TaggedOutput


class Document(TypedDict):
    """Text and its origin."""

    # `digest` of the text; equal texts have equal ids. A paragraph of a report: also of its place.
    id: str
    text: str  # stripped
    source: str  # name of the source in the config
    # File path relative to the source's path, followed by "#" and the row number if the file has
    # rows; unique within a source.
    place: str
    part: int  # number from 0, in the order of the text, if the text was cut
    quality: float | None  # score from the source; None if there is none
    tokens: int  # by the policy's tokenizer; -1 before tokens are counted
    vector: bytes  # unit vector, float32 [D]; empty before the document is embedded


class Listed(TypedDict):
    """File to read; `source` and `place` are as in Document.

    A folder that cannot be read is listed too: its `place` ends in "/", and `problem` says why.
    """

    source: str
    url: str  # opened by fsspec
    place: str
    problem: str  # "" for a file
    size: int  # bytes; 0 if the file system does not report it
    version: str  # changes when the file changes; "" if the file system reports none


class BenchmarkText(NamedTuple):
    """Text of a benchmark, stripped, and its `digest`."""

    benchmark: str
    kind: str  # "document" or "question"
    id: str
    text: str


class Removed(TypedDict):
    """Record of a file, row or document that was removed; its location is as in Document."""

    reason: str  # category that the removal is counted under, in a few words
    source: str
    place: str
    part: int  # 0 for a file
    because: str  # "SOURCE:PLACE" of the equal text, benchmark that it matched, error, or ""


class File(TypedDict):
    """File that was read: its location as in Document, size in bytes, and `blake2b` as hex."""

    source: str
    place: str
    size: int
    hash: str


class Count(TypedDict):
    """Number of events of one kind in a stage, such as "documents kept", for one source."""

    what: str
    source: str
    number: int


class ClusterRecord(TypedDict):
    """Related documents that a rollout uses together."""

    id: str  # `digest` of the ids of its documents
    pool: str  # sorted names of the tasks that it may serve, joined by "+"
    documents: list[Document]  # sorted by source, place and part, without their vectors
    tokens: int  # of all documents together
    vector: bytes  # mean of the documents' vectors, float32 [D]


class AssignedCluster(ClusterRecord):
    """Cluster that was assigned a task."""

    task: str


class Point(TypedDict):
    """Clustering data of one document; `id`, `tokens` and `vector` are as in Document."""

    id: str
    tokens: int
    vector: bytes
    node: str  # path in the tree: the pool, then "/" and the child number of each level


class Centroids(TypedDict):
    """Centroids of the children of one node: unit vectors, float32 [K, D] as row-major bytes."""

    node: str
    vectors: bytes


class Member(TypedDict):
    """Assignment of a document to a cluster, by ids."""

    id: str
    cluster: str


# Schemas follow from the records' types, so that a field is declared once.
_TYPES: dict[Any, pa.DataType] = {str: pa.string(), int: pa.int64(), bytes: pa.binary()}
_TYPES[float | None] = pa.float64()


def _schema(record: type) -> pa.Schema:
    return pa.schema([(name, _TYPES[hint]) for name, hint in get_type_hints(record).items()])


_TYPES[list[Document]] = pa.list_(pa.struct(list(_schema(Document))))
_RECORDS = {
    "listed": Listed,
    "items": BenchmarkText,
    "documents": Document,
    "removed": Removed,
    "files": File,
    "counts": Count,
    "points": Point,
    "centroids": Centroids,
    "members": Member,
    "clusters": ClusterRecord,
    "tasks": AssignedCluster,
}
SCHEMAS = {table: _schema(record) for table, record in _RECORDS.items()}

SIZED = " = "  # between name and value
# Smallest integer of each tenth of a decade, up to 10^18: a distribution has at most 181 sizes.
_TENTHS = sorted({math.ceil(10 ** (tenth / 10)) for tenth in range(181)})


def sized(what: str, number: int) -> str:
    """Return "WHAT = NUMBER", the event name for a value of a distribution (Done.histogram)."""
    return f"{what}{SIZED}{number}"


def is_sized(what: str) -> bool:
    return SIZED in what


def rounded(number: int) -> int:
    """Round a size down to a tenth of a decade (..., 100, 126, 159, ...), or to 0."""
    return _TENTHS[bisect.bisect_right(_TENTHS, number) - 1] if number > 0 else 0


def blake2b() -> Any:
    """Return a new 128-bit hash."""
    return hashlib.blake2b(digest_size=16)


def digest(*texts: str) -> str:
    """Hash a sequence of texts to 32 hexadecimal digits (128 bits), uniformly distributed."""
    mixed = blake2b()
    for text in texts:
        # The length before each text: without it ("ab", "c") and ("a", "bc") would collide.
        data = text.encode("utf-8", "surrogatepass")
        mixed.update(len(data).to_bytes(8, "little"))
        mixed.update(data)
    return mixed.hexdigest()


def make_document(
    text: str, source: str, place: str, part: int = 0, quality: float | None = None
) -> Document:
    """Make a document without tokens and vector, which later stages compute."""
    fields: dict[str, Any] = {"source": source, "place": place, "part": part, "quality": quality}
    return Document(id=digest(text), text=text, **fields, tokens=-1, vector=b"")


def event(what: str, source: str = "") -> TaggedOutput:
    """Return the side output that counts an event."""
    return TaggedOutput("counts", (what, source))


def removed(item: Mapping[str, Any], reason: str, because: str = "") -> TaggedOutput:
    """Return the side output that lists a removed document, file or row."""
    source, place, part = item["source"], item["place"], item.get("part", 0)
    record = Removed(reason=reason, source=source, place=place, part=part, because=because)
    return TaggedOutput("removed", record)


def remove(document: Mapping[str, Any], reason: str, because: str = "") -> Iterator[TaggedOutput]:
    """Yield the outputs that count and list a removed document."""
    yield event(f"documents removed: {reason}", document["source"])
    yield removed(document, reason, because)


def place_name(item: Mapping[str, Any]) -> str:
    """Return "SOURCE:PLACE, part N" of a Document or a Removed."""
    part = f", part {item['part']}" if item["part"] else ""
    return f"{item['source']}:{item['place']}{part}"


def order(document: Document) -> tuple[str, str, int, str]:
    """Return a document's sort key: its source, then its position there."""
    # Runners deliver documents in any order; stages that depend on an order sort by this key.
    return document["source"], document["place"], document["part"], document["id"]
