"""PRNG keys of requests to the sampler."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

# Bits by which the 20 rounds rotate, four at a time in turn (Salmon et al. 2011).
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def seed_key(seed: int) -> np.ndarray:
    """Return the key data uint32 [2] of jax.random.key(seed), without a program of JAX."""
    # As there without 64-bit types: the low 32 bits count.
    return np.array([0, seed % 2**32], np.uint32)


def request_keys(key: jax.Array, count: int) -> np.ndarray:
    """Return the key data uint32 [count, 2] of fold_in(key, i) for i < count."""
    return fold_keys(np.asarray(jax.random.key_data(key)), [(i,) for i in range(count)])


def fold_keys(key: np.ndarray, numbers: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Fold each of n tuples into a key, number by number; return key data uint32 [n, 2].

    The bits equal jax.random.fold_in. OverflowError if a number is negative or has more than 32
    bits.
    """
    # NumPy, because a program of JAX would wait for the programs that the device runs, on CPUs too.
    # That wait was 18 % of the time of the demo's rollouts.
    keys = np.tile(np.asarray(key, np.uint32), (len(numbers), 1))
    for column in np.asarray(numbers, np.uint32).T:
        keys = _threefry(keys, column)
    return keys


def _threefry(keys: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Hash the counts (0, count), uint32 [n], by keys [n, 2] with Threefry-2x32.

    A word of the key schedule is added after every fourth of the 20 rounds. Source: Salmon et al.
    2011, Parallel Random Numbers: As Easy as 1, 2, 3.
    """
    first, second = keys.T
    # The third word of the key schedule has Threefry's parity constant.
    schedule = (first, second, first ^ second ^ np.uint32(0x1BD11BDA))
    left, right = first, second + count
    for step in range(5):
        for bits in _ROTATIONS[step % 2]:
            left = left + right
            right = (right << np.uint32(bits) | right >> np.uint32(32 - bits)) ^ left
        left = left + schedule[(step + 1) % 3]
        right = right + schedule[(step + 2) % 3] + np.uint32(step + 1)
    return np.stack([left, right], axis=1)
