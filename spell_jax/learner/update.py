"""One optimizer step as pure jitted functions: accumulate gradients, then apply them.

1. `cast` makes the weights in the compute dtype from the float32 master weights, once a step.
2. `accumulate` runs one packed micro-batch forward and backward and adds to a donated float32
   gradient and to named sums; the caller loops over micro-batches.
3. `apply` clips by the global norm and takes the AdamW step, or skips a non-finite one.

With LoRA adapters (policy/lora.py) only these are trained; all other weights are `frozen`, an
argument in the compute dtype or int8 (policy/int8.py). Policy and reference share it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32

from spell_jax.attention import attend
from spell_jax.learner import lm_head, packing
from spell_jax.learner import loss as losses
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.token_sums import sum_by_name
from spell_jax.policy import int8, lora, moe, transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes

Params = transformer.Params
# (float32 gradient of the trained weights, named float32 sums over tokens)
Carry = tuple[Params, dict[str, jax.Array]]


@flax.struct.dataclass
class TrainState:
    """State of the training of one model.

    Attributes:
      params: float32 master weights of what is trained.
      opt_state: state of the optimizer, moments and step count.
      step: optimizer steps taken, int32 scalar.
      skipped: non-finite steps skipped in a row, int32 scalar; it survives checkpoints.
    """

    params: Params
    opt_state: optax.OptState
    step: jax.Array
    skipped: jax.Array


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
    """Everything static that an update depends on."""

    policy: PolicyConfig
    optimizer: OptimizerConfig
    loss: LossConfig
    temperature: float = 1.0  # sampling temperature, at which logprobs are taken
    compute_dtype: str = "float32"  # of weights and activations in forward and backward passes
    group_names: tuple[str, ...] = ()  # names of groups that have sums of their own

    @property
    def moments_memory(self) -> str:
        return "pinned_host" if self.optimizer.offload else "device"

    @property
    def masters_memory(self) -> str:
        return "pinned_host" if self.optimizer.offload_weights else "device"


class UpdateFns(NamedTuple):
    """Jitted pure functions of an update on one mesh, and where their arrays lie."""

    init: Callable[[Params], TrainState]  # weights of what is trained (donated)
    cast: Callable[[Params], Params]  # master weights -> weights in the compute dtype
    empty_carry: Callable[[], Carry]  # before the first micro-batch
    # (cast weights, frozen, carry (donated), MicroBatch, reference's cast weights or None) -> carry
    accumulate: Any
    logprobs: Any  # (cast weights, frozen, MicroBatch) -> float32 [B, A], whole on every host
    apply: Any  # (state (donated), gradient, loss) -> (state, named numbers)
    random: Callable[[jax.Array, str], Params]  # (key, "trained" or "frozen") -> random weights
    abstract_state: TrainState  # shapes and shardings
    param_shardings: Any  # of the trained weights
    frozen_shardings: Any


def make_update_fns(spec: UpdateSpec, mesh: jax.sharding.Mesh) -> UpdateFns:
    """Build the jitted functions of an update; nothing is compiled yet."""
    trained_shapes, _ = lora.split(spec.policy, transformer.abstract_params(spec.policy)[0])
    param_shardings, frozen_shardings = weight_shardings(spec.policy, mesh)
    replicated = meshes.replicated(mesh)
    abstract = _abstract_state(spec, mesh, trained_shapes, param_shardings)
    state_shardings = jax.tree.map(lambda x: x.sharding, abstract)

    def empty_carry() -> Carry:
        gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained_shapes)
        return gradients, jax.tree.map(jnp.asarray, _empty_sums(spec))

    def random(key: jax.Array, part: str) -> Params:
        shardings = param_shardings if part == "trained" else frozen_shardings
        index = ("trained", "frozen").index(part)
        make = jax.jit(
            lambda key: lora.split(spec.policy, transformer.init(spec.policy, key))[index],
            out_shardings=shardings,
        )
        return make(key)

    return UpdateFns(
        init=jax.jit(
            functools.partial(init_state, spec), out_shardings=state_shardings, donate_argnums=0
        ),
        cast=jax.jit(functools.partial(cast, spec)),
        empty_carry=jax.jit(empty_carry, out_shardings=(param_shardings, replicated)),
        # The carry goes out as it came in, so that every call after the first is the same program.
        accumulate=jax.jit(
            functools.partial(accumulate, spec),
            donate_argnums=2,
            out_shardings=(param_shardings, replicated),
        ),
        logprobs=jax.jit(functools.partial(logprobs, spec), out_shardings=replicated),
        apply=jax.jit(
            functools.partial(apply, spec),
            donate_argnums=0,
            out_shardings=(state_shardings, replicated),
        ),
        random=random,
        abstract_state=abstract,
        param_shardings=param_shardings,
        frozen_shardings=frozen_shardings,
    )


# --------------------------------------------------------------------------------- Pure functions


def init_state(spec: UpdateSpec, params: Params) -> TrainState:
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, spec.optimizer.make().init(params), zero, zero)


def cast(spec: UpdateSpec, params: Params) -> Params:
    """Cast the weights to the compute dtype, in device memory; an int8 base stays as it is."""
    return int8.cast(to_device_memory(params, spec.masters_memory), spec.compute_dtype)


def accumulate(
    spec: UpdateSpec,
    params: Params,
    frozen: Params,
    carry: Carry,
    batch: packing.MicroBatch,
    reference: Params | None,
) -> Carry:
    """Add a micro-batch's gradient and sums to the carry."""
    gradients, sums = carry
    gradient = jax.value_and_grad(functools.partial(micro_batch_loss, spec), has_aux=True)
    (_, new_sums), new = gradient(params, frozen, batch, reference)
    gradients = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), gradients, new)
    return gradients, {name: sums[name] + new_sums[name] for name in sums}


def micro_batch_loss(
    spec: UpdateSpec,
    params: Params,
    frozen: Params,
    batch: packing.MicroBatch,
    reference: Params | None,
) -> tuple[Float32[Array, ""], dict[str, jax.Array]]:
    policy_logprobs, entropy, routing = score(spec, lora.join(params, frozen), batch)
    reference_logprobs = None
    if reference is not None:  # it chooses its own experts
        read = dataclasses.replace(batch, experts=None)
        reference_params = lora.join(jax.lax.stop_gradient(reference), frozen)
        reference_logprobs, *_ = score(spec, reference_params, read)
    value, sums = losses.batch_loss(policy_logprobs, entropy, batch, spec.loss, reference_logprobs)
    real, names = batch.weight > 0, len(spec.group_names) + 1
    sums["tokens_by_name"] = sum_by_name(real, batch.group_name, names)
    sums["entropy_by_name"] = sum_by_name(entropy * real, batch.group_name, names)
    if routing is not None:
        sums["router_load"] = routing.load
        if routing.differing is not None:
            sums["router_difference"] = jnp.sum(routing.differing, axis=0)
    return value, sums


def logprobs(
    spec: UpdateSpec, params: Params, frozen: Params, batch: packing.MicroBatch
) -> Float32[Array, "B A"]:
    """Return logprobs of the answer tokens."""
    return score(spec, lora.join(params, frozen), batch)[0]


def score(
    spec: UpdateSpec, params: Params, batch: packing.MicroBatch
) -> tuple[Float32[Array, "B A"], Float32[Array, "B A"], moe.Routing | None]:
    """Return logprobs and entropies (nats) of the answer tokens, and a mixture's routing."""
    hidden, _, routing = transformer.hidden_states(
        spec.policy,
        params,
        batch.tokens,
        batch.positions,
        attend.packed(spec.policy.attention, spec.policy.ring),
        context={"index": batch.index, "last_query": batch.last_query},
        experts=batch.experts,
    )
    scores = lm_head.score_tokens(
        spec.policy,
        params,
        hidden,
        batch.source,
        batch.target,
        spec.temperature,
        cutoff=batch.cutoff if spec.loss.support == "sampled" else None,
    )
    return *scores, routing


def apply(
    spec: UpdateSpec, state: TrainState, gradients: Params, loss: jax.Array
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Return the state after the optimizer step, unchanged to the bit if the step is not finite.

    Numbers: "gradient_norm" (before clipping), "learning_rate", "skipped_update" (0 or 1) and
    "skipped_in_a_row".
    """
    norm, finite = measure(gradients, loss)
    before = (
        to_device_memory(state.params, spec.masters_memory),
        to_device_memory(state.opt_state, spec.moments_memory),
    )
    updates, opt_state = spec.optimizer.make().update(gradients, before[1], before[0])
    after = optax.apply_updates(before[0], updates), opt_state
    next_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
    # Skipped steps do not count, as in the optimizer's own state: the schedule waits for them.
    rate = spec.optimizer.rate()(state.step)
    step = state.step + finite.astype(jnp.int32)
    skipped = jnp.where(finite, 0, state.skipped + 1)
    numbers = {
        "gradient_norm": norm,
        "skipped_update": 1.0 - finite,
        "skipped_in_a_row": skipped,
        "learning_rate": jnp.asarray(rate),
    }
    return TrainState(next_state[0], next_state[1], step, skipped), numbers


@jax.jit
def measure(gradients: Params, loss: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradient's global norm, and whether norm and loss are finite.

    Both are tested: a loss that overflows on tokens of probability 1 has a gradient of 0.
    """
    norm = optax.tree.norm(gradients)
    return norm, jnp.isfinite(norm) & jnp.isfinite(loss)


def to_device_memory(tree: Any, memory: str) -> Any:
    """Move host-offloaded leaves to device memory (traceable)."""
    return tree if memory == "device" else jax.device_put(tree, jax.memory.Space.Device)


# ------------------------------------------------------------------------------ Shapes, shardings


def weight_shardings(policy: PolicyConfig, mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    """Return the shardings of the trained weights, and of the frozen ones."""
    shapes, axes = transformer.abstract_params(policy)
    return lora.split(policy, meshes.shardings(mesh, axes, shapes))


def _abstract_state(
    spec: UpdateSpec, mesh: jax.sharding.Mesh, shapes: Any, param_shardings: Any
) -> TrainState:
    """Return shapes and shardings of the training state, for a checkpoint to restore into."""
    state = jax.eval_shape(functools.partial(init_state, spec), shapes)
    replicated = meshes.replicated(mesh)

    def replicate(x: Any) -> Any:
        return meshes.with_sharding(x, replicated)

    def place(moment: Any, sharding: Any) -> Any:
        return meshes.with_sharding(moment, sharding.with_memory_kind(spec.moments_memory))

    opt_state = optax.tree_utils.tree_map_params(
        spec.optimizer.make(),
        place,
        state.opt_state,
        param_shardings,
        transform_non_params=replicate,
    )
    masters = jax.tree.map(lambda x: x.with_memory_kind(spec.masters_memory), param_shardings)
    params = meshes.with_sharding(state.params, masters)
    return TrainState(params, opt_state, replicate(state.step), replicate(state.skipped))


def _empty_sums(spec: UpdateSpec) -> dict[str, Any]:
    sums: dict[str, Any] = {name: np.zeros((), np.float32) for name in spec.loss.sums}
    for name in ("tokens_by_name", "entropy_by_name"):  # the last sum is of all other names
        sums[name] = np.zeros(len(spec.group_names) + 1, np.float32)
    if spec.policy.experts:
        sums["router_load"] = np.zeros((spec.policy.layers, spec.policy.experts), np.float32)
    if spec.loss.routing == "sampled":
        sums["router_difference"] = np.zeros(2, np.float32)
    return sums
