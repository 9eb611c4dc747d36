"""Episodes of each step on disk: WORKDIR/episodes/step_000012.jsonl.gz, one per line.

The algorithm defines the record. Added are "number", its index in the step from 1, "of", the number
of episodes in the step, and "documents", the texts of the cluster, at its first record. A run
resumed at step s first drops what was written after s. The same episodes give the same bytes.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from etils import epath

from spell_jax.runtime import paths
from spell_jax.runtime.jsonl import read_records, write_records
from spell_jax.runtime.metrics import finite_or_none

EPISODES_FOLDER = "episodes"

T = TypeVar("T")
log = logging.getLogger(__name__)


def require_object(line: Any) -> dict[str, Any]:
    if not isinstance(line, dict):
        raise TypeError(f"an episode is an object, not {type(line).__name__}")
    return line


def read_episodes(
    workdir: str | os.PathLike[str], parse: Callable[[Any], T] = require_object
) -> Iterator[tuple[int, T]]:
    """Yields (step, episode) in rollout order; bad lines are skipped (jsonl.read_records)."""
    for step, path in episode_files(workdir).items():
        for episode in read_records(path, parse)[0]:
            yield step, episode


def episode_files(workdir: str | os.PathLike[str]) -> dict[int, epath.Path]:
    """Episode file of each step, in order of steps; empty if there is no folder."""
    files = {}
    for path in paths.entries(epath.Path(workdir) / EPISODES_FOLDER):
        if found := re.fullmatch(r"step_(\d+)\.jsonl\.gz", path.name):
            files[int(found[1])] = path
    return dict(sorted(files.items()))


class EpisodeWriter:
    """Writer of the episode files; `is_writer` on process 0 only.

    `characters` is the maximum size of a step's file before compression; 0 writes nothing. Files of
    steps after resume_step are removed; None removes all.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        characters: int,
        resume_step: int | None = None,
        is_writer: bool = True,
    ) -> None:
        self._characters = characters if is_writer else 0
        self._folder = epath.Path(workdir) / EPISODES_FOLDER
        if not is_writer:
            return
        for step, path in episode_files(workdir).items():
            if resume_step is None or step > resume_step:
                path.unlink()

    def write(self, step: int, episodes: Iterable[Mapping[str, Any]]) -> epath.Path | None:
        """Writes a step's episodes; returns the path of the file, or None if nothing is written.

        Records may have "cluster" and "documents". Those that do not fit are left out and logged.
        Non-finite numbers become null; TypeError for something without a JSON form.
        """
        if not self._characters:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step_{step:06d}.jsonl.gz"
        records = list(episodes)
        kept = _bounded(records, self._characters)
        if left_out := len(records) - len(kept):
            text = "step %d: %d of %d episodes left out: more than episode_characters = %d"
            log.warning(text, step, left_out, len(records), self._characters)
        write_records(path, kept)
        return path


def _bounded(episodes: list[Mapping[str, Any]], room: int) -> list[dict[str, Any]]:
    """Records that fit into `room` characters, then their documents as far as they fit."""
    kept, documents = [], {}
    for number, episode in enumerate(episodes, 1):
        record, _ = finite_or_none({"number": number, "of": len(episodes), **episode})
        texts = record.pop("documents", None)
        size = _size(record)
        if size <= room:
            room -= size
            kept.append(record)
            documents.setdefault(record.get("cluster"), (record, texts))
    for record, texts in documents.values():
        added = {"documents": texts}
        if texts and _size(added) <= room:
            room -= _size(added)
            record |= added
    return kept


def _size(record: Any) -> int:
    return len(json.dumps(record, ensure_ascii=False)) + 1
