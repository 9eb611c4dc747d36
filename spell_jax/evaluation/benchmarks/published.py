"""Strict readers of published datasets: scores compare only if the data is as published.

A dataset has one or several layouts (its authors' download, a mirror), each a list of files. The
first one found in the folder is read row by row. The number of rows must equal the published one,
unless `limit` asks for fewer. A missing file is a FileNotFoundError. Any other deviation is a
ValueError that names the file, the row, the field and the expected value.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from spell_jax.data import row_files
from spell_jax.data.clusters import SURROGATE
from spell_jax.evaluation.benchmarks.base import Benchmark
from spell_jax.runtime.files.jsonl import read_json

HELP = "docs/evaluation.md says where to get it and which files it has"
Folder = str | Path
Layouts = Sequence[Sequence[str]]
# (folder of the files, number of questions or None for all) -> benchmark. A loader raises
# FileNotFoundError or ValueError if the folder is not as published.
Loader = Callable[[Folder, int | None], Benchmark]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class PublishedRow:
    """One row of a file."""

    where: str  # file and row number, for error messages
    values: Mapping[str, Any]

    def get(self, field: str, kinds: type[T] | tuple[type[T], ...], requirement: str) -> T:
        """Return the value of a field; raise ValueError if it is missing or has another type."""
        if field not in self.values:
            names = ", ".join(map(str, self.values))[:200]
            raise ValueError(
                f"{self.where}: no field {field!r} ({requirement}); it has {names}. {HELP}"
            )
        value = self.values[field]
        if not isinstance(value, kinds):
            raise self.wrong(field, requirement)
        return value

    def column(self, *names: str) -> str:
        """Return the first column name that the row has, else the first name."""
        # The first name is then missing, and the error of the caller names it.
        return next((name for name in names if name in self.values), names[0])

    def text(self, field: str) -> str:
        """Return a field's non-blank text; lone surrogates, which have no UTF-8, become U+FFFD."""
        value = SURROGATE.sub("\ufffd", self.get(field, str, "a text"))
        if not value.strip():
            raise self.wrong(field, "a text that is not empty")
        return value

    def texts(self, field: str) -> list[str]:
        values = self.get(field, list, "a list of texts")
        if not values or not all(isinstance(value, str) for value in values):
            raise self.wrong(field, "a list of at least one text")
        return [SURROGATE.sub("\ufffd", value) for value in values]

    def rows(self, field: str) -> list[PublishedRow]:
        values = self.get(field, list, "a list of objects")
        if not all(isinstance(value, dict) for value in values):
            raise self.wrong(field, "a list of objects")
        return [
            PublishedRow(f"{self.where}, {field}[{i}]", value) for i, value in enumerate(values)
        ]

    def wrong(self, field: str, requirement: str) -> ValueError:
        """Return the error for a field with a wrong value; the caller raises it."""
        # A context may have millions of characters.
        value = repr(self.values.get(field))[:100]
        return ValueError(f"{self.where}: {field} = {value}; it must be {requirement}. {HELP}")


def hub(*names: str) -> list[list[str]]:
    """Return the layouts of a dataset on the Hugging Face hub with the splits `names`."""
    return [[f"{folder}{name}" for name in names] for folder in ("", "data/", "default/", "main/")]


def locate(folder: Folder, layouts: Layouts) -> list[Path]:
    """Return the files of the first layout that has its first file in the folder.

    Raises FileNotFoundError if a file is missing. A name may lack the suffix of its format:
    "data/test" is data/test.parquet or any other of `row_files.KINDS`, or, as on the Hugging Face
    hub, all of data/test-00000-of-00002.parquet, ..., or all of data/test/0000.parquet, ....
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder. {HELP}")
    for names in layouts:
        files = [_files(folder / name) for name in names]
        if all(files):
            return list(itertools.chain(*files))
        # A layout with its first file is meant: an error that names the missing second file helps
        # more than a list of all layouts.
        if files[0]:
            missing = names[files.index([])]
            raise FileNotFoundError(f"{folder}: {names[0]} is there, {missing} is not. {HELP}")
    expected_files = ", or ".join(" and ".join(names) for names in layouts)
    raise FileNotFoundError(
        f"{folder}: must have {expected_files}, as Parquet, JSON or CSV. {HELP}"
    )


def _files(path: Path) -> list[Path]:
    # A name with a suffix, or whole files, before parts: a folder may hold both forms.
    for suffix in ("", *row_files.KINDS):
        if (file := path.with_name(path.name + suffix)).is_file():
            return [file]
    parts = path.parent.glob(f"{glob.escape(path.name)}-?????-of-?????.parquet")
    return sorted(parts) or sorted(path.glob("????.parquet"))


def rows_of(path: Path, delimiter: str = ",") -> Iterator[PublishedRow]:
    """Iterate over the rows of a file, in file order; its suffix gives the format."""
    if (kind := row_files.kind_of(path.name)) is None:
        raise ValueError(f"{path}: must be one of {', '.join(row_files.KINDS)}. {HELP}")
    number = 0
    try:
        with path.open("rb") as file:
            for value in row_files.read(file, kind, delimiter):
                if not isinstance(value, dict):
                    raise ValueError(f"must be an object, is {type(value).__name__}")
                yield PublishedRow(f"{path}, row {number}", value)
                number += 1
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path}, row {number}: {error}. {HELP}") from error


def json_value(path: Path, kind: type[T]) -> T:
    """Return a whole file's JSON value; raise ValueError if it is invalid or not of type `kind`."""
    try:
        return read_json(path, kind)
    except ValueError as error:
        raise ValueError(f"{error}. {HELP}") from error


def read_rows(
    folder: Folder, layouts: Layouts, published: int, limit: int | None
) -> list[PublishedRow]:
    """Read the first `limit` rows of a dataset, or all rows, which must number `published`."""
    paths = locate(folder, layouts)
    # With a limit only the first rows are read: files may have gigabytes.
    rows = list(itertools.islice(itertools.chain.from_iterable(map(rows_of, paths)), limit))
    if len(rows) != limit:
        check_count(" and ".join(map(str, paths)), len(rows), published, limit)
    return rows


def check_count(what: str, count: int, published: int, limit: int | None) -> None:
    """Raise ValueError unless `count` is the published number of rows, or `limit` if smaller."""
    if count == (published if limit is None else min(limit, published)):
        return
    if limit is not None and limit < published:
        raise ValueError(f"{what}: limit = {limit}, but there are only {count} rows")
    raise ValueError(
        f"{what}: {count} rows, but {published} are published, and scores of other sets do not "
        f"compare; limit=N takes the first N. {HELP}"
    )
