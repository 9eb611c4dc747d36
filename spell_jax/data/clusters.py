"""Clusters of documents, read from a JSONL file, or made from a folder of texts or a tfds set.

1. A JSONL file has one cluster per line: {"id": "a", "documents": ["...", "..."], "tasks":
   ["general_qa"]}, "tasks" being optional. A folder is searched for .txt and .md files, in path
   order. Bad lines, files and folders are counted, logged and skipped. Of a tfds set (tfds_sets.py)
   the documents are the texts of the records, in the order of its splits.
2. Documents longer than `max_document_tokens` are cut at paragraphs; only a paragraph that is too
   long is cut at lines, then sentences, words, characters. Only white space at the cuts is lost
   (spec section 12).
3. Documents of a folder or a tfds set are grouped by order or by TF-IDF similarity.
"""

import hashlib
import itertools
import logging
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from spell_jax.data.text_files import (
    BUILD_SUFFIXES,
    SUFFIXES,
    Unusable,
    build_command,
    check_file,
    decode,
)
from spell_jax.data.tfds_sets import TfdsSource
from spell_jax.runtime.files import remote
from spell_jax.runtime.files.jsonl import require_records

PAPER_TASKS = ("general_qa", "financial_math", "multiple_choice")
CLOZE = "cloze"  # sentences with a gap (selfplay/cloze.py)
TASKS = (*PAPER_TASKS, CLOZE)
TEXT_TASKS = ("general_qa", CLOZE)  # answers are texts, compared by their words
LETTERS = ("A", "B", "C", "D")  # labels of multiple-choice options
# Least max_document_tokens: a slice of 2 characters, of up to 4 tokens each, fits (_split_units).
SMALLEST_LIMIT = 16
GROUPINGS = ("order", "similarity")
SELECTIONS = ("longest", "random", "shortest")

# Borders of units, coarse to fine, matched in linear time. A unit includes the border after it.
BORDERS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\n\s*\n",  # paragraph
        r"\n",  # line
        r"[.!?][\"')\]]?\s+|[。！？]",  # sentence
        r"\s+",  # word
    )
)

LARGEST_FILE = 1 << 30  # most bytes of a text file in a folder
_READ_AT_ONCE = 256  # clusters per read while measuring lengths: their texts are then dropped

SURROGATE = re.compile(r"[\ud800-\udfff]")

log = logging.getLogger(__name__)

CountTokens = Callable[[str], int]
Source = str | Path | TfdsSource  # a path or URL, or a tfds set


@dataclass(frozen=True)
class Cluster:
    """Related documents that are used together.

    Attributes:
      id: name, unique among the clusters of a run.
      documents: n texts in corpus order, n >= 1.
      tasks: tasks that the cluster may serve; None allows any.
    """

    id: str
    documents: tuple[str, ...]
    tasks: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ClusterSource:
    """Clusters by id. Their texts may stay in storage until a batch needs them.

    Attributes:
      tasks: id -> tasks as in Cluster, one entry per cluster.
      read: function from ids, which may repeat, to their clusters in the same order.
    """

    tasks: Mapping[str, tuple[str, ...] | None]
    read: Callable[[Sequence[str]], list[Cluster]]

    def only(self, ids: Sequence[str]) -> "ClusterSource":
        return replace(self, tasks={name: self.tasks[name] for name in ids})


def in_memory(clusters: Sequence[Cluster]) -> ClusterSource:
    """Make a source of clusters that are in memory; ValueError if two have the same id."""
    by_id = {cluster.id: cluster for cluster in clusters}
    if len(by_id) != len(clusters):
        raise ValueError("clusters: ids must be unique")
    tasks = {name: cluster.tasks for name, cluster in by_id.items()}
    return ClusterSource(tasks, lambda ids: [by_id[name] for name in ids])


@dataclass
class ClusterReport:
    """Statistics of reading a source.

    Attributes:
      read: number of files (folder), lines (JSONL file) or records (tfds set) used.
      skipped: reason -> number of files and unreadable folders, lines or records.
      buildable: BUILD_SUFFIXES -> number of the folder's skipped files of this type.
      cut: number of documents over the limit.
      lengths: tokens of each document after cutting.
      clusters: number of clusters.
    """

    read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    buildable: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    lengths: list[int] = field(default_factory=list)
    clusters: int = 0

    def summary(self) -> str:
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        lengths = self.lengths or [0]
        mean = sum(lengths) / len(lengths)
        return (
            f"read {self.read}, skipped {self.skipped.total()} ({skipped or 'none'}), "
            f"cut {self.cut} long documents; {len(self.lengths)} documents of {min(lengths)} to "
            f"{max(lengths)} tokens (mean {mean:.1f}) in {self.clusters} clusters"
        )


def count_words(text: str) -> int:
    """Count white-space separated words: the default token counter."""
    return len(text.split())


def read_clusters(
    source: Source,
    *,
    count_tokens: CountTokens = count_words,
    max_document_tokens: int = 1024,
    documents_per_cluster: int = 8,
    grouping: str = "order",
) -> tuple[list[Cluster], ClusterReport]:
    """Read a JSONL file of clusters, or make clusters from a folder's texts or a tfds set.

    The documents of a JSONL cluster stay together; those over the limit are cut in place.
    FileNotFoundError if the source does not exist, ValueError if a setting is out of range, no text
    is usable or a tfds set is damaged.

    Args:
      count_tokens: tokens of a text; called on a few times the source's length in total.
      max_document_tokens: maximum tokens per document, at least 16.
      documents_per_cluster: cluster size for folders and tfds sets; the last cluster may have
        fewer.
      grouping: grouping for folders and tfds sets, one of GROUPINGS.
    """
    for name, value, least in (
        ("max_document_tokens", max_document_tokens, SMALLEST_LIMIT),
        ("documents_per_cluster", documents_per_cluster, 1),
    ):
        if value < least:
            raise ValueError(f"{name} = {value}: must be at least {least}")
    if grouping not in GROUPINGS:
        raise ValueError(f"grouping = {grouping!r}: must be one of {GROUPINGS}")
    report = ClusterReport()

    def cut(documents: Iterable[str]) -> Iterator[str]:
        for document in documents:
            pieces = cut_document(document, count_tokens, max_document_tokens)
            report.cut += len(pieces) > 1
            report.lengths.extend(length for _, length in pieces)
            yield from (piece for piece, _ in pieces)

    texts = None  # of a JSONL file, which has clusters
    if isinstance(source, TfdsSource):
        texts = tfds_texts(source, report)
    elif (path := _existing_path(source)).is_dir():
        texts = folder_texts(path, report)
    else:
        check_file(source, path)
    if texts is not None:
        clusters = _group_documents(list(cut(texts)), documents_per_cluster, grouping)
    else:
        uncut_clusters = _jsonl_clusters(path, report)
        clusters = [
            replace(cluster, documents=tuple(cut(cluster.documents))) for cluster in uncut_clusters
        ]
    report.clusters = len(clusters)
    types = ", ".join(f"{count} {suffix}" for suffix, count in sorted(report.buildable.items()))
    remedy = f"{types} files: {build_command(source)}" if types else ""
    if not clusters:
        summary = "; ".join(filter(None, (report.summary(), remedy)))
        raise ValueError(f"source = {str(source)!r}: no usable text; {summary}")
    log.info("%s: %s", source, report.summary())
    if remedy:
        log.warning("%s: skipped %s", source, remedy)
    return clusters, report


def _existing_path(source: str | Path) -> Path:
    path = remote.fetch(source)
    if not path.exists():
        raise FileNotFoundError(f"source = {str(path)!r}: no such file or folder")
    return path


def split_held_out(ids: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Split cluster ids into (training, held-out) by their hashes, independent of order and seed.

    A share above 0 holds out at least one cluster and leaves at least one for training; ValueError
    if there are too few clusters for that, or the share is outside [0, 1).
    """
    if not 0 <= share < 1:
        raise ValueError(f"held_out = {share}: must be at least 0 and below 1")
    if share == 0:
        return list(ids), []
    if len(ids) < 2:
        raise ValueError(f"held_out = {share}: one cluster cannot be split; set it to 0")
    amount = min(max(1, round(share * len(ids))), len(ids) - 1)
    # By hash of the id: a run with another seed, or with files in another order, never trains on
    # clusters that an earlier run held out.
    held_out_ids = set(sorted(ids, key=lambda name: (_digest(name), name))[:amount])
    return [n for n in ids if n not in held_out_ids], [n for n in ids if n in held_out_ids]


def select(source: ClusterSource, selection: str, max_clusters: int, seed: int) -> ClusterSource:
    """Keep at most `max_clusters` clusters: the longest or shortest by characters, or random ones.

    `selection` is one of SELECTIONS. A `max_clusters` of 0 keeps all. Lengths are read only if
    needed. Ties are resolved in id order.
    """
    # Sorted, so that the choice depends on the set of ids alone.
    ids = sorted(source.tasks)
    if not max_clusters or max_clusters >= len(ids):
        return source
    if selection == "random":
        return source.only(random.Random(seed).sample(ids, max_clusters))
    sizes: dict[str, int] = {}
    for start in range(0, len(ids), _READ_AT_ONCE):
        for cluster in source.read(ids[start : start + _READ_AT_ONCE]):
            sizes[cluster.id] = sum(map(len, cluster.documents))
    sign = -1 if selection == "longest" else 1
    return source.only(sorted(ids, key=lambda name: sign * sizes[name])[:max_clusters])


def cut_document(text: str, count_tokens: CountTokens, limit: int) -> list[tuple[str, int]]:
    """Cut a text into (piece, tokens) of at most `limit` tokens each, at the coarsest borders.

    The pieces, stripped of outer white space, cover the text. For byte-fallback tokenizers, limits
    assume at most 4 tokens per character and limit >= SMALLEST_LIMIT.
    """
    # Tokens are counted for each unit and once more for each piece, so the cost is linear. Counting
    # a growing piece after each unit would take quadratic time.
    units = list(_split_units(text, count_tokens, limit, 0))
    pieces: list[tuple[str, int]] = []
    for first, last in _pack_units([count for _, count in units], limit):
        pieces.extend(_join_units([unit for unit, _ in units[first:last]], count_tokens, limit))
    return pieces


def _split_units(
    text: str, count: CountTokens, limit: int, level: int
) -> Iterator[tuple[str, int]]:
    """Yield (unit, tokens): paragraphs, and smaller units only inside those over the limit."""
    if level < len(BORDERS):
        ends = [match.end() for match in BORDERS[level].finditer(text)]
    else:
        # A character has at most 4 bytes, so the slice has at most limit / 2 tokens.
        size = limit // 8
        ends = range(size, len(text), size)
    for start, end in itertools.pairwise([0, *ends, len(text)]):
        unit = text[start:end]
        if not unit:
            continue
        tokens = count(unit)
        if tokens <= limit or level == len(BORDERS):
            yield unit, tokens
        else:
            yield from _split_units(unit, count, limit, level + 1)


def _pack_units(counts: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Yield [first, last) ranges of adjacent units that together fit into the limit."""
    first, total = 0, 0
    for index, tokens in enumerate(counts):
        if total + tokens > limit and index > first:
            yield first, index
            first, total = index, 0
        total += tokens
    if first < len(counts):
        yield first, len(counts)


def _join_units(units: Sequence[str], count: CountTokens, limit: int) -> Iterator[tuple[str, int]]:
    """Yield (piece, tokens) of the joined units, split in half while a piece is over the limit."""
    # A tokenizer may need more tokens for a joined text than for its units. This is rare, so halves
    # cost little.
    piece = "".join(units).strip()
    if not piece:
        return
    tokens = count(piece)
    if tokens <= limit or len(units) == 1:
        yield piece, tokens
        return
    middle = len(units) // 2
    yield from _join_units(units[:middle], count, limit)
    yield from _join_units(units[middle:], count, limit)


def folder_texts(folder: Path, report: ClusterReport) -> Iterator[str]:
    """Yield the texts of a folder's .txt and .md files, by path; count and log other files."""

    def skip(path: str | Path, reason: str, because: object) -> None:
        report.skipped[reason] += 1
        log.warning("%s: skipped (%s: %s)", path, reason, because)

    for path in _files(folder, lambda error: skip(error.filename, "unreadable", error)):
        try:
            if path.exists() and not path.is_file():
                if not path.is_dir():  # a link to a folder, which is not followed
                    skip(path, "unreadable", "a pipe, a socket or a device")
                continue
            if path.suffix.lower() not in SUFFIXES:
                report.skipped["of another type"] += 1
                name = path.name.lower()
                report.buildable.update(s for s in BUILD_SUFFIXES if name.endswith(s))
                continue
            if (size := path.stat().st_size) > LARGEST_FILE:
                raise Unusable("oversize", f"has {size} bytes, more than {LARGEST_FILE}")
            text = decode(path.read_bytes()).strip()
        except OSError as error:
            skip(path, "unreadable", error)
        except Unusable as error:
            skip(path, error.reason, error.because)
        else:
            if text:
                report.read += 1
                yield text
            else:
                skip(path, "empty", "no text in it")


def tfds_texts(source: TfdsSource, report: ClusterReport) -> Iterator[str]:
    """Yield the texts of a tfds set, by split and record; count records without a text."""
    text_set = source.open()
    for shard in text_set.shards:
        try:
            for _, data in text_set.read(shard, remote.fetch(shard)):
                try:
                    text = decode(data).strip()
                except Unusable as error:
                    report.skipped[error.reason] += 1
                    continue
                if text:
                    report.read += 1
                    yield text
                else:
                    report.skipped["empty"] += 1
        except Unusable as error:
            raise ValueError(f"{shard}: {error}; prepare the set again") from error


def _files(folder: Path, on_error: Callable[[OSError], None]) -> list[Path]:
    """Return the paths of a folder that are not hidden or folders, in order.

    Links to folders are not followed. `on_error` gets the error of a folder that cannot be read.
    """
    files: list[Path] = []
    # Hidden folders, such as .git, hold no documents.
    for parent, folders, names in os.walk(folder, onerror=on_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _group_documents(documents: Sequence[str], size: int, grouping: str) -> list[Cluster]:
    if grouping == "order" or len(documents) <= size:
        starts = range(0, len(documents), size)
        groups = [list(range(i, min(i + size, len(documents)))) for i in starts]
    else:
        groups = list(_similar_groups(documents, size))
    clusters = []
    for number, group in enumerate(groups):
        members = tuple(documents[index] for index in group)
        # The digest marks the content, so a resumed run notices documents that have changed.
        clusters.append(Cluster(f"{number:05d}-{_digest(*members)[:8]}", members))
    return clusters


def _similar_groups(documents: Sequence[str], size: int) -> Iterator[list[int]]:
    """Yield groups of indices: the first free document and its nearest free neighbors.

    Ties go to the earlier document. Each group is in corpus order.
    """
    import numpy as np

    from spell_jax.data.word_index import WordIndex

    index = WordIndex(documents)
    free = np.ones(len(documents), dtype=bool)
    for seed in range(len(documents)):
        if not free[seed]:
            continue
        free[seed] = False
        similarity = index.similarities(seed)
        candidates = np.flatnonzero(free)
        nearest = candidates[np.argsort(-similarity[candidates], kind="stable")[: size - 1]]
        free[nearest] = False
        yield sorted([seed, *nearest.tolist()])


def _jsonl_clusters(path: Path, report: ClusterReport) -> list[Cluster]:
    # A repeated id is a bad line, because memory and held-out split go by id.
    ids: set[str] = set()

    def parse(record: Any) -> Cluster:
        cluster = _parse_cluster(record)
        if cluster.id in ids:
            raise ValueError(f"id = {cluster.id!r}: must be unique")
        ids.add(cluster.id)
        return cluster

    where = f"source = {str(path)!r}: no usable text"
    clusters, skipped = require_records(path, parse, where, "a cluster")
    report.read += len(clusters)
    if skipped:
        report.skipped["bad lines"] += skipped
    return clusters


def _parse_cluster(record: Any) -> Cluster:
    fields = record if isinstance(record, dict) else {}
    name, documents, tasks = fields.get("id"), fields.get("documents"), fields.get("tasks")
    if not is_text(name):
        raise ValueError("id: must be a non-empty string")
    if not isinstance(documents, list) or not documents or not all(map(is_text, documents)):
        raise ValueError("documents: must be a list of one or more non-empty strings")
    if tasks is None:
        return Cluster(name, tuple(documents))
    if not isinstance(tasks, list) or not tasks or any(task not in TASKS for task in tasks):
        raise ValueError(f"tasks = {tasks!r}: must be a list of one or more of {TASKS}")
    return Cluster(name, tuple(documents), tuple(dict.fromkeys(tasks)))


def is_text(value: object) -> TypeGuard[str]:
    """Return whether the value is a non-blank string without lone surrogates (invalid UTF-8)."""
    return isinstance(value, str) and bool(value.strip()) and not SURROGATE.search(value)


def _digest(*texts: str) -> str:
    # Python's own hash of a text differs in every process.
    return hashlib.sha256("\0".join(texts).encode("utf-8")).hexdigest()
