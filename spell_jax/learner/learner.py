"""The host-side driver of updates: packs groups into micro-batches and runs the jitted functions.

Groups are split into mini-batches, weighted and packed on the host (packing.py). `start` casts the
weights, `advance` dispatches one micro-batch at a time, so that a rollout can run between them, and
`finish` runs the rest and applies the gradients (update.py). Supervised tuning has advantage 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from spell_jax.learner import (
    aggregation,
    non_finite,
    old_logprobs,
    packing,
    shapes,
    statistics,
    update,
)
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.update import Carry, TrainState, UpdateSpec
from spell_jax.policy import int8, lora, moe, products, transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes


class Learner:
    """Updates of one model on one mesh.

    Attributes:
      policy: architecture.
      loss: loss and its variants.
      packing: shapes of micro-batches.
      mesh: device mesh.
      temperature: sampling temperature, at which logprobs are computed.
      compute_dtype: dtype of forward and backward passes, resolved for the mesh.
      max_skipped: skipped updates in a row that end the run.
      spec: everything static that `fns` depend on.
      fns: jitted functions of an update.
      frozen: weights that are not trained, in the compute dtype or int8; {} without adapters.
      no_experts: record of a token with unknown experts (moe.no_experts); None unless
        loss.routing = "sampled".
      programs: programs of micro-batches that were called so far.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        optimizer: OptimizerConfig,
        loss: LossConfig,
        packing_config: packing.PackingConfig,
        mesh: jax.sharding.Mesh,
        temperature: float = 1.0,
        compute_dtype: str = "float32",
        group_names: Sequence[str] = (),
    ):
        """Build the jitted functions; nothing is compiled yet.

        Of each of the `group_names` an update has a mean entropy (statistics.means).
        ValueError if a row cannot be split over the mesh's context axis, or the loss needs experts
        that the policy does not have.
        """
        packing_config.check_splits(meshes.context_shards(mesh))
        loss.check_policy(policy)
        self.policy, self.loss, self.packing, self.mesh = policy, loss, packing_config, mesh
        self.temperature = temperature
        compute_dtype = products.resolve_dtype(compute_dtype, mesh)
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.max_skipped = optimizer.max_skipped
        self.spec = UpdateSpec(
            policy, optimizer, loss, temperature, compute_dtype, tuple(group_names)
        )
        self.fns = update.make_update_fns(self.spec, mesh)
        self.frozen: transformer.Params = {}
        self.no_experts = moe.no_experts(policy) if loss.routing == "sampled" else None
        self.programs = shapes.MicroBatchPrograms()

    # ------------------------------------------------------------------------------------ Weights

    def init(self, source: transformer.Params | jax.Array) -> TrainState:
        """Make the training state from given weights, or from random weights of a key.

        Arrays on devices are donated, so that a large policy exists once. If the policy has
        adapters, the weights are its frozen base, and the adapters start as no change.
        """
        has_weights = isinstance(source, dict)
        key = jax.random.key(0) if has_weights else source
        if self.policy.lora:
            self.freeze(source if has_weights else self.fns.random(key, "frozen"))
        if has_weights and not self.policy.lora:
            trained = jax.device_put(source, self.fns.param_shardings)
        else:
            trained = self.fns.random(key, "trained")
        return self.fns.init(trained)

    def freeze(self, params: transformer.Params) -> None:
        """Store the weights that are not trained, for a policy with adapters.

        For an int8 base, weights that are not int8 yet are quantized; weights.load does so while it
        reads them.
        """
        if self.policy.has_int8_base:
            params = int8.quantize_base(params)
        self.frozen = self.fns.cast(jax.device_put(params, self.fns.frozen_shardings))

    def cast(self, params: transformer.Params) -> transformer.Params:
        """Return the whole policy, as the sampler reads it, from trained weights."""
        return lora.join(self.fns.cast(params), self.frozen)

    def export(self, params: transformer.Params) -> tuple[PolicyConfig, transformer.Params]:
        """Return the architecture and the weights that weights.save writes to a policy's folder."""
        # Weights in the host's memory cannot be sliced; each update moves all of them, too.
        params = update.to_device_memory(params, self.spec.masters_memory)
        return self.policy, lora.join(params, self.frozen)

    # -------------------------------------------------------------------------------- Micro-batches

    def pack(
        self,
        groups: Sequence[packing.TrainGroup],
        weights: Sequence[Sequence[float]],
        layout: packing.PackingConfig | None = None,
    ) -> tuple[list[packing.MicroBatch], int]:
        """Pack groups with the loss weights of their answers (`weigh`).

        Returns (batches, count of answers without a row). `layout` replaces the learner's own.
        """
        layout = layout or self.packing
        devices = meshes.context_shards(self.mesh)
        parts, refused = packing.fit_rows(groups, layout, devices, self.loss.is_paired)
        batches = packing.pack(
            parts,
            weights,
            layout.buckets,
            layout.token_budget,
            meshes.row_shards(self.mesh),
            devices,
            layout.shared_prefix == "tree",
            self.no_experts,
            self.spec.group_names,
        )
        return batches, len(refused)

    def weigh(self, groups: Sequence[packing.TrainGroup]) -> list[list[float]]:
        """Return the loss weights of each group's answers by the loss's aggregation."""
        return aggregation.weigh(groups, self.loss.aggregation, self.loss.sequence_tokens)

    def place(self, batch: packing.MicroBatch) -> packing.MicroBatch:
        sharding = meshes.by_rows_and_time(self.mesh)
        return meshes.device_put(batch, jax.tree.map(lambda _: sharding, batch))

    def empty_batch(self, bucket: packing.Bucket) -> packing.MicroBatch:
        """Make a micro-batch of padding with the shape and sharding of the bucket's batches."""
        rows = shapes.row_count(bucket, self.packing.token_budget, meshes.row_shards(self.mesh))
        batch = packing.empty_micro_batch(bucket, rows, self.no_experts)
        return jax.device_put(batch, meshes.by_rows_and_time(self.mesh))

    # ------------------------------------------------------------------------------------- Updates

    def update(
        self,
        state: TrainState,
        groups: Sequence[packing.TrainGroup],
        reference: transformer.Params | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """Take one optimizer step on all groups; see `start` and `Update.finish`."""
        state, (numbers,) = self.start(state, groups, reference).finish()
        return state, numbers

    def start(
        self,
        state: TrainState,
        groups: Sequence[packing.TrainGroup],
        reference: transformer.Params | None = None,
        minibatches: int = 1,
    ) -> Update:
        """Start an update that runs micro-batch by micro-batch, between other device programs.

        The state is donated when the update finishes; without groups it stays unchanged. Groups are
        split among `minibatches` optimizer steps. With loss.old_logprobs = "recompute" or
        "reference" a forward pass over all groups runs first. Raises ValueError if old logprobs or
        the reference model's weights (LossConfig.needs_reference) are needed and missing.
        """
        if self.loss.needs_reference != (reference is not None):
            raise ValueError(
                f"loss.kl_weight = {self.loss.kl_weight}: reference weights must be given if, "
                "and only if, it or loss.distillation_weight is not 0, or loss.old_logprobs is "
                "'reference'"
            )
        self.loss.check_groups(groups)
        if self.loss.support == "sampled":
            groups = old_logprobs.on_sampled_support(groups)
        score_numbers: dict[str, float] = {}
        if self.loss.old_logprobs == "recompute":
            sampled, groups = groups, self.recompute(state, groups)
            score_numbers = statistics.sampler_difference(sampled, groups)
        if reference is not None and self.loss.old_logprobs == "reference":
            groups = self.score_reference(reference, groups)
        if reference is not None and self.loss.distillation_weight:
            taught = old_logprobs.taught(groups)
            scored = self.score_reference(reference, taught)
            score_numbers |= statistics.teacher_kl(taught, scored)
            weight = self.loss.distillation_weight
            groups = old_logprobs.with_teacher(groups, scored, weight)
        # Old logprobs and teacher are computed: only a KL term reads the reference from here on.
        if not self.loss.kl_weight:
            reference = None
        parts = packing.in_parts(groups, minibatches) or [[]]
        return Update(self, state, parts, reference, score_numbers)

    def recompute(
        self, state: TrainState, groups: Sequence[packing.TrainGroup]
    ) -> list[packing.TrainGroup]:
        """Return the groups with the state's logprobs; NaN for answers that fit no row."""
        return self._score(state.params, groups, groups)

    def score_reference(
        self, reference: transformer.Params, groups: Sequence[packing.TrainGroup]
    ) -> list[packing.TrainGroup]:
        """Return the groups with the reference's logprobs, each after its reference_prompt."""
        segments = [part for group in groups for part in group.segments]
        read = old_logprobs.as_reference_reads(groups)
        return old_logprobs.join_segments(groups, self._score(reference, read, segments))

    def _score(
        self,
        params: transformer.Params,
        read: Sequence[packing.TrainGroup],
        groups: Sequence[packing.TrainGroup],
    ) -> list[packing.TrainGroup]:
        """Return `groups` with the logprobs of their answers in `read`, under trained weights."""
        batches, _ = self.pack(read, aggregation.equal_weights(read))
        with self.on_mesh():
            cast = self.fns.cast(params) if batches else {}
            logprobs = [self._logprobs(cast, self.place(batch)) for batch in batches]
        return old_logprobs.with_logprobs(groups, batches, jax.device_get(logprobs))

    def compile(self, state: TrainState, reference: transformer.Params | None = None) -> None:
        """Compile the programs of every listed bucket, so that no later step waits for them.

        With packing.buckets "auto", a program is compiled in the step that first needs it.
        """
        with self.on_mesh():
            params = self.fns.cast(state.params)
            kl_reference = None
            if reference is not None and self.loss.kl_weight:
                kl_reference = self.fns.cast(reference)
            carry = self.fns.empty_carry()
            for bucket in self.packing.listed:
                batch = self.empty_batch(bucket)
                if self.loss.scores_answers:
                    self._logprobs(params, batch)
                carry = self.accumulate(params, carry, batch, kl_reference)

    def accumulate(self, params: Any, carry: Any, batch: packing.MicroBatch, reference: Any) -> Any:
        """Add a placed micro-batch's gradient and sums to the carry; see update.accumulate."""
        with self.programs.counted("accumulate", batch.tokens.shape, batch.target.shape[1]):
            return self.fns.accumulate(params, self.frozen, carry, batch, reference)

    def _logprobs(self, params: transformer.Params, batch: packing.MicroBatch) -> jax.Array:
        with self.programs.counted("logprobs", batch.tokens.shape, batch.target.shape[1]):
            return self.fns.logprobs(params, self.frozen, batch)

    def lower(self, state: TrainState, bucket: packing.Bucket) -> jax.stages.Lowered:
        """Lower the program of a bucket's micro-batches, for inspection; nothing runs."""
        batch = self.empty_batch(bucket)
        with self.on_mesh():
            params, carry = self.fns.cast(state.params), self.fns.empty_carry()
            return self.fns.accumulate.lower(params, self.frozen, carry, batch, None)

    def on_mesh(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(jax.set_mesh(self.mesh))
        stack.enter_context(nn.logical_axis_rules(meshes.RULES))
        return stack


class Update:
    """The optimizer steps of one model on its groups, in progress; Learner.start makes it."""

    def __init__(
        self,
        learner: Learner,
        state: TrainState,
        parts: Sequence[Sequence[packing.TrainGroup]],
        reference: transformer.Params | None,
        score_numbers: dict[str, float],
    ):
        self._learner, self._state, self._master_reference = learner, state, reference
        self._score_numbers = score_numbers
        self._later = parts[1:]
        self._start_step(parts[0])

    def _start_step(self, groups: Sequence[packing.TrainGroup]) -> None:
        learner = self._learner
        self._groups, self._weights = groups, learner.weigh(groups)
        self._batches, self._refused = learner.pack(groups, self._weights)
        self._next = 0
        self._carry: Carry | None = None
        if self._batches:
            with learner.on_mesh():
                self._cast(self._state)
                self._carry = learner.fns.empty_carry()

    def _cast(self, state: TrainState) -> None:
        reference = self._master_reference
        self._params: transformer.Params | None = self._learner.fns.cast(state.params)
        self._reference = None if reference is None else self._learner.fns.cast(reference)

    def advance(self) -> None:
        """Dispatch the current step's next micro-batch, if any; do not wait for the device."""
        if self._next == len(self._batches):
            return
        with self._learner.on_mesh():
            self._carry = self._accumulate(self._carry, self._batches[self._next])
        self._next += 1

    def _accumulate(self, carry: Carry | None, batch: packing.MicroBatch) -> Carry:
        learner = self._learner
        return learner.accumulate(self._params, carry, learner.place(batch), self._reference)

    def finish(self) -> tuple[TrainState, list[dict[str, float]]]:
        """Run the rest; return the new state and each step's numbers (docs/metrics.md, train/).

        A step with a non-finite loss or gradient norm leaves weights, moments and step count
        unchanged, to the bit; its "skipped_update" is 1. Empty steps do not end a series of skipped
        steps. Raises NonFinite at the optimizer.max_skipped-th skipped update in a row, counted
        over resumed runs too.
        """
        numbers = [self._finish_step() | self._score_numbers]
        for part in self._later:
            self._start_step(part)
            numbers.append(self._finish_step())
        return self._state, numbers

    def _finish_step(self) -> dict[str, float]:
        if not self._batches:
            return {"empty_update": 1.0, "refused_answers": float(self._refused)}
        while self._next < len(self._batches):
            self.advance()
        assert self._carry is not None
        gradients, sums = self._carry
        # Not needed while the weights change, which takes memory too.
        self._params = self._reference = self._carry = None
        with self._learner.on_mesh():
            self._state, norms = self._learner.fns.apply(self._state, gradients, sums["loss"])
        del gradients
        sums, norms = jax.device_get((sums, norms))
        if norms["skipped_in_a_row"] >= self._learner.max_skipped:
            raise self._explain()
        group_names = self._learner.spec.group_names
        return statistics.means(sums, norms, group_names) | self._packed_numbers()

    def _packed_numbers(self) -> dict[str, float]:
        filled = sum(np.count_nonzero(batch.last_query >= 0) for batch in self._batches)
        slots = sum(np.size(batch.tokens) for batch in self._batches)
        policy = self._learner.policy
        operations = sum(statistics.batch_operations(policy, batch) for batch in self._batches)
        return {
            "trained_tokens": float(filled),
            "operations": operations,
            "fill": filled / slots,
            "micro_batches": float(len(self._batches)),
            "shapes": float(len({(*b.tokens.shape, b.target.shape[1]) for b in self._batches})),
            "refused_answers": float(self._refused),
            "empty_update": 0.0,
        }

    def _explain(self) -> non_finite.NonFinite:
        """Find the non-finite groups and tensors, by running parts of the update again."""
        learner = self._learner
        # All groups fit the update's longest rows: the search compiles nothing.
        longest = max(self._batches, key=lambda batch: batch.tokens.shape[1])
        (rows, length), (_, answers) = longest.tokens.shape, longest.target.shape
        sizes = {"buckets": (packing.Bucket(length, answers),), "token_budget": rows * length}
        layout = dataclasses.replace(learner.packing, **sizes)

        def is_finite(rows: Sequence[non_finite.WeighedGroup]) -> bool:
            groups, weights = zip(*rows, strict=True)
            carry = learner.fns.empty_carry()
            for batch in learner.pack(groups, weights, layout)[0]:
                carry = self._accumulate(carry, batch)
            gradients, sums = carry
            return bool(update.measure(gradients, sums["loss"])[1])

        with learner.on_mesh():
            self._cast(self._state)
            read = {"policy": lora.join(self._params, learner.frozen), "reference": self._reference}
            tensors = non_finite.find_tensors(read, meshes.replicated(learner.mesh))
            all_rows = list(zip(self._groups, self._weights, strict=True))
            rows = non_finite.find_rows(all_rows, is_finite)
        return non_finite.NonFinite(int(self._state.skipped), rows or all_rows, tensors, bool(rows))
