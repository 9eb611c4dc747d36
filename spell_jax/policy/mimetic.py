"""Random weights that begin with the parts of look-up: equal tokens are copied, places are told.

1. A query head begins as the key head of its group, and its output as the value head transposed:
   each head looks for equal tokens and copies them (mimetic initialization, Trockman and Kolter
   2023, arXiv:2305.09828).
2. Biases of queries and keys begin large. Rotated, a pair of them is a score that depends on the
   distance alone: each head begins with a taste for some distances.
3. Without biases nothing would ever tell the query heads of a group apart: such weights stay as
   they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spell_jax.policy.config import PolicyConfig

# Size of the biases.
TASTE = 2.0
# Which distances a head of the tiny policy prefers decides, with the seed of its other weights,
# when look-up forms in its warm start. This draw has local heads in the first two layers.
TASTE_KEY = 7


def attention_weights(
    config: PolicyConfig, attention: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Those of the attention's parameters, stacked over layers, that mimetic weights replace: none
    where queries and keys have no biases.

    Args:
      config: the architecture.
      attention: float32 k_kernel, v_kernel [L,D,K,H], q_kernel [L,D,N,H], o_kernel [L,N,H,D], and
        where there are biases q_bias [L,N,H], k_bias [L,K,H].
    """
    if not config.qkv_bias:
        return {}
    queries_per_key = config.heads // config.kv_heads
    query = jnp.repeat(attention["k_kernel"], queries_per_key, axis=2)
    value = jnp.repeat(attention["v_kernel"], queries_per_key, axis=2)
    scale = (config.width / (config.heads * config.head_size)) ** 0.5  # variance 1 / inputs
    replaced = {"q_kernel": query, "o_kernel": value.transpose(0, 2, 3, 1) * scale}
    q_key, k_key = jax.random.split(jax.random.key(TASTE_KEY))
    for name, key in (("q_bias", q_key), ("k_bias", k_key)):
        replaced[name] = TASTE * jax.random.normal(key, attention[name].shape)
    return replaced
