"""PRNG keys of requests to the sampler."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# Keys made in one call. The shape is fixed, so that nothing compiles in the middle of a run.
_FOLDED = 256


def request_keys(key: jax.Array, count: int) -> np.ndarray:
    """Key data uint32 [count, 2] of fold_in(key, i) for i < count."""
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(count))
    return np.asarray(jax.random.key_data(keys))


def fold_keys(key: np.ndarray, numbers: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Key data uint32 [n, 2] of a key into which each of n tuples is folded, number by number.

    The keys are made on the host's CPU: on an accelerator the call would wait for running programs.
    """
    if not numbers:
        return np.zeros((0, 2), np.uint32)
    pieces = -(-len(numbers) // _FOLDED)
    padded = np.zeros((pieces, _FOLDED, len(numbers[0])), np.uint32)
    padded.reshape(-1, len(numbers[0]))[: len(numbers)] = numbers
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        folded = [np.asarray(_fold_all(key, piece)) for piece in padded]
    return np.concatenate(folded)[: len(numbers)]


@jax.jit
def _fold_all(key: jax.Array, numbers: jax.Array) -> jax.Array:
    first = jax.random.wrap_key_data(key)
    keys = jax.vmap(lambda some: functools.reduce(jax.random.fold_in, some, first))(numbers)
    return jax.random.key_data(keys)
