"""Sums over the tokens of a micro-batch, by group name, answer or group, on the devices."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, Shaped


def sum_by_name(
    values: Shaped[Array, "B A"], group_name: Int32[Array, "B A"], names: int
) -> Float32[Array, " {names}"]:
    """Sum values by MicroBatch.group_name, an index below `names`."""
    has_name = group_name[..., None] == jnp.arange(names)
    return jnp.sum(jnp.where(has_name, values[..., None], 0.0), axis=(0, 1))


def sum_by_answer(
    values: Float32[Array, "B A"], answer: Int32[Array, "B A"]
) -> Float32[Array, "B A"]:
    """Sum values over each token's answer, 0 where padded.

    With MicroBatch.group as `answer`, sum over each token's group.
    """
    size = answer.shape[1]
    slot = jnp.where(answer >= 0, answer, size)  # out of range, so that nothing is added
    rows = jnp.arange(len(answer))[:, None]
    sums = jnp.zeros_like(values).at[rows, slot].add(values, mode="drop")
    return jnp.take_along_axis(sums, slot, axis=1, mode="fill", fill_value=0)
