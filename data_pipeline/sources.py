"""Reading: from files wherever they lie to filtered documents.

1. The driver lists the files of each source, in the order of their places. A listing says what a
   build was made from.
2. Workers take a file each; a Parquet file is shared out by its row groups, so that one file of
   millions of rows keeps many of them busy.
3. A file's text, or each of its rows, is a document, or several where a source is cut at chapters.
   Files of many rows are streamed: a line, or some rows of a row group, are in memory at a time.
4. Files and rows of no use are counted with their reason, and named. Nothing that a file holds
   stops a build.
5. What was read is filtered at once, so what goes is never written.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypedDict

import apache_beam as beam
import fsspec
import pyarrow as pa
from apache_beam.pvalue import TaggedOutput
from fsspec.implementations.local import LocalFileSystem

from data_pipeline import layouts
from data_pipeline.filter import FilterConfig, check_languages, describe, filter_documents
from data_pipeline.layouts import Row, Unusable
from data_pipeline.records import File, Removed, make_document
from spell_jax.data.clusters import TASKS

WHOLE: Mapping[str, Callable[[bytes], list[Row]]] = {
    ".txt": layouts.read_text,
    ".md": layouts.read_text,
    ".html": layouts.read_html,
    ".htm": layouts.read_html,
    ".pdf": layouts.read_pdf,
    ".json": layouts.read_docmath,
}
LINES = {".jsonl": "", ".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}  # with their compression
LAYOUTS = {
    "folder": (".txt", ".md", ".html", ".htm", ".pdf", *LINES, ".parquet"),
    "ultra_fineweb": (".parquet",),
    "docmath": (".json",),
    "json": (".json", ".jsonl"),
}
SPLITS = ("", "chapters")
NAMED_ROWS = 100  # of no use, of a file or row group, that are named; all are counted
CHUNK = 1 << 20  # bytes that are hashed at a time
# What a file system says of a file's version, best first: of its bytes, then of its time.
VERSIONS = ("md5Hash", "etag", "ETag", "generation", "mtime", "updated", "LastModified", "created")


@dataclass(frozen=True)
class SourceConfig:
    """Where documents come from, and what they are for.

    Attributes:
      path: a file, a folder (searched to its leaves; links to folders are not followed) or a glob;
        local or any URL that fsspec opens ("gs://...", "s3://...").
      layout: "folder": every .txt, .md, .html, .pdf, .jsonl (also .gz, .zst) and .parquet file;
        "ultra_fineweb": Parquet with the columns `text` and `quality`, both needed; "docmath":
        DocMath-Eval's JSON, the paragraphs of each question; "json": .json and .jsonl files of any
        nesting, every text in a field `text` (layouts.field_texts).
      tasks: one or more of TASKS that its documents may serve.
      split: "chapters": a text is cut at its chapter headings; "": it stays whole.
      together: the pieces of a document are clustered with each other alone, so that a cluster is
        (part of) one report, as DocMath's are in the paper.
      text, quality: fields of a row that hold its text ("text" is used where there is none of this
        name) and its score.
      max_file_bytes: of files that are read whole, and of a line of a .jsonl file; larger ones are
        counted and passed over.
      max_characters: instead of the filter's; 0: the filter's.
      min_quality, languages: instead of the filter's; None: the filter's.
    """

    path: str
    layout: str
    tasks: tuple[str, ...]
    split: str = ""
    together: bool = False
    text: str = "content"
    quality: str = "score"
    max_file_bytes: int = 1 << 30
    max_characters: int = 0
    min_quality: float | None = None
    languages: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("source.path = '': must be a file, a folder, a glob or a URL")
        if self.layout not in LAYOUTS:
            raise ValueError(f"source.layout = {self.layout!r}: must be one of {tuple(LAYOUTS)}")
        if not self.tasks or any(task not in TASKS for task in self.tasks):
            raise ValueError(f"source.tasks = {self.tasks}: must be one or more of {TASKS}")
        if self.split not in SPLITS:
            raise ValueError(f"source.split = {self.split!r}: must be one of {SPLITS}")
        for field in ("text", "quality"):
            if not getattr(self, field):
                raise ValueError(f"source.{field} = '': must be the name of a field")
        if self.max_file_bytes < 1:
            raise ValueError(f"source.max_file_bytes = {self.max_file_bytes}: must be at least 1")
        if self.max_characters < 0:
            raise ValueError(
                f"source.max_characters = {self.max_characters}: must be at least 1, or 0 for the "
                "filter's"
            )
        check_languages("source.languages", self.languages or ())

    @property
    def strict(self) -> bool:
        """Whether every row needs a score."""
        return self.layout == "ultra_fineweb"

    def filter(self, base: FilterConfig) -> FilterConfig:
        """`base` with what this source has instead.

        Raises:
          ValueError: the two do not go together.
        """
        instead: dict[str, Any] = {}
        if self.max_characters:
            instead["max_characters"] = self.max_characters
        if self.min_quality is not None:
            instead["min_quality"] = self.min_quality
        if self.languages is not None:
            instead["languages"] = self.languages
        return replace(base, **instead)


class Listed(TypedDict):
    """A file to be read.

    Attributes:
      source: name in the config.
      url: what fsspec opens.
      place: relative to the source's path.
      size: bytes; 0 where the file system does not say.
      version: changes when the file does; "" where the file system does not say.
    """

    source: str
    url: str
    place: str
    size: int
    version: str


class Piece(TypedDict):
    """Work for one worker: a file, or a row group of a Parquet file.

    Attributes:
      columns: of the Parquet file, as layouts.parquet_groups has them; []: it is another file.
      group, first: number of the row group, and of its first row in the file.
    """

    file: Listed
    columns: list[str]
    group: int
    first: int


# --------------------------------------------------------------------------------------- listing


def list_files(name: str, source: SourceConfig) -> list[Listed]:
    """The files of a source, by place. Files of other types are among them, hidden ones are not.

    Raises:
      FileNotFoundError: there is nothing at its path.
      ValueError: no file can be read in its layout; or its path, or a folder below it, cannot be
        opened, be it for want of a package or of permission.
    """
    where = f"sources.{name}.path = {source.path!r}"
    try:
        system, path = fsspec.url_to_fs(source.path)
        system.invalidate_cache()
        root, found = _find(system, path)
    except Exception as error:  # each file system has its own
        raise ValueError(f"{where}: cannot be opened, {describe(error)}") from error
    if not found:
        raise FileNotFoundError(f"{where}: no such file, or no file in it")
    listed = []
    for url, info in found.items():
        version = next((info[key] for key in VERSIONS if info.get(key)), "")
        listed.append(
            Listed(
                source=name,
                url=_writable(system.unstrip_protocol(url)),
                place=_writable(url.removeprefix(root).lstrip("/")),
                size=int(info.get("size") or 0),
                version=str(version),
            )
        )
    suffixes = LAYOUTS[source.layout]
    if not any(_suffix(file["place"]) in suffixes for file in listed):
        raise ValueError(
            f"{where}: none of its {len(listed)} files is of the types of layout = "
            f"{source.layout!r}: {', '.join(suffixes)}"
        )
    return sorted(listed, key=lambda file: file["place"])


def _find(system: Any, path: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """The folder that places are relative to, and path -> info of the files."""
    if system.isfile(path):
        return path.rpartition("/")[0], {path: system.info(path)}
    if system.isdir(path):
        root, found = path, _below(system, path)
    else:
        fixed = path[: min((path.find(sign) for sign in "*?[" if sign in path), default=0)]
        root, found = fixed.rpartition("/")[0], system.glob(path, detail=True) if fixed else {}
    return root, {file: info for file, info in found.items() if _is_meant(file, root, info)}


def _below(system: Any, path: str) -> dict[str, dict[str, Any]]:
    if not isinstance(system, LocalFileSystem):
        return system.find(path, detail=True)
    # `find` would pass over a local folder that may not be read in silence.
    found, folders = {}, [path]
    for folder in folders:  # grows
        for info in system.ls(folder, detail=True):
            if info["type"] != "directory":
                found[info["name"]] = info
            elif not PurePosixPath(info["name"]).name.startswith("."):
                folders.append(info["name"])
    return found


def _is_meant(file: str, root: str, info: Mapping[str, Any]) -> bool:
    """Neither hidden nor a folder, nor a pipe, which would be waited for without end."""
    hidden = any(part.startswith(".") for part in file.removeprefix(root).split("/"))
    return not hidden and (info["type"] == "file" or bool(info.get("islink")))


def _writable(text: str) -> str:
    """A name that is no UTF-8 is changed: its file will be counted as unreadable, and named."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _suffix(place: str) -> str:
    """Of .jsonl.gz both parts."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(place).suffixes]
    both = "".join(suffixes[-2:])
    return both if both in LINES else "".join(suffixes[-1:])


# --------------------------------------------------------------------------------------- reading


def make_read(
    pipeline: beam.Pipeline,
    listed: Sequence[Listed],
    sources: Mapping[str, SourceConfig],
    filter: FilterConfig,
) -> dict[str, beam.PCollection]:
    """Files to filtered documents.

    Args:
      listed: of all sources together.
      sources: by the names in `listed`.
      filter: for all sources; each may have some of it otherwise.

    Returns:
      "documents"; "files" that were read; "removed": files, rows, and documents whose predicate
      failed; "counts": events (what, source), what being "files read", "files skipped: REASON",
      "row groups skipped: REASON", "rows skipped: REASON", "documents read", "documents kept",
      "documents removed: REASON".
    """
    configs = {name: source.filter(filter) for name, source in sources.items()}
    split = (
        pipeline
        | "list files" >> beam.Create(list(listed))
        | "share out files" >> beam.Reshuffle()
        | "split files"
        >> beam.FlatMap(_split, dict(sources)).with_outputs(
            "files", "removed", "counts", main="pieces"
        )
    )
    read = (
        split["pieces"]
        | "share out pieces" >> beam.Reshuffle()
        | "read pieces"
        >> beam.FlatMap(_read, dict(sources)).with_outputs(
            "files", "removed", "counts", main="documents"
        )
    )
    kept = filter_documents(read["documents"], configs)
    return {
        "documents": kept["documents"],
        "files": (split["files"], read["files"]) | "join files" >> beam.Flatten(),
        "removed": (split["removed"], read["removed"], kept["removed"])
        | "join removed" >> beam.Flatten(),
        "counts": (split["counts"], read["counts"], kept["counts"])
        | "join counts" >> beam.Flatten(),
    }


def _split(listed: Any, sources: Mapping[str, SourceConfig]) -> Iterator[Any]:
    """Pieces of a file; a Parquet file is hashed here, for it has many readers."""
    source, suffix = sources[listed["source"]], _suffix(listed["place"])
    if suffix not in LAYOUTS[source.layout]:
        yield from _skip(listed, "of another type", suffix or "no suffix")
    elif suffix != ".parquet":
        yield Piece(file=listed, columns=[], group=0, first=0)
    else:
        try:
            with _open(listed) as file:
                columns, rows = layouts.parquet_groups(
                    file, source.text, source.quality, source.strict
                )
                file.seek(0)
                hashed = _Hashed(file)
                hashed.drain()
        except Unusable as error:
            yield from _skip(listed, error.reason, error.because)
            return
        yield from hashed.record(listed)
        first = 0
        for group, number in enumerate(rows):
            yield Piece(file=listed, columns=columns, group=group, first=first)
            first += number


def _read(piece: Any, sources: Mapping[str, SourceConfig]) -> Iterator[Any]:
    """Documents of a piece."""
    listed = piece["file"]
    source, suffix = sources[listed["source"]], _suffix(listed["place"])
    try:
        if piece["columns"]:
            with _open(listed) as file:
                rows = layouts.parquet_rows(
                    file, piece["columns"], piece["group"], piece["first"], source.strict
                )
                yield from _documents(rows, listed, source)
        elif suffix in LINES and source.layout != "json":
            with _open(listed) as file:
                hashed = _Hashed(file)
                lines = _uncompressed(hashed, LINES[suffix])
                rows = layouts.json_rows(lines, source.text, source.quality, source.max_file_bytes)
                yield from _documents(rows, listed, source)  # to the last byte
            yield from hashed.record(listed)
        else:
            data = _fetch(listed, source.max_file_bytes)
            is_nested = source.layout == "json"
            rows = layouts.read_fields(data, source.text) if is_nested else WHOLE[suffix](data)
            if rows == [Row(None)]:
                raise Unusable("empty", "no text in it")
            hashed = _Hashed(io.BytesIO(data))
            hashed.drain()
            yield from hashed.record(listed)
            yield from _documents(rows, listed, source)
    except Unusable as error:
        what = "row groups" if piece["columns"] else "files"
        yield from _skip(listed, error.reason, error.because, what)


def _documents(rows: Iterable[Row], listed: Listed, source: SourceConfig) -> Iterator[Any]:
    named, in_lines = 0, _suffix(listed["place"]) in LINES
    for row in rows:
        place, line = listed["place"], ""
        if row.number is not None:
            place += f"#{row.number:09d}"
            line = f"{listed['place']}:{row.number + 1}: " if in_lines else ""
        if not row.text:
            reason = "bad row" if row.problem else "empty"
            yield TaggedOutput("counts", (f"rows skipped: {reason}", listed["source"]))
            if named < NAMED_ROWS:
                yield _removed(reason, listed["source"], place, line + row.problem)
            named += 1
            continue
        texts = layouts.chapters(row.text) if source.split else [row.text]
        for part, text in enumerate(texts):
            yield TaggedOutput("counts", ("documents read", listed["source"]))
            yield make_document(text, listed["source"], place, part, row.quality)


def _skip(listed: Listed, reason: str, because: str, what: str = "files") -> Iterator[TaggedOutput]:
    yield TaggedOutput("counts", (f"{what} skipped: {reason}", listed["source"]))
    yield _removed(reason, listed["source"], listed["place"], because)


def _removed(reason: str, source: str, place: str, because: str) -> TaggedOutput:
    because = _writable(because)
    return TaggedOutput(
        "removed", Removed(reason=reason, source=source, place=place, part=0, because=because)
    )


# ----------------------------------------------------------------------------------------- bytes


@contextmanager
def _open(listed: Listed) -> Iterator[BinaryIO]:
    # The file system is named rather than found by the URL: "::" in a name would be a chain to it.
    try:
        system = fsspec.filesystem(listed["url"].partition("://")[0])
        file = system.open(listed["url"], "rb")
    except Exception as error:  # each file system has its own
        raise Unusable("unreadable", describe(error)) from error
    with file:
        yield file


def _fetch(listed: Listed, limit: int) -> bytes:
    if listed["size"] > limit:
        raise Unusable("oversize", f"has {listed['size']} bytes, more than {limit}")
    with _open(listed) as file:
        try:
            data = file.read(limit + 1)
        except Exception as error:
            raise Unusable("unreadable", describe(error)) from error
    if len(data) > limit:
        raise Unusable("oversize", f"has more than {limit} bytes")
    return data


def _uncompressed(stream: io.RawIOBase, compression: str) -> BinaryIO:
    """Buffered; Arrow's streams refuse what breaks off, which others take for the end."""
    raw: Any = pa.CompressedInputStream(stream, compression) if compression else stream
    return io.BufferedReader(raw, CHUNK)


class _Hashed(io.RawIOBase):
    """A stream that knows the hash of what was read from it."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self._hash = hashlib.blake2b(digest_size=16)
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._hash.update(data)
        self._size += len(data)
        return len(data)

    def drain(self) -> None:
        """Reads what is left."""
        buffer = memoryview(bytearray(CHUNK))
        try:
            while self.readinto(buffer):
                pass
        except Exception as error:
            raise Unusable("unreadable", describe(error)) from error

    def record(self, listed: Listed) -> Iterator[TaggedOutput]:
        """That the file was read."""
        yield TaggedOutput("counts", ("files read", listed["source"]))
        record = File(
            source=listed["source"],
            place=listed["place"],
            size=self._size,
            hash=self._hash.hexdigest(),
        )
        yield TaggedOutput("files", record)
