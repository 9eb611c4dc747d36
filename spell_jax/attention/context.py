"""Attention of rows whose tokens are sharded over the mesh's `context` axis.

Every device keeps its queries. Inside shard_map, two wrappers extend a kernel to the keys of the
other devices. `gathered` all-gathers the keys and values of the row. `ring` passes keys and values
from neighbor to neighbor while the kernel works on the current shard, so that no device ever holds
more than two shards.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from spell_jax.attention.kernel import Inputs, Kernel
from spell_jax.attention.masks import MASKED
from spell_jax.runtime.mesh import CONTEXT


@functools.cache  # one object per kernel, so that jit finds its compiled program again
def gathered(kernel: Kernel) -> Kernel:
    """Wrap a kernel to attend to all keys of the row, all-gathered over `context`."""

    def gather(inputs: Inputs) -> Inputs:
        def of_row(x: jax.Array) -> jax.Array:
            return jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True)

        return _with_keys(inputs, jax.tree.map(of_row, _keys(inputs)))

    def forward(inputs: Inputs):
        return kernel.forward(gather(inputs))

    def backward(inputs: Inputs, lse, delta, d_out):
        # Keys and values are gathered again: storing the whole row in every layer would take the
        # memory that sharding saves.
        dq, dk, dv = kernel.backward(gather(inputs), lse, delta, d_out)
        return dq, _sum_scatter(dk), _sum_scatter(dv)

    return Kernel(forward, backward)


@functools.cache
def ring(kernel: Kernel) -> Kernel:
    """Wrap a kernel to attend to the keys of one device after the other, passed around a ring.

    Partial outputs are merged by log-sum-exp; the float32 gradients of a shard travel with it.
    """

    def forward(inputs: Inputs):
        def attend(keys, merged):
            return _merge(merged, kernel.forward(_with_keys(inputs, keys)))

        def hop(state, _):
            keys, merged = state
            return (_pass_on(keys), attend(keys, merged)), None

        q = inputs.q
        # Outputs are merged in float32. The first log-sum-exp is finite, because the difference of
        # two infinities in `_merge` would be NaN.
        empty = jnp.zeros(q.shape), jnp.full((q.shape[0], *q.shape[2:4], q.shape[1]), MASKED)
        # The last shard is used outside the loop, which would otherwise send it on for nothing.
        hops = jax.lax.axis_size(CONTEXT) - 1
        (keys, merged), _ = jax.lax.scan(hop, (_keys(inputs), empty), length=hops)
        out, lse = attend(keys, merged)
        return out.astype(q.dtype), jnp.where(lse > MASKED / 2, lse, -MASKED)

    def backward(inputs: Inputs, lse, delta, d_out):
        def add_part(keys, dq, gradients):
            part = kernel.backward(_with_keys(inputs, keys), lse, delta, d_out)
            return jax.tree.map(lambda total, gradient: total + gradient, (dq, *gradients), part)

        def hop(state, _):
            keys, dq, gradients = state
            # The sums of earlier devices travel while this device computes its contribution.
            dq, *gradients = add_part(keys, dq, _pass_on(gradients))
            return (_pass_on(keys), dq, tuple(gradients)), None

        # float32: a gradient is the sum of contributions from all devices of the axis.
        dq, *gradients = [jnp.zeros(x.shape) for x in inputs[:3]]
        state = _keys(inputs), dq, tuple(gradients)
        state, _ = jax.lax.scan(hop, state, length=jax.lax.axis_size(CONTEXT) - 1)
        keys, dq, gradients = state
        dq, *gradients = add_part(keys, dq, _pass_on(gradients))
        dk, dv = _pass_on(gradients)  # back to the owner of the keys
        q, k, v, *_ = inputs
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    return Kernel(forward, backward)


def _keys(inputs: Inputs) -> dict[str, Any]:
    """Return the fields of Inputs that have an axis of keys."""
    names = ("k", "v", "k_index", "last_query", "last_position")
    return {name: getattr(inputs, name) for name in names}


def _with_keys(inputs: Inputs, keys: dict[str, Any]) -> Inputs:
    return inputs._replace(**keys)


def _sum_scatter(x: jax.Array) -> jax.Array:
    """Sum [B, T, K, H] over devices in float32; each device keeps the sum of its own part of T."""
    # Not a reduce-scatter: in float32 it moves twice as many bytes, and libtpu 0.0.42.1 compiles
    # some to an all-reduce (v5e) or aborts on them (v5p-32).
    rows, _, *head = x.shape
    parts = x.reshape(rows, jax.lax.axis_size(CONTEXT), -1, *head)
    parts = jax.lax.all_to_all(parts, CONTEXT, split_axis=1, concat_axis=1, tiled=True)
    return jnp.sum(parts.astype(jnp.float32), axis=1).astype(x.dtype)


def _pass_on(shard: Any) -> Any:
    """Send each device's arrays to the next device of the axis."""
    size = jax.lax.axis_size(CONTEXT)
    to_next = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, CONTEXT, to_next), shard)


def _merge(
    merged: tuple[jax.Array, jax.Array], part: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Merge the attention over two disjoint sets of keys, in the format of `merged`.

    `merged` is float32 out [B, Tq, K, R, H] and lse [B, K, R, Tq] so far. An lse of -1e30 marks
    queries that have seen no key; in the `part` of a kernel, 1e30 does.
    """
    (out, lse), (part_out, part_lse) = merged, part
    # Kernels mark a query without visible keys by 1e30, for their backward pass. In a merge its
    # weight must be 0.
    part_lse = jnp.where(part_lse > -MASKED / 2, MASKED, part_lse)
    merged_lse = jnp.logaddexp(lse, part_lse)
    share, part_share = (
        jnp.exp(x - merged_lse).transpose(0, 3, 1, 2)[..., None] for x in (lse, part_lse)
    )
    return out * share + part_out * part_share, merged_lse
