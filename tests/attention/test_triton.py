"""Tests of the interpreted GPU kernels against dense attention, and of their lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.attention import triton
from spell_jax.attention.kernel import Inputs
from spell_jax.attention.triton import Tile, Tiles
from tests import programs
from tests.attention import packed_rows
from tests.attention.packed_rows import UNSEEING

TIME = 300  # tokens of most rows: not a multiple of a block; tests share the compiled shapes
UNIT = 4  # unit of prompt and answer lengths
UNEQUAL = Tiles(Tile(16, 64, 4, 2), Tile(64, 16, 4, 2), Tile(32, 128, 4, 2))
LONG = 131072


def _row(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return q_index, k_index and last_query of TIME tokens in their order."""
    index = np.arange(TIME, dtype=np.int32)
    return index, index, packed_rows.packed_row(np.random.default_rng(seed), TIME, UNIT)


def _tensors(queries=TIME, keys=TIME, kv_heads=2, heads=2, size=64, seed=0):
    """Sample q, k, v and d_out."""
    rng = np.random.default_rng(seed)
    q, d_out = rng.normal(size=(2, queries, kv_heads, heads, size)).astype(np.float32)
    k, v = rng.normal(size=(2, keys, kv_heads, size)).astype(np.float32)
    return tuple(jnp.asarray(x) for x in (q, k, v, d_out))


@functools.partial(jax.jit, static_argnames="tiles")
def _forward(q, k, v, *indices, tiles=None):
    return triton.forward(Inputs(q, k, v, *indices), tiles=tiles)


@functools.partial(jax.jit, static_argnames="tiles")
def _backward(q, k, v, *arrays, tiles=None):
    *indices, lse, out, d_out = arrays
    delta = jnp.einsum("qkrh,qkrh->krq", d_out.astype(jnp.float32), out.astype(jnp.float32))
    return triton.backward(Inputs(q, k, v, *indices), lse, delta, d_out, tiles=tiles)


def _out_and_gradients(tensors, indices, tiles: Tiles | None = None):
    """Compute output and gradients in one call."""
    *qkv, d_out = tensors
    inputs = Inputs(*qkv, *indices)
    out, lse = triton.forward(inputs, tiles=tiles)
    delta = jnp.einsum("qkrh,qkrh->krq", d_out, out)
    return out, *triton.backward(inputs, lse, delta, d_out, tiles=tiles)


def _check(tensors, indices, tiles: Tiles | None = None) -> None:
    forward, backward = (functools.partial(f, tiles=tiles) for f in (_forward, _backward))
    packed_rows.check(forward, backward, tensors, indices)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "kv_heads", "heads", "seed"),
    [(64, 2, 2, 0), (64, 2, 2, 1), (64, 1, 7, 2), (128, 2, 1, 3)],
)
def test_packed_rows_equal_dense(size: int, kv_heads: int, heads: int, seed: int) -> None:
    indices = _row(seed)
    last_query = indices[2]
    assert len(np.unique(last_query)) > 5 and last_query[-1] == -1
    assert last_query[0] == last_query[64] >= 128  # full pairs
    _check(_tensors(kv_heads=kv_heads, heads=heads, size=size, seed=seed), indices)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 10, 100, 2**30])
def test_windows_equal_dense(window: int) -> None:
    """Queries and keys are in any order; answers restart after their prompt."""
    rng = np.random.default_rng(window % 7)
    _, index, last_query = _row(window % 7)
    position = packed_rows.positions(last_query)
    k_index = np.r_[rng.permutation(64), 64:TIME].astype(np.int32)
    numbers = last_query[k_index], position, position[k_index] + (window - 1)
    tiles = UNEQUAL if window == 10 else None
    _check(_tensors(seed=window % 7), (index, k_index, *numbers), tiles)


@pytest.mark.slow
def test_shuffled_queries_and_keys_equal_dense() -> None:
    rng = np.random.default_rng(4)
    last_query = packed_rows.packed_row(rng, TIME, UNIT)
    q_index = rng.permutation(TIME)[:170].astype(np.int32)
    k_index = rng.permutation(TIME)[:230].astype(np.int32)
    indices = (q_index, k_index, last_query[k_index])
    seeing_queries = np.any(packed_rows.visible_mask(*indices), axis=1)
    assert seeing_queries.any() and not seeing_queries.all()
    _check(_tensors(170, 230, seed=4), indices, UNEQUAL)


@pytest.mark.slow
def test_fully_masked_row_gives_zeros() -> None:
    q, k, v, d_out = _tensors()
    index, _, _ = _row()
    row = (q, k, v, index, index, np.full(TIME, -1, np.int32))
    out, lse = _forward(*row)
    assert not np.any(out) and np.all(lse == UNSEEING)
    for gradient in _backward(*row, lse, out, d_out):
        assert not np.any(gradient)


@pytest.mark.slow
def test_merged_parts_of_the_keys_equal_the_whole() -> None:
    q, k, v, d_out = _tensors(seed=6)
    q_index, k_index, last_query = _row(6)
    whole_out, whole_lse = _forward(q, k, v, q_index, k_index, last_query)
    order = np.random.default_rng(6).permutation(TIME)
    halves = np.sort(order[:150]), order[150:]
    parts = [(q, k[h], v[h], q_index, k_index[h], last_query[h]) for h in halves]
    partial_attentions = [_forward(*part) for part in parts]
    seeing_queries = [lse < UNSEEING / 2 for _, lse in partial_attentions]
    assert not np.all(seeing_queries[0] == seeing_queries[1])
    out, lse = packed_rows.merge(partial_attentions)
    packed_rows.close(out, whole_out)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-5, atol=1e-5)
    expected_gradients = _backward(
        q, k, v, q_index, k_index, last_query, whole_lse, whole_out, d_out
    )
    shares = [_backward(*part, lse, out, d_out) for part in parts]
    packed_rows.close(shares[0][0] + shares[1][0], expected_gradients[0])
    for n in (1, 2):
        for half, share in zip(halves, shares, strict=True):
            packed_rows.close(share[n], expected_gradients[n][half])


@pytest.mark.slow
def test_bfloat16_is_close_to_float32() -> None:
    tensors, indices = _tensors(seed=7), _row(7)
    out, lse = _forward(*tensors[:3], *indices)
    gradients = _backward(*tensors[:3], *indices, lse, out, tensors[3])
    low = [x.astype(jnp.bfloat16) for x in tensors]
    low_out, low_lse = _forward(*low[:3], *indices)
    low_gradients = _backward(*low[:3], *indices, low_lse, low_out, low[3])
    assert low_lse.dtype == jnp.float32
    for x, y in zip((low_out, *low_gradients), (out, *gradients), strict=True):
        assert x.dtype == jnp.bfloat16
        packed_rows.close(x, y, 2e-2)


@pytest.mark.slow
def test_dead_blocks_are_never_read() -> None:
    q, k, v, d_out = _tensors(seed=8)
    index, _, _ = _row()
    # A prompt, two answers and padding, each of whole blocks.
    last_query = np.repeat([191, 127, 191, -1], [64, 64, 64, TIME - 192]).astype(np.int32)
    indices = (index, index, last_query)
    out, lse = _forward(q, k, v, *indices)
    expected_gradients = _backward(q, k, v, *indices, lse, out, d_out)

    def spoil(x):
        return x.at[64:128].set(jnp.nan).at[192:].set(jnp.nan)

    # Only the first answer's queries may see its keys, and no query sees the padding.
    spoiled, _ = _forward(q, spoil(k), spoil(v), *indices)
    other_queries = np.r_[0:64, 128:TIME]
    np.testing.assert_array_equal(spoiled[other_queries], out[other_queries])
    assert np.isnan(spoiled[64:128]).all()
    dirty = [spoil(x) for x in (q, k, v, d_out)]
    dq, dk, dv = _backward(*dirty[:3], *indices, lse, out, dirty[3])
    np.testing.assert_array_equal(dq[other_queries], expected_gradients[0][other_queries])
    assert np.isnan(dq[64:128]).all()
    # The first answer's queries read the prompt's keys, but not the second answer's.
    for gradient, clean in zip((dk, dv), expected_gradients[1:], strict=True):
        np.testing.assert_array_equal(gradient[128:], clean[128:])
        assert np.isnan(gradient[:128]).all()


@pytest.mark.slow
def test_full_block_pairs_are_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries after all keys see all keys, so no pair is masked."""
    tensors, key = _tensors(64, 64, 1, 1, 16), np.arange(64, dtype=np.int32)
    row = (key + 64, key, np.full(64, 127, np.int32))
    expected_out, _, gradients = packed_rows.reference(tensors, row)
    monkeypatch.setattr(triton, "_mask", lambda scores, *_: scores * jnp.nan)
    for x, y in zip(
        jax.jit(_out_and_gradients)(tensors, row), (expected_out, *gradients), strict=True
    ):
        packed_rows.close(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("window", [None, 50])
def test_pair_lists_hold_the_live_block_pairs(by_keys: bool, window: int | None) -> None:
    index, last_query = (
        np.arange(1024, dtype=np.int32),
        packed_rows.packed_row(np.random.default_rng(9), 1024, UNIT),
    )
    last_query[600:] = -1
    block_q, block_k = 16, 32
    of_queries, of_keys = [index], [index, last_query]
    if window is not None:
        position = packed_rows.positions(last_query)
        of_queries, of_keys = [index, position], [*of_keys, position + (window - 1)]
    arrays = (list(map(jnp.asarray, numbers)) for numbers in (of_queries, of_keys))
    pairs = np.asarray(triton.list_pairs(*arrays, block_q, block_k, by_keys))
    mask = packed_rows.visible_mask(index, *of_keys[:2], *of_queries[1:], *of_keys[2:])
    visible = mask.reshape(64, 16, 32, 32)
    any_visible, every = visible.any(axis=(1, 3)), visible.all(axis=(1, 3))
    if by_keys:
        any_visible, every = any_visible.T, every.T
    assert every.any() and pairs.shape == (any_visible.shape[0], 2 + any_visible.shape[1])
    extra = 0
    for (full, live, *order), its_any, its_every in zip(pairs, any_visible, every, strict=True):
        assert sorted(order) == list(range(len(its_any)))
        assert order[:full] == np.flatnonzero(its_every).tolist()
        assert order[full:live] == sorted(order[full:live])
        assert set(np.flatnonzero(its_any)) <= set(order[:live])
        extra += live - its_any.sum()
    # Limits of blocks may count a dead pair as live, but not many.
    assert extra <= any_visible.sum() * 0.3


@pytest.mark.slow
def test_vmapped_rows_with_padded_head_size_equal_dense() -> None:
    tensors = [jnp.stack([x, -x]) for x in _tensors(41, 41, 1, 2, 24)]
    index = np.stack([np.arange(41), np.arange(41)[::-1]]).astype(np.int32)
    readers = np.stack([np.full(41, 40), np.where(index[1] < 20, 19, -1)]).astype(np.int32)
    tiles = Tiles(*[Tile(16, 16, 4, 2)] * 3)
    rows = (tensors, [index, index, readers])
    arrays = jax.jit(jax.vmap(functools.partial(_out_and_gradients, tiles=tiles)))(*rows)
    for n in range(2):
        expected_out, _, gradients = packed_rows.reference(*jax.tree.map(lambda x, n=n: x[n], rows))
        for x, y in zip(arrays, (expected_out, *gradients), strict=True):
            packed_rows.close(x[n], y)


def _abstract(
    dtype, size: int, kv_heads: int = 4, heads: int = 7, rows: tuple[int, ...] = (), windows=False
):
    """Return shapes of backward's arguments for LONG tokens; the first is forward's argument."""

    def array(shape, dtype):
        return jax.ShapeDtypeStruct((*rows, *shape), dtype)

    q, k = (array((LONG, kv_heads, *n, size), dtype) for n in ((heads,), ()))
    index, numbers = array((LONG,), jnp.int32), array((kv_heads, heads, LONG), jnp.float32)
    return Inputs(q, k, k, *[index] * (5 if windows else 3)), numbers, numbers, q


@pytest.mark.parametrize(
    ("dtype", "size", "rows", "windows"),
    [
        (jnp.bfloat16, 64, (), False),
        (jnp.bfloat16, 128, (), False),
        (jnp.bfloat16, 128, (2,), True),
        (jnp.float32, 64, (), True),
        (jnp.float32, 128, (), False),
    ],
)
def test_lowers_for_gpu_without_one(dtype, size: int, rows: tuple[int, ...], windows: bool) -> None:
    args = _abstract(dtype, size, rows=rows, windows=windows)
    for f, inputs, kernels in (
        (triton.forward, args[:1], ["_forward_kernel"]),
        (triton.backward, args, ["_dq_kernel", "_dkv_kernel"]),
    ):
        f = functools.partial(f, interpret=False)
        text = programs.lowered_for_gpu(jax.vmap(f) if rows else f, *inputs)
        assert text.count("custom_call @__gpu$xla.gpu.triton") == len(kernels)
        for kernel in kernels:
            assert f'name = "{kernel}"' in text


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_default_tiles_compile_for_gpu_without_one(dtype, size: int) -> None:
    args = _abstract(dtype, size, windows=True)
    programs.compile_for_gpu(functools.partial(triton.forward, interpret=False), args[0])
    programs.compile_for_gpu(functools.partial(triton.backward, interpret=False), *args)


@pytest.mark.gpu
@pytest.mark.slow
def test_tiles_that_are_too_large_do_not_compile() -> None:
    """The compiler, not the first run, tells of too much shared memory and spilled registers."""
    args, tiles = _abstract(jnp.bfloat16, 256), Tiles(*[Tile(128, 128, 8, 4)] * 3)
    forward = functools.partial(triton.forward, interpret=False, tiles=tiles)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Shared memory size limit exceeded"):
        programs.compile_for_gpu(forward, args[0])
    args, tiles = _abstract(jnp.bfloat16, 128), Tiles(*[Tile(128, 128, 4, 2)] * 3)
    backward = functools.partial(triton.backward, interpret=False, tiles=tiles)
    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        programs.compile_for_gpu(backward, *args)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_dot_products_are_float32_and_memory_is_bounded(dtype) -> None:
    """Sums and products are float32 in full precision; only the lists have T * T entries."""
    args = _abstract(dtype, 64, 1, 1)
    for f, inputs, products in ((triton.forward, args[:1], 4), (triton.backward, args, 14)):
        equations = list(
            programs.equations(jax.make_jaxpr(functools.partial(f, interpret=False))(*inputs).jaxpr)
        )
        dots = [x for x in equations if x.primitive.name == "dot_general"]
        assert len(dots) == products
        for dot in dots:
            assert {x.aval.dtype for x in dot.invars} == {jnp.dtype(dtype)}
            assert dot.params["preferred_element_type"] == jnp.float32
            if dtype == jnp.float32:
                assert dot.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
        # Only operands of products and stored results are rounded to two bytes.
        rounded = [x.outvars[0] for x in equations if x.primitive.name == "convert_element_type"]
        rounded = {id(x) for x in rounded if x.aval.ndim and x.aval.dtype == jnp.bfloat16}
        users = {x.primitive.name for x in equations if rounded & set(map(id, x.invars))}
        assert users == (set() if dtype == jnp.float32 else {"dot_general", "swap"})
        largest = max(x.aval.size for equation in equations for x in equation.outvars)
        tiles = triton.DEFAULT_TILES[args[-1].dtype.itemsize, 64]
        pairs = LONG**2 // min(tile.queries * tile.keys for tile in tiles)
        assert largest <= max(args[-1].size, pairs + 2 * LONG)


def test_unsupported_dtypes_sizes_and_tiles_are_rejected() -> None:
    def run(tiles=None, size=64, dtype=jnp.float32):
        inputs, *_ = _abstract(jnp.float32, size)
        inputs = inputs._replace(v=jax.ShapeDtypeStruct(inputs.k.shape, dtype))
        jax.eval_shape(functools.partial(triton.forward, tiles=tiles), inputs)

    with pytest.raises(ValueError, match="q, k and v are float32, float32 and bfloat16; must"):
        run(dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="head size 512: must be at most 256"):
        run(size=512)
    with pytest.raises(ValueError, match="a block of 96 is no power of two from 16 on"):
        run(Tiles(*[Tile(96, 64, 4, 2)] * 3))
