"""Mimetic initialization: attention heads start by copying equal tokens at preferred distances.

Each query head starts equal to the key head of its group, and its output projection as the
transposed value head: the head attends to equal tokens and copies them (Trockman and Kolter 2023,
arXiv:2305.09828). The q and k biases start large. After rotation their product depends only on the
distance, so each head prefers some distances. Without these biases nothing would ever distinguish
the query heads of a group; such weights are left unchanged.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spell_jax.policy.config import PolicyConfig

# Standard deviation of the q and k biases.
TASTE = 2.0
# The preferred distances and the seed of the other weights decide when token lookup emerges in the
# tiny policy's warm start. This key gives local heads in the first two layers.
TASTE_KEY = 7


def attention_weights(
    config: PolicyConfig, attention: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Compute mimetic replacements for attention parameters; empty if q and k have no biases.

    Takes float32 parameters of all layers, k_kernel and v_kernel [L,D,K,H], q_kernel [L,D,N,H],
    o_kernel [L,N,H,D], q_bias [L,N,H] and k_bias [L,K,H]. Returns new q_kernel, o_kernel, q_bias
    and k_bias.
    """
    if not config.qkv_bias:
        return {}
    queries_per_key = config.heads // config.kv_heads
    query = jnp.repeat(attention["k_kernel"], queries_per_key, axis=2)
    value = jnp.repeat(attention["v_kernel"], queries_per_key, axis=2)
    scale = (config.width / (config.heads * config.head_size)) ** 0.5  # variance 1 / inputs
    replaced = {"q_kernel": query, "o_kernel": value.transpose(0, 2, 3, 1) * scale}
    # A constant key, whatever the run's seed: the biases alone decide which distances a head
    # prefers.
    q_key, k_key = jax.random.split(jax.random.key(TASTE_KEY))
    for name, key in (("q_bias", q_key), ("k_bias", k_key)):
        replaced[name] = TASTE * jax.random.normal(key, attention[name].shape)
    return replaced
