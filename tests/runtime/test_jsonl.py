"""Records of a JSONL file: what is read, passed over, and skipped with its place."""

from __future__ import annotations

import logging

from spell_jax.runtime.jsonl import read_records


def whole_number(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError("must be a whole number")
    return value


def test_bad_lines_are_skipped_and_empty_ones_passed_over(tmp_path, caplog):
    path = tmp_path / "numbers.jsonl"
    lines = [b"\xef\xbb\xbf1", b"", b'"two"', b"\xff", b" 3\r", b"[" * 100_000, b"\t", b"4"]
    path.write_bytes(b"\n".join(lines))
    with caplog.at_level(logging.WARNING):
        assert read_records(path, whole_number) == ([1, 3, 4], 3)
    found = [record.getMessage().split(" (")[0] for record in caplog.records]
    assert found == [f"{path}:{number}: skipped" for number in (3, 4, 6)]


def test_only_line_feeds_end_a_line(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('"a\u2028b"\n"c\x85d"', encoding="utf-8")
    assert read_records(path, str) == (["a\u2028b", "c\x85d"], 0)
