"""Blockwise attention for rows of any length on any device, with memory linear in the length.

Pairs of blocks without a visible key (masks.live_and_full_blocks) are skipped, so that causality
and the mutual invisibility of a group's answers save time. Forward, each block of queries loops
over its live blocks of keys (online softmax). Backward, each block of keys loops over its live
blocks of queries; scores are recomputed, and the log-sum-exp turns them into weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spell_jax.attention import blocks, masks
from spell_jax.attention.kernel import Inputs

BLOCK = 256


def _split(x: jax.Array, block: int) -> jax.Array:
    """Pad x [T, ...] to whole blocks and reshape it to [blocks, block, ...]."""
    return blocks.pad(x, 0, block).reshape(-1, block, *x.shape[1:])


def _split_inputs(inputs: Inputs, block: int) -> tuple[Inputs, jax.Array]:
    """Split a row into blocks; also return the live pairs, bool [query blocks, key blocks]."""
    block_q, block_k = min(block, len(inputs.q)), min(block, len(inputs.k))
    padded = blocks.pad_inputs(inputs, block_q, block_k)
    sizes = (block_q, block_k, block_k, block_q, block_k, block_k)
    row = Inputs(*map(_split, padded, sizes))
    live, _ = masks.live_and_full_blocks(row.q_index, row.k_index, row.last_query)
    return row, live


def _live_first(live: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Column numbers of each row of bool [n, m], True ones first, and the count of True ones."""
    return jnp.argsort(~live, axis=1), jnp.sum(live, axis=1)


def _einsum(spec: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *arrays, preferred_element_type=jnp.float32)


def _scores(row: Inputs, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scaled float32 scores [K, R, queries, keys] of two blocks, and their mask [queries, keys]."""
    q, k = row.q[i], row.k[j]
    mask = masks.visible(row.q_index[i], row.k_index[j], row.last_query[j])
    return _einsum("qkrh,skh->krqs", q, k) * q.shape[-1] ** -0.5, mask


def forward(inputs: Inputs, block: int = BLOCK) -> tuple[jax.Array, jax.Array]:
    """Compute dense.forward in blocks of `block` queries and keys."""
    row, live = _split_inputs(inputs, block)
    order, count = _live_first(live)
    queries, *heads, size = inputs.q.shape

    def one_block(i):
        def step(n, state: blocks.Softmax):
            j = order[i, n]
            scores, mask = _scores(row, i, j)

            def weighted_sum(weights):
                return _einsum("krqs,skh->krqh", weights.astype(row.v.dtype), row.v[j])

            return state.add(scores, weighted_sum, mask)

        start = blocks.Softmax.start((*heads, row.q.shape[1], size))
        out, lse = jax.lax.fori_loop(0, count[i], step, start).finish(-masks.MASKED)
        return out.transpose(2, 0, 1, 3).astype(row.q.dtype), lse

    out, lse = jax.lax.map(one_block, jnp.arange(len(row.q)))
    out, lse = out.reshape(-1, *heads, size), lse.transpose(1, 2, 0, 3)
    return out[:queries], lse.reshape(*heads, -1)[..., :queries]


def backward(
    inputs: Inputs, lse: jax.Array, delta: jax.Array, d_out: jax.Array, block: int = BLOCK
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute dense.backward in blocks of `block` queries and keys."""
    q, k, v, *_ = inputs
    row, live = _split_inputs(inputs, block)
    order, count = _live_first(live.T)
    d_outs, lses, deltas = (
        _split(x, row.q.shape[1]) for x in (d_out, lse.transpose(2, 0, 1), delta.transpose(2, 0, 1))
    )
    scale = q.shape[-1] ** -0.5

    def one_block(d_queries, j):
        def step(n, state):
            d_queries, d_key, d_value = state
            i = order[j, n]
            lse, delta = (x[i].transpose(1, 2, 0)[..., None] for x in (lses, deltas))
            scores, mask = _scores(row, i, j)
            weights = jnp.where(mask, jnp.exp(scores - lse), 0.0)
            d_weights = _einsum("qkrh,skh->krqs", d_outs[i], row.v[j])
            d_scores = (weights * (d_weights - delta) * scale).astype(q.dtype)
            d_query = _einsum("krqs,skh->qkrh", d_scores, row.k[j])
            d_key += _einsum("krqs,qkrh->skh", d_scores, row.q[i])
            d_value += _einsum("krqs,qkrh->skh", weights.astype(v.dtype), d_outs[i])
            return d_queries.at[i].add(d_query), d_key, d_value

        zeros = jnp.zeros(row.k.shape[1:])
        state = jax.lax.fori_loop(0, count[j], step, (d_queries, zeros, zeros))
        return state[0], (state[1].astype(k.dtype), state[2].astype(v.dtype))

    d_queries, (d_keys, d_values) = jax.lax.scan(
        one_block, jnp.zeros(row.q.shape), jnp.arange(len(row.k))
    )
    d_q = d_queries.reshape(-1, *q.shape[1:])[: len(q)].astype(q.dtype)
    d_k, d_v = (x.reshape(-1, *k.shape[1:])[: len(k)] for x in (d_keys, d_values))
    return d_q, d_k, d_v
