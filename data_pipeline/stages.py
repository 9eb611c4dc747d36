"""Resumable stages: a sequence of Beam pipelines from finished tables to finished tables.

A stage has a folder OUT/stages/NAME with Parquet tables and, written last, done.json with the
`fingerprint` of inputs and settings. A stage with the right fingerprint is skipped; the folder of
any other stage is emptied before it runs. A stage is done only if its rows balance (balance.py).
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.portability.portable_runner import PortableRunner

from data_pipeline import balance, workers
from data_pipeline.records import SCHEMAS, SIZED, Count, digest, is_sized
from data_pipeline.spark import PySparkRunner
from spell_jax.runtime.files import durable

DONE = "done.json"
# Prefix of temporary names: the pattern of a table, TABLE-*.parquet, does not match them.
UNFINISHED = "unfinished-"
# Records of a table in memory at once: about 20 MB of clusters.
BATCH = 256
Tables = dict[str, Any]  # PCollections by table name
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Done:
    """Finished stage."""

    name: str
    fingerprint: str  # hash of settings and inputs
    counts: tuple[Count, ...]  # sorted by event, then by source
    seconds: float  # wall time; 0.0 if the stage was already finished

    def count(self, what: str, source: str | None = None) -> int:
        """Return the number of events `what`, for one source or summed over all."""
        return sum(
            c["number"] for c in self.counts if c["what"] == what and source in (None, c["source"])
        )

    @property
    def plain_counts(self) -> tuple[Count, ...]:
        """Counts that are not part of a distribution."""
        return tuple(count for count in self.counts if not is_sized(count["what"]))

    def histogram(self, what: str, source: str | None = None) -> dict[int, int]:
        """Return value -> count, sorted by value, for events named by `records.sized`."""
        counts_by_value: Counter[int] = Counter()
        for count in self.counts:
            name, _, number = count["what"].rpartition(SIZED)
            if name == what and source in (None, count["source"]):
                counts_by_value[int(number)] += count["number"]
        return dict(sorted(counts_by_value.items()))


# Each stage is a pipeline of its own, with its tables on disk: Beam's local runner shuffles in
# memory, so one pipeline of all stages would hold every intermediate table at once.
class Stages:
    """Executor of stages in one folder with one Beam runner.

    `folder` is OUT/stages, local or on any file system that Beam supports; `options` are Beam's own
    flags. With `only_check`, `run_stage` only builds a stage's graph, and `read_records` returns
    no records.
    """

    def __init__(self, folder: str, options: Sequence[str] = (), only_check: bool = False):
        """Store the settings."""
        self.folder = folder
        self.options = tuple(options)
        self.only_check = only_check

    def run_stage(
        self,
        name: str,
        settings: Mapping[str, Any],
        make: Callable[..., Tables],
        after: Sequence[Done] = (),
        balances: Sequence[str] = (),
        **inputs: str,
    ) -> Done:
        """Run a stage, unless it is already finished.

        `settings` has all settings that the result depends on, JSON-serializable; `inputs` maps
        arguments of `make` to "STAGE/TABLE" of the stages `after`. `make` gets one PCollection per
        input, or `pipeline` if there are none, and returns PCollections by table name (keys of
        records.SCHEMAS). Its "counts" are (what, source) events, which are counted here. Raises
        balance.LostRowsError if one of `balances`, equations as in balance.py, does not hold.
        """
        # The fingerprint covers the fingerprints of the inputs. A changed setting therefore reruns
        # its stage and all later stages, and no earlier one.
        content = json.dumps([settings, [stage.fingerprint for stage in after]], sort_keys=True)
        fingerprint = digest(name, content)
        if self.only_check:
            pipeline = self.pipeline(name)
            self.construct(pipeline, name, make, inputs)
            self.check_graph(pipeline, name)
            return Done(name, fingerprint, (), 0.0)
        marker = FileSystems.join(self.folder, name, DONE)
        record = read_json_if_exists(marker)
        # A build that stops while it writes the marker leaves an incomplete one.
        if isinstance(record, dict) and record.get("fingerprint") == fingerprint:
            log.info("%s: was done before", name)
            return Done(name, fingerprint, tuple(record["counts"]), 0.0)
        # Tables are read by a pattern, which would also match the files of an interrupted run.
        delete(match(self.folder, name, "**"))
        clock = time.monotonic()
        with workers.watched(f"stage {name}"), self.pipeline(name) as pipeline:
            self.construct(pipeline, name, make, inputs)
        seconds = time.monotonic() - clock
        counts = [Count(**record) for record in self.read_records(f"{name}/counts")]
        # Runners write in any order; the sorted counts make done.json equal for equal builds.
        counts.sort(key=lambda count: (count["what"], count["source"]))
        tables = {f"{balance.IN}{argument}": table for argument, table in inputs.items()}

        def rows(term: str) -> int:
            return self.rows(tables.get(term) or f"{name}/{term.removeprefix(balance.OUT)}")

        balance.check(name, balances, rows, counts)
        # The marker comes last, after the tables have reached the disk: a marker that survives a
        # loss of power must not describe tables that did not.
        durable.sync_tree(FileSystems.join(self.folder, name))
        record = {"fingerprint": fingerprint, "counts": counts}
        text = json.dumps(record, indent=1) + "\n"
        store(FileSystems.join(self.folder, name), DONE, io.BytesIO(text.encode()))
        log.info("%s: %.1f s", name, seconds)
        return Done(name, fingerprint, tuple(counts), seconds)

    def store(self, name: str, table: str, records: Iterable[Mapping[str, Any]]) -> Done:
        """Write records of the driver to "NAME/TABLE", and return them as a finished stage.

        Existing records are replaced, and nothing is written if `records` raises. At most BATCH
        records are in memory. The fingerprint does not depend on the order of the records.
        """
        # A million file names inside the graph (beam.Create) would be sent to every worker; as a
        # table they are read where they are needed.
        total, number, left = 0, 0, iter(records)
        # A local file first: `records` lists remote folders and may raise in the middle.
        with tempfile.TemporaryFile() as scratch:
            with pq.ParquetWriter(scratch, SCHEMAS[table], compression="zstd") as writer:
                while batch := list(itertools.islice(left, BATCH)):
                    writer.write_table(pa.Table.from_pylist(batch, SCHEMAS[table]))
                    number += len(batch)
                    for record in batch:
                        # A sum of hashes is independent of the order. An XOR would be, too, but two
                        # equal records would cancel.
                        total += int(digest(json.dumps(record, sort_keys=True)), 16)
            if not self.only_check:
                delete(match(self.folder, name, "**"))
                scratch.seek(0)
                store(FileSystems.join(self.folder, name), f"{table}-0.parquet", scratch)
        return Done(name, digest(name, str(number), f"{total % 2**128:032x}"), (), 0.0)

    def pipeline(self, name: str) -> beam.Pipeline:
        """Create an empty pipeline for the runner in the options."""
        options = PipelineOptions([*self.options, f"--job_name=spell-{name}"])
        named = options.view_as(StandardOptions).runner
        # Beam's DirectRunner would first try to fetch another runner from the network.
        runner: Any = named
        if named is None or named.rpartition(".")[-1] == "DirectRunner":
            runner = workers.make_runner(options)
        elif named == PySparkRunner.__name__:
            runner = PySparkRunner()
        return beam.Pipeline(runner=runner, options=options)

    def check_graph(self, pipeline: beam.Pipeline, name: str) -> None:
        """Serialize a graph as for a remote runner and parse it back; raise if that fails."""
        # The first two lines fail for functions that cannot be serialized or restored, which a
        # local runner never needs and a remote runner does.
        pipeline_proto = pipeline.to_runner_api()
        beam.Pipeline.from_runner_api(pipeline_proto, FnApiRunner(), PipelineOptions([]))
        graph = PortableRunner().get_proto_pipeline(pipeline, pipeline.options)
        transforms = graph.components.transforms.values()
        steps = sum(not transform.subtransforms for transform in transforms)
        runner = type(pipeline.runner).__name__
        log.info("%s: %d steps for %s, %d bytes", name, steps, runner, graph.ByteSize())

    def construct(
        self, pipeline: beam.Pipeline, name: str, make: Callable[..., Tables], inputs: Mapping
    ) -> None:
        """Add a stage to a pipeline: read its inputs, apply `make`, write its tables."""
        make_arguments: dict[str, Any] = {} if inputs else {"pipeline": pipeline}
        for argument, table in inputs.items():
            # validate=True would look for the files now. With `only_check` no stage has written
            # any.
            read = beam.io.ReadFromParquet(self._pattern(table), validate=False)
            make_arguments[argument] = pipeline | f"read {table}" >> read
        tables = make(**make_arguments)
        counts = tables["counts"] | "count" >> beam.combiners.Count.PerElement()
        tables["counts"] = counts | "as counts" >> beam.MapTuple(_as_count)
        for table, records in tables.items():
            _ = records | f"write {table}" >> beam.io.WriteToParquet(
                FileSystems.join(self.folder, name, table),
                SCHEMAS[table],
                codec="zstd",
                # The standard's names of list items, ".list.element.", which `read_records`
                # selects.
                use_compliant_nested_type=True,
                file_name_suffix=".parquet",
            )

    def read_records(
        self,
        table: str,
        columns: Sequence[str] | None = None,
        ids: Container[str] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Iterate over the records of a finished "STAGE/TABLE", in any order, a few in memory.

        `columns` and `ids` select; None keeps all. A column may be a part of a column, such as
        "documents.list.element.source".
        """
        for path in [] if self.only_check else self.files(table):
            with FileSystems.open(path) as file:
                for batch in pq.ParquetFile(file).iter_batches(BATCH, columns=columns):
                    # Filtered as arrays, so that only the records asked for become Python objects.
                    if ids is not None:
                        keep = pa.array([name in ids for name in batch["id"].to_pylist()])
                        batch = batch.filter(keep)
                    yield from batch.to_pylist()

    def rows(self, table: str) -> int:
        """Return the number of rows of a "STAGE/TABLE", from the footers of its files."""
        number = 0
        for path in self.files(table):
            with FileSystems.open(path) as file:
                number += pq.read_metadata(file).num_rows
        return number

    def files(self, table: str) -> list[str]:
        """Return the sorted paths of the Parquet files of a "STAGE/TABLE"."""
        return sorted(file.path for file in match(self._pattern(table)))

    def _pattern(self, table: str) -> str:
        return FileSystems.join(self.folder, *table.split("/")) + "-*.parquet"


def match(folder: str, *parts: str) -> list[Any]:
    """Return Beam's metadata of the files that match a pattern."""
    return FileSystems.match([FileSystems.join(folder, *parts)])[0].metadata_list


def delete(files: Sequence[Any]) -> None:
    """Delete files given by their metadata."""
    if files:
        FileSystems.delete([file.path for file in files])


def store(folder: str, name: str, data: BinaryIO) -> None:
    """Write a file atomically: under a temporary name, then renamed.

    On a local disk the file then survives a loss of power (spell_jax/runtime/files/durable.py).
    """
    unfinished = FileSystems.join(folder, f"{UNFINISHED}{uuid.uuid4().hex}-{name}")
    with FileSystems.create(unfinished) as file:
        shutil.copyfileobj(data, file, 1 << 20)
    durable.sync(unfinished)
    FileSystems.rename([unfinished], [FileSystems.join(folder, name)])
    durable.sync(folder)
    durable.sync(os.path.dirname(folder) or ".")


def read_json_if_exists(path: str) -> Any:
    """Read a JSON file; None if it is missing or incomplete."""
    if not FileSystems.exists(path):
        return None
    try:
        with FileSystems.open(path) as file:
            return json.loads(file.read())
    except ValueError:
        return None


def _as_count(event: tuple[str, str], number: int) -> Count:
    what, source = event
    return Count(what=what, source=source, number=number)
