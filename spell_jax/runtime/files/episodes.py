"""Episodes of each step on disk: WORKDIR/episodes/step_000012.jsonl.gz, one per line.

The algorithm defines the record. The writer adds three fields: "number", the episode's index in the
step from 1; "of", the number of episodes in the step; and "documents", the texts of the cluster, at
the first record of each cluster. The same episodes give the same bytes.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from etils import epath

from spell_jax.runtime.files import durable, paths
from spell_jax.runtime.files.durable import run_now
from spell_jax.runtime.files.jsonl import read_records, write_records
from spell_jax.runtime.finite import finite_or_none

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
    """Yield (step, episode) in rollout order; bad lines are skipped (jsonl.read_records).

    A step's file that cannot be read, or is a folder, a pipe or a device, is logged and skipped.
    """
    for step, path in episode_files(workdir).items():
        try:
            episodes, _ = read_records(path, parse)
        except OSError as error:
            log.warning("%s: skipped (%s)", path, error.strerror or error)
            continue
        for episode in episodes:
            yield step, episode


def episode_files(workdir: str | os.PathLike[str]) -> dict[int, epath.Path]:
    """Return the episode file of each step, in order of steps; empty if there is no folder."""
    files = {}
    for path in paths.entries(epath.Path(workdir) / EPISODES_FOLDER):
        if match := re.fullmatch(r"step_(\d+)\.jsonl\.gz", path.name):
            files[int(match[1])] = path
    return dict(sorted(files.items()))


def spans(steps: Iterable[int]) -> str:
    """Write ascending steps as text, such as "1-3, 7"."""
    ends: list[list[int]] = []
    for step in steps:
        if ends and step == ends[-1][1] + 1:
            ends[-1][1] = step
        else:
            ends.append([step, step])
    return ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in ends)


class EpisodeWriter:
    """Writer of the episode files; `is_writer` on process 0 only.

    `characters` is the maximum size of a step's file before compression; 0 writes nothing. Files of
    steps after resume_step are removed; None removes all. The episodes of a step are queued until
    its file is on disk, and a checkpoint holds the queued episodes. `queued` has the episodes that
    were queued at the resumed checkpoint; they are written first. `workdirs` has all folders of the
    run so far. `submit` runs disk work, as Background.submit.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        characters: int,
        resume_step: int | None = None,
        is_writer: bool = True,
        *,
        queued: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        workdirs: Sequence[str] = (),
        submit: Callable[..., None] = run_now,
    ) -> None:
        self._characters = characters if is_writer else 0
        self._folder = epath.Path(workdir) / EPISODES_FOLDER
        self._submit = submit
        self._queue: dict[int, list[Mapping[str, Any]]] = {}
        if not is_writer:
            return
        # The resumed run repeats the later steps, perhaps with fewer episodes or none at all.
        for step, path in episode_files(workdir).items():
            if resume_step is None or step > resume_step:
                durable.remove(path)
        # The queue of a checkpoint may or may not have reached the disk: writing it again gives the
        # same bytes.
        for step, records in (queued or {}).items() if self._characters else ():
            self._queue[int(step)] = list(records)
            self._put(int(step))
        self._name_missing(resume_step or 0, workdirs)

    def _name_missing(self, resume_step: int, workdirs: Sequence[str]) -> None:
        """Log the steps that have their episodes in an earlier folder of the run."""
        # A run that continues from a fallback folder (checkpoint.py) has its earlier episodes
        # elsewhere.
        earlier_folders = [
            folder for folder in workdirs if folder != paths.absolute(self._folder.parent)
        ]
        present = {*episode_files(self._folder.parent), *self._queue}
        missing = [step for step in range(1, resume_step + 1) if step not in present]
        if earlier_folders and missing and self._characters:
            text = "%s: no episodes of steps %s; these steps ended in %s"
            log.warning(text, self._folder, spans(missing), " or ".join(earlier_folders))

    def write(self, step: int, episodes: Iterable[Mapping[str, Any]]) -> epath.Path | None:
        """Write a step's episodes; `queued` holds them until they are on disk.

        Returns the path of the file, or None if nothing is written. Records may have "cluster" and
        "documents". Episodes that do not fit are left out and logged. Non-finite numbers become
        null; TypeError for something without a JSON form. OSError as reported by `submit`.
        """
        if not self._characters:
            return None
        self._queue[step] = list(episodes)
        self._submit(self._put, step)
        return self._path(step)

    def _path(self, step: int) -> epath.Path:
        return self._folder / f"step_{step:06d}.jsonl.gz"

    def _put(self, step: int) -> None:
        records = self._queue[step]
        bounded_records = _bounded(records, self._characters)
        if left_out := len(records) - len(bounded_records):
            text = "step %d: %d of %d episodes left out: more than episode_characters = %d"
            log.warning(text, step, left_out, len(records), self._characters)
        write_records(self._path(step), bounded_records)
        # Only now: a checkpoint that is saved during the write must still hold the episodes.
        del self._queue[step]

    def queued(self) -> dict[str, list[dict[str, Any]]]:
        """Return the episodes by step that are not on disk yet, for a checkpoint."""
        return {
            # `list` copies: the background thread removes steps meanwhile.
            str(step): finite_or_none([dict(record) for record in records])[0]
            for step, records in list(self._queue.items())
        }


def _bounded(episodes: list[Mapping[str, Any]], room: int) -> list[dict[str, Any]]:
    """Keep records that fit into `room` characters, then their documents as far as they fit."""
    # All records come before any documents: a record without its documents still shows question,
    # answers and rewards, while documents alone show nothing.
    records, documents = [], {}
    for number, episode in enumerate(episodes, 1):
        record, _ = finite_or_none({"number": number, "of": len(episodes), **episode})
        texts = record.pop("documents", None)
        size = _size(record)
        if size <= room:
            room -= size
            records.append(record)
            # Episodes of a cluster share its documents, which are stored once, at the first record.
            documents.setdefault(record.get("cluster"), (record, texts))
    for record, texts in documents.values():
        document_field = {"documents": texts}
        if texts and _size(document_field) <= room:
            room -= _size(document_field)
            record |= document_field
    return records


def _size(record: Any) -> int:
    return len(json.dumps(record, ensure_ascii=False)) + 1
