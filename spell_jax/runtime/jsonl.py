"""JSON and JSONL files: tolerant reading, atomic and durable writing, safe appending.

A file with a name ending in .gz is compressed; the same lines always give the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import logging
import math
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, TypeVar, cast

from spell_jax.runtime import durable, paths

T = TypeVar("T")
# What Python says of a value that is no object, or of a field of another type.
_OTHER_TYPE = re.compile(r"not iterable|indices must be|has no attribute|not subscriptable")
log = logging.getLogger(__name__)

# Most bytes of a line. A few megabytes of .gz can hold a line of gigabytes; the longest record that
# a run writes, with all documents of a cluster, has some megabytes.
LONGEST_LINE = 1 << 26
_SKIPPED = 1 << 20  # bytes of a longer line that are read at a time

# A few kilobytes of .gz can also hold millions of lines, or gigabytes in lines that are all short
# enough. A longer rest of a compressed file is not read: more bytes than _SMALLEST_PART and than
# _RATIO times the file (texts reach 3 to 20), where each line counts as LINE_COST bytes or more.
_SMALLEST_PART, _RATIO, LINE_COST = 1 << 28, 100, 256

# Bad lines of a file that are logged (all are counted), and characters of what is wrong with one.
_NAMED_LINES, _LONGEST_REASON = 20, 500

# What a parser raises for a malformed record.
# float() raises OverflowError for an integer of 400 digits.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError)


def read_records(path: str | os.PathLike[str], parse: Callable[[Any], T]) -> tuple[list[T], int]:
    """Parse every line of a file; return the records and the number of lines skipped.

    The file, maybe compressed or in a bucket, is UTF-8 with one JSON value per line, with or
    without a byte order mark. Only line feeds end a line; empty lines are ignored. `parse` raises
    errors of MALFORMED for a malformed value. Bad lines, and lines over LONGEST_LINE bytes, are
    skipped; the first _NAMED_LINES bad lines are logged with their place. If a compressed file is
    damaged, or unpacks to far more than texts do, its remaining lines count as one bad line.
    FileNotFoundError if there is no such file, OSError if it is a pipe, a folder or a device.
    """
    records, problems = _parse_lines(path, parse)
    return records, problems.count


def require_records(
    path: str | os.PathLike[str], parse: Callable[[Any], T], where: str, what: str
) -> tuple[list[T], int]:
    """Read a file as `read_records` does; ValueError if none of its lines is a record.

    The message begins with `where`, the field or flag of the file. It says `what` each line should
    be, and what is wrong with the first bad line.
    """
    records, problems = _parse_lines(path, parse)
    if records:
        return records, problems.count
    first = f" ({problems.first})" if problems.first else ""
    raise ValueError(f"{where}: none of its {problems.count} lines is {what}{first}")


@dataclasses.dataclass
class _Problems:
    """Bad lines of a file: their number and a description of the first."""

    path: str | os.PathLike[str]
    count: int = 0
    first: str = ""

    def add(self, number: int, reason: object, is_last: bool = False) -> None:
        """Count and log a bad line; if it `is_last`, all lines after it are skipped with it."""
        self.count += 1
        reason = str(reason)
        # The reason may quote a whole document.
        if len(reason) > _LONGEST_REASON:
            reason = reason[:_LONGEST_REASON] + "..."
        self.first = self.first or f"line {number}: {reason}"
        if self.count <= _NAMED_LINES or is_last:
            skipped = "skipped from here on" if is_last else "skipped"
            log.warning("%s:%d: %s (%s)", self.path, number, skipped, reason)

    def log_rest(self) -> None:
        if (num_unnamed := self.count - _NAMED_LINES) > 0:
            log.warning("%s: %d more lines skipped", self.path, num_unnamed)


def _parse_lines(
    path: str | os.PathLike[str], parse: Callable[[Any], T]
) -> tuple[list[T], _Problems]:
    records, problems, number = [], _Problems(path), 0
    with paths.open_file(path) as file, _compressed(path, file, "rb") as stream:
        room = _most_unpacked(file) if _is_compressed(path) else math.inf
        try:
            for number, line in enumerate(bounded_lines(stream, LONGEST_LINE), start=1):
                room -= max(LINE_COST, LONGEST_LINE if line is None else len(line))
                if room < 0:
                    problems.add(number, "unpacks to too many bytes or lines", is_last=True)
                    break
                if line is not None and not line.strip():
                    continue
                try:
                    if line is None:
                        raise ValueError(f"longer than {LONGEST_LINE} bytes")
                    records.append(parse(json.loads(line.decode("utf-8-sig"))))
                except (*MALFORMED, RecursionError) as error:
                    problems.add(number, _reason(error, line or b""))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            problems.add(number + 1, error, is_last=True)
    problems.log_rest()
    return records, problems


def _most_unpacked(file: IO[bytes]) -> int:
    """Return the limit on the unpacked bytes of an open compressed file; more means a bomb."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return max(_SMALLEST_PART, _RATIO * size)


def _reason(error: Exception, line: bytes) -> str:
    """Describe what is wrong with a line; the text of a KeyError is only the name of the field."""
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        if b"\0" in line:
            return "has NUL bytes, as UTF-16 and damaged files do; must be UTF-8"
        if b"\r" in line.strip():
            return f"{error}; lines must end with line feeds, this one has carriage returns"
    if isinstance(error, KeyError):
        return f"{error.args[0]}: missing"
    if type(error) in (TypeError, AttributeError) and _OTHER_TYPE.search(str(error)):
        return f"must be a JSON object with other types of fields: {error}"
    return str(error)


def bounded_lines(stream: Any, limit: int) -> Iterator[Any]:
    """Yield the lines of a stream of bytes or text, and None for each line longer than `limit`.

    At most `limit` bytes or characters of a longer line are in memory at a time.
    """
    while line := stream.readline(limit + 1):
        if len(line) <= limit:
            yield line
            continue
        # 10 is the line feed of a stream of bytes. The rest of the line is read in parts and
        # dropped.
        while line and line[-1] not in ("\n", 10):
            line = stream.readline(_SKIPPED)
        yield None


def write_records(path: str | os.PathLike[str], records: Iterable[Any]) -> None:
    """Write records as JSON lines, atomically; a lone surrogate becomes its JSON escape."""
    write_lines(path, (json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def append_records(path: str | os.PathLike[str], records: Iterable[Any]) -> None:
    """Append JSON lines to a local file (durable.append); create the file if needed.

    A process killed during the write leaves at most one torn line. The next call ends that line
    first, so that `read_records` skips only the torn line.
    """
    lines = "".join(json.dumps(record) + "\n" for record in records)
    durable.append(pathlib.Path(path), lines.encode())


def read_json(path: str | os.PathLike[str], kind: type[T] = dict) -> T:
    """Read a JSON value of type `kind`; ValueError with the path if damaged or of another type."""
    with paths.open_file(path) as file:
        content = file.read()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged ({error})") from error
    if not isinstance(value, kind):
        type_name = type(value).__name__
        raise ValueError(f"{path}: must be a JSON {kind.__name__}, is a {type_name}")
    return value


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Read the lines of a file; a ValueError names the file if it is not UTF-8.

    Only line feeds end a line. (str.splitlines also breaks at U+2028, U+0085 and others, which JSON
    allows within a string.)
    """
    with paths.open_file(path) as file:
        content = file.read()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error})") from error
    return text.removesuffix("\n").split("\n") if text else []


def write_json(path: str | os.PathLike[str], value: Any, indent: int = 1) -> None:
    """Write one value as indented JSON, atomically; ValueError for a non-finite number."""
    write_lines(path, [json.dumps(value, indent=indent, allow_nan=False) + "\n"])


def write_lines(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Write lines, which include their line breaks, as one file (durable.write_file).

    A lone surrogate becomes its Python escape.
    """
    # All lines are held in memory, so that a write to a full disk can be tried again.
    content = io.BytesIO()
    with _compressed(path, content, "wb") as out:
        out.writelines(line.encode(errors="backslashreplace") for line in lines)
    durable.write_file(path, content.getvalue())


def _is_compressed(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).endswith(".gz")


def _compressed(
    path: str | os.PathLike[str], file: IO[bytes], mode: str
) -> contextlib.AbstractContextManager[Any]:
    if not _is_compressed(path):
        if mode == "rb" and not isinstance(file, io.BufferedReader):
            # A bucket's file knows no limit for the length of a line.
            return contextlib.nullcontext(io.BufferedReader(cast(Any, file)))
        return contextlib.nullcontext(file)
    # No name and no time in the header, so that equal lines give equal bytes.
    return gzip.GzipFile("", mode, compresslevel=6, fileobj=file, mtime=0)
