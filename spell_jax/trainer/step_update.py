"""All optimizer updates of one step: of the policy, and of the algorithm's other trained models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from spell_jax.learner import non_finite, packing, statistics
from spell_jax.learner.learner import Update
from spell_jax.trainer.build import Run


class StepUpdate:
    """The updates of a step, one after the other: the policy's mini-batches, then other models.

    Args:
      run: the run.
      models: states and weights by name; `finish` replaces the trained ones.
      groups: training groups of the step, of all models.

    Attributes:
      rollout_difference: (sum, weight) by name of how far the sampler's logprobs are from
        recomputed ones; empty unless loss.old_logprobs = "recompute" (an update that uses the
        sampler's own logprobs reports it itself).
    """

    def __init__(self, run: Run, models: dict[str, Any], groups: Sequence[packing.TrainGroup]):
        self._run, self._models = run, models
        by_model = {name: [g for g in groups if g.model == name] for name in run.trained}
        own = by_model.pop("policy")
        self.rollout_difference: Mapping[str, tuple[float, float]] = {}
        if run.learner.loss.old_logprobs == "recompute":
            sampled, own = own, run.learner.recompute(models["policy"], own)
            self.rollout_difference = statistics.sampler_difference(sampled, own)
        self._parts = {"policy": packing.in_parts(own, run.config.minibatches) or [[]]}
        self._parts |= {name: packing.in_parts(some, 1) for name, some in by_model.items()}
        self._first: Update | None = self._start("policy", self._parts["policy"][0])

    def advance(self) -> None:
        """Dispatches one micro-batch of the first update, if one is left; does not wait for it."""
        if self._first:
            self._first.advance()

    def finish(self, workdir: epath.Path, step: int) -> dict[str, list[dict[str, float]]]:
        """Runs everything that is left.

        Returns:
          By model, the named numbers of each of its updates. A model without groups has none; the
          policy then has those of an empty update.

        Raises:
          NonFinite: as learner.Update.finish; the rows are written below workdir/non_finite.
        """
        found: dict[str, list[dict[str, float]]] = {}
        for name, parts in self._parts.items():
            decode = self._run.own[name].tokenizer.decode
            with non_finite.rows_written(workdir, step, decode):
                for part in parts:
                    started, self._first = self._first or self._start(name, part), None
                    self._models[name], numbers = started.finish()
                    found.setdefault(name, []).append(numbers)
        return found

    def _start(self, name: str, part: Sequence[packing.TrainGroup]) -> Update:
        reference = self._models.get("reference") if name == "policy" else None
        return self._run.own[name].learner.start(self._models[name], part, reference)
