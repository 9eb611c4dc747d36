"""Tests of the interpreted TPU kernel for paged attention against XLA, and of its lowering."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from spell_jax.attention import paged, paged_tpu
from spell_jax.attention.pages import Pages, quantize

LAYERS, PAGES, BLOCK, SIZE, TABLE = 2, 14, 8, 16, 5
LONGEST = TABLE * BLOCK
USUAL = 8, 2, 14, 2  # rows, time, heads, kv_heads
# Copies arrive only when they are waited for; memory that was never written holds NaN.
LATE = pltpu.InterpretParams(uninitialized_memory="nan")


# Chunks of up to 4 pages in pieces of 2, of 2 key heads in float32; 16 queries per step.
SMALL = {
    "_CHUNK": 4 * 2 * 2 * BLOCK * SIZE * 4,
    "_PIECE": 2 * BLOCK,
    "_STEP": 16 * 2 * SIZE * 4,
}


@functools.partial(jax.jit, static_argnames=("parts", "interpret", "small"))
def _attend(
    q, pages, layer, table, visible, part=0, parts=1, first=None, interpret=True, small=True
):
    with mock.patch.multiple(paged_tpu, **(SMALL if small else {"_PIECE": paged_tpu._PIECE})):
        share = (part, parts)
        return paged_tpu.attend(q, pages, layer, table, visible, share, first, interpret=interpret)


@functools.partial(jax.jit, static_argnames="parts")
def _xla_attend(q, pages, layer, table, visible, part=0, parts=1, first=None):
    arguments = q, pages, layer, table, visible, (part, parts), first
    return paged.attend_in_steps(*arguments, sizes=paged.ON_CPU)


def _close(arrays, expected_arrays, atol: float = 1e-5) -> None:
    for array, expected in zip(arrays, expected_arrays, strict=True):
        assert array.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(array), np.asarray(expected), atol=atol, rtol=atol)


def _case(rows: int, time: int, heads: int, kv_heads: int, seed: int = 0, dtype=np.float32):
    """Make q, pages, table, visible: some queries see nothing, one all, one a single key.

    The row in the middle sees nothing.
    """
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.normal(size=(rows, time, heads, SIZE)), dtype)
    keys, values = 2 * rng.normal(size=(2, LAYERS, PAGES, kv_heads, BLOCK, SIZE))
    table = np.array([rng.permutation(PAGES)[:TABLE] for _ in range(rows)], np.int32)
    visible = rng.integers(0, LONGEST + 1, size=(rows, time)).astype(np.int32)
    visible[rows // 2] = 0
    visible[-1, 0], visible[0, -1] = 1, LONGEST
    return q, Pages(jnp.asarray(keys, dtype), jnp.asarray(values, dtype)), table, visible


# -------------------------------------------------------------------------------------- Attention


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows, time, heads, kv_heads", [(1, 1, 2, 2), USUAL, (3, 8, 7, 1), (2, 24, 14, 2)]
)
def test_equals_xla_attention_in_every_layer(rows, time, heads, kv_heads) -> None:
    q, pages, table, visible = _case(rows, time, heads, kv_heads)
    for layer in range(LAYERS):
        expected_attention = _xla_attend(q, pages, layer, table, visible)
        _close(_attend(q, pages, layer, table, visible), expected_attention)


@pytest.mark.slow
def test_default_sizes_equal_xla_attention() -> None:
    q, pages, table, visible = _case(2, 24, 14, 2, seed=1)
    expected_attention = _xla_attend(q, pages, 1, table, visible)
    _close(_attend(q, pages, 1, table, visible, small=False), expected_attention)


@pytest.mark.slow
def test_every_number_of_visible_keys_equals_xla() -> None:
    """One row for each number of visible keys, in any order.

    The number of rows is odd, so that one core has all rows.
    """
    q, pages, table, _ = _case(LONGEST + 1, 1, 4, 2, seed=2)
    visible = np.random.default_rng(0).permutation(LONGEST + 1).astype(np.int32)[:, None]
    attention = _attend(q, pages, 1, table, visible)
    _close(attention, _xla_attend(q, pages, 1, table, visible))


@pytest.mark.slow
@pytest.mark.parametrize("seeing", [[], [0], [5], [2, 3, 7], [0, 1, 6], range(8)])
def test_kernel_waits_for_its_copies(seeing: list[int]) -> None:
    """Rows without visible keys lie between others, whichever buffer the previous row ended in.

    Memory that was never written holds NaN.
    """
    q, pages, table, visible = _case(*USUAL, seed=3)
    lengths = np.array([[3, 40], [33, 17], [0, 9], [40, 40], [1, 1], [20, 2], [0, 25], [40, 0]])
    visible[:] = 0
    visible[list(seeing)] = lengths[list(seeing)]
    out, lse = _attend(q, pages, 0, table, visible, interpret=LATE)
    _close((out, lse), _xla_attend(q, pages, 0, table, visible))
    assert not np.any(np.asarray(out)[visible == 0])
    assert np.all(np.asarray(lse)[visible == 0] == np.float32(paged.UNSEEN))


def test_prompt_tokens_attend_causally() -> None:
    """Use blocks of queries that end on different pages."""
    q, pages, table, _ = _case(2, 24, 14, 2, seed=4)
    visible = (np.array([0, 15])[:, None] + np.arange(24) + 1).astype(np.int32)
    visible[1, 20:] = 0
    _close(_attend(q, pages, 1, table, visible), _xla_attend(q, pages, 1, table, visible))


@pytest.mark.parametrize("parts", [1, 2])
def test_windows_equal_xla_attention(parts: int) -> None:
    """Some queries of a row see keys of later pages only, some see nothing."""
    q, pages, table, visible = _case(*USUAL, seed=8)
    rng = np.random.default_rng(8)
    first = np.maximum(visible - rng.integers(0, 20, size=visible.shape), 0).astype(np.int32)
    visible[3] = [9, 0]
    first[3] = [9, 0]
    arguments = q, pages, 1, table, visible, parts - 1, parts
    _close(_attend(*arguments, first=first), _xla_attend(*arguments, first=first))


def test_pages_that_no_query_sees_are_not_read() -> None:
    q, pages, table, visible = _case(*USUAL, seed=5)
    table[:, :3] = np.minimum(table[:, :3], PAGES - 2)
    table[:, 3:] = PAGES - 1  # in the table, but after the visible keys
    visible = np.minimum(visible, 3 * BLOCK)
    expected_attention = _xla_attend(q, pages, 1, table, visible)
    spoiled = Pages(*(x.at[:, -1].set(jnp.nan) for x in (pages.keys, pages.values)))
    _close(_attend(q, spoiled, 1, table, visible), expected_attention)


def test_extreme_scores_give_finite_results() -> None:
    q, pages, table, visible = _case(*USUAL, seed=6)
    for factor in (60.0, -60.0):
        expected_attention = _xla_attend(factor * q, pages, 0, table, visible)
        _close(_attend(factor * q, pages, 0, table, visible), expected_attention, atol=1e-4)
        assert np.abs(np.asarray(expected_attention[1])[visible > 0]).max() > 200


@pytest.mark.slow
def test_bfloat16_pages_and_queries_are_close_to_float32() -> None:
    q, pages, table, visible = _case(*USUAL, seed=7)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (q, pages))
    q, pages = jax.tree.map(lambda x: x.astype(jnp.float32), low)
    attention = _attend(*low, 1, table, visible)
    _close(attention, _xla_attend(q, pages, 1, table, visible), atol=5e-2)


# ------------------------------------------------------------------------------------------- int8


def _in_int8(pages: Pages) -> tuple[Pages, Pages]:
    """Return pages in int8, and pages with the dequantized values.

    Tokens differ so much in size that a wrong scale, or none, gives a result that is far off.
    """
    size = 2.0 ** np.random.default_rng(0).integers(-3, 2, size=(*pages.keys.shape[:4], 1))
    size = size.astype(np.float32)
    keys, key_scales = quantize(pages.keys * size)
    values, value_scales = quantize(pages.values * size[:, ::-1])
    dequantized_pages = Pages(keys * key_scales[..., None], values * value_scales[..., None])
    return Pages(keys, values, key_scales, value_scales), dequantized_pages


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "atol"), [(jnp.float32, 1e-5), (jnp.bfloat16, 5e-2)])
def test_int8_equals_attention_to_dequantized_values(dtype, atol: float) -> None:
    q, pages, table, visible = _case(*USUAL, seed=8)
    pages, dequantized_pages = _in_int8(pages)
    assert pages.keys.dtype == jnp.int8
    attention = _attend(q.astype(dtype), pages, 1, table, visible)
    _close(attention, _xla_attend(q, dequantized_pages, 1, table, visible), atol)


# ------------------------------------------------------------------------------------------ Parts


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
def test_merged_parts_of_pages_equal_full_attention(int8: bool) -> None:
    q, pages, table, visible = _case(*USUAL, seed=10)
    stored_pages, exact_pages = _in_int8(pages) if int8 else (pages, pages)

    def half(pages: Pages, part: int) -> Pages:
        return jax.tree.map(lambda x: jnp.split(x, 2, axis=3)[part], pages)

    partial_attentions = [
        _attend(q, half(stored_pages, i), 1, table, visible, i, 2) for i in range(2)
    ]
    for i in range(2):
        _close(partial_attentions[i], _xla_attend(q, half(exact_pages, i), 1, table, visible, i, 2))
    _close(paged.merge(*partial_attentions), _xla_attend(q, exact_pages, 1, table, visible))
    blind = [np.asarray(lse) == np.float32(paged.UNSEEN) for _, lse in partial_attentions]
    assert np.any(blind[1] & ~blind[0]), "the case should have parts that see nothing"


@pytest.mark.slow
def test_kernel_runs_in_a_layer_scan_under_shard_map() -> None:
    """Called as by the sampler: in shard_map, in a scan over layers, with a traced part."""
    q, pages, table, visible = _case(2, 2, 4, 2, seed=11)
    mesh = jax.make_mesh((2,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))

    def on_device(q, pages):
        share = (jax.lax.axis_index("context"), 2)

        def in_layer(x, layer):
            out, lse = paged_tpu.attend(x, pages, layer, table, visible, share, interpret=True)
            weight = jax.nn.softmax(jax.lax.all_gather(lse, "context"), axis=0)[share[0]]
            return x + jax.lax.psum(out * weight[..., None], "context"), None

        return jax.lax.scan(in_layer, q, jnp.arange(LAYERS))[0]

    split = PartitionSpec(None, None, None, "context")
    specs = {"in_specs": (PartitionSpec(), split), "out_specs": PartitionSpec()}
    with jax.set_mesh(mesh):
        sharded_out = jax.jit(jax.shard_map(on_device, check_vma=False, **specs))(q, pages)
    expected_out = q
    for layer in range(LAYERS):
        expected_out = expected_out + _xla_attend(expected_out, pages, layer, table, visible)[0]
    np.testing.assert_allclose(sharded_out, expected_out, atol=1e-4, rtol=1e-4)


# ----------------------------------------------------------------------------------------- Shapes


def _shapes(rows, time, heads, kv_heads, block, table, size=128, q=jnp.bfloat16, pool_dtype=None):
    """Return the shapes of attend's q, pages, layer, table and visible."""
    pool_dtype, number = pool_dtype or q, jax.ShapeDtypeStruct
    pool = number((2, 9, kv_heads, block, size), pool_dtype)
    scales = number(pool.shape[:4], jnp.float32) if pool_dtype == jnp.int8 else None
    return (
        number((rows, time, heads, size), q),
        Pages(pool, pool, scales, scales),
        number((), jnp.int32),
        number((rows, table), jnp.int32),
        number((rows, time), jnp.int32),
    )


@pytest.mark.parametrize("pool_dtype", [jnp.bfloat16, jnp.int8, jnp.float32])
def test_lowers_for_tpu_without_one(pool_dtype) -> None:
    dtype = jnp.float32 if pool_dtype == jnp.float32 else jnp.bfloat16
    for rows, time in ((64, 8), (3, 512)):
        shapes = _shapes(rows, time, 28, 4, 128, 144, q=dtype, pool_dtype=pool_dtype)
        attend = jax.jit(functools.partial(paged_tpu.attend, share=(1, 2)))
        with_window = attend.trace(*shapes, first_visible=shapes[-1])
        text = with_window.lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("stablehlo.custom_call @tpu_custom_call") == 1
        text = attend.trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("stablehlo.custom_call @tpu_custom_call") == 1
        # XLA would otherwise copy the scales of all layers to VMEM, for every layer.
        assert text.count("operand_index") == (4 if pool_dtype == jnp.int8 else 2)


def test_block_sizes_of_typical_shapes() -> None:
    def cut(*shape, **types):
        q, pages, _, table, _ = _shapes(*shape, **types)
        assert paged_tpu.fits(q, pages, table)
        return tuple(paged_tpu._block_sizes(q, pages, table.shape[1]))

    assert cut(64, 8, 28, 4, 128, 144) == (64, 1, 4, 8)
    assert cut(64, 8, 28, 4, 128, 144, pool_dtype=jnp.int8) == (64, 1, 4, 16)
    assert cut(512, 1, 28, 4, 512, 4) == (16, 1, 1, 2)
    assert cut(512, 1, 28, 4, 128, 1) == (16, 1, 1, 1)
    assert cut(16, 512, 28, 4, 512, 36) == (512, 7, 1, 2)
    assert cut(16, 512, 28, 4, 1024, 36) == (256, 14, 1, 1)


def test_fits_is_false_for_shapes_that_do_not_fit_a_tpu() -> None:
    def fits(*shape, **types) -> bool:
        q, pages, _, table, _ = _shapes(*shape, **types)
        return paged_tpu.fits(q, pages, table)

    assert fits(1, 1, 8, 4, 16, 5) and not fits(1, 1, 8, 4, 8, 5)  # half a tile
    assert fits(1, 1, 8, 4, 8, 5, q=jnp.float32)
    assert fits(1, 1, 8, 4, 128, 5, pool_dtype=jnp.int8) and not fits(
        1, 1, 8, 4, 64, 5, pool_dtype=jnp.int8
    )
    assert not fits(1, 1, 8, 4, 128, 5, size=64)
    assert fits(1, 1, 8, 4, 1024, 5) and not fits(1, 1, 8, 8, 1024, 5)
    assert not fits(1, 1, 8, 8, 1024, 5, pool_dtype=jnp.int8)
    assert fits(1, 1, 8, 4, 64, 2**15) and not fits(1, 1, 8, 4, 64, 2**15 + 1)
