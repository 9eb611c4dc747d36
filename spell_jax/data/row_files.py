"""Files of rows: Parquet, JSON, JSON lines and CSV, each plain or compressed (.gz, .zst).

A row of a table is an object from column to value. Columns are found by name, so their order does
not count, and a file may have more of them. Parquet files of the Hugging Face hub store a class as
a number and the names of the classes in their schema; here such a column has the names.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, cast

_TEXTS, _COMPRESSIONS = (".jsonl", ".json", ".csv"), ("", ".gz", ".zst")


class Kind(NamedTuple):
    """Format and compression of a file, as suffixes; the compression may be empty."""

    format: str
    compression: str = ""


# Suffix of a name -> kind of the file. Parquet files are compressed inside.
KINDS = {".parquet": Kind(".parquet")}
KINDS |= {text + packed: Kind(text, packed) for text in _TEXTS for packed in _COMPRESSIONS}

_CHARACTERS = 2**20  # read at a time from a JSON list
_BATCH = 64  # rows of a Parquet file in memory at a time; a row may have megabytes
_SEPARATOR = re.compile(r"[ \t\n\r]*([,\]])[ \t\n\r]*")


def kind_of(name: str) -> Kind | None:
    """Kind of a file by its name, in any case; None if its suffix is not one of `KINDS`."""
    return next((kind for end, kind in KINDS.items() if name.lower().endswith(end)), None)


def read(file: BinaryIO, kind: Kind, delimiter: str = ",") -> Iterator[Any]:
    """Iterate over the rows of an open file, in order.

    A .json file may hold a list of rows, one row, or JSON lines in spite of its name. A list is
    read piece by piece. The first rows of an incomplete file can therefore be read. A row of JSON
    may be any JSON value.

    Raises ValueError or OSError if the file is damaged, RecursionError if JSON is too deep.
    """
    try:
        with _uncompressed(file, kind.compression) as plain:
            if kind.format == ".parquet":
                yield from _parquet(plain)
            elif kind.format == ".csv":
                text = io.TextIOWrapper(plain, encoding="utf-8-sig", newline="")
                # Blanks before a quoted field are not part of it.
                yield from csv.DictReader(text, delimiter=delimiter, skipinitialspace=True)
            elif kind.format == ".jsonl":
                yield from (json.loads(line.decode("utf-8-sig")) for line in plain if line.strip())
            else:
                yield from _json(io.TextIOWrapper(plain, encoding="utf-8-sig"))
    except (csv.Error, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from error


def _uncompressed(file: BinaryIO, compression: str) -> contextlib.AbstractContextManager[BinaryIO]:
    if compression == ".gz":
        return cast(contextlib.AbstractContextManager[BinaryIO], gzip.GzipFile(fileobj=file))
    if compression == ".zst":
        import pyarrow  # here, because the other formats of text do not need it

        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
        return contextlib.nullcontext(cast(BinaryIO, io.BufferedReader(cast(Any, stream))))
    return contextlib.nullcontext(file)


def _parquet(file: BinaryIO) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as table:
        classes = _class_names(table.schema_arrow.metadata or {})
        for batch in table.iter_batches(_BATCH):
            for row in batch.to_pylist():
                for column, names in classes.items():
                    row[column] = _class_name(row.get(column), names)
                yield row


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """Column -> names of its classes, from the metadata that the library `datasets` writes."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        kinds = {c: f for c, f in features.items() if f.get("_type") == "ClassLabel"}
        return {column: list(feature["names"]) for column, feature in kinds.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _class_name(value: Any, names: list[str]) -> Any:
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


def _json(file: io.TextIOBase) -> Iterator[Any]:
    text = ""
    while not text and (more := file.read(_CHARACTERS)):
        text = more.lstrip()
    if text.startswith("["):
        yield from _elements(file, text)
    else:
        yield from json_values(text + file.read())


def _elements(file: io.TextIOBase, text: str) -> Iterator[Any]:
    """Elements of a JSON list that begins with `text`; the rest is read from the file."""
    while not text[1:].strip() and (more := file.read(_CHARACTERS)):
        text += more
    text = text[1:].lstrip()
    decode, is_last = json.JSONDecoder().raw_decode, text.startswith("]")
    at = int(is_last)
    while not is_last:
        try:
            value, end = decode(text, at)
            if (separator := _SEPARATOR.match(text, end)) is None:
                raise json.JSONDecodeError("',' or ']' expected", text, end)
        except json.JSONDecodeError as error:
            # The element may go on. Doubling the text keeps the time linear in its length.
            if not (more := file.read(max(_CHARACTERS, len(text)))):
                raise ValueError(f"no JSON, or it breaks off ({error.msg})") from error
            text, at = (text[at:] + more).lstrip(), 0
            continue
        yield value
        at, is_last = separator.end(), separator[1] == "]"
    if text[at:].strip() or file.read().strip():
        raise ValueError("no JSON: more text behind its list")


def json_values(content: str) -> list[Any]:
    """Parse one JSON value or JSON lines; ValueError names the first line that is not JSON."""
    try:
        return [json.loads(content)]
    except json.JSONDecodeError:
        values = []
        for number, line in enumerate(content.split("\n"), 1):
            try:
                values += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
        return values
