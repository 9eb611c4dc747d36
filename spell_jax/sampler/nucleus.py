"""Drawing a token: temperature, top-p without a sort, one uniform number a token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Halvings of the threshold's interval: float32 probabilities are told apart after 30.
_BISECTIONS = 30


def nucleus(probabilities: jax.Array, top_p: float) -> jax.Array:
    """Keeps the fewest most likely tokens whose mass reaches top_p; the rest become 0.

    The threshold is the largest t with sum(p[p >= t]) >= top_p, found by bisection, with the same
    kept set as by a sort (ties at the threshold are all kept) in a tenth of its time (8 rows of
    152K tokens on 2 CPU cores: 46 against 459 ms).

    Args:
      probabilities: float32 [..., V], sums to 1.
      top_p: in (0, 1].
    """
    if top_p >= 1.0:
        return probabilities

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        mass = jnp.sum(jnp.where(probabilities >= middle, probabilities, 0.0), -1, keepdims=True)
        enough = mass >= top_p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    high = jnp.max(probabilities, axis=-1, keepdims=True)
    # The lower bound never passes the highest probability: the most likely token is always kept.
    low, _ = jax.lax.fori_loop(0, _BISECTIONS, halve, (jnp.zeros_like(high), high))
    return jnp.where(probabilities >= low, probabilities, 0.0)


def draw(
    logits: jax.Array, uniform: jax.Array, temperature: float, top_p: float
) -> tuple[jax.Array, jax.Array]:
    """Draws one token a row by the inverse of the cumulative distribution.

    Args:
      logits: float32 [..., V].
      uniform: float32 [...] in [0, 1).
      temperature: sampling temperature; 0 takes the most likely token.
      top_p: mass of the nucleus.

    Returns:
      int32 tokens [...], and their float32 log-probs [...]: the full-vocabulary log-softmax at
      this temperature (at temperature 0: at 1), not renormalised by top-p (spec section 9).
    """
    log_probs = jax.nn.log_softmax(logits / (temperature or 1.0), axis=-1)
    if temperature == 0:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        kept = nucleus(jnp.exp(log_probs), top_p)
        # A parallel cumulative sum may rise by a rounding error where nothing was added: only
        # tokens of the nucleus may be hit.
        cumulative = jnp.where(kept > 0, jnp.cumsum(kept, axis=-1), 0.0)
        total = jnp.max(cumulative, axis=-1, keepdims=True)
        # u * total < total, so that some token always lies above it.
        target = jnp.minimum(uniform, 1.0 - 2**-24)[..., None] * total
        tokens = jnp.argmax(cumulative > target, axis=-1).astype(jnp.int32)
    return tokens, jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]
