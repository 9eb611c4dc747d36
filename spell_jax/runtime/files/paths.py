"""Paths of a run's files: a folder on disk or in a bucket (gs://BUCKET/PATH), by etils.epath.

A file in a bucket appears when it is closed. A folder there is only a prefix of names. Data and
weights are not opened in a bucket but fetched from it (remote.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import importlib.util
import os
import pathlib
import re
import socket
import stat
import time
import urllib.request
from collections.abc import Collection, Iterator
from typing import IO

import fsspec.config
from etils import epath

GCS_HOST = "storage.googleapis.com"
CACHE_VARIABLE = "SPELL_CACHE"
# In the folder of a run.
CONFIG_FILE = "config.json"
RUN_FILE = "run.json"  # what was run: trainer/run_record.py
CHECKPOINTS_FOLDER = "checkpoints"
# What a run needs to go on in another folder, besides a checkpoint.
RUN_FILES = (CONFIG_FILE, RUN_FILE, "metrics.jsonl", "evaluation.json", "wandb_id", "best")
_FILES = (CONFIG_FILE, RUN_FILE, "metrics.jsonl", "evaluation.json", "wandb_id", "lock.json")
_FOLDERS = (CHECKPOINTS_FOLDER, "episodes", "policy", "best", "plots", "tensorboard")
_NO_FILE = "a pipe, a socket or a device"
_WRITABLE = "must be a folder that this user may write to"


def open_folder(path: str | os.PathLike[str]) -> epath.Path:
    """Return the path of a folder, with ~ expanded; errors as in `prepare`."""
    prepare(path)
    return epath.Path(expand_home(path))


def open_workdir(path: str | os.PathLike[str]) -> epath.Path:
    """Return the path of a run's workdir, as `open_folder`, but absolute.

    A run writes there to its end, though a reward function may have changed the current folder.
    """
    return epath.Path(absolute(open_folder(path)))


def expand_home(path: str | os.PathLike[str]) -> str:
    """Replace a ~ at the start of a path by the user's home folder.

    A shell replaces it in `--out ~/a`, but not in `--out=~/a`, nor in a config file. ValueError if
    the user has no home folder, or if there is no user of the name after ~.
    """
    text = os.fspath(path)
    # A file may be called ~: only a user's name, or nothing, stands between ~ and a slash.
    if not re.match(r"~[\w.-]*(/|$)", text):
        return text
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ValueError(f"{text!r}: no such home folder; write the whole path")
    return expanded


def shipped_configs() -> dict[str, str]:
    """Map the names of the configs in the package ("tiny", "data/paper") to their paths."""
    folder = pathlib.Path(__file__).parents[2] / "configs"  # a link in a checkout
    files = sorted(folder.rglob("[a-z]*.py"))
    return {str(path.relative_to(folder).with_suffix("")): str(path) for path in files}


def prepare(path: str | os.PathLike[str]) -> None:
    """Set up the access to a path.

    ImportError if it is in a bucket that needs gcsfs, ValueError if no bucket can be reached.
    """
    if os.fspath(path).startswith("gs://"):
        if importlib.util.find_spec("gcsfs") is None:
            raise ImportError(f"{path}: gs:// needs gcsfs; pip install 'spell_jax[gcs]'")
        # gcsfs caches listings forever, but TensorStore and other hosts write there as well.
        fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
        if reason := _why_unreachable():
            raise ValueError(
                f"{os.fspath(path)}: {GCS_HOST} cannot be reached ({reason}); check this machine's "
                "network, or name a local folder"
            )


@functools.cache
def _why_unreachable() -> str:
    """Return why the host of gs:// cannot be reached; "" if it can, or if a proxy stands before it.

    Takes at most 34 s.
    """
    # gcsfs tries each request 6 times, which takes 33 s without a network, and logs a traceback
    # each time. A start asks for many files.
    if "STORAGE_EMULATOR_HOST" in os.environ or urllib.request.getproxies():
        return ""
    reason: object = ""
    for pause in (0.0, 1.0, 3.0):
        time.sleep(pause)
        try:
            socket.create_connection((GCS_HOST, 443), timeout=10.0).close()
            return ""
        except OSError as error:
            reason = error.strerror or error
    return str(reason)


def make_workdir(path: epath.Path) -> None:
    """Make the folder of a run.

    ValueError if the folder cannot be made or written to, or if its name would make checkpoints
    unreadable. ValueError too if a run's file or folder is there as something else, such as a pipe.
    """
    check_characters("workdir", path)
    _make(path, f"workdir = {os.fspath(path)!r}")
    # Before training: a wrong file type would otherwise be noticed at the first checkpoint.
    for name in _FILES:
        require(path / name, "a file")
    for name in _FOLDERS:
        require(path / name, "a folder")


def make_output_folder(path: epath.Path) -> None:
    """Make a folder to write files to.

    ValueError if it cannot be made or written to, or if something else is there.
    """
    require(path, "a folder")
    _make(path, os.fspath(path))
    if not is_remote(path) and not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"{os.fspath(path)}: permission denied; {_WRITABLE}")


def _make(path: epath.Path, name: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{name}: cannot be made ({reason}); {_WRITABLE}") from error


def check_characters(field: str, path: str | os.PathLike[str]) -> None:
    """Raise ValueError for a folder in which Orbax, TensorStore or Beam would find no files.

    Orbax and Beam look for files with a glob of the whole path: a run in a folder "[x]" was saved
    and could never be resumed. TensorStore takes only UTF-8.
    """
    # The absolute path: a relative one may be clean below a folder that is not.
    name = absolute(path)
    bad = [sign for sign in name if sign in "*?[]\\" or "\ud800" <= sign <= "\udfff"]
    if bad:
        raise ValueError(
            f"{field} = {name!r}: has {bad[0]!r}, and files there could not be read again; must be "
            "UTF-8 without * ? [ ] \\; choose another folder, or rename it"
        )


def absolute(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a local file or folder, or a URL unchanged."""
    return os.fspath(path) if is_remote(path) else os.path.abspath(path)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL, which pathlib would treat as a local path."""
    return "://" in os.fspath(path)


def open_file(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file to read its bytes; OSError for a device or a pipe, where reads may never end."""
    # Checked before opening: to open a pipe without a writer blocks.
    if _kind(path) == _NO_FILE:
        raise OSError(errno.EINVAL, _NO_FILE, os.fspath(path))
    return epath.Path(path).open("rb")


def require(path: str | os.PathLike[str], kind: str) -> None:
    """Raise ValueError if a path, with ~ expanded, exists and is not of this `kind` (`_kind`)."""
    if (present := _kind(expand_home(path))) not in (kind, ""):
        raise ValueError(f"{os.fspath(path)}: is {present}, must be {kind}; move or remove it")


def _kind(path: str | os.PathLike[str]) -> str:
    """Describe what is at a path; "" if nothing is, or for a URL (a bucket has only files)."""
    if is_remote(path):
        return ""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return "a link to itself" if error.errno == errno.ELOOP else ""
    return {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder"}.get(stat.S_IFMT(mode), _NO_FILE)


def cache_folder() -> pathlib.Path:
    """Return the cache of fetched files and converted policies: $SPELL_CACHE or ~/.cache/spell_jax.

    $XDG_CACHE_HOME replaces ~/.cache. The folder may be deleted at any time between runs.
    ValueError if no variable is set and the user has no home folder.
    """
    if CACHE_VARIABLE in os.environ:
        return pathlib.Path(os.environ[CACHE_VARIABLE])
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        base = base or pathlib.Path.home() / ".cache"
    except RuntimeError as error:  # as in a container that runs with any uid
        raise ValueError(
            f"HOME: is not set, and user {os.getuid()} has no home folder; set it, or "
            f"{CACHE_VARIABLE}, to a folder that this user may write to"
        ) from error
    return pathlib.Path(base) / "spell_jax"


@contextlib.contextmanager
def machine_lock(file: pathlib.Path) -> Iterator[None]:
    """Lock a file in the context: one process of this machine enters, all other processes wait."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, or the process dies
        yield


def entries(folder: epath.Path) -> list[epath.Path]:
    """List the contents of a folder; [] if it does not exist, as a bucket folder without files."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def replace_folder(source: pathlib.Path, target: epath.Path, last: Collection[str]) -> None:
    """Replace a bucket folder by the files of a local folder; copy files named in `last` last."""
    # A bucket cannot rename a folder. A reader takes the folder as complete once it has the files
    # in `last`.
    target.rmtree(missing_ok=True)
    for path in sorted(source.iterdir(), key=lambda path: (path.name in last, path.name)):
        epath.Path(path).copy(target / path.name)
