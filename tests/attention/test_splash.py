"""Tests of the interpreted TPU kernels against dense attention, and of their lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.attention import splash
from spell_jax.attention.kernel import Inputs
from tests.attention import packed_rows
from tests.attention.packed_rows import UNSEEING

KV_HEADS, HEADS = 2, 2
TIME = 600  # tokens of most rows: not a multiple of a block; tests share the compiled shapes
UNIT = 10  # unit of prompt and answer lengths
BLOCKS = splash.Blocks((128, 128), (128, 128), (128, 128))
UNEQUAL_BLOCKS = splash.Blocks((256, 128), (128, 256), (256, 128))


def _tensors(rng, queries: int, keys: int, size: int):
    """Sample q, k, v and d_out."""
    q, d_out = rng.normal(size=(2, queries, KV_HEADS, HEADS, size)).astype(np.float32)
    k, v = rng.normal(size=(2, keys, KV_HEADS, size)).astype(np.float32)
    return tuple(jnp.asarray(x) for x in (q, k, v, d_out))


@functools.partial(jax.jit, static_argnames="blocks")
def _forward(q, k, v, *indices, blocks=BLOCKS):
    return splash.forward(Inputs(q, k, v, *indices), blocks=blocks)


@functools.partial(jax.jit, static_argnames="blocks")
def _backward(q, k, v, *arrays, blocks=BLOCKS):
    *indices, lse, out, d_out = arrays
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    delta = delta.transpose(1, 2, 0)
    return splash.backward(Inputs(q, k, v, *indices), lse, delta, d_out, blocks=blocks)


def _check(tensors, indices, blocks=BLOCKS) -> None:
    forward, backward = (functools.partial(f, blocks=blocks) for f in (_forward, _backward))
    packed_rows.check(forward, backward, tensors, indices)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "seed"), [(64, 0), (64, 3), (128, 11)])
def test_packed_rows_equal_dense(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    index, last_query = np.arange(TIME, dtype=np.int32), packed_rows.packed_row(rng, TIME, UNIT)
    assert len(np.unique(last_query)) > 5 and last_query[0] == last_query[255]  # full pairs
    _check(_tensors(rng, TIME, TIME, size), (index, index, last_query))


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 30, 200, 2**30])
def test_windows_equal_dense(window: int) -> None:
    """Queries and keys are parts of a row in any order; answers restart after their prompt."""
    rng = np.random.default_rng(window % 7)
    last_query = packed_rows.packed_row(rng, TIME, UNIT)
    position = packed_rows.positions(last_query)
    q_index = np.arange(TIME, dtype=np.int32)
    k_index = np.r_[rng.permutation(256), 256:TIME].astype(np.int32)
    numbers = last_query[k_index], position, position[k_index] + (window - 1)
    tensors = _tensors(rng, TIME, TIME, 64)
    _check(tensors, (q_index, k_index, *numbers))


@pytest.mark.slow
def test_partial_row_with_shuffled_queries_equals_dense() -> None:
    rng = np.random.default_rng(3)
    last_query, first = packed_rows.packed_row(rng, 600, UNIT)[150:450], 150
    q_index = rng.permutation(600)[:200].astype(np.int32)
    k_index = first + np.arange(300, dtype=np.int32)
    seeing_queries = np.any(packed_rows.visible_mask(q_index, k_index, last_query), axis=1)
    assert seeing_queries.any() and not seeing_queries.all()
    tensors = _tensors(rng, 200, 300, 64)
    _check(tensors, (q_index, k_index, last_query))


@pytest.mark.slow
def test_shuffled_keys_equal_dense() -> None:
    rng = np.random.default_rng(4)
    order = rng.permutation(TIME).astype(np.int32)
    tensors = _tensors(rng, 200, TIME, 64)
    q_index, last_query = (
        np.arange(250, 450, dtype=np.int32),
        packed_rows.packed_row(rng, TIME, UNIT)[order],
    )
    _check(tensors, (q_index, order, last_query), UNEQUAL_BLOCKS)


def test_fully_masked_row_gives_zeros() -> None:
    rng = np.random.default_rng(5)
    q, k, v, d_out = _tensors(rng, TIME, TIME, 64)
    index, last_query = np.arange(TIME, dtype=np.int32), np.full(TIME, -1, np.int32)
    out, lse = _forward(q, k, v, index, index, last_query)
    assert not np.any(out) and np.all(lse == UNSEEING)
    for gradient in _backward(q, k, v, index, index, last_query, lse, out, d_out):
        assert not np.any(gradient)


@pytest.mark.slow
def test_merged_halves_of_the_keys_equal_the_whole() -> None:
    rng = np.random.default_rng(6)
    q, k, v, d_out = _tensors(rng, TIME, TIME, 64)
    index, last_query = np.arange(TIME, dtype=np.int32), packed_rows.packed_row(rng, TIME, UNIT)
    whole_out, whole_lse = _forward(q, k, v, index, index, last_query)
    halves = [slice(0, TIME // 2), slice(TIME // 2, TIME)]

    def part(half):
        return (q, k[half], v[half], index, index[half], last_query[half])

    parts = [_forward(*part(half)) for half in halves]
    out, lse = packed_rows.merge(parts)
    packed_rows.close(out, whole_out)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-5, atol=1e-5)
    expected_gradients = _backward(q, k, v, index, index, last_query, whole_lse, whole_out, d_out)
    half_gradients = [_backward(*part(half), lse, out, d_out) for half in halves]
    packed_rows.close(half_gradients[0][0] + half_gradients[1][0], expected_gradients[0])
    for n in (1, 2):
        packed_rows.close(
            jnp.concatenate([half_gradients[0][n], half_gradients[1][n]]), expected_gradients[n]
        )


@pytest.mark.slow
def test_bfloat16_is_close_to_float32() -> None:
    rng = np.random.default_rng(7)
    tensors = _tensors(rng, TIME, TIME, 64)
    index, last_query = np.arange(TIME, dtype=np.int32), packed_rows.packed_row(rng, TIME, UNIT)
    out, lse = _forward(*tensors[:3], index, index, last_query)
    gradients = _backward(*tensors[:3], index, index, last_query, lse, out, tensors[3])
    low = [x.astype(jnp.bfloat16) for x in tensors]
    low_out, low_lse = _forward(*low[:3], index, index, last_query)
    low_gradients = _backward(*low[:3], index, index, last_query, low_lse, low_out, low[3])
    assert low_lse.dtype == jnp.float32
    for x, y in zip((low_out, *low_gradients), (out, *gradients), strict=True):
        assert x.dtype == jnp.bfloat16
        packed_rows.close(x, y, 2e-2)


@pytest.mark.slow
def test_dead_blocks_are_never_read() -> None:
    rng = np.random.default_rng(8)
    q, k, v, d_out = _tensors(rng, TIME, TIME, 64)
    index = np.arange(TIME, dtype=np.int32)
    # A prompt, two answers and padding, each of whole blocks.
    last_query = np.repeat([383, 255, 383, -1], [128, 128, 128, TIME - 384]).astype(np.int32)
    out, lse = _forward(q, k, v, index, index, last_query)
    gradients = _backward(q, k, v, index, index, last_query, lse, out, d_out)

    def spoil(x, *spans):
        for span in spans:
            x = x.at[span].set(jnp.nan)
        return x

    # The first answer's keys are spoiled too: only its own queries may change.
    spans = (slice(128, 256), slice(384, TIME))
    spoiled, _ = _forward(q, spoil(k, *spans), spoil(v, *spans), index, index, last_query)
    other_queries = np.r_[0:128, 256:TIME]
    np.testing.assert_array_equal(spoiled[other_queries], out[other_queries])
    assert np.isnan(spoiled[128:256]).all()
    # Backward: queries and keys of the padding, which no query sees.
    dirty = [spoil(x, spans[1]) for x in (q, k, v, d_out)]
    dirty_gradients = _backward(*dirty[:3], index, index, last_query, lse, out, dirty[3])
    for x, y in zip(dirty_gradients, gradients, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("window", [None, 256])
def test_pair_list_holds_the_live_block_pairs_in_runs(by_keys: bool, window: int | None) -> None:
    rng = np.random.default_rng(9)
    index, last_query = np.arange(1024, dtype=np.int32), packed_rows.packed_row(rng, 1024, UNIT)
    last_query[600:] = -1
    position = packed_rows.positions(last_query)
    of_queries, of_keys = [index], [index, last_query]
    if window is not None:
        of_queries, of_keys = [index, position], [*of_keys, position + (window - 1)]
    arrays = (list(map(jnp.asarray, numbers)) for numbers in (of_queries, of_keys))
    pairs = splash.list_pairs(*arrays, 64, 128, by_keys)
    words = [int(word) for word in np.asarray(pairs.words)[: int(pairs.count)]]
    mask = packed_rows.visible_mask(index, *of_keys[:2], *of_queries[1:], *of_keys[2:])
    visible = mask.reshape(16, 64, 8, 128).transpose(0, 2, 1, 3)
    any_visible, every = visible.any(axis=(2, 3)), visible.all(axis=(2, 3))
    assert every.any()
    places = [(word >> 17, word >> 4 & 8191) for word in words]
    kinds = {place: word & 3 for place, word in zip(places, words, strict=True)}
    assert len(kinds) == len(words)
    runs = [place[by_keys] for place in places]
    assert runs == sorted(runs) and set(runs) == set(range(8 if by_keys else 16))
    assert set(zip(*np.nonzero(any_visible), strict=True)) <= set(kinds)
    assert {p for p, kind in kinds.items() if kind == 2} == set(
        zip(*np.nonzero(every), strict=True)
    )
    # Limits of blocks may count a dead pair as live, but not many; one dead pair per dead run.
    assert sum(kind > 0 for kind in kinds.values()) <= any_visible.sum() * 1.3
    assert any(kind == 0 for kind in kinds.values())
    for n, (run, word) in enumerate(zip(runs, words, strict=True)):
        assert bool(word & 8) == (n == 0 or runs[n - 1] != run)
        assert bool(word & 4) == (n + 1 == len(runs) or runs[n + 1] != run)
        assert word & 3 or word & 12 == 12


@pytest.mark.slow
def test_rows_with_different_masks_under_lax_map_equal_dense() -> None:
    rng = np.random.default_rng(10)
    q, k, v, _ = _tensors(rng, 256, 256, 64)
    index = np.arange(256, dtype=np.int32)
    readers = jnp.stack([jnp.full(256, 255), jnp.where(index < 100, 99, -1)]).astype(jnp.int32)

    @jax.jit
    def rows(readers):
        return jax.lax.map(
            lambda x: splash.forward(Inputs(q, k, v, index, index, x), blocks=BLOCKS), readers
        )

    out, _ = rows(readers)
    for row, last_query in zip(out, readers, strict=True):
        packed_rows.close(row, packed_rows.dense(q, k, v, index, index, last_query)[0])


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_lowers_for_tpu_without_one(dtype, windows: bool) -> None:
    q = jax.ShapeDtypeStruct((4096, KV_HEADS, 7, 64), dtype)
    k = jax.ShapeDtypeStruct((8192, KV_HEADS, 64), dtype)
    numbers = jax.ShapeDtypeStruct((KV_HEADS, 7, 4096), jnp.float32)
    q_index, last_query = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (4096, 8192))

    positions = (q_index, last_query) if windows else ()

    def lowered(f, *args) -> str:
        f = jax.jit(functools.partial(f, interpret=False))
        return (
            f.trace(Inputs(q, k, k, q_index, last_query, last_query, *positions), *args)
            .lower(lowering_platforms=("tpu",))
            .as_text()
        )

    assert lowered(splash.forward).count("stablehlo.custom_call @tpu_custom_call") == 1
    backward_text = lowered(splash.backward, numbers, numbers, q)
    assert backward_text.count("stablehlo.custom_call @tpu_custom_call") == 2


def test_blocks_fit_the_row_and_invalid_sizes_are_rejected() -> None:
    assert splash._block_size(1024, 100) == 128
    assert splash._block_size(1024, 1100) == 640
    assert splash._block_size(1024, 131072) == 1024
    with pytest.raises(ValueError, match="a block of 100 is no positive multiple of 128"):
        splash._block_size(100, 4096)
    index = jax.ShapeDtypeStruct((2**20,), jnp.int32)
    pairs = functools.partial(splash.list_pairs, block_q=1024, block_k=1024, by_keys=False)
    with pytest.raises(ValueError, match="1024 by 1024 blocks"):
        jax.eval_shape(lambda *x: pairs(*x).words, [index], [index, index])
