"""Dense attention of one row, all scores at once: the reference for every other kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spell_jax.attention import masks
from spell_jax.attention.blocks import einsum
from spell_jax.attention.kernel import Inputs
from spell_jax.attention.masks import MASKED


def forward(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Compute Kernel.forward for one row: softmax attention with float32 statistics."""
    v = inputs.v
    scores, visible = _scores(inputs)
    top = jnp.max(jnp.where(visible, scores, MASKED), axis=-1, keepdims=True)
    # A query that sees no key has top = MASKED and infinite exponentials; `where` drops them.
    weights = jnp.where(visible, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.maximum(total, 1e-30)
    out = einsum("krqs,skh->qkrh", weights.astype(v.dtype), v).astype(v.dtype)
    # 1e30 for a query that sees no key makes all its weights 0 in the backward pass.
    lse = jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)), -MASKED)
    return out, lse[..., 0]


def backward(
    inputs: Inputs, lse: jax.Array, delta: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute Kernel.backward for one row."""
    q, k, v, *_ = inputs
    scores, visible = _scores(inputs)
    weights = jnp.where(visible, jnp.exp(scores - lse[..., None]), 0.0)
    d_weights = einsum("qkrh,skh->krqs", d_out, v)
    d_scores = (weights * (d_weights - delta[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
    dq = einsum("krqs,skh->qkrh", d_scores, k)
    dk = einsum("krqs,qkrh->skh", d_scores, q)
    dv = einsum("krqs,qkrh->skh", weights.astype(v.dtype), d_out)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _scores(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Return the scaled float32 scores [K, R, Tq, Tk] and the mask, bool [Tq, Tk]."""
    scores = einsum("qkrh,skh->krqs", inputs.q, inputs.k) * inputs.q.shape[-1] ** -0.5
    return scores, masks.visible(inputs.of_queries, inputs.of_keys)
