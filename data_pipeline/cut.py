"""Cuts long documents and counts tokens.

1. A document over the limit is cut at paragraphs, or at smaller borders where a paragraph is too
   long by itself, into pieces that each fit. All others are one piece.
2. Tokens are the policy's, or white-space separated words where no tokenizer is set.
3. A piece keeps source, place and quality. Its `part` sorts it behind the pieces that stand before
   it in the text, and its id is the digest of its own text.
4. Of equal pieces, such as the same imprint at the end of many books, the first by source and
   place stays. Pieces of too few tokens, such as a lone heading, are removed.
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

MAX_PIECES = 10_000  # of one document: 32 million tokens in pieces of 3200
TOO_FEW = "too few tokens"
TOO_MANY = f"over {MAX_PIECES} pieces"
REPEATED = "repeated piece"


@dataclass(frozen=True)
class CutConfig:
    """How documents are cut.

    Attributes:
      tokenizer: folder of the policy's tokenizer, Hugging Face or SentencePiece, on every worker;
        "": tokens are words.
      max_document_tokens: limit of a piece.
      min_tokens: pieces of fewer are removed.
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
    """Cuts documents and counts their tokens.

    Events of "counts": ("documents cut", source), ("pieces", source) and ("tokens = N",
    source), N rounded down, for each piece that stays, and ("documents removed: REASON", source).

    Args:
      documents: Document; a `part` above 0 is kept: piece i of part p is p * MAX_PIECES + i.

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
    """Document -> its pieces; "removed" and "counts" beside them."""

    def __init__(self, config: CutConfig):
        self.config = config

    def setup(self) -> None:
        self.count_tokens = clusters.count_words
        if self.config.tokenizer:
            from spell_jax.policy import tokenizer  # its libraries take a second to load

            self.count_tokens = tokenizer.load(self.config.tokenizer).count

    def process(self, document: Document) -> Iterator[Any]:
        limit = self.config.max_document_tokens
        # A text of nothing but white space has no pieces: it counts as one of 0 tokens.
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
            # One record for all of them: their parts would be those of the next part's pieces.
            left = f"{len(pieces) - MAX_PIECES} more pieces"
            removed = _removed(document, document["part"] * MAX_PIECES, TOO_MANY, left)
            yield TaggedOutput("removed", removed)


def keep_first(_: str, pieces: Iterable[Document]) -> Iterator[Any]:
    """The first of equal pieces; the others as "removed".

    The group is gone through twice and never held: an imprint may stand in a million books.
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
