"""Small tensorflow-datasets sets, prepared by TFDS itself in a folder, without the network."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from apache_beam.io.tfrecordio import _TFRecordUtil
from array_record.python.array_record_data_source import ArrayRecordDataSource

Rows = Mapping[str, list[dict[str, Any]]]  # split -> records
TEXT = tfds.features.Text()


def prepare(
    data_dir: Path,
    name: str,
    features: Mapping[str, Any],
    rows: Rows,
    file_format: str = "array_record",
    config: str = "",
    version: str = "1.0.0",
) -> Path:
    """Prepare a set and return its folder; "tfrecord" is written by Beam, without TensorFlow."""
    is_tfrecord = file_format == "tfrecord"
    builder = _make_class(name, features, rows, version, config)(
        data_dir=data_dir, file_format="array_record" if is_tfrecord else file_format
    )
    builder.download_and_prepare()
    folder = Path(builder.data_dir)
    if is_tfrecord:
        _to_tfrecord(folder)
    return folder


def _make_class(
    name: str, features: Mapping[str, Any], rows: Rows, version: str, config: str
) -> Any:
    def info(builder: Any) -> Any:
        return tfds.core.DatasetInfo(
            builder=builder,
            features=tfds.features.FeaturesDict(dict(features)),
            disable_shuffling=True,  # otherwise a hash of the keys orders the records
        )

    def split_generators(builder: Any, download_manager: Any) -> dict[str, Any]:
        return {split: enumerate(records) for split, records in rows.items()}

    configs = [tfds.core.BuilderConfig(name=config, version=version)] if config else []
    return type(
        name.title(),
        (tfds.core.GeneratorBasedBuilder,),
        {
            "name": name,
            # In a package, TFDS would look for files of the class with importlib_resources, which
            # is not installed.
            "__module__": "prepared_sets",
            "VERSION": tfds.core.Version(version),
            "BUILDER_CONFIGS": configs,
            "_info": info,
            "_split_generators": split_generators,
            "_generate_examples": lambda builder: None,
        },
    )


def _to_tfrecord(folder: Path) -> None:
    for shard in sorted(folder.glob("*.array_record-*")):
        target = shard.with_name(shard.name.replace("array_record", "tfrecord"))
        with ArrayRecordDataSource([str(shard)]) as records, target.open("wb") as file:
            for number in range(len(records)):
                _TFRecordUtil.write_record(file, records[number])
        shard.unlink()
    metadata = folder / "dataset_info.json"
    metadata.write_text(metadata.read_text().replace('"array_record"', '"tfrecord"'))


def damage_length(shard: Path) -> None:
    """Give the first record of a TFRecord file a length of 2^60 bytes."""
    data = shard.read_bytes()
    shard.write_bytes(struct.pack("<Q", 1 << 60) + data[8:])
