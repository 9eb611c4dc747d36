"""Files of a run: logs, checkpoints and best/, which agree after every error and notice to stop."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import jax
from etils import epath

from spell_jax.config import RunConfig, SupervisedConfig
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import entry, setup
from spell_jax.runtime.files.checkpoint import Checkpoints
from spell_jax.runtime.files.durable import DiskError
from spell_jax.runtime.hosts import distributed
from spell_jax.runtime.hosts.peers import announced
from spell_jax.runtime.hosts.preemption import Preemption
from spell_jax.runtime.log.metrics import Metrics
from spell_jax.runtime.log.run_logger import RunLogger
from spell_jax.trainer import run_record
from spell_jax.trainer.state import HostState, States

log = logging.getLogger(__name__)
JsonDict = dict[str, Any]


class RunFiles:
    """Logs and checkpoints of a run in a locked workdir; a context that ends with the last save.

    Attributes:
      workdir: folder of the run.
      checkpoints: the run's checkpoints, inside the context.
      logger: writer of metrics and episodes, after `begin`.

    Args:
      fields: the config as JSON values.
      save_best: function that writes the weights with the best score to a folder.
      log_options: options of RunLogger.
    """

    checkpoints: Checkpoints
    logger: RunLogger

    def __init__(
        self,
        config: RunConfig | SupervisedConfig,
        fields: JsonDict,
        workdir: epath.Path,
        save_best: Callable[[States, epath.Path], None] | None = None,
        **log_options: Any,
    ):
        self.workdir, self._config, self._fields = workdir, config, fields
        self._log_options = {"wandb": config.wandb, "config": fields, **log_options}
        self._save_best, self._best = save_best, None

    def __enter__(self) -> RunFiles:
        # Without validations there are no scores, and a single checkpoint is enough to resume.
        keep = self._config.keep_checkpoints if isinstance(self._config, RunConfig) else 1
        every = self._config.checkpoint_every
        with contextlib.ExitStack() as stack:
            preemption = Preemption(self._config.preemption_limit_s)
            self._preemption = stack.enter_context(preemption)
            self.checkpoints = stack.enter_context(Checkpoints(self.workdir, keep, every))
            stack.enter_context(announced())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def begin(self, step: int, states: States, saved: HostState, policy: PolicyConfig) -> None:
        """Open the logs after `step` steps; write best/ if the disk was full before.

        best/ of a checkpoint's host state counts only if it is there: a fallback folder lacks it if
        the first folder could not be read.
        """
        entry.setup_done()  # from here on an error is a crash, not a mistake of the user
        if jax.process_index() == 0:
            setup.write_config(self._fields, self.workdir)
            run_record.write(self.workdir, step, self._config, self._fields, policy)
        logger = RunLogger(
            *(self.workdir, self._config.steps, step, saved.to_json()), **self._log_options
        )
        self.logger = self._stack.enter_context(logger)
        # Process 0 asks for all: hosts that saw different folders would not write best/ together.
        self._best, folder = saved.best, self.workdir / "best"
        if self._best is not None and not distributed.broadcast(folder.exists):
            log.warning("%s: not there; is made anew by the next best weights", folder)
            self._best = None
        self._keep_best(states, self.checkpoints.score(step))

    def write(
        self,
        step: int,
        states: States,
        algorithm_state: JsonDict | None = None,
        metrics: Metrics | None = None,
        episodes: Iterable[Any] = (),
        score: float | None = None,
    ) -> None:
        """Write a step's metrics, episodes, best/ and, if it is due, checkpoint.

        Then end the run if its machine is taken away.
        """
        save = functools.partial(self.save, step, states, algorithm_state, score=score)
        # Written before the checkpoint, so that no checkpoint is ahead of metrics and episodes.
        with _saving_on_disk_errors(save, step), distributed.fail_together():
            try:
                if metrics is not None:
                    self.logger.write(step, metrics, episodes)
            finally:  # best/ must be written even if the logger fails
                self._keep_best(states, score)
        save()
        self.stop_if_preempted(step, states, algorithm_state)

    def _keep_best(self, states: States, score: float | None) -> None:
        # A strict comparison: of equal scores the earlier weights stay, and nothing is written.
        if score is None or self._save_best is None:
            return
        if self._best is None or score > self._best:
            # A workdir that was removed must not come back as a folder with best/ alone.
            self.logger.check_folder()
            self._save_best(states, self.workdir / "best")
            # Last: a checkpoint that names this score says that best/ has its weights.
            self._best = score

    def save(
        self,
        step: int,
        states: States,
        algorithm_state: JsonDict | None = None,
        *,
        force: bool = False,
        score: float | None = None,
    ) -> None:
        """Flush the logs, then checkpoint the step, if it is due or forced.

        If the flush fails, the checkpoint holds the unwritten metrics and episodes. It goes to the
        fallback folder if the disk is still full. A DiskError then names the saved step.
        """
        self.logger.enter("save", step)
        # A checkpoint must not be ahead of the metrics and episodes of its steps: they must be on
        # disk first.
        failure: Exception | None = None
        if force or step % self._config.checkpoint_every == 0:
            try:
                with distributed.fail_together():
                    self.logger.flush()
            except Exception as error:  # any: the step is saved before the error ends the run
                failure = error
        logs = self.logger.state()
        host_state = HostState(self._fields, algorithm_state, self._best, **logs)
        # After a failed flush the step is saved even if it is not due: nothing that was computed is
        # lost.
        force = force or failure is not None
        self.checkpoints.save(step, states.tree(), host_state.to_json(), force, score)
        if failure is not None:
            raise _as_disk_error(failure, step) from failure

    def should_stop(self) -> bool:
        """Return whether any host's machine is taken away; all hosts must ask at the same time."""
        return self._preemption.should_stop()

    def stop_if_preempted(
        self, step: int, states: States, algorithm_state: JsonDict | None = None
    ) -> None:
        """Save the step and raise Preempted if any host's machine is taken away."""
        if self._preemption.should_stop():
            self.save(step, states, algorithm_state, force=True)
            self._preemption.stop()

    def end_without_verdicts(
        self, step: int, states: States, algorithm_state: JsonDict, num_asked: int
    ) -> NoReturn:
        """Save the step and raise EndedError: the judge gave no verdict on `num_asked` answers."""
        # On the rule's scores the run would train on another reward than the config says.
        self.save(step, states, algorithm_state, force=True)
        raise entry.EndedError(
            f"step {step + 1}: the judge gave no verdict on any of {num_asked} answers, as the "
            "warnings say; without replies, check algorithm.judge_url, algorithm.judge_model and "
            "the key in SPELL_JUDGE_KEY, and with replies algorithm.judge_template. "
            f"Step {step} is saved, and the same command goes on"
        )


@contextlib.contextmanager
def _saving_on_disk_errors(save: Callable[..., None], step: int) -> Iterator[None]:
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
