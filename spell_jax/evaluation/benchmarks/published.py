"""Reading the files of a published dataset, as strictly as a comparison of scores needs.

1. A dataset has one layout or several (its authors' download, a mirror); each is a list of files.
2. The first layout that the folder has is read, row by row: .json (a list), .jsonl, .csv, .parquet.
3. The number of rows must be the published one. Fewer are read only where `limit` asks for fewer.
4. What is not as published is an error that names file, row and field, and what would be right.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from spell_jax.evaluation.benchmarks.base import Benchmark, Item

HELP = "docs/evaluation.md says where to get it and how it lies"
Folder = str | Path
Layouts = Sequence[Sequence[str]]
Loader = Callable[[Folder, int | None], Benchmark]  # (folder, limit) -> benchmark
T = TypeVar("T")

_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a file.

    Attributes:
      where: file and number of the row, for messages.
      values: field -> value, as the file has them.
    """

    where: str
    values: Mapping[str, Any]

    def get(self, field: str, kinds: type[T] | tuple[type[T], ...], wanted: str) -> T:
        """The value of a field; ValueError where it is missing or of another kind."""
        if field not in self.values:
            there = ", ".join(map(str, self.values))[:200]
            raise ValueError(f"{self.where}: no field {field!r} ({wanted}); it has {there}. {HELP}")
        value = self.values[field]
        if not isinstance(value, kinds):
            raise self.wrong(field, wanted)
        return value

    def text(self, field: str) -> str:
        """A text that is not empty; half surrogate pairs, which have no UTF-8, become U+FFFD."""
        value = _SURROGATE.sub("\ufffd", self.get(field, str, "a text"))
        if not value.strip():
            raise self.wrong(field, "a text that is not empty")
        return value

    def texts(self, field: str) -> list[str]:
        """A list of at least one text."""
        values = self.get(field, list, "a list of texts")
        if not values or not all(isinstance(value, str) for value in values):
            raise self.wrong(field, "a list of at least one text")
        return [_SURROGATE.sub("\ufffd", value) for value in values]

    def rows(self, field: str) -> list[Row]:
        """A list of objects, as rows."""
        values = self.get(field, list, "a list of objects")
        if not all(isinstance(value, dict) for value in values):
            raise self.wrong(field, "a list of objects")
        return [Row(f"{self.where}, {field}[{i}]", value) for i, value in enumerate(values)]

    def wrong(self, field: str, wanted: str) -> ValueError:
        """The error to raise for a field that is not what it should be."""
        value = repr(self.values.get(field))[:100]
        return ValueError(f"{self.where}: {field} = {value}; it must be {wanted}. {HELP}")


def choose(folder: Folder, layouts: Layouts) -> int:
    """Which of the layouts a folder has: the first whose first file is there.

    Raises:
      FileNotFoundError: no such folder; no layout is there, or not all of its files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder. {HELP}")
    for index, names in enumerate(layouts):
        if (folder / names[0]).is_file():
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise FileNotFoundError(
                    f"{folder}: {names[0]} is there, {missing[0]} is not. {HELP}"
                )
            return index
    wanted = ", or ".join(" and ".join(names) for names in layouts)
    raise FileNotFoundError(f"{folder}: must have {wanted}. {HELP}")


def locate(folder: Folder, layouts: Layouts) -> list[Path]:
    """The files of the layout that a folder has; FileNotFoundError as `choose`."""
    return [Path(folder) / name for name in layouts[choose(folder, layouts)]]


def rows_of(path: Path, delimiter: str = ",") -> Iterator[Row]:
    """The rows of a .json, .jsonl, .csv or .parquet file, in its order.

    Raises:
      ValueError: the file is damaged, or no list of objects.
    """
    if path.suffix == ".csv":
        return _as_rows(path, _csv(path, delimiter))
    readers = {".json": _json_list, ".jsonl": _json_lines, ".parquet": _parquet}
    return _as_rows(path, readers[path.suffix](path))


def lines_of(path: Path) -> Iterator[Row]:
    """The rows of JSON lines in a file of any name; errors as `rows_of`."""
    return _as_rows(path, _json_lines(path))


def json_value(path: Path, kind: type[T]) -> T:
    """The JSON value that a file is; ValueError where it is none, or of another kind."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON ({error}). {HELP}") from error
    if not isinstance(value, kind):
        found = type(value).__name__
        raise ValueError(f"{path}: must be a JSON {kind.__name__}, is a {found}. {HELP}")
    return value


def _as_rows(path: Path, values: Iterable[Any]) -> Iterator[Row]:
    number = 0
    try:
        for value in values:
            if not isinstance(value, dict):
                raise ValueError(f"must be an object, is {type(value).__name__}")
            yield Row(f"{path}, row {number}", value)
            number += 1
    except (ValueError, OSError, RecursionError, csv.Error) as error:
        raise ValueError(f"{path}, row {number}: {error}. {HELP}") from error


def read(folder: Folder, layouts: Layouts, published: int, limit: int | None) -> list[Row]:
    """All rows of a dataset, or the first `limit`.

    Args:
      folder: where its files lie.
      layouts: file names, relative to the folder.
      published: how many rows the dataset has.
      limit: None: all rows; else so many of them at most, whatever comes behind those.

    Raises:
      FileNotFoundError: see `choose`.
      ValueError: another number of rows; a damaged file.
    """
    check_limit(limit)
    paths = locate(folder, layouts)
    found: list[Row] = []
    for path in paths:
        for row in rows_of(path):
            found.append(row)
            if len(found) == limit:
                return found
    check_count(" and ".join(map(str, paths)), len(found), published, limit)
    return found


def check_limit(limit: int | None) -> None:
    """Raises ValueError for a limit below 1."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit = {limit}: must be at least 1")


def check_count(what: str, found: int, published: int, limit: int | None) -> None:
    """Raises ValueError for another number of rows than is published, or than `limit` if less."""
    if found == (published if limit is None else min(limit, published)):
        return
    if limit is not None and limit < published:
        raise ValueError(f"{what}: limit = {limit}, but there are only {found} rows")
    raise ValueError(
        f"{what}: {found} rows, but {published} are published, and scores of other sets do not "
        f"compare; limit=N takes the first N. {HELP}"
    )


def unique(items: Sequence[Item], name: str) -> tuple[Item, ...]:
    """The items; ValueError where two of them have one id."""
    seen: set[str] = set()
    for item in items:
        if item.id in seen:
            raise ValueError(f"{name}: two rows have the id {item.id!r}. {HELP}")
        seen.add(item.id)
    return tuple(items)


def _json_list(path: Path) -> list[Any]:
    return json_value(path, list)


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line.decode("utf-8-sig"))


def _csv(path: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        # Blanks before a quoted field are no part of it.
        yield from csv.DictReader(file, delimiter=delimiter, skipinitialspace=True)


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq  # not at import: the other formats need nothing

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(64):
            yield from batch.to_pylist()
