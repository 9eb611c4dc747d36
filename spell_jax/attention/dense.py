"""Dense attention: the reference that every other kernel is held against."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spell_jax.attention import masks

# Finite, so that a row without any visible key (padding) gives a uniform mix and no NaN.
MASKED = -1e30


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_index: jax.Array,
    k_index: jax.Array,
    last_reader: jax.Array,
) -> jax.Array:
    """Softmax attention of packed rows, grouped queries, statistics in float32.

    Args:
      q: [B, Tq, N, H].
      k: [B, Tk, K, H]; query head n reads key head n // (N / K).
      v: [B, Tk, K, H].
      q_index: int32 [B, Tq], row indices of the queries.
      k_index, last_reader: int32 [B, Tk], of the keys; see masks.py.

    Returns:
      [B, Tq, N, H] in q's dtype.
    """
    rows, time, heads, size = q.shape
    groups = q.reshape(rows, time, k.shape[2], -1, size)
    scores = jnp.einsum("bqkrh,bskh->bkrqs", groups, k, preferred_element_type=jnp.float32)
    seen = masks.visible(q_index, k_index, last_reader)[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores * size**-0.5, MASKED), axis=-1)
    out = jnp.einsum("bkrqs,bskh->bqkrh", weights.astype(v.dtype), v)
    return out.reshape(rows, time, heads, size)
