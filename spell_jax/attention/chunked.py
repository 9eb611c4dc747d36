"""Blockwise attention for rows of any length on any device, with memory linear in the length.

1. A row is cut into blocks of queries and blocks of keys. Minima and maxima of last_query over the
   blocks tell which pairs of blocks contain a visible key (masks.live_blocks). Other pairs are
   skipped, so that causality and the mutual invisibility of a group's answers save time.
2. Forward: each block of queries loops over its live blocks of keys with a running maximum and sum
   (online softmax). It returns the output and one log-sum-exp per query and head.
3. Backward: each block of keys loops over its live blocks of queries. Scores are recomputed, and
   the log-sum-exp turns them into weights.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from spell_jax.attention import masks
from spell_jax.attention.dense import MASKED

BLOCK = 256
_BEHIND = 1 << 30  # row index of padding, after all others


class _Blocks(NamedTuple):
    """Arrays of a row, padded to whole blocks and reshaped to [blocks, block, ...]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_index: jax.Array
    k_index: jax.Array
    last_query: jax.Array


def _cut(x: jax.Array, block: int, padding: float = 0) -> jax.Array:
    widths = ((0, -len(x) % block),) + ((0, 0),) * (x.ndim - 1)
    x = jnp.pad(x, widths, constant_values=padding)
    return x.reshape(-1, block, *x.shape[1:])


def _cut_row(q, k, v, q_index, k_index, last_query, block: int) -> tuple[_Blocks, jax.Array]:
    """Cut a row into blocks; also return the live pairs, bool [query blocks, key blocks]."""
    q_block, k_block = min(block, len(q)), min(block, len(k))
    row = _Blocks(
        _cut(q, q_block),
        _cut(k, k_block),
        _cut(v, k_block),
        _cut(q_index, q_block, _BEHIND),
        _cut(k_index, k_block, _BEHIND),
        _cut(last_query, k_block, -1),
    )
    return row, masks.live_blocks(row.q_index, row.k_index, row.last_query)


def _live_first(live: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Column numbers of each row of bool [n, m], True ones first, and the count of True ones."""
    return jnp.argsort(~live, axis=1), jnp.sum(live, axis=1)


def _scores(row: _Blocks, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scaled float32 scores [K, R, queries, keys] of two blocks, and their mask [queries, keys]."""
    q, k = row.q[i], row.k[j]
    scores = jnp.einsum("qkrh,skh->krqs", q, k, preferred_element_type=jnp.float32)
    seen = masks.visible(row.q_index[i], row.k_index[j], row.last_query[j])
    return scores * q.shape[-1] ** -0.5, seen


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_index: jax.Array,
    k_index: jax.Array,
    last_query: jax.Array,
    block: int = BLOCK,
) -> tuple[jax.Array, jax.Array]:
    """Compute dense.forward in blocks of `block` queries and keys."""
    row, live = _cut_row(q, k, v, q_index, k_index, last_query, block)
    order, count = _live_first(live)

    def one_block(i):
        def meet(n, state):
            out, top, total = state
            j = order[i, n]
            scores, seen = _scores(row, i, j)
            new_top = jnp.maximum(top, jnp.max(jnp.where(seen, scores, MASKED), axis=-1))
            weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
            shrink = jnp.exp(top - new_top)
            more = jnp.einsum(
                "krqs,skh->krqh",
                weights.astype(v.dtype),
                row.v[j],
                preferred_element_type=jnp.float32,
            )
            total = total * shrink + jnp.sum(weights, axis=-1)
            return out * shrink[..., None] + more, new_top, total

        shape = (*q.shape[1:3], row.q.shape[1])
        start = jnp.zeros((*shape, q.shape[-1])), jnp.full(shape, MASKED), jnp.zeros(shape)
        out, top, total = jax.lax.fori_loop(0, count[i], meet, start)
        positive = jnp.maximum(total, 1e-30)
        lse = jnp.where(total > 0, top + jnp.log(positive), -MASKED)
        return (out / positive[..., None]).transpose(2, 0, 1, 3).astype(q.dtype), lse

    out, lse = jax.lax.map(one_block, jnp.arange(len(row.q)))
    out, lse = out.reshape(-1, *q.shape[1:]), lse.transpose(1, 2, 0, 3)
    return out[: len(q)], lse.reshape(*q.shape[1:3], -1)[..., : len(q)]


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_index: jax.Array,
    k_index: jax.Array,
    last_query: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
    block: int = BLOCK,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute dense.backward in blocks of `block` queries and keys."""
    row, live = _cut_row(q, k, v, q_index, k_index, last_query, block)
    order, count = _live_first(live.T)
    d_outs, lses, deltas = (
        _cut(x, row.q.shape[1]) for x in (d_out, lse.transpose(2, 0, 1), delta.transpose(2, 0, 1))
    )
    scale = q.shape[-1] ** -0.5

    def einsum(spec, *arrays):
        return jnp.einsum(spec, *arrays, preferred_element_type=jnp.float32)

    def one_block(d_queries, j):
        def meet(n, state):
            d_queries, d_key, d_value = state
            i = order[j, n]
            scores, seen = _scores(row, i, j)
            log_total, product = (x[i].transpose(1, 2, 0)[..., None] for x in (lses, deltas))
            weights = jnp.where(seen, jnp.exp(scores - log_total), 0.0)
            d_weights = einsum("qkrh,skh->krqs", d_outs[i], row.v[j])
            d_scores = (weights * (d_weights - product) * scale).astype(q.dtype)
            d_query = einsum("krqs,skh->qkrh", d_scores, row.k[j])
            d_key += einsum("krqs,qkrh->skh", d_scores, row.q[i])
            d_value += einsum("krqs,qkrh->skh", weights.astype(v.dtype), d_outs[i])
            return d_queries.at[i].add(d_query), d_key, d_value

        nothing = jnp.zeros(row.k.shape[1:])
        state = jax.lax.fori_loop(0, count[j], meet, (d_queries, nothing, nothing))
        return state[0], (state[1].astype(k.dtype), state[2].astype(v.dtype))

    d_queries, (d_keys, d_values) = jax.lax.scan(
        one_block, jnp.zeros(row.q.shape), jnp.arange(len(row.k))
    )
    d_q = d_queries.reshape(-1, *q.shape[1:])[: len(q)].astype(q.dtype)
    d_k, d_v = (x.reshape(-1, *k.shape[1:])[: len(k)] for x in (d_keys, d_values))
    return d_q, d_k, d_v
