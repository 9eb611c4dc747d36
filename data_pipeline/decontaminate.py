"""Removes documents that occur in a benchmark or contain one of its questions.

A document is removed if it is a near duplicate, as in dedup, of a benchmark text or of a passage
between the text's blank lines. It is also removed if it contains at least `question_threshold` of a
question's shingles; the paper has no such check. All benchmark texts are held in memory, so
documents are not shuffled.
"""

from __future__ import annotations

import io
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import apache_beam as beam
import fsspec
import numpy as np
from apache_beam.utils.shared import Shared

from data_pipeline import balance, layouts, signatures
from data_pipeline.dedup import DedupConfig
from data_pipeline.records import BenchmarkText, Document, digest, event, removed
from data_pipeline.stages import Done, Stages
from spell_jax.data import row_files

SUFFIXES = (".txt", *row_files.KINDS)
# Characters. Shorter passages, such as headings, are no documents: the filter removes documents
# below 100 characters (Appendix E.1).
SHORTEST_PASSAGE = 100
# Shorter questions are only compared as whole texts: a document may contain all their words by
# chance.
SHORTEST_QUESTION = 8  # tokens
_BLANK_LINE = re.compile(r"\n\s*\n")
BALANCES = balance.KEPT_OR_REMOVED
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BenchmarkConfig:
    """Location of a benchmark's texts.

    Attributes:
      path: File, folder (searched recursively) or glob on any file system that fsspec supports.
        Read are the files of row_files.KINDS (Parquet, JSON, CSV) and .txt files; a .txt file is
        one document.
      document_fields: Names of JSON fields, at any depth, that hold documents. layouts.field_texts
        defines the texts of a field.
      question_fields: Names of JSON fields, at any depth, that hold questions.
    """

    SECTION: ClassVar[str] = "benchmark"

    path: str
    document_fields: tuple[str, ...] = ()
    question_fields: tuple[str, ...] = ()

    def __post_init__(self):
        if not self.path:
            raise ValueError("benchmark.path = '': must be a file, a folder, a glob or a URL")
        if shared_fields := set(self.document_fields) & set(self.question_fields):
            raise ValueError(
                f"benchmark.question_fields = {self.question_fields}: must not "
                f"have what document_fields have, {sorted(shared_fields)}"
            )


@dataclass(frozen=True)
class DecontaminateConfig:
    """Settings of the question check; DedupConfig has the settings of the near-duplicate check.

    Attributes:
      question_threshold: Share of a question's shingles, above 0 and at most 1. A document with at
        least this share is contaminated. A shingle has `dedup.shingle_words` tokens. Questions
        shorter than a shingle, or than 8 tokens, are not checked this way.
    """

    question_threshold: float = 0.8

    def __post_init__(self):
        if not 0 < self.question_threshold <= 1:
            raise ValueError(
                f"decontaminate.question_threshold = {self.question_threshold}: must be above 0 "
                "and at most 1"
            )


def read_benchmarks(benchmarks: Mapping[str, BenchmarkConfig]) -> list[BenchmarkText]:
    """Read all texts of the benchmarks, sorted; a text occurs once per benchmark and kind.

    Raises ValueError if a benchmark has no files, if a file is not UTF-8 or not JSON, or if no file
    has a text in the named document fields or in the named question fields.
    """
    items: set[BenchmarkText] = set()
    for name, config in benchmarks.items():
        where = f"decontaminate.benchmarks.{name}"
        # A set: the questions of one article repeat its context.
        benchmark_items = {BenchmarkText(name, *item) for item in _read_texts(where, config)}
        kinds = {item.kind for item in benchmark_items}
        for kind in ("document", "question"):
            fields = getattr(config, f"{kind}_fields")
            if fields and kind not in kinds:
                raise ValueError(
                    f"{where}.{kind}_fields = {fields}: must name fields with text in {config.path}"
                )
        if not benchmark_items:
            raise ValueError(f"{where}.path = {config.path!r}: must have .txt files, or fields")
        log.info("%s: %d texts", where, len(benchmark_items))
        items |= benchmark_items
    return sorted(items)


def store_items(stages: Stages, items: Sequence[BenchmarkText]) -> Done:
    """Store the texts beside the stages, for the workers."""
    return stages.store("benchmarks", "items", (item._asdict() for item in items))


def make_decontaminate(
    documents: beam.PCollection,
    stages: Stages,
    dedup: DedupConfig,
    config: DecontaminateConfig,
) -> dict[str, beam.PCollection]:
    """Remove documents that match a benchmark; of several, the first one by name counts.

    Events by source: "documents read", "documents kept", "documents removed: contaminated by
    BENCHMARK". "removed" has the reason "contaminated" and the cause "BENCHMARK:document" or
    "BENCHMARK:question". Each worker reads the texts that `store_items` wrote: the graph of the
    pipeline does not contain them.
    """
    tables: Any = documents | "search documents" >> beam.ParDo(
        _Find(stages, dedup, config)
    ).with_outputs("removed", "counts", main="documents")
    return {table: tables[table] for table in ("documents", "removed", "counts")}


class Index:
    """In-memory index: band key -> benchmark texts, and shingle -> benchmark questions."""

    def __init__(
        self, items: Sequence[BenchmarkText], dedup: DedupConfig, config: DecontaminateConfig
    ):
        self.items, self.dedup, self.config = items, dedup, config
        self.sets = [signatures.shingles(item.text, dedup.shingle_words) for item in items]
        self.bands = _Postings([dedup.band_keys(shingles) for shingles in self.sets])
        # Only questions of at least SHORTEST_QUESTION tokens have postings, so only they are found
        # inside a document. A question with fewer tokens than a shingle is one short shingle, which
        # no longer text has.
        is_long = [
            item.kind == "question" and len(signatures.tokens(item.text)) >= SHORTEST_QUESTION
            for item in items
        ]
        pairs = zip(self.sets, is_long, strict=True)
        self.questions = _Postings([shingles if long else shingles[:0] for shingles, long in pairs])

    def find(self, text: str) -> BenchmarkText | None:
        """Return the first item that nearly equals the text or is a question inside the text.

        None if there is no such item.
        """
        shingles = signatures.shingles(text, self.dedup.shingle_words)
        candidates = set(self.bands.owners(self.dedup.band_keys(shingles)))
        hits = [
            owner
            for owner in candidates
            if signatures.jaccard(self.sets[owner], shingles) >= self.dedup.threshold
        ]
        # Containment of the question's shingles, not Jaccard similarity: a text of 1,000 words that
        # quotes a question of 20 has a similarity of at most 0.02.
        hits += [
            owner
            for owner, shared in Counter(self.questions.owners(shingles)).items()
            if shared >= self.config.question_threshold * len(self.sets[owner])
        ]
        return self.items[min(hits)] if hits else None


class _Postings:
    """Inverted index from a uint64 value to the arrays that contain it."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        keys = np.concatenate([np.empty(0, np.uint64), *arrays])
        owners = np.repeat(np.arange(len(arrays)), [len(array) for array in arrays])
        # Two sorted arrays instead of a dict of lists: 16 bytes a posting, for all shingles of all
        # benchmarks.
        by_key = np.argsort(keys, kind="stable")
        self._keys, self._owners = keys[by_key], owners[by_key]

    def owners(self, values: np.ndarray) -> Iterator[int]:
        """Yield the array number of every (value, array that contains it) pair."""
        firsts = np.searchsorted(self._keys, values, "left")
        lasts = np.searchsorted(self._keys, values, "right")
        for hit in np.flatnonzero(lasts > firsts):
            yield from self._owners[firsts[hit] : lasts[hit]].tolist()


class _Find(beam.DoFn):
    """Filter of documents that keeps a document if it matches no benchmark."""

    def __init__(self, stages: Stages, dedup: DedupConfig, config: DecontaminateConfig):
        self.stages, self.configs, self.shared = stages, (dedup, config), Shared()

    def setup(self) -> None:
        self.index = self.shared.acquire(self._make_index)  # one copy per process

    def _make_index(self) -> Index:
        records = self.stages.read_records("benchmarks/items")
        return Index(sorted(BenchmarkText(**record) for record in records), *self.configs)

    def process(self, document: Document) -> Iterator[Any]:
        source = document["source"]
        yield event("documents read", source)
        item = self.index.find(document["text"])
        if item is None:
            yield event("documents kept", source)
            yield document
        else:
            yield event(f"documents removed: contaminated by {item.benchmark}", source)
            yield removed(document, "contaminated", f"{item.benchmark}:{item.kind}")


def _read_texts(where: str, config: BenchmarkConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, id, text) for the texts of a benchmark's files."""
    for path, data in _files(where, config.path):
        try:
            if file_kind := row_files.kind_of(path):
                texts = list(_texts(list(row_files.read(io.BytesIO(data), file_kind)), config))
            else:
                texts = [("document", data.decode("utf-8-sig"))]
        except (ValueError, OSError, RecursionError) as error:
            raise ValueError(f"{where}.path = {config.path!r}: {path}: {error}") from error
        for kind, text in texts:
            pieces = [text]
            if kind == "document":
                # A context of 100 passages is no near duplicate of any of its passages: each has a
                # similarity of about 0.01 with it.
                pieces += [p for p in _BLANK_LINE.split(text) if len(p.strip()) >= SHORTEST_PASSAGE]
            for piece in map(str.strip, pieces):
                if piece:
                    yield kind, digest(piece), piece


def _files(where: str, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content in bytes) for the files, sorted by path."""
    system, path = fsspec.core.url_to_fs(pattern)
    paths = system.find(path) or system.glob(path)  # `find` returns a file itself
    names = sorted(str(name) for name in paths if str(name).lower().endswith(SUFFIXES))
    if not names:
        raise ValueError(f"{where}.path = {pattern!r}: must have {', '.join(SUFFIXES)} files")
    for name in names:
        yield name, system.cat_file(name)


def _texts(value: Any, config: BenchmarkConfig) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) for the texts of the configured fields, at any depth of a JSON value."""
    fields = (*config.document_fields, *config.question_fields)
    for field, strings in layouts.field_texts(value, fields):
        kind = "document" if field in config.document_fields else "question"
        yield kind, "\n\n".join(strings)
