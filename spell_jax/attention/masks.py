"""The mask of a packed row is one int32 a key (design: `last_query`).

Query q sees key k iff k <= q <= last_query[k], all row indices. A prompt key's last reader is
the end of its group, an answer key's the end of its answer, padding has -1: packing, siblings and
padding are all this one array.

Example, one group with a prompt of 2 tokens and answers of 2 and 1 tokens, then padding:

    row index     0  1 | 2  3 | 4 | 5
    last_query   4  4 | 3  3 | 4 | -1

Where the tokens of a row are dealt out over devices, those of a device carry their row indices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def row_index(last_query: jax.Array) -> jax.Array:
    """int32 [B, T]: row indices of tokens that stand in their order."""
    index = jnp.arange(last_query.shape[-1], dtype=jnp.int32)
    return jnp.broadcast_to(index, last_query.shape)


def visible(q_index: jax.Array, k_index: jax.Array, last_query: jax.Array) -> jax.Array:
    """Boolean [..., queries, keys] from int32 row indices [..., queries] and [..., keys], and
    last_query [..., keys]."""
    query = q_index[..., :, None]
    return (k_index[..., None, :] <= query) & (query <= last_query[..., None, :])


def live_blocks(q_index: jax.Array, k_index: jax.Array, last_query: jax.Array) -> jax.Array:
    """Which blocks of queries may see anything of which blocks of keys.

    Args:
      q_index: int32 [n, queries of a block], of one row.
      k_index, last_query: int32 [m, keys of a block].

    Returns:
      Boolean [n, m].
    """
    begun = jnp.min(k_index, axis=1)[None, :] <= jnp.max(q_index, axis=1)[:, None]
    return begun & (jnp.min(q_index, axis=1)[:, None] <= jnp.max(last_query, axis=1)[None, :])
