"""Cuts long documents into pieces and counts tokens.

A document over the limit is cut at paragraphs, or at lines, sentences, words or characters inside a
paragraph that is too long. Of equal pieces, such as the same imprint at the end of many books, only
the first by source and place is kept. Short pieces, such as a lone heading, are removed.

A report stays whole: each of its paragraphs is a piece, however short or common. A report over its
source's limit is removed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam

from data_pipeline.records import Document, digest, event, order, remove, rounded, sized
from spell_jax.data import clusters
from spell_jax.runtime.config import check_least

# Per document: 32 million tokens in pieces of 3200, far more than any book. The limit bounds the
# part numbers: piece i of part p is p * MAX_PIECES + i.
MAX_PIECES = 10_000
TOO_MANY = f"over {MAX_PIECES} pieces"
TOO_LONG = "report of too many tokens"
REPEATED = "repeated piece"
# Every document is cut, and every piece of enough tokens is kept or repeats another one.
BALANCES = (
    "in:documents = documents read",
    f"pieces made = out:documents + documents removed: {REPEATED}",
    "pieces = out:documents",
    "documents removed: * = out:removed",
)


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
        check_least(self, "cut.", max_document_tokens=clusters.SMALLEST_LIMIT)
        if not 1 <= self.min_tokens <= self.max_document_tokens:
            raise ValueError(
                f"cut.min_tokens = {self.min_tokens}: must be from 1 to "
                f"max_document_tokens = {self.max_document_tokens}"
            )


def make_cut(
    documents: beam.PCollection, config: CutConfig, reports: Mapping[str, int] | None = None
) -> dict[str, beam.PCollection]:
    """Cut documents and count their tokens; every id of the resulting "documents" occurs once.

    `reports` maps a source of reports to their largest number of tokens. Piece i of a document with
    part p gets the part p * MAX_PIECES + i. Events by source: "documents read", "documents cut",
    "documents removed: REASON", "pieces made" of enough tokens, and "pieces" and "tokens = N"
    (rounded down) of kept pieces.
    """
    outputs = ("removed", "counts")
    # Equal pieces are found here and not in dedup, which has compared whole documents: two
    # different books share an imprint.
    cut: Any = documents | "cut documents" >> beam.ParDo(Cut(config, reports or {})).with_outputs(
        *outputs, main="pieces"
    )
    unique: Any = (
        cut.pieces
        | "key by id" >> beam.Map(lambda piece: (piece["id"], piece))
        | "group equal pieces" >> beam.GroupByKey()
        | "keep first" >> beam.FlatMapTuple(keep_first).with_outputs(*outputs, main="documents")
    )
    joined = {name: (cut[name], unique[name]) | f"all {name}" >> beam.Flatten() for name in outputs}
    return {"documents": unique.documents, **joined}


class Cut(beam.DoFn):
    """Map from a document to its pieces of enough tokens."""

    def __init__(self, config: CutConfig, reports: Mapping[str, int]):
        self.config = config
        self.reports = dict(reports)

    def setup(self) -> None:
        self.count_tokens = clusters.count_words
        if self.config.tokenizer:
            # Imported here, because it takes a second and only this setting needs it.
            from spell_jax.policy import tokenizer

            self.count_tokens = tokenizer.load(self.config.tokenizer).count

    def process(self, document: Document) -> Iterator[Any]:
        yield event("documents read", document["source"])
        if document["source"] in self.reports:
            yield from self._process_report(document, self.reports[document["source"]])
            return
        limit = self.config.max_document_tokens
        # A text of white space only has no pieces. It counts as one piece of 0 tokens.
        pieces = clusters.cut_document(document["text"], self.count_tokens, limit) or [("", 0)]
        if len(pieces) > 1:
            yield event("documents cut", document["source"])
        first = document["part"] * MAX_PIECES
        for part, (text, tokens) in enumerate(pieces[:MAX_PIECES], first):
            if tokens < self.config.min_tokens:
                yield from remove(document | {"part": part}, "too few tokens", f"{tokens} tokens")
            else:
                yield event("pieces made", document["source"])
                yield document | {"id": digest(text), "text": text, "part": part, "tokens": tokens}
        if len(pieces) > MAX_PIECES:
            # One record for all further pieces: their part numbers would collide with the numbers
            # of the next part's pieces.
            because = f"{len(pieces) - MAX_PIECES} more pieces"
            yield from remove(document | {"part": first}, TOO_MANY, because)

    def _process_report(self, report: Document, max_tokens: int) -> Iterator[Any]:
        tokens = self.count_tokens(report["text"])
        if tokens > max_tokens:
            yield from remove(report, TOO_LONG, f"{tokens} tokens")
            return
        limit = self.config.max_document_tokens
        # `cut_document` would join short paragraphs up to the limit. Here each paragraph stays a
        # document, as in the rows of DocMath.
        paragraphs = clusters.BORDERS[0].split(report["text"])
        cut = [clusters.cut_document(text, self.count_tokens, limit) for text in paragraphs]
        if any(len(pieces) > 1 for pieces in cut):
            yield event("documents cut", report["source"])
        for part, (text, tokens) in enumerate(itertools.chain.from_iterable(cut)):
            # Reports may share paragraphs, so the id of a piece is also one of its place.
            name = digest(text, report["source"], report["place"], str(part))
            yield event("pieces made", report["source"])
            yield report | {"id": name, "text": text, "part": part, "tokens": tokens}


def keep_first(_: str, pieces: Iterable[Document]) -> Iterator[Any]:
    """Yield the first of equal pieces and its events; remove the other pieces."""
    # Two passes over the group instead of a list: a million books may share an imprint.
    first = min(pieces, key=order)
    # A piece may come twice from one place, and then only the first copy is kept.
    is_kept = False
    for piece in pieces:
        if not is_kept and order(piece) == order(first):
            is_kept = True
            yield event("pieces", piece["source"])
            yield event(sized("tokens", rounded(piece["tokens"])), piece["source"])
            yield piece
        else:
            yield from remove(piece, REPEATED, f"{first['source']}:{first['place']}")
