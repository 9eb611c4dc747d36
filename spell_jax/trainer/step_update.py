"""The optimizer updates of one training step, and the step's metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from etils import epath

from spell_jax.learner import non_finite, packing, statistics
from spell_jax.learner.update import TrainState
from spell_jax.runtime import fault_injection
from spell_jax.runtime.log.metrics import Metrics
from spell_jax.trainer.build import Run
from spell_jax.trainer.rollouts import Rollout, Rollouts
from spell_jax.trainer.state import States

# Model -> named numbers of each optimizer step.
Numbers = dict[str, list[dict[str, float]]]


class StepUpdate:
    """The update of all trained models on a step's groups, in progress.

    The policy's update starts at once; its micro-batches may run during the next rollout.
    """

    def __init__(self, run: Run, states: States, groups: Sequence[packing.TrainGroup]):
        for group in groups:
            if group.model not in run.trained:
                raise ValueError(f"group.model = {group.model!r}: must be one of {[*run.trained]}")
        self._run, self._states, self._groups = run, states, groups
        policy, reference = states.trained["policy"], states.frozen.get("reference")
        minibatches = run.config.minibatches
        self._update = run.learner.start(policy, self._groups_of("policy"), reference, minibatches)

    def _groups_of(self, name: str) -> list[packing.TrainGroup]:
        return [group for group in self._groups if group.model == name]

    def advance(self) -> None:
        """Dispatch the next micro-batch of the policy's update, if any."""
        self._update.advance()

    def finish(self, workdir: epath.Path, step: int) -> tuple[States, Numbers]:
        """Finish the policy's update, then update the algorithm's other trained models.

        Returns the new states, which replace the earlier ones, and the named numbers of each
        optimizer step, by model. A model without groups has no numbers, but the policy has the
        numbers of an empty update. NonFinite as in learner.Update.finish; the rows are written
        below workdir/non_finite.
        """
        run, trained = self._run, self._states.donate()
        numbers: Numbers = {}
        for name, model in run.trained.items():
            with non_finite.rows_written(workdir, step, model.tokenizer.decode):
                if name == "policy":
                    trained[name], numbers[name] = self._update.finish()
                elif groups := self._groups_of(name):
                    trained[name], numbers[name] = _imitate(run, name, trained[name], groups, step)
        fault_injection.point("updated")
        return States(trained, self._states.frozen), numbers


def _imitate(
    run: Run, name: str, state: TrainState, groups: Sequence[packing.TrainGroup], step: int
) -> tuple[TrainState, list[dict[str, float]]]:
    """Train another model on its rows, in epochs of mini-batches; return as in Update.finish."""
    config, numbers = run.config.models[name], []
    # A function of seed and step, so that a resumed run repeats the order of the rows.
    rng = np.random.default_rng([run.config.seed, step])
    minibatches = math.ceil(len(groups) / (config.groups_per_update or len(groups)))
    for _ in range(config.epochs):
        shuffled = [groups[i] for i in rng.permutation(len(groups))]
        update = run.trained[name].learner.start(state, shuffled, minibatches=minibatches)
        state, epoch_numbers = update.finish()
        numbers += epoch_numbers
    return state, numbers


def metrics(
    run: Run,
    rollout: Rollout,
    numbers: Mapping[str, Sequence[Mapping[str, float]]],
    rollouts: Rollouts,
) -> Metrics:
    """Return the step's metrics (docs/metrics.md), from the rollout and each update's numbers.

    Speeds are left out if one of the `rollouts` slowed the update.
    """
    metrics = Metrics()
    metrics.merge(rollout.metrics)
    for name, count in packing.count_answers(rollout.groups).items():
        metrics.add(f"train/rows/{name}", count)
    for model, updates in numbers.items():
        prefix = "train/" if model == "policy" else f"train/{model}/"
        for update in updates:
            metrics.merge({name: (value, 1.0) for name, value in update.items()}, prefix)
    metrics.merge(statistics.advantages(rollout.groups), "train/")
    programs = sum(len(model.learner.programs) for model in run.trained.values())
    metrics.add("process/update_programs", programs)
    updates = [update for model_updates in numbers.values() for update in model_updates]
    nonempty_updates = [update for update in updates if not update["empty_update"]]
    seconds = run.timer.spent("update")
    for name, share in rollouts.idle_metrics(seconds).items():
        metrics.add(name, share)
    # With the next rollout at the same time, seconds of the update are not the update's alone.
    if nonempty_updates and not rollouts.slows_update:
        devices = run.learner.mesh.devices.flatten().tolist()
        metrics.merge(statistics.speed(nonempty_updates, seconds, devices), "time/")
    return metrics
