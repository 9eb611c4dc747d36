"""Tests of JSON on disk: reading, skipping with line numbers, atomic writing."""

from __future__ import annotations

import gzip
import io
import logging
import os
import pathlib
import threading

import pyarrow as pa
import pytest

from spell_jax.runtime.files import jsonl
from spell_jax.runtime.files.jsonl import (
    read_json,
    read_records,
    require_records,
    write_json,
    write_records,
)
from tests import bombs


def whole_number(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError("must be a whole number")
    return value


def pack(path: pathlib.Path, content: bytes) -> None:
    """Write bytes, compressed as the name says."""
    kind = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    with pa.output_stream(path, compression=kind) as file:
        file.write(content)


def test_invalid_lines_are_logged_and_empty_lines_ignored(tmp_path, caplog):
    path = tmp_path / "numbers.jsonl"
    lines = [b"\xef\xbb\xbf1", b"", b'"two"', b"\xff", b" 3\r", b"[" * 100_000, b"\t", b"4"]
    path.write_bytes(b"\n".join(lines))
    with caplog.at_level(logging.WARNING):
        assert read_records(path, whole_number) == ([1, 3, 4], 3)
    messages = [record.getMessage().split(" (")[0] for record in caplog.records]
    assert messages == [f"{path}:{number}: skipped" for number in (3, 4, 6)]


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_rows_of_a_list_are_read_like_lines(tmp_path, caplog, compression):
    path = tmp_path / f"rows.json{compression}"
    for content in (b'\xef\xbb\xbf [1,\n"two", 3]', b'1\n"two"\n3\n'):
        pack(path, content)
        assert read_records(path, whole_number) == ([1, 3], 1)
    assert f"{path}, row 1: skipped (must be a whole number)" in caplog.text
    assert f"{path}:2: skipped (must be a whole number)" in caplog.text
    pack(path, b"[1, 2")
    with pytest.raises(ValueError, match=r"rows\.json.*: damaged \("):
        read_records(path, whole_number)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst", "rows.json.zst"])
def test_rest_of_a_damaged_compressed_file_is_a_bad_line(tmp_path, caplog, name):
    path = tmp_path / name
    pack(path, b"1\n" * 1000)
    path.write_bytes(path.read_bytes()[:-5])
    records, skipped = read_records(path, whole_number)
    assert set(records) <= {1} and skipped == 1
    assert f"{path}:{len(records) + 1}: skipped from here on" in caplog.text


def test_only_line_feeds_end_a_line(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('"a\u2028b"\n"c\x85d"', encoding="utf-8")
    assert read_records(path, str) == (["a\u2028b", "c\x85d"], 0)


def test_a_value_of_another_type_is_named_with_its_file(tmp_path):
    path = tmp_path / "config.json"
    for content, message in (
        ("[]", "must be a JSON dict, is a list"),
        ("null", "must be a JSON dict, is a NoneType"),
        ("{", "damaged"),
        ("", "damaged"),
        ("[" * 100_000, "damaged"),
        ("\0" * 10, "damaged"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=f"config.json: {message}"):
            read_json(path)
    path.write_text('["a"]')
    assert read_json(path, list) == ["a"]


def test_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})

    def records():
        yield {"b": 2}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_records(path, records())
    assert path.read_text() == '{\n "a": 1\n}\n'


def test_writing_keeps_symlinks_and_named_pipes(tmp_path):
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "file")
    write_records(link, [1, "\ud800"])
    assert link.is_symlink() and (tmp_path / "file").read_text() == '1\n"\\ud800"\n'
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_records(pipe, [2])
    reader.join(10)
    assert read == ["2\n"] and pipe.is_fifo()


def test_line_over_the_limit_is_counted_and_skipped(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(jsonl, "LONGEST_LINE", 8)
    monkeypatch.setattr(jsonl, "_SKIPPED", 3)
    for name in ("a.jsonl", "a.jsonl.gz"):
        path = tmp_path / name
        with (gzip.open if name.endswith("gz") else open)(path, "wb") as file:
            file.write(b'"12345"\n"123456"\n7\n' + b" " * 100 + b'\n"a"\n"longer than eight"')
        caplog.clear()
        assert read_records(path, str) == (["12345", "7", "a"], 3)
        messages = [record.getMessage() for record in caplog.records]
        assert messages == [f"{path}:{n}: skipped (longer than 8 bytes)" for n in (2, 4, 6)]


def test_only_the_first_bad_lines_are_logged_and_all_are_counted(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n" * 50 + "7\n")
    assert read_records(path, whole_number) == ([7], 50)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 21 and messages[-1] == f"{path}: 30 more lines skipped"
    caplog.clear()
    path.write_text(f'"{"a" * 10_000}"\n')
    assert read_records(path, int) == ([], 1)
    assert len(caplog.text) < 800


@pytest.mark.parametrize("line", [b"7\n", b"{}\n", b"\n"])
def test_a_small_compressed_file_of_millions_of_lines_ends_early(
    tmp_path, caplog, monkeypatch, line
):
    monkeypatch.setattr(jsonl, "_SMALLEST_PART", 1 << 20)
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wb", 9) as file:
        file.write(b"1\n" + line * 300_000)
    records, skipped = read_records(path, whole_number)
    read = 1 << 12  # 1 MiB, 256 bytes a line
    assert len(records) == (read if line == b"7\n" else 1)
    assert skipped == (read if line == b"{}\n" else 1)
    assert (
        f"{path}:{read + 1}: skipped from here on (line {read + 1}: the lines up to here have more"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": 2}\n'.encode("utf-16"), "line 1: has NUL bytes, as UTF-16 .* UTF-8"),
        ('{"a": 1}\n'.encode("utf-16-le"), "line 1: has NUL bytes"),
        (b"\0" * 9, "line 1: has NUL bytes"),
        (b'{"a": 1}\r{"a": 2}\r', "line 1: Extra data.*this one has carriage returns"),
        (
            b'\n{"a": 1 "b": 2}\n',
            r"line 2: Expecting ',' delimiter at character 9; must be one JSON value per line\)$",
        ),
        (b"\n{}\n", "line 2: must be a whole number"),
        (b"", "none of its 0 lines is a number$"),
    ],
)
def test_a_file_without_a_record_is_an_error_that_names_the_first_cause(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        require_records(path, whole_number, "numbers = 5", "a number")


def test_bounded_lines_of_texts_end_at_line_feeds():
    stream = io.StringIO("añb\u2028c\nlonger than that\nd", newline="")
    assert list(jsonl.bounded_lines(stream, 6)) == ["añb\u2028c\n", None, "d"]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_line_of_gigabytes_takes_little_memory(tmp_path):
    """A file of 1 MB with a line of 1 GB, read in 400 MiB: 64 MiB of the line, copied once."""
    path = tmp_path / "bomb.jsonl.gz"
    bombs.write_long_line(path, 1024, b"1\n", b"2\n")
    assert path.stat().st_size < 2 << 20
    program = """
        import sys; from spell_jax.runtime.files.jsonl import read_records
        print(read_records(sys.argv[1], str))
    """
    assert bombs.run_limited(program, 400, str(path)) == "(['1', '2'], 1)\n"


@pytest.mark.parametrize("line", [b"5", b"null", b"[]", b'"x"'])
def test_a_value_of_another_type_and_a_missing_field_are_named(tmp_path, caplog, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line + b'\n{"other": 1}\n{"number": 1' + b"0" * 400 + b"}\n")
    assert read_records(path, lambda row: float(row["number"])) == ([], 3)
    assert f"{path}:1: skipped (must be a JSON object" in caplog.text
    assert f"{path}:2: skipped (number: missing)" in caplog.text
    assert f"{path}:3: skipped (int too large" in caplog.text
