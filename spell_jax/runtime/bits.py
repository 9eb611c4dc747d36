"""bfloat16 arrays as their bits, for what a loop cuts up or fills on CPUs.

XLA for CPUs (jax 0.10.2) reads or writes a part of a bfloat16 array by converting the whole array
to float32 and back. It leaves uint16 as it is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spell_jax.runtime import collectives


def as_bits(x: jax.Array) -> jax.Array:
    """Return bfloat16 as its bits, uint16, in a program for CPUs; anything else unchanged."""
    if x.dtype != jnp.bfloat16 or not collectives.is_for_cpu():
        return x
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


def from_bits(x: jax.Array) -> jax.Array:
    """Return bits as the bfloat16 that they are; anything but uint16 unchanged."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
