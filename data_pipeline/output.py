"""Writes the finished data set: clusters in ArrayRecord shards that tfds reads without TensorFlow.

1. A complete output with the same fingerprint is kept. Otherwise all of its files are deleted,
   first manifest.json and dataset_info.json, which mark a build as complete.
2. Shards are consecutive ranges of the clusters, sorted by id. Files get their names when complete.
3. tfds writes features.json and dataset_info.json. index.jsonl lists id, task and size of each
   record. manifest.json is written last, with size and hash of every file.

`tfds.builder_from_directory(OUT).as_data_source(split="train")` reads the records. If OUT is
DIR/clusters/1.0.0, `tfds.data_source("clusters", data_dir=DIR, split="train")` does, too.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import io
import itertools
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import apache_beam as beam
import numpy as np
import tensorflow_datasets as tfds
from apache_beam.io.filesystems import FileSystems
from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath
from tensorflow_datasets.core import dataset_info, example_serializer, splits

from data_pipeline import workers
from data_pipeline.balance import LostRowsError
from data_pipeline.records import AssignedCluster, blake2b, digest
from data_pipeline.stages import UNFINISHED, Done, Stages, delete, match, read_json_if_exists, store

NAME, VERSION, SPLIT = "clusters", "1.0.0", "train"
MANIFEST, INFO = "manifest.json", "dataset_info.json"
FEATURES, INDEX = "features.json", "index.jsonl"
_FORMAT = tfds.core.FileFormat.ARRAY_RECORD
_SHARDS = f"{NAME}-{SPLIT}.{_FORMAT.file_suffix}-"
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class OutputConfig:
    """Settings of the output.

    Attributes:
      shards: Number of shard files, 1 to 99,999; at most one per cluster. A worker holds a whole
        shard in memory.
    """

    shards: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.shards < 100_000:  # shard numbers in tfds file names have five digits
            raise ValueError(f"output.shards = {self.shards}: must be from 1 to 99999")


class ClusterShard(NamedTuple):
    """Range of the sorted clusters: the id of the first, and their number."""

    first: str
    length: int


def write_output(
    stages: Stages,
    clusters: str,
    after: Sequence[Done],
    folder: str,
    config: OutputConfig,
    manifest: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the data set, unless it is already complete, and return the content of manifest.json.

    `clusters` is a "STAGE/TABLE" of AssignedCluster, made by the stages `after`. `folder` may be on
    any file system that Beam supports; other files in it are kept. `manifest` is JSON-serializable
    and equal for equal builds. To it are added "clusters" (task -> number), "files" (name ->
    {"size": bytes, "hash": blake2b-128, hexadecimal}) and "fingerprint" (hash of all inputs and
    settings). Raises ValueError if there is no cluster, or if an id occurs twice.
    """
    inputs = [manifest, dataclasses.asdict(config), [stage.fingerprint for stage in after]]
    fingerprint = digest("output", json.dumps(inputs, sort_keys=True))
    if manifest_on_disk := _find(folder, fingerprint):
        log.info("output: was done before")
        return manifest_on_disk
    # Begins with the files that mark an older output as complete.
    for pattern in (MANIFEST, INFO, FEATURES, INDEX, f"{_SHARDS}*", f"{UNFINISHED}*"):
        delete(match(folder, pattern))
    index = read_index(stages, clusters)
    # The driver knows all ids and plans ranges, so a record's place in the data set is its place in
    # index.jsonl. Shards by hash would not have such an order.
    shards = plan_shards([record["id"] for record in index], config.shards)
    with workers.watched("stage output"), stages.pipeline("output") as pipeline:
        tables = pipeline | "name files" >> beam.Create(stages.files(clusters))
        rows = tables | "read clusters" >> beam.io.ReadAllFromParquet()
        make_shards(rows, shards, folder)
    shard_count = len(match(folder, f"{_SHARDS}*"))
    if shard_count != len(shards):
        raise LostRowsError(
            f"stage output: {shard_count} shards were written, {len(shards)} were planned"
        )
    files = _measure(folder, [shard_name(number, len(shards)) for number in range(len(shards))])
    _write_info(folder, shards, sum(file["size"] for file in files.values()))
    lines = "".join(json.dumps(record) + "\n" for record in index)
    store(folder, INDEX, io.BytesIO(lines.encode()))
    complete = {
        **manifest,
        "clusters": dict(sorted(Counter(record["task"] for record in index).items())),
        "files": files | _measure(folder, (FEATURES, INFO, INDEX)),
        "fingerprint": fingerprint,
    }
    text = json.dumps(complete, indent=1, sort_keys=True, allow_nan=False) + "\n"
    store(folder, MANIFEST, io.BytesIO(text.encode()))
    log.info("output: %d clusters in %d shards, %s", len(index), len(shards), folder)
    return json.loads(text)


def read_index(stages: Stages, clusters: str) -> list[dict[str, Any]]:
    """Read {"id", "task", "tokens", "documents": number} of all clusters, sorted by id.

    Raises ValueError like `write_output`.
    """
    # One small column per document instead of the texts.
    columns = ["id", "task", "tokens", "documents.list.element.part"]
    fields = ("id", "task", "tokens")
    index = [
        {name: record[name] for name in fields} | {"documents": len(record["documents"])}
        for record in stages.read_records(clusters, columns)
    ]
    if not index:
        raise ValueError(f"{clusters}: there is no cluster to write")
    index.sort(key=lambda record: record["id"])
    for cluster, next_cluster in itertools.pairwise(index):
        if cluster["id"] == next_cluster["id"]:
            raise ValueError(f"{clusters}: cluster {cluster['id']} is there twice")
    return index


def plan_shards(ids: Sequence[str], count: int) -> list[ClusterShard]:
    """Split sorted ids into at most `count` ranges with lengths that differ by at most one."""
    count = min(count, len(ids))
    starts = [number * len(ids) // count for number in range(count + 1)]
    return [ClusterShard(ids[a], b - a) for a, b in itertools.pairwise(starts)]


def make_shards(
    clusters: beam.PCollection, shards: Sequence[ClusterShard], folder: str
) -> beam.PCollection:
    """Write the shards planned for AssignedClusters; return a PCollection of file names."""
    firsts, lengths = [shard.first for shard in shards], [shard.length for shard in shards]
    examples = clusters | "make examples" >> beam.ParDo(_MakeExample(firsts))
    groups = examples | "group shards" >> beam.GroupByKey()
    names: Any = groups | "write shards" >> beam.Map(_write_shard, folder, lengths)
    return names


def shard_name(number: int, count: int) -> str:
    """Return the file name that tfds expects for a shard."""
    return f"{_SHARDS}{number:05d}-of-{count:05d}"


def make_features() -> tfds.features.FeaturesDict:
    """Return the tfds features of a record; `sources` and `places` have one entry per document."""
    fields: dict[str, Any] = {name: tfds.features.Text() for name in ("id", "task")}
    for name in ("documents", "sources", "places"):
        fields[name] = tfds.features.Sequence(tfds.features.Text())
    return tfds.features.FeaturesDict(fields | {"tokens": tfds.features.Scalar(np.int64)})


class _MakeExample(beam.DoFn):
    """Map from a cluster with its task to (shard number, (id, serialized tf.train.Example))."""

    def __init__(self, firsts: Sequence[str]):
        self._firsts = firsts

    def setup(self) -> None:
        self._features = make_features()
        info: Any = self._features.get_serialized_info()
        self._serializer = example_serializer.ExampleSerializer(info)

    def process(self, element: AssignedCluster) -> Iterator[tuple[int, tuple[str, bytes]]]:
        columns = {"documents": "text", "sources": "source", "places": "place"}
        values: dict[str, Any] = {name: element[name] for name in ("id", "task", "tokens")}
        for name, field in columns.items():
            values[name] = [document[field] for document in element["documents"]]
        example = self._serializer.get_tf_example(self._features.encode_example(values))
        # Without `deterministic`, the order of a protobuf map differs between processes.
        data = example.SerializeToString(deterministic=True)
        yield bisect.bisect_right(self._firsts, element["id"]) - 1, (element["id"], data)


def _write_shard(
    group: tuple[int, Iterable[tuple[str, bytes]]], folder: str, lengths: Sequence[int]
) -> str:
    number, examples = group
    # A runner may deliver a group in any order; sorting needs the whole shard in memory.
    ordered, planned = sorted(examples), lengths[number]
    if len(ordered) != planned:
        raise LostRowsError(f"shard {number}: {len(ordered)} clusters came, {planned} were planned")
    name = shard_name(number, len(lengths))
    with tempfile.TemporaryDirectory() as scratch:
        # ArrayRecordWriter takes local paths only; `store` copies the file to any file system.
        path = os.path.join(scratch, name)
        # Training reads single records at random. A group of more records would be decompressed
        # whole for each access.
        writer = ArrayRecordWriter(path, "group_size:1")
        for _, data in ordered:
            writer.write(data)
        writer.close()
        with open(path, "rb") as file:
            store(folder, name, file)
    return name


def _write_info(folder: str, shards: Sequence[ClusterShard], size: int) -> None:
    """Write features.json and dataset_info.json; `size` is the bytes of all shards together."""
    version = tfds.core.Version(VERSION)
    identity = dataset_info.DatasetIdentity(NAME, version, folder, module_name=__name__)
    template = tfds.core.ShardedFileTemplate(
        dataset_name=NAME,
        data_dir=epath.Path(folder),
        filetype_suffix=_FORMAT.file_suffix,
        split=SPLIT,
    )
    split = tfds.core.SplitInfo(
        name=SPLIT,
        shard_lengths=[shard.length for shard in shards],
        num_bytes=size,
        filename_template=template,
    )
    info = tfds.core.DatasetInfo(
        builder=identity,
        description="Clusters of related documents, each with the task that it serves.",
        features=make_features(),
        split_dict=splits.SplitDict([split]),
    )
    info.set_file_format(_FORMAT)
    with tempfile.TemporaryDirectory() as scratch:
        info.write_to_directory(scratch)
        for name in (FEATURES, INFO):
            with open(os.path.join(scratch, name), "rb") as file:
                store(folder, name, file)


def _measure(folder: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return name -> size and hash of stored files."""
    sizes = {os.path.basename(file.path): file.size_in_bytes for file in match(folder, "*")}
    files = {}
    for name in names:
        with FileSystems.open(FileSystems.join(folder, name)) as file:
            hashed = hashlib.file_digest(cast(Any, file), blake2b)
        files[name] = {"size": sizes[name], "hash": hashed.hexdigest()}
    return files


def _find(folder: str, fingerprint: str) -> dict[str, Any] | None:
    """Return the manifest if its fingerprint matches and all its files have the listed sizes."""
    manifest = read_json_if_exists(FileSystems.join(folder, MANIFEST))
    if not isinstance(manifest, dict) or manifest.get("fingerprint") != fingerprint:
        return None
    sizes = {os.path.basename(file.path): file.size_in_bytes for file in match(folder, "*")}
    # Sizes, not hashes: hashes would read the whole data set at each start.
    complete = all(sizes.get(name) == file["size"] for name, file in manifest["files"].items())
    return manifest if complete else None
