"""Tests of PySparkRunner on two worker processes: results of the local runner, and refusals.

tests/data_pipeline/test_build.py has a whole build.
"""

from __future__ import annotations

import os
import sys

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.pvalue import AsDict, AsIter, AsList, AsSingleton, TaggedOutput
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
from apache_beam.transforms.window import FixedWindows
from pyspark import cloudpickle

from data_pipeline import spark
from data_pipeline.stages import Stages

pytestmark = pytest.mark.slow
MASTER = "local-cluster[2,1,1024]"
# Spark's workers cannot import the tests: they get this module's functions with each task.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
FLAGS = ["--runner=PySparkRunner", f"--pyspark_master={MASTER}", "--pyspark_partitions=3"]


def run(folder, make, options=()):
    """Run the PCollections by name that `make` builds; return table name -> sorted values."""
    stages = Stages(str(folder), options)
    schema = pa.schema([("value", pa.string())])
    with stages.pipeline("test") as pipeline:
        for name, values in make(pipeline).items():
            rows = values | f"as rows {name}" >> beam.Map(lambda value: {"value": repr(value)})
            path = str(folder / "made" / name)
            _ = rows | f"write {name}" >> beam.io.WriteToParquet(path, schema)
    tables = {}
    for path in (folder / "made").iterdir():
        rows = tables.setdefault(path.name.partition("-")[0], [])
        rows += pa.parquet.read_table(path)["value"].to_pylist()
    return {name: sorted(rows) for name, rows in tables.items()}


def _split(number):
    yield number
    if number % 2:
        yield TaggedOutput("odd", number)
    yield TaggedOutput("unused", number)


def _see(number, as_list, as_dict, total, every):
    return number, sorted(as_list), as_dict[number % 2], total, sum(every)


def transforms(pipeline):
    """Make one PCollection for each kind of transform that the stages use."""
    numbers = pipeline | beam.Create(range(100))
    split = numbers | "split" >> beam.FlatMap(_split).with_outputs("odd", "unused", main="all")
    keyed = split["all"] | "key" >> beam.Map(lambda n: (str(n % 7), n))
    small = pipeline | "small" >> beam.Create([(0, "even"), (1, "odd")])
    total = numbers | "sum" >> beam.CombineGlobally(sum)
    grouped = keyed | beam.GroupByKey()
    joined = {"all": keyed, "odd": split.odd | "key odd" >> beam.Map(lambda n: (str(n % 5), n))}
    batches = numbers | beam.BatchElements(8, 8)
    return {
        "odd": split.odd,
        "grouped": grouped | beam.MapTuple(lambda key, values: (key, sorted(values))),
        "joined": joined
        | beam.CoGroupByKey()
        | beam.MapTuple(lambda key, groups: (key, sorted(groups["all"]), sorted(groups["odd"]))),
        "counts": split["all"]
        | "mod" >> beam.Map(lambda n: n % 3)
        | beam.combiners.Count.PerElement(),
        "distinct": numbers | "mod 4" >> beam.Map(lambda n: (n % 4, "x")) | beam.Distinct(),
        "flat": (numbers, split.odd) | beam.Flatten(),
        "shuffled": numbers | beam.Reshuffle(),
        "batched": batches | beam.FlatMap(list),
        "seen": numbers
        | beam.Map(_see, AsList(split.odd), AsDict(small), AsSingleton(total), AsIter(numbers)),
        "empty": numbers | beam.Filter(lambda n: n < 0),
    }


def test_transforms_give_the_rows_of_the_local_runner(tmp_path):
    spark_tables = run(tmp_path / "spark", transforms, FLAGS)
    assert spark_tables == run(tmp_path / "local", transforms)
    sizes = {"odd": 50, "grouped": 7, "joined": 7, "counts": 3, "distinct": 4, "flat": 150}
    sizes |= {"shuffled": 100, "batched": 100, "seen": 100, "empty": 0}
    assert {name: len(rows) for name, rows in spark_tables.items()} == sizes


def test_two_processes_share_the_work(tmp_path):
    def make(pipeline):
        numbers = pipeline | beam.Create(range(1000)) | "share" >> beam.Reshuffle()
        return {"pids": numbers | beam.Map(lambda _: os.getpid()) | beam.Distinct()}

    pids = {int(pid) for pid in run(tmp_path, make, FLAGS)["pids"]}
    assert len(pids) >= 2 and os.getpid() not in pids


STATE = beam.DoFn.StateParam(ReadModifyWriteStateSpec("number", VarIntCoder()))


class _Stateful(beam.DoFn):
    def process(self, element, state=STATE):
        yield element


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda numbers: numbers | beam.WindowInto(FixedWindows(1)), "no windows"),
        (lambda numbers: numbers | beam.ParDo(_Stateful()), "has no StateParam"),
    ],
)
def test_other_transforms_are_refused(tmp_path, make, message):
    def keyed(pipeline):
        return {"made": make(pipeline | beam.Create([("a", 1)]))}

    with pytest.raises(NotImplementedError, match=message):
        run(tmp_path, keyed, FLAGS)


def test_failed_function_names_its_error(tmp_path):
    with pytest.raises(Exception, match="ZeroDivisionError"):
        run(tmp_path, lambda p: {"made": p | beam.Create([0]) | beam.Map(lambda n: 1 / n)}, FLAGS)


def test_other_master_and_missing_java_are_errors(monkeypatch):
    spark.start(MASTER)
    with pytest.raises(ValueError, match=r"pyspark_master = 'local': this process already uses"):
        spark.start("local")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="needs Java 17"):
        spark.start(MASTER)


def test_runner_flag_selects_the_runner():
    assert isinstance(Stages("x", FLAGS).pipeline("y").runner, spark.PySparkRunner)
    assert isinstance(Stages("x").pipeline("y").runner, FnApiRunner)
