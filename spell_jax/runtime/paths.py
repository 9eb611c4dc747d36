"""Paths of a run's files: a folder on disk or in a bucket (gs://BUCKET/PATH), by etils.epath.

A file in a bucket appears when it is closed. A folder there is only a prefix of names.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Collection

import fsspec.config
from etils import epath


def open_folder(path: str | os.PathLike[str]) -> epath.Path:
    """Path of a folder, its name unchanged; ImportError if a bucket needs gcsfs."""
    if os.fspath(path).startswith("gs://"):
        if importlib.util.find_spec("gcsfs") is None:
            raise ImportError(f"{path}: gs:// needs gcsfs; pip install 'spell_jax[gcs]'")
        # gcsfs caches listings forever, but TensorStore and other hosts write there as well.
        fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return epath.Path(path)


def make_workdir(path: epath.Path) -> None:
    """Makes the folder of a run; ValueError if it cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"workdir = {os.fspath(path)!r}: cannot be made ({error.strerror or error}); must be a "
            "folder that this user may write to"
        ) from error


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether only epath can handle a path; pathlib would treat it as a local one."""
    return "://" in os.fspath(path)


def entries(folder: epath.Path) -> list[epath.Path]:
    """Contents of a folder; empty if it does not exist, such as a bucket folder without files."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def replace_folder(source: pathlib.Path, target: epath.Path, last: Collection[str]) -> None:
    """Replaces a bucket folder by the files of a local one; those named in `last` come last."""
    target.rmtree(missing_ok=True)
    for path in sorted(source.iterdir(), key=lambda path: (path.name in last, path.name)):
        epath.Path(path).copy(target / path.name)
