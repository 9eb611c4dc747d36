"""Tests of row balances: equations, and an engine that loses rows in any stage of a build."""

from __future__ import annotations

import json

import apache_beam as beam
import pytest

from data_pipeline import balance, build
from data_pipeline.balance import LostRowsError
from data_pipeline.records import Count
from data_pipeline.stages import DONE, Stages
from spell_jax.configs.data import base

COUNTS = [
    Count(what="documents kept", source="a", number=3),
    Count(what="documents kept", source="b", number=2),
    Count(what="removed: long", source="a", number=1),
    Count(what="removed: short", source="a", number=1),
]
ROWS = {"in:documents": 7, "out:documents": 5}


@pytest.mark.parametrize(
    "equation",
    [
        "in:documents = documents kept + removed: *",
        "out:documents = documents kept",
        "removed: long = removed: short",
        "in:documents = out:documents + removed: *",
        "never = never so",
    ],
)
def test_equations_hold(equation):
    balance.check("x", [equation], ROWS.__getitem__, COUNTS)


def test_broken_equation_names_the_stage_and_all_terms():
    message = r"stage dedup: .*: 7 \(in:documents\) but 5 \(out:documents\) \+ 1 \(removed: long\)"
    with pytest.raises(LostRowsError, match=message):
        equation = "in:documents = out:documents + removed: long"
        balance.check("dedup", [equation], ROWS.__getitem__, COUNTS)


class _LoseFirst(beam.DoFn):
    """Loses one element of a bundle, as a faulty engine might."""

    def start_bundle(self):
        self.lost = False

    def process(self, element):
        if self.lost:
            yield element
        self.lost = True


# Stage and table, and whether the rows are lost when they are read or when they are written.
LOSSES = [
    ("read", "listed", "in"),
    ("read", "documents", "out"),
    ("read", "files", "out"),
    ("dedup", "documents", "in"),
    ("dedup", "documents", "out"),
    ("dedup", "removed", "out"),
    ("decontaminate", "documents", "in"),
    ("decontaminate", "documents", "out"),
    ("cut", "documents", "in"),
    ("cut", "documents", "out"),
    ("embed", "documents", "in"),
    ("embed", "documents", "out"),
    ("cluster-points", "documents", "in"),
    ("cluster-points", "points", "out"),
    ("cluster-fit-1", "points", "in"),
    ("cluster-fit-1", "centroids", "out"),
    ("cluster-level-1", "points", "in"),
    ("cluster-level-1", "centroids", "in"),
    ("cluster-level-1", "points", "out"),
    ("cluster-members", "points", "in"),
    ("cluster-members", "members", "out"),
    ("cluster", "documents", "in"),
    ("cluster", "members", "in"),
    ("cluster", "clusters", "out"),
    ("tasks", "clusters", "in"),
    ("tasks", "tasks", "out"),
]


@pytest.mark.slow
def test_lost_rows_are_an_error_in_every_stage(tmp_path, monkeypatch):
    """The runner loses rows in one place after the other; each build goes on after the last one."""
    topics = ["sea ships sail waves", "bread flour oven baker", "snow ice winter frost"]
    lines = [json.dumps({"text": f"{topics[i % 3]} text{i} " * 5}) for i in range(90)]
    source = tmp_path / "texts.jsonl"
    source.write_text("\n".join([*lines, lines[0]]))
    (tmp_path / "exam.jsonl").write_text(json.dumps({"question": topics[0]}))
    config = base.get_config()
    config.sources.web = base.source(str(source), ("general_qa",))
    config.decontaminate.benchmarks.exam = base.benchmark(
        str(tmp_path / "exam.jsonl"), (), ("question",)
    )
    config.filter.languages = ()
    config.cluster.update({"node_documents": 40, "fit_documents": 80, "documents_per_cluster": 5})
    config.tasks.tasks = ("general_qa",)
    construct = Stages.construct

    def losing(self, pipeline, name, make, inputs):
        def lose(tables, side):
            stage, table, its_side = now
            if (stage, its_side) != (name, side):
                return tables
            return tables | {table: tables[table] | "lose" >> beam.ParDo(_LoseFirst())}

        return construct(
            self,
            pipeline,
            name,
            lambda **input_tables: lose(make(**lose(input_tables, "in")), "out"),
            inputs,
        )

    monkeypatch.setattr(Stages, "construct", losing)
    for now in LOSSES:
        stage = now[0].replace("level-1", "level")
        with pytest.raises(RuntimeError, match=f"stage {stage}"):
            build.build(config, str(tmp_path / "out"))
        assert not (tmp_path / "out" / "stages" / now[0] / DONE).exists(), now
    now = ("", "", "")
    assert build.build(config, str(tmp_path / "out"))["clusters"]["general_qa"] > 1
