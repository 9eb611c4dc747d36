"""Clusters of documents, and how they come from a file or from a folder of texts.

1. A JSONL file holds a cluster a line: {"id": "a", "documents": ["...", "..."], "tasks":
   ["general_qa"]}, "tasks" being optional. Bad lines are counted, logged with file and line, and
   skipped.
2. A folder is searched for .txt and .md files, in the order of their paths. Unreadable or empty
   files are counted, logged and skipped.
3. Documents longer than `max_document_tokens` are cut at paragraphs; only inside a paragraph that
   is too long by itself at lines, then sentences, words, characters. Nothing but white space at the
   cuts is lost (spec section 14).
4. A folder's documents are grouped by order, or by TF-IDF similarity: the first free document and
   its nearest free neighbors form a cluster. Which clusters are held out depends on ids alone.
5. Whoever plays clusters sees a `Source`: ids and tasks at once, texts when they are asked for.
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
ROLES = ("questioner", "responder", "verifier")  # of a policy that plays with itself
LETTERS = ("A", "B", "C", "D")  # of the options of a multiple choice
SUFFIXES = (".txt", ".md")
SMALLEST_LIMIT = 16
GROUPINGS = ("order", "similarity")
SELECTIONS = ("longest", "random", "shortest")

# The borders of units, coarse to fine, matched in linear time; a unit keeps the border behind it.
BORDERS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\n\s*\n",  # paragraph
        r"\n",  # line
        r"[.!?][\"')\]]?\s+|[。！？]",  # sentence
        r"\s+",  # word
    )
)

_READ_AT_ONCE = 256  # clusters, to learn their lengths

SURROGATE = re.compile(r"[\ud800-\udfff]")

log = logging.getLogger(__name__)

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Cluster:
    """Related documents, played together.

    Attributes:
        id: unique among the clusters of a run.
        documents: n texts in corpus order, n >= 1.
        tasks: the tasks it may serve; None: any.
    """

    id: str
    documents: tuple[str, ...]
    tasks: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Source:
    """Clusters whose texts may be in storage until they are needed.

    Attributes:
        tasks: id -> the tasks that the cluster may serve (None: any), one entry a cluster.
        read: ids of `tasks`, any of them more than once -> their clusters, in the order of the ids.
    """

    tasks: Mapping[str, tuple[str, ...] | None]
    read: Callable[[Sequence[str]], list[Cluster]]

    def only(self, ids: Sequence[str]) -> "Source":
        """The clusters with these ids alone."""
        return replace(self, tasks={name: self.tasks[name] for name in ids})


def in_memory(clusters: Sequence[Cluster]) -> Source:
    """A source of clusters that are read already; ValueError if two have the same id."""
    by_id = {cluster.id: cluster for cluster in clusters}
    if len(by_id) != len(clusters):
        raise ValueError("clusters: ids must be unique")
    tasks = {cluster.id: cluster.tasks for cluster in clusters}
    return Source(tasks, lambda ids: [by_id[name] for name in ids])


@dataclass
class ClusterReport:
    """What reading a source came to. Tokens are those of the handed-in counter.

    Attributes:
        read: files (of a folder) or lines (of a JSONL file) that were used.
        skipped: reason -> how many files or lines.
        cut: documents that were over the limit.
        documents: documents after cutting.
        clusters: clusters.
        tokens_min, tokens_mean, tokens_max: tokens per document after cutting.
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
        """One line for people."""
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        return (
            f"read {self.read}, skipped {self.skipped.total()} ({skipped or 'none'}), "
            f"cut {self.cut} long documents; {self.documents} documents of {self.tokens_min} to "
            f"{self.tokens_max} tokens (mean {self.tokens_mean:.1f}) in {self.clusters} clusters"
        )


def count_words(text: str) -> int:
    """The token counter used where none is handed in: white-space separated words."""
    return len(text.split())


def read_clusters(
    source: str | Path,
    *,
    count_tokens: CountTokens = count_words,
    max_document_tokens: int = 1024,
    documents_per_cluster: int = 8,
    grouping: str = "order",
) -> tuple[list[Cluster], ClusterReport]:
    """Reads a JSONL file of clusters, or makes clusters from a folder's .txt and .md files.

    The documents of a JSONL cluster stay together: those over the limit are cut in place.

    Args:
        source: the file or folder.
        count_tokens: text -> number of tokens; called on short texts, in all a few times the
            source's length.
        max_document_tokens: limit per document, at least 16.
        documents_per_cluster: for folders; the last cluster may have fewer.
        grouping: for folders; "order" or "similarity".

    Raises:
        FileNotFoundError: there is no such source.
        ValueError: a setting out of range, or a source without any usable text.
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
    """Splits ids of clusters into (training, held-out) by their hashes, whatever order or seed.

    A share above 0 holds out at least one cluster and leaves at least one.

    Raises:
        ValueError: share outside [0, 1), or too few clusters to split.
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
    """At most so many clusters: the longest or shortest by characters, or random ones.

    Lengths are read once, a few clusters at a time, if they are needed; of equal lengths the first
    ids are taken.

    Args:
        source: of the clusters.
        selection: one of SELECTIONS.
        most: clusters to keep; 0: all.
        seed: of random ones.
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
    """Cuts a text into (piece, tokens), at most `limit` tokens each, at the coarsest borders.

    The pieces, stripped of outer white space, cover the text. A text is counted unit by unit and
    the pieces once more, so the cost is linear in its length (for byte-fallback tokenizers, at most
    4 tokens a character, limit >= 16).
    """
    units = list(_units(text, count_tokens, limit, 0))
    pieces: list[tuple[str, int]] = []
    for first, last in _packed([count for _, count in units], limit):
        pieces.extend(_checked([unit for unit, _ in units[first:last]], count_tokens, limit))
    return pieces


def _units(text: str, count: CountTokens, limit: int, level: int) -> Iterator[tuple[str, int]]:
    """Yields (unit, tokens): paragraphs, and smaller units only where one is over the limit."""
    if level == len(BORDERS):
        size = limit // 8  # a character has at most 4 bytes: such a slice always fits
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
    """Yields [first, last) ranges of neighbors, as long as their counts fit into the limit."""
    first, total = 0, 0
    for index, tokens in enumerate(counts):
        if total + tokens > limit and index > first:
            yield first, index
            first, total = index, 0
        total += tokens
    if first < len(counts):
        yield first, len(counts)


def _checked(units: Sequence[str], count: CountTokens, limit: int) -> Iterator[tuple[str, int]]:
    """Joins the units; halves them in the rare case that they have more tokens together."""
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
    """Yields groups of indices: the first free document and its nearest free neighbors.

    Ties go to the earlier document; within a group the corpus order is kept.
    """
    import numpy as np
    from sklearn.feature_extraction.text import TfidfVectorizer  # slow to import, rarely needed

    # Every text that is not blank has a word or a sign, so the vocabulary is never empty.
    words = TfidfVectorizer(token_pattern=r"\w+|[^\w\s]", sublinear_tf=True)
    vectors = words.fit_transform(documents).tocsr()
    postings = vectors.T.tocsr()  # by word: a document meets those that share words with it
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
    """A string with something in it, and free of lone surrogates, which UTF-8 cannot write."""
    if not isinstance(value, str) or not value.strip():
        return False
    return SURROGATE.search(value) is None


def _skip(report: ClusterReport, reason: str, where: object, detail: str) -> None:
    report.skipped[reason] += 1
    log.warning("%s: skipped (%s)", where, detail)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8")).hexdigest()
