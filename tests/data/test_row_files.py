"""Tests of the reader of rows: formats, compressions, classes by name, incomplete files."""

from __future__ import annotations

import gzip
import io
import itertools
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spell_jax.data import row_files
from spell_jax.data.row_files import KINDS, FileKind

ROWS = [{"text": "one, two", "n": 1}, {"text": 'said "ü"\nand left', "n": 2}]


def encode(kind: FileKind) -> bytes:
    if kind.format == ".parquet":
        file = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(ROWS), file)
        return file.getvalue()
    if kind.format == ".csv":
        data = '\ufefftext,n\r\n"one, two",1\r\n "said ""ü""\nand left",2\r\n'.encode()
    elif kind.format == ".jsonl":
        data = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()
    else:
        data = json.dumps(ROWS, indent=1).encode("utf-8-sig")
    if kind.compression == ".zst":
        return pa.compress(data, "zstd", asbytes=True)
    return gzip.compress(data) if kind.compression else data


def read(data: bytes, kind: FileKind) -> list[Any]:
    return list(row_files.read(io.BytesIO(data), kind))


@pytest.mark.parametrize("suffix", KINDS)
def test_every_format_and_compression_gives_the_same_rows(suffix: str):
    kind = row_files.kind_of(f"A.B{suffix.upper()}")
    assert kind == KINDS[suffix]
    rows = read(encode(kind), kind)
    expected_rows = [row | {"n": str(row["n"])} for row in ROWS] if kind.format == ".csv" else ROWS
    assert rows == expected_rows


def test_files_of_other_formats_are_unknown():
    assert [row_files.kind_of(name) for name in ("a.txt", "json", "a.parquet.gz", "a.gz")] == [
        None
    ] * 4


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_json_list_is_read_in_pieces_of_any_size(size: int, monkeypatch):
    monkeypatch.setattr(row_files, "_CHARACTERS", size)
    values = [1, 23.5, "a]", [], [2, "[,"], {"a": [{"b": "]"}]}, None, True, -1e3]
    for text in (json.dumps(values), json.dumps(values, indent=2), json.dumps([]), " [ ] "):
        assert read(text.encode(), KINDS[".json"]) == json.loads(text)


def test_json_file_may_hold_one_row_or_json_lines():
    assert read(b'{"a": 1}\n', KINDS[".json"]) == [{"a": 1}]
    assert read(b'{"a": 1}\n{"a": 2}', KINDS[".json"]) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("suffix", [suffix for suffix in KINDS if "json" in suffix])
def test_first_rows_of_an_incomplete_file_are_read(suffix: str, monkeypatch):
    monkeypatch.setattr(row_files, "_CHARACTERS", 16)
    kind = KINDS[suffix]
    data = encode(kind)
    if not kind.compression:
        data = data[:-5]
    elif kind.compression == ".gz":
        data = data[:-9]
    rows = row_files.read(io.BytesIO(data), kind)
    assert list(itertools.islice(rows, 1)) == ROWS[:1]


@pytest.mark.parametrize(
    ("suffix", "data", "message"),
    [
        (".json", b'[{"a": 1}, {"a"', "breaks off"),
        (".json", b'[{"a": 1},]', "breaks off"),
        (".json", b"[1 2]", "',' or ']' expected"),
        (".json", b"[1]]", "more text behind its list"),
        (".json", b"[ ]]", "more text behind its list"),
        (".json", b"[1] 2", "more text behind its list"),
        (".json", b'{"a": 1}\n{"a"', "line 2"),
        (".jsonl", b'{"a": 1}\n{"a"', "delimiter"),
        (".jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-12], "ended before"),
        (".jsonl.gz", b"{}", "gzip"),
        (".parquet", b"PAR1 but no more", "Parquet"),
        (".json", b"[\xff]", "utf-8"),
    ],
)
def test_damaged_files_are_value_or_os_errors(suffix: str, data: bytes, message: str):
    with pytest.raises((ValueError, OSError), match=message):
        read(data, KINDS[suffix])


def test_classes_have_their_names():
    """As in the Parquet files that the library `datasets` writes."""
    features = {
        "text": {"dtype": "string", "_type": "Value"},
        "label": {"names": ["bad", "good"], "_type": "ClassLabel"},
    }
    table = pa.table({"text": ["a", "b", "c"], "label": [1, 0, None]})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    for table_metadata, labels in (
        (metadata, ["good", "bad", None]),
        ({"huggingface": "{}"}, [1, 0, None]),
    ):
        file = io.BytesIO()
        pq.write_table(table.replace_schema_metadata(table_metadata), file)
        assert [row["label"] for row in read(file.getvalue(), KINDS[".parquet"])] == labels


@pytest.mark.parametrize("suffix", [suffix for suffix in KINDS if suffix != ".parquet"])
def test_long_line_or_value_is_an_error_with_its_place(suffix: str, monkeypatch):
    kind = KINDS[suffix]
    data = encode(kind)
    monkeypatch.setattr(row_files, "LONGEST_LINE", 10)
    monkeypatch.setattr(row_files, "_LARGEST_VALUE", 20)
    monkeypatch.setattr(row_files, "_CHARACTERS", 4)
    place = "an element of more than 20" if kind.format == ".json" else "line [12]: longer than 10"
    with pytest.raises(ValueError, match=place):
        read(data, kind)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".csv.gz"])
def test_file_that_unpacks_to_too_much_is_an_error(suffix: str):
    kind = KINDS[suffix]
    with pytest.raises(ValueError, match="the lines up to here have more than 40 bytes"):
        list(row_files.read(io.BytesIO(encode(kind)), kind, largest=40))


@pytest.mark.parametrize("line", [b"\n", b"{}\n"])
def test_many_short_lines_are_an_error(line: bytes):
    rows = row_files.read(io.BytesIO(line * 5000), KINDS[".jsonl"], largest=1 << 20)
    with pytest.raises(ValueError, match="line 4097: the lines up to here have more than 1048576"):
        list(rows)


def test_blanks_within_a_list_take_no_memory(monkeypatch):
    monkeypatch.setattr(row_files, "_CHARACTERS", 16)
    monkeypatch.setattr(row_files, "_LARGEST_VALUE", 20)
    blanks = b" " * 5000
    data = blanks + b"[" + blanks + b"1," + blanks + b"2]" + blanks
    assert read(data, KINDS[".json"]) == [1, 2]


def test_rows_of_a_dictionary_are_read_a_few_at_a_time():
    file = io.BytesIO()
    pq.write_table(pa.table({"text": ["a" * 1000, "b" * 1000] * 50}), file)
    metadata = pq.read_metadata(file)
    assert row_files.rows_at_a_time(metadata, 64, 1 << 20) == 64
    assert row_files.rows_at_a_time(metadata, 64, 10_000) in (2, 3, 4)
    assert row_files.rows_at_a_time(metadata, 64, 1) == 1


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_row_with_a_huge_list_is_named(is_nested, monkeypatch):
    monkeypatch.setattr(row_files, "_BATCH_ELEMENTS", 1000)
    ends = pa.array([0, 3, 1001], pa.int32())
    lists = pa.ListArray.from_arrays(ends, pa.nulls(1001, pa.int8()))
    column = pa.StructArray.from_arrays([lists], ["x"]) if is_nested else lists
    file = io.BytesIO()
    pq.write_table(pa.table({"text": ["a", "b"], "column": column}), file)
    with pytest.raises(ValueError, match="2 rows with lists of 1001 elements"):
        read(file.getvalue(), KINDS[".parquet"])
    monkeypatch.setattr(row_files, "_BATCH_ELEMENTS", 1001)
    assert len(read(file.getvalue(), KINDS[".parquet"])) == 2
    monkeypatch.setattr(row_files, "_CHUNK_ELEMENTS", 998)
    with pytest.raises(ValueError, match=r"row group 0: column column.* lists of 1001 elements"):
        read(file.getvalue(), KINDS[".parquet"])
