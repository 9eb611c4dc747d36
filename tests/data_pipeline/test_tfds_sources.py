"""Tests of tensorflow-datasets sets as sources of the pipeline."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data_pipeline import build
from data_pipeline.sources import SourceConfig, list_files
from spell_jax.configs.data import folder as folder_config
from spell_jax.data.clusters import TASKS
from tests.data.prepared_sets import TEXT, prepare
from tests.data_pipeline.test_sources import counts, read

SPLITS = {
    split: [{"title": f"T{i}", "text": f"{split} {i} größer"} for i in range(3)]
    for split in ("train", "test", "old")
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sets")
    for file_format in ("array_record", "parquet", "tfrecord"):
        prepare(path, f"titled_{file_format}", {"title": TEXT, "text": TEXT}, SPLITS, file_format)
    rows = {"train": [{"head": "h", "body": "b\0c"}, {"head": "i", "body": " "}]}
    prepare(path, "pair", {"head": TEXT, "body": TEXT}, rows)
    return path


def source(data_dir: Path, name: str, **fields) -> SourceConfig:
    return SourceConfig(f"tfds:{name}", "folder", TASKS, tfds_data_dir=str(data_dir), **fields)


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["array_record", "parquet", "tfrecord"])
def test_records_are_documents_with_their_titles(data_dir, tmp_path, file_format) -> None:
    name = f"titled_{file_format}"
    configs = {
        "all": source(data_dir, name),
        "some": source(data_dir, name, tfds_split="test[1:]+old", text_feature="text"),
    }
    tables = read(tmp_path / "out", configs)
    texts = {(d["source"], d["place"]): d["text"] for d in tables["documents"]}
    places = {split: f"{name}-{split}.{file_format}-00000-of-00001" for split in SPLITS}
    assert texts == {
        (label, f"{places[split]}#{i:09d}"): f"T{i}\n{split} {i} größer"
        for label in configs
        for split in SPLITS
        for i in range(3)
        if label == "all" or split == "old" or (split == "test" and i)
    }
    assert counts(tables, "all")["files read"] == 3
    assert len(tables["files"]) == 5 and all(file["hash"] for file in tables["files"])


@pytest.mark.slow
def test_unusable_records_and_shards_are_listed(data_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(data_dir / "pair", tmp_path / "pair")
    shutil.copytree(data_dir / "titled_tfrecord", tmp_path / "titled_tfrecord")
    (shard,) = (tmp_path / "titled_tfrecord" / "1.0.0").glob("*-train.*")
    shard.write_bytes(shard.read_bytes()[:-1])
    configs = {
        "pair": source(tmp_path, "pair", text_feature="body"),
        "cut": source(tmp_path, "titled_tfrecord", tfds_split="train"),
    }
    tables = read(tmp_path / "out", configs)
    assert [d["text"] for d in tables["documents"]] == [f"T{i}\ntrain {i} größer" for i in (0, 1)]
    reasons = {(r["source"], r["place"].partition("#")[2]): r["reason"] for r in tables["removed"]}
    assert reasons == {
        ("cut", ""): "breaks off",
        ("pair", "000000000"): "bad row",
        ("pair", "000000001"): "empty",
    }


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("none", {}, "none is not prepared in .*, which has pair, titled_.*tfds build none "),
        ("pair", {}, "text_feature = '': must be one of its text features: body, head$"),
        ("pair", {"text_feature": "text"}, "text_feature = 'text': must be one of .*: body, head$"),
    ],
)
def test_errors_are_one_line(data_dir: Path, name: str, fields: dict, message: str) -> None:
    pattern = rf"^sources\.web\.path = 'tfds:{name}': .*{message}"
    with pytest.raises(ValueError, match=pattern) as info:
        list(list_files("web", source(data_dir, name, **fields)))
    assert "\n" not in str(info.value)


def test_missing_shard_is_an_error(data_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(data_dir / "pair", tmp_path / "pair")
    (shard,) = (tmp_path / "pair" / "1.0.0").glob("pair-*")
    shard.unlink()
    with pytest.raises(ValueError, match=r"^sources\.web\.path = 'tfds:pair': .*pair-train"):
        list(list_files("web", source(tmp_path, "pair", text_feature="body")))


def test_flag_names_the_directory_of_all_sets(data_dir: Path, monkeypatch, tmp_path) -> None:
    """A source's own directory wins, and sources of files have none."""
    config = folder_config.get_config("tfds:pair:1.0.0")
    config.sources.files = folder_config.base.source("somewhere", ("general_qa",))
    config.sources.own = folder_config.base.source("tfds:own", ("general_qa",), tfds_data_dir="x")
    values = {"config": config, "out": str(tmp_path), "check": False, "tfds_data_dir": "sets"}
    monkeypatch.setattr(build.flags, "FLAGS", type("Values", (), values))
    monkeypatch.setattr(build, "build", lambda *arguments: {"counts": {}, "clusters": {}})
    build.main(["build"])
    assert config.sources.folder.path == "tfds:pair:1.0.0"
    directories = {name: s.tfds_data_dir for name, s in config.sources.items()}
    assert directories == {"folder": "sets", "files": "", "own": "x"}
