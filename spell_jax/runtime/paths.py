"""Where a run's files are: a folder on a disk or in a bucket (gs://BUCKET/PATH), by etils.epath.

A file of a bucket appears whole, when it is closed, and a folder is no more than the beginning of
names: it is not made, and is there as long as a file is.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Collection

import fsspec.config
from etils import epath


def open_folder(path: str | os.PathLike[str]) -> epath.Path:
    """A run's folder by its name, which stays as it is; nothing is read or made there.

    Raises:
      ImportError: it is in a bucket, and gcsfs is not installed.
    """
    if os.fspath(path).startswith("gs://"):
        if importlib.util.find_spec("gcsfs") is None:
            raise ImportError(f"{path}: gs:// needs gcsfs; pip install 'spell_jax[gcs]'")
        # gcsfs keeps listings for good, but TensorStore and other hosts write there as well.
        fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return epath.Path(path)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is one for epath alone; pathlib would take it for a local one."""
    return "://" in os.fspath(path)


def entries(folder: epath.Path) -> list[epath.Path]:
    """What is in a folder; nothing if it is not there, as one of a bucket before its first file."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def replace_folder(source: pathlib.Path, target: epath.Path, last: Collection[str]) -> None:
    """Copies the files of a folder to one of a bucket, whose old content goes first.

    Args:
      source: local, without folders of its own.
      target: in a bucket; while it is not whole, the files of `last` are missing.
      last: names of files that are copied behind all others.
    """
    target.rmtree(missing_ok=True)
    for path in sorted(source.iterdir(), key=lambda path: (path.name in last, path.name)):
        epath.Path(path).copy(target / path.name)
