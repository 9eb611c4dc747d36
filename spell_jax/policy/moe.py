"""Mixture of experts: each token is processed by the k of E SwiGLU experts that its router selects.

1. The router scores all E experts in a float32 softmax. The probabilities of a token's best k are
   their weights (Qwen3-MoE: k = 8 of 128, weights scaled to sum to 1).
2. The (token, expert) pairs are sorted by expert and multiplied in one ragged matrix product per
   kernel. No token is dropped.
3. If experts are sharded over the mesh's `expert` axis, so are the tokens of all other layers. The
   tokens of an expert group are gathered, each device computes the pairs of its own experts, and
   the partial sums are scattered back.
4. Both passes process tokens in chunks of at most CHUNK: one copy of the rows of 163,840 tokens
   would take 5.4 GB at a width of 2048.
5. Both passes are written by hand, each in one shard_map, so that every sum over devices is
   visible. A layer gathers its kernels once per pass. Their gradients are summed over chunks and
   devices in float32 and rounded at the end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from spell_jax.policy import products
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.collectives import Axes

Kernels = tuple[jax.Array, jax.Array, jax.Array]

# Tokens that a device processes at once. In an expert group of 8 devices each contributes 512. With
# k = 8 and D = 2048, one copy of their rows takes 134 MB in bfloat16.
CHUNK = 4096


def route(
    logits: Float[Array, "*B E"], count: int, normalized: bool
) -> tuple[Float32[Array, "*B k"], Int32[Array, "*B k"]]:
    """Select the k = `count` experts of each token from router logits.

    Returns weights, scaled to sum to 1 if `normalized`, and expert numbers.
    """
    # A softmax over all experts, then the best k (Qwen3-MoE): without `normalized` the weights sum
    # to less than 1.
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), count)
    return _scale(weights, normalized), experts


def replay(
    logits: Float[Array, "*B E"],
    router_experts: Int32[Array, "*B k"],
    recorded: Int[Array, "*B k"],
    normalized: bool,
) -> tuple[Float32[Array, "*B k"], Int32[Array, "*B k"]]:
    """Return weights and experts as `route` does, but for recorded experts (int8 or int16).

    A token without a record (-1) keeps its `router_experts`, the experts of `route`.
    """
    experts = jnp.where(recorded >= 0, recorded, router_experts)
    # Only the choice is replayed. The weights are the present router's probabilities, so that the
    # router gets gradients.
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    return _scale(jnp.take_along_axis(probabilities, experts, axis=-1), normalized), experts


def _scale(weights: jax.Array, normalized: bool) -> jax.Array:
    return weights / jnp.sum(weights, axis=-1, keepdims=True) if normalized else weights


class Routing(NamedTuple):
    """Experts of the tokens [B, T] of a layer, or of all layers with a leading axis L.

    Attributes:
      load: tokens of each expert, without padding, float32 [E].
      experts: experts of each token [B, T, k], see no_experts; None if not recorded.
      differing: with replay, the number of tokens for which the router chose other experts than the
        record, and the number of tokens with a record, float32 [2]; else None.
    """

    load: jax.Array
    experts: jax.Array | None = None
    differing: jax.Array | None = None


def by_token(routing: Routing | None) -> Int[Array, "B T L k"] | None:
    """Return the recorded experts of all layers; None without a record."""
    if routing is None or routing.experts is None:
        return None
    return jnp.moveaxis(routing.experts, 0, 2)


def no_experts(config: PolicyConfig) -> np.ndarray:
    """Return the record of a token with unknown experts: -1 [L, k], int8 up to 128 experts."""
    # A record has a byte per layer and expert: 384 bytes per token of Qwen3-30B-A3B (48 x 8).
    dtype = np.int8 if config.experts <= 128 else np.int16
    return np.full((config.layers, config.experts_per_token), -1, dtype)


def count_differing(
    router_experts: Int32[Array, "B T k"],
    recorded: Int[Array, "B T k"],
    real: Bool[Array, "B T"],
) -> Float32[Array, " 2"]:
    """Compute Routing.differing of experts in any order; `real` is as in `count_load`."""
    counted = real & (recorded[..., 0] >= 0)
    # Sets are compared: the order of a token's experts does not change its output.
    differs = jnp.any(jnp.sort(router_experts, axis=-1) != jnp.sort(recorded, axis=-1), axis=-1)
    return jnp.stack([jnp.sum(counted & differs), jnp.sum(counted)]).astype(jnp.float32)


def count_load(
    token_experts: Int32[Array, "B T k"], experts: int, real: Bool[Array, "B T"]
) -> Float32[Array, " E"]:
    """Count the tokens routed to each expert; `real` is False for padding, which is not counted."""
    counted = jnp.broadcast_to(real[..., None], token_experts.shape).astype(jnp.float32)
    return jnp.zeros(experts).at[token_experts.reshape(-1)].add(counted.reshape(-1))


def mix(
    x: Float[Array, "B T D"],
    weights: Float[Array, "B T k"],
    experts: Int32[Array, "B T k"],
    kernels: tuple[Float[Array, "E D F"], Float[Array, "E D F"], Float[Array, "E F D"]],
) -> Float[Array, "B T D"]:
    """Compute the weighted sum of the outputs of each token's experts, on the current mesh.

    The kernels, in x's dtype, are gate, up and down.
    """
    return _mix(_split(x.shape, kernels[0].shape), x, weights, experts, kernels)


# ---------------------------------------------------------------------------------- Sharding


@dataclasses.dataclass(frozen=True)
class _Split(collectives.Split):
    """Sharding of tokens and kernels (leading axis E), and the chunk size."""

    hidden: Axes = ()  # mesh axes that shard the kernels' F
    chunk: int = 0  # this device's tokens per chunk

    @property
    def kernels_spec(self) -> tuple[PartitionSpec, ...]:
        expert, width, hidden = self.leading or None, self.width or None, self.hidden or None
        wide = PartitionSpec(expert, width, hidden)
        return wide, wide, PartitionSpec(expert, hidden, width)


def _split(tokens: tuple[int, ...], kernel: tuple[int, ...]) -> _Split:
    """Return the sharding of tokens [B, T, D] and kernels [E, D, F] on the current mesh."""
    experts, width, hidden = kernel
    split = _Split.of(tokens, experts, width, over=meshes.EXPERT, chunk=CHUNK)
    if split.mesh is None:
        return split
    return dataclasses.replace(
        split,
        hidden=collectives.splitting(split.mesh, (meshes.TENSOR,), hidden),
        chunk=max(1, CHUNK // split.count(split.leading)),
    )


def _gather(x: jax.Array, axes: Axes, axis: int = 0) -> jax.Array:
    return jax.lax.all_gather(x, axes, axis=axis, tiled=True) if axes else x


def _sum(x: jax.Array, axes: Axes) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x


# ------------------------------------------------------------------------------- Both passes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(split: _Split, x, weights, experts, kernels: Kernels) -> jax.Array:
    tokens = split.tokens_spec
    specs = (tokens, tokens, tokens, split.kernels_spec)
    run = collectives.on_shards(split.mesh, functools.partial(_forward, split), specs, tokens)
    return run(x, weights, experts, kernels)


def _mix_forward(split: _Split, *inputs):
    return _mix(split, *inputs), inputs


def _mix_backward(split: _Split, inputs, to_out):
    tokens, kernels = split.tokens_spec, split.kernels_spec
    in_specs, out_specs = (tokens, tokens, tokens, kernels, tokens), (tokens, tokens, kernels)
    run = functools.partial(_backward, split)
    run = collectives.on_shards(split.mesh, run, in_specs, out_specs)
    to_x, to_weights, to_kernels = run(*inputs, to_out)
    return to_x, to_weights, None, to_kernels


_mix.defvjp(_mix_forward, _mix_backward)


def _forward(split: _Split, x, weights, experts, kernels: Kernels) -> jax.Array:
    """Compute one device's part of `mix` from the device's shards."""
    if x.shape[1] == 1 and not split.time:  # decode: one token per row, T not sharded
        return _decode(split, x, weights, experts, kernels)
    gate, up, down = _gather_kernels(split, kernels)

    def one_chunk(_, chunk):
        tokens, weights, experts = (_gather(part, split.leading) for part in chunk)
        pairs = _pairs(split, experts, len(gate))
        rows = _dispatch(tokens, pairs)
        inputs = _product(rows, gate, pairs), _product(rows, up, pairs)
        hidden = _hidden(*inputs, _router_weights(weights, pairs))
        out = _combine(_product(hidden, down, pairs), pairs)
        return None, _sum(collectives.sum_scatter(out, split.leading), split.hidden)

    _, out = _in_chunks(split, one_chunk, None, _flat(x, weights, experts))
    return out.reshape(x.shape)


def _decode(split: _Split, x, weights, experts, kernels: Kernels) -> jax.Array:
    """Compute `_forward` for few tokens without gathering kernels.

    Devices that share a kernel's width exchange their tokens; each multiplies its part of the
    width.
    """
    gate, up, down = kernels
    together = tuple(axis for axis in split.rows if axis in split.leading + split.width)
    tokens, weights, experts = (_gather(part, together) for part in _flat(x, weights, experts))
    pairs, share = _pairs(split, experts, len(gate)), gate.shape[1]
    if split.width:
        first = jax.lax.axis_index(split.width) * share
        tokens = jax.lax.dynamic_slice_in_dim(tokens, first, share, axis=1)
    rows = _dispatch(tokens, pairs)
    # float32 before the sum over devices, each of which has a part of every product.
    inputs = (_product(rows, kernel, pairs).astype(jnp.float32) for kernel in (gate, up))
    inputs = (_sum(part, split.width).astype(x.dtype) for part in inputs)
    out = _combine(_product(_hidden(*inputs, _router_weights(weights, pairs)), down, pairs), pairs)
    out = _gather(_sum(out, split.leading + split.hidden), split.width, axis=1)
    if together:
        first = jax.lax.axis_index(together) * len(x)
        out = jax.lax.dynamic_slice_in_dim(out, first, len(x))
    return out.reshape(x.shape)


def _backward(split: _Split, x, weights, experts, kernels: Kernels, to_out):
    """Compute a device's gradients of x, weights and kernels; recompute chunks' forward passes."""
    gate, up, down = _gather_kernels(split, kernels)

    def one_chunk(totals, chunk):
        tokens, weights, experts, to_out = (_gather(part, split.leading) for part in chunk)
        pairs = _pairs(split, experts, len(gate))
        rows, to_rows_out = _dispatch(tokens, pairs), _dispatch(to_out, pairs)
        inputs = _product(rows, gate, pairs), _product(rows, up, pairs)
        hidden, pull = jax.vjp(_hidden, *inputs, _router_weights(weights, pairs))
        to_gate, to_up, to_row_weights = pull(_product(to_rows_out, down, pairs, over=2))
        new = ((rows, to_gate), (rows, to_up), (to_rows_out, hidden))
        totals = tuple(t + _outer(*factors, pairs) for t, factors in zip(totals, new, strict=True))
        # Frees the rows before the equally large gradients of rows are computed.
        totals, to_gate, to_up = jax.lax.optimization_barrier((totals, to_gate, to_up))
        to_rows = _product(to_gate, gate, pairs, over=2) + _product(to_up, up, pairs, over=2)
        to_weights = _take_rows(to_row_weights, pairs.position).reshape(weights.shape)
        gradients = _combine(to_rows, pairs), to_weights
        return totals, tuple(
            _sum(collectives.sum_scatter(g, split.leading), split.hidden) for g in gradients
        )

    # The gradient of down is summed as [E, D, F] too, so that all are scattered over rows. With 64
    # columns per device, XLA for TPUs would emit an all-reduce.
    totals = tuple(jnp.zeros(gate.shape, jnp.float32) for _ in kernels)
    totals, (to_x, to_weights) = _in_chunks(
        split, one_chunk, totals, _flat(x, weights, experts, to_out)
    )
    summed = (
        _sum(collectives.sum_scatter(total, split.width, 1), split.summed) for total in totals
    )
    to_gate, to_up, to_down = (
        collectives.rounded(total / split.copies, x.dtype) for total in summed
    )
    to_kernels = to_gate, to_up, to_down.swapaxes(1, 2)
    return to_x.reshape(x.shape), to_weights.reshape(weights.shape), to_kernels


def _gather_kernels(split: _Split, kernels: Kernels) -> Kernels:
    """Gather the full width of the kernels of this device's experts."""
    gate, up, down = kernels
    return (
        _gather(gate, split.width, axis=1),
        _gather(up, split.width, axis=1),
        _gather(down, split.width, axis=2),
    )


def _flat(*tensors: jax.Array) -> tuple[jax.Array, ...]:
    """Reshape each [B, T, ...] to [B T, ...]."""
    return tuple(x.reshape(-1, x.shape[-1]) for x in tensors)


def _in_chunks(split: _Split, one_chunk: Callable[..., Any], totals: Any, tensors: Any):
    """Scan one_chunk(totals, parts [n, ...]) -> (totals, results [n, ...]) over `tensors` [N, ...].

    Uses as few chunks as the split allows, all of one size.
    """
    count = len(tensors[0])
    steps = -(-count // split.chunk)
    if steps <= 1:  # e.g. decode: no loop, no padding
        return one_chunk(totals, tensors)
    # Equal chunks: there are fewer padding tokens than chunks.
    size = -(-count // steps)

    def cut(x):
        # Expert -1 is on no device, so that no expert processes padding.
        nothing = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
        x = jnp.pad(x, ((0, steps * size - count), (0, 0)), constant_values=nothing)
        return x.reshape(steps, size, -1)

    totals, results = jax.lax.scan(one_chunk, totals, tuple(cut(x) for x in tensors))
    return totals, jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[:count], results)


# ----------------------------------------------------------------------- Pairs, on one device


class _Pairs(NamedTuple):
    """(token, expert) pairs sorted by this device's experts.

    Pairs of other devices' experts come last, where a ragged product leaves zeros.
    """

    order: jax.Array  # pair (token * k + j) at each position, int32 [n k]
    position: jax.Array  # position of each pair, int32 [n k]
    sizes: jax.Array  # pairs of each expert on this device, int32 [held]
    count: int  # experts per token, k


def _pairs(split: _Split, experts: jax.Array, held: int) -> _Pairs:
    """Sort the pairs of tokens and experts [n, k] on a device that holds `held` experts."""
    first = jax.lax.axis_index(split.leading) * held if split.leading else 0
    expert = experts.reshape(-1) - first
    # Pairs of other devices sort to the end, after the groups that a ragged product multiplies.
    expert = jnp.where((expert >= 0) & (expert < held), expert, held)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=held + 1)[:held].astype(jnp.int32)
    # The inverse permutation turns the sum over a token's rows into a gather, not a scatter.
    return _Pairs(order, jnp.argsort(order), sizes, experts.shape[-1])


def _take_rows(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Index x[positions], clipped to the valid range."""
    # The default mode would look for invalid positions, at the cost of a copy of the result (134 MB
    # per chunk).
    return jnp.take(x, positions, axis=0, mode="clip")


def _dispatch(tokens: jax.Array, pairs: _Pairs) -> jax.Array:
    """Copy tokens [n, D] to the rows of their pairs [n k, D]."""
    return _take_rows(tokens, pairs.order // pairs.count)


def _router_weights(weights: jax.Array, pairs: _Pairs) -> jax.Array:
    """Reorder token weights [n, k] to the rows of their pairs [n k]."""
    return _take_rows(weights.reshape(-1), pairs.order)


def _combine(rows: jax.Array, pairs: _Pairs) -> jax.Array:
    """Sum the rows of each token, [n k, D] to [n, D]; the transpose of `_dispatch`."""
    by_token = _take_rows(rows, pairs.position).reshape(-1, pairs.count, rows.shape[-1])
    return jnp.sum(by_token, axis=1)


def _hidden(gate: jax.Array, up: jax.Array, weights: jax.Array) -> jax.Array:
    """Compute silu(gate) * up [n k, F], times the weight of the row."""
    # The weight is applied before the linear `down`: F products per row instead of D, and the
    # backward pass does not need the results of `down`.
    gate32, up32, weights32 = (x.astype(jnp.float32) for x in (gate, up, weights))
    return (nn.silu(gate32) * up32 * weights32[:, None]).astype(gate.dtype)


def _product(rows: jax.Array, kernels: jax.Array, pairs: _Pairs, over: int = 1) -> jax.Array:
    """Multiply each row [n k, a] by its expert's matrix, over axis `over` of [held, ..., ...]."""
    dimensions = jax.lax.RaggedDotDimensionNumbers((([1], [over]), ([], [])), [0], [0])
    product = jax.lax.ragged_dot_general(
        rows, kernels, pairs.sizes, dimensions, preferred_element_type=products.sum_dtype()
    )
    return product.astype(rows.dtype)


def _outer(rows: jax.Array, right_rows: jax.Array, pairs: _Pairs) -> jax.Array:
    """Sum outer products of [n k, a] and [n k, b] by expert, float32 [held, a, b]."""
    dimensions = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    return jax.lax.ragged_dot_general(
        rows, right_rows, pairs.sizes, dimensions, preferred_element_type=jnp.float32
    )
