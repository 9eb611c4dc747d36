"""Beam runner on PySpark: executes a stage's graph with resilient distributed datasets (RDDs).

    python -m data_pipeline.build ... --runner=PySparkRunner --pyspark_master=spark://HOST:7077

1. The graph is walked down to the transforms of _PRIMITIVES, in the order of construction. A
   PCollection becomes an RDD of its values. There is one global window, and no timestamps.
2. A ParDo becomes a lazy generator per partition, so an element with millions of outputs needs no
   more memory than any other. Outputs that are used more than once are kept on the workers' disks.
3. Keys are grouped by their encoded bytes. Partitions depend on values alone, never on chance, so
   that a task which Spark repeats after the loss of a worker gives the same partitions.
4. Side inputs are collected in the driver and broadcast. Nothing runs before a Write or a side
   input needs it; then a partition writes one file, and the driver renames the files of tasks that
   succeeded.

Beam's own SparkRunner needs a job server and containers; this runner needs Java and PySpark. It has
what the stages use and refuses everything else: no windows, timers, state or splittable DoFns.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import sys
import uuid
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import apache_beam as beam
from apache_beam import coders
from apache_beam.internal.util import insert_values_in_args
from apache_beam.io import iobase
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import AsSideInput, PCollection, TaggedOutput
from apache_beam.runners.common import DoFnSignature
from apache_beam.runners.runner import PipelineResult, PipelineRunner, PipelineState
from apache_beam.transforms.core import _DoFnParam
from apache_beam.transforms.window import MIN_TIMESTAMP, GlobalWindow
from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN, WindowedValue

# Bytes of a Parquet file that one task reads.
BUNDLE_BYTES = 64 << 20
Rdd = Any  # pyspark.RDD; PySpark is imported on demand
Node = Any  # apache_beam.pipeline.AppliedPTransform
# Parameters of a DoFn that Beam fills in, and their values in the global window.
_PARAMETERS = {
    beam.DoFn.WindowParam: GlobalWindow(),
    beam.DoFn.TimestampParam: MIN_TIMESTAMP,
    beam.DoFn.PaneInfoParam: PANE_INFO_UNKNOWN,
}


class PySparkOptions(PipelineOptions):
    """Flags of PySparkRunner; everything else is Spark's own (spark-defaults.conf)."""

    @classmethod
    def _add_argparse_args(cls, parser: Any) -> None:
        parser.add_argument(
            "--pyspark_master",
            default="local[*]",
            help="Spark master: spark://HOST:7077, yarn, k8s://..., local[N], or "
            "local-cluster[WORKERS,CORES,MB] for processes on one machine.",
        )
        parser.add_argument(
            "--pyspark_partitions",
            type=int,
            default=0,
            help="Number of partitions of a shuffle; 0 for twice Spark's default parallelism.",
        )


class PySparkRunner(PipelineRunner):
    """Runner of a batch pipeline on the Spark cluster of `--pyspark_master`."""

    def run_pipeline(self, pipeline: beam.Pipeline, options: PipelineOptions) -> PipelineResult:
        """Run a pipeline to its end; a failed task raises PySpark's exception."""
        spark_options = options.view_as(PySparkOptions)
        context = start(spark_options.pyspark_master)
        partitions = spark_options.pyspark_partitions or 2 * context.defaultParallelism
        nodes = list(_primitives(pipeline._root_transform()))
        _Execution(context, partitions, nodes).compute()
        return PipelineResult(PipelineState.DONE)


def start(master: str) -> Any:
    """Return the process's SparkContext, which all pipelines share; start it if there is none.

    Raises ValueError if PySpark or Java is missing, or if the context has another master.
    """
    try:
        from pyspark import SparkConf, SparkContext
    except ImportError as error:
        raise ValueError(
            "runner = PySparkRunner: needs PySpark, pip install 'spell_jax[spark]'"
        ) from error
    if not (os.environ.get("JAVA_HOME") or shutil.which("java")):
        raise ValueError("runner = PySparkRunner: needs Java 17 or later in PATH or JAVA_HOME")
    # Workers on this machine use the same Python and see the same modules.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = SparkConf().setMaster(master).setAppName("spell_jax")
    # Spark's own settings win: only missing values are set.
    conf.setIfMissing("spark.ui.enabled", "false")
    conf.setIfMissing("spark.ui.showConsoleProgress", "false")
    conf.setIfMissing("spark.rdd.compress", "true")  # outputs that are kept on disk
    # Between Java and Python. By TCP, a task of 20 GB stopped for ever: both sides sent,
    # neither read, and Linux 6.18 dropped every packet (ss: retransmissions, full receive buffer).
    conf.setIfMissing("spark.python.unix.domain.socket.enabled", "true")
    is_new = SparkContext._active_spark_context is None
    context = SparkContext.getOrCreate(conf)
    if is_new:
        atexit.register(context.stop)  # before the end of the process breaks off its connections
    if context.master != master:
        raise ValueError(
            f"pyspark_master = {master!r}: this process already uses {context.master!r}"
        )
    return context


def _primitives(node: Node) -> Iterator[Node]:
    """Yield the nodes of _PRIMITIVES below a node; raises NotImplementedError if a leaf is none."""
    if isinstance(node.transform, tuple(_PRIMITIVES)):
        yield node
    elif node.parts:
        for part in node.parts:
            yield from _primitives(part)
    elif node.is_composite():
        return  # returns its input, as a Flatten of one collection or an empty pipeline does
    else:
        kind = type(node.transform).__name__
        raise NotImplementedError(f"{node.full_label}: PySparkRunner has no {kind}")


class _Execution:
    """RDDs of one pipeline, by PCollection."""

    def __init__(self, context: Any, partitions: int, nodes: Sequence[Node]):
        self.context, self.partitions, self.nodes = context, partitions, nodes
        # An RDD is recomputed for each use. The number of uses decides which RDDs are kept.
        self.uses = Counter(
            value
            for node in nodes
            for value in (*node.inputs, *(side.pvalue for side in node.side_inputs))
        )
        self.rdds: dict[PCollection, Rdd] = {}
        self.broadcasts: dict[PCollection, Any] = {}
        self.kept: list[Rdd] = []

    def compute(self) -> None:
        """Compute what Writes and leaves need."""
        try:
            for node in self.nodes:
                self._apply(node)
        finally:
            for rdd in self.kept:
                rdd.unpersist()
            for broadcast in self.broadcasts.values():
                broadcast.destroy()

    def _apply(self, node: Node) -> None:
        if any(not value.windowing.is_default() for value in node.outputs.values()):
            raise NotImplementedError(f"{node.full_label}: PySparkRunner has no windows")
        make = next(
            maker for kind, maker in _PRIMITIVES.items() if isinstance(node.transform, kind)
        )
        rdd = make(self, node, *(self.rdds.get(value) for value in node.inputs))
        used = {tag: value for tag, value in node.outputs.items() if self.uses[value]}
        uses = sum(self.uses[value] for value in used.values())
        # Tagged outputs come from one pass over the parent, so they count together. Disk, not
        # memory: an output may be larger than a worker's memory.
        if uses > 1:
            from pyspark import StorageLevel

            self.kept.append(rdd.persist(StorageLevel.DISK_ONLY))
        if not used and not isinstance(node.transform, iobase.Write):
            # A DoFn without consumers still runs, as in Beam: it may have side effects.
            rdd.foreachPartition(_drain)
        for tag, value in used.items():
            tagged = _has_tags(node)
            self.rdds[value] = rdd.mapPartitions(partial(_with_tag, tag=tag)) if tagged else rdd

    def impulse(self, node: Node, _: Any) -> Rdd:
        return self.context.parallelize([b""], 1)

    def read_source(self, node: Node, _: Any) -> Rdd:
        bundles = list(node.transform.source.split(BUNDLE_BYTES))
        return self.context.parallelize(bundles, max(1, len(bundles))).mapPartitions(_read_bundles)

    def par_do(self, node: Node, rdd: Rdd) -> Rdd:
        """Return the RDD of the output, or of (tag, value) of all outputs if there are several."""
        transform = node.transform
        views = [(self._broadcast(side.pvalue), _view_fn(side)) for side in node.side_inputs]
        args = transform.args, transform.kwargs | _parameters(node), views
        process = partial(_process, fn=transform.fn, args=args, tagged=_has_tags(node))
        return rdd.mapPartitions(process)

    def _broadcast(self, value: PCollection) -> Any:
        if value not in self.broadcasts:
            self.broadcasts[value] = self.context.broadcast(self.rdds[value].collect())
        return self.broadcasts[value]

    def group_by_key(self, node: Node, rdd: Rdd) -> Rdd:
        keyed = rdd.mapPartitions(partial(_encode_keys, label=node.full_label))
        # crc32 of the encoded key: Python salts hash() of texts in each process, and a key must
        # reach the same partition from every worker, also after a task is repeated.
        return keyed.groupByKey(self.partitions, zlib.crc32).mapPartitions(_decode_keys)

    def combine_per_key(self, node: Node, rdd: Rdd) -> Rdd:
        fn = node.transform.fn
        keyed = rdd.mapPartitions(partial(_encode_keys, label=node.full_label))
        combined = keyed.combineByKey(
            partial(_first_input, fn),
            fn.add_input,
            partial(_merge_two, fn),
            self.partitions,
            zlib.crc32,
        )
        return combined.mapValues(fn.extract_output).mapPartitions(_decode_keys)

    def flatten(self, node: Node, *rdds: Rdd) -> Rdd:
        # A union has the partitions of all its parts, too many after a few unions.
        return self.context.union(list(rdds)).coalesce(self.partitions)

    def reshuffle(self, node: Node, rdd: Rdd) -> Rdd:
        # Spark's own repartition() places rows by their position, which may differ when a task is
        # repeated; a checksum of the row does not.
        keyed = rdd.mapPartitions(_with_checksums)
        return keyed.partitionBy(self.partitions, _identity).values()

    def write_files(self, node: Node, rdd: Rdd) -> Rdd:
        """Write one file per partition that has elements, then give the files their names."""
        sink = node.transform.sink
        begun = sink.initialize_write()
        written = rdd.mapPartitions(partial(_write_file, sink=sink, begun=begun)).collect()
        # An empty table still needs a file, so that readers find its schema.
        written = written or list(_write_file([], sink, begun, empty=True))
        ready = sink.pre_finalize(begun, written)
        names = list(sink.finalize_write(begun, written, ready))
        return self.context.parallelize(names, 1)


_PRIMITIVES: Mapping[type, Any] = {
    beam.Impulse: _Execution.impulse,
    iobase.Read: _Execution.read_source,
    beam.ParDo: _Execution.par_do,
    beam.GroupByKey: _Execution.group_by_key,
    beam.CombinePerKey: _Execution.combine_per_key,
    beam.Flatten: _Execution.flatten,
    beam.Reshuffle: _Execution.reshuffle,
    iobase.Write: _Execution.write_files,
}


def _has_tags(node: Node) -> bool:
    return len(node.outputs) > 1


def _view_fn(side: AsSideInput) -> Any:
    return side._side_input_data().view_fn


def _parameters(node: Node) -> dict[str, Any]:
    """Return the keyword arguments of a DoFn that Beam fills in."""
    arguments = {}
    for method in ("start_bundle_method", "process_method", "finish_bundle_method"):
        wrapper = getattr(DoFnSignature(node.transform.fn), method)
        for name, default in zip(wrapper.args[::-1], wrapper.defaults[::-1], strict=False):
            if not isinstance(default, _DoFnParam):
                continue
            if method != "process_method" or default not in _PARAMETERS:
                raise NotImplementedError(f"{node.full_label}: PySparkRunner has no {default}")
            arguments[name] = _PARAMETERS[default]
    return arguments


# ------------------------------------------------------------------ Functions that run in a worker


def _read_bundles(bundles: Iterable[Any]) -> Iterator[Any]:
    for bundle in bundles:
        limits = bundle.start_position, bundle.stop_position
        yield from bundle.source.read(bundle.source.get_range_tracker(*limits))


def _process(elements: Iterable[Any], fn: Any, args: Any, tagged: bool) -> Iterator[Any]:
    """Yield the outputs of a DoFn for one partition, its bundle; lazily."""
    positional, named, views = args
    values = [view_fn(broadcast.value) for broadcast, view_fn in views]
    positional, named = insert_values_in_args(positional, named, values)
    fn.setup()
    try:
        fn.start_bundle()
        for element in elements:
            yield from _outputs(fn.process(element, *positional, **named), tagged)
        yield from _outputs(fn.finish_bundle(), tagged)
    finally:
        fn.teardown()


def _outputs(values: Iterable[Any] | None, tagged: bool) -> Iterator[Any]:
    for value in values or ():
        tag = None
        if isinstance(value, TaggedOutput):
            tag, value = value.tag, value.value
        if isinstance(value, WindowedValue):
            value = value.value
        if tagged:
            yield tag, value
        elif tag is None:  # as in Beam, an output that nobody named is dropped
            yield value


def _with_tag(pairs: Iterable[tuple[str | None, Any]], tag: str | None) -> Iterator[Any]:
    return (value for its_tag, value in pairs if its_tag == tag)


def _encode_keys(pairs: Iterable[tuple[Any, Any]], label: str) -> Iterator[tuple[bytes, Any]]:
    # Equal keys must have equal bytes: this coder raises for values without that property.
    coder = coders.FastPrimitivesCoder().as_deterministic_coder(label)
    return ((coder.encode(key), value) for key, value in pairs)


def _decode_keys(pairs: Iterable[tuple[bytes, Any]]) -> Iterator[tuple[Any, Any]]:
    coder = coders.FastPrimitivesCoder()
    return ((coder.decode(key), value) for key, value in pairs)


def _first_input(fn: beam.CombineFn, value: Any) -> Any:
    return fn.add_input(fn.create_accumulator(), value)


def _merge_two(fn: beam.CombineFn, left: Any, right: Any) -> Any:
    return fn.merge_accumulators([left, right])


def _with_checksums(values: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    # This coder gives equal bytes for equal records. Pickle does not: its bytes depend on which
    # objects a record shares.
    coder = coders.FastPrimitivesCoder()
    return ((zlib.crc32(coder.encode(value)), value) for value in values)


def _identity(key: int) -> int:
    return key


def _drain(elements: Iterable[Any]) -> None:
    for _ in elements:
        pass


def _write_file(
    elements: Iterable[Any], sink: Any, begun: Any, empty: bool = False
) -> Iterator[Any]:
    """Write a file, if there are elements or `empty`; yield what the sink needs to rename it."""
    elements = iter(elements)
    first = list(itertools.islice(elements, 1))
    if first or empty:
        # A name of its own for each attempt: Spark may run a task twice at once, and the driver
        # renames only the files of attempts that succeeded.
        writer = sink.open_writer(begun, uuid.uuid4().hex)
        for element in itertools.chain(first, elements):
            writer.write(element)
        yield writer.close()
