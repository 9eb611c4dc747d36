"""Records that stages exchange, and the Parquet schemas of their tables.

Records are plain dicts, because every Beam runner has a coder for them.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from typing import TypedDict

import pyarrow as pa


class Document(TypedDict):
    """Text and its origin.

    Attributes:
      id: `digest` of the text; equal texts have equal ids.
      text: The text, stripped.
      source: Name of the source in the config.
      place: File path relative to the source's path, followed by "#" and the row number if the file
        has rows; unique within a source.
      part: Number of the part, from 0, in the order of the text, if the text was cut.
      quality: Score from the source; None if there is none.
      tokens: Token count by the policy's tokenizer; -1 before tokens are counted.
      vector: Unit vector, float32 [D] as bytes; empty before the document is embedded.
    """

    id: str
    text: str
    source: str
    place: str
    part: int
    quality: float | None
    tokens: int
    vector: bytes


class Removed(TypedDict):
    """Record of a file, row or document that was removed.

    Attributes:
      reason: Category that the removal is counted under, in a few words.
      source: Name of the source in the config.
      place: Location within the source, as in Document.
      part: Part of the document; 0 for a file.
      because: Location of the equal text ("SOURCE:PLACE"), benchmark that it matched, or error; may
        be "".
    """

    reason: str
    source: str
    place: str
    part: int
    because: str


class File(TypedDict):
    """File that was read.

    Attributes:
      source: Name of the source in the config.
      place: Path relative to the source's path.
      size: Size in bytes.
      hash: blake2b-128 of the content, hexadecimal.
    """

    source: str
    place: str
    size: int
    hash: str


class Count(TypedDict):
    """Number of events of one kind in a stage, such as "documents kept", for one source."""

    what: str
    source: str
    number: int


class Cluster(TypedDict):
    """Related documents that a rollout uses together.

    Attributes:
      id: `digest` of the ids of its documents.
      pool: Sorted names of the tasks that it may serve, joined by "+".
      documents: Documents sorted by source, place and part, without their vectors.
      tokens: Token count of all documents together.
      vector: Mean of the documents' vectors, float32 [D] as bytes.
    """

    id: str
    pool: str
    documents: list[Document]
    tokens: int
    vector: bytes


_DOCUMENT = [
    ("id", pa.string()),
    ("text", pa.string()),
    ("source", pa.string()),
    ("place", pa.string()),
    ("part", pa.int64()),
    ("quality", pa.float64()),
    ("tokens", pa.int64()),
    ("vector", pa.binary()),
]
_CLUSTER = [
    ("id", pa.string()),
    ("pool", pa.string()),
    ("documents", pa.list_(pa.struct(_DOCUMENT))),
    ("tokens", pa.int64()),
    ("vector", pa.binary()),
]
_REMOVED = [
    ("reason", pa.string()),
    ("source", pa.string()),
    ("place", pa.string()),
    ("part", pa.int64()),
    ("because", pa.string()),
]
_FILE = [
    ("source", pa.string()),
    ("place", pa.string()),
    ("size", pa.int64()),
    ("hash", pa.string()),
]
_POINT = [
    ("id", pa.string()),
    ("tokens", pa.int64()),
    ("vector", pa.binary()),
    ("node", pa.string()),
]
# Schemas by table. cluster.py defines points, centroids and members. The table "tasks" has the
# clusters that were assigned a task.
SCHEMAS = {
    "documents": pa.schema(_DOCUMENT),
    "removed": pa.schema(_REMOVED),
    "files": pa.schema(_FILE),
    "counts": pa.schema([("what", pa.string()), ("source", pa.string()), ("number", pa.int64())]),
    "points": pa.schema(_POINT),
    "centroids": pa.schema([("node", pa.string()), ("vectors", pa.binary())]),
    "members": pa.schema([("id", pa.string()), ("cluster", pa.string())]),
    "clusters": pa.schema(_CLUSTER),
    "tasks": pa.schema([*_CLUSTER, ("task", pa.string())]),
}


# Smallest integer of each tenth of a decade, up to 10^18.
_TENTHS = sorted({math.ceil(10 ** (tenth / 10)) for tenth in range(181)})


_SIZED = " = "


def sized(what: str, number: int) -> str:
    """Return "WHAT = NUMBER", the event name for a value of a distribution (Done.histogram)."""
    return f"{what}{_SIZED}{number}"


def is_sized(what: str) -> bool:
    return _SIZED in what


def size_of(what: str) -> int:
    """Return the number in an event name made by `sized`."""
    return int(what.rpartition(_SIZED)[2])


def rounded(number: int) -> int:
    """Round down to a tenth of a decade, or to 0, so that a distribution has few distinct sizes."""
    return _TENTHS[bisect.bisect_right(_TENTHS, number) - 1] if number > 0 else 0


def digest(*texts: str) -> str:
    """Hash a sequence of texts to 32 hexadecimal digits (128 bits), uniformly distributed."""
    mixed = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        mixed.update(len(data).to_bytes(8, "little"))
        mixed.update(data)
    return mixed.hexdigest()


def make_document(
    text: str, source: str, place: str, part: int = 0, quality: float | None = None
) -> Document:
    """Make a document whose tokens and vector are not computed yet."""
    return Document(
        id=digest(text),
        text=text,
        source=source,
        place=place,
        part=part,
        quality=quality,
        tokens=-1,
        vector=b"",
    )


def make_removed(document: Document, reason: str, because: str = "") -> Removed:
    """Make the record of a removed document."""
    return Removed(
        reason=reason,
        source=document["source"],
        place=document["place"],
        part=document["part"],
        because=because,
    )


def order(document: Document) -> tuple[str, str, int, str]:
    """Return a sort key that restores source order; a runner may deliver documents in any order."""
    return document["source"], document["place"], document["part"], document["id"]
