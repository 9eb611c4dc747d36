"""The metrics of one step: of its rollout, its updates, and their speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spell_jax.learner import packing, statistics
from spell_jax.runtime.metrics import Metrics
from spell_jax.trainer.build import Run
from spell_jax.trainer.rollouts import Rollout
from spell_jax.trainer.step_update import StepUpdate


def collect(
    run: Run,
    rollout: Rollout,
    update: StepUpdate,
    numbers: Mapping[str, Sequence[Mapping[str, float]]],
    is_ahead: bool,
) -> Metrics:
    """The step's metrics; docs/metrics.md explains every name.

    Args:
      run: the run, whose timers give the seconds of the update.
      rollout: the step's rollout.
      update: the step's update.
      numbers: numbers of each update by model, as StepUpdate.finish returns them.
      is_ahead: whether the next rollout ran during the update; then no speed is given.
    """
    metrics = Metrics()
    metrics.merge(rollout.metrics)
    for role, count in packing.count_answers(rollout.groups).items():
        metrics.add(f"train/rows/{role}", count)
    for model, updates in numbers.items():
        prefix = "train/" if model == "policy" else f"train/{model}/"
        for one in updates:
            metrics.merge({name: (value, 1.0) for name, value in one.items()}, prefix)
    metrics.merge(statistics.advantages(rollout.groups), "train/")
    metrics.merge(update.rollout_difference, "train/")
    trained = [one for updates in numbers.values() for one in updates if not one["empty_update"]]
    if trained and not is_ahead:
        devices = run.learner.mesh.devices.flatten().tolist()
        metrics.merge(statistics.speed(trained, run.timer.spent("update"), devices), "time/")
    return metrics
