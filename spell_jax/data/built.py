"""Clusters built by data_pipeline: kept in storage and read when they are dealt.

1. A finished build is a folder with ArrayRecord shards, index.jsonl (id and task of each record, in
   record order) and manifest.json (size of every file), which is written last.
2. Opening a build reads the index and compares file sizes, so that an unfinished or damaged build
   is rejected at once.
3. The records of a batch are read by number, through the tfds data source, when the batch is dealt.
4. With several hosts, each host reads every n-th cluster of a batch, and the hosts exchange texts.
"""

from __future__ import annotations

import functools
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from spell_jax.data.clusters import (
    Cluster,
    CountTokens,
    Source,
    cut_document,
    in_memory,
    read_clusters,
)
from spell_jax.runtime import distributed

MANIFEST, INDEX = "manifest.json", "index.jsonl"
SHARDS = "clusters-train.array_record-*"

log = logging.getLogger(__name__)


def is_built(path: str | Path) -> bool:
    """Return whether the path is a folder written by data_pipeline, finished or not."""
    folder = Path(path)
    return (folder / INDEX).is_file() or any(folder.glob(SHARDS))


def open_source(
    source: str | Path,
    *,
    count_tokens: CountTokens,
    max_document_tokens: int,
    documents_per_cluster: int,
    grouping: str,
) -> Source:
    """Open the clusters of a built folder, a folder of texts or a JSONL file.

    Clusters of a built folder are read on demand. Their documents are cut in place if they exceed
    the limit; the build has already cut most of them. Other sources are read at once by
    clusters.read_clusters, with the same arguments and errors.

    Raises:
        FileNotFoundError, ValueError: see `Built` and `read_clusters`.
        ImportError: if a built folder is opened without tensorflow_datasets and array_record.
    """
    if not is_built(source):
        found, _ = read_clusters(
            source,
            count_tokens=count_tokens,
            max_document_tokens=max_document_tokens,
            documents_per_cluster=documents_per_cluster,
            grouping=grouping,
        )
        return in_memory(found)
    built = Built(source)
    cut = functools.partial(_cut, count_tokens=count_tokens, limit=max_document_tokens)
    return Source(built.tasks, lambda ids: [cut(cluster) for cluster in built.read(ids)])


class Built:
    """A finished build: its clusters by id.

    Attributes:
        tasks: id -> (task,), in record order.
    """

    def __init__(self, path: str | Path):
        """Read index and manifest, and compare the files with the manifest.

        Raises:
            FileNotFoundError: if the manifest or a file named in it is missing.
            ValueError: if a file differs from the manifest; the message names the file.
            ImportError: if tensorflow_datasets or array_record is not installed.
        """
        self._folder = Path(path)
        self._check()
        lines = (self._folder / INDEX).read_text(encoding="utf-8").splitlines()
        index = [self._parse(line) for line in lines]
        self.tasks: dict[str, tuple[str, ...] | None] = {name: (task,) for name, task in index}
        self._numbers = {name: number for number, name in enumerate(self.tasks)}
        self._records = _open_records(self._folder)
        if not len(index) == len(self.tasks) == len(self._records):
            raise ValueError(
                f"{self._folder / INDEX}: {len(self.tasks)} ids in {len(index)} lines for "
                f"{len(self._records)} records; build it again"
            )
        counts = Counter(task for _, task in index)
        log.info("%s: %d clusters, %s", self._folder, len(index), dict(sorted(counts.items())))

    def read(self, ids: Sequence[str]) -> list[Cluster]:
        """Read the clusters with these ids, in the given order.

        Raises:
            KeyError: if an id is unknown.
            ValueError: if a record cannot be read, or its id differs from the index.
        """
        return [self._read_one(name) for name in ids]

    def _read_one(self, name: str) -> Cluster:
        number = self._numbers[name]
        try:
            record = self._records[number]
            found = record["id"].decode()
            documents = tuple(text.decode() for text in record["documents"])
        except Exception as error:  # array_record passes on riegeli errors of several types
            raise ValueError(
                f"{self._folder}: record {number} (cluster {name}) is damaged, build it again: "
                f"{error}"
            ) from error
        if found != name:
            raise ValueError(
                f"{self._folder / INDEX}: record {number} is cluster {found}, not {name}; build it "
                "again"
            )
        return Cluster(name, documents, self.tasks[name])

    def _check(self) -> None:
        path = self._folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: is missing, so the build did not finish; run it again"
            )
        try:
            files = json.loads(path.read_text(encoding="utf-8"))["files"]
            sizes = {name: int(file["size"]) for name, file in files.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: is not a build's manifest ({error!r})") from error
        for name, size in sizes.items():
            file = self._folder / name
            if not file.is_file():
                raise FileNotFoundError(f"{file}: is missing, {MANIFEST} names it; build it again")
            if file.stat().st_size != size:
                raise ValueError(
                    f"{file}: has {file.stat().st_size} bytes, {MANIFEST} says {size}; build it "
                    "again"
                )
        if strange := {file.name for file in self._folder.glob(SHARDS)} - sizes.keys():
            raise ValueError(f"{self._folder / min(strange)}: is not in {MANIFEST}; build it again")

    def _parse(self, line: str) -> tuple[str, str]:
        try:
            record = json.loads(line)
            return record["id"], record["task"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._folder / INDEX}: bad line {line[:80]!r}") from error


def share_reading(source: Source) -> Source:
    """Wrap a source so that each cluster is read by one host and sent to the others.

    Every host must request the same ids at the same time and gets all of them. An error on one host
    raises a RuntimeError on all.
    """
    return replace(source, read=functools.partial(_read_shared, source.read))


def _read_shared(read: Callable[[Sequence[str]], list[Cluster]], ids: Sequence[str]):
    names = list(dict.fromkeys(ids))
    if jax.process_count() == 1:
        found = read(names)
    else:
        mine = names[jax.process_index() :: jax.process_count()]
        parts = distributed.make_together(lambda: [_encode(cluster) for cluster in read(mine)])
        found = [_decode(item) for part in parts for item in part]
    by_id = {cluster.id: cluster for cluster in found}
    return [by_id[name] for name in ids]


def _encode(cluster: Cluster) -> bytes:
    return json.dumps([cluster.id, cluster.documents, cluster.tasks]).encode()


def _decode(data: bytes) -> Cluster:
    name, documents, tasks = json.loads(data)
    return Cluster(name, tuple(documents), None if tasks is None else tuple(tasks))


def _cut(cluster: Cluster, count_tokens: CountTokens, limit: int) -> Cluster:
    pieces: list[str] = []
    for text in cluster.documents:
        if count_tokens(text) <= limit:
            pieces.append(text)
        else:
            pieces += [piece for piece, _ in cut_document(text, count_tokens, limit)]
    return replace(cluster, documents=tuple(pieces))


def _open_records(folder: Path) -> Any:
    """Open the tfds data source of a folder; does not need TensorFlow."""
    try:
        import tensorflow_datasets as tfds  # slow to import, rarely needed

        builder: Any = tfds.builder_from_directory(folder)
        return builder.as_data_source(split="train")
    except ImportError as error:
        raise ImportError(
            f"{folder}: to read what data_pipeline built, pip install tensorflow-datasets "
            f"array-record ({error})"
        ) from error
