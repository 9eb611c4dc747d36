"""Decoding attention against the same sequence in one packed row."""

import jax
import jax.numpy as jnp
import numpy as np

from spell_jax.attention import dense, masks
from spell_jax.sampler import cache as caches

ROWS, GROUP, HEADS, KV_HEADS, SIZE = 2, 3, 4, 2, 8
PROMPT, SUFFIX, STEP = 5, 6, 3
LENGTHS = np.array([5, 2], np.int32)


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def test_one_new_token_of_each_sibling() -> None:
    q = _random(ROWS, GROUP, HEADS, SIZE)
    k, v = _random(2, ROWS, GROUP, KV_HEADS, SIZE)
    prompt = _random(2, ROWS, PROMPT, KV_HEADS, SIZE)
    suffix = _random(2, ROWS, GROUP, SUFFIX, KV_HEADS, SIZE)  # what lies behind STEP is rubbish
    context = {"prompt_length": jnp.asarray(LENGTHS), "step": jnp.int32(STEP)}
    cache = caches.Cache(*prompt, *suffix)
    found, new = jax.jit(caches.attend_decode)(q, k, v, cache, context)
    np.testing.assert_array_equal(new[0], k)
    for row in range(ROWS):
        for sibling in range(GROUP):
            at = (row, sibling)
            keys, values = (
                np.concatenate([p[row, : LENGTHS[row]], s[at][:STEP], n[at][None]])
                for p, s, n in zip(prompt, suffix, (k, v), strict=True)
            )
            time = len(keys)
            queries = np.zeros((time, KV_HEADS, HEADS // KV_HEADS, SIZE), np.float32)
            queries[-1] = np.reshape(q[at], queries.shape[1:])
            last_reader = jnp.full(time, time - 1, jnp.int32)
            index = masks.row_index(last_reader)
            wanted, _ = dense.forward(queries, keys, values, index, index, last_reader)
            found_at = np.reshape(found[at], wanted[-1].shape)
            np.testing.assert_allclose(found_at, wanted[-1], atol=2e-6)


def test_write_fills_one_position_of_every_suffix() -> None:
    layers = 2
    prompt = (jnp.zeros((layers, ROWS, PROMPT, KV_HEADS, SIZE)),) * 2
    cache = caches.from_prefill(prompt, GROUP, SUFFIX)
    keys, values = _random(2, layers, ROWS, GROUP, KV_HEADS, SIZE)
    cache = caches.write(cache, (keys, values), jnp.int32(4))
    np.testing.assert_array_equal(cache.suffix_keys[:, :, :, 4], keys)
    np.testing.assert_array_equal(cache.suffix_values[:, :, :, 4], values)
    assert not np.delete(np.asarray(cache.suffix_keys), 4, axis=3).any()
