"""Helpers for tests of the two Pallas kernels: a reference, and rows of packed groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

UNSEEING = 1e30  # log-sum-exp of a query that sees no key


def visible_mask(q_index, k_index, last_query, q_position=None, last_position=None):
    query = q_index[:, None]
    visible = (k_index[None, :] <= query) & (query <= last_query[None, :])
    if q_position is None:
        return visible
    return visible & (q_position[:, None] <= last_position[None, :])


def positions(last_query: np.ndarray) -> np.ndarray:
    """Return the position of each token, int32 [T]: the number of tokens before it in its tree.

    Answers begin after their prompt. Padding is at position 0.
    """
    index = np.arange(len(last_query), dtype=np.int32)
    seen_tokens = visible_mask(index, index, last_query).sum(axis=1)
    return np.maximum(seen_tokens - 1, 0).astype(np.int32)


def dense(q, k, v, *indices):
    """Return (out [Tq, K, R, H], log-sum-exp [K, R, Tq]) from the whole matrix of scores."""
    visible = visible_mask(*indices)
    scores = jnp.einsum("qkrh,skh->krqs", q, k) * q.shape[-1] ** -0.5
    top = jnp.max(jnp.where(visible, scores, -1e9), axis=-1, keepdims=True)
    weights = jnp.exp(jnp.where(visible, scores - top, -1e9))
    total = jnp.sum(weights, axis=-1)
    out = jnp.einsum("krqs,skh->qkrh", weights / jnp.maximum(total, 1e-9)[..., None], v)
    lse = jnp.log(jnp.maximum(total, 1e-9)) + top[..., 0]
    return out, jnp.where(jnp.any(visible, axis=1), lse, UNSEEING)


def packed_row(rng: np.random.Generator, time: int, unit: int) -> np.ndarray:
    """Sample last_query of groups of a prompt and answers, then padding.

    Prompts have 4 to 12 units, the first has 22 more. Two to four answers have 1 to 6 units each.
    """
    last_query, begin = np.full(time, -1, np.int32), 0
    while True:
        lowest, highest = np.array([[4, 1, 1, 1, 1], [12, 6, 6, 6, 6]]) * unit
        prompt, *answers = rng.integers(lowest, highest)
        prompt += 22 * unit * (begin == 0)
        answers = answers[: rng.integers(2, 5)]
        end = begin + prompt + sum(answers)
        if end > time - 10:
            return last_query
        last_query[begin : begin + prompt] = end - 1
        place = begin + prompt
        for length in answers:
            last_query[place : place + length] = place + length - 1
            place += length
        begin = end


def merge(parts):
    """Merge (out, log-sum-exp) over two parts of the keys into (out, log-sum-exp) over all keys."""
    seeing_queries = [lse < UNSEEING / 2 for _, lse in parts]
    lses = [jnp.where(s, lse, -UNSEEING) for s, (_, lse) in zip(seeing_queries, parts, strict=True)]
    lse = jnp.where(seeing_queries[0] | seeing_queries[1], jnp.logaddexp(*lses), UNSEEING)
    out = sum(
        x * jnp.exp(part_lse - lse).transpose(2, 0, 1)[..., None]
        for part_lse, (x, _) in zip(lses, parts, strict=True)
    )
    return out, lse


def check(forward, backward, tensors, indices) -> None:
    """Compare output, log-sum-exp and gradients with dense; queries that see nothing get zeros.

    Args:
      forward, backward: functions of q, k, v and indices; backward also takes lse, out and d_out.
      tensors: q, k, v and d_out.
      indices: q_index, k_index and last_query, and with a window q_position and last_position.
    """
    *qkv, d_out = tensors
    expected_out, expected_lse, expected_gradients = reference(tensors, indices)
    out, lse = forward(*qkv, *indices)
    assert out.dtype == qkv[0].dtype and lse.dtype == jnp.float32
    close(out, expected_out)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert np.max(np.abs(expected_out)) > 0.1
    blind = ~np.any(visible_mask(*indices), axis=1)
    assert not np.any(np.asarray(out)[blind]) and np.all(np.asarray(lse)[..., blind] == UNSEEING)
    gradients = backward(*qkv, *indices, lse, out, d_out)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == qkv[0].dtype
        close(gradient, expected_gradient)
    assert not np.any(np.asarray(gradients[0])[blind])


@jax.jit
def reference(tensors, indices):
    """Return the dense output, log-sum-exp and gradients."""
    *qkv, d_out = tensors
    out, pullback, lse = jax.vjp(lambda *x: dense(*x, *indices), *qkv, has_aux=True)
    return out, lse, pullback(d_out)


def close(array, expected, limit: float = 5e-5) -> None:
    expected = np.asarray(expected, np.float32)
    # Gradients of queries are 0 in a window of one token.
    scale = max(np.max(np.abs(expected)), 0.1)
    assert np.max(np.abs(np.asarray(array, np.float32) - expected)) / scale < limit
