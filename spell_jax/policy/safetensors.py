"""Folders of safetensors files: one model.safetensors, or shards behind an index.

1. `scan` reads every header, and no data, and refuses whatever is not exactly as it should be.
2. `Tensor.read` reads a slice. It opens the file each time: the library maps it into memory, and
   only closing lets go of the pages that were touched.
3. `write` takes tensors one after the other and holds one shard of them.
4. `replacing` makes a folder appear whole or not at all.

What the tensors mean is the business of weights.py.
"""

from __future__ import annotations

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

from spell_jax.runtime import paths
from spell_jax.runtime.jsonl import write_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# How files end that hold weights, in this format or in others.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5")
CONFIGS = ("config.json", "adapter_config.json")  # a folder without one of them is none


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file.

    Attributes:
      path: the file.
      name: its name there.
      dtype: the format's word for it ("F32", "BF16", ...).
      shape: its axes.
    """

    path: pathlib.Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.path}: tensor {self.name}"

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """A slice (start and stop an axis) as an array of its own, in the file's dtype.

        Raises:
          ValueError: the file has changed since its header was read.
        """
        try:
            with safetensors.safe_open(self.path, "numpy") as file:
                return file.get_slice(self.name)[index]
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{self}: cannot be read ({error})") from error


# ----------------------------------------------------------------------------------------- Reading


def has_weights(folder: pathlib.Path) -> bool:
    """Whether a folder holds weights, or what must be some in a format that is not read."""
    return any(path.suffix in _WEIGHTS or path.name == INDEX for path in folder.iterdir())


def scan(folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, Tensor]]:
    """Reads the headers of all weights of a folder.

    Returns:
      (the file that says what there is: the single file or the index; tensors by name).

    Raises:
      FileNotFoundError: there are no weights, or a shard is missing.
      ValueError: a file is damaged, a tensor is there twice or in another shard than the index
        says, or there are weights that the index does not name; the message names the file.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() and index.is_file():
        raise ValueError(f"{index}: must not be there beside {SINGLE}")
    if not single.is_file() and not index.is_file():
        raise FileNotFoundError(f"{single}: not there, and no {INDEX} either")
    source = single if single.is_file() else index
    places = _read_index(index) if source == index else None
    shards = sorted({SINGLE} if places is None else set(places.values()))
    for name in shards:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: not there, but {INDEX} names it")
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in shards:
            raise ValueError(f"{path}: holds weights that {source.name} does not name")
    tensors: dict[str, Tensor] = {}
    for name in shards:
        for tensor in _read_header(folder / name):
            if places is not None and places.get(tensor.name) != name:
                raise ValueError(
                    f"{tensor} is in this file, but {INDEX} says {places.get(tensor.name)}"
                )
            tensors[tensor.name] = tensor
    for name, shard in (places or {}).items():
        if name not in tensors:
            raise ValueError(f"{folder / shard}: tensor {name} is missing, but {INDEX} names it")
    return source, tensors


def _read_index(path: pathlib.Path) -> dict[str, str]:
    """The index's map from tensors to file names."""
    content = _parse_json(path, path.read_bytes())
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{path}: weight_map must be an object with tensors and their files")
    for name, shard in places.items():
        # Tested as text: in the Hub's cache the files themselves are links to other folders.
        if not isinstance(shard, str) or not re.fullmatch(r"[\w.-]+\.safetensors", shard):
            raise ValueError(
                f"{path}: tensor {name} is in {shard!r}: must be a .safetensors of this folder"
            )
    return places


def _read_header(path: pathlib.Path) -> list[Tensor]:
    """The tensors of a file, none twice; the library checks offsets and the file's length."""
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
        # The library takes the last of two tensors of a name where both have the same bytes.
        _parse_json(path, file.read(int.from_bytes(file.read(8), "little")))
    return tensors


def _parse_json(path: pathlib.Path, text: bytes) -> Any:
    def no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twin = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{twin} is there twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=no_twins)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged ({error})") from error


# ----------------------------------------------------------------------------------------- Writing


def write(
    folder: pathlib.Path, sizes: Mapping[str, int], tensors: Iterable[np.ndarray], shard_bytes: int
) -> None:
    """Writes tensors to model.safetensors, or to shards and their index where they are too large.

    Args:
      folder: where to; it exists.
      sizes: bytes of each tensor by name, in the order of `tensors`.
      tensors: what to write, made one after the other; those of one shard are held together.
      shard_bytes: bytes of a shard at most, unless a single tensor has more.
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
        del held
        places |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        write_json(folder / INDEX, index, indent=2)


def save_file(tensors: dict[str, np.ndarray], path: pathlib.Path) -> None:
    """One safetensors file, as transformers marks its own."""
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library lets its owner alone read it


@contextlib.contextmanager
def replacing(folder: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """An empty folder to fill, that takes the given folder's place when the block is through.

    After an error nothing has changed. After a sudden death the folder is as it was, or missing
    with its old content beside it, which the next call brings back; what else lies there of dead
    calls is removed. One process at a time may replace a folder.

    Buckets cannot rename folders: one of theirs is filled in the system's temporary folder and then
    copied; after a death on the way its config.json is missing.
    """
    if paths.is_remote(folder):
        with tempfile.TemporaryDirectory() as scratch:
            yield pathlib.Path(scratch)
            paths.replace_folder(pathlib.Path(scratch), epath.Path(folder), last=CONFIGS)
        return
    folder = pathlib.Path(folder).resolve()  # of a link, the target is replaced
    folder.parent.mkdir(parents=True, exist_ok=True)
    _tidy(folder)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    old = scratch.with_name(scratch.name + "-old")
    try:
        scratch.chmod(0o755)
        yield scratch
        for path in (*scratch.rglob("*"), scratch):
            _to_disk(path)
        if folder.exists():
            folder.rename(old)
        scratch.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    _to_disk(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _tidy(folder: pathlib.Path) -> None:
    """Brings back or removes what dead calls of `replacing` left beside the folder."""
    pattern = re.compile(rf"\.{re.escape(folder.name)}-[a-z0-9_]{{8}}(-old)?")
    for path in sorted(folder.parent.iterdir()):
        if found := pattern.fullmatch(path.name):
            if found[1] and not folder.exists():
                path.rename(folder)
            else:
                shutil.rmtree(path)


def _to_disk(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
