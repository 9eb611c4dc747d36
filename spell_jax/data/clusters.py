"""Clusters of documents, read from a JSONL file or made from a folder of texts.

1. A JSONL file has one cluster per line: {"id": "a", "documents": ["...", "..."], "tasks":
   ["general_qa"]}, where "tasks" is optional. Bad lines are counted, logged with file and line, and
   skipped.
2. A folder is searched for .txt and .md files, in path order. Unreadable or empty files are
   counted, logged and skipped.
3. Documents longer than `max_document_tokens` are cut at paragraphs. Only a paragraph that is too
   long is cut at lines, then sentences, words, characters. Only white space at the cuts is lost
   (spec section 14).
4. Documents of a folder are grouped by order, or by TF-IDF similarity: the first free document and
   its nearest free neighbors form a cluster. The held-out split depends only on cluster ids.
5. Users of clusters get a `Source`: ids and tasks at once, texts on demand.
"""

import hashlib
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from spell_jax.runtime.jsonl import read_records

TASKS = ("general_qa", "financial_math", "multiple_choice")
ROLES = ("questioner", "responder", "verifier")  # of the policy in SPELL self-play
LETTERS = ("A", "B", "C", "D")  # labels of multiple-choice options
SUFFIXES = (".txt", ".md")
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

_READ_AT_ONCE = 256  # clusters per read while measuring lengths

SURROGATE = re.compile(r"[\ud800-\udfff]")

log = logging.getLogger(__name__)

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Cluster:
    """Related documents that are used together.

    Attributes:
        id: unique among the clusters of a run.
        documents: n texts in corpus order, n >= 1.
        tasks: tasks that the cluster may serve; None allows any.
    """

    id: str
    documents: tuple[str, ...]
    tasks: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Source:
    """Clusters whose texts may stay in storage until they are needed.

    Attributes:
        tasks: id -> tasks that the cluster may serve (None: any), one entry per cluster.
        read: function from ids of `tasks`, which may repeat, to their clusters in the order of the
            ids.
    """

    tasks: Mapping[str, tuple[str, ...] | None]
    read: Callable[[Sequence[str]], list[Cluster]]

    def only(self, ids: Sequence[str]) -> "Source":
        """Return a source restricted to the given ids."""
        return replace(self, tasks={name: self.tasks[name] for name in ids})


def in_memory(clusters: Sequence[Cluster]) -> Source:
    """Make a source of clusters that are in memory.

    Raises:
        ValueError: if two clusters have the same id.
    """
    by_id = {cluster.id: cluster for cluster in clusters}
    if len(by_id) != len(clusters):
        raise ValueError("clusters: ids must be unique")
    tasks = {cluster.id: cluster.tasks for cluster in clusters}
    return Source(tasks, lambda ids: [by_id[name] for name in ids])


@dataclass
class ClusterReport:
    """Statistics of reading a source. Tokens are counted by the caller's function.

    Attributes:
        read: number of files (folder) or lines (JSONL file) used.
        skipped: reason -> number of files or lines.
        cut: number of documents over the limit.
        documents: number of documents after cutting.
        clusters: number of clusters.
        tokens_min: fewest tokens of a document after cutting.
        tokens_mean: mean tokens of a document after cutting.
        tokens_max: most tokens of a document after cutting.
    """

    read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    documents: int = 0
    clusters: int = 0
    tokens_min: int = 0
    tokens_mean: float = 0.0
    tokens_max: int = 0

    def summary(self) -> str:
        """Format the statistics as one line of text."""
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        return (
            f"read {self.read}, skipped {self.skipped.total()} ({skipped or 'none'}), "
            f"cut {self.cut} long documents; {self.documents} documents of {self.tokens_min} to "
            f"{self.tokens_max} tokens (mean {self.tokens_mean:.1f}) in {self.clusters} clusters"
        )


def count_words(text: str) -> int:
    """Count white-space separated words: the default token counter."""
    return len(text.split())


def read_clusters(
    source: str | Path,
    *,
    count_tokens: CountTokens = count_words,
    max_document_tokens: int = 1024,
    documents_per_cluster: int = 8,
    grouping: str = "order",
) -> tuple[list[Cluster], ClusterReport]:
    """Read a JSONL file of clusters, or make clusters from a folder's .txt and .md files.

    The documents of a JSONL cluster stay together; those over the limit are cut in place.

    Args:
        source: path of the file or folder.
        count_tokens: function that returns the number of tokens of a text. It is called on short
            texts, in total a few times the source's length.
        max_document_tokens: maximum tokens per document, at least 16.
        documents_per_cluster: cluster size for folders; the last cluster may have fewer.
        grouping: grouping for folders, "order" or "similarity".

    Returns:
        (clusters, report).

    Raises:
        FileNotFoundError: if the source does not exist.
        ValueError: if a setting is out of range, or the source contains no usable text.
    """
    source = Path(source)
    if max_document_tokens < SMALLEST_LIMIT:
        raise ValueError(
            f"max_document_tokens={max_document_tokens}: must be at least {SMALLEST_LIMIT}"
        )
    if documents_per_cluster < 1:
        raise ValueError(f"documents_per_cluster={documents_per_cluster}: must be at least 1")
    if grouping not in GROUPINGS:
        raise ValueError(f"grouping={grouping!r}: must be 'order' or 'similarity'")
    if not source.exists():
        raise FileNotFoundError(f"source={str(source)!r}: no such file or folder")
    report = ClusterReport()
    lengths: list[int] = []

    def cut(document: str) -> list[str]:
        pieces = cut_document(document, count_tokens, max_document_tokens)
        report.cut += len(pieces) > 1
        lengths.extend(length for _, length in pieces)
        return [piece for piece, _ in pieces]

    if source.is_dir():
        pieces = [piece for text in _folder_texts(source, report) for piece in cut(text)]
        clusters = _grouped(pieces, documents_per_cluster, grouping)
    else:
        clusters = [
            replace(
                cluster, documents=tuple(piece for text in cluster.documents for piece in cut(text))
            )
            for cluster in _jsonl_clusters(source, report)
        ]
    if not clusters:
        raise ValueError(f"source={str(source)!r}: no usable text; {report.summary()}")
    report.clusters, report.documents = len(clusters), len(lengths)
    report.tokens_min, report.tokens_max = min(lengths), max(lengths)
    report.tokens_mean = sum(lengths) / len(lengths)
    log.info("%s: %s", source, report.summary())
    return clusters, report


def split_held_out(ids: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Split cluster ids into (training, held-out) by their hashes, independent of order and seed.

    A share above 0 holds out at least one cluster and leaves at least one for training.

    Raises:
        ValueError: if share is outside [0, 1), or there are too few clusters to split.
    """
    if not 0 <= share < 1:
        raise ValueError(f"held-out share={share}: must be at least 0 and below 1")
    if share == 0:
        return list(ids), []
    if len(ids) < 2:
        raise ValueError(f"held-out share={share}: one cluster cannot be split; set it to 0")
    amount = min(max(1, round(share * len(ids))), len(ids) - 1)
    chosen = set(sorted(ids, key=lambda name: (_digest(name), name))[:amount])
    return [n for n in ids if n not in chosen], [n for n in ids if n in chosen]


def select(source: Source, selection: str, most: int, seed: int) -> Source:
    """Keep at most `most` clusters: the longest or shortest by characters, or random ones.

    Lengths are read once, a few clusters at a time, and only if needed. Ties are resolved in id
    order.

    Args:
        source: the clusters.
        selection: one of SELECTIONS.
        most: number of clusters to keep; 0 keeps all.
        seed: seed of the random selection.
    """
    ids = sorted(source.tasks)
    if not most or most >= len(ids):
        return source
    if selection == "random":
        return source.only(random.Random(seed).sample(ids, most))
    sizes: dict[str, int] = {}
    for start in range(0, len(ids), _READ_AT_ONCE):
        for cluster in source.read(ids[start : start + _READ_AT_ONCE]):
            sizes[cluster.id] = sum(map(len, cluster.documents))
    sign = -1 if selection == "longest" else 1
    return source.only(sorted(ids, key=lambda name: sign * sizes[name])[:most])


# ------------------------------------------------------------------------------------------ cutting


def cut_document(text: str, count_tokens: CountTokens, limit: int) -> list[tuple[str, int]]:
    """Cut a text into (piece, tokens) of at most `limit` tokens each, at the coarsest borders.

    The pieces, stripped of outer white space, cover the text. Tokens are counted for each unit and
    once more for each piece, so the cost is linear in the text's length. For byte-fallback
    tokenizers this assumes at most 4 tokens per character and limit >= 16.
    """
    units = list(_units(text, count_tokens, limit, 0))
    pieces: list[tuple[str, int]] = []
    for first, last in _packed([count for _, count in units], limit):
        pieces.extend(_checked([unit for unit, _ in units[first:last]], count_tokens, limit))
    return pieces


def _units(text: str, count: CountTokens, limit: int, level: int) -> Iterator[tuple[str, int]]:
    """Yield (unit, tokens): paragraphs, and smaller units only inside those over the limit."""
    if level == len(BORDERS):
        size = limit // 8  # a character has at most 4 bytes, so the slice always fits
        for start in range(0, len(text), size):
            yield text[start : start + size], count(text[start : start + size])
        return
    start = 0
    ends = [match.end() for match in BORDERS[level].finditer(text)]
    for end in [*ends, len(text)]:
        unit, start = text[start:end], end
        if not unit:
            continue
        tokens = count(unit)
        if tokens <= limit:
            yield unit, tokens
        else:
            yield from _units(unit, count, limit, level + 1)


def _packed(counts: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Yield [first, last) ranges of adjacent units whose counts fit into the limit."""
    first, total = 0, 0
    for index, tokens in enumerate(counts):
        if total + tokens > limit and index > first:
            yield first, index
            first, total = index, 0
        total += tokens
    if first < len(counts):
        yield first, len(counts)


def _checked(units: Sequence[str], count: CountTokens, limit: int) -> Iterator[tuple[str, int]]:
    """Join the units; split them in half in the rare case that the joined text is too long."""
    piece = "".join(units).strip()
    if not piece:
        return
    tokens = count(piece)
    if tokens <= limit or len(units) == 1:
        yield piece, tokens
        return
    middle = len(units) // 2
    yield from _checked(units[:middle], count, limit)
    yield from _checked(units[middle:], count, limit)


# ------------------------------------------------------------------------------------------ folders


def _folder_texts(folder: Path, report: ClusterReport) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts) or not path.is_file():
            continue
        if path.suffix.lower() not in SUFFIXES:
            report.skipped["of another type"] += 1
            continue
        try:
            text = path.read_text(encoding="utf-8-sig").strip()
        except (UnicodeDecodeError, OSError) as error:
            _skip(report, "unreadable", path, str(error))
            continue
        if text:
            report.read += 1
            yield text
        else:
            _skip(report, "empty", path, "no text in it")


def _grouped(documents: Sequence[str], size: int, grouping: str) -> list[Cluster]:
    if grouping == "order" or len(documents) <= size:
        starts = range(0, len(documents), size)
        groups = [list(range(i, min(i + size, len(documents)))) for i in starts]
    else:
        groups = list(_similar_groups(documents, size))
    clusters = []
    for number, group in enumerate(groups):
        members = tuple(documents[index] for index in group)
        clusters.append(Cluster(f"{number:05d}-{_digest(*members)[:8]}", members))
    return clusters


def _similar_groups(documents: Sequence[str], size: int) -> Iterator[list[int]]:
    """Yield groups of indices: the first free document and its nearest free neighbors.

    Ties go to the earlier document. Each group is in corpus order.
    """
    import numpy as np
    from sklearn.feature_extraction.text import TfidfVectorizer  # slow to import, rarely needed

    # Every non-blank text has a word or a symbol, so the vocabulary is never empty.
    words = TfidfVectorizer(token_pattern=r"\w+|[^\w\s]", sublinear_tf=True)
    vectors = words.fit_transform(documents).tocsr()
    postings = vectors.T.tocsr()  # inverted index: word -> documents
    free = np.ones(len(documents), dtype=bool)
    for seed in range(len(documents)):
        if not free[seed]:
            continue
        free[seed] = False
        similarity = (vectors[seed] @ postings).toarray()[0]
        candidates = np.flatnonzero(free)
        nearest = candidates[np.argsort(-similarity[candidates], kind="stable")[: size - 1]]
        free[nearest] = False
        yield sorted([seed, *nearest.tolist()])


# -------------------------------------------------------------------------------------------- JSONL


def _jsonl_clusters(path: Path, report: ClusterReport) -> list[Cluster]:
    seen: set[str] = set()

    def parse(record: Any) -> Cluster:
        cluster = _parse_cluster(record)
        if cluster.id in seen:
            raise ValueError(f"id={cluster.id!r}: appeared before")
        seen.add(cluster.id)
        return cluster

    clusters, skipped = read_records(path, parse)
    report.read += len(clusters)
    if skipped:
        report.skipped["bad lines"] += skipped
    return clusters


def _parse_cluster(record: Any) -> Cluster:
    fields = record if isinstance(record, dict) else {}
    name, documents, tasks = fields.get("id"), fields.get("documents"), fields.get("tasks")
    if not _is_text(name):
        raise ValueError("id: must be a string with text")
    if not isinstance(documents, list) or not documents or not all(map(_is_text, documents)):
        raise ValueError("documents: must be a list of one or more strings with text")
    if tasks is None:
        return Cluster(name, tuple(documents))
    if not isinstance(tasks, list) or not tasks or any(task not in TASKS for task in tasks):
        raise ValueError(f"tasks={tasks!r}: must be a list of one or more of {TASKS}")
    return Cluster(name, tuple(documents), tuple(dict.fromkeys(tasks)))


def _is_text(value: object) -> TypeGuard[str]:
    """Return whether the value is a non-blank string without lone surrogates (invalid UTF-8)."""
    if not isinstance(value, str) or not value.strip():
        return False
    return SURROGATE.search(value) is None


def _skip(report: ClusterReport, reason: str, where: object, detail: str) -> None:
    report.skipped[reason] += 1
    log.warning("%s: skipped (%s)", where, detail)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8")).hexdigest()
