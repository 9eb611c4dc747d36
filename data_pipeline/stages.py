"""Stages: one Beam pipeline after the other, each from finished tables to finished tables.

1. A stage has a folder OUT/stages/NAME. Its tables are Parquet files; done.json, written last, says
   that they are complete, what they were made from (`fingerprint`) and what was counted.
2. A stage whose done.json has the right fingerprint is not run again: a build that was stopped goes
   on behind its last finished stage, and one with another setting begins at the first stage that
   the setting is about.
3. Any other folder is emptied first, so nothing of an unfinished run is ever read.
4. Between stages nothing is held in memory. On one machine that is what bounds the memory that
   FnApiRunner, which shuffles in memory, needs.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from data_pipeline.records import SCHEMAS, Count, digest

DONE = "done.json"
Tables = dict[str, Any]  # PCollections by table name
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Done:
    """A finished stage.

    Attributes:
      counts: sorted by what was counted, then by source.
      seconds: that it took; 0.0 if it was there already.
    """

    name: str
    fingerprint: str
    counts: tuple[Count, ...]
    seconds: float

    def count(self, what: str, source: str | None = None) -> int:
        """Sum over sources, or of one."""
        return sum(
            c["number"] for c in self.counts if c["what"] == what and source in (None, c["source"])
        )


class Stages:
    """Runs stages in one folder with one runner."""

    def __init__(self, folder: str, options: Sequence[str] = ()):
        """Args:
        folder: OUT/stages; local, or of any file system that Beam knows (gs://, s3://, ...).
        options: Beam's own flags. "--runner=DirectRunner", the default, is FnApiRunner.
        """
        self.folder = folder
        self.options = tuple(options)

    def run(
        self,
        name: str,
        settings: Mapping[str, Any],
        make: Callable[..., Tables],
        after: Sequence[Done] = (),
        **inputs: str,
    ) -> Done:
        """Runs a stage, or finds it done.

        Args:
          settings: JSON-able; all that the result depends on beside the stages before it.
          make: called with a PCollection for each input, or where there is none with `pipeline`;
            returns PCollections by table name (of records.SCHEMAS). "counts" are (what, source)
            events, counted here.
          after: the stages that the inputs come from.
          inputs: argument of `make` -> "STAGE/TABLE".
        """
        made_from = json.dumps([settings, [done.fingerprint for done in after]], sort_keys=True)
        fingerprint = digest(name, made_from)
        if found := self._find(name, fingerprint):
            log.info("%s: was done before", name)
            return found
        self._empty(name)
        clock = time.monotonic()
        with self.pipeline(name) as pipeline:
            self.construct(pipeline, name, make, inputs)
        seconds = time.monotonic() - clock
        counts = [Count(**record) for record in self.read(f"{name}/counts")]
        counts.sort(key=lambda count: (count["what"], count["source"]))
        with FileSystems.create(self._path(name, DONE)) as file:
            record = {"fingerprint": fingerprint, "counts": counts}
            file.write((json.dumps(record, indent=1) + "\n").encode())
        log.info("%s: %.1f s", name, seconds)
        return Done(name, fingerprint, tuple(counts), seconds)

    def pipeline(self, name: str) -> beam.Pipeline:
        """An empty pipeline for the runner of the options."""
        options = PipelineOptions([*self.options, f"--job_name=spell-{name}"])
        named = options.view_as(StandardOptions).runner
        # The DirectRunner would first try to fetch another runner from the network.
        local = named is None or named.rpartition(".")[-1] == "DirectRunner"
        return beam.Pipeline(runner=FnApiRunner() if local else named, options=options)

    def construct(
        self, pipeline: beam.Pipeline, name: str, make: Callable[..., Tables], inputs: Mapping
    ) -> None:
        """Adds a stage to a pipeline: its inputs, what `make` does, its tables."""
        given: dict[str, Any] = {} if inputs else {"pipeline": pipeline}
        for argument, table in inputs.items():
            pattern = self._path(*table.split("/")) + "-*.parquet"
            given[argument] = pipeline | f"read {table}" >> beam.io.ReadFromParquet(
                pattern, validate=False
            )
        tables = make(**given)
        events = tables.pop("counts")
        counts = events | "count" >> beam.combiners.Count.PerElement()
        tables["counts"] = counts | "as counts" >> beam.MapTuple(_as_count)
        for table, records in tables.items():
            prefix = self._path(name, table)
            _ = records | f"write {table}" >> beam.io.WriteToParquet(
                prefix, SCHEMAS[table], codec="zstd", file_name_suffix=".parquet"
            )

    def read(self, table: str, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """All records of a finished "STAGE/TABLE", in any order; for what fits into memory."""
        import pyarrow.parquet as pq

        records = []
        for path in self.files(table):
            with FileSystems.open(path) as file:
                records += pq.read_table(file, columns=columns).to_pylist()
        return records

    def files(self, table: str) -> list[str]:
        """The Parquet files of a "STAGE/TABLE", sorted."""
        pattern = self._path(*table.split("/")) + "-*.parquet"
        return sorted(found.path for found in FileSystems.match([pattern])[0].metadata_list)

    def _find(self, name: str, fingerprint: str) -> Done | None:
        path = self._path(name, DONE)
        if not FileSystems.exists(path):
            return None
        try:
            with FileSystems.open(path) as file:
                record = json.loads(file.read())
            same = record["fingerprint"] == fingerprint
        except (ValueError, KeyError, TypeError):  # it was being written when the build stopped
            return None
        return Done(name, fingerprint, tuple(record["counts"]), 0.0) if same else None

    def _empty(self, name: str) -> None:
        found = FileSystems.match([self._path(name, "**")])[0].metadata_list
        if found:
            FileSystems.delete([file.path for file in found])

    def _path(self, *parts: str) -> str:
        return FileSystems.join(self.folder, *parts)


def _as_count(event: tuple[str, str], number: int) -> Count:
    what, source = event
    return Count(what=what, source=source, number=number)
