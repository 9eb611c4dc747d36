"""bfloat16 arrays as uint16 bit patterns, for loops on CPUs that slice or fill an array."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spell_jax.runtime import collectives


def as_bits(x: jax.Array) -> jax.Array:
    """Return bfloat16 as uint16 bits of the same shape if the program is for CPUs, else `x`."""
    # XLA for CPUs (jax 0.10.2) reads or writes a part of a bfloat16 array by converting the whole
    # array to float32 and back: all pages of a KV pool in every layer. It leaves uint16 as it is.
    if x.dtype != jnp.bfloat16 or not collectives.is_for_cpu():
        return x
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


def from_bits(x: jax.Array) -> jax.Array:
    """Return uint16 bits as bfloat16 of the same shape; any other dtype unchanged."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
