"""JSON and JSONL files: tolerant reading, atomic and durable writing, safe appending.

All readers of JSON lines go through `json_lines`, which says what is wrong with a bad line; what
follows from it is theirs. A file with a name ending in .gz or .zst is compressed. Only .gz is
written; the same lines always give the same bytes.
"""

from __future__ import annotations

import codecs
import dataclasses
import gzip
import io
import itertools
import json
import logging
import math
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple, TypeVar, cast

from spell_jax.runtime.files import durable, paths

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
# _RATIO times the file (texts reach 3 to 20), where each line counts as _LINE_COST bytes or more.
_SMALLEST_PART, _RATIO, _LINE_COST = 1 << 28, 100, 256

# Bad lines of a file that are logged (all are counted), and characters of what is wrong with one.
_NAMED_LINES, _LONGEST_REASON = 20, 500

# What a parser raises for a malformed record.
# float() raises OverflowError for an integer of 400 digits.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError)


class LargeFileError(ValueError):
    """A file with more bytes or lines than its reader takes, at line `number` from 1."""

    def __init__(self, number: int, largest: float):
        super().__init__(f"line {number}: the lines up to here have more than {largest} bytes")
        self.number = number


class JsonLine(NamedTuple):
    """Line of a file of JSON lines."""

    number: int  # from 1; empty lines count. A row of a list counts from 0.
    value: Any = None
    problem: str = ""  # reason why the line has no value


def read_records(path: str | os.PathLike[str], parse: Callable[[Any], T]) -> tuple[list[T], int]:
    """Parse every line of a file; return the records and the number of lines skipped.

    The file, maybe compressed or in a bucket, is UTF-8 with one JSON value per line, with or
    without a byte order mark. Only line feeds end a line; empty lines are ignored. The rows of a
    .json file that is one list count as lines. `parse` raises errors of MALFORMED for a malformed
    value. Bad lines, and lines over LONGEST_LINE bytes, are skipped; the first _NAMED_LINES bad
    lines are logged with their place. If a compressed file is damaged, or unpacks to far more than
    texts do, its remaining lines count as one bad line. FileNotFoundError if there is no such file,
    OSError if it is a pipe, a folder or a device, ValueError if a list is no JSON.
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


def parse_rows(
    path: str | os.PathLike[str], rows: Iterable[Any], parse: Callable[[Any], T]
) -> tuple[list[T], int]:
    """Parse the values of a list in a JSON file as `read_records` does; places count from 0."""
    problems = _Problems(path, unit="row")
    return _parse_values(map(JsonLine, itertools.count(), rows), parse, problems), problems.count


@dataclasses.dataclass
class _Problems:
    """Bad lines of a file, or rows of its list: their number and a description of the first."""

    path: str | os.PathLike[str]
    unit: str = "line"
    count: int = 0
    first: str = ""

    def add(self, number: int, reason: object, is_last: bool = False) -> None:
        """Count and log a bad line; if it `is_last`, all lines after it are skipped with it."""
        self.count += 1
        reason = str(reason)
        # The reason may quote a whole document.
        if len(reason) > _LONGEST_REASON:
            reason = reason[:_LONGEST_REASON] + "..."
        self.first = self.first or f"{self.unit} {number}: {reason}"
        if self.count <= _NAMED_LINES or is_last:
            skipped = "skipped from here on" if is_last else "skipped"
            separator = ":" if self.unit == "line" else f", {self.unit} "
            log.warning("%s%s%d: %s (%s)", self.path, separator, number, skipped, reason)

    def log_rest(self) -> None:
        if (num_unnamed := self.count - _NAMED_LINES) > 0:
            log.warning("%s: %d more %ss skipped", self.path, num_unnamed, self.unit)


def _parse_lines(
    path: str | os.PathLike[str], parse: Callable[[Any], T]
) -> tuple[list[T], _Problems]:
    name, problems = os.fspath(path), _Problems(path)
    compression = name[name.rindex(".") :] if name.endswith((".gz", ".zst")) else ""
    with paths.open_file(path) as file:
        largest = _most_unpacked(file) if compression else math.inf
        stream = uncompressed(file, compression)
        may_be_list = name.removesuffix(compression).endswith(".json")
        lines = _lines_or_rows(stream, may_be_list, largest, problems)
        return _parse_values(lines, parse, problems), problems


def _lines_or_rows(
    stream: Any, may_be_list: bool, largest: float, problems: _Problems
) -> Iterator[JsonLine]:
    start = stream.peek(4).removeprefix(codecs.BOM_UTF8) if may_be_list else b""
    if start.lstrip()[:1] != b"[":
        yield from json_lines(stream, LONGEST_LINE, largest)
        return
    problems.unit = "row"
    content = stream.read(-1 if largest == math.inf else int(largest))
    yield from map(JsonLine, itertools.count(), _parse_json(content, problems.path))


def _parse_values(
    lines: Iterable[JsonLine], parse: Callable[[Any], T], problems: _Problems
) -> list[T]:
    records, number = [], 0
    try:
        for number, value, problem in lines:
            if problem:
                problems.add(number, problem)
                continue
            try:
                records.append(parse(value))
            except (*MALFORMED, RecursionError) as error:
                problems.add(number, _reason(error))
    except LargeFileError as error:
        problems.add(error.number, error, is_last=True)
    except (EOFError, zlib.error, OSError) as error:
        # gzip and pyarrow's zstd report damage without an errno; an error of the disk has one.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        problems.add(number + 1, error, is_last=True)
    problems.log_rest()
    return records


def _most_unpacked(file: IO[bytes]) -> int:
    """Return the limit on the unpacked bytes of an open compressed file; more means a bomb."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return max(_SMALLEST_PART, _RATIO * size)


def _reason(error: Exception) -> str:
    """Describe what is wrong with a record; the text of a KeyError is only the field's name."""
    if isinstance(error, KeyError):
        return f"{error.args[0]}: missing"
    if type(error) in (TypeError, AttributeError) and _OTHER_TYPE.search(str(error)):
        return f"must be a JSON object with other types of fields: {error}"
    return str(error)


def json_lines(
    stream: IO[bytes] | IO[str], longest: int, largest: float = math.inf
) -> Iterator[JsonLine]:
    """Parse a stream of JSON lines one at a time; a line that is no JSON gets a problem.

    Bytes are UTF-8, with or without a byte order mark. Only line feeds end a line. Empty lines are
    left out. A line over `longest` bytes gets a problem. Raises LargeFileError as `bounded_lines`.
    """
    for number, line in enumerate(bounded_lines(stream, longest, largest), start=1):
        if line is None:
            yield JsonLine(number, problem=f"longer than {longest} bytes")
        elif line.strip():
            yield _parse_line(number, line)


def _parse_line(number: int, line: bytes | str) -> JsonLine:
    try:
        text = line.decode("utf-8-sig") if isinstance(line, bytes) else line
        return JsonLine(number, json.loads(text))
    except (ValueError, RecursionError) as error:
        data = line if isinstance(line, bytes) else line.encode(errors="replace")
        problem = str(error)
        if isinstance(error, json.JSONDecodeError):
            # The text's own line would contradict the line of the file, of which it is a part.
            problem = f"{error.msg} at character {error.pos + 1}; must be one JSON value per line"
        if b"\0" in data:
            problem = "has NUL bytes, as UTF-16 and damaged files do; must be UTF-8"
        elif b"\r" in data.strip():
            problem += "; lines must end with line feeds, this one has carriage returns"
        return JsonLine(number, problem=problem)


def bounded_lines(stream: Any, longest: int, largest: float = math.inf) -> Iterator[Any]:
    """Yield the lines of a stream of bytes or text, and None for each line over `longest`.

    At most `longest` bytes or characters of a longer line are in memory at a time. Raises
    LargeFileError at the line with which all lines have more than `largest`, where a line counts as
    _LINE_COST or more.
    """
    number = size = 0
    while line := stream.readline(longest + 1):
        number, size = number + 1, size + max(_LINE_COST, min(longest, len(line)))
        if size > largest:
            raise LargeFileError(number, largest)
        if len(line) <= longest:
            yield line
            continue
        # 10 is the line feed of a stream of bytes. The rest of the line is read in parts and
        # dropped.
        while line and line[-1] not in ("\n", 10):
            line = stream.readline(_SKIPPED)
        yield None


def uncompressed(file: IO[bytes] | io.RawIOBase, compression: str) -> Any:
    """Return a buffered stream of an open file, unpacked for the compression ".gz" or ".zst"."""
    if compression == ".gz":
        return gzip.GzipFile(fileobj=cast(Any, file))
    if compression == ".zst":
        import pyarrow  # here, because the other compressions do not need it

        return io.BufferedReader(cast(Any, pyarrow.CompressedInputStream(file, "zstd")))
    # A bucket's file knows no limit for the length of a line.
    return file if isinstance(file, io.BufferedReader) else io.BufferedReader(cast(Any, file))


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
        value = _parse_json(file.read(), path)
    if not isinstance(value, kind):
        type_name = type(value).__name__
        raise ValueError(f"{path}: must be a JSON {kind.__name__}, is a {type_name}")
    return value


def _parse_json(content: bytes, path: str | os.PathLike[str]) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged ({error})") from error


def write_json(path: str | os.PathLike[str], value: Any, indent: int = 1) -> None:
    """Write one value as indented JSON, atomically; ValueError for a non-finite number."""
    write_lines(path, [json.dumps(value, indent=indent, allow_nan=False) + "\n"])


def write_lines(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Write lines, which include their line breaks, as one file (durable.write_file).

    A lone surrogate becomes its Python escape.
    """
    # All lines are held in memory, so that a write to a full disk can be tried again.
    content = b"".join(line.encode(errors="backslashreplace") for line in lines)
    if os.fspath(path).endswith(".gz"):
        # No time in the header, so that equal lines give equal bytes.
        content = gzip.compress(content, 6, mtime=0)
    durable.write_file(path, content)
