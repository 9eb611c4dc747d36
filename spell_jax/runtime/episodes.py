"""A step's episodes on disk: what was asked, answered, judged and learned from.

1. WORKDIR/episodes/step_000012.jsonl.gz has an episode a line, in the order in which they were
   played. The record of one is its algorithm's; "number" and "of" are added: its place among the
   step's episodes, counted from 1, and how many there were.
2. A file holds a bounded number of characters, before compression. Records that do not fit are left
   out, which the numbers of the others show; it is logged, too. What is left goes to "documents":
   the texts of a cluster are in the first record of it, if they fit.
3. As with metrics, only one process writes, and a run resumed at step s first drops what was
   written after s. The same episodes give the same bytes.
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


def a_record(line: Any) -> dict[str, Any]:
    """A line as it is; TypeError where it is no JSON object."""
    if not isinstance(line, dict):
        raise TypeError(f"an episode is an object, not {type(line).__name__}")
    return line


def read_episodes(
    workdir: str | os.PathLike[str], parse: Callable[[Any], T] = a_record
) -> Iterator[tuple[int, T]]:
    """(step, episode) of all that is in WORKDIR/episodes, in the order in which they were played.

    A file at a time is in memory. Bad lines, and what `parse` refuses, are logged with their place
    and skipped (jsonl.read_records). Nothing where there are no files.
    """
    for step, path in episode_files(workdir).items():
        for episode in read_records(path, parse)[0]:
            yield step, episode


def episode_files(workdir: str | os.PathLike[str]) -> dict[int, epath.Path]:
    """Step -> its file, by steps; nothing where there is no folder."""
    files = {}
    for path in paths.entries(epath.Path(workdir) / EPISODES_FOLDER):
        if found := re.fullmatch(r"step_(\d+)\.jsonl\.gz", path.name):
            files[int(found[1])] = path
    return dict(sorted(files.items()))


class EpisodeWriter:
    """Writes a step's episodes.

    Args:
      workdir: the run's folder; made if it is missing.
      characters: of a step's file, at most, before compression; with 0 nothing is written.
      resume_step: the last step that counts; files of later steps are removed. None removes all.
      is_writer: whether this process writes (process 0 only).
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
        """Writes a step's episodes, as records with "cluster" and "documents" (or without), and
        returns the file's path.

        Numbers that are not finite become null. None where nothing is written.

        Raises:
          TypeError: an episode holds something without a JSON form.
        """
        if not self._characters:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step_{step:06d}.jsonl.gz"
        every = list(episodes)
        kept = _bounded(every, self._characters)
        if len(kept) < len(every):
            log.warning(
                "step %d: %d of %d episodes left out: more than episode_characters = %d",
                step,
                len(every) - len(kept),
                len(every),
                self._characters,
            )
        write_records(path, kept)
        return path


def _bounded(episodes: list[Mapping[str, Any]], room: int) -> list[dict[str, Any]]:
    """Those that fit into so many characters, then documents as far as they fit."""
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
