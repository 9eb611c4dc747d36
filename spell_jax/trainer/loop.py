"""The training loop, the same for every algorithm.

    states, step = first states, or the states of the last checkpoint
    while step < config.steps:
        step += 1
        rollout = rollouts.take(states, step)         # the algorithm samples episodes
        states, numbers = update(states, rollout)     # may overlap later rollouts (staleness)
        files.write(step, states, rollout, numbers)   # metrics, episodes, best/, checkpoint

`States` never change: an update donates them and returns new ones. A run that is started again on
the same workdir resumes from its last checkpoint, to the bit.
"""

from __future__ import annotations

import functools

from etils import epath

from spell_jax.config import RunConfig, read, settle_dtypes, to_dict
from spell_jax.rollout.judge import VerdictWatch
from spell_jax.runtime import fault_injection, setup
from spell_jax.runtime.config import Config
from spell_jax.runtime.files import paths, workdir_lock
from spell_jax.trainer import commits, held_out, state, step_update
from spell_jax.trainer.build import Run, make_run
from spell_jax.trainer.rollouts import Rollout, Rollouts, SharedRollouts
from spell_jax.trainer.run_files import RunFiles
from spell_jax.trainer.split_rollouts import SplitRollouts
from spell_jax.trainer.state import States
from spell_jax.trainer.step_update import Numbers, StepUpdate


def train(config: Config | RunConfig, workdir: epath.Path) -> epath.Path:
    """Train for config.steps steps, each a rollout and its update; return the workdir.

    The workdir gets config.json, run.json, metrics.jsonl, TensorBoard events, episodes/,
    checkpoints/, policy/ and best/ (Hugging Face folders of the last weights and of the best by
    validation), evaluation.json and plots/.

    Raises:
      ValueError, FileNotFoundError: if the config is invalid; the message names field and remedy.
      ValueError: if another run uses the workdir; the message names that run's host and pid.
      DiskError, SaveError: if the workdir is gone or not writable; the message says what is saved.
      Preempted: if the machine is taken away; everything is saved, and the next call resumes.
      EndedError: if the external judge gave no verdicts (VerdictWatch); everything is saved.
      NonFinite: if too many updates in a row were not finite; their rows are in non_finite/.
    """
    run = make_run(commits.pin(settle_dtypes(read(config), workdir), workdir))
    paths.make_workdir(workdir)
    with workdir_lock.locked(workdir):
        save_best = functools.partial(state.save_model, run, "policy")
        log_options = {
            "episodes": run.config.episode_characters,
            "timer": run.timer,
            "hints": run.config.algorithm.hints,
        }
        with RunFiles(run.config, to_dict(run.config), workdir, save_best, **log_options) as files:
            kind = SplitRollouts if run.config.mesh.rollout_devices else SharedRollouts
            with kind(run, files.should_stop) as rollouts:
                states = _train(run, files, rollouts)
        held_out.finish(run, states, rollouts.params(states), workdir)
    return workdir


def _train(run: Run, files: RunFiles, rollouts: Rollouts) -> States:
    """Run the steps that are left, and return the last states, which are saved."""
    config = run.config
    states, step, saved = state.restore_or_init(run, files.checkpoints)
    files.begin(step, states, saved, run.policy)
    logger = files.logger
    for name, model in run.trained.items():
        reference = states.frozen.get("reference") if name == "policy" else None
        model.learner.compile(states.trained[name], reference)
    if step == 0 and config.evaluate:
        logger.enter("evaluate", 0)
        held_out.evaluate(run, rollouts.params(states), files.workdir, "before")
    if step == 0 and held_out.is_due(run, 0):
        logger.enter("validate", 0)
        held_out.validate_first(run, rollouts.params(states), files.workdir)
    logger.progress.limit(60 * config.max_minutes or None)
    verdict_watch = VerdictWatch(step) if config.algorithm.has_judge else None

    with setup.sparing_garbage_collector() as spare_long_lived:
        while rollouts.has_next or (step < config.steps and not logger.progress.is_over()):
            step += 1
            logger.enter("rollout", step - 1)
            with setup.profiled(step in config.profile_steps, files.workdir):
                rollout = rollouts.take(states, step)
                fault_injection.point("rolled_out")
                # After a notice to stop, the run that resumes repeats this rollout.
                state_before = rollout.state_before if rollout else rollouts.next_state()
                files.stop_if_preempted(step - 1, states, state_before)
                assert rollout is not None
                counts = rollout.metrics.pairs().get("rollout/judge_failed", (0.0, 0.0))
                if verdict_watch and verdict_watch.ends_run(*counts):
                    files.end_without_verdicts(step - 1, states, state_before, int(counts[1]))

                logger.enter("update", step - 1, rollout.progress())
                states, numbers = _update(run, files, rollouts, states, rollout, step)
            spare_long_lived()  # the programs that the first step has compiled
            states = state.renew_copies(run, states, step)
            rollouts.announce(states)

            logger.enter("validate", step)
            metrics, score = step_update.metrics(run, rollout, numbers, rollouts), None
            if held_out.is_due(run, step):
                with rollouts.sampling_devices():
                    score = held_out.validate(run, rollouts.params(states), metrics)
            logger.enter("write", step)
            episodes = rollout.records()
            files.write(step, states, rollouts.next_state(), metrics, episodes, score)
    files.save(step, states, run.algorithm.state_dict(), force=True)
    return states


def _update(
    run: Run, files: RunFiles, rollouts: Rollouts, states: States, rollout: Rollout, step: int
) -> tuple[States, Numbers]:
    """Update the trained models on a rollout; later steps may be rolled out meanwhile.

    Nothing keeps the earlier states after the return: their frozen copies may be replaced.
    """
    update = StepUpdate(run, states, rollout.groups)
    if rollouts.later_steps(step) and not files.logger.progress.is_over():
        rollouts.look_ahead(states, step, update.advance)
    return update.finish(files.workdir, step)
