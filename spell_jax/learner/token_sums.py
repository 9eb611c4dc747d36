"""Sums over the tokens of a micro-batch, by role, answer or group, on the devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spell_jax.data.clusters import ROLES
from spell_jax.learner.packing import Array


def sum_by_role(values: Array, role: Array) -> jax.Array:
    """Sum values [B, A] by role [B, A] (see MicroBatch), float32 [len(ROLES) + 1]."""
    of_role = role[..., None] == jnp.arange(len(ROLES) + 1)
    return jnp.sum(jnp.where(of_role, values[..., None], 0.0), axis=(0, 1))


def sum_by_answer(values: Array, answer: Array) -> jax.Array:
    """Sum values over each token's answer, 0 where padded; values and sums are float32 [B, A].

    With MicroBatch.group as `answer`, sum over each token's group.
    """
    size = answer.shape[1]
    slot = jnp.where(answer >= 0, answer, size)  # out of range, so that nothing is added
    rows = jnp.arange(len(answer))[:, None]
    sums = jnp.zeros_like(values).at[rows, slot].add(values, mode="drop")
    return jnp.take_along_axis(sums, slot, axis=1, mode="fill", fill_value=0)
