"""Drawing a token: temperature, top-k, top-p and min-p without a sort, one uniform number a token.

1. A token's weight is exp((logit - largest) / temperature). Which tokens are kept is decided by one
   threshold a row, found by bisection instead of a sort.
2. The token is found by the inverse of the cumulative distribution in two levels: first the stretch
   of 128 weights, then the weight in it.
3. Parameters are arrays, one value a row: rows of different requests are sampled together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

# Thresholds are of log-weights, between 0 and one at which a float32 weight is 0. After so many
# halvings neighbors are as close as float32 numbers of this size.
_LOWEST = -104.0
_BISECTIONS = 30
# The bisection ends at the log-weight of a token, which must be kept though it may be computed
# again, and rounded otherwise: by 1e-5 for logits of 100.
_SLACK = 2**-15
_STRETCH = 128


@flax.struct.dataclass
class Sampling:
    """How the next token of each row is sampled; the filters are applied in this order.

    Attributes:
      temperature: float32 [N], 0 or more; 0 takes the most likely token.
      top_k: int32 [N], keeps the k most likely tokens; 0 keeps all.
      top_p: float32 [N] in (0, 1], keeps the fewest most likely tokens whose share of what top_k
        kept reaches it.
      min_p: float32 [N] in [0, 1], keeps what is at least so many times as likely as the most
        likely token.
    """

    temperature: Any  # numpy's on the host, JAX's on a device
    top_k: Any
    top_p: Any
    min_p: Any


def draw(logits: jax.Array, uniform: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Draws one token a row.

    Args:
      logits: float32 [N, V].
      uniform: float32 [N] in [0, 1).
      sampling: arrays [N].

    Returns:
      int32 tokens [N], and their float32 logprobs [N]: the full-vocabulary log-softmax at the
      row's temperature (at temperature 0: at 1), not renormalized by filters (spec section 9); NaN
      where the row's logits are not finite.
    """
    greedy = sampling.temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, sampling.temperature)[:, None]
    below = scaled - jnp.max(scaled, axis=-1, keepdims=True)
    weights = jnp.exp(below)
    kept = jnp.where(below >= threshold(below, sampling)[:, None], weights, 0.0)
    sampled = jnp.where(greedy, jnp.argmax(logits, axis=-1), _invert(kept, uniform))
    tokens = sampled.astype(jnp.int32)
    chosen = jnp.take_along_axis(below, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jnp.log(jnp.sum(weights, axis=-1))


def threshold(below: jax.Array, sampling: Sampling) -> jax.Array:
    """The least log-weight [N] that is kept; ties at it (to 3e-5) are all kept, and always the
    largest.

    A sort would find the same (8 rows of 152K weights on 2 CPU cores: 459 ms against 46).

    Args:
      below: float32 [N, V], logprobabilities less the row's largest.
      sampling: arrays [N].
    """
    weights = jnp.exp(below)
    lowest = jnp.full(len(below), _LOWEST)

    def by_count() -> jax.Array:
        wanted = jnp.where(sampling.top_k > 0, sampling.top_k, 0)
        found = _bisect(lambda t: jnp.sum(below >= t[:, None], axis=-1) >= wanted, lowest)
        return jnp.where(sampling.top_k > 0, found, lowest)

    def by_mass() -> jax.Array:
        def mass(t):
            return jnp.sum(jnp.where(below >= t[:, None], weights, 0.0), axis=-1)

        wanted = sampling.top_p * mass(least)
        # At 1 all is wanted, which a sum in another order may miss by a rounding error.
        return jnp.where(sampling.top_p < 1, _bisect(lambda t: mass(t) >= wanted, least), least)

    least = jax.lax.cond(jnp.any(sampling.top_k > 0), by_count, lambda: lowest)
    least = jax.lax.cond(jnp.any(sampling.top_p < 1), by_mass, lambda: least)
    return jnp.maximum(least, jnp.log(sampling.min_p)) - _SLACK


def _bisect(enough: Callable[[jax.Array], jax.Array], low: jax.Array) -> jax.Array:
    """The largest of thresholds [N] from `low` to 0 that still lets enough through."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        go_up = enough(middle)
        return jnp.where(go_up, middle, low), jnp.where(go_up, high, middle)

    return jax.lax.fori_loop(0, _BISECTIONS, halve, (low, jnp.zeros_like(low)))[0]


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The places [N] in weights [N, V] at shares `uniform` [N] of their sums."""
    rows, count = weights.shape
    weights = jnp.pad(weights, ((0, 0), (0, -count % _STRETCH))).reshape(rows, -1, _STRETCH)
    sums = jnp.sum(weights, axis=-1)
    stretch, before, target = _first_above(sums, uniform * jnp.sum(sums, axis=-1))
    inside = jnp.take_along_axis(weights, stretch[:, None, None], axis=1)[:, 0]
    place, _, _ = _first_above(inside, target - before)
    return stretch * _STRETCH + place


def _first_above(sums: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each row [n]: the first positive part whose cumulative sum is above the target, the sum
    before it, and the target, which is taken back to below the whole.

    A parallel cumulative sum may rise by a rounding error where nothing was added, so that only
    positive parts count.
    """
    cumulative = jnp.where(sums > 0, jnp.cumsum(sums, axis=-1), 0.0)
    target = jnp.clip(target, 0.0, jnp.max(cumulative, axis=-1) * (1 - 2**-23))
    place = jnp.argmax(cumulative > target[:, None], axis=-1)
    found = jnp.take_along_axis(cumulative - sums, place[:, None], axis=-1)[:, 0]
    return place, found, target
