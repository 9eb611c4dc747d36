"""Copies of the sampled models' weights on the sampling devices (mesh.rollout_devices)."""

from __future__ import annotations

from spell_jax.learner.update import weight_shardings
from spell_jax.policy import lora, transformer
from spell_jax.trainer.build import Model, Run
from spell_jax.trainer.state import Params, States
from spell_jax.trainer.transfer import Transfer


class SplitParams:
    """Copies of weights in the compute dtype on the sampling devices; a function of the states.

    The copies do not depend on the states, which updates may donate. The copy of a frozen model is
    kept until the model's weights are renewed. With mesh.transfer = "in_place" a call overwrites
    the copies of trained models, so no rollout may run meanwhile.
    """

    def __init__(self, run: Run):
        self._in_place = run.config.mesh.transfer == "in_place"
        names = ("policy", *run.algorithm.model_names)
        models = {name: run.model(name) for name in names}
        # Frozen copies of the policy are its model, so one copy of a base of adapters serves all.
        transfers = {id(model): _ModelTransfer(run, model) for model in models.values()}
        self._transfers = {name: transfers[id(model)] for name, model in models.items()}
        self._frozen: dict[str, tuple[transformer.Params, transformer.Params]] = {}
        self._newest: tuple[States, Params] | None = None

    def __call__(self, states: States) -> Params:
        """Return the weights of the sampled models by name; wait until they are copied."""
        if self._newest and self._newest[0] is states:
            return self._newest[1]
        before = self._newest[1] if self._newest and self._in_place else {}
        self._newest = None  # overlapped: older weights live as long as the rollouts that use them
        params = {name: self._copy(name, states, before.get(name)) for name in self._transfers}
        self._newest = states, params
        return params

    def _copy(
        self, name: str, states: States, before: transformer.Params | None
    ) -> transformer.Params:
        source, transfer = states.params(name), self._transfers[name]
        if name not in states.frozen:
            return transfer.copy(source, before)
        kept_source, kept_copy = self._frozen.get(name, (None, None))
        if kept_source is not source:
            kept_copy = transfer.copy(source, kept_copy if self._in_place else None)
            self._frozen[name] = source, kept_copy
        assert kept_copy is not None
        return kept_copy


class _ModelTransfer:
    """Copies of one model's weights to the sampling mesh; a frozen base is copied once."""

    def __init__(self, run: Run, model: Model):
        sampling_mesh = run.worker.sampler.mesh
        trained, frozen = weight_shardings(model.policy, sampling_mesh)
        self._learner, self._policy = model.learner, model.policy
        self._trained, self._frozen = Transfer(trained), Transfer(frozen)
        self._base: transformer.Params | None = None

    def copy(
        self, source: transformer.Params, before: transformer.Params | None
    ) -> transformer.Params:
        """Copy weights as Learner.cast returns them; `before` gives its memory to the copy."""
        if self._base is None:
            self._base = self._frozen(self._learner.frozen)
        if before is not None:
            before, _ = lora.split(self._policy, before)
        copies = self._trained(self._learner.fns.cast(source), before)
        return lora.join(copies, self._base)
