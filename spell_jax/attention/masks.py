"""Attention mask of a packed row, stored as one or two int32 per key.

Query q sees key k iff k <= q <= last_query[k], all row indices. last_query is the end of the group
for a prompt key, the end of the answer for an answer key, and -1 for padding. Where the tokens of a
row are sharded over devices, each shard carries its row indices.

In a layer with a window of W tokens, q must also be at most W - 1 positions after k: q's position
is at most last_position[k]. Positions are those of the rotary embedding, not row indices: every
answer begins at the position after its prompt.

Example, one group with a prompt of 2 tokens and answers of 2 and 1 tokens, then padding:

    row index     0  1 | 2  3 | 4 | 5
    last_query    4  4 | 3  3 | 4 | -1
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

MASKED = -1e30  # masked score; finite, so that differences of masked scores are not NaN


def row_index(last_query: Int32[Array, "*B T"]) -> Int32[Array, "*B T"]:
    """Return the row indices of tokens that are in order."""
    index = jnp.arange(last_query.shape[-1], dtype=jnp.int32)
    return jnp.broadcast_to(index, last_query.shape)


def visible(
    q_index: Int32[Array, "*B queries"],
    k_index: Int32[Array, "*B keys"],
    last_query: Int32[Array, "*B keys"],
    q_position: Int32[Array, "*B queries"] | None = None,
    last_position: Int32[Array, "*B keys"] | None = None,
) -> Bool[Array, "*B queries keys"]:
    """Return whether each query sees each key; `q_index` and `k_index` are row indices.

    Both positions are None in layers without a window.
    """
    query = q_index[..., :, None]
    by_index = (k_index[..., None, :] <= query) & (query <= last_query[..., None, :])
    if q_position is None or last_position is None:
        return by_index
    return by_index & (q_position[..., :, None] <= last_position[..., None, :])


def live_and_full_blocks(
    q_index: Int32[Array, "n queries"],
    k_index: Int32[Array, "m keys"],
    last_query: Int32[Array, "m keys"],
    q_position: Int32[Array, "n queries"] | None = None,
    last_position: Int32[Array, "m keys"] | None = None,
) -> tuple[Bool[Array, "n m"], Bool[Array, "n m"]]:
    """Classify pairs of blocks, n of queries and m of keys, by the limits of their indices.

    Returns `live`, whether some query of a block may see a key of the other block, and `full`,
    whether every query sees every key.
    """
    # Limits need O(T) work, a test of every query and key O(T^2). A pair that is live by its limits
    # may still hide every key from every query; its scores are then all masked.
    earliest, latest = q_index.min(1)[:, None], q_index.max(1)[:, None]
    live = (k_index.min(1) <= latest) & (earliest <= last_query.max(1))
    full = (k_index.max(1) <= earliest) & (latest <= last_query.min(1))
    if q_position is not None and last_position is not None:
        live &= q_position.min(1)[:, None] <= last_position.max(1)
        full &= q_position.max(1)[:, None] <= last_position.min(1)
    return live, full
