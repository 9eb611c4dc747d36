"""Local copies of data and weights that a config or a flag names by a URL.

1. A URL names a file or a folder, which means all files below it. They are listed with their sizes
   and versions (content hash, generation or time of the last change).
2. Files that the cache lacks are read, several at a time, in requests of at most CHUNK bytes. Every
   request has a time limit. A failed one is repeated after a growing pause, unless nothing is there
   or the access is refused.
3. A complete file is renamed into the cache. When all files are there and a second listing equals
   the first, hard links make a folder, under a name that depends on all versions.

A process that is killed thus leaves no half file that counts as complete, and the next one reads
only what is missing. Of a folder, only changed files are read again.

fsspec reads the URLs: it has every protocol (s3://, https://), and it is what epath uses for gs://.
Workdirs need epath (paths.py), because they are written in place. Data and weights need local
files, because safetensors, SentencePiece and ArrayRecord open nothing else. Models of the Hugging
Face Hub (hf://) are read by hub.py, into the cache that they share with other programs.

fsspec's own caches, filecache and simplecache, are no replacement. Both wait for ever for a server
that does not answer, end at the first broken connection, keep a file that was cut off, mix two
versions of a folder that changes, and give files hashes for names. Neither notices a changed file
at an https:// URL. simplecache also takes the half file of a killed process for a complete one.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import logging
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import fsspec
import tenacity

from spell_jax.runtime import urls
from spell_jax.runtime.files import durable, hub, paths
from spell_jax.runtime.urls import FetchError

T = TypeVar("T")
log = logging.getLogger(__name__)

# Bytes per request. 16 MiB arrive within TIMEOUT_S at .14 MB/s and more, and a broken connection
# costs no more than one such part.
CHUNK = 1 << 24
WORKERS = 8  # files that are read at the same time
TIMEOUT_S = 120.0  # limit of one request
# Tries of a request, and the pause after the first failed try, doubled after each further try: the
# pauses are 1, 2, 4 and 8 s.
ATTEMPTS = 5
BACKOFF_S = 1.0
LISTINGS = 3  # tries to read a folder that changes meanwhile

# Errors of wrong names or of programs, which another try does not cure.
_PERMANENT = (ImportError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError)

# Keys of fsspec's file info that give a file's version, best first: content hash, then time.
VERSIONS = (
    *("md5Hash", "blob_id", "etag", "ETag", "generation"),
    *("mtime", "updated", "LastModified", "Last-Modified", "created"),
)


class RemoteFile(NamedTuple):
    path: str  # in its file system
    size: int | None  # bytes; None if the server does not say
    version: str  # changes when the content changes


def file_version(info: Mapping[str, Any]) -> str:
    """Return the version in fsspec's info of a file; "" if its file system reports none."""
    return str(next((info[key] for key in VERSIONS if info.get(key)), ""))


def fetch(url: str | os.PathLike[str], *, with_weights: bool = True) -> pathlib.Path:
    """Return a local path, with ~ expanded; fetch a URL into the cache, and return the path there.

    A folder is fetched without its .safetensors files unless `with_weights`. A process looks at a
    URL at most twice, once with and once without weights, and keeps the versions of these moments.
    Every host fetches for itself; processes of one machine share the cache (paths.cache_folder).
    FetchError if the URL cannot be read or the cache cannot be written, ValueError if the URL has a
    password or a key, or if no bucket can be reached, ImportError if a package for the protocol is
    missing.
    """
    if not paths.is_remote(url):
        return pathlib.Path(paths.expand_home(url))
    name = os.fspath(url).rstrip("/")
    # Without its slashes, hf:// would be no URL of the Hub, which says what is missing.
    return cached_copy("hf://" if name == "hf:" else name, with_weights)


# functools.cache tells a default from the same value written out, and a keyword from a position:
# `fetch` alone calls this function, always with two positions.
@functools.cache
def cached_copy(url: str, with_weights: bool) -> pathlib.Path:
    """Fetch a URL without a slash at its end, as `fetch`; remember the path for later calls."""
    # Logs and errors name the URL.
    urls.check_secret("URL", url)
    if hub.is_model(url):
        return hub.fetch(url, with_weights=with_weights)
    paths.prepare(url)
    place = paths.cache_folder() / "fetched" / _digest(url)
    try:
        with paths.machine_lock(place / "lock"):
            return _fetch(url, place, with_weights)
    except FetchError:
        raise
    except OSError as error:
        raise FetchError(
            f"{url}: its copy cannot be written ({error}); free some space, or name another cache "
            f"folder by {paths.CACHE_VARIABLE}"
        ) from error


def _fetch(url: str, place: pathlib.Path, with_weights: bool) -> pathlib.Path:
    """Return the path of a URL's newest version in folder `place`, which the caller has locked."""
    system, path = _request(url, lambda: _open(url))
    name = pathlib.PurePosixPath(path.partition("?")[0]).name or "files"
    # A file without a version gets the time, so that no process takes it for an earlier file.
    unknown = f"unknown at {time.time_ns()}"
    files = _list(url, system, path, unknown, with_weights)
    for _ in range(LISTINGS):
        folder = place / _digest([name, *files.items()])
        if folder.exists():
            return folder / name
        scratch = place / "unfinished"
        shutil.rmtree(scratch, ignore_errors=True)  # left by a process that was killed
        scratch.mkdir()
        failure = None
        try:
            _read_missing(url, system, files.values(), place)
        except FetchError as error:  # perhaps because the file has just been replaced
            failure = error
        # Equal listings before and after the reads show that all files belong to one version.
        before, files = files, _list(url, system, path, unknown, with_weights)
        if files != before:
            # Files that changed meanwhile may hold parts of two versions.
            for _, file in before.items() - files.items():
                (place / _digest(file)).unlink(missing_ok=True)
            continue
        if failure:
            raise failure
        for relative, file in files.items():
            # Hard links: the next version of the folder shares all unchanged files.
            link = scratch / "folder" / name / relative
            link.parent.mkdir(parents=True, exist_ok=True)
            link.hardlink_to(place / _digest(file))
        # The rename is the commit: a folder of this name is complete.
        (scratch / "folder").rename(folder)
        log.info("%s: fetched to %s", url, folder / name)
        return folder / name
    raise FetchError(
        f"{url}: changed each time that it was read; try again when nobody writes there"
    )


def _open(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    try:
        return fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ImportError(
            f"{url}: cannot be opened ({error}); check its protocol, or install the package for it"
        ) from error


def _list(
    url: str, system: Any, path: str, unknown: str, with_weights: bool
) -> dict[str, RemoteFile]:
    """Return a URL's files by relative path; a file that the URL itself names has the path ""."""

    def find() -> dict[str, Any]:
        # fsspec keeps listings: without this, a second listing would always equal the first.
        system.invalidate_cache()
        info = system.info(path)
        return {path: info} if info["type"] == "file" else system.find(path, detail=True)

    files = {}
    for full, info in sorted(_request(url, find).items()):
        relative = full.removeprefix(path).lstrip("/")
        if info["type"] == "directory" or relative.endswith("/"):
            continue  # an empty object that stands for a folder
        if not with_weights and relative.endswith(".safetensors"):
            continue
        if ".." in pathlib.PurePosixPath(relative).parts:
            raise FetchError(f"{url}: has a file {relative!r}; must have names without '..'")
        files[relative] = RemoteFile(full, info.get("size"), file_version(info) or unknown)
    if not files:
        raise FetchError(f"{url}: has no files; check the name")
    return files


def _read_missing(url: str, system: Any, files: Iterable[RemoteFile], place: pathlib.Path) -> None:
    """Read each missing file to PLACE/unfinished, and rename it to PLACE/DIGEST."""
    missing = {_digest(file): file for file in files if not (place / _digest(file)).exists()}
    size = sum(file.size or 0 for file in missing.values())
    log.info("%s: reading %d files, %d bytes", url, len(missing), size)

    def read_missing(digest: str) -> None:
        unfinished = place / "unfinished" / digest
        _read_file(url, system, missing[digest], unfinished)
        unfinished.replace(place / digest)

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        for _ in pool.map(read_missing, missing):
            pass


def _read_file(url: str, system: Any, file: RemoteFile, target: pathlib.Path) -> None:
    def read_range(start: int, end: int | None) -> bytes:
        # A whole file is asked for without a range, which some servers ignore.
        is_whole = start == 0 and end == file.size
        data = system.cat_file(file.path, **({} if is_whole else {"start": start, "end": end}))
        if end is not None and len(data) != end - start:
            raise OSError(f"{file.path}: {len(data)} bytes instead of {end - start}, from {start}")
        return data

    with target.open("wb") as out:
        if file.size is None:
            out.write(_request(url, lambda: read_range(0, None)))
        for start in range(0, file.size or 0, CHUNK):
            end = min(start + CHUNK, file.size or 0)
            out.write(_request(url, functools.partial(read_range, start, end)))
    # Otherwise the name could reach the disk before the bytes.
    durable.sync(target)


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


# ---------------------------------------------------------------------------------------- Requests


def _request(url: str, call: Callable[[], T]) -> T:
    """Return the result of a call with time limit and retries; FetchError if it fails for good."""

    def note(state: tenacity.RetryCallState) -> None:
        error = state.outcome and state.outcome.exception()
        log.warning("%s: try %d of %d: %s", url, state.attempt_number, ATTEMPTS, _text(error))

    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_exponential(BACKOFF_S),
        retry=tenacity.retry_if_exception(_is_transient),
        before_sleep=note,
        reraise=True,
    )
    try:
        return retrying(functools.partial(_limited, call))
    except ImportError:
        raise
    except Exception as error:  # every file system has errors of its own
        raise FetchError(f"{url}: {_explain(error)}") from error


def _limited(call: Callable[[], T]) -> T:
    """Return the result of a call; TimeoutError if it takes too long, while its thread runs on."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def call_into_future() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    # A thread, because file systems of fsspec differ in their time limits, and some have none. A
    # daemon, so that no exit of the process waits for it.
    threading.Thread(target=call_into_future, daemon=True).start()
    if not concurrent.futures.wait([future], TIMEOUT_S).done:
        raise TimeoutError(f"no answer within {TIMEOUT_S:g} s")
    return future.result()


def _is_transient(error: BaseException) -> bool:
    status = _status(error)
    if status:
        # 408 (request timeout) and 429 (too many requests) are the client errors that pass.
        return not 400 <= status < 500 or status in (408, 429)
    return not isinstance(error, _PERMANENT)


def _status(error: BaseException) -> int:
    """Return the HTTP status of an error; 0 if it has none, such as a broken connection."""
    if isinstance(error, FileNotFoundError):
        # The HTTP file system of fsspec raises it after every failure.
        cause = error.__cause__
        is_reason = isinstance(cause, OSError) or hasattr(cause, "status")
        return _status(cause) if cause and is_reason else 404
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden"):  # gcsfs
        return 403
    for carrier in (error, getattr(error, "response", None)):
        for name in ("status", "code", "status_code"):
            if (text := str(getattr(carrier, name, ""))).isdecimal():
                return int(text)
    return 0


def _explain(error: Exception) -> str:
    status = _status(error)
    if status in (404, 410):
        return "there is no such file or folder; check the name"
    if status in (401, 403):
        return (
            f"the access is refused ({_text(error)}); this machine's account must be allowed to "
            "list and read it, or you must log in (gcloud auth application-default login for gs://)"
        )
    tries = f"in {ATTEMPTS} tries" if _is_transient(error) else "at all"
    return f"cannot be read {tries} ({_text(error)}); try again, or copy it to a local folder"


def _text(error: BaseException | None) -> str:
    # The HTTP file system of fsspec raises it after every failure, with the URL alone.
    if isinstance(error, FileNotFoundError) and error.__cause__:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
