"""Files of rows: Parquet, JSON, JSON lines and CSV, each plain or compressed (.gz, .zst).

A row of a table is an object from column to value. Columns are found by name, so their order does
not count, and a file may have further columns. Parquet files of the Hugging Face hub store a class
as a number, and the names of the classes in their schema. Here such a column has the names.
"""

from __future__ import annotations

import csv
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from spell_jax.runtime.files.jsonl import (
    LONGEST_LINE,
    JsonLine,
    bounded_lines,
    json_lines,
    uncompressed,
)

_TEXTS, _COMPRESSIONS = (".jsonl", ".json", ".csv"), ("", ".gz", ".zst")


class FileKind(NamedTuple):
    """Format and compression of a file, as suffixes; the compression may be empty."""

    format: str
    compression: str = ""


# Suffix of a name -> kind of the file. Parquet files are compressed inside.
KINDS = {".parquet": FileKind(".parquet")}
KINDS |= {text + packed: FileKind(text, packed) for text in _TEXTS for packed in _COMPRESSIONS}

# Limits, because a small compressed file can hold any amount of text: bytes of an unpacked file,
# and characters of a JSON value that is no list, or of an element of a list.
LARGEST, _LARGEST_VALUE = 1 << 32, 1 << 26  # 64 MiB of "[]," become 1.6 GB of lists
_CHARACTERS = 2**20  # read at a time from a JSON list
_BATCH = 64  # rows of a Parquet file in memory at a time; a row may have megabytes
_BATCH_BYTES = 1 << 28  # most bytes of a batch, if each row has the longest value of its column
# A kilobyte can hold a row with a list of 10**9 nulls. So the elements of lists have limits: in a
# column chunk, as it is unpacked, and in a batch, where an element takes 8 to 40 bytes.
_CHUNK_ELEMENTS, _BATCH_ELEMENTS = 1 << 28, 1 << 24
_SEPARATOR = re.compile(r"[ \t\n\r]*([,\]])[ \t\n\r]*")


def kind_of(name: str) -> FileKind | None:
    """Return a file's kind by its name, ignoring case; None if the suffix is not in `KINDS`."""
    return next((kind for end, kind in KINDS.items() if name.lower().endswith(end)), None)


def read(
    file: BinaryIO, kind: FileKind, delimiter: str = ",", largest: int = LARGEST
) -> Iterator[Any]:
    """Iterate over the rows of an open file, in order.

    A .json file may hold a list of rows, one row, or JSON lines in spite of its name. A list is
    read piece by piece, so an incomplete file yields its first rows. A row of JSON may be any JSON
    value.

    Raises ValueError or OSError if the file is damaged, the text has more than `largest` bytes (see
    jsonl.bounded_lines), or a line has more than LONGEST_LINE bytes. Raises RecursionError if a
    JSON list is too deep.
    """
    try:
        plain = uncompressed(file, kind.compression)
        if kind.format == ".parquet":
            yield from parquet_rows(plain)
        elif kind.format == ".csv":
            text = io.TextIOWrapper(plain, encoding="utf-8-sig", newline="")
            # skipinitialspace: blanks before a quoted field are not part of the field.
            lines = _all_lines(text, largest)
            yield from csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True)
        elif kind.format == ".jsonl":
            yield from _values(json_lines(plain, LONGEST_LINE, largest))
        else:
            yield from _json_rows(io.TextIOWrapper(plain, encoding="utf-8-sig"), largest)
    except (csv.Error, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from error


def _all_lines(text: io.TextIOBase, largest: int) -> Iterator[str]:
    for number, line in enumerate(bounded_lines(text, LONGEST_LINE, largest), 1):
        if line is None:
            raise ValueError(f"line {number}: longer than {LONGEST_LINE} bytes")
        yield line


def _values(lines: Iterable[JsonLine]) -> Iterator[Any]:
    for line in lines:
        if line.problem:
            raise ValueError(f"line {line.number}: {line.problem}")
        yield line.value


def parquet_rows(
    file: BinaryIO, columns: Sequence[str] | None = None, groups: Sequence[int] | None = None
) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of a Parquet file, or of some columns and row groups; few at a time."""
    import pyarrow.parquet as pq  # here, because most runs read no Parquet file

    with pq.ParquetFile(file) as table:
        # From the metadata, before a chunk is unpacked into memory.
        _check_chunks(table.metadata, columns)
        classes = _class_names(table.schema_arrow.metadata or {})
        size = rows_at_a_time(table.metadata, _BATCH, _BATCH_BYTES)
        for batch in table.iter_batches(size, row_groups=groups, columns=columns):
            if (count := sum(map(_count_elements, batch.columns))) > _BATCH_ELEMENTS:
                raise ValueError(f"{len(batch)} rows with lists of {count} elements")
            for row in batch.to_pylist():
                for column in classes.keys() & row.keys():
                    row[column] = _class_name(row[column], classes[column])
                yield row


def _check_chunks(metadata: Any, columns: Sequence[str] | None) -> None:
    """Raise ValueError if a chunk of `columns` (None: all) has more than _CHUNK_ELEMENTS values."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for chunk in map(group.column, range(group.num_columns)):
            if columns is not None and chunk.path_in_schema.partition(".")[0] not in columns:
                continue
            # A column without lists has one value per row, however many rows there are.
            if chunk.num_values - group.num_rows > _CHUNK_ELEMENTS:
                raise ValueError(
                    f"row group {number}: column {chunk.path_in_schema} has lists of "
                    f"{chunk.num_values} elements together; must be at most {_CHUNK_ELEMENTS}"
                )


def _count_elements(column: Any) -> int:
    """Count the elements of all lists in an Arrow array, nested lists too."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_struct(kind):
        return sum(map(_count_elements, column.flatten()))
    if not pa.types.is_nested(kind):
        return 0
    values = column.flatten()
    return len(values) + _count_elements(values)


def rows_at_a_time(metadata: Any, limit: int, size: int) -> int:
    """Return how many rows of a Parquet file, 1 to `limit`, fit into `size` bytes at worst."""
    # Every row may refer to one long value of its chunk's dictionary, so a row can be as large as
    # the whole chunk.
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    sizes = [chunk.total_uncompressed_size for chunk in chunks if chunk.has_dictionary_page]
    return max(1, min(limit, size // max(sizes, default=1)))


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """Map a column to the names of its classes, from the metadata of the library `datasets`."""
    # The metadata only improve a row: without them, or with others, a class stays a number.
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        kinds = {c: f for c, f in features.items() if f.get("_type") == "ClassLabel"}
        return {column: list(feature["names"]) for column, feature in kinds.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _class_name(value: Any, names: list[str]) -> Any:
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


def _json_rows(file: io.TextIOBase, largest: int) -> Iterator[Any]:
    # The first character that is no white space tells a list from a value or lines.
    text, limit = "", min(largest, _LARGEST_VALUE)
    # White space of any length may stand before the list.
    while not text and (part := file.read(_CHARACTERS)):
        text = part.lstrip()
    if text.startswith("["):
        yield from _elements(file, text)
    else:
        text += file.read(limit)
        if len(text) > limit:
            raise ValueError(f"a JSON value of more than {limit} characters")
        yield from json_values(text)


def _elements(file: io.TextIOBase, text: str) -> Iterator[Any]:
    """Yield the elements of a JSON list that begins with `text` and goes on in the file."""
    while not text[1:].strip() and (part := file.read(_CHARACTERS)):
        text = text[:1] + part
    text = text[1:].lstrip()
    decode, is_last = json.JSONDecoder().raw_decode, text.startswith("]")
    at = int(is_last)
    while not is_last:
        try:
            value, end = decode(text, at)
            if (separator := _SEPARATOR.match(text, end)) is None:
                raise json.JSONDecodeError("',' or ']' expected", text, end)
        except json.JSONDecodeError as error:
            if len(text) - at > _LARGEST_VALUE:
                raise ValueError(f"an element of more than {_LARGEST_VALUE} characters") from error
            # The element may go on. Doubling the text keeps the time linear in its length.
            if not (part := file.read(max(_CHARACTERS, len(text)))):
                raise ValueError(f"no JSON, or it breaks off ({error.msg})") from error
            text, at = (text[at:] + part).lstrip(), 0
            continue
        yield value
        at, is_last = separator.end(), separator[1] == "]"
    text = text[at:]
    while not text.strip() and (part := file.read(_CHARACTERS)):
        text = part
    if text.strip():
        raise ValueError("no JSON: more text behind its list")


def json_values(content: str) -> list[Any]:
    """Parse one JSON value or JSON lines; ValueError names the first line that is not JSON."""
    try:
        return [json.loads(content)]
    except json.JSONDecodeError:
        return list(_values(json_lines(io.StringIO(content, newline="\n"), len(content))))
