"""The mask of a packed row is one int32 a key (design: `last_reader`).

Query q sees key k iff k <= q <= last_reader[k], both row indices. A prompt key's last reader is
the end of its group, an answer key's the end of its answer, padding has -1: packing, siblings and
padding are all this one array.

Example, one group with a prompt of 2 tokens and answers of 2 and 1 tokens, then padding:

    row index     0  1 | 2  3 | 4 | 5
    last_reader   4  4 | 3  3 | 4 | -1
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def visible(last_reader: jax.Array) -> jax.Array:
    """Boolean [B, T queries, T keys] from int32 last_reader [B, T keys]."""
    index = jnp.arange(last_reader.shape[-1], dtype=jnp.int32)
    query, key = index[:, None], index[None, :]
    return (key <= query) & (query <= last_reader[:, None, :])


def live_blocks(last_reader: jax.Array, block: int) -> jax.Array:
    """Which blocks of queries see anything of which blocks of keys.

    Args:
      last_reader: int32 [T] of one row, T a multiple of `block`.
      block: rows of a block.

    Returns:
      Boolean [T / block queries, T / block keys]; true where a pair may hold something to see.
    """
    latest = jnp.max(last_reader.reshape(-1, block), axis=1)
    first = jnp.arange(len(latest), dtype=jnp.int32)
    return (first[None, :] <= first[:, None]) & (first[:, None] * block <= latest[None, :])
