"""What a run says of itself while it goes on: metrics, episodes, boards, a progress line.

A thread writes (background.py), so that no step waits for a disk or a network. What it writes are
numbers and texts that are on the host by then: it never asks a device. `flush` waits for it, as
before a checkpoint: what belongs to the steps up to that is then on disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from spell_jax.runtime.background import Background
from spell_jax.runtime.episodes import EpisodeWriter
from spell_jax.runtime.loggers import Wandb
from spell_jax.runtime.metrics import Metrics, MetricsWriter
from spell_jax.runtime.process_stats import Footprint
from spell_jax.runtime.progress import Progress
from spell_jax.runtime.timers import Stopwatch


class Recorder:
    """Everything that a run writes and shows between two checkpoints; a context.

    Every process makes one and calls it alike; process 0 alone writes.

    Args:
      workdir: the run's folder.
      steps: of the whole run.
      done: of them; what is in the folder of later ones is dropped.
      tail: see MetricsWriter.
      episodes: see EpisodeWriter's characters.
      wandb: project of Weights & Biases; "": none.
      config: of the run, which is told to it.
      watch: of this thread, if others look at it too.

    Attributes:
      progress: the line, for its clock.

    Raises:
      ValueError, ImportError: as MetricsWriter, as boards.Wandb.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        steps: int,
        done: int = 0,
        tail: Sequence[str] = (),
        *,
        episodes: int = 0,
        wandb: str = "",
        config: Mapping[str, Any] | None = None,
        watch: Stopwatch | None = None,
    ) -> None:
        is_writer = jax.process_index() == 0
        folder, resume_step = epath.Path(workdir), done or None
        boards = [Wandb(wandb, folder, resume_step, config)] if wandb and is_writer else []
        self._background = Background()
        submit = self._background.submit
        self._metrics = MetricsWriter(folder, resume_step, is_writer, tail, submit, boards)
        self._episodes = EpisodeWriter(folder, episodes, resume_step, is_writer)
        self._footprint = Footprint()
        self._shown: dict[str, float | str] = {}
        self.progress = Progress(steps, start=done, enabled=is_writer)
        self._watch = watch or Stopwatch()

    def __enter__(self) -> Recorder:
        self._background.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.progress.close()
        self._footprint.close()
        self._background.__exit__(*error)
        if error[0] is None:
            self._metrics.close()

    def enter(self, phase: str, done: int, shown: Mapping[str, float | str] | None = None) -> None:
        """A phase of the run begins, so many steps are done, and these numbers are the newest."""
        self._shown |= shown or {}
        self._watch.enter(phase)
        self.progress.update(done, phase, self._shown)

    def write(self, step: int, metrics: Metrics, episodes: Iterable[Any] = ()) -> None:
        """A step's line, with where the time went since the last one, and its episodes.

        Raises:
          Exception: what went wrong with something that was written before.
        """
        seconds = self._watch.take()
        metrics.add("time/step_seconds", sum(seconds.values()))
        for name, some in seconds.items():
            metrics.add(f"time/seconds/{name}", some)
        for name, value in self._footprint.numbers().items():
            metrics.add(f"process/{name}", value)
        self._metrics.write(step, metrics)
        self._background.submit(self._episodes.write, step, list(episodes))

    def flush(self) -> None:
        """Waits until all of it is on disk, or raises as `write`."""
        self._background.flush()

    def tail(self) -> list[str]:
        """See MetricsWriter."""
        return self._metrics.tail()
