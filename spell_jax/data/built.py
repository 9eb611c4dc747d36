"""Clusters built by data_pipeline: kept in storage and read when they are dealt.

1. A finished build is a folder of ArrayRecord shards, index.jsonl (id and task of each record, in
   record order) and, written last, manifest.json (size of every file). Opening it reads the index
   and compares file sizes, so that an unfinished or damaged build is rejected at once.
2. The records of a batch are read by number when the batch is dealt. With several hosts, each host
   reads every n-th cluster of a batch, and the hosts exchange texts.
"""

from __future__ import annotations

import functools
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import jax
from etils import epath

from spell_jax.data.clusters import (
    Cluster,
    ClusterSource,
    CountTokens,
    Source,
    cut_document,
    in_memory,
    read_clusters,
)
from spell_jax.data.tfds_sets import TfdsSource, open_builder
from spell_jax.runtime.files import remote
from spell_jax.runtime.files.jsonl import read_json, read_records
from spell_jax.runtime.hosts import distributed

MANIFEST, INDEX = "manifest.json", "index.jsonl"
SHARDS = "clusters-train.array_record-*"

log = logging.getLogger(__name__)


def is_built(source: Source) -> bool:
    """Return whether a source is a folder written by data_pipeline, finished or not."""
    # The folder of a set is not fetched: its texts may be large, and only some splits are read.
    is_set = isinstance(source, TfdsSource)
    folder = epath.Path(source.folder) if is_set else remote.fetch(source)
    return (folder / INDEX).is_file() or any(folder.glob(SHARDS))


def open_source(
    source: Source, *, count_tokens: CountTokens, max_document_tokens: int, **options: Any
) -> ClusterSource:
    """Open the clusters of a built folder, a folder of texts, a JSONL file or a tfds set.

    A source may be a URL. Clusters of a built folder are read on demand. Other sources are read at
    once by clusters.read_clusters, with its arguments (`options`) and errors. `BuiltClusters` lists
    the errors of a built folder.
    """
    if not is_built(source):
        clusters, _ = read_clusters(
            source,
            count_tokens=count_tokens,
            max_document_tokens=max_document_tokens,
            **options,
        )
        return in_memory(clusters)
    built = BuiltClusters(source)

    def read_and_cut(ids: Sequence[str]) -> list[Cluster]:
        # The build has cut most documents, but perhaps at another limit or by another tokenizer.
        return [_cut(cluster, count_tokens, max_document_tokens) for cluster in built.read(ids)]

    return ClusterSource(built.tasks, read_and_cut)


def _local_folder(source: Source) -> Path:
    return remote.fetch(source.folder if isinstance(source, TfdsSource) else source)


def _cut(cluster: Cluster, count_tokens: CountTokens, limit: int) -> Cluster:
    pieces: list[str] = []
    for text in cluster.documents:
        if count_tokens(text) <= limit:
            pieces.append(text)
        else:
            pieces += [piece for piece, _ in cut_document(text, count_tokens, limit)]
    return replace(cluster, documents=tuple(pieces))


class BuiltClusters:
    """The clusters of a finished build, by id. `tasks` maps id -> (task,), in record order."""

    def __init__(self, source: Source):
        """Read index and manifest, and compare the files with the manifest.

        FileNotFoundError if the manifest or a file named in it is missing, ValueError naming a file
        that differs from the manifest, ImportError without tensorflow_datasets and array_record.
        """
        self._folder = _local_folder(source)
        _check_files(self._folder)
        index_file = self._folder / INDEX
        index, bad_lines = read_records(index_file, _parse_index)
        if bad_lines:
            raise ValueError(f"{index_file}: {bad_lines} invalid lines; build it again")
        self.tasks: dict[str, tuple[str, ...] | None] = {name: (task,) for name, task in index}
        # Records are found by number, so a step reads only the clusters of its batch.
        self._numbers = {name: number for number, name in enumerate(self.tasks)}
        self._records = _open_records(self._folder)
        # Equal counts: no id is twice in the index, and no record is missing.
        if not len(index) == len(self.tasks) == len(self._records):
            raise ValueError(
                f"{index_file}: {len(self.tasks)} ids in {len(index)} lines for "
                f"{len(self._records)} records; build it again"
            )
        counts = Counter(task for _, task in index)
        log.info("%s: %d clusters, %s", self._folder, len(index), dict(sorted(counts.items())))

    def read(self, ids: Sequence[str]) -> list[Cluster]:
        """Read the clusters with these ids, in the given order.

        KeyError for an unknown id, ValueError if a record is unreadable or differs from the index.
        """
        return [self._read_cluster(name) for name in ids]

    def _read_cluster(self, name: str) -> Cluster:
        number = self._numbers[name]
        try:
            record = self._records[number]
            cluster_id = record["id"].decode()
            documents = tuple(text.decode() for text in record["documents"])
        except Exception as error:  # array_record passes on riegeli errors of several types
            raise ValueError(
                f"{self._folder}: record {number} (cluster {name}) is damaged ({error}); build it "
                "again"
            ) from error
        if cluster_id != name:
            raise ValueError(
                f"{self._folder / INDEX}: record {number} is cluster {cluster_id}, not {name}; "
                "build it again"
            )
        return Cluster(name, documents, self.tasks[name])


def _check_files(folder: Path) -> None:
    """Raise an error unless the files of a build have the sizes of its manifest."""
    # The pipeline writes the manifest last, so an interrupted build has none.
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing, so the build is unfinished; run it again")
    try:
        files = read_json(path)["files"]
        sizes = {name: int(file["size"]) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not the manifest of a build ({error!r})") from error
    # Sizes, not hashes: to hash, every start would read the whole build.
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{file}: missing, but listed in {MANIFEST}; build it again")
        if (file_size := file.stat().st_size) != size:
            raise ValueError(f"{file}: {file_size} bytes instead of {size}; build it again")
    # A shard that is not listed is left from another build in the same folder.
    if unlisted := {file.name for file in folder.glob(SHARDS)} - sizes.keys():
        raise ValueError(f"{folder / min(unlisted)}: not listed in {MANIFEST}; build it again")


def _parse_index(record: Any) -> tuple[str, str]:
    name, task = record["id"], record["task"]
    if not isinstance(name, str) or not isinstance(task, str):
        raise ValueError("id and task must be strings")
    return name, task


def _open_records(folder: Path) -> Any:
    """Open the tfds data source of a folder; does not need TensorFlow."""
    with open_builder(folder) as builder:
        return builder.as_data_source(split="train")


def share_reading(source: ClusterSource) -> ClusterSource:
    """Wrap a source so that one host reads each cluster and sends it to all hosts.

    All hosts must request the same ids at the same time. An error on one host is a RuntimeError on
    all hosts.
    """
    return replace(source, read=functools.partial(_read_shared, source.read))


def _read_shared(read: Callable[[Sequence[str]], list[Cluster]], ids: Sequence[str]):
    if jax.process_count() == 1:
        return read(ids)
    # Each id once, because a batch larger than the data repeats clusters.
    names = list(dict.fromkeys(ids))[jax.process_index() :: jax.process_count()]
    # JSON: what a peer sends is never unpickled, because unpickling can run code.
    parts = distributed.make_together(
        lambda: [json.dumps(astuple(cluster)).encode() for cluster in read(names)]
    )
    by_id = {}
    for index, items in enumerate(parts):
        for data in items:
            name, documents, tasks = distributed.parse_json(data, index)
            by_id[name] = Cluster(name, tuple(documents), tasks and tuple(tasks))
    return [by_id[name] for name in ids]
