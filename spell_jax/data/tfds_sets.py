"""Prepared tensorflow-datasets sets: their folders, and the texts of their records.

1. `tfds:NAME[/CONFIG][:VERSION]` names a set that TFDS has prepared in a data directory, local or
   gs://. Only its files are read: nothing is downloaded from the set's publisher, no code of other
   packages is imported, and TensorFlow is not needed.
2. A split of a set is a list of shards: files of ArrayRecord, Parquet or TFRecord with one
   tf.Example per record. A shard in a bucket is copied before it is read (runtime/files/remote.py).
3. A document is the text feature of a record. It begins with the record's title, as the documents
   of published questions do (question_sets/published.py), if the set has a feature "title".
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags
from etils import epath

from spell_jax.data import row_files
from spell_jax.data.text_files import Unusable
from spell_jax.runtime.files import paths

PREFIX = "tfds:"
FORM = "tfds:NAME[/CONFIG][:VERSION]"
TEXT, TITLE = "text", "title"  # names of features
FLAGS = {  # name -> meaning; fields of the section data
    "tfds_data_dir": "Directory of prepared sets, for tfds:NAME; empty: TFDS_DATA_DIR.",
    "text_feature": "Feature with the text of a document; empty: text, or the only one.",
    "tfds_split": "Splits of the set, such as train+test; empty: all.",
}
_NAME = re.compile(r"tfds:(?P<name>\w+)(/(?P<config>[\w.-]+))?(:[\d*]+(\.[\d*]+){2})?")
_NAMED = 10  # sets, configs or features that an error lists
_FRAME = struct.Struct("<QI")  # head of a TFRecord: length of the record, checksum of the length
_CHECKSUM = 4  # bytes after the record


@dataclass(frozen=True)
class TfdsSource:
    """Name of a prepared set, and which of its texts are read.

    Attributes:
      name: `tfds:NAME[/CONFIG][:VERSION]`; without a version, the newest one.
      data_dir: directory of prepared sets; "" for the environment's TFDS_DATA_DIR, else
        ~/tensorflow_datasets.
      text_feature: feature of a document's text, "a/b" for a feature b in a; "" for "text" or the
        set's only text.
      split: splits and slices in TFDS's notation, "train[:10%]+test"; "" for all splits.
    """

    name: str
    data_dir: str = ""
    text_feature: str = ""
    split: str = ""

    def __str__(self) -> str:
        return self.name

    # A search lists the folders of the set, in a bucket with several requests.
    @functools.cached_property
    def folder(self) -> str:
        """Folder of the set, searched once; errors as in find_folder."""
        return find_folder(self.name, self.data_dir)

    def open(self) -> TextSet:
        """Open the set; errors as in find_folder and TextSet."""
        return TextSet(self.folder, self.text_feature, self.split)


class TextSet:
    """Texts of a prepared set. `shards` maps the path of a file to the records that are read."""

    def __init__(self, folder: str | Path, text_feature: str = "", split: str = ""):
        """Read the metadata of the set in `folder`.

        ValueError if the set has no such text feature or split, or another file format;
        ImportError without tensorflow_datasets.
        """
        with open_builder(folder) as builder:
            info = builder.info
        texts = list(_text_features(info.features))
        self._text = _choose_text(texts, text_feature)
        self._title = TITLE if TITLE in texts and self._text != TITLE else ""
        # Metadata of old sets name no format, and such sets are TFRecords.
        self._format = info.file_format.file_suffix if info.file_format else "tfrecord"
        if self._format not in _READERS:
            raise ValueError(
                f"{folder}: has {self._format} files; prepare it with file_format=array_record"
            )
        self.shards: dict[str, list[range]] = {}
        for part in [split] if split else list(info.splits):
            for file in _file_instructions(info.splits, part):
                records = range(file.skip, file.skip + file.take)
                self.shards.setdefault(os.fspath(file.filename), []).append(records)
        if not self.shards:
            raise ValueError(f"tfds_split = {split!r}: has no records in {folder}")

    def read(self, shard: str, file: str | Path) -> Iterator[tuple[int, bytes]]:
        """Yield (number in the shard, UTF-8 text) of a shard's records, from a local copy of it.

        A record without text gives b"". Unusable if the file is damaged or records are missing.
        """
        for records in self.shards[shard]:
            number = records.start
            try:
                examples = _READERS[self._format](Path(file))
                for example in itertools.islice(examples, records.start, records.stop):
                    yield number, self._document(example)
                    number += 1
            except Unusable:
                raise
            except Exception as error:  # array_record, Arrow and protobuf have errors of their own
                reason = f"record {number}: {type(error).__name__}: {_one_line(error)}"
                raise Unusable("breaks off", reason) from error
            if number < records.stop:
                raise Unusable("breaks off", f"{number} records, not {records.stop}")

    def _document(self, example: bytes | memoryview) -> bytes:
        from tensorflow_datasets.proto import tf_example_pb2

        # Only texts are decoded: images and sounds of a record would need further packages.
        protos: Any = tf_example_pb2
        values: Mapping[str, Any] = protos.Example.FromString(example).features.feature
        text, title = (
            b"".join(values[name].bytes_list.value[:1]) if name in values else b""
            for name in (self._text, self._title)
        )
        return title.strip() + b"\n" + text if text.strip() and title.strip() else text


def is_tfds(source: object) -> bool:
    """Return whether a source is, or names, a tensorflow-datasets set."""
    return isinstance(source, TfdsSource) or str(source).startswith(PREFIX)


def find_folder(name: str, data_dir: str = "") -> str:
    """Return the folder of a prepared set, NAME/CONFIG/VERSION in a data directory.

    ValueError if `name` has another form than FORM, FileNotFoundError if the set is not prepared,
    ImportError without tensorflow_datasets, or if gs:// needs gcsfs.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise ValueError(f"must have the form {FORM}")
    place = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    place = os.path.expanduser(place)
    paths.prepare(place)
    with _one_line_errors(place):
        from tensorflow_datasets.core import read_only_builder, registered

        _refuse_foreign_classes()
        try:
            builder: Any = read_only_builder.builder_from_files(
                name.removeprefix(PREFIX), data_dir=place
            )
        except registered.DatasetNotFoundError as error:
            raise FileNotFoundError(_describe_missing(match, place)) from error
    return os.fspath(builder.data_dir)


@contextlib.contextmanager
def open_builder(folder: str | Path) -> Iterator[Any]:
    """Yield TFDS's builder of a prepared set; errors of TFDS become one line with the folder.

    ImportError if a package is missing, FileNotFoundError unchanged, ValueError for other errors,
    such as a feature of another package's class.
    """
    with _one_line_errors(folder):
        import tensorflow_datasets as tfds  # slow to import, rarely needed

        _refuse_foreign_classes()
        yield tfds.builder_from_directory(folder)


@functools.cache
def _refuse_foreign_classes() -> None:
    """Make TFDS refuse sets with features of other packages' classes, in the whole process."""
    # The metadata of a set name the class of each feature, also in JSON within JSON, and TFDS
    # imports the module of any class: then data would run code. All names pass this function.
    from tensorflow_datasets.core.features import feature

    connector: Any = feature.FeatureConnector
    find_class = connector.cls_from_name

    def find_own_class(cls: Any, class_name: str) -> Any:
        if not class_name.startswith("tensorflow_datasets."):
            raise ValueError(
                f"feature class {class_name[:100]!r}: must be a class of tensorflow_datasets"
            )
        return find_class(class_name)

    connector.cls_from_name = classmethod(find_own_class)


@contextlib.contextmanager
def _one_line_errors(place: str | Path) -> Iterator[None]:
    """Turn errors of TFDS into one line with the folder or directory that is read."""
    try:
        yield
    except FileNotFoundError:
        raise
    except ImportError as error:
        # Where a file may not be read, TFDS looks for TensorFlow's error of that kind.
        if isinstance(error.__context__, OSError):
            raise ValueError(f"{place}: cannot be read ({error.__context__})") from error
        raise ImportError(
            f"{place}: cannot be read ({error}); pip install 'spell_jax[tfds]'"
        ) from error
    except Exception as error:
        raise ValueError(f"{place}: cannot be read ({_one_line(error)})") from error


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Define the flags FLAGS of a command that takes data.source in a flag of its own."""
    for name, meaning in FLAGS.items():
        flags.DEFINE_string(name, "", meaning, flag_values=flag_values)


def read_flags(flag_values: Any) -> dict[str, Any]:
    """Return the values of the flags FLAGS, which are fields of the section data."""
    return {name: getattr(flag_values, name) for name in FLAGS}


def _describe_missing(match: re.Match[str], place: str) -> str:
    name, root = match["name"], epath.Path(place)
    if (root / name).is_dir():  # then its folders are configs or versions
        content = f"where {name} has {_list_folder(root / name)}"
    elif root.is_dir():
        content = f"which has {_list_folder(root)}"
    else:
        content = "which does not exist"
    return (
        f"{match[0].removeprefix(PREFIX)} is not prepared in {place}, {content}; name another "
        f"tfds_data_dir, or prepare it with `tfds build {name} --data_dir={place}`, where there is "
        "internet"
    )


def _list_folder(folder: epath.Path) -> str:
    # TFDS keeps the files that it has downloaded beside the sets.
    names = sorted(path.name for path in folder.iterdir() if path.name != "downloads")
    return _list_names(names) or "no set"


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + ", ..." * (len(names) > _NAMED)


def _text_features(features: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names of the features with one text per record, "a/b" for a feature b in a."""
    import numpy as np
    import tensorflow_datasets as tfds

    if not isinstance(features, tfds.features.FeaturesDict):
        return
    feature: Any  # which is not a tree of features where its shape is ()
    for name, feature in sorted(features.items()):
        if isinstance(feature, tfds.features.FeaturesDict):
            yield from _text_features(feature, f"{prefix}{name}/")
        # Kinds O, S and U: objects of TFDS are texts.
        elif feature.shape == () and np.dtype(feature.np_dtype).kind in "OSU":
            yield prefix + name


def _choose_text(texts: Sequence[str], text_feature: str) -> str:
    if not texts:
        raise ValueError("has no text feature; must be a set of texts")
    only_text = texts[0] if len(texts) == 1 else ""
    name = text_feature or (TEXT if TEXT in texts else only_text)
    if name not in texts:
        raise ValueError(
            f"text_feature = {text_feature!r}: must be one of its text features: "
            f"{_list_names(texts)}"
        )
    return name


def _file_instructions(splits: Any, split: str) -> list[Any]:
    try:
        return splits[split].file_instructions
    except Exception as error:  # TFDS raises errors of several types for a wrong split
        raise ValueError(
            f"tfds_split = {split!r}: must be of the splits {', '.join(splits)} "
            f"({_one_line(error)})"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# ---------------------------------------------------------------------------------------- Formats


def _read_array_records(path: Path) -> Iterator[bytes]:
    from array_record.python import array_record_data_source

    with array_record_data_source.ArrayRecordDataSource([os.fspath(path)]) as source:
        for number in range(len(source)):
            yield source[number]


def _read_parquet_records(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        # As TFDS names the column.
        yield from (row["data"] for row in row_files.parquet_rows(file, ["data"]))


def _read_tf_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a TFRecord file; Unusable if it ends within a record."""
    # The checksums are not verified: no package of this project computes CRC-32C, and in Python
    # alone it would be slower than the parser of the records.
    size, number = path.stat().st_size, 0
    with path.open("rb") as file:
        while head := file.read(_FRAME.size):
            length = _FRAME.unpack(head)[0] if len(head) == _FRAME.size else size
            # Before reading, because a damaged length may be larger than the memory.
            if file.tell() + length + _CHECKSUM > size:
                raise Unusable("breaks off", f"within record {number}")
            yield file.read(length)
            file.seek(_CHECKSUM, os.SEEK_CUR)
            number += 1


_READERS = {
    "array_record": _read_array_records,
    "parquet": _read_parquet_records,
    "tfrecord": _read_tf_records,
}
