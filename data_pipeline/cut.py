"""Cuts long documents into pieces and counts tokens.

1. A document over the limit is cut into pieces that fit: at paragraphs, or at lines, sentences,
   words or characters inside a paragraph that is too long. Every other document is one piece.
2. Tokens are counted by the policy's tokenizer, or as white-space separated words if none is set.
3. A piece keeps source, place and quality. Its `part` gives its order in the text, and its id is
   the digest of its own text.
4. Of equal pieces, such as the same imprint at the end of many books, only the first by source and
   place is kept. Pieces with too few tokens, such as a lone heading, are removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import TaggedOutput

from data_pipeline.records import Document, Removed, digest, order, rounded, sized
from spell_jax.data import clusters

MAX_PIECES = 10_000  # per document: 32 million tokens in pieces of 3200
TOO_FEW = "too few tokens"
TOO_MANY = f"over {MAX_PIECES} pieces"
REPEATED = "repeated piece"


@dataclass(frozen=True)
class CutConfig:
    """Settings of the cut stage.

    Attributes:
      tokenizer: Folder of the policy's tokenizer (Hugging Face or SentencePiece), present on every
        worker. If "", white-space separated words are counted.
      max_document_tokens: Largest number of tokens of a piece.
      min_tokens: Least number of tokens of a piece; smaller pieces are removed.
    """

    tokenizer: str = ""
    max_document_tokens: int = 3200
    min_tokens: int = 16

    def __post_init__(self) -> None:
        if self.tokenizer and not Path(self.tokenizer).is_dir():
            raise ValueError(f"cut.tokenizer = {self.tokenizer!r}: must be a folder, or empty")
        if self.max_document_tokens < clusters.SMALLEST_LIMIT:
            raise ValueError(
                f"cut.max_document_tokens = {self.max_document_tokens}: "
                f"must be at least {clusters.SMALLEST_LIMIT}"
            )
        if not 1 <= self.min_tokens <= self.max_document_tokens:
            raise ValueError(
                f"cut.min_tokens = {self.min_tokens}: must be from 1 to "
                f"max_document_tokens = {self.max_document_tokens}"
            )


def make_cut(documents: beam.PCollection, config: CutConfig) -> dict[str, beam.PCollection]:
    """Cut documents and count their tokens.

    Events of "counts":
      ("documents cut", source);
      ("pieces", source) and ("tokens = N", source), N rounded down: one each per kept piece;
      ("documents removed: REASON", source).

    Args:
      documents: PCollection of Document. Piece i of a document with part p gets the part
        p * MAX_PIECES + i.
      config: Tokenizer and limits.

    Returns:
      PCollections by table: "documents" with `tokens`, every id once; "removed"; "counts".
    """
    cut: Any = documents | "cut documents" >> beam.ParDo(Cut(config)).with_outputs(
        "removed", "counts", main="pieces"
    )
    unique: Any = (
        cut.pieces
        | "key by id" >> beam.Map(lambda piece: (piece["id"], piece))
        | "group equal pieces" >> beam.GroupByKey()
        | "keep first" >> beam.FlatMapTuple(keep_first).with_outputs("removed", main="documents")
    )
    removed = (cut.removed, unique.removed) | "all removed" >> beam.Flatten()
    pieces = unique.documents | "count pieces" >> beam.FlatMap(_events)
    losses = removed | "count removed" >> beam.Map(
        lambda r: (f"documents removed: {r['reason']}", r["source"])
    )
    counts = (cut.counts, pieces, losses) | "all counts" >> beam.Flatten()
    return {"documents": unique.documents, "removed": removed, "counts": counts}


class Cut(beam.DoFn):
    """Map from a document to its pieces, with the side outputs "removed" and "counts"."""

    def __init__(self, config: CutConfig):
        self.config = config

    def setup(self) -> None:
        self.count_tokens = clusters.count_words
        if self.config.tokenizer:
            from spell_jax.policy import tokenizer  # imported here: it takes a second to load

            self.count_tokens = tokenizer.load(self.config.tokenizer).count

    def process(self, document: Document) -> Iterator[Any]:
        limit = self.config.max_document_tokens
        # A text of white space only has no pieces. It counts as one piece of 0 tokens.
        pieces = clusters.cut_document(document["text"], self.count_tokens, limit) or [("", 0)]
        if len(pieces) > 1:
            yield TaggedOutput("counts", ("documents cut", document["source"]))
        for number, (text, tokens) in enumerate(pieces[:MAX_PIECES]):
            part = document["part"] * MAX_PIECES + number
            if tokens < self.config.min_tokens:
                removed = _removed(document, part, TOO_FEW, f"{tokens} tokens")
                yield TaggedOutput("removed", removed)
                continue
            yield document | {"id": digest(text), "text": text, "part": part, "tokens": tokens}
        if len(pieces) > MAX_PIECES:
            # One record for all of them: their own part numbers would collide with those of the
            # next part's pieces.
            left = f"{len(pieces) - MAX_PIECES} more pieces"
            removed = _removed(document, document["part"] * MAX_PIECES, TOO_MANY, left)
            yield TaggedOutput("removed", removed)


def keep_first(_: str, pieces: Iterable[Document]) -> Iterator[Any]:
    """Yield the first of equal pieces, and the others as "removed".

    Iterates over the group twice and never holds it in memory: a million books may share an
    imprint.
    """
    first = min(pieces, key=order)
    kept = False
    for piece in pieces:
        if not kept and order(piece) == order(first):
            kept = True
            yield piece
        else:
            same = f"{first['source']}:{first['place']}"
            removed = _removed(piece, piece["part"], REPEATED, same)
            yield TaggedOutput("removed", removed)


def _events(piece: Document) -> Iterator[tuple[str, str]]:
    yield "pieces", piece["source"]
    yield sized("tokens", rounded(piece["tokens"])), piece["source"]


def _removed(document: Document, part: int, reason: str, because: str) -> Removed:
    return Removed(
        reason=reason,
        source=document["source"],
        place=document["place"],
        part=part,
        because=because,
    )
