"""Attention mask of a packed row, stored as one int32 per key: `last_query`.

Query q sees key k iff k <= q <= last_query[k], all row indices. last_query is the end of the group
for a prompt key, the end of the answer for an answer key, and -1 for padding. Where the tokens of a
row are sharded over devices, each shard carries its row indices.

Example, one group with a prompt of 2 tokens and answers of 2 and 1 tokens, then padding:

    row index     0  1 | 2  3 | 4 | 5
    last_query    4  4 | 3  3 | 4 | -1
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # masked score; finite, so that differences of masked scores are not NaN


def row_index(last_query: jax.Array) -> jax.Array:
    """Return the row indices of tokens that are in order, int32 [B, T]."""
    index = jnp.arange(last_query.shape[-1], dtype=jnp.int32)
    return jnp.broadcast_to(index, last_query.shape)


def visible(q_index: jax.Array, k_index: jax.Array, last_query: jax.Array) -> jax.Array:
    """Return whether each query sees each key, bool [..., queries, keys].

    `q_index` (int32 [..., queries]) and `k_index` (int32 [..., keys]) are row indices.
    """
    query = q_index[..., :, None]
    return (k_index[..., None, :] <= query) & (query <= last_query[..., None, :])


def live_and_full_blocks(
    q_index: jax.Array, k_index: jax.Array, last_query: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Classify pairs of blocks by the limits of their indices, bool [n, m] each.

    `q_index` is int32 [n, queries per block]; `k_index` and `last_query` are int32
    [m, keys per block]. Returns `live`, whether some query of a block may see a key of the other
    block, and `full`, whether every query sees every key.
    """
    # Limits need O(T) work, a test of every query and key O(T^2). A pair that is live by its limits
    # may still hide every key from every query; its scores are then all masked.
    earliest, latest = q_index.min(1)[:, None], q_index.max(1)[:, None]
    live = (k_index.min(1) <= latest) & (earliest <= last_query.max(1))
    full = (k_index.max(1) <= earliest) & (latest <= last_query.min(1))
    return live, full
