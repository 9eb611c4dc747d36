"""Tests of tensorflow-datasets sets as data.source: texts, titles, splits, formats and errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds

from spell_jax.configs import folder as folder_config
from spell_jax.data import built, tfds_sets
from spell_jax.data.clusters import count_words
from spell_jax.data.config import DataConfig, open_clusters, origin
from spell_jax.data.text_files import Unusable
from spell_jax.data.tfds_sets import TextSet, TfdsSource, find_folder
from spell_jax.launch import check
from spell_jax.question_sets import cloze
from tests.data.prepared_sets import TEXT, damage_length, prepare

FORMATS = ("array_record", "parquet", "tfrecord")
PLAIN = [f"größer {number}" for number in range(5)]
TITLED = {"title": TEXT, "text": TEXT, "label": tfds.features.ClassLabel(num_classes=2)}
SPLITS = {split: [{"text": f"{split} {i}"} for i in range(4)] for split in ("train", "test", "old")}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sets")
    for file_format in FORMATS:
        rows = {"train": [{"body": text} for text in PLAIN]}
        prepare(path, f"plain_{file_format}", {"body": TEXT}, rows, file_format)
    titled = [("Oslo", "A town."), ("", "No title."), ("Empty", " "), (" Rome ", "Old.")]
    rows = {"train": [{"title": a, "text": b, "label": 0} for a, b in titled]}
    prepare(path, "titled", TITLED, rows)
    prepare(path, "splits", {"text": TEXT}, SPLITS, config="small", version="2.1.0")
    nested = {"meta": {"source": TEXT, "year": tfds.features.Scalar(np.int64)}, "head": TEXT}
    rows = {"train": [{"meta": {"source": "a wire", "year": 1}, "head": "News"}]}
    prepare(path, "nested", nested, rows)
    prepare(path, "images", {"n": tfds.features.Scalar(np.int64)}, {"train": [{"n": 1}]})
    return path


def texts(data_dir: Path, name: str, **fields: Any) -> list[str]:
    """Return the documents of a set as a run reads them."""
    options = {"grouping": "order", "documents_per_cluster": 3, **fields}
    data = DataConfig(f"tfds:{name}", str(data_dir), **options)
    data.check()
    source, _ = open_clusters(data, 0, count_words)
    clusters = source.read(list(source.tasks))
    assert all(cluster.tasks is None for cluster in clusters)
    assert [len(cluster.documents) for cluster in clusters[:-1]] == [3] * (len(clusters) - 1)
    return [text for cluster in clusters for text in cluster.documents]


@pytest.mark.parametrize("file_format", FORMATS)
def test_only_text_feature_is_the_text_in_every_format(data_dir: Path, file_format: str) -> None:
    assert texts(data_dir, f"plain_{file_format}") == PLAIN
    assert texts(data_dir, f"plain_{file_format}", tfds_split="train[1:3]") == PLAIN[1:3]
    parts = texts(data_dir, f"plain_{file_format}", tfds_split="train[4:]+train[:1]")
    assert parts == [PLAIN[4], PLAIN[0]]


def test_documents_begin_with_the_title(data_dir: Path) -> None:
    """A record without text is skipped, as an empty file is."""
    assert texts(data_dir, "titled") == ["Oslo\nA town.", "No title.", "Rome\nOld."]
    assert texts(data_dir, "titled", text_feature="title") == ["Oslo", "Empty", "Rome"]


def test_all_splits_are_read_unless_some_are_named(data_dir: Path) -> None:
    everything = [row["text"] for split in ("train", "test", "old") for row in SPLITS[split]]
    assert sorted(texts(data_dir, "splits/small:2.1.0")) == sorted(everything)
    assert texts(data_dir, "splits", tfds_split="test") == [f"test {i}" for i in range(4)]


def test_long_texts_are_cut_as_those_of_a_folder(data_dir: Path, tmp_path: Path) -> None:
    long = "\n\n".join(" ".join(f"w{i}x{j}" for j in range(12)) for i in range(5))
    prepare(tmp_path, "long", {"text": TEXT}, {"train": [{"text": long}]})
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(long)
    options = {"grouping": "order", "documents_per_cluster": 2, "max_document_tokens": 16}
    sources = [DataConfig("tfds:long", str(tmp_path)), DataConfig(str(tmp_path / "texts"))]
    clusters = [
        (source := built.open_source(origin(data), count_tokens=count_words, **options)).read(
            list(source.tasks)
        )
        for data in sources
    ]
    assert clusters[0] == clusters[1] and len(clusters[0]) == 3


def test_nested_texts_have_names_with_slashes(data_dir: Path) -> None:
    assert texts(data_dir, "nested", text_feature="meta/source") == ["a wire"]


def test_directory_is_tfds_own_without_a_field(data_dir: Path, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    assert find_folder("tfds:titled") == str(data_dir / "titled" / "1.0.0")
    monkeypatch.delenv("TFDS_DATA_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tensorflow_datasets").symlink_to(data_dir)
    folder = find_folder("tfds:titled:1.*.*")
    assert folder == str(tmp_path / "tensorflow_datasets" / "titled" / "1.0.0")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "none",
            {},
            r"none is not prepared in .*, which has images, .*tfds build none ",
        ),
        ("titled/big", {}, r"titled/big is not prepared in .*, where titled has 1\.0\.0; "),
        ("titled:3.0.0", {}, r"titled:3\.0\.0 is not prepared in .*has 1\.0\.0; name another"),
        ("a b", {}, r"must have the form tfds:NAME\[/CONFIG\]\[:VERSION\]$"),
        ("none", {"tfds_data_dir": "no/dir"}, "in no/dir, which does not exist; name another"),
        ("nested", {}, "text_feature = '': must be one of its text features: head, meta/source$"),
        ("titled", {"text_feature": "body"}, "= 'body': must be one of .* features: text, title$"),
        ("images", {}, "has no text feature; must be a set of texts"),
        ("splits", {"tfds_split": "dev"}, "tfds_split = 'dev': must be of the splits .*test"),
        ("splits", {"tfds_split": "train[:0]"}, r"tfds_split = 'train\[:0\]': has no records"),
    ],
)
def test_errors_are_one_line(data_dir: Path, name: str, fields: dict, message: str) -> None:
    data = DataConfig(f"tfds:{name}", **{"tfds_data_dir": str(data_dir), **fields})
    with pytest.raises(ValueError, match=rf"^data\.source = 'tfds:{name}': .*{message}") as info:
        data.check()
    assert "\n" not in str(info.value)


def test_unfinished_set_is_not_prepared(data_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(data_dir / "titled", tmp_path / "titled")
    (tmp_path / "titled" / "1.0.0").rename(tmp_path / "titled" / "incomplete.A1B2C3_1.0.0")
    with pytest.raises(FileNotFoundError, match=r"titled is not prepared in .*incomplete"):
        find_folder("tfds:titled", str(tmp_path))


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("damage", ["cut", "zeros"])
def test_damaged_shard_ends_the_run(data_dir, tmp_path, file_format, damage) -> None:
    shutil.copytree(data_dir / f"plain_{file_format}", tmp_path / f"plain_{file_format}")
    (shard,) = (tmp_path / f"plain_{file_format}" / "1.0.0").glob("plain*")
    data = shard.read_bytes()
    zeros = bytes(len(data) // 2)
    shard.write_bytes(data[: len(data) // 2] + (zeros if damage == "zeros" else b""))
    with pytest.raises(ValueError, match=r"plain.*-of-00001: breaks off, .*prepare the set again"):
        texts(tmp_path, f"plain_{file_format}")


def test_damaged_length_is_not_allocated(data_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(data_dir / "plain_tfrecord" / "1.0.0", tmp_path / "set")
    (shard,) = folder.glob("plain*")
    damage_length(shard)
    with pytest.raises(Unusable, match="breaks off, within record 0"):
        list(TextSet(folder).read(str(shard), shard))


def test_fewer_records_than_the_metadata_say_are_an_error(data_dir: Path, tmp_path: Path) -> None:
    """A TFRecord file without its last record has no other sign of damage."""
    folder = shutil.copytree(data_dir / "plain_tfrecord" / "1.0.0", tmp_path / "set")
    (shard,) = folder.glob("plain*")
    short = prepare(tmp_path, "short", {"body": TEXT}, {"train": [{"body": "a"}]}, "tfrecord")
    shutil.copy(next(short.glob("short*")), shard)
    with pytest.raises(Unusable, match="breaks off, 1 records, not 5"):
        list(TextSet(folder).read(str(shard), shard))


def test_riegeli_files_have_a_remedy(data_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(data_dir / "titled" / "1.0.0", tmp_path / "set")
    metadata = folder / "dataset_info.json"
    metadata.write_text(metadata.read_text().replace('"array_record"', '"riegeli"'))
    with pytest.raises(ValueError, match="has riegeli files; prepare it with file_format=array_"):
        TextSet(folder)


@pytest.mark.parametrize("is_legacy", [False, True])
def test_metadata_of_a_set_import_no_code(data_dir, tmp_path, monkeypatch, is_legacy) -> None:
    """TFDS would import the module of any feature's class; also in JSON within JSON."""
    folder = shutil.copytree(data_dir / "titled" / "1.0.0", tmp_path / "titled" / "1.0.0")
    (tmp_path / "payload.py").write_text("raise SystemExit('the set ran code')")
    monkeypatch.syspath_prepend(tmp_path)
    features = {"type": "payload.Feature", "content": {}}
    if not is_legacy:
        outer = "tensorflow_datasets.core.features.sequence_feature.Sequence"
        content = {"json": json.dumps({"feature": features, "length": None})}
        features = {"pythonClassName": outer, "jsonFeature": content}
    (folder / "features.json").write_text(json.dumps(features))
    for open_set in (lambda: TextSet(folder), lambda: find_folder("tfds:titled", str(tmp_path))):
        with pytest.raises(ValueError, match=r"read .*feature class 'payload\.Feature': must be a"):
            open_set()
    assert "payload" not in sys.modules


def test_folder_of_a_source_is_searched_once(data_dir: Path, monkeypatch) -> None:
    source, searches = TfdsSource("tfds:titled", str(data_dir)), []

    def find(*arguments: str) -> str:
        searches.append(arguments)
        return find_folder(*arguments)

    monkeypatch.setattr(tfds_sets, "find_folder", find)
    assert not built.is_built(source) and source.open().shards
    assert len(searches) == 1


def test_launch_check_names_a_set_that_is_not_prepared(data_dir: Path) -> None:
    config = folder_config.get_config()
    config.data.source, config.data.tfds_data_dir = "tfds:none", str(data_dir)
    config.data.validation = ""
    lines = [line for line in check.check(config).mistakes if "none" in line]
    assert len(lines) == 1 and lines[0].startswith("data.source = 'tfds:none': none is not prep")


NO_TENSORFLOW = """
import sys
from spell_jax.data.tfds_sets import TfdsSource
text_set = TfdsSource(sys.argv[1], sys.argv[2]).open()
(shard,) = text_set.shards
assert len(list(text_set.read(shard, shard))) == 5
assert "tensorflow" not in sys.modules, "tensorflow was imported"
"""


@pytest.mark.slow
def test_tensorflow_is_not_imported(data_dir: Path) -> None:
    command = [sys.executable, "-c", NO_TENSORFLOW, "tfds:plain_tfrecord", str(data_dir)]
    subprocess.run(command, check=True)


def test_commands_pass_their_flags(data_dir: Path, tmp_path: Path, monkeypatch) -> None:
    opened: list[TfdsSource] = []

    def open_source(source: TfdsSource, **options: Any) -> Any:
        opened.append(source)
        raise ValueError("opened")

    values = {"form": "gap", "per_set": 1, "sets": 1, "shared_words": 0, "seed": 0}
    values |= {
        "clusters": "tfds:a",
        "tfds_data_dir": "d",
        "text_feature": "t",
        "tfds_split": "train",
    }
    flags = type("Flags", (), {"FLAGS": type("Values", (), values)})
    monkeypatch.setattr(cloze, "flags", flags)
    monkeypatch.setattr(built, "open_source", open_source)
    with pytest.raises(ValueError, match="opened"):
        cloze.main(None)
    assert opened == [TfdsSource("tfds:a", "d", "t", "train")]
