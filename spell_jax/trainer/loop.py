"""The training loop, the same for every algorithm.

    while step < config.steps:
        rollout = rollouts.take(step)                    # the algorithm samples episodes
        update = step_update.start(rollout.groups)       # micro-batches of their training groups
        rollouts.look_ahead(step + 1, update.advance)    # with staleness = 1, at the same time
        numbers = step_update.finish(update)             # one or more optimizer steps
        logger.write(step, metrics, episodes)
        saver.save(step)                                 # every checkpoint_every steps

A run that is started again on the same workdir resumes from its last checkpoint, to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from spell_jax.config import RunConfig, read, to_dict
from spell_jax.runtime import distributed, entry, fault_injection, paths, setup, workdir_lock
from spell_jax.runtime.checkpoint import Checkpoints
from spell_jax.runtime.config import Config
from spell_jax.runtime.peers import announced
from spell_jax.runtime.preemption import Preemption
from spell_jax.runtime.run_logger import RunLogger
from spell_jax.trainer import state, step_update
from spell_jax.trainer.build import Run, make_run
from spell_jax.trainer.held_out import HeldOut
from spell_jax.trainer.rollouts import Rollouts
from spell_jax.trainer.saver import Saver, saving_on_disk_errors


def train(config: Config | RunConfig, workdir: epath.Path) -> epath.Path:
    """Train for config.steps steps, each a rollout and its update; return the workdir.

    The workdir gets config.json, metrics.jsonl, TensorBoard events, episodes/, checkpoints/,
    policy/ and best/ (Hugging Face folders of the last weights and of the best by validation),
    evaluation.json and plots/.

    Raises:
      ValueError, FileNotFoundError: if the config is invalid; the message names field and remedy.
      ValueError: if another run uses the workdir; the message names that run's host and pid.
      DiskError, SaveError: if the workdir is gone or not writable; the message says what is saved.
      Preempted: if the machine is taken away; everything is saved, and the next call resumes.
      NonFinite: if too many updates in a row were not finite; their rows are in non_finite/.
    """
    run = make_run(state.settle_dtypes(read(config), workdir))
    paths.make_workdir(workdir)
    with workdir_lock.locked(workdir):
        with (
            Preemption(run.config.preemption_limit_s) as preemption,
            Checkpoints(workdir, run.config.keep_checkpoints, run.config.checkpoint_every) as store,
            announced(),
        ):
            states, step, saved = state.restore_or_init(run, store)
            entry.setup_done()  # from here on an error is a crash, not a mistake of the user
            logger = make_logger(run, workdir, step, saved)
            saver = Saver(run, states, store, logger, preemption, workdir)
            saver.resume(step, saved)
            with logger, setup.sparing_garbage_collector() as spare_long_lived:
                _loop(run, states, workdir, logger, saver, step, spare_long_lived)
        HeldOut(run, states, workdir).finish()
    return workdir


def make_logger(run: Run, workdir: epath.Path, step: int, saved: dict[str, Any]) -> RunLogger:
    """Make the run's logger after `step` steps; `saved` is the checkpoint's host state."""
    config, fields = run.config, to_dict(run.config)
    if jax.process_index() == 0:
        setup.write_config(fields, workdir)
    options = {"episodes": config.episode_characters, "wandb": config.wandb, "config": fields}
    return RunLogger(workdir, config.steps, step, saved, timer=run.timer, **options)


def _loop(
    run: Run,
    states: dict[str, Any],
    workdir: epath.Path,
    logger: RunLogger,
    saver: Saver,
    step: int,
    spare_long_lived: Callable[[], None],
) -> None:
    config = run.config
    for name, model in run.trained.items():
        model.learner.compile(states[name], states.get("reference") if name == "policy" else None)
    held_out = HeldOut(run, states, workdir)
    rollouts = Rollouts(run, states, saver.should_stop)
    if step == 0 and config.evaluate:
        logger.enter("evaluate", 0)
        held_out.evaluate("before")
    logger.progress.limit(60 * config.max_minutes or None)

    while rollouts.is_ahead or (step < config.steps and not logger.progress.is_over()):
        step += 1
        logger.enter("rollout", step - 1)
        with setup.profiled(step in config.profile_steps, workdir):
            rollout = rollouts.take(step)
            fault_injection.point("rolled_out")
            saver.stop_if_preempted(step - 1, rollouts.state_before(rollout))  # repeats this step
            assert rollout is not None

            logger.enter("update", step - 1, rollout.progress())
            update = step_update.start(run, states, rollout.groups)
            if rollouts.may_look_ahead(step) and not logger.progress.is_over():
                rollouts.look_ahead(step + 1, update.advance)
            numbers = step_update.finish(run, states, rollout.groups, update, workdir, step)
            fault_injection.point("updated")
        spare_long_lived()  # the programs that the first step has compiled
        state.refresh_reference_reader(config, states, step)

        logger.enter("validate", step)
        metrics = step_update.metrics(run, rollout, numbers, rollouts.is_ahead)
        score = held_out.validate(step, metrics)
        logger.enter("write", step)
        algorithm_state = rollouts.algorithm_state()
        save = functools.partial(saver.save, step, algorithm_state, score=score)
        # Written before the checkpoint, so that no checkpoint is ahead of metrics and episodes.
        with saving_on_disk_errors(save, step), distributed.fail_together():
            saver.write(step, metrics, rollout.records(run.algorithm), score)
        save()
        saver.stop_if_preempted(step, algorithm_state)
    saver.save(step, run.algorithm.state_dict(), force=True)
