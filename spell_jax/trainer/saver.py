"""Checkpoints of a run: what belongs to a step is flushed first, and preemption ends the run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from etils import epath

from spell_jax.config import to_dict
from spell_jax.runtime import distributed
from spell_jax.runtime.checkpoint import Checkpoints
from spell_jax.runtime.durable import DiskError
from spell_jax.runtime.metrics import Metrics
from spell_jax.runtime.preemption import Preemption
from spell_jax.runtime.run_logger import RunLogger
from spell_jax.trainer.build import Run
from spell_jax.trainer.state import save_model

log = logging.getLogger(__name__)


def save_step(
    logger: RunLogger,
    store: Checkpoints,
    step: int,
    arrays: Any,
    host_state: dict[str, Any],
    *,
    is_due: bool,
    force: bool = False,
    score: float | None = None,
) -> None:
    """Flush the logs, then checkpoint the step with the logger's state, if it is due or forced.

    If the flush fails, the checkpoint holds the unwritten metrics and episodes. It goes to the
    fallback folder if the disk is still full. A DiskError then names the saved step.
    """
    # A checkpoint must not be ahead of the metrics and episodes of its steps: they must be on disk
    # first.
    failure: Exception | None = None
    if force or is_due:
        try:
            with distributed.fail_together():
                logger.flush()
        except Exception as error:  # of any kind: the step is saved before the error ends the run
            failure = error
    # After a failed flush the step is saved even if it is not due: nothing that was computed is
    # lost.
    store.save(step, arrays, host_state | logger.state(), force or failure is not None, score)
    if failure is not None:
        raise _as_disk_error(failure, step) from failure


@contextlib.contextmanager
def saving_on_disk_errors(save: Callable[..., None], step: int) -> Iterator[None]:
    """Call save(force=True) if a file cannot be written in the block, then raise the error."""
    try:
        yield
    # RuntimeError too: the disk of another host may have failed (distributed.fail_together).
    except (OSError, RuntimeError) as error:
        save(force=True)
        raise _as_disk_error(error, step) from error


def _as_disk_error(error: Exception, step: int) -> Exception:
    """Return the error; for an OSError, a DiskError that says how to go on."""
    if not isinstance(error, OSError):
        return error
    return DiskError(
        f"{error}; step {step} is saved with all that could not be written, the same command goes "
        "on from there"
    )


class Saver:
    """Writer of checkpoints and of best/ between the steps of the loop."""

    def __init__(
        self,
        run: Run,
        states: dict[str, Any],
        store: Checkpoints,
        logger: RunLogger,
        preemption: Preemption,
        workdir: epath.Path,
    ):
        self._run, self._states, self._store = run, states, store
        self._logger, self._preemption = logger, preemption
        self._best_folder, self._best = workdir / "best", None

    def resume(self, step: int, saved: Mapping[str, Any]) -> None:
        """Take the best score from a checkpoint's host state, if best/ has that score's weights.

        A fallback folder lacks best/ if the first folder could not be read. If the checkpoint
        itself has the highest score, its weights are written now: the disk was full before.
        """
        # Process 0 asks for all: hosts that saw different folders would not write best/ together.
        best = saved.get("best")
        if best is not None and not distributed.broadcast(self._best_folder.exists):
            log.warning("%s: not there; is made anew by the next best weights", self._best_folder)
            best = None
        self._best = best
        self._keep_best(self._store.score(step))

    def should_stop(self) -> bool:
        """Return whether any host's machine is taken away; all hosts must ask at the same time."""
        return self._preemption.should_stop()

    def write(
        self, step: int, metrics: Metrics, episodes: Iterable[Any], score: float | None
    ) -> None:
        """Write a step's metrics and episodes; write best/ if the score is the highest so far."""
        try:
            self._logger.write(step, metrics, episodes)
        finally:  # best/ must be written even if the logger fails
            self._keep_best(score)

    def _keep_best(self, score: float | None) -> None:
        # A strict comparison: of equal scores the earlier weights stay, and nothing is written.
        if score is not None and (self._best is None or score > self._best):
            # A workdir that was removed must not come back as a folder with best/ alone.
            self._logger.check_folder()
            save_model(self._run, self._states, "policy", self._best_folder)
            # Last: a checkpoint that names this score says that best/ has its weights.
            self._best = score

    def save(
        self,
        step: int,
        algorithm_state: dict[str, Any],
        force: bool = False,
        score: float | None = None,
    ) -> None:
        """Flush the logs and checkpoint the step with `save_step`."""
        self._logger.enter("save", step)
        config = self._run.config
        host_state = {"config": to_dict(config), "algorithm": algorithm_state, "best": self._best}
        is_due = step % config.checkpoint_every == 0
        save_step(
            *(self._logger, self._store, step, self._states, host_state),
            **{"is_due": is_due, "force": force, "score": score},
        )

    def stop_if_preempted(self, step: int, algorithm_state: dict[str, Any]) -> None:
        if self._preemption.should_stop():
            self.save(step, algorithm_state, force=True)
            self._preemption.stop()
