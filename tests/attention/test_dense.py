"""Tests of dense attention against a loop over rows, heads and queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.attention import attend, kernel, masks

ROWS, TIME, HEADS, KV_HEADS, SIZE = 3, 12, 4, 2, 6


def _inputs(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(ROWS, TIME, HEADS, SIZE)).astype(np.float32)
    k, v = rng.normal(size=(2, ROWS, TIME, KV_HEADS, SIZE)).astype(np.float32)
    last_query = rng.integers(-1, TIME, size=(ROWS, TIME)).astype(np.int32)
    last_query[:, -2:] = -1  # padding
    return q, k, v, last_query


def _attend(q, k, v, last_query) -> jax.Array:
    """Attend with token indices in row order."""
    last_query = jnp.asarray(last_query)
    index = masks.row_index(last_query)
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    return kernel.attend(attend.KERNELS["dense"], q, k, v, index, index, last_query)


def _query_by_query(q, k, v, last_query) -> tuple[np.ndarray, np.ndarray]:
    """Attend in float64 loops; return also which queries see any key at all."""
    out, reads = np.zeros(q.shape), np.zeros(q.shape[:2], bool)
    for row in range(ROWS):
        for query in range(TIME):
            keys = [key for key in range(query + 1) if query <= last_query[row, key]]
            reads[row, query] = bool(keys)
            for head in range(HEADS if keys else 0):
                shared = head // (HEADS // KV_HEADS)
                scores = k[row, keys, shared].astype(float) @ q[row, query, head] / SIZE**0.5
                weights = np.exp(scores - scores.max())
                out[row, query, head] = weights @ v[row, keys, shared] / weights.sum()
    return out, reads


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_equals_a_loop_over_queries(seed: int) -> None:
    inputs = _inputs(seed)
    expected_out, reads = _query_by_query(*inputs)
    out = np.asarray(_attend(*inputs))
    assert reads.any() and not reads.all()
    np.testing.assert_allclose(out[reads], expected_out[reads], atol=2e-6)
    assert np.isfinite(out).all()


@pytest.mark.slow
def test_gradients_are_finite_and_zero_for_masked_keys() -> None:
    q, k, v, last_query = _inputs(0)
    _, reads = _query_by_query(q, k, v, last_query)

    def total(k, v):
        out = _attend(q, k, v, last_query)
        return jnp.sum(jnp.where(reads[..., None, None], out, 0.0) ** 2)

    for gradient in jax.grad(total, (0, 1))(jnp.asarray(k), jnp.asarray(v)):
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(gradient[last_query == -1], 0.0)
        assert np.abs(gradient).max() > 1e-3


def test_bfloat16_stays_bfloat16_and_close() -> None:
    inputs = _inputs(1)
    expected_out, reads = _query_by_query(*inputs)
    low = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]]
    out = _attend(*low, inputs[3])
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32)[reads], expected_out[reads], atol=5e-2)
