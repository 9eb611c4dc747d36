"""Tests of stages: tables in and out, reruns, leftovers of an unfinished run, other runners."""

from __future__ import annotations

import functools
import json

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner

from data_pipeline import stages as stages_module
from data_pipeline.records import make_document
from data_pipeline.stages import DONE, Stages
from tests.runtime.files.test_durable import Calls


def write(pipeline, texts):
    documents = pipeline | beam.Create([make_document(t, "s", f"{i}") for i, t in enumerate(texts)])
    return {"documents": documents, "counts": documents | beam.Map(lambda d: ("made", "s"))}


def shout(documents, sign):
    loud = documents | beam.Map(lambda d: d | {"text": d["text"].upper() + sign})
    return {"documents": loud, "counts": loud | beam.Map(lambda d: ("loud", d["source"]))}


def run_both(stages, texts=("one", "two"), sign="!"):
    first = stages.run_stage("write", {"texts": texts}, functools.partial(write, texts=texts))
    make = functools.partial(shout, sign=sign)
    second = stages.run_stage("shout", {"sign": sign}, make, [first], documents="write/documents")
    return first, second


def texts_of(stages, table="shout/documents"):
    return sorted(record["text"] for record in stages.read_records(table))


@pytest.mark.slow
def test_tables_pass_from_stage_to_stage(tmp_path):
    stages = Stages(str(tmp_path / "stages"))
    first, second = run_both(stages)
    assert texts_of(stages) == ["ONE!", "TWO!"]
    assert (first.count("made"), second.count("loud"), second.count("made")) == (2, 2, 0)
    assert second.count("loud", "s") == 2 and second.count("loud", "other") == 0
    assert next(stages.read_records("shout/documents", ["place"])).keys() == {"place"}


@pytest.mark.slow
def test_finished_stages_are_not_rerun(tmp_path, monkeypatch):
    stages = Stages(str(tmp_path / "stages"))
    before = run_both(stages)
    monkeypatch.setattr(Stages, "pipeline", lambda *_: pytest.fail("ran again"))
    after = run_both(Stages(str(tmp_path / "stages")))
    assert [stage.fingerprint for stage in after] == [stage.fingerprint for stage in before]
    assert [stage.counts for stage in after] == [stage.counts for stage in before]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "ran"),
    [({"sign": "?"}, ["shout"]), ({"texts": ("three",)}, ["write", "shout"])],
)
def test_changed_settings_rerun_the_stage_and_all_after_it(tmp_path, monkeypatch, change, ran):
    stages, names = Stages(str(tmp_path / "stages")), []
    run_both(stages)
    construct = Stages.construct
    monkeypatch.setattr(
        Stages,
        "construct",
        lambda self, pipeline, name, *arguments: (
            names.append(name) or construct(self, pipeline, name, *arguments)
        ),
    )
    run_both(stages, **change)
    assert names == ran
    assert texts_of(stages) == (["THREE!"] if "texts" in change else ["ONE?", "TWO?"])


@pytest.mark.slow
@pytest.mark.parametrize("left", [None, b"", b'{"finger', b"[]"])
def test_leftovers_of_an_unfinished_run_are_not_read(tmp_path, left):
    """The tables of the unfinished run are complete, but done.json is missing or incomplete."""
    stages = Stages(str(tmp_path / "stages"))
    run_both(stages, texts=tuple("abcdef"))
    folder = tmp_path / "stages" / "shout"
    stray = folder / "documents-00000-of-00002.parquet"
    next(folder.glob("documents-*")).rename(stray)
    (folder / DONE).unlink()
    if left is not None:
        (folder / DONE).write_bytes(left)
    run_both(stages, texts=tuple("abcdef"))
    assert not stray.exists()
    assert texts_of(stages) == ["A!", "B!", "C!", "D!", "E!", "F!"]


def test_failed_stage_is_not_marked_done(tmp_path):
    stages = Stages(str(tmp_path / "stages"))
    with pytest.raises(Exception, match="division by zero"):
        stages.run_stage(
            "fails",
            {},
            lambda pipeline: {"counts": pipeline | beam.Create([1]) | beam.Map(lambda n: n / 0)},
        )
    assert not (tmp_path / "stages" / "fails" / DONE).exists()


@pytest.mark.slow
def test_empty_table_is_read_as_empty(tmp_path):
    stages = Stages(str(tmp_path / "stages"))
    _, second = run_both(stages, texts=())
    assert list(stages.read_records("shout/documents")) == [] and second.counts == ()


@pytest.mark.slow
def test_tables_do_not_depend_on_the_number_of_workers(tmp_path):
    alone = Stages(str(tmp_path / "a"))
    options = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]
    beside = Stages(str(tmp_path / "b"), options)
    texts = tuple(map(str, range(50)))
    assert [d.counts for d in run_both(alone, texts)] == [d.counts for d in run_both(beside, texts)]
    assert texts_of(alone) == texts_of(beside)


@pytest.mark.slow
def test_runner_flag_selects_the_runner():
    assert isinstance(Stages("x").pipeline("y").runner, FnApiRunner)
    assert isinstance(Stages("x", ["--runner=DirectRunner"]).pipeline("y").runner, FnApiRunner)
    for name in ("FlinkRunner", "SparkRunner", "PortableRunner"):
        runner = Stages("x", [f"--runner={name}"]).pipeline("y").runner
        assert type(runner).__name__ == name


@pytest.mark.slow
def test_done_json_is_written_last(tmp_path, monkeypatch):
    """So a stage that is killed earlier never looks finished."""
    stages = Stages(str(tmp_path / "stages"))
    original = stages_module.FileSystems.create

    def create(path, *arguments):
        if not path.endswith(DONE):
            return original(path, *arguments)
        assert len(list((tmp_path / "stages" / "write").glob("*.parquet"))) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(stages_module.FileSystems, "create", create)
    with pytest.raises(KeyboardInterrupt):
        stages.run_stage("write", {}, functools.partial(write, texts=("one",)))
    monkeypatch.undo()
    stage = stages.run_stage("write", {}, functools.partial(write, texts=("one",)))
    assert json.loads((tmp_path / "stages" / "write" / DONE).read_text())["counts"] == list(
        stage.counts
    )


@pytest.mark.slow
def test_tables_are_on_disk_before_the_stage_is_marked_as_done(tmp_path, monkeypatch):
    calls = Calls(monkeypatch)
    Stages(str(tmp_path / "stages")).run_stage(
        "write", {}, functools.partial(write, texts=("one",))
    )
    folder = tmp_path / "stages" / "write"
    renamed = calls.index(("rename", str(folder / DONE)))
    on_disk = {path for kind, path in calls[:renamed] if kind == "fsync"}
    assert on_disk >= {str(folder), *map(str, folder.glob("*.parquet"))}
    assert [path for path in on_disk if path.endswith(DONE)]
    assert calls[renamed + 1 :] == [("fsync", str(folder)), ("fsync", str(folder.parent))]
