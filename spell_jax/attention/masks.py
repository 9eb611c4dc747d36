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

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

MASKED = -1e30  # masked score; finite, so that differences of masked scores are not NaN


def row_index(last_query: Int32[Array, "*B T"]) -> Int32[Array, "*B T"]:
    """Return the row indices of tokens that are in order."""
    index = jnp.arange(last_query.shape[-1], dtype=jnp.int32)
    return jnp.broadcast_to(index, last_query.shape)


def sees(of_queries: Sequence[Array], of_keys: Sequence[Array]) -> Array:
    """Return whether queries see keys, bool, for int32 arrays that broadcast.

    Args:
      of_queries: row indices, and in layers with a window positions.
      of_keys: row indices, last_query, and in layers with a window last_position.
    """
    key, *limits = of_keys
    is_seen = key <= of_queries[0]
    for number, limit in zip(of_queries, limits, strict=True):
        is_seen &= number <= limit
    return is_seen


def visible(
    of_queries: Sequence[Int32[Array, "*B queries"]], of_keys: Sequence[Int32[Array, "*B keys"]]
) -> Bool[Array, "*B queries keys"]:
    """Return whether each query sees each key; the arguments are those of `sees`."""
    return sees([x[..., :, None] for x in of_queries], [x[..., None, :] for x in of_keys])


def live_and_full_blocks(
    of_queries: Sequence[Int32[Array, "n queries"]], of_keys: Sequence[Int32[Array, "m keys"]]
) -> tuple[Bool[Array, "n m"], Bool[Array, "n m"]]:
    """Classify pairs of blocks, n of queries and m of keys, by the limits of the numbers in them.

    The arguments are those of `sees`. Returns `live`, whether some query of a block may see a key
    of the other block, and `full`, whether every query sees every key.
    """
    # Limits need O(T) work, a test of every query and key O(T^2). A pair that is live by its limits
    # may still hide every key from every query; its scores are then all masked.
    key, *limits = of_keys
    lowest, highest = ([f(x, axis=1)[:, None] for x in of_queries] for f in (jnp.min, jnp.max))
    live, full = key.min(1) <= highest[0], key.max(1) <= lowest[0]
    for low, high, limit in zip(lowest, highest, limits, strict=True):
        live &= low <= limit.max(1)
        full &= high <= limit.min(1)
    return live, full
