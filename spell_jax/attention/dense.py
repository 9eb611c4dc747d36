"""Dense attention of one row, all scores at once: the reference for every other kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spell_jax.attention import masks

# Finite, so that differences of masked scores are not NaN.
MASKED = -1e30


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_index: jax.Array,
    k_index: jax.Array,
    last_query: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention with grouped queries and float32 statistics; see kernel.Kernel.

    Args:
      q: queries [Tq, K, R, H], with R query heads per key head.
      k: keys [Tk, K, H].
      v: values [Tk, K, H].
      q_index: row indices of the queries, int32 [Tq].
      k_index: row indices of the keys, int32 [Tk].
      last_query: the mask, int32 [Tk]; see masks.py.

    Returns:
      out [Tq, K, R, H] in q's dtype, and the log-sum-exp of the scores, float32 [K, R, Tq]. A query
      that sees no key gets output 0 and log-sum-exp 1e30.
    """
    scores, seen = _scores(q, k, q_index, k_index, last_query)
    top = jnp.max(jnp.where(seen, scores, MASKED), axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.maximum(total, 1e-30)
    out = jnp.einsum("krqs,skh->qkrh", weights.astype(v.dtype), v)
    # 1e30 for a query that sees no key makes all its weights 0 in the backward pass.
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
    """Gradients of attention, or the contribution of these keys to them.

    Args:
      q: queries [Tq, K, R, H].
      k: keys [Tk, K, H].
      v: values [Tk, K, H].
      q_index: row indices of the queries, int32 [Tq].
      k_index: row indices of the keys, int32 [Tk].
      last_query: the mask, int32 [Tk]; see masks.py.
      lse: log-sum-exp of each query's scores over all keys it attends to, float32 [K, R, Tq].
      delta: sum over H of d_out * out, with the output over all keys, float32 [K, R, Tq].
      d_out: gradient of the output [Tq, K, R, H].

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
    """Scaled float32 scores [K, R, Tq, Tk], and the mask, bool [Tq, Tk]."""
    scores = jnp.einsum("qkrh,skh->krqs", q, k, preferred_element_type=jnp.float32)
    return scores * q.shape[-1] ** -0.5, masks.visible(q_index, k_index, last_query)
