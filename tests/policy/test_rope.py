"""Rotary positions: a rotation by the position, in float32 however far."""

import jax.numpy as jnp
import numpy as np

from spell_jax.policy import rope


def _rotate(x: np.ndarray, positions: list[int], theta: float = 1e4):
    angles = rope.rotary(jnp.array([positions]), x.shape[-1], theta)
    return np.asarray(rope.rotate(jnp.asarray(x), *angles))


def test_equals_complex_rotation() -> None:
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 8)).astype(np.float32)
    positions = [0, 5, 1000]
    angles = np.outer(positions, 1e4 ** -(np.arange(4) / 4))[None, :, None]
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
    wanted = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(_rotate(x, positions), wanted, atol=2e-4)
    np.testing.assert_allclose(_rotate(x, positions)[:, :2], wanted[:, :2], atol=2e-6)


def test_products_depend_on_the_distance_only() -> None:
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 1, 16)).astype(np.float32)
    near = np.sum(_rotate(q, [9]) * _rotate(k, [4]))
    far = np.sum(_rotate(q, [20_009]) * _rotate(k, [20_004]))
    assert abs(near - far) < 0.02
    assert abs(near - np.sum(_rotate(q, [9]) * _rotate(k, [3]))) > 0.1


def test_neighbours_differ_in_bfloat16_too() -> None:
    x = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    turned = rope.rotate(x, *rope.rotary(jnp.array([[256, 257]]), 8, 1e4))
    assert turned.dtype == jnp.bfloat16
    assert jnp.abs(turned[0, 0] - turned[0, 1]).max() > 0.5
