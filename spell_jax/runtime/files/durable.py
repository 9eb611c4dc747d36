"""Writes that survive a loss of power, and a disk that is full for a while.

After a loss of power, a local file system has the bytes of a file only if the file was fsynced, and
its name only if its folder was. `write_file` therefore writes under another name, fsyncs, renames,
and fsyncs the folder. Operations that fail for a reason that may pass, such as a full disk, are
tried again (`retried`). Objects in a bucket need neither: they appear whole when they are closed.

`FolderWatch` notices that the folder of a run was removed or renamed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import itertools
import logging
import os
import pathlib
import stat
import weakref
from collections.abc import Callable
from time import sleep
from typing import Any, TypeVar

from etils import epath

from spell_jax.runtime.files import paths

T = TypeVar("T")
log = logging.getLogger(__name__)

# Tries after the first, and the pause before the second try, doubled before each further try. The
# pauses of 2, 4 and 8 s outlast a disk that another program fills for seconds.
RETRIES = 3
BACKOFF_S = 2.0
UNFINISHED = ".tmp"  # suffix of a file that is being written
# Errors that may pass: the disk or quota is full, or a network file system does not answer.
_PASSING = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ENOMEM),
    errno.ENXIO,  # of a pipe: nobody reads it yet
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH),
}
_WORKERS = 16  # threads that fsync files; disks join parallel fsyncs


class DiskError(OSError):
    """A failure of all tries to write a file; the message has its path, and what is saved."""


class GoneError(DiskError):
    """A workdir that was removed, renamed or replaced while a run wrote to it."""


class SaveError(RuntimeError):
    """A failure to save a step; the message names the fallback folder that has the step, if any."""


# ---------------------------------------------------------------------------------------- Retrying


def retried(place: Any, work: Callable[..., T], *args: Any) -> T:
    """Return work(*args); if an error may pass, log it and try again, up to RETRIES times.

    `work` must be able to run again after a failure in its middle. DiskError after all tries
    has `place`, a path, in its message.
    """
    for attempt in itertools.count():
        try:
            return work(*args)
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            if attempt == RETRIES:
                raise DiskError(f"{place}: {error.strerror}, {RETRIES + 1} tries") from error
            seconds = BACKOFF_S * 2**attempt
            log.warning("%s: %s; next try in %g s", place, error.strerror, seconds)
            sleep(seconds)
    raise AssertionError("not reached")


# ----------------------------------------------------------------------------------------- Writing


def run_now(work: Callable[..., Any], *args: Any) -> None:
    """Run work(*args) at once: the synchronous alternative to Background.submit."""
    work(*args)


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace the content of a file atomically; expand ~, and make its folder if it is missing.

    Replaces the target of a link. Writes to a terminal or pipe (/dev/stdout) directly; DiskError if
    no process reads the pipe for 14 s.
    """
    if paths.is_remote(path):
        epath.Path(path).write_bytes(content)
        return
    path = pathlib.Path(paths.expand_home(path))
    # A rename would replace a device such as /dev/stdout by a file.
    if path.exists() and not path.is_file() and not path.is_dir():
        retried(path, _write_through, path, content)
        return
    # Resolved, so that the rename replaces the target of a link and not the link.
    retried(path, _write_and_rename, path.resolve(), content)


def _write_through(path: pathlib.Path, content: bytes) -> None:
    """Write to a terminal, a device or a pipe; ENXIO if no process reads the pipe."""
    try:
        # Without O_NONBLOCK, opening a pipe that no process reads would wait for a reader without
        # end. With it, the call fails at once with ENXIO.
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_TRUNC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            error.strerror = "is a pipe that no process reads"
        raise
    # The write itself waits for a slow reader; otherwise a full pipe would look like a full disk.
    os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as file:
        file.write(content)


def _write_and_rename(target: pathlib.Path, content: bytes) -> None:
    make_folder(target.parent)
    unfinished = target.with_name(target.name + UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            # Bytes before the name: after a loss of power the name must not stand for missing
            # bytes.
            os.fsync(file.fileno())
        replace(unfinished, target)
    except OSError:
        # On a full disk the next try needs the space of the unfinished file.
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def append(path: pathlib.Path, content: bytes) -> None:
    """Append to a local file, or start it; after an error the file is as long as before.

    If the process is killed meanwhile, the file has at most a part of `content`. If it then ends
    without a line feed, the next call adds a line feed first.
    """
    retried(path, _append, path, content)


def _append(path: pathlib.Path, content: bytes) -> None:
    is_new = not path.exists()
    # Unbuffered: an error of the disk shows in `write`, while the old length is still known.
    with path.open("a+b", buffering=0) as file:
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - 1))
        # A process that was killed in mid-write leaves a line without an end, which the next record
        # must not continue.
        is_torn = file.read(1) not in (b"", b"\n")
        unwritten = memoryview(b"\n" * is_torn + content)
        try:
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
            os.fsync(file.fileno())
        except OSError:
            # Otherwise the next try would append all of `content` after a part of it.
            file.truncate(length)
            raise
    if is_new:
        sync(path.parent)


def replace(source: pathlib.Path, target: pathlib.Path) -> None:
    """Rename a local file durably; all its bytes must be on disk."""
    source.replace(target)
    sync(target.parent)


def make_folder(folder: str | os.PathLike[str]) -> None:
    """Make a folder, with ~ expanded, and the folders above it, unless they exist."""
    if paths.is_remote(folder):
        epath.Path(folder).mkdir(parents=True, exist_ok=True)
        return
    folder = pathlib.Path(paths.expand_home(folder))
    missing = list(itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    # The name of a new folder is stored in its parent.
    for path in missing:
        sync(path.parent)


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a local file's bytes, or the names in a local folder, to the disk (fsync)."""
    if paths.is_remote(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot fsync a folder (EINVAL); they store names at once.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: str | os.PathLike[str]) -> None:
    """Flush all files and folders below a local folder, and the folder itself, to the disk."""
    if paths.is_remote(folder):
        return
    walked = [(parent, names) for parent, _, names in os.walk(folder)]
    files = [os.path.join(parent, name) for parent, names in walked for name in names]
    # Files first, then folders from the leaves up: a name is worth nothing without its bytes.
    with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        list(pool.map(sync, filter(os.path.isfile, files)))
    for parent, _ in reversed(walked):
        sync(parent)


def remove(path: epath.Path) -> None:
    """Remove a folder with its content, or anything else; nothing happens if there is none."""
    if not paths.is_remote(path) and os.path.lexists(path) and not _is_folder(path):
        os.unlink(path)
        return
    path.rmtree(missing_ok=True)


def _is_folder(path: epath.Path) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def copy(source: epath.Path, target: epath.Path) -> None:
    """Copy a file, or a folder's files one by one; nothing happens if there is no `source`."""
    if source.is_dir():
        for path in source.iterdir():
            copy(path, target / path.name)
    elif source.exists():
        write_file(target, source.read_bytes())


# ---------------------------------------------------------------------------------------- Watching


class FolderWatch:
    """A watch over a local folder that must keep its path.

    There is nothing to check in a bucket, or if the folder does not exist at first.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = os.path.abspath(folder)
        self._descriptor: int | None = None
        if not paths.is_remote(folder) and os.path.isdir(folder):
            # Open while the run lasts: no other folder can then get this inode number.
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            weakref.finalize(self, os.close, self._descriptor)

    def check_folder(self) -> None:
        """Raise GoneError if the folder was removed, renamed or replaced."""
        # A write by path would make a second folder, without the files that the run wrote before.
        if self._descriptor is None:
            return
        try:
            present = os.stat(self._folder)
        except (FileNotFoundError, NotADirectoryError) as error:
            reason = error.strerror
        else:
            if os.path.samestat(present, os.fstat(self._descriptor)):
                return
            is_folder = stat.S_ISDIR(present.st_mode)
            reason = "another folder is there" if is_folder else os.strerror(errno.ENOTDIR)
        raise GoneError(
            f"workdir = {self._folder}: was removed or renamed while the run wrote to it ({reason})"
        )
