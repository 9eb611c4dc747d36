"""Attention in blocks: any length, memory linear in it, on any device.

1. Rows are cut into blocks of queries and of keys. Which pairs of blocks hold anything to see
   follows from minima and maxima of last_reader over blocks (masks.live_blocks); others are never
   touched, so that causality and siblings' blindness save time, not only results.
2. Forward: a block of queries meets its live blocks of keys one after the other, with a running
   maximum and sum (online softmax). It keeps the output and one log-sum-exp a query and head.
3. Backward: a block of keys meets its live blocks of queries; scores are computed again and turned
   into weights by the log-sum-exp.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from spell_jax.attention import masks
from spell_jax.attention.dense import MASKED

BLOCK = 256
_BEHIND = 1 << 30  # a row index behind all others


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_index: jax.Array,
    k_index: jax.Array,
    last_reader: jax.Array,
    block: int = BLOCK,
) -> jax.Array:
    """What dense.attend computes, with memory linear in T.

    Args:
      q: [B, Tq, N, H].
      k, v: [B, Tk, K, H].
      q_index: int32 [B, Tq], row indices of the queries.
      k_index, last_reader: int32 [B, Tk], of the keys; see masks.py.
      block: queries and keys of a block; Tq and Tk are padded to multiples of it.

    Returns:
      [B, Tq, N, H] in q's dtype; zeros for a query that sees nothing.
    """
    rows, time, _, size = q.shape
    block = min(block, time)

    def pad(x, value=0):
        widths = ((0, 0), (0, -x.shape[1] % block)) + ((0, 0),) * (x.ndim - 2)
        return jnp.pad(x, widths, constant_values=value)

    groups = pad(q.reshape(rows, time, k.shape[2], -1, size))
    row = functools.partial(_attend_row, block)
    index = (pad(q_index, _BEHIND), pad(k_index, _BEHIND), pad(last_reader, -1))
    # One row after the other: their loops differ in length.
    out = jax.lax.map(lambda x: row(*x), (groups, pad(k), pad(v), *index))
    return out[:, :time].reshape(q.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_row(block: int, q, k, v, q_index, k_index, last_reader):
    """One row: q [Tq, K, R, H], k and v [Tk, K, H], indices [Tq] and [Tk] -> [Tq, K, R, H]."""
    return _forward(block, q, k, v, q_index, k_index, last_reader)[0]


def _forward_rule(block: int, *inputs):
    out, lse = _forward(block, *inputs)
    return out, (*inputs, out, lse)


def _blocks(x: jax.Array, block: int) -> jax.Array:
    return x.reshape(-1, block, *x.shape[1:])


def _live_first(live: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of a boolean [n, m]: for each row the columns with the true ones first, and their count."""
    return jnp.argsort(~live, axis=1), jnp.sum(live, axis=1)


def _scores(q, k, index):
    """Scaled float32 scores [K, R, queries, keys] of two blocks, and which of them are seen."""
    scores = jnp.einsum("qkrh,skh->krqs", q, k, preferred_element_type=jnp.float32)
    return scores * q.shape[-1] ** -0.5, masks.visible(*index)


def _forward(block: int, q, k, v, *index):
    """(out [Tq, K, R, H], log-sum-exp float32 [Tq / block, K, R, block])."""
    queries, keys, values, query_index, key_index, readers = (
        _blocks(x, block) for x in (q, k, v, *index)
    )
    order, count = _live_first(masks.live_blocks(*index, block=block))

    def one_block(i):
        def meet(n, state):
            out, top, total = state
            j = order[i, n]
            pair = query_index[i], key_index[j], readers[j]
            scores, seen = _scores(queries[i], keys[j], pair)
            new_top = jnp.maximum(top, jnp.max(jnp.where(seen, scores, MASKED), axis=-1))
            weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
            shrink = jnp.exp(top - new_top)
            more = jnp.einsum(
                "krqs,skh->krqh",
                weights.astype(v.dtype),
                values[j],
                preferred_element_type=jnp.float32,
            )
            total = total * shrink + jnp.sum(weights, axis=-1)
            return out * shrink[..., None] + more, new_top, total

        shape = (*q.shape[1:3], block)
        start = (
            jnp.zeros((*shape, q.shape[-1])),
            jnp.full(shape, MASKED),
            jnp.zeros(shape),
        )
        out, top, total = jax.lax.fori_loop(0, count[i], meet, start)
        out = out / jnp.maximum(total, 1e-30)[..., None]
        # A query that sees nothing: no key has weight in the backward pass either.
        lse = jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)), -MASKED)
        return out.transpose(2, 0, 1, 3).astype(q.dtype), lse

    out, lse = jax.lax.map(one_block, jnp.arange(len(queries)))
    return out.reshape(q.shape), lse


def _backward_rule(block: int, kept, d_out):
    q, k, v, *index, out, lse = kept
    queries, keys, values, query_index, key_index, readers, d_outs = (
        _blocks(x, block) for x in (q, k, v, *index, d_out)
    )
    product = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    products = _blocks(product, block).transpose(0, 2, 3, 1)
    order, count = _live_first(masks.live_blocks(*index, block=block).T)
    scale = q.shape[-1] ** -0.5

    def einsum(spec, *arrays):
        return jnp.einsum(spec, *arrays, preferred_element_type=jnp.float32)

    def one_block(d_queries, j):
        def meet(n, state):
            d_queries, d_key, d_value = state
            i = order[j, n]
            pair = query_index[i], key_index[j], readers[j]
            scores, seen = _scores(queries[i], keys[j], pair)
            weights = jnp.where(seen, jnp.exp(scores - lse[i][..., None]), 0.0)
            d_weights = einsum("qkrh,skh->krqs", d_outs[i], values[j])
            d_scores = (weights * (d_weights - products[i][..., None]) * scale).astype(q.dtype)
            d_query = einsum("krqs,skh->qkrh", d_scores, keys[j])
            d_key += einsum("krqs,qkrh->skh", d_scores, queries[i])
            d_value += einsum("krqs,qkrh->skh", weights.astype(v.dtype), d_outs[i])
            return d_queries.at[i].add(d_query), d_key, d_value

        nothing = jnp.zeros(keys.shape[1:])
        state = jax.lax.fori_loop(0, count[j], meet, (d_queries, nothing, nothing))
        return state[0], (state[1].astype(k.dtype), state[2].astype(v.dtype))

    start = jnp.zeros(queries.shape)
    d_queries, (d_keys, d_values) = jax.lax.scan(one_block, start, jnp.arange(len(keys)))
    d_q = d_queries.reshape(q.shape).astype(q.dtype)
    return d_q, d_keys.reshape(k.shape), d_values.reshape(v.shape), None, None, None


_attend_row.defvjp(_forward_rule, _backward_rule)
