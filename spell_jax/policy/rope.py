"""Rotary position embeddings, with a float32 angle table."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotary(positions: jax.Array, head_size: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles.

    Positions stay integers until they meet float32 frequencies: bfloat16 cannot tell 256 from 257.

    Args:
      positions: int32 [B, T].
      head_size: H.
      theta: base of the angles.

    Returns:
      Two float32 arrays [B, T, 1, H/2].
    """
    exponents = jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size
    angles = positions.astype(jnp.float32)[..., None, None] / theta**exponents
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of x [B, T, heads, H], as Hugging Face weights expect."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=-1
    )
    return rotated.astype(x.dtype)
