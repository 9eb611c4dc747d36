"""Attention where the tokens of a row are split over the mesh's `context` axis.

Every device keeps its queries. Two ways to meet the keys of the others, each a kernel made of
another one, for use inside shard_map:

1. gathered: each device gets the keys and values of the whole row; backward gathers them again
   (instead of keeping them), and sends each device the gradients of its own keys, which it sums.
2. ring: each device's keys and values travel around the axis, one neighbor at a time, and are
   met on the way; the next shard is under way while the kernel works on this one. Parts are merged
   by their log-sum-exp. Backward, the gradients of a shard travel with it, in float32. No device
   ever holds more than two shards.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from spell_jax.attention.dense import MASKED
from spell_jax.attention.kernel import Kernel
from spell_jax.runtime.mesh import CONTEXT


@functools.cache  # one object a kernel, so that what is compiled for it is found again
def gathered(kernel: Kernel) -> Kernel:
    """`kernel` on all keys of the row."""

    def whole(shards):
        return tuple(jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True) for x in shards)

    def forward(q, k, v, q_index, k_index, last_query):
        k, v, k_index, last_query = whole((k, v, k_index, last_query))
        return kernel.forward(q, k, v, q_index, k_index, last_query)

    def backward(q, k, v, q_index, k_index, last_query, lse, delta, d_out):
        keys = whole((k, v, k_index, last_query))
        inputs = (q, *keys[:2], q_index, *keys[2:])
        dq, dk, dv = kernel.backward(*inputs, lse, delta, d_out)
        return dq, _shares(dk), _shares(dv)

    return Kernel(forward, backward)


@functools.cache
def ring(kernel: Kernel) -> Kernel:
    """`kernel` on one device's keys after the other's."""

    def forward(q, k, v, q_index, k_index, last_query):
        def meet(held, merged):
            k, v, k_index, last_query = held
            part = kernel.forward(q, k, v, q_index, k_index, last_query)
            return _merge(merged, part)

        def hop(state, _):
            held, merged = state
            return (_pass_on(held), meet(held, merged)), None

        statistics = (q.shape[0], *q.shape[2:4], q.shape[1])
        nothing = jnp.zeros(q.shape), jnp.full(statistics, MASKED)
        state = (k, v, k_index, last_query), nothing
        (held, merged), _ = jax.lax.scan(hop, state, length=jax.lax.axis_size(CONTEXT) - 1)
        out, lse = meet(held, merged)
        return out.astype(q.dtype), jnp.where(lse > MASKED / 2, lse, -MASKED)

    def backward(q, k, v, q_index, k_index, last_query, lse, delta, d_out):
        def meet(held, dq, gradients):
            k, v, k_index, last_query = held
            inputs = (q, k, v, q_index, k_index, last_query)
            part = kernel.backward(*inputs, lse, delta, d_out)
            return jax.tree.map(lambda total, more: total + more, (dq, *gradients), part)

        def hop(state, _):
            held, dq, gradients = state
            # The sums of the devices before are on their way while this one's share is computed.
            dq, *gradients = meet(held, dq, _pass_on(gradients))
            return (_pass_on(held), dq, tuple(gradients)), None

        zeros = [jnp.zeros(x.shape) for x in (q, k, v)]
        state = (k, v, k_index, last_query), zeros[0], tuple(zeros[1:])
        state, _ = jax.lax.scan(hop, state, length=jax.lax.axis_size(CONTEXT) - 1)
        held, dq, gradients = state
        dq, *gradients = meet(held, dq, _pass_on(gradients))
        dk, dv = _pass_on(gradients)  # home again
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    return Kernel(forward, backward)


def _shares(x: jax.Array) -> jax.Array:
    """The sum over devices of [B, T, K, H], of which each keeps its part of T.

    By an all-to-all and a float32 sum of what arrives: a reduce-scatter in float32 moves twice as
    much, and libtpu 0.0.42.1 writes some as an all-reduce (v5e) or ends itself over it (v5p-32).
    """
    rows, _, *head = x.shape
    parts = x.reshape(rows, jax.lax.axis_size(CONTEXT), -1, *head)
    parts = jax.lax.all_to_all(parts, CONTEXT, split_axis=1, concat_axis=1, tiled=True)
    return jnp.sum(parts.astype(jnp.float32), axis=1).astype(x.dtype)


def _pass_on(shard: Any) -> Any:
    """Each device's arrays to the next device of the axis."""
    size = jax.lax.axis_size(CONTEXT)
    to_next = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, CONTEXT, to_next), shard)


def _merge(
    merged: tuple[jax.Array, jax.Array], part: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """(outputs [B, Tq, K, R, H], lse [B, K, R, Tq]) over two sets of keys, of which the first is
    float32 with -1e30 where nothing was seen so far, into those over both."""
    (out, lse), (part_out, part_lse) = merged, part
    part_lse = jnp.where(part_lse > -MASKED / 2, MASKED, part_lse)
    both = jnp.logaddexp(lse, part_lse)
    share, part_share = (
        jnp.exp(x - both).transpose(0, 3, 1, 2)[..., None] for x in (lse, part_lse)
    )
    return out * share + part_out * part_share, both
