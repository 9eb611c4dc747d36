"""JSON on disk: a user's JSONL is read line by line, bad lines logged with their place, counted and
skipped; what is written appears whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from etils import epath

from spell_jax.runtime import folders

T = TypeVar("T")
log = logging.getLogger(__name__)


def read_records(path: str | pathlib.Path, parse: Callable[[Any], T]) -> tuple[list[T], int]:
    """Parses every line of a file; empty lines are passed over.

    Args:
      path: UTF-8 text, with or without a byte order mark, a JSON value a line; only line feeds end
        a line.
      parse: JSON value -> record; raises ValueError, KeyError, TypeError or AttributeError where
        the value is not what it should be.

    Returns:
      (records in file order, lines skipped).

    Raises:
      FileNotFoundError: there is no such file.
    """
    records, skipped = [], 0
    with pathlib.Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                records.append(parse(json.loads(line.decode("utf-8-sig"))))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                skipped += 1
                log.warning("%s:%d: skipped (%s)", path, number, error)
    return records, skipped


def write_records(path: str | os.PathLike[str], records: Iterable[Any]) -> None:
    """Writes records as JSON lines, whole or not at all.

    Half of a surrogate pair, which text from a model may hold, has no UTF-8 form: such a character
    is written as its JSON escape.
    """
    write_lines(path, (json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def write_json(path: str | os.PathLike[str], value: Any, indent: int = 1) -> None:
    """Writes one value, indented, whole or not at all; ValueError if a number is not finite."""
    write_lines(path, [json.dumps(value, indent=indent, allow_nan=False) + "\n"])


def write_lines(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Writes lines, which end with their line break, whole or not at all.

    On a disk they are written under another name, which then takes the file's place; an object of a
    bucket appears when it is closed, and is not opened before all lines are there.
    """
    if folders.is_remote(path):
        epath.Path(path).write_bytes("".join(lines).encode(errors="backslashreplace"))
        return
    path = pathlib.Path(path)
    # A terminal or a pipe (/dev/stdout) is written to, a link's target replaced.
    is_stream = path.exists() and not path.is_file()
    target = path if is_stream else path.resolve()
    unfinished = target if is_stream else target.with_name(target.name + ".tmp")
    with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(lines)
    if not is_stream:
        unfinished.replace(target)
