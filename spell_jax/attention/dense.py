"""Dense attention of a row: all scores at once. The reference for every other kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spell_jax.attention import masks

# Finite, so that differences of masked scores are no NaN.
MASKED = -1e30


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_index: jax.Array,
    k_index: jax.Array,
    last_query: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention with grouped queries, statistics in float32; the contract of kernel.py.

    Args:
      q: [Tq, K, R, H], R query heads a key head.
      k, v: [Tk, K, H].
      q_index: int32 [Tq], row indices of the queries.
      k_index, last_query: int32 [Tk], of the keys; see masks.py.

    Returns:
      out [Tq, K, R, H] in q's dtype, zeros for a query that sees nothing; and the log-sum-exp of
      its scores, float32 [K, R, Tq], 1e30 for a query that sees nothing.
    """
    scores, seen = _scores(q, k, q_index, k_index, last_query)
    top = jnp.max(jnp.where(seen, scores, MASKED), axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.maximum(total, 1e-30)
    out = jnp.einsum("krqs,skh->qkrh", weights.astype(v.dtype), v)
    # A query that sees nothing: no key has weight in the backward pass either.
    lse = jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)), -MASKED)
    return out, lse[..., 0]


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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients, or these keys' share of them if they are a part of what is attended.

    Args:
      q, k, v, q_index, k_index, last_query: as in forward.
      lse, delta: float32 [K, R, Tq], over all keys of all parts; delta is sum over H of
        d_out * out.
      d_out: [Tq, K, R, H].

    Returns:
      dq [Tq, K, R, H], dk and dv [Tk, K, H] in the dtypes of q, k and v.
    """

    def einsum(spec, *arrays):
        return jnp.einsum(spec, *arrays, preferred_element_type=jnp.float32)

    scores, seen = _scores(q, k, q_index, k_index, last_query)
    weights = jnp.where(seen, jnp.exp(scores - lse[..., None]), 0.0)
    d_weights = einsum("qkrh,skh->krqs", d_out, v)
    d_scores = (weights * (d_weights - delta[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
    dq = einsum("krqs,skh->qkrh", d_scores, k)
    dk = einsum("krqs,qkrh->skh", d_scores, q)
    dv = einsum("krqs,qkrh->skh", weights.astype(v.dtype), d_out)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _scores(q, k, q_index, k_index, last_query):
    """Scaled float32 scores [K, R, Tq, Tk], and which of them are seen [Tq, Tk]."""
    scores = jnp.einsum("qkrh,skh->krqs", q, k, preferred_element_type=jnp.float32)
    return scores * q.shape[-1] ** -0.5, masks.visible(q_index, k_index, last_query)
