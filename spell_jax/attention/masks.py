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
