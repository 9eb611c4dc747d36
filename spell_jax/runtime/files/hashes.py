"""Hashes of a folder's files, to detect unfinished and damaged folders.

hashes.txt is written last: its presence marks the folder as complete. It has two lines: a hash of
the second line; a JSON object with the step, a score and [bytes, hash] of every other file by path.
The step is the folder's name: a renamed folder counts as damaged.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
from typing import Any

from etils import epath

from spell_jax.runtime.files import durable, paths
from spell_jax.runtime.finite import is_finite

FILE = "hashes.txt"
UNFINISHED = f"{FILE}: missing (the save did not end, or the file was removed)"
_CHUNK = 1 << 20  # bytes per read


def write_hashes(folder: epath.Path, score: float | None) -> None:
    """Bring a folder's files to the disk, hash them, and store the hashes with the score.

    The folder's name must be its step.
    """
    durable.sync_tree(folder)
    names = _files(folder)
    # Threads suffice: hashlib releases the GIL.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sums = dict(zip(names, pool.map(lambda name: _hash(folder / name), names), strict=True))
    content = json.dumps({"step": int(folder.name), "score": score, "files": sums}).encode()
    # The record has a hash of its own. Otherwise a flipped bit in it would accuse an intact file.
    head = _blake2b(content).hexdigest().encode()
    durable.write_file(folder / FILE, head + b"\n" + content)


def _read_record(folder: epath.Path) -> dict[str, Any]:
    """Read the record of `write_hashes`; ValueError if unreadable, altered or of another step."""
    try:
        with paths.open_file(folder / FILE) as file:
            head, _, content = file.read().partition(b"\n")
    except OSError as error:
        # A link to nowhere is damage by hand, not a save that did not end.
        missing = isinstance(error, FileNotFoundError) and not os.path.islink(folder / FILE)
        raise ValueError(UNFINISHED if missing else _unreadable(FILE, error)) from error
    if _blake2b(content).hexdigest().encode() != head:
        raise ValueError(f"{FILE}: truncated or altered")
    try:
        record = json.loads(content)
    except RecursionError as error:
        raise ValueError(f"{FILE}: not written by a run ({error})") from error
    if not _is_record(record):
        raise ValueError(f"{FILE}: not written by a run")
    # Checkpoints of versions before 0.1 have no step.
    if str(step := record.get("step", folder.name)) != folder.name:
        raise ValueError(f"{FILE}: of step {step}, the folder was renamed")
    return record


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(files := value.get("files"), dict):
        return False
    # A path must stay inside the folder, because a check reads the file that it names, and must be
    # printable, because messages quote it.
    places = [os.path.normpath(name).split(os.sep)[0] for name in files]
    if any(place in ("", "..") for place in places) or not "".join(files).isprintable():
        return False
    score = value.get("score", "missing")
    return (score is None or is_finite(score)) and all(
        isinstance(sums, list) and [type(item) for item in sums] == [int, str]
        for sums in files.values()
    )


def score(folder: epath.Path) -> tuple[bool, float | None]:
    """Return (whether a folder is finished, its score); the score may be None."""
    try:
        return True, _read_record(folder)["score"]
    except ValueError:
        return False, None


def damage(folder: epath.Path) -> str:
    """Describe the damaged or unreadable files of a folder, by name; "" without damage."""
    try:
        files = _read_record(folder)["files"]
    except ValueError as error:
        return str(error)

    def damage_of(name: str) -> str | None:
        try:
            actual = _hash(folder / name)
        except FileNotFoundError:
            return f"{name}: missing"
        except OSError as error:
            return _unreadable(name, error)
        if actual[0] < files[name][0]:
            return f"{name}: truncated to {actual[0]} of {files[name][0]} bytes"
        return None if actual == files[name] else f"{name}: altered"

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return "; ".join(filter(None, pool.map(damage_of, files)))


def _unreadable(name: str, error: OSError) -> str:
    return f"{name}: cannot be read ({error.strerror or error})"


def fingerprint(folder: epath.Path) -> str:
    """Return 32 hex digits that identify the weights in a folder without reading them all.

    The name, the size and the last MiB of each file are hashed.
    """
    # An update changes every tensor, so the last MiB of each file changes too. Reading 60 GB of a
    # large policy would take a minute.
    digest = _blake2b()
    for name in sorted(_files(folder)):
        with (folder / name).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _CHUNK))
            digest.update(json.dumps([name, size, _blake2b(file.read()).hexdigest()]).encode())
    return digest.hexdigest()


def _files(folder: epath.Path) -> list[str]:
    """Return the relative paths of all files in a folder and its subfolders."""
    walked = [(os.fspath(parent), names) for parent, _, names in folder.walk()]
    top = walked[0][0]  # not `folder`: for gs://, etils 1.15 drops the scheme
    return [os.path.relpath(f"{parent}/{name}", top) for parent, names in walked for name in names]


def _hash(path: epath.Path) -> list[Any]:
    size, digest = 0, _blake2b()
    with paths.open_file(path) as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            digest.update(chunk)
    return [size, digest.hexdigest()]


def _blake2b(content: bytes = b"") -> hashlib.blake2b:
    # 16 bytes detect accidents. Nothing here keeps an attacker from forging a checkpoint.
    return hashlib.blake2b(content, digest_size=16)
