"""Tests of built data sets in the trainer: clusters read by id, damaged builds rejected."""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.output import OutputConfig, write_output
from data_pipeline.records import SCHEMAS, make_document
from data_pipeline.stages import Stages
from spell_jax.algorithms import registry as registry
from spell_jax.configs import folder as folder_config
from spell_jax.data.built import BuiltClusters, is_built, open_source
from spell_jax.data.clusters import PAPER_TASKS, Cluster, count_words, split_held_out
from spell_jax.data.config import DataConfig, open_clusters, origin
from spell_jax.data.stream import TaskStream
from spell_jax.runtime.config import build
from tests.data.hosts import OPEN, make_batches
from tests.runtime.hosts.test_distributed import run_two

CLUSTERS = {
    f"id{number:02d}": Cluster(
        f"id{number:02d}",
        tuple(f"größer {number}.{part}" for part in range(1 + number % 3)),
        (PAPER_TASKS[number % 2],),
    )
    for number in range(20)
}
# One document of 40 words, over the limit of OPEN.
LONG = " ".join(f"word{i}." for i in range(40))
CLUSTERS["long"] = Cluster("long", ("short", LONG, "end"), PAPER_TASKS[:1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write a build of CLUSTERS in 3 shards, as the pipeline writes it."""
    path = tmp_path_factory.mktemp("build")
    (path / "stages" / "tasks").mkdir(parents=True)
    rows = [
        {
            "id": cluster.id,
            "pool": PAPER_TASKS[0],
            "documents": [make_document(text, "s", "p") for text in cluster.documents],
            "tokens": 1,
            "vector": b"",
            "task": cluster.tasks[0],
        }
        for cluster in CLUSTERS.values()
    ]
    schema = SCHEMAS["clusters"].append(pa.field("task", pa.string()))
    table = pa.Table.from_pylist(rows, schema)
    pq.write_table(table, path / "stages" / "tasks" / "clusters-0.parquet")
    stages = Stages(str(path / "stages"))
    write_output(stages, "tasks/clusters", (), str(path), OutputConfig(3), {"seed": 0})
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_clusters_are_read_by_id(folder: Path) -> None:
    built = BuiltClusters(folder)
    assert built.tasks == {name: CLUSTERS[name].tasks for name in sorted(CLUSTERS)}
    ids = ["id07", "long", "id00", "id07", "id19"]
    assert built.read(ids) == [CLUSTERS[name] for name in ids]
    assert built.read([]) == []
    with pytest.raises(KeyError, match="id77"):
        built.read(["id77"])


def test_an_id_may_have_a_line_separator_of_unicode(copy: Path) -> None:
    """JSON allows U+2028 and U+0085 within a string; only line feeds end a line of the index."""
    index = copy / "index.jsonl"
    text = index.read_text(encoding="utf-8")
    index.write_text(text.replace('"id00"', '"id\u2028\x850"'), encoding="utf-8", newline="")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"][index.name]["size"] = index.stat().st_size
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert "id\u2028\x850" in BuiltClusters(copy).tasks and len(BuiltClusters(copy).tasks) == len(
        CLUSTERS
    )


def test_is_built_recognizes_complete_and_partial_builds(folder: Path, tmp_path: Path) -> None:
    assert is_built(folder) and is_built(str(folder))
    assert not is_built(tmp_path) and not is_built(tmp_path / "none")
    (tmp_path / "a.txt").write_text("text")
    assert not is_built(tmp_path) and not is_built(tmp_path / "a.txt")
    (tmp_path / "clusters-train.array_record-00000-of-00002").write_text("")
    assert is_built(tmp_path)  # not taken for a folder of texts, though it is incomplete


def test_texts_are_loaded_lazily_per_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_names: list[str] = []
    read_cluster = BuiltClusters._read_cluster

    def counted(built: BuiltClusters, name: str) -> Cluster:
        read_names.append(name)
        return read_cluster(built, name)

    monkeypatch.setattr(BuiltClusters, "_read_cluster", counted)
    stream = TaskStream(open_source(folder, **OPEN), PAPER_TASKS[:2], [1, 1], seed=0)
    assert read_names == []
    batch = stream.next(4)
    assert read_names == [cluster.id for _, cluster in batch]
    assert all(cluster.tasks == (task,) for task, cluster in batch)


def test_long_documents_are_cut_in_place(folder: Path) -> None:
    (cluster, uncut_cluster) = open_source(folder, **OPEN).read(["long", "id05"])
    assert uncut_cluster == CLUSTERS["id05"]
    assert cluster.documents[0] == "short" and cluster.documents[-1] == "end"
    assert len(cluster.documents) == 4
    assert " ".join(cluster.documents[1:3]) == LONG
    assert all(count_words(document) <= 24 for document in cluster.documents)


def test_open_source_also_reads_jsonl_and_text_folders(tmp_path: Path) -> None:
    path = tmp_path / "index.jsonl"
    path.write_text(json.dumps({"id": "a", "documents": [LONG], "tasks": list(PAPER_TASKS[:1])}))
    source = open_source(path, **OPEN)
    assert source.tasks == {"a": PAPER_TASKS[:1]}
    assert len(source.read(["a"])[0].documents) == 2
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one text")
    source = open_source(tmp_path / "texts", **OPEN)
    assert [cluster.documents for cluster in source.read(list(source.tasks))] == [("one text",)]


SHARD = "clusters-train.array_record-00001-of-00003"


@pytest.mark.parametrize("name", [SHARD, "index.jsonl", "features.json", "dataset_info.json"])
def test_error_names_missing_or_truncated_file(copy: Path, name: str) -> None:
    path = copy / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{name}: .* bytes instead of"):
        BuiltClusters(copy)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{name}: missing"):
        BuiltClusters(copy)


def test_an_unfinished_build_is_rejected(copy: Path) -> None:
    (copy / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"manifest\.json: missing, so the build is unfin"):
        open_source(copy, **OPEN)
    for text in ("{", "[]", '{"files": {"a": 1}}'):
        (copy / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=r"manifest\.json: not the manifest of a build"):
            open_source(copy, **OPEN)


def test_shards_of_another_build_are_rejected(copy: Path) -> None:
    (copy / "clusters-train.array_record-00001-of-00002").write_text("old")
    with pytest.raises(ValueError, match=r"00001-of-00002: not listed in manifest\.json"):
        BuiltClusters(copy)


def _exchange(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert len(old) == len(new) and old in data
    path.write_bytes(data.replace(old, new))


def test_index_that_disagrees_with_records_is_rejected(copy: Path) -> None:
    _exchange(copy / "index.jsonl", b'"id03"', b'"id30"')
    with pytest.raises(ValueError, match="record 3 is cluster id03, not id30"):
        BuiltClusters(copy).read(["id30"])
    _exchange(copy / "index.jsonl", b'"id30"', b'"id02"')
    with pytest.raises(ValueError, match=r"index\.jsonl: 20 ids in 21 lines for 21 records"):
        BuiltClusters(copy)
    _exchange(copy / "index.jsonl", b'{"id": "id04"', b'["id", "id04"')
    with pytest.raises(ValueError, match=r"index\.jsonl: 1 invalid lines; build it"):
        BuiltClusters(copy)


@pytest.mark.parametrize("line", ['{"id": [], "task": "general_qa"}', '{"id": "a", "task": {}}'])
def test_index_of_other_types_is_rejected(copy: Path, line: str) -> None:
    index = (copy / "index.jsonl").read_text()
    _exchange(copy / "index.jsonl", index.encode(), line.ljust(len(index) - 1).encode() + b"\n")
    with pytest.raises(ValueError, match=r"index\.jsonl: 1 invalid lines"):
        BuiltClusters(copy)


def test_error_names_damaged_record(copy: Path) -> None:
    """The damaged file keeps its size, so only reading the record reveals the damage."""
    path = copy / SHARD
    data = bytearray(path.read_bytes())
    data[64:4096] = bytes(4096 - 64)
    path.write_bytes(data)
    built = BuiltClusters(copy)
    assert built.read(["id00"]) == [CLUSTERS["id00"]]
    with pytest.raises(ValueError, match=r"record 7 \(cluster id07\) is damaged .*build it again"):
        built.read(["id07"])


def test_missing_tfds_raises_import_error(folder: Path, monkeypatch) -> None:
    importing = builtins.__import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("tensorflow_datasets"):
            raise ImportError(name)
        return importing(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'spell_jax\[tfds\]'"):
        BuiltClusters(folder)


def test_config_source_may_be_a_built_data_set(folder: Path) -> None:
    config = folder_config.get_config()
    config.data.source, config.data.held_out = str(folder), 0.2
    config.data.max_document_tokens = 24
    config.data.validation = ""
    build(DataConfig, config.data, "data").check()
    source, apart = open_clusters(config.data, 0, count_words)
    train, held_out = split_held_out(sorted(CLUSTERS), 0.2)
    assert list(source.tasks) == train and list(apart.tasks) == held_out and len(held_out) == 4
    assert source.read(train[:2] * 2) == [CLUSTERS[name] for name in train[:2] * 2]


def test_build_may_be_named_as_a_tfds_set(folder: Path, tmp_path: Path) -> None:
    """A build in DIR/clusters/1.0.0 keeps its clusters."""
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "1.0.0").symlink_to(folder)
    data = DataConfig("tfds:clusters", str(tmp_path), max_document_tokens=100)
    data.check()
    assert is_built(origin(data))
    source, _ = open_clusters(data, 0, count_words)
    assert source.read(["id07", "long"]) == [CLUSTERS["id07"], CLUSTERS["long"]]


def test_clusters_over_the_prompt_cap_are_warned_of(folder: Path, caplog, monkeypatch) -> None:
    # launch.check opens the clusters as well, where there may be no device.
    monkeypatch.setattr(jax, "process_count", lambda: pytest.fail("a device was asked for"))
    config = folder_config.get_config()
    config.data.source = str(folder)
    data = build(DataConfig, config.data, "data")
    longest = max(sum(map(count_words, c.documents)) for c in CLUSTERS.values())
    with caplog.at_level("WARNING"):
        open_clusters(data, 0, count_words, longest)
        assert not caplog.records
        open_clusters(data, 0, count_words, 1)
    (record,) = caplog.records
    assert "12 of 12 sampled clusters" in record.message and "sampler.max_prompt" in record.message


@pytest.mark.slow
def test_two_hosts_each_read_half_of_the_same_batches(folder: Path) -> None:
    first, second = run_two("tests.data.hosts", str(folder))
    assert first["batches"] == second["batches"]
    alone = make_batches(open_source(folder, **OPEN))
    assert first["batches"] == alone
    for mine, theirs, batch in zip(first["read"], second["read"], alone, strict=True):
        ids = list(dict.fromkeys(name for _, name, _ in batch))
        assert (mine, theirs) == (ids[0::2], ids[1::2])
    # 21 clusters, all in the last batch; its 9 repeats are read once.
    assert [len(names) for names in first["read"]] == [4, 4, 11]
    message = "host 1: ValueError: id03 is damaged"
    assert first["error"] == second["error"] == message
