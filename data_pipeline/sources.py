"""Reads files of local or remote sources and yields filtered documents.

A worker reads one file at a time, or one row group of a Parquet file; files with many rows are
streamed. Files of a tensorflow-datasets set (spell_jax/data/tfds_sets.py) are its shards. A file's
text, or each of its rows, is one document, or several if the source is cut at chapters. Unusable
files and rows are counted and listed: no content of a file stops a build. So is a local folder
below the source that cannot be read (a glob passes over such folders silently).
"""

from __future__ import annotations

import io
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO, ClassVar, TypedDict

import apache_beam as beam
import fsspec
from apache_beam.pvalue import TaggedOutput
from fsspec.implementations.local import LocalFileSystem

from data_pipeline import layouts
from data_pipeline.filter import (
    FilterConfig,
    check_languages,
    describe_error,
    filter_documents,
    valid_utf8,
)
from data_pipeline.layouts import SourceRow
from data_pipeline.records import File, Listed, blake2b, event, make_document, removed
from spell_jax.data import row_files
from spell_jax.data.clusters import TASKS
from spell_jax.data.text_files import BUILD_SUFFIXES, SUFFIXES, Unusable
from spell_jax.data.tfds_sets import TextSet, TfdsSource, is_tfds
from spell_jax.runtime import config as settings
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.runtime.files.jsonl import LONGEST_LINE, uncompressed
from spell_jax.runtime.files.remote import file_version

WHOLE: Mapping[str, Callable[[bytes], list[SourceRow]]] = {
    ".txt": layouts.read_text,
    ".md": layouts.read_text,
    ".html": layouts.read_html,
    ".htm": layouts.read_html,
    ".pdf": layouts.read_pdf,
}
LINES = tuple(suffix for suffix, kind in row_files.KINDS.items() if kind.format == ".jsonl")
LAYOUTS = {
    "folder": (*SUFFIXES, *BUILD_SUFFIXES),
    "ultra_fineweb": (".parquet",),
    "docmath": tuple(row_files.KINDS),
    "json": (".json", ".jsonl"),
}
SPLITS = ("", "chapters")
# Unusable rows listed per file or row group; all unusable rows are counted. A file of another
# layout would list each of its rows.
NAMED_ROWS = 100
# Bytes hashed at a time.
CHUNK = 1 << 20


# Every file is read or skipped, and every document is kept or removed.
BALANCES = (
    "in:listed = files read + files skipped: *",
    "files read = out:files",
    "documents read = documents kept + documents removed: *",
    "documents kept = out:documents",
)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceConfig:
    """Source of documents.

    Attributes:
      path: File, folder (searched recursively; links to folders are not followed) or glob; local or
        any URL that fsspec opens ("gs://...", "s3://..."). Or "tfds:NAME[/CONFIG][:VERSION]", a
        prepared tensorflow-datasets set; layout, text and quality do not count then.
      layout: Format of the files:
        "folder": every .txt, .md, .html, .pdf, .jsonl (also .gz, .zst) and .parquet file;
        "ultra_fineweb": Parquet with the columns `text` and `quality`, both required;
        "docmath": DocMath-Eval's files (row_files.KINDS), the paragraphs of a question's report;
        "json": .json and .jsonl files of any nesting, every text in a field `text`
          (layouts.field_texts).
      tasks: Tasks that the documents may serve, one or more of TASKS.
      split: "chapters" to cut a text at its chapter headings, "" to keep it whole.
      one_document_per_cluster: Whether the pieces of a document are clustered only with each other.
      max_report_tokens: Largest number of tokens of a report; 0 if the texts are no reports. The
        paragraphs of a report are the documents of one cluster, as for DocMath in the paper; a
        paragraph over cut.max_document_tokens is cut. A longer report is removed.
      text: Name of the field or column with a row's text; if it is missing, "text" is used.
      quality: Name of the field or column with a row's score.
      tfds_data_dir: Directory of prepared sets, local or gs://; "" for the environment's
        TFDS_DATA_DIR, else ~/tensorflow_datasets.
      text_feature: Feature of a set with the text of a document; "" for "text" or its only text.
      tfds_split: Splits of a set in TFDS's notation, such as "train[:10%]+test"; "" for all.
      max_file_bytes: Largest size in bytes of a file that is read whole, and, up to
        jsonl.LONGEST_LINE, of a line of a .jsonl file. Larger ones are counted and skipped.
      max_characters: Override of the filter's max_characters; 0 for none.
      min_quality: Override of the filter's min_quality; None for none.
      languages: Override of the filter's languages; None for none.
    """

    SECTION: ClassVar[str] = "source"

    path: str
    layout: str
    tasks: tuple[str, ...]
    split: str = ""
    one_document_per_cluster: bool = False
    max_report_tokens: int = 0
    text: str = "content"
    quality: str = "score"
    tfds_data_dir: str = ""
    text_feature: str = ""
    tfds_split: str = ""
    max_file_bytes: int = 1 << 30
    max_characters: int = 0
    min_quality: float | None = None
    languages: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("source.path = '': must be a file, a folder, a glob or a URL")
        check_choice(self, "source.", layout=tuple(LAYOUTS), split=SPLITS)
        check_least(self, "source.", max_file_bytes=1, max_report_tokens=0)
        if not self.tasks or not set(self.tasks) <= set(TASKS):
            raise ValueError(f"source.tasks = {self.tasks}: must be one or more of {TASKS}")
        for field in ("text", "quality"):
            if not getattr(self, field):
                raise ValueError(f"source.{field} = '': must be the name of a field")
        if self.max_report_tokens and self.split:
            raise ValueError(
                f"source.split = {self.split!r}: must be '' with max_report_tokens, as a report "
                "stays whole"
            )
        if self.max_characters < 0:
            raise ValueError(
                f"source.max_characters = {self.max_characters}: must be at least 1, or 0 for the "
                "filter's"
            )
        check_languages("source.languages", self.languages or ())

    @property
    def strict(self) -> bool:
        """Whether every row must have a score."""
        return self.layout == "ultra_fineweb"

    def filter(self, base: FilterConfig) -> FilterConfig:
        """Return `base` with this source's overrides; ValueError if they do not go together."""
        overrides: dict[str, Any] = {
            "max_characters": self.max_characters or None,
            "min_quality": self.min_quality,
            "languages": self.languages,
        }
        return replace(base, **{k: value for k, value in overrides.items() if value is not None})


class Piece(TypedDict):
    """Unit of work: a file, or a row group of a Parquet file."""

    file: Listed
    columns: list[str]  # from layouts.parquet_groups; [] if the file is not Parquet
    group: int
    first: int  # number of the group's first row in the file


def list_files(name: str, source: SourceConfig) -> Iterator[Listed]:
    """Yield the files of a source without hidden files, in any order; of a local folder lazily.

    Files of unsupported types are included and counted later. Raises FileNotFoundError if there is
    no file, ValueError if none has a type of the layout, or the path cannot be opened. Folders in
    it that cannot be read are included too, and logged.
    """
    where = f"sources.{name}.path = {source.path!r}"
    if is_tfds(source.path):
        yield from _list_shards(name, source)
        return
    suffixes, number, has_layout_file = LAYOUTS[source.layout], 0, False
    try:
        system, path = fsspec.url_to_fs(source.path)
        # fsspec keeps listings for the life of the process; a notebook may build twice.
        system.invalidate_cache()
        root, files = _find(system, path)
        for url, info in files:
            if not _should_read(url, root, info):
                continue
            place = valid_utf8(url.removeprefix(root).lstrip("/"))
            # Names of files may be any bytes; tables hold UTF-8.
            number, has_layout_file = number + 1, has_layout_file or _suffix(place) in suffixes
            yield Listed(
                source=name,
                url=valid_utf8(system.unstrip_protocol(url)),
                place=place,
                problem=valid_utf8(info.get("problem", "") or _problem(info)),
                size=int(info.get("size") or 0),
                version=file_version(info),
            )
    except Exception as error:  # each file system raises its own exceptions
        raise ValueError(f"{where}: cannot be opened, {describe_error(error)}") from error
    if not number:
        raise FileNotFoundError(f"{where}: no such file, or no file in it")
    if not has_layout_file:
        raise ValueError(
            f"{where}: none of its {number} files is of the types of layout = "
            f"{source.layout!r}: {', '.join(suffixes)}"
        )


def _list_shards(name: str, source: SourceConfig) -> Iterator[Listed]:
    """Yield the shards of a set; ValueError if it is not prepared, or a shard is missing."""
    with settings.naming(f"sources.{name}.path", source.path):
        text_set = TfdsSource(
            source.path, source.tfds_data_dir, source.text_feature, source.tfds_split
        ).open()
        for shard in text_set.shards:
            system, path = fsspec.url_to_fs(shard)
            info = system.info(path)
            yield Listed(
                source=name,
                url=system.unstrip_protocol(path),
                place=PurePosixPath(shard).name,
                problem="",
                size=int(info.get("size") or 0),
                version=file_version(info),
            )


def _find(system: Any, path: str) -> tuple[str, Iterable[tuple[str, dict[str, Any]]]]:
    """Return the folder that places are relative to, and (path, info) of files."""
    if system.isfile(path):
        return path.rpartition("/")[0], [(path, system.info(path))]
    if system.isdir(path):
        return path, _below(system, path)
    # Places are relative to the folder before the first wildcard, so a place does not depend on the
    # other matches.
    fixed = path[: min((path.find(sign) for sign in "*?[" if sign in path), default=0)]
    matches = system.glob(path, detail=True) if fixed else {}
    return fixed.rpartition("/")[0], matches.items()


def _below(system: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(system, LocalFileSystem):
        yield from system.find(path, detail=True).items()
        return
    # `find` silently skips local folders without read permission, and holds all files in memory.
    folders = [path]
    while folders:
        folder = folders.pop()
        try:
            entries = os.scandir(folder)
        except OSError as error:
            if folder == path:
                raise
            log.warning("%s: skipped (unreadable: %s)", folder, error)
            yield f"{folder}/", {"type": "file", "problem": describe_error(error)}
            continue
        with entries:
            for entry in entries:
                info = system.info(entry)
                if info["type"] != "directory":
                    yield info["name"], info
                elif not entry.name.startswith("."):
                    folders.append(info["name"])


def _problem(info: Mapping[str, Any]) -> str:
    """Return why a file is not read, or "" if it can be read."""
    # Opening a pipe would block, and reading /dev/zero would never end. A link hides its target's
    # type from fsspec.
    name = info["name"] if info.get("islink") else ""
    is_special = bool(name) and os.path.exists(name) and not os.path.isfile(name)
    if info["type"] == "other" or (is_special and not os.path.isdir(name)):
        return "a pipe, a socket or a device"
    return ""


def _should_read(file: str, root: str, info: Mapping[str, Any]) -> bool:
    """Return whether a path is neither hidden nor a folder."""
    hidden = any(part.startswith(".") for part in file.removeprefix(root).split("/"))
    return not hidden and (info["type"] in ("file", "other") or bool(info.get("islink")))


def _suffix(place: str) -> str:
    """Return the lower-cased suffix of a file, with both parts of .jsonl.gz and .jsonl.zst."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(place).suffixes]
    double_suffix = "".join(suffixes[-2:])
    return double_suffix if double_suffix in row_files.KINDS else "".join(suffixes[-1:])


def make_read(
    listed: beam.PCollection,
    sources: Mapping[str, SourceConfig],
    filter: FilterConfig,
) -> dict[str, beam.PCollection]:
    """Read Listed files and filter their documents; sources may override conditions of `filter`.

    The tables are "documents"; "files" that were read; "removed", with unusable files and rows, and
    documents on which the predicate raised; "counts", by source: the events "files read",
    "documents read", "files skipped: REASON" (or row groups, rows), and the events of
    filter_documents.
    """
    configs = {name: source.filter(filter) for name, source in sources.items()}
    outputs = ("files", "removed", "counts")
    split: Any = (
        listed
        # Without Reshuffle Beam fuses the steps: the worker that lists a file would read it, and
        # the worker that splits a Parquet file would read all its row groups.
        | "distribute files" >> beam.Reshuffle()
        | "split files" >> beam.FlatMap(_split, dict(sources)).with_outputs(*outputs, main="pieces")
    )
    read: Any = (
        split["pieces"]
        | "distribute pieces" >> beam.Reshuffle()
        | "read pieces"
        >> beam.FlatMap(_read_piece, dict(sources)).with_outputs(*outputs, main="documents")
    )
    filtered_tables = filter_documents(read["documents"], configs)
    tables = {"documents": filtered_tables["documents"]}
    for name in outputs:
        parts = [split[name], read[name]] + (
            [filtered_tables[name]] if name in filtered_tables else []
        )
        tables[name] = parts | f"join {name}" >> beam.Flatten()
    return tables


def _split(listed: Any, sources: Mapping[str, SourceConfig]) -> Iterator[Any]:
    """Yield the pieces of a file; a Parquet file is also hashed and recorded as read."""
    # A Parquet file is hashed here and not where it is read: many workers read parts of it.
    source, suffix = sources[listed["source"]], _suffix(listed["place"])
    if listed["problem"]:
        yield from _skip(listed, Unusable("unreadable", listed["problem"]))
    elif is_tfds(source.path):
        yield Piece(file=listed, columns=[], group=0, first=0)
    elif suffix not in LAYOUTS[source.layout]:
        yield from _skip(listed, Unusable("of another type", suffix or "no suffix"))
    elif suffix != ".parquet" or source.layout == "docmath":
        yield Piece(file=listed, columns=[], group=0, first=0)
    else:
        names = source.text, source.quality
        try:
            with _open(listed) as file:
                columns, rows = layouts.parquet_groups(file, *names, source.strict)
                file.seek(0)
                hashed = _Hashed(file)
                hashed.drain()
        except Unusable as error:
            yield from _skip(listed, error)
            return
        yield from hashed.record(listed)
        for group in range(len(rows)):
            yield Piece(file=listed, columns=columns, group=group, first=sum(rows[:group]))


def _read_piece(piece: Any, sources: Mapping[str, SourceConfig]) -> Iterator[Any]:
    """Yield the documents of a piece."""
    listed = piece["file"]
    source, suffix = sources[listed["source"]], _suffix(listed["place"])
    try:
        if is_tfds(source.path):
            yield from _read_shard(listed, source)
            return
        with _open(listed) as file:
            if piece["columns"]:
                where = piece["columns"], piece["group"], piece["first"]
                rows = layouts.parquet_rows(file, *where, source.strict)
                yield from _documents(rows, listed, source)
                return
            if suffix in LINES and source.layout not in ("json", "docmath"):
                # Hashed while it is streamed: the reader goes to the last byte, and a second pass
                # over a file of many gigabytes is saved.
                hashed = _Hashed(file)
                longest = min(source.max_file_bytes, LONGEST_LINE)
                lines = uncompressed(hashed, row_files.KINDS[suffix].compression)
                rows = layouts.json_rows(lines, source.text, source.quality, longest)
                yield from _documents(rows, listed, source)
            else:
                limit = source.max_file_bytes
                data = _read_whole(file, listed, limit)
                if source.layout == "json":
                    rows = layouts.read_fields(data, source.text)
                elif source.layout == "docmath":
                    rows = layouts.read_docmath(data, row_files.KINDS[suffix], limit)
                else:
                    rows = WHOLE[suffix](data)
                if rows == [SourceRow(None)]:
                    raise Unusable("empty", "no text in it")
                hashed = _Hashed(io.BytesIO(data))
                hashed.drain()
                yield from _documents(rows, listed, source)
            yield from hashed.record(listed)
    except Unusable as error:
        yield from _skip(listed, error, "row groups" if piece["columns"] else "files")


def _read_shard(listed: Listed, source: SourceConfig) -> Iterator[Any]:
    """Yield the documents of a shard of a tensorflow-datasets set."""
    with _local_copy(listed) as (shard, copy):
        text_set = TextSet(os.path.dirname(shard), source.text_feature, source.tfds_split)
        rows = (layouts.text_row(number, data) for number, data in text_set.read(shard, copy))
        yield from _documents(rows, listed, source)
        with open(copy, "rb") as file:
            hashed = _Hashed(file)
            hashed.drain()
            yield from hashed.record(listed)


@contextmanager
def _local_copy(listed: Listed) -> Iterator[tuple[str, str]]:
    """Yield the path or URL of a file, and of a local copy, which is removed at the end."""
    protocol, _, path = listed["url"].partition("://")
    if protocol == "file":
        yield path, path
        return
    # ArrayRecord opens local files only.
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, listed["place"])
        try:
            fsspec.filesystem(protocol).get_file(listed["url"], copy)
        except Exception as error:  # each file system raises its own exceptions
            raise Unusable("unreadable", describe_error(error)) from error
        yield listed["url"], copy


def _documents(rows: Iterable[SourceRow], listed: Listed, source: SourceConfig) -> Iterator[Any]:
    named, in_lines = 0, _suffix(listed["place"]) in LINES
    for row in rows:
        place, line = listed["place"], ""
        if row.number is not None:
            # Nine digits, so that places sort in the order of the rows.
            place += f"#{row.number:09d}"
            line = f"{listed['place']}:{row.number + 1}: " if in_lines else ""
        if not row.text:
            reason = "bad row" if row.problem else "empty"
            yield event(f"rows skipped: {reason}", listed["source"])
            if named < NAMED_ROWS:
                yield removed({**listed, "place": place}, reason, valid_utf8(line + row.problem))
            named += 1
            continue
        texts = layouts.chapters(row.text) if source.split else [row.text]
        for part, text in enumerate(texts):
            yield event("documents read", listed["source"])
            yield make_document(text, listed["source"], place, part, row.quality)


def _skip(listed: Listed, error: Unusable, what: str = "files") -> Iterator[TaggedOutput]:
    yield event(f"{what} skipped: {error.reason}", listed["source"])
    yield removed(listed, error.reason, valid_utf8(error.because))


@contextmanager
def _open(listed: Listed) -> Iterator[BinaryIO]:
    # fsspec.open would take "::" in a file name for a chain of file systems.
    try:
        system = fsspec.filesystem(listed["url"].partition("://")[0])
        file = system.open(listed["url"], "rb")
    except Exception as error:  # each file system raises its own exceptions
        raise Unusable("unreadable", describe_error(error)) from error
    with file:
        yield file


def _read_whole(file: BinaryIO, listed: Listed, limit: int) -> bytes:
    if listed["size"] > limit:
        raise Unusable("oversize", f"has {listed['size']} bytes, more than {limit}")
    try:
        # One byte more than allowed: some file systems report no size, and a file may grow.
        data = file.read(limit + 1)
    except Exception as error:
        raise Unusable("unreadable", describe_error(error)) from error
    if len(data) > limit:
        raise Unusable("oversize", f"has more than {limit} bytes")
    return data


class _Hashed(io.RawIOBase):
    """Stream that hashes the bytes read from it."""

    def __init__(self, stream: BinaryIO):
        self._stream, self._hash, self._size = stream, blake2b(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._hash.update(data)
        self._size += len(data)
        return len(data)

    def drain(self) -> None:
        """Read and hash the remaining bytes."""
        try:
            while self.read(CHUNK):
                pass
        except Exception as error:
            raise Unusable("unreadable", describe_error(error)) from error

    def record(self, listed: Listed) -> Iterator[TaggedOutput]:
        """Yield the outputs that record the file as read: an event and a File."""
        yield event("files read", listed["source"])
        source, place = listed["source"], listed["place"]
        record = File(source=source, place=place, size=self._size, hash=self._hash.hexdigest())
        yield TaggedOutput("files", record)
