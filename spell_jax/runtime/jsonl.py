"""JSON on disk: a user's JSONL is read line by line, bad lines logged with their place, counted and
skipped; what is written appears whole or not at all, and what is appended line by line.

A file whose name ends in .gz is compressed; the same lines always give the same bytes.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable
from typing import IO, Any, TypeVar

from etils import epath

from spell_jax.runtime import paths

T = TypeVar("T")
log = logging.getLogger(__name__)


def read_records(path: str | os.PathLike[str], parse: Callable[[Any], T]) -> tuple[list[T], int]:
    """Parses every line of a file; empty lines are passed over, and where a compressed file is
    damaged, the rest of it counts as one bad line.

    Args:
      path: UTF-8 text (it may be in a bucket, and compressed), with or without a byte order mark, a
        JSON value a line; only line feeds end a line.
      parse: JSON value -> record; raises ValueError, KeyError, TypeError or AttributeError where
        the value is not what it should be.

    Returns:
      (records in file order, lines skipped).

    Raises:
      FileNotFoundError: there is no such file.
    """
    records, skipped, number = [], 0, 0
    with epath.Path(path).open("rb") as file, _compressed(path, file, "rb") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    records.append(parse(json.loads(line.decode("utf-8-sig"))))
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    skipped += 1
                    log.warning("%s:%d: skipped (%s)", path, number, error)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            skipped += 1
            log.warning("%s:%d: skipped from here on (%s)", path, number + 1, error)
    return records, skipped


def write_records(path: str | os.PathLike[str], records: Iterable[Any]) -> None:
    """Writes records as JSON lines, whole or not at all.

    Half of a surrogate pair, which text from a model may hold, has no UTF-8 form: such a character
    is written as its JSON escape.
    """
    write_lines(path, (json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def append_records(path: str | os.PathLike[str], records: Iterable[Any]) -> None:
    """Adds JSON lines to the end of a local file, in one write; it is made where there is none.

    A process that is killed in here leaves at most one torn line. The next call ends that line
    first, so that `read_records` skips it alone.
    """
    with pathlib.Path(path).open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
        is_torn = file.read(1) not in (b"", b"\n")
        lines = "".join(json.dumps(record) + "\n" for record in records)
        file.write(b"\n" * is_torn + lines.encode())


def write_json(path: str | os.PathLike[str], value: Any, indent: int = 1) -> None:
    """Writes one value, indented, whole or not at all; ValueError if a number is not finite."""
    write_lines(path, [json.dumps(value, indent=indent, allow_nan=False) + "\n"])


def write_lines(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Writes lines, which end with their line break, whole or not at all.

    On a disk they are written under another name, which then takes the file's place; an object of a
    bucket appears when it is closed, and is not opened before all lines are there.
    """
    if paths.is_remote(path):
        content = io.BytesIO()
        _write(path, content, lines)
        epath.Path(path).write_bytes(content.getvalue())
        return
    path = pathlib.Path(path)
    # A terminal or a pipe (/dev/stdout) is written to, a link's target replaced.
    is_stream = path.exists() and not path.is_file()
    target = path if is_stream else path.resolve()
    unfinished = target if is_stream else target.with_name(target.name + ".tmp")
    with unfinished.open("wb") as file:
        _write(path, file, lines)
    if not is_stream:
        unfinished.replace(target)


def _write(path: str | os.PathLike[str], file: IO[bytes], lines: Iterable[str]) -> None:
    with _compressed(path, file, "wb") as out:
        out.writelines(line.encode(errors="backslashreplace") for line in lines)


def _compressed(
    path: str | os.PathLike[str], file: IO[bytes], mode: str
) -> contextlib.AbstractContextManager[Any]:
    """What the lines of an open file are read from or written to, by the end of its name."""
    if not os.fspath(path).endswith(".gz"):
        return contextlib.nullcontext(file)
    # Neither a name nor a time goes into it.
    return gzip.GzipFile("", mode, compresslevel=6, fileobj=file, mtime=0)
