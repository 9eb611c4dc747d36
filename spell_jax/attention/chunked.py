"""Blockwise attention for rows of any length on any device, with memory linear in the length.

Pairs of blocks without a visible key (masks.live_and_full_blocks) are skipped, so that causality
and the mutual invisibility of a group's answers save time. Forward, each block of queries loops
over its live blocks of keys (online softmax). Backward, each block of keys loops over its live
blocks of queries; scores are recomputed, and the log-sum-exp turns them into weights.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from spell_jax.attention import blocks, masks
from spell_jax.attention.kernel import Inputs
from spell_jax.runtime.bits import as_bits, from_bits

# Keys of a block, and rows of its products: queries times the R query heads of a key head. XLA for
# CPUs runs products of fewer than 2^17 = 512 x 256 scores on one core. Larger blocks have more
# scores that no query sees, and leave the cache.
_KEYS = 256
_ROWS = 512


class _Blocks(NamedTuple):
    """A row in blocks of queries and of keys, with axes in the order that products read."""

    # The R query heads of a key head are rows of one product. XLA for CPUs would otherwise copy
    # queries and keys at every step: forward took 134 ms instead of 66 ms (3,072 tokens, 8 heads of
    # 64, 2 cores).
    # bfloat16 as bits, here and in `backward`, as loops cut blocks out.
    q: jax.Array  # [query blocks, K, R * queries, H]
    k: jax.Array  # [key blocks, K, keys, H]
    v: jax.Array  # [key blocks, K, keys, H]
    of_queries: tuple[jax.Array, ...]  # for masks.sees, int32 [query blocks, R * queries]
    of_keys: tuple[jax.Array, ...]  # for masks.sees, int32 [key blocks, keys]
    live: jax.Array  # whether a query may see a key, bool [query blocks, key blocks]

    def scores(
        self, i: jax.Array, j: jax.Array, keys_first: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """Compute scaled float32 scores [K, R * queries, keys] of two blocks, and their mask.

        With `keys_first` both are transposed, to [K, keys, R * queries].
        """
        q, k = _block(self.q, i), _block(self.k, j)
        mask = masks.visible([x[i] for x in self.of_queries], [x[j] for x in self.of_keys])
        scale = q.shape[-1] ** -0.5
        if keys_first:
            return blocks.einsum("ksh,kqh->ksq", k, q) * scale, mask.T
        return blocks.einsum("kqh,ksh->kqs", q, k) * scale, mask


def _block(x: jax.Array, i: jax.Array) -> jax.Array:
    """Return block i of an array in blocks, which may hold bits."""
    return from_bits(x[i])


def _split(x: jax.Array, block: int) -> jax.Array:
    """Pad x [T, ...] to whole blocks and reshape it to [blocks, block, ...]."""
    return blocks.pad(x, 0, block).reshape(-1, block, *x.shape[1:])


def _query_blocks(x: jax.Array, block: int) -> jax.Array:
    """Arrange x [T, K, R, ...] as [blocks, K, R * block, ...]."""
    x = jnp.moveaxis(_split(x, block), 1, 3)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _joined_queries(x: jax.Array, like: jax.Array) -> jax.Array:
    """Arrange x [blocks, K, R * block, ...] as [T, K, R, ...], with the sizes of `like`."""
    length, kv_heads, repeats = like.shape[:3]
    x = x.reshape(len(x), kv_heads, repeats, -1, *x.shape[3:])
    return jnp.moveaxis(x, 3, 1).reshape(-1, kv_heads, repeats, *x.shape[4:])[:length]


def _joined_keys(x: jax.Array, length: int) -> jax.Array:
    """Arrange x [blocks, K, block, H] as [T, K, H]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])[:length]


def _query_block(inputs: Inputs, block: int) -> int:
    """Return the number of queries of a block; `block` is as in `forward`."""
    if not block:
        # R rounds up to a power of two, so that the block is a power of two as well.
        block = max(64, _ROWS >> (inputs.q.shape[2] - 1).bit_length())
    return min(block, len(inputs.q))


def _in_blocks(inputs: Inputs, block: int) -> _Blocks:
    """Split a row into blocks of queries and of keys; `block` is as in `forward`."""
    block_q, block_k = _query_block(inputs, block), min(block or _KEYS, len(inputs.k))
    padded = blocks.pad_inputs(inputs, block_q, block_k)
    of_queries = [_split(x, block_q) for x in padded.of_queries]
    of_keys = tuple(_split(x, block_k) for x in padded.of_keys)
    live, _ = masks.live_and_full_blocks(of_queries, of_keys)
    return _Blocks(
        as_bits(_query_blocks(padded.q, block_q)),
        as_bits(_split(padded.k, block_k).swapaxes(1, 2)),
        as_bits(_split(padded.v, block_k).swapaxes(1, 2)),
        # A block of q has the queries of R heads.
        tuple(jnp.tile(x, (1, inputs.q.shape[2])) for x in of_queries),
        of_keys,
        live,
    )


def _live_first(live: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the column numbers of each row of bool [n, m], True first, and the count of True."""
    return jnp.argsort(~live, axis=1), jnp.sum(live, axis=1)


def forward(inputs: Inputs, block: int = 0) -> tuple[jax.Array, jax.Array]:
    """Compute Kernel.forward for one row, in blocks of `block` queries and keys.

    0 takes _ROWS and _KEYS.
    """
    row = _in_blocks(inputs, block)
    order, count = _live_first(row.live)

    def one_block(i):
        def step(n, state: blocks.Softmax):
            j = order[i, n]
            scores, mask = row.scores(i, j)

            def weighted_sum(weights):
                return blocks.einsum(
                    "kqs,ksh->kqh", weights.astype(inputs.v.dtype), _block(row.v, j)
                )

            return state.add(jnp.where(mask, scores, masks.MASKED), weighted_sum)

        # Dead blocks are not visited. A loop of dynamic length has no gradient in JAX, hence
        # `backward`.
        start = blocks.Softmax.start(row.q.shape[1:])
        out, lse = jax.lax.fori_loop(0, count[i], step, start).finish(-masks.MASKED)
        return as_bits(out.astype(inputs.q.dtype)), lse

    out, lse = (
        _joined_queries(x, inputs.q) for x in jax.lax.map(one_block, jnp.arange(len(row.q)))
    )
    return from_bits(out), jnp.moveaxis(lse, 0, 2)


def backward(
    inputs: Inputs, lse: jax.Array, delta: jax.Array, d_out: jax.Array, block: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute Kernel.backward for one row; `block` is as in `forward`."""
    q, k, v, *_ = inputs
    row = _in_blocks(inputs, block)
    order, count = _live_first(row.live.T)
    d_outs, lses, deltas = (
        as_bits(_query_blocks(x, _query_block(inputs, block)))
        for x in (d_out, jnp.moveaxis(lse, 2, 0), jnp.moveaxis(delta, 2, 0))
    )
    scale = q.shape[-1] ** -0.5
    # Scores have keys first, and the gradient of queries is transposed: so every product reads its
    # first factor row by row. Backward takes 148 ms instead of 199 with scores^T alone, in bfloat16
    # 103 instead of 154 (3,072 tokens, 8 heads of 64, 2 cores).
    k_columns = row.k.swapaxes(2, 3)  # [key blocks, K, H, keys]

    def one_block(d_queries, j):
        def step(n, state):
            d_queries, d_key, d_value = state
            i = order[j, n]
            scores, mask = row.scores(i, j, keys_first=True)
            d_out = _block(d_outs, i)
            weights = jnp.where(mask, jnp.exp(scores - lses[i][:, None]), 0.0)
            d_weights = blocks.einsum("ksh,kqh->ksq", _block(row.v, j), d_out)
            d_scores = (weights * (d_weights - deltas[i][:, None]) * scale).astype(q.dtype)
            d_query = blocks.einsum("khs,ksq->khq", _block(k_columns, j), d_scores)
            d_key += blocks.einsum("ksq,kqh->ksh", d_scores, _block(row.q, i))
            d_value += blocks.einsum("ksq,kqh->ksh", weights.astype(v.dtype), d_out)
            # In place: XLA for CPUs would compile `.at[i].add` to a slow scatter.
            d_queries = jax.lax.dynamic_update_index_in_dim(
                d_queries, d_queries[i] + d_query, i, axis=0
            )
            return d_queries, d_key, d_value

        zeros = jnp.zeros(row.k.shape[1:])
        state = jax.lax.fori_loop(0, count[j], step, (d_queries, zeros, zeros))
        return state[0], tuple(as_bits(x.astype(k.dtype)) for x in state[1:])

    # Blocks of keys are the outer loop: their gradients are complete after one pass and rounded
    # once. Gradients of queries need a sum over all blocks of keys, in float32.
    d_queries, (d_keys, d_values) = jax.lax.scan(
        one_block, jnp.zeros(row.q.swapaxes(2, 3).shape), jnp.arange(len(row.k))
    )
    d_q = _joined_queries(d_queries.swapaxes(2, 3), q).astype(q.dtype)
    d_k, d_v = (_joined_keys(from_bits(x), len(k)) for x in (d_keys, d_values))
    return d_q, d_k, d_v
