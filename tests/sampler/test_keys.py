"""Tests of keys: NumPy's bits equal the bits of jax.random.fold_in."""

import functools

import jax
import numpy as np
import pytest

from spell_jax.sampler.keys import fold_keys, request_keys, seed_key

RNG = np.random.default_rng(3)
EDGES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1)


@jax.jit
@jax.vmap
def _fold_by_jax(key, number):
    """Return JAX's key data uint32 [n, 2] of fold_in for keys [n, 2] and numbers [n]."""
    return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), number))


@pytest.mark.parametrize("partitionable", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_folded_keys_have_the_bits_of_jax(width: int, partitionable: bool) -> None:
    keys = RNG.integers(2**32, size=(8, 2), dtype=np.uint32)
    keys[:2] = [(0, 0), (2**32 - 1, 2**32 - 1)]
    numbers = RNG.integers(2**32, size=(600, width), dtype=np.uint32)
    numbers[: len(EDGES)] = np.array(EDGES, np.uint32)[:, None]
    with jax.threefry_partitionable(partitionable):
        for key in keys:
            folded = fold_keys(key, [tuple(row) for row in numbers.tolist()])
            assert folded.dtype == np.uint32
            expected_keys = functools.reduce(
                _fold_by_jax, numbers.T, np.tile(key, (len(numbers), 1))
            )
            np.testing.assert_array_equal(folded, expected_keys)


@pytest.mark.parametrize("number", [*EDGES, -1, 2**32, 2**40, -(2**31)])
def test_any_number_is_folded_or_refused_as_by_jax(number: int) -> None:
    key = jax.random.key(5)
    data = np.asarray(jax.random.key_data(key))
    if number in EDGES:
        folded = jax.random.key_data(jax.random.fold_in(key, number))
        np.testing.assert_array_equal(fold_keys(data, [(number,)]), folded[None])
        return
    for fold in (lambda: jax.random.fold_in(key, number), lambda: fold_keys(data, [(number,)])):
        with pytest.raises(OverflowError):
            fold()


@pytest.mark.parametrize("seed", [*EDGES, -1, 2**40 + 5, 2**63 - 1, -(2**63)])
def test_key_of_a_seed_has_the_bits_of_jax(seed: int) -> None:
    np.testing.assert_array_equal(seed_key(seed), jax.random.key_data(jax.random.key(seed)))


def test_keys_of_requests_are_folded_from_their_indices() -> None:
    key = jax.random.key(11)
    expected_keys = [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(5)]
    np.testing.assert_array_equal(request_keys(key, 5), expected_keys)


def test_no_numbers_give_no_keys() -> None:
    keys = fold_keys(np.zeros(2, np.uint32), [])
    assert keys.shape == (0, 2) and keys.dtype == np.uint32
    assert request_keys(jax.random.key(0), 0).shape == (0, 2)
