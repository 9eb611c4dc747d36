"""One update: packed micro-batches in, new weights out. Supervised tuning is advantage 1.

1. Groups are split, weighted and packed on the host (packing.py).
2. The float32 master weights are cast once to the compute dtype.
3. A jitted `accumulate` runs a micro-batch forward and backward and adds to a donated float32
   gradient; the host loops over micro-batches.
4. One jitted `apply` clips by the global norm and takes the AdamW step. A step whose loss or
   gradient norm is not finite changes nothing and is counted; after too many in a row the update
   raises NonFinite, with the rows that did it (non_finite.py).

With adapters (policy/lora.py) only they are weights in this sense; all others are frozen, in the
compute dtype, and belong to the Learner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from spell_jax.attention import attend
from spell_jax.data.clusters import ROLES
from spell_jax.learner import lm_head, non_finite, packing, statistics
from spell_jax.learner import loss as losses
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.policy import lora, transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes


@flax.struct.dataclass
class TrainState:
    """Float32 master weights of what is trained, optimizer state, updates taken (int32 scalar).

    `skipped`, an int32 scalar too, counts the updates that were skipped since the last one taken.
    It is part of the state so that it survives a checkpoint and costs no message from the device.
    """

    params: Any
    optimizer: Any
    step: Any
    skipped: Any


class Update:
    """One optimizer step, whose micro-batches may be run between other programs of the device."""

    def __init__(
        self,
        learner: Learner,
        state: TrainState,
        groups: Sequence[packing.Group],
        reference: transformer.Params | None,
    ):
        self._learner, self._state = learner, state
        self._groups = learner.weigh(groups)
        self._batches, self._fitting, self._refused = learner.pack_weighed(self._groups)
        self._uncast_reference = reference
        self._next = 0
        self._carry: Any = None
        self._params: Any = None
        self._reference: Any = None
        if self._batches:
            with self._context():
                self._cast(state)
                self._carry = learner.empty_carry()

    def _cast(self, state: TrainState) -> None:
        """Weights in the compute dtype, as micro-batches read them."""
        reference = self._uncast_reference
        self._params = self._learner.cast_trained(state.params)
        self._reference = None if reference is None else self._learner.cast(reference)

    def _context(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(jax.set_mesh(self._learner.mesh))
        stack.enter_context(nn.logical_axis_rules(meshes.RULES))
        return stack

    def go_on(self) -> None:
        """Gives the device the next micro-batch, if one is left; does not wait for it."""
        if self._next == len(self._batches):
            return
        with self._context():
            self._carry = self._add(self._carry, self._batches[self._next])
        self._next += 1

    def _add(self, carry, batch: packing.MicroBatch):
        """The carry with a micro-batch's gradient and sums in it."""
        learner = self._learner
        batch = learner.place(batch)
        return learner.accumulate(self._params, learner.frozen, carry, batch, self._reference)

    def finish(self) -> tuple[TrainState, dict[str, float]]:
        """Runs what is left; the new state and named numbers of the update.

        An update whose loss or gradient norm is not finite leaves weights, moments and step as they
        are, to the bit; its "skipped_update" is 1. Empty updates neither are nor end a row of them.

        Raises:
          NonFinite: it is the optimizer.max_skipped-th of these in a row, over resumed runs too.
        """
        batches, refused = self._batches, float(self._refused)
        if not batches:
            return self._state, {"empty_update": 1.0, "refused_answers": refused}
        while self._next < len(batches):
            self.go_on()
        gradients, sums = self._carry
        # Not needed while the weights change, which takes memory too.
        self._params = self._reference = self._carry = None
        with self._context():
            state, norms = self._learner.apply(self._state, gradients, sums["loss"])
        del gradients
        sums, norms = jax.device_get((sums, norms))
        if norms["skipped_in_a_row"] >= self._learner.max_skipped:
            raise self._explain(state)
        filled = sum(np.count_nonzero(batch.last_query >= 0) for batch in batches)
        slots = sum(np.size(batch.tokens) for batch in batches)
        operations = sum(
            statistics.operations(self._learner.policy, len(group.prompt), map(len, group.answers))
            for group in self._fitting
        )
        return state, statistics.means(sums, norms) | {
            "trained_tokens": float(filled),
            "operations": operations,
            "fill": filled / slots,
            "micro_batches": float(len(batches)),
            "refused_answers": refused,
            "empty_update": 0.0,
        }

    def _explain(self, state: TrainState) -> non_finite.NonFinite:
        """Which rows and which tensors it was, found out by running parts of the update again.

        On several hosts all do this alike: what it goes by is the same on all of them.
        """
        learner = self._learner

        def is_finite(groups: Sequence[packing.Group]) -> bool:
            carry = learner.empty_carry()
            for batch in learner.pack_weighed(groups)[0]:
                carry = self._add(carry, batch)
            gradients, sums = carry
            return bool(_measure(gradients, sums["loss"])[1])

        with self._context():
            self._cast(state)
            read = {"policy": lora.join(self._params, learner.frozen), "reference": self._reference}
            tensors = non_finite.find_tensors(read, meshes.replicated(learner.mesh))
            rows = non_finite.find_rows(self._groups, is_finite)
        return non_finite.NonFinite(int(state.skipped), rows or self._groups, tensors, bool(rows))


class Learner:
    """Jitted updates of one model on one mesh."""

    def __init__(
        self,
        policy: PolicyConfig,
        optimizer: OptimizerConfig,
        loss: losses.LossConfig,
        packing_config: packing.PackingConfig,
        mesh: jax.sharding.Mesh,
        temperature: float = 1.0,
        compute_dtype: str = "float32",
    ):
        self.policy = policy
        self.loss = loss
        self.packing = packing_config
        self.mesh = mesh
        self.temperature = temperature
        self.compute_dtype = jnp.dtype(compute_dtype)
        self._optimizer = optimizer.make()
        self.rate = optimizer.rate()
        self.max_skipped = optimizer.max_skipped
        self._moments = "pinned_host" if optimizer.offload else "device"
        self._masters = "pinned_host" if optimizer.offload_weights else "device"
        packing_config.check_splits(meshes.context_shards(mesh))
        shapes, axes = transformer.abstract_params(policy)
        placed = meshes.shardings(mesh, axes, shapes)
        self._shapes, _ = lora.split(policy, shapes)
        self.param_shardings, self._frozen_shardings = lora.split(policy, placed)
        self.frozen: transformer.Params = {}
        self.cast_trained = jax.jit(
            lambda tree: jax.tree.map(
                lambda x: x.astype(self.compute_dtype), _to_device_memory(tree, self._masters)
            )
        )
        self._zeros = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), self._shapes),
            out_shardings=self.param_shardings,
        )
        # The carry goes out as it came in, so that every call after the first is the same program.
        self.accumulate = jax.jit(
            self._accumulate,
            donate_argnums=(2,),
            out_shardings=(self.param_shardings, meshes.replicated(mesh)),
        )
        # Of every host the whole: each has all groups.
        self.logprobs = jax.jit(self._logprobs, out_shardings=meshes.replicated(mesh))
        self.state_shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state())
        self.apply = jax.jit(
            self._apply,
            donate_argnums=(0,),
            out_shardings=(self.state_shardings, meshes.replicated(mesh)),
        )

    def abstract_state(self) -> TrainState:
        """Shapes and shardings of the training state, for a checkpoint to restore into."""
        state = jax.eval_shape(self._begin, self._shapes)
        optimizer = self._place_optimizer(state.optimizer, self._moments)
        where = jax.tree.map(lambda x: x.with_memory_kind(self._masters), self.param_shardings)
        params = meshes.with_sharding(state.params, where)
        counts = self._replicate(state.step), self._replicate(state.skipped)
        return TrainState(params, optimizer, *counts)

    def _place_optimizer(self, optimizer: Any, memory: str) -> Any:
        """Its shapes, placed, with the moments in a kind of memory."""

        def place(moment, where):
            return meshes.with_sharding(moment, where.with_memory_kind(memory))

        return optax.tree_utils.tree_map_params(
            self._optimizer,
            place,
            optimizer,
            self.param_shardings,
            transform_non_params=self._replicate,
        )

    def _replicate(self, x):
        return meshes.with_sharding(x, meshes.replicated(self.mesh))

    def _begin(self, params: transformer.Params) -> TrainState:
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        zero = jnp.zeros((), jnp.int32)
        return TrainState(params, self._optimizer.init(params), zero, zero)

    def init(self, source: transformer.Params | jax.Array) -> TrainState:
        """Training state for given weights, or for random ones from a key.

        Arrays on devices are donated: a large policy is there once. Where the policy has adapters,
        the weights are its base and frozen, and the adapters begin as nothing.
        """
        given = isinstance(source, dict)

        def random(part: int, places):
            """What is trained (part 0) or frozen (1) of random weights."""
            key = jax.random.key(0) if given else source
            draw = jax.jit(
                lambda key: lora.split(self.policy, transformer.init(self.policy, key))[part],
                out_shardings=places,
            )
            return draw(key)

        if self.policy.lora:
            self.freeze(source if given else random(1, self._frozen_shardings))
        if given and not self.policy.lora:
            trained = jax.device_put(source, self.param_shardings)
        else:
            trained = random(0, self.param_shardings)
        return self.start(trained)

    def start(self, trained: transformer.Params) -> TrainState:
        """Training state for what is trained of the weights, which is donated, as in a checkpoint;
        the rest, of a policy with adapters, is given to `freeze`."""
        begin = jax.jit(self._begin, out_shardings=self.state_shardings, donate_argnums=0)
        return begin(trained)

    def freeze(self, params: transformer.Params) -> None:
        """Takes the weights that are not trained, of a policy with adapters."""
        self.frozen = self.cast_trained(jax.device_put(params, self._frozen_shardings))

    def cast(self, params: transformer.Params) -> transformer.Params:
        """The whole policy in the compute dtype, as the sampler uses it, of trained weights."""
        return lora.join(self.cast_trained(params), self.frozen)

    def export(self, params: transformer.Params) -> tuple[PolicyConfig, transformer.Params]:
        """The policy as a model of its own, adapters merged: (architecture, weights)."""
        return lora.merge(self.policy, lora.join(params, self.frozen))

    def weigh(self, groups: Sequence[packing.Group]) -> list[packing.Group]:
        """The groups with the weights of their tokens in the loss."""
        return packing.weigh(groups, self.loss.aggregation, self.loss.sequence_tokens)

    def pack(self, groups: Sequence[packing.Group]) -> tuple[list[packing.MicroBatch], int]:
        """Micro-batches of the groups, and how many answers did not fit any bucket."""
        batches, _, refused = self.pack_weighed(self.weigh(groups))
        return batches, refused

    def pack_weighed(
        self, groups: Sequence[packing.Group]
    ) -> tuple[list[packing.MicroBatch], list[packing.Group], int]:
        """As pack, of groups that have their weights; and the groups as they stand in the rows."""
        if not self.packing.shared_prefix:
            groups = packing.separate_answers(groups)
        fitting, refused = packing.split_groups(groups, self.packing.buckets[-1])
        batches = packing.pack(
            fitting,
            self.packing.buckets,
            self.packing.token_budget,
            meshes.row_shards(self.mesh),
            meshes.context_shards(self.mesh),
        )
        return batches, fitting, len(refused)

    def place(self, batch: packing.MicroBatch) -> packing.MicroBatch:
        """A micro-batch on the devices of the mesh."""
        where = meshes.by_rows_and_time(self.mesh)
        return meshes.device_put(batch, jax.tree.map(lambda _: where, batch))

    def recompute(self, state: TrainState, groups: Sequence[packing.Group]) -> list[packing.Group]:
        """The groups with old_logprobs of the state's weights, whatever they had before.

        For loss.old_logprobs "recompute": once before the several updates of a step, of which each
        begins with other weights. Passes run forward only, in the programs of `compile`.

        Args:
          state: not changed.
          groups: of all updates of the step.

        Returns:
          The groups in order. Of an answer too long for any bucket, which the update refuses too,
          logprobs are NaN.
        """
        batches, *_ = self.pack_weighed(packing.numbered(groups))
        if not batches:
            return packing.with_logprobs(groups, [], [])
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(meshes.RULES):
            params = self.cast_trained(state.params)
            found = [self.logprobs(params, self.frozen, self.place(batch)) for batch in batches]
        return packing.with_logprobs(groups, batches, jax.device_get(found))

    def update(
        self,
        state: TrainState,
        groups: Sequence[packing.Group],
        reference: transformer.Params | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step on all groups; an empty list leaves the state as it is.

        Args, errors: see begin and Update.finish; the state is donated.

        Returns:
          The new state and named numbers of this update.
        """
        return self.begin(state, groups, reference).finish()

    def begin(
        self,
        state: TrainState,
        groups: Sequence[packing.Group],
        reference: transformer.Params | None = None,
    ) -> Update:
        """An update that is made micro-batch by micro-batch, between other things.

        Args:
          state: donated when the update is finished.
          groups: prompts with answers and advantages.
          reference: weights of the reference model; needed when loss.kl_weight is not 0.

        Raises:
          ValueError: the loss needs a reference or recorded logprobs that are not there.
        """
        if bool(self.loss.kl_weight) != (reference is not None):
            raise ValueError(
                f"loss.kl_weight = {self.loss.kl_weight}: reference weights must be given if, "
                "and only if, it is not 0"
            )
        needed = self.loss.old_logprobs != "on_policy" or self.loss.tis_cap
        if needed and any(g.old_logprobs is None for g in groups):
            raise ValueError(
                f"loss.old_logprobs = {self.loss.old_logprobs!r}, loss.tis_cap = "
                f"{self.loss.tis_cap}: need the old_logprobs of every group"
            )
        return Update(self, state, groups, reference)

    def compile(self, state: TrainState, reference: transformer.Params | None = None) -> None:
        """Compiles every bucket before the first step, so that no step waits for it later; also of
        `recompute`, if the loss needs it."""
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(meshes.RULES):
            params = self.cast_trained(state.params)
            if reference is not None:
                reference = self.cast(reference)
            carry = self.empty_carry()
            for bucket in self.packing.buckets:
                batch = self._empty_batch(bucket)
                if self.loss.old_logprobs == "recompute":
                    self.logprobs(params, self.frozen, batch)
                carry = self.accumulate(params, self.frozen, carry, batch, reference)

    def lower(self, state: TrainState, bucket: packing.Bucket) -> jax.stages.Lowered:
        """The program of a bucket's micro-batches, to look at; nothing is run."""
        batch = self._empty_batch(bucket)
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(meshes.RULES):
            params = self.cast_trained(state.params)
            return self.accumulate.lower(params, self.frozen, self.empty_carry(), batch, None)

    def _empty_batch(self, bucket: packing.Bucket) -> packing.MicroBatch:
        """All padding, in the shape and place of the bucket's micro-batches."""
        rows = packing.row_count(bucket, self.packing.token_budget, meshes.row_shards(self.mesh))
        batch = packing.empty_micro_batch(bucket, rows)
        return jax.device_put(batch, meshes.by_rows_and_time(self.mesh))

    def empty_carry(self):
        """(gradient, sums) before the first micro-batch."""
        sums: dict[str, Any] = {name: np.zeros((), np.float32) for name in self.loss.sums}
        sums |= {name: np.zeros(len(ROLES) + 1, np.float32) for name in losses.ROLE_SUMS}
        if self.policy.experts:
            sums["router_load"] = np.zeros((self.policy.layers, self.policy.experts), np.float32)
        return self._zeros(), jax.device_put(sums, meshes.replicated(self.mesh))

    def _loss(self, params, frozen, batch: packing.MicroBatch, reference):
        logprobs, entropy, router_load = self.score(lora.join(params, frozen), batch)
        reference_logprobs = None
        if self.loss.kl_weight:
            reference_logprobs, *_ = self.score(jax.lax.stop_gradient(reference), batch)
        value, sums = losses.batch_loss(logprobs, entropy, batch, self.loss, reference_logprobs)
        if router_load is not None:
            sums["router_load"] = router_load
        return value, sums

    def _logprobs(self, params, frozen, batch: packing.MicroBatch) -> jax.Array:
        return self.score(lora.join(params, frozen), batch)[0]

    def score(self, params: transformer.Params, batch: packing.MicroBatch):
        """Logprobs and entropies [B, A] of answer tokens, and the experts' load (or None); to be
        traced."""
        hidden, _, router_load = transformer.hidden_states(
            self.policy,
            params,
            batch.tokens,
            batch.positions,
            attend.packed(self.policy.attention, self.policy.ring),
            context={"index": batch.index, "last_query": batch.last_query},
        )
        scores = lm_head.score_tokens(
            self.policy, params, hidden, batch.source, batch.target, self.temperature
        )
        return *scores, router_load

    def _accumulate(self, params, frozen, carry, batch, reference):
        gradients, sums = carry
        gradient = jax.value_and_grad(self._loss, has_aux=True)
        (_, new_sums), new = gradient(params, frozen, batch, reference)
        gradients = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), gradients, new)
        return gradients, {name: sums[name] + new_sums[name] for name in sums}

    def _apply(
        self, state: TrainState, gradients, loss: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        norm, finite = _measure(gradients, loss)
        before = (
            _to_device_memory(state.params, self._masters),
            _to_device_memory(state.optimizer, self._moments),
        )
        updates, optimizer = self._optimizer.update(gradients, before[1], before[0])
        params = optax.apply_updates(before[0], updates)
        kept = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, optimizer), before
        )
        rate = self.rate(state.step)
        step = state.step + finite.astype(jnp.int32)
        skipped = jnp.where(finite, 0, state.skipped + 1)
        metrics = {
            "gradient_norm": norm,
            "skipped_update": 1.0 - finite,
            "skipped_in_a_row": skipped,
            "learning_rate": jnp.asarray(rate),
        }
        return TrainState(kept[0], kept[1], step, skipped), metrics


def _to_device_memory(tree: Any, memory: str) -> Any:
    """Arrays that wait in a kind of memory, in the device's; to be traced."""
    return tree if memory == "device" else jax.device_put(tree, jax.memory.Space.Device)


@jax.jit
def _measure(gradients, loss: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradient's global norm, and whether it and the loss are finite.

    Both are asked: of a loss that overflows on tokens of probability 1 the gradient is 0.
    """
    norm = optax.tree.norm(gradients)
    return norm, jnp.isfinite(norm) & jnp.isfinite(loss)
