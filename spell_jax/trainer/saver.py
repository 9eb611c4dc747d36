"""Checkpoints of a run: what belongs to a step is flushed first, and preemption ends the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from spell_jax.config import to_dict
from spell_jax.runtime import distributed
from spell_jax.runtime.checkpoint import Checkpoints
from spell_jax.runtime.preemption import Preemption
from spell_jax.runtime.run_logger import RunLogger
from spell_jax.trainer.build import Run


class Saver:
    """Writer of checkpoints between the steps of the loop; flushes the logger before each one.

    `best` is the best validation score so far, or None; the loop replaces it.
    """

    def __init__(
        self,
        run: Run,
        models: dict[str, Any],
        store: Checkpoints,
        logger: RunLogger,
        preemption: Preemption,
        best: float | None,
    ):
        self._run, self._models, self._store = run, models, store
        self._logger, self._preemption, self.best = logger, preemption, best

    def should_stop(self) -> bool:
        """Whether the machine is taken away, on any host; all hosts must ask at the same time."""
        return self._preemption.should_stop()

    def is_best(self, score: float | None) -> bool:
        return score is not None and (self.best is None or score > self.best)

    def save(
        self,
        step: int,
        algorithm_state: dict[str, Any],
        force: bool = False,
        score: float | None = None,
    ) -> None:
        """Flushes logs, then checkpoints, if the step is due or forced.

        If the flush fails, it still checkpoints (to the fallback folder if the disk is full), then
        re-raises.
        """
        self._logger.enter("save", step)
        try:
            if force or step % self._run.config.checkpoint_every == 0:
                with distributed.fail_together():
                    self._logger.flush()
        finally:
            host_state = {
                "config": to_dict(self._run.config),
                "algorithm": algorithm_state,
                "best": self.best,
                "metrics": self._logger.tail(),
            }
            self._store.save(step, self._models, host_state, force, score)

    def stop_if_preempted(self, step: int, algorithm_state: dict[str, Any]) -> None:
        if self._preemption.should_stop():
            self.save(step, algorithm_state, force=True)
            self._preemption.stop()

    @contextlib.contextmanager
    def saving_on_disk_errors(
        self, step: int, algorithm_state: dict[str, Any], score: float | None
    ) -> Iterator[None]:
        """Checkpoints the step before an error of the files written inside is re-raised."""
        try:
            yield
        except (OSError, RuntimeError):
            self.save(step, algorithm_state, force=True, score=score)
            raise
