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
    """Parses every line of a file.

    Args:
      path: UTF-8 text, a JSON value a line; only line feeds end a line.
      parse: JSON value -> record; raises ValueError, KeyError, TypeError or AttributeError where
        the value is not what it should be.

    Returns:
      (records in file order, lines skipped).
    """
    records, skipped = [], 0
    lines = pathlib.Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            skipped += 1
            log.warning("%s:%d: skipped (%s)", path, number, error)
    return records, skipped
