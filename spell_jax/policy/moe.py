"""Mixture of experts: every token goes through the few SwiGLUs that its router chooses.

1. The router scores all E experts for a token; the best k, with weights from a float32 softmax,
   are its experts (Qwen3-MoE: k = 8 of 128, the k weights scaled to sum 1).
2. The (token, expert) pairs are sorted by expert and multiplied in one ragged matrix product a
   kernel: each expert's rows meet its own matrix. No token is dropped.
3. Where experts are split over the mesh's `expert` axis, so are the tokens of all other layers.
   The tokens of an expert group are gathered, each device computes the pairs of its own experts,
   and partial sums are scattered back to where the tokens came from.
4. Tokens go in chunks of at most CHUNK, forward and backward: 163,840 tokens at once would be 1.3
   million pairs, 5.4 GB for one copy of their rows at a width of 2048.
5. Both passes are written out, each in one shard_map, so that all that is summed over devices
   stands here. A layer gathers its kernels once a pass, before the chunks, in their own dtype.
   Their gradients are summed over chunks and devices in float32 and rounded at the end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.collectives import Axes

Kernels = tuple[jax.Array, jax.Array, jax.Array]

# Tokens that a device multiplies with kernels at once; an expert group of 8 devices brings 512 of
# each. With k = 8 and D = 2048 a copy of their rows takes 134 MB in bfloat16.
CHUNK = 4096
_WIDTH_AXIS = (1, 1, 2)  # where D stands in gate and up [E, D, F] and in down [E, F, D]


def route(logits: jax.Array, count: int, normalized: bool) -> tuple[jax.Array, jax.Array]:
    """The experts of each token.

    Args:
      logits: [..., E], any dtype.
      count: k, experts of a token.
      normalized: whether the k weights are scaled to sum 1.

    Returns:
      float32 weights [..., k], and int32 experts [..., k].
    """
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), count)
    if normalized:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


def load(chosen: jax.Array, experts: int, real: jax.Array) -> jax.Array:
    """Tokens that each expert got, float32 [E].

    Args:
      chosen: int32 [B, T, k].
      experts: E.
      real: bool [B, T]; padding does not count.
    """
    counted = jnp.broadcast_to(real[..., None], chosen.shape).astype(jnp.float32)
    return jnp.zeros(experts).at[chosen.reshape(-1)].add(counted.reshape(-1))


def mix(x: jax.Array, weights: jax.Array, chosen: jax.Array, kernels: Kernels) -> jax.Array:
    """Weighted sum of the outputs of each token's experts [B, T, D], on the mesh that is set.

    Args:
      x: [B, T, D].
      weights: [B, T, k].
      chosen: int32 [B, T, k].
      kernels: gate and up [E, D, F], down [E, F, D], in x's dtype.
    """
    return _mix(_split(x.shape, kernels[0].shape), x, weights, chosen, kernels)


# ------------------------------------------------------------------------- What is split how


@dataclasses.dataclass(frozen=True)
class _Split(collectives.Split):
    """Over which mesh axes tokens and kernels (leading axis E) are split, and how tokens go.

    Attributes:
      hidden: mesh axes of kernels' F.
      chunk: tokens of a device that are computed on at once.
    """

    hidden: Axes = ()
    chunk: int = 0

    @property
    def kernels_spec(self) -> tuple[PartitionSpec, ...]:
        expert, width, hidden = self.leading or None, self.width or None, self.hidden or None
        wide = PartitionSpec(expert, width, hidden)
        return wide, wide, PartitionSpec(expert, hidden, width)


def _split(tokens: tuple[int, ...], kernel: tuple[int, ...]) -> _Split:
    """The split of tokens [B, T, D] and kernels [E, D, F] on the mesh that is set."""
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
def _mix(split: _Split, x, weights, chosen, kernels: Kernels) -> jax.Array:
    tokens = split.tokens_spec
    specs = (tokens, tokens, tokens, split.kernels_spec)
    run = collectives.on_shards(split.mesh, functools.partial(_forward, split), specs, tokens)
    return run(x, weights, chosen, kernels)


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


def _forward(split: _Split, x, weights, chosen, kernels: Kernels) -> jax.Array:
    """One device's part of `mix`; arguments are its shards."""
    if x.shape[1] == 1 and not split.time:  # one token a row, not one of a row's on each device
        return _decode(split, x, weights, chosen, kernels)
    gate, up, down = _whole(split, kernels)

    def one_chunk(_, chunk):
        tokens, weights, chosen = (_gather(part, split.leading) for part in chunk)
        pairs = _pairs(split, chosen, len(gate))
        rows = _spread(tokens, pairs)
        hidden = _hidden(
            _product(rows, gate, pairs), _product(rows, up, pairs), _shares(weights, pairs)
        )
        out = _collect(_product(hidden, down, pairs), pairs)
        return None, _sum(collectives.sum_scatter(out, split.leading), split.hidden)

    _, out = _in_chunks(split, one_chunk, None, _flat(x, weights, chosen))
    return out.reshape(x.shape)


def _decode(split: _Split, x, weights, chosen, kernels: Kernels) -> jax.Array:
    """`_forward` for few tokens, with kernels where they are: the devices that share a kernel's
    width have all tokens of each other, and each multiplies its part of the width."""
    gate, up, down = kernels
    together = tuple(axis for axis in split.rows if axis in split.leading + split.width)
    tokens, weights, chosen = (_gather(part, together) for part in _flat(x, weights, chosen))
    pairs, share = _pairs(split, chosen, len(gate)), gate.shape[1]
    if split.width:
        first = jax.lax.axis_index(split.width) * share
        tokens = jax.lax.dynamic_slice_in_dim(tokens, first, share, axis=1)
    rows = _spread(tokens, pairs)
    both = (_product(rows, kernel, pairs).astype(jnp.float32) for kernel in (gate, up))
    both = (_sum(part, split.width).astype(x.dtype) for part in both)
    out = _collect(_product(_hidden(*both, _shares(weights, pairs)), down, pairs), pairs)
    out = _gather(_sum(out, split.leading + split.hidden), split.width, axis=1)
    if together:
        first = jax.lax.axis_index(together) * len(x)
        out = jax.lax.dynamic_slice_in_dim(out, first, len(x))
    return out.reshape(x.shape)


def _backward(split: _Split, x, weights, chosen, kernels: Kernels, to_out):
    """One device's gradients of x, weights and kernels; what a device got of the whole output's
    gradient is `to_out`. Nothing of the forward pass is kept: a chunk is computed again."""
    gate, up, down = _whole(split, kernels)

    def one_chunk(totals, chunk):
        tokens, weights, chosen, to_out = (_gather(part, split.leading) for part in chunk)
        pairs = _pairs(split, chosen, len(gate))
        rows, to_rows_out = _spread(tokens, pairs), _spread(to_out, pairs)
        hidden, pull = jax.vjp(
            _hidden, _product(rows, gate, pairs), _product(rows, up, pairs), _shares(weights, pairs)
        )
        to_gate, to_up, to_shares = pull(_product(to_rows_out, down, pairs, over=2))
        new = ((rows, to_gate), (rows, to_up), (to_rows_out, hidden))
        totals = tuple(t + _outer(*both, pairs) for t, both in zip(totals, new, strict=True))
        # Rows are done with before gradients of rows, as large, are there.
        totals, to_gate, to_up = jax.lax.optimization_barrier((totals, to_gate, to_up))
        to_rows = _product(to_gate, gate, pairs, over=2) + _product(to_up, up, pairs, over=2)
        to_weights = _take(to_shares, pairs.place).reshape(weights.shape)
        given = _collect(to_rows, pairs), to_weights
        return totals, tuple(
            _sum(collectives.sum_scatter(g, split.leading), split.hidden) for g in given
        )

    # That of down is summed as [E, D, F] too, so that all are scattered over rows: with 64 columns
    # a device XLA for TPUs would write an all-reduce.
    totals = tuple(jnp.zeros(gate.shape, jnp.float32) for _ in kernels)
    totals, (to_x, to_weights) = _in_chunks(
        split, one_chunk, totals, _flat(x, weights, chosen, to_out)
    )
    summed = (
        _sum(collectives.sum_scatter(total, split.width, 1), split.summed) for total in totals
    )
    to_gate, to_up, to_down = (
        collectives.rounded(total / split.copies, x.dtype) for total in summed
    )
    to_kernels = to_gate, to_up, to_down.swapaxes(1, 2)
    return to_x.reshape(x.shape), to_weights.reshape(weights.shape), to_kernels


def _whole(split: _Split, kernels: Kernels) -> Kernels:
    """The kernels of a device's experts with all of their width."""
    gate, up, down = (
        _gather(kernel, split.width, axis)
        for kernel, axis in zip(kernels, _WIDTH_AXIS, strict=True)
    )
    return gate, up, down


def _flat(*tensors: jax.Array) -> tuple[jax.Array, ...]:
    """[B, T, ...] as [B T, ...]."""
    return tuple(x.reshape(-1, x.shape[-1]) for x in tensors)


def _in_chunks(split: _Split, one_chunk: Callable[..., Any], totals: Any, tensors: Any):
    """one_chunk(totals, parts [n, ...]) -> (totals, results [n, ...]), over parts of `tensors`
    [N, ...] one after the other: as few as the split allows, alike, and therefore with fewer tokens
    of padding (which no expert has) than parts."""
    count = len(tensors[0])
    steps = -(-count // split.chunk)
    if steps <= 1:  # decoding: no loop, no padding
        return one_chunk(totals, tensors)
    size = -(-count // steps)

    def cut(x):
        nothing = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
        x = jnp.pad(x, ((0, steps * size - count), (0, 0)), constant_values=nothing)
        return x.reshape(steps, size, -1)

    totals, results = jax.lax.scan(one_chunk, totals, tuple(cut(x) for x in tensors))
    return totals, jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[:count], results)


# ----------------------------------------------------------------------- Pairs, on one device


class _Pairs(NamedTuple):
    """(token, expert) pairs in the order of the held experts; those of others stand behind, where a
    ragged product leaves zeros.

    Attributes:
      order: int32 [n k], the pair n k + j at each place.
      place: int32 [n k], the place of each pair.
      sizes: int32 [held], pairs of each held expert.
      count: k.
    """

    order: jax.Array
    place: jax.Array
    sizes: jax.Array
    count: int


def _pairs(split: _Split, chosen: jax.Array, held: int) -> _Pairs:
    """The pairs of tokens with experts [n, k] on the device that holds so many."""
    first = jax.lax.axis_index(split.leading) * held if split.leading else 0
    expert = chosen.reshape(-1) - first
    expert = jnp.where((expert >= 0) & (expert < held), expert, held)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=held + 1)[:held].astype(jnp.int32)
    return _Pairs(order, jnp.argsort(order), sizes, chosen.shape[-1])


def _take(x: jax.Array, places: jax.Array) -> jax.Array:
    """x[places]; places outside are not looked for, which would take a copy of all that is taken
    (134 MB a chunk)."""
    return jnp.take(x, places, axis=0, mode="clip")


def _spread(tokens: jax.Array, pairs: _Pairs) -> jax.Array:
    """Rows [n k, D] of tokens [n, D]."""
    return _take(tokens, pairs.order // pairs.count)


def _shares(weights: jax.Array, pairs: _Pairs) -> jax.Array:
    """Weights [n k] of rows, of those of tokens [n, k]."""
    return _take(weights.reshape(-1), pairs.order)


def _collect(rows: jax.Array, pairs: _Pairs) -> jax.Array:
    """Tokens [n, D], each the sum of its rows [n k, D]; the transpose of `_spread`."""
    by_token = _take(rows, pairs.place).reshape(-1, pairs.count, rows.shape[-1])
    return jnp.sum(by_token, axis=1)


def _hidden(gate: jax.Array, up: jax.Array, shares: jax.Array) -> jax.Array:
    """silu(gate) * up [n k, F], times the weight of the row, which down only passes on: at F
    numbers a row that is cheaper than behind it, and no backward pass needs down's results."""
    gate32, up32, shares32 = (x.astype(jnp.float32) for x in (gate, up, shares))
    return (nn.silu(gate32) * up32 * shares32[:, None]).astype(gate.dtype)


def _product(rows: jax.Array, kernels: jax.Array, pairs: _Pairs, over: int = 1) -> jax.Array:
    """Each row [n k, a] times its expert's matrix, summed over axis `over` of [held, ..., ...]."""
    dimensions = jax.lax.RaggedDotDimensionNumbers((([1], [over]), ([], [])), [0], [0])
    return jax.lax.ragged_dot_general(rows, kernels, pairs.sizes, dimensions)


def _outer(rows: jax.Array, others: jax.Array, pairs: _Pairs) -> jax.Array:
    """Sums of outer products by expert, float32 [held, a, b] of [n k, a] and [n k, b]."""
    dimensions = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    return jax.lax.ragged_dot_general(
        rows, others, pairs.sizes, dimensions, preferred_element_type=jnp.float32
    )
