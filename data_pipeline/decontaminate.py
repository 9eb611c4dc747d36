"""Documents that a benchmark has, or that ask what it asks, go.

1. The files of each benchmark are searched for texts under the names of fields that hold documents
   or questions, however deep they lie. The passages between a document's blank lines count as
   documents too: a long context is never near the one text of the corpus that is in it.
2. A text of the corpus goes if it is near a benchmark's text, found and compared as near
   duplicates are (signatures.py).
3. It goes as well if it holds a question: at least `question_threshold` of its shingles. This is
   our addition, because by Jaccard similarity a long text is never near a short one.
4. All texts of benchmarks are looked up in memory, so documents are not shuffled.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import apache_beam as beam
import fsspec
import numpy as np
from apache_beam.pvalue import TaggedOutput

from data_pipeline import layouts, signatures
from data_pipeline.dedup import DedupConfig
from data_pipeline.records import Document, digest, make_removed

SUFFIXES = (".json", ".jsonl", ".txt")
SHORTEST_PASSAGE = 100  # characters
# Shorter questions are compared as a whole alone: texts hold their words by chance.
SHORTEST_QUESTION = 8  # tokens
_BLANK_LINE = re.compile(r"\n\s*\n")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BenchmarkConfig:
    """Where a benchmark's texts are.

    Attributes:
      path: a file, a folder (searched to its bottom) or a pattern; of any file system that fsspec
        knows. Files that are not .json, .jsonl or .txt are passed over; a .txt is one document.
      document_fields, question_fields: names of JSON fields, wherever they lie. Which texts are
        under them layouts.field_texts says.
    """

    path: str
    document_fields: tuple[str, ...] = ()
    question_fields: tuple[str, ...] = ()

    def __post_init__(self):
        if not self.path:
            raise ValueError("benchmark.path = '': must be a file, a folder, a glob or a URL")
        if both := set(self.document_fields) & set(self.question_fields):
            raise ValueError(
                f"benchmark.question_fields = {self.question_fields}: must not "
                f"have what document_fields have, {sorted(both)}"
            )


@dataclass(frozen=True)
class DecontaminateConfig:
    """What counts as contaminated, beside near duplicates as DedupConfig has them.

    Attributes:
      question_threshold: the least share of a question's shingles that a document must hold. Their
        width is `dedup.shingle_words`; a question has at least as many tokens, and at least 8.
    """

    question_threshold: float = 0.8

    def __post_init__(self):
        if not 0 < self.question_threshold <= 1:
            raise ValueError(
                f"decontaminate.question_threshold = {self.question_threshold}: must be above 0 "
                "and at most 1"
            )


class Item(NamedTuple):
    """A text of a benchmark.

    Attributes:
      kind: "document" or "question".
      id: records.digest of the text.
    """

    benchmark: str
    kind: str
    id: str
    text: str


def read_benchmarks(benchmarks: Mapping[str, BenchmarkConfig]) -> list[Item]:
    """All texts of the benchmarks, sorted, each once a benchmark and kind.

    Args:
      benchmarks: by name.

    Raises:
      ValueError: a benchmark has no files or one that is not UTF-8 or JSON, or none of its files
        has a text under the document fields, or under the question fields, that it names.
    """
    items: set[Item] = set()
    for name, config in benchmarks.items():
        where = f"decontaminate.benchmarks.{name}"
        found = {Item(name, *item) for item in _read(where, config)}
        kinds = {item.kind for item in found}
        for kind in ("document", "question"):
            fields = getattr(config, f"{kind}_fields")
            if fields and kind not in kinds:
                raise ValueError(
                    f"{where}.{kind}_fields = {fields}: must name fields with text in {config.path}"
                )
        if not found:
            raise ValueError(f"{where}.path = {config.path!r}: must have .txt files, or fields")
        log.info("%s: %d texts", where, len(found))
        items |= found
    return sorted(items)


def fingerprint(items: Sequence[Item]) -> str:
    """32 hexadecimal digits that say which texts of which benchmarks these are."""
    return digest(*(part for item in items for part in item[:3]))


def make_decontaminate(
    documents: beam.PCollection,
    items: Sequence[Item],
    dedup: DedupConfig,
    config: DecontaminateConfig,
) -> dict[str, beam.PCollection]:
    """The documents that fall to no benchmark.

    A document that falls to several is counted for the first by name. Events of "counts":
    ("documents read", source), ("documents kept", source) and
    ("documents removed: contaminated by BENCHMARK", source).

    Args:
      documents: of records.Document.
      items: of read_benchmarks; they travel to the workers inside the pipeline's graph.

    Returns:
      PCollections by table: "documents", "removed" with the reason "contaminated" because of
      "BENCHMARK:document" or "BENCHMARK:question", "counts".
    """
    done: Any = documents | "look up documents" >> beam.ParDo(
        _LookUp(tuple(items), dedup, config)
    ).with_outputs("removed", "counts", main="documents")
    return {table: done[table] for table in ("documents", "removed", "counts")}


# ------------------------------------------------------------------------------------------ looking


class Index:
    """Texts of benchmarks by the keys of their bands, and questions by their shingles."""

    def __init__(self, items: Sequence[Item], dedup: DedupConfig, config: DecontaminateConfig):
        self.items, self.dedup, self.config = items, dedup, config
        self.sets = [signatures.shingles(item.text, dedup.shingle_words) for item in items]
        self.bands = _Postings([self._bands(found) for found in self.sets])
        # What is no such question has no postings, and so is never found to be held. Nor is one of
        # fewer tokens than a shingle: longer texts have no shingle of so few.
        nothing = np.empty(0, np.uint64)
        self.questions = _Postings(
            [
                found
                if item.kind == "question"
                and len(signatures.tokens(item.text)) >= SHORTEST_QUESTION
                else nothing
                for item, found in zip(items, self.sets, strict=True)
            ]
        )

    def find(self, text: str) -> Item | None:
        """The first item, in the order of read_benchmarks, that a text is near to or holds."""
        found = signatures.shingles(text, self.dedup.shingle_words)
        near = np.unique(self.bands.owners(self._bands(found)))
        hits = [
            owner
            for owner in near.tolist()
            if signatures.jaccard(self.sets[owner], found) >= self.dedup.threshold
        ]
        asked, shared = np.unique(self.questions.owners(found), return_counts=True)
        hits += [
            owner
            for owner, number in zip(asked.tolist(), shared.tolist(), strict=True)
            if number >= self.config.question_threshold * len(self.sets[owner])
        ]
        return self.items[min(hits)] if hits else None

    def _bands(self, found: np.ndarray) -> np.ndarray:
        made = signatures.signature(found, self.dedup.permutations, self.dedup.seed)
        return signatures.band_keys(made, self.dedup.bands)


class _Postings:
    """Which of some arrays of uint64 a value is in."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        keys = np.concatenate([np.empty(0, np.uint64), *arrays])
        owners = np.repeat(np.arange(len(arrays)), [len(array) for array in arrays])
        by_key = np.argsort(keys, kind="stable")
        self._keys, self._owners = keys[by_key], owners[by_key]

    def owners(self, values: np.ndarray) -> np.ndarray:
        """Numbers of the arrays, one for each value that one has: int64 [n]."""
        firsts = np.searchsorted(self._keys, values, "left")
        lasts = np.searchsorted(self._keys, values, "right")
        hit = np.flatnonzero(lasts > firsts)
        ranges = [self._owners[firsts[i] : lasts[i]] for i in hit]
        return np.concatenate([np.empty(0, np.int64), *ranges])


class _LookUp(beam.DoFn):
    def __init__(
        self, items: Sequence[Item], dedup: DedupConfig, config: DecontaminateConfig
    ) -> None:
        self.parts = items, dedup, config

    def setup(self) -> None:
        self.index = Index(*self.parts)

    def process(self, document: Document) -> Iterator[Any]:
        source = document["source"]
        yield TaggedOutput("counts", ("documents read", source))
        item = self.index.find(document["text"])
        if item is None:
            yield TaggedOutput("counts", ("documents kept", source))
            yield document
            return
        what = f"documents removed: contaminated by {item.benchmark}"
        yield TaggedOutput("counts", (what, source))
        removed = make_removed(document, "contaminated", f"{item.benchmark}:{item.kind}")
        yield TaggedOutput("removed", removed)


# ------------------------------------------------------------------------------------------ reading


def _read(where: str, config: BenchmarkConfig) -> Iterator[tuple[str, str, str]]:
    """(kind, id, text) of a benchmark's files."""
    for path, data in _files(where, config.path):
        try:
            content = data.decode("utf-8-sig")
            if path.lower().endswith(".txt"):
                texts = [("document", content)]
            else:
                texts = list(_texts(layouts.json_values(content), config))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}.path = {config.path!r}: {path}: {error}") from error
        for kind, text in texts:
            pieces = [text]
            if kind == "document":
                pieces += [p for p in _BLANK_LINE.split(text) if len(p.strip()) >= SHORTEST_PASSAGE]
            for piece in map(str.strip, pieces):
                if piece:
                    yield kind, digest(piece), piece


def _files(where: str, pattern: str) -> Iterator[tuple[str, bytes]]:
    """(path, bytes) of the files, in the order of their paths."""
    system, path = fsspec.core.url_to_fs(pattern)
    if system.isdir(path):
        found = system.find(path)
    elif system.exists(path):
        found = [path]
    else:
        found = [name for name in system.glob(path) if system.isfile(name)]
    names = sorted(str(name) for name in found if str(name).lower().endswith(SUFFIXES))
    if not names:
        raise ValueError(f"{where}.path = {pattern!r}: must have {', '.join(SUFFIXES)} files")
    for name in names:
        yield name, system.cat_file(name)


def _texts(value: Any, config: BenchmarkConfig) -> Iterator[tuple[str, str]]:
    """(kind, text) of what lies under the fields, anywhere in a JSON value."""
    fields = (*config.document_fields, *config.question_fields)
    for field, strings in layouts.field_texts(value, fields):
        kind = "document" if field in config.document_fields else "question"
        yield kind, "\n\n".join(strings)
