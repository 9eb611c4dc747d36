"""Records that stages hand to each other: plain dicts, which every Beam runner codes by itself, and
the Parquet schemas of the tables that they are kept in."""

from __future__ import annotations

import bisect
import hashlib
import math
from typing import TypedDict

import pyarrow as pa


class Document(TypedDict):
    """A text and where it came from.

    Attributes:
      id: `digest` of the text, so equal texts have equal ids.
      text: without white space at its ends.
      source: name of the source in the config.
      place: file, relative to the source's path, and "#" row where a file holds many; unique within
        a source.
      part: 0, 1, ... of a text that was cut; their order is the text's.
      quality: a score that came with it; None: none did.
      tokens: of the policy's tokenizer; -1 before they are counted.
      vector: float32 [D] as bytes, of length 1; empty before it is embedded.
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
    """A file or document that goes no further.

    Attributes:
      reason: a few words, to be counted.
      source, place, part: of the document; of a file part is 0.
      because: what it equals ("SOURCE:PLACE"), the benchmark it fell to, or the error; may be "".
    """

    reason: str
    source: str
    place: str
    part: int
    because: str


class File(TypedDict):
    """A file that was read.

    Attributes:
      place: relative to the source's path.
      size: bytes.
      hash: blake2b-128 of its bytes, hexadecimal.
    """

    source: str
    place: str
    size: int
    hash: str


class Count(TypedDict):
    """How many documents or files of a source met with something in a stage."""

    what: str
    source: str
    number: int


class Cluster(TypedDict):
    """Documents to be played together.

    Attributes:
      id: `digest` of the ids of its documents.
      pool: names of the tasks that it may serve, in order, joined by "+".
      documents: by source, place and part, without their vectors.
      tokens: of all documents together.
      vector: float32 [D] as bytes: the mean of its documents' vectors.
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
# By table. Points, centroids and members are of cluster.py; "tasks" are clusters that got one.
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


# The first whole number of each tenth of a decade, to 10^18.
_TENTHS = sorted({math.ceil(10 ** (tenth / 10)) for tenth in range(181)})


_SIZED = " = "


def sized(what: str, number: int) -> str:
    """What is counted where numbers have a distribution; Done.histogram reads it."""
    return f"{what}{_SIZED}{number}"


def is_sized(what: str) -> bool:
    return _SIZED in what


def size_of(what: str) -> int:
    """The number of `sized`."""
    return int(what.rpartition(_SIZED)[2])


def rounded(number: int) -> int:
    """Rounded down to a tenth of a decade, or 0: few sizes stand for all."""
    return _TENTHS[bisect.bisect_right(_TENTHS, number) - 1] if number > 0 else 0


def digest(*texts: str) -> str:
    """32 hexadecimal digits (128 bits) that say what the texts are; evenly distributed."""
    mixed = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        mixed.update(len(data).to_bytes(8, "little"))
        mixed.update(data)
    return mixed.hexdigest()


def make_document(
    text: str, source: str, place: str, part: int = 0, quality: float | None = None
) -> Document:
    """A document that is neither counted nor embedded yet."""
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
    """That a document goes no further."""
    return Removed(
        reason=reason,
        source=document["source"],
        place=document["place"],
        part=document["part"],
        because=because,
    )


def order(document: Document) -> tuple[str, str, int, str]:
    """Sorts documents as their sources have them, whatever order a runner brings them in."""
    return document["source"], document["place"], document["part"], document["id"]
