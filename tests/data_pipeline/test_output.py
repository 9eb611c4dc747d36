"""Tests of the output: readable by tfds, identical for any number of workers, never incomplete."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds
from apache_beam.io.filesystems import FileSystems

from data_pipeline import output
from data_pipeline.output import OutputConfig, write_output
from data_pipeline.records import SCHEMAS, digest, make_document
from data_pipeline.stages import Done, Stages

TASKS = ("general_qa", "financial_math")
SCHEMA = SCHEMAS["clusters"].append(pa.field("task", pa.string()))
AFTER = (Done("tasks", "f00", (), 0.0),)
MANIFEST = {"seed": 3, "config": {"a": [1, 2]}, "versions": {"x": "1.0"}}
TABLE = "tasks/clusters"


def make_cluster(number: int) -> dict[str, Any]:
    documents = [
        make_document(
            f"text {number}.{part} größer 大 " * (1 + part), f"s{number % 2}", f"f#{part}"
        )
        | {"tokens": 5, "vector": bytes(8), "part": part}
        for part in range(1 + number % 3)
    ]
    return {
        "id": digest(str(number)),
        "pool": "+".join(TASKS),
        "documents": documents,
        "tokens": 5 * len(documents),
        "vector": bytes(8),
        "task": TASKS[number % 2],
    }


CLUSTERS = sorted((make_cluster(number) for number in range(23)), key=lambda c: c["id"])


def make_stages(path: Path, clusters=CLUSTERS, files: int = 3, options=()) -> Stages:
    """Make stages with finished tasks; the tasks' table is in `files` files, in shuffled order."""
    shuffled = list(clusters)
    random.Random(files).shuffle(shuffled)
    folder = path / "stages" / "tasks"
    folder.mkdir(parents=True)
    for number in range(files):
        table = pa.Table.from_pylist(shuffled[number::files], SCHEMA)
        pq.write_table(table, folder / f"clusters-{number:05d}-of-{files:05d}.parquet")
    return Stages(str(path / "stages"), options)


def write(path: Path, shards: int = 4, manifest=MANIFEST, **options: Any) -> Path:
    """Write the output of a build to path/out; return that folder."""
    stages = make_stages(path, **options)
    write_again(stages, path / "out", shards, manifest)
    return path / "out"


def write_again(stages: Stages, out: Path, shards: int = 4, manifest=MANIFEST, after=AFTER):
    return write_output(stages, TABLE, after, str(out), OutputConfig(shards), manifest)


def hashes(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("build"))


READ = """
import json, sys
import tensorflow_datasets as tfds
folder, parent = sys.argv[1:]
records = list(tfds.builder_from_directory(folder).as_data_source(split="train"))
same = tfds.data_source("clusters", data_dir=parent, split="train")
assert len(same) == len(records) and same[4]["id"] == records[4]["id"]
assert not [name for name in sys.modules if name.split(".")[0] == "tensorflow"]
def plain(value):
    if isinstance(value, bytes):
        return value.decode()
    return [plain(v) for v in value] if hasattr(value, "__len__") else int(value)
print(json.dumps([{key: plain(value) for key, value in r.items()} for r in records]))
"""


@pytest.mark.slow
def test_tfds_reads_every_cluster_without_tensorflow(out: Path, tmp_path: Path) -> None:
    """Reads in another process, by folder, and by name if the folder is named as tfds expects."""
    named = tmp_path / "clusters" / "1.0.0"
    named.parent.mkdir()
    named.symlink_to(out)
    run = subprocess.run(
        [sys.executable, "-c", READ, str(out), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    expected_clusters = [
        {key: cluster[key] for key in ("id", "task", "tokens")}
        | {
            "documents": [document["text"] for document in cluster["documents"]],
            "sources": [document["source"] for document in cluster["documents"]],
            "places": [document["place"] for document in cluster["documents"]],
        }
        for cluster in CLUSTERS
    ]
    assert json.loads(run.stdout.splitlines()[-1]) == expected_clusters


def test_shards_are_near_equal_ranges_of_the_ids(out: Path) -> None:
    splits = tfds.builder_from_directory(out).info.splits
    assert splits["train"].shard_lengths == [5, 6, 6, 6]
    names = [f"clusters-train.array_record-0000{i}-of-00004" for i in range(4)]
    assert sorted(file.name for file in out.glob("clusters*")) == names
    assert splits["train"].num_bytes == sum((out / name).stat().st_size for name in names)


def test_array_record_groups_have_one_record(out: Path) -> None:
    """Random access requires groups of one record."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(next(out.glob("clusters*"))))
    assert "group_size:1," in reader.writer_options_string()


def test_index_describes_each_record(out: Path) -> None:
    index = [json.loads(line) for line in (out / "index.jsonl").read_text().splitlines()]
    assert index == [
        {key: c[key] for key in ("id", "task", "tokens")} | {"documents": len(c["documents"])}
        for c in CLUSTERS
    ]


def test_manifest_lists_all_files_and_given_metadata(out: Path) -> None:
    manifest = json.loads((out / "manifest.json").read_text())
    assert {key: manifest[key] for key in MANIFEST} == MANIFEST
    assert manifest["clusters"] == {"general_qa": 12, "financial_math": 11}
    files = {file.name: file for file in out.iterdir() if file.name != "manifest.json"}
    assert manifest["files"].keys() == files.keys()
    for name, file in manifest["files"].items():
        data = files[name].read_bytes()
        assert file == {
            "size": len(data),
            "hash": hashlib.blake2b(data, digest_size=16).hexdigest(),
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "options"),
    [
        (1, ()),
        (7, ("--direct_num_workers=2", "--direct_running_mode=multi_threading")),
        (5, ("--direct_num_workers=2", "--direct_running_mode=multi_processing")),
    ],
    ids=["one file", "two threads", "two processes"],
)
def test_bytes_do_not_depend_on_workers_or_order(out, tmp_path, files, options) -> None:
    assert hashes(write(tmp_path, files=files, options=options)) == hashes(out)


def test_unchanged_output_is_not_rewritten(tmp_path: Path, monkeypatch) -> None:
    stages = make_stages(tmp_path)
    first = write_again(stages, tmp_path / "out")
    before = hashes(tmp_path / "out")
    monkeypatch.setattr(output, "make_shards", None)
    assert write_again(stages, tmp_path / "out") == first
    assert hashes(tmp_path / "out") == before


@pytest.mark.slow
@pytest.mark.parametrize("change", ["shards", "manifest", "after", "damage", "loss", "no manifest"])
def test_changed_or_damaged_output_is_rewritten(tmp_path: Path, change: str) -> None:
    stages, out = make_stages(tmp_path, CLUSTERS[:6]), tmp_path / "out"
    write_again(stages, out)
    (out / "report.html").write_text("not ours")
    (out / "unfinished-1-manifest.json").write_text("of a worker that died")
    shard = out / "clusters-train.array_record-00001-of-00004"
    if change == "damage":
        shard.write_bytes(shard.read_bytes() + b"0")
    elif change == "loss":
        shard.unlink()
    elif change == "no manifest":
        (out / "manifest.json").unlink()
    manifest = {"seed": 4} if change == "manifest" else MANIFEST
    after = (Done("tasks", "f01", (), 0.0),) if change == "after" else AFTER
    shards = 2 if change == "shards" else 4
    write_again(stages, out, shards, manifest, after)
    fresh = tmp_path / "fresh"
    write_again(stages, fresh, shards, manifest, after)
    assert hashes(out) == hashes(fresh) | {"report.html": hashlib.sha256(b"not ours").hexdigest()}


@pytest.mark.slow
@pytest.mark.parametrize("last", range(8))
def test_interrupted_output_does_not_look_complete(tmp_path, monkeypatch, last) -> None:
    """Stop before file number `last` gets its final name, over an older output.

    The files are 2 shards, features, info, index, manifest.
    """
    stages, out = make_stages(tmp_path, CLUSTERS[:6], files=1), tmp_path / "out"
    write_again(stages, out, 2)
    older = hashes(out)
    renamed: list[str] = []
    rename = FileSystems.rename

    def counted(sources: list[str], names: list[str]) -> None:
        if len(renamed) == last:
            raise OSError("stopped")
        renamed.extend(Path(name).name for name in names)
        rename(sources, names)

    monkeypatch.setattr(FileSystems, "rename", counted)
    try:
        write_again(stages, out, 2, {"seed": 4})
    except Exception as error:
        assert "stopped" in str(error)
    written = [name for name in hashes(out) if not name.startswith("unfinished-")]
    assert sorted(written) == sorted(renamed)
    assert ("manifest.json" in written) == (len(renamed) == 6) == (last >= 6)
    if "dataset_info.json" in written:
        assert {name for name in written if name.startswith("clusters")} == {
            name for name in older if name.startswith("clusters")
        }
    assert renamed[5:] == ["manifest.json"][: max(0, last - 5)]


def test_shard_count_is_at_most_the_cluster_count(tmp_path: Path) -> None:
    out = write(tmp_path, 8, clusters=CLUSTERS[:3], files=1)
    records = tfds.builder_from_directory(out).as_data_source(split="train")
    assert [record["id"].decode() for record in records] == [c["id"] for c in CLUSTERS[:3]]
    assert len(list(out.glob("clusters*"))) == 3


@pytest.mark.parametrize(
    ("clusters", "message"),
    [([], "tasks/clusters: there is no cluster"), (CLUSTERS[:2] * 2, "is there twice")],
)
def test_empty_or_duplicate_clusters_are_rejected(
    tmp_path: Path, clusters: list, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path, clusters=clusters, files=1)


def test_lost_cluster_raises_while_writing_shards(tmp_path: Path) -> None:
    shards = output.plan_shards([cluster["id"] for cluster in CLUSTERS], 4)
    with pytest.raises(Exception, match="5 clusters came, 6 were planned"):  # noqa: SIM117
        with make_stages(tmp_path).pipeline("output") as pipeline:
            clusters = pipeline | beam.Create(CLUSTERS[:-1])
            output.make_shards(clusters, shards, str(tmp_path / "out"))


def test_zero_shards_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"output\.shards = 0: must be from 1"):
        OutputConfig(0)
