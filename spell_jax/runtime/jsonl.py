"""Reading a user's JSONL file: bad lines are logged with their place, counted and skipped."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

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
