"""Folders of safetensors files: one model.safetensors, or shards with an index.

`scan` reads all headers but no data, and rejects any inconsistency. `write_tensors` holds one shard
of tensors at a time. `replacing` writes a folder beside the old folder and renames it, so that no
reader sees a half-written folder.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from spell_jax.runtime.files import durable, paths
from spell_jax.runtime.files.jsonl import write_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Suffixes of weight files, in this format or in others.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5")
CONFIGS = ("config.json", "adapter_config.json")  # copied last: a folder without one is incomplete


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file, with its dtype in the format's notation ("F32", "BF16", ...)."""

    path: pathlib.Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.path}: tensor {self.name}"

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Read a slice as a new array in the file's dtype; `index` has a start and a stop per axis.

        Raises ValueError if the file changed after its header was read.
        """
        # Opened each time: the library maps the file into memory, and only closing releases the
        # touched pages.
        try:
            with safetensors.safe_open(self.path, "numpy") as file:
                return file.get_slice(self.name)[index]
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{self}: cannot be read ({error})") from error


def has_weights(folder: pathlib.Path) -> bool:
    """Return whether a folder contains weights, including formats that are not supported."""
    return any(path.suffix in _WEIGHTS or path.name == INDEX for path in folder.iterdir())


def scan(folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, Tensor]]:
    """Read the headers of all weights; return the path of the single file or index, and tensors.

    Raises:
      FileNotFoundError: if there are no weights, or a shard is missing.
      ValueError: if a file is damaged, a tensor occurs twice or in another shard than the index
        says, or there are weights that the index does not name. The message names the file.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() and index.is_file():
        raise ValueError(f"{index}: must not be there beside {SINGLE}")
    if not single.is_file() and not index.is_file():
        pickled = next(iter(sorted(folder.glob("*.bin"))), None)
        hint = f"; must be converted from {pickled.name}, which can run code" if pickled else ""
        raise FileNotFoundError(f"{single}: not there, and no {INDEX} either{hint}")
    source = single if single.is_file() else index
    file_of = _read_index(index) if source == index else None
    shards = sorted({SINGLE} if file_of is None else set(file_of.values()))
    for name in shards:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: not there, but {INDEX} names it")
    # A stray shard of another save would otherwise be ignored without a word.
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in shards:
            raise ValueError(f"{path}: holds weights that {source.name} does not name")
    tensors: dict[str, Tensor] = {}
    for name in shards:
        for tensor in read_header(folder / name):
            if file_of is not None and (indexed := file_of.get(tensor.name)) != name:
                raise ValueError(f"{tensor} is in this file, but {INDEX} says {indexed}")
            tensors[tensor.name] = tensor
    for name, shard in (file_of or {}).items():
        if name not in tensors:
            raise ValueError(f"{folder / shard}: tensor {name} is missing, but {INDEX} names it")
    return source, tensors


def _read_index(path: pathlib.Path) -> dict[str, str]:
    content = _parse_json(path, path.read_bytes())
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{path}: weight_map must be an object with tensors and their files")
    for name, shard in places.items():
        # Checked as text, because files in the Hub's cache are links to other folders.
        if not isinstance(shard, str) or not re.fullmatch(r"[\w.-]+\.safetensors", shard):
            raise ValueError(
                f"{path}: tensor {name} is in {shard!r}: must be a .safetensors of this folder"
            )
    return places


def read_header(path: pathlib.Path) -> list[Tensor]:
    """Read the tensors of a file's header, without duplicates, but no data.

    ValueError if the file is damaged; the library checks offsets and length.
    """
    try:
        with safetensors.safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors = [
                Tensor(path, name, part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            ]
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a complete safetensors file ({error})") from error
    with path.open("rb") as file:
        # If a name occurs twice with the same bytes, the library silently takes the last.
        _parse_json(path, file.read(int.from_bytes(file.read(8), "little")))
    return tensors


def _parse_json(path: pathlib.Path, text: bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = collections.Counter(name for name, _ in pairs)
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"{repeated[0]} is there twice")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged ({error})") from error


def write_tensors(
    folder: pathlib.Path, sizes: Mapping[str, int], tensors: Iterable[np.ndarray], shard_bytes: int
) -> None:
    """Write tensors to model.safetensors, or to shards and an index if they are too large.

    `sizes` gives the bytes of each tensor by name, in the order of `tensors`, which are consumed
    one by one; the tensors of one shard are held together. A shard has at most `shard_bytes` bytes
    unless a single tensor is larger. The folder must exist.
    """
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    source = iter(tensors)
    places = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE
        if len(shards) > 1:
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        held = dict(zip(names, itertools.islice(source, len(names)), strict=True))
        save_file(held, folder / file)
        # Freed before the next shard is built, so that one shard is in memory at a time.
        del held
        places |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        write_json(folder / INDEX, index, indent=2)


def save_file(tensors: dict[str, np.ndarray], path: pathlib.Path) -> None:
    """Write one safetensors file, with transformers' metadata.

    Tries again if the disk is full (durable.retried). Does not fsync the file.
    """

    def save() -> None:
        try:
            safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:  # holds an OSError as text only
            path.unlink(missing_ok=True)
            if code := re.search(r"os error (\d+)", str(error)):
                raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
            raise

    durable.retried(path, save)
    path.chmod(0o644)  # the library makes it readable by its owner only


@contextlib.contextmanager
def replacing(folder: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yield an empty folder, which replaces `folder` when the block ends.

    After an exception nothing has changed. After a crash the folder is unchanged, or missing with
    its old content next to it; the next call restores it. Only one process at a time may replace a
    folder.

    Buckets cannot rename folders. There the yielded folder is a temporary local one, copied at the
    end; after a crash during the copy, config.json is missing.
    """
    if paths.is_remote(folder):
        with tempfile.TemporaryDirectory() as scratch:
            yield pathlib.Path(scratch)
            paths.replace_folder(pathlib.Path(scratch), epath.Path(folder), last=CONFIGS)
        return
    folder = pathlib.Path(folder).resolve()  # replaces the target of a link
    durable.make_folder(folder.parent)
    _tidy(folder)
    # In the same parent, because a rename must stay within one file system.
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    old = scratch.with_name(scratch.name + "-old")
    try:
        scratch.chmod(0o755)
        yield scratch
        # Contents reach the disk before the name does: after a loss of power no named folder is
        # empty.
        durable.sync_tree(scratch)
        if folder.exists():
            folder.rename(old)
        scratch.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    durable.sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _tidy(folder: pathlib.Path) -> None:
    """Restore or remove what crashed calls of `replacing` left next to the folder."""
    pattern = re.compile(rf"\.{re.escape(folder.name)}-[a-z0-9_]{{8}}(-old)?")
    for path in sorted(folder.parent.iterdir()):
        if match := pattern.fullmatch(path.name):
            # The crash came between the two renames: the folder gets its old content back.
            if match[1] and not folder.exists():
                path.rename(folder)
            else:
                shutil.rmtree(path)
