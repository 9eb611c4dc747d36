"""Tests of the interpreted GPU kernels for paged attention against XLA, and of their lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from spell_jax.attention import paged, paged_triton
from spell_jax.attention.paged_triton import Tile
from spell_jax.attention.pages import Pages
from tests import programs

LAYERS, PAGES, BLOCK, SIZE = 2, 9, 32, 16
TABLE = 4
LONGEST = TABLE * BLOCK
HALF_PAGES, TWO_PAGES = Tile(16, 16, 4, 2), Tile(16, 64, 4, 2)  # by the size of a block of keys


@functools.partial(jax.jit, static_argnames=("parts", "tile"))
def _triton_attend(q, pages, layer, table, visible, part=0, parts=1, tile=None, first=None):
    return paged_triton.attend(q, pages, layer, table, visible, (part, parts), first, tile=tile)


# On a CPU this is attend_in_steps, which test_paged.py compares with numpy.
_xla_attend = jax.jit(paged.attend)


def _pool(rng: np.random.Generator, kv_heads: int, size: int = SIZE, block: int = BLOCK) -> Pages:
    keys, values = 2 * rng.normal(size=(2, LAYERS, PAGES, kv_heads, block, size))
    return Pages(jnp.asarray(keys, jnp.float32), jnp.asarray(values, jnp.float32))


def _case(rows=5, time=3, heads=4, kv_heads=2, size=SIZE, block=BLOCK, seed=0):
    """Make q, pages, layer, table, visible: one row sees nothing, others parts, one query all."""
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.normal(size=(rows, time, heads, size)), jnp.float32)
    table = np.array([rng.permutation(PAGES)[:TABLE] for _ in range(rows)]).astype(np.int32)
    table[1::2, :2] = table[0, :2]
    visible = rng.integers(0, TABLE * block + 1, size=(rows, time)).astype(np.int32)
    visible[rows // 2] = 0
    visible[0, 0], visible[-1, -1] = 1, TABLE * block
    return q, _pool(rng, kv_heads, size, block), jnp.int32(1), table, visible


def _close(arrays, expected_arrays, atol: float = 2e-5) -> None:
    for array, expected in zip(arrays, expected_arrays, strict=True):
        assert array.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(array), np.asarray(expected), atol=atol, rtol=atol)


# -------------------------------------------------------------------------------------- Attention


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "time", "heads", "kv_heads", "tile"),
    [
        (5, 3, 4, 2, HALF_PAGES),
        (5, 3, 4, 2, TWO_PAGES),
        (1, 1, 2, 2, None),
        (3, 8, 14, 2, TWO_PAGES),
        (2, 24, 7, 1, None),
    ],
)
def test_equals_xla_attention(rows, time, heads, kv_heads, tile) -> None:
    case = _case(rows, time, heads, kv_heads)
    _close(_triton_attend(*case, tile=tile), _xla_attend(*case))


@pytest.mark.slow
@pytest.mark.parametrize("tile", [HALF_PAGES, TWO_PAGES])
def test_every_number_of_visible_keys_equals_xla(tile) -> None:
    """No key at the edge of a page or block is lost or extra."""
    q, pages, layer, table, _ = _case(LONGEST + 1, 1, 2, 1, seed=1)
    visible = np.random.default_rng(0).permutation(LONGEST + 1).astype(np.int32)[:, None]
    case = q, pages, layer, table, visible
    _close(_triton_attend(*case, tile=tile), _xla_attend(*case))


def test_queries_without_visible_keys_get_zeros() -> None:
    q, pages, layer, table, visible = _case(seed=2)
    visible[1] = [0, 9, 0]  # in a row with and without queries that see keys
    blind = visible == 0
    for blind_queries in (blind, np.full_like(blind, True)):
        out, lse = _triton_attend(
            q, pages, layer, table, np.where(blind_queries, 0, visible), tile=HALF_PAGES
        )
        assert not np.any(np.asarray(out)[blind_queries])
        assert np.all(np.asarray(lse)[blind_queries] == np.float32(paged.UNSEEN))
        assert np.all(np.abs(np.asarray(lse)[~blind_queries]) < 100)


@pytest.mark.slow
def test_prompt_tokens_attend_causally() -> None:
    """Many units per row, each of which reads its row's table."""
    q, pages, layer, table, _ = _case(3, 40, 2, 1, seed=3)
    visible = np.array([0, 37, 88], np.int32)[:, None] + np.arange(40, dtype=np.int32) + 1
    visible[2, 30:] = 0
    case = q, pages, layer, table, visible
    _close(_triton_attend(*case, tile=HALF_PAGES), _xla_attend(*case))


def test_keys_past_the_visible_count_have_no_effect() -> None:
    q, pages, layer, table, visible = _case(seed=4)
    visible = np.minimum(visible, BLOCK + 9)
    expected_attention = _triton_attend(q, pages, layer, table, visible, tile=TWO_PAGES)
    table = table.copy()
    table[:, 2:] = [10**6, -1]  # no page at all
    attention = _triton_attend(q, pages, layer, table, visible, tile=TWO_PAGES)
    # Tables are read to the end of the longest row, from the tenth token of a second page on.
    second = np.setdiff1d(table[:, 1], table[:, 0])
    keys, values = (x.at[:, second, :, 9:].set(1e3) for x in (pages.keys, pages.values))
    spoiled_attention = _triton_attend(
        q, Pages(keys, values), layer, table, visible, tile=TWO_PAGES
    )
    for results in (attention, spoiled_attention):
        for array, expected in zip(results, expected_attention, strict=True):
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(("tile", "parts"), [(HALF_PAGES, 1), (TWO_PAGES, 1), (HALF_PAGES, 2)])
def test_windows_equal_xla_attention(tile: Tile, parts: int) -> None:
    q, pages, layer, table, visible = _case(seed=14)
    rng = np.random.default_rng(14)
    first = np.maximum(visible - rng.integers(0, 70, size=visible.shape), 0).astype(np.int32)
    visible[1], first[1] = [40, 0, 33], [40, 0, 32]  # two queries see nothing
    arguments = q, pages, layer, table, visible
    pools = [
        Pages(*(jnp.split(x, parts, 3)[i] for x in (pages.keys, pages.values)))
        for i in range(parts)
    ]
    partial_attentions = [
        _triton_attend(q, pool, *arguments[2:], i, parts, tile, first)
        for i, pool in enumerate(pools)
    ]
    _close(paged.merge(*partial_attentions), _xla_attend(*arguments, first_visible=first))


def test_extreme_scores_give_finite_results() -> None:
    q, *other_arguments = _case(seed=5)
    for factor in (60.0, -60.0):
        attention = _triton_attend(factor * q, *other_arguments, tile=HALF_PAGES)
        expected = _xla_attend(factor * q, *other_arguments)
        _close(attention, expected, atol=2e-4)
        assert np.abs(np.asarray(expected[1]))[np.asarray(expected[1]) > paged.UNSEEN].max() > 200


@pytest.mark.slow
@pytest.mark.parametrize("tile", [HALF_PAGES, TWO_PAGES])
def test_head_size_need_not_be_a_power_of_two(tile) -> None:
    case = _case(2, 2, 4, 2, size=24, seed=6)
    _close(_triton_attend(*case, tile=tile), _xla_attend(*case))


@pytest.mark.slow
def test_bfloat16_is_close_to_float32() -> None:
    q, pages, *other_arguments = _case(seed=7)
    low = Pages(*(x.astype(jnp.bfloat16) for x in (pages.keys, pages.values)))
    exact = Pages(*(x.astype(jnp.float32) for x in (low.keys, low.values)))
    rounded = q.astype(jnp.bfloat16)
    expected_attention = _xla_attend(rounded.astype(jnp.float32), exact, *other_arguments)
    # Weights are rounded; with float32 queries nothing is.
    _close(
        _triton_attend(rounded, low, *other_arguments, tile=TWO_PAGES),
        expected_attention,
        atol=2e-2,
    )
    _close(
        _triton_attend(rounded.astype(jnp.float32), low, *other_arguments, tile=TWO_PAGES),
        expected_attention,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "dtype", "atol"),
    [
        (HALF_PAGES, jnp.float32, 2e-5),
        (TWO_PAGES, jnp.float32, 2e-5),
        (TWO_PAGES, "bfloat16", 5e-2),
    ],
)
def test_int8_equals_attention_to_dequantized_values(tile, dtype, atol: float) -> None:
    q, pages, *other_arguments = _case(seed=8)
    rng = np.random.default_rng(8)
    numbers = rng.integers(-127, 128, size=(2, *pages.keys.shape)).astype(np.int8)
    scales = (rng.uniform(0.2, 3, size=numbers.shape[:-1]) / 127).astype(np.float32)
    real = Pages(*jnp.asarray(numbers * scales[..., None]))
    coarse = Pages(*jnp.asarray(numbers), *jnp.asarray(scales))
    attention = _triton_attend(q.astype(dtype), coarse, *other_arguments, tile=tile)
    _close(attention, _xla_attend(q, real, *other_arguments), atol)


# ------------------------------------------------------------------------------- Jobs, parts, loops


_list_jobs = jax.jit(paged_triton.list_jobs, static_argnums=(1, 2, 3))


def _check_jobs(blocks: np.ndarray, pieces: int, most_blocks: int) -> np.ndarray:
    """Check that jobs cover the blocks of all units once, in order; return the jobs' lengths."""
    jobs, spans = (np.asarray(x) for x in _list_jobs(blocks, 3, most_blocks, pieces))
    assert jobs.dtype == spans.dtype == np.int32
    assert len(jobs) <= len(blocks) + pieces
    lengths = jobs[:, 3] - jobs[:, 2]
    used = spans[-1, 1]
    assert np.all(lengths[:used] > 0) and not np.any(lengths[used:])
    for unit, (begin, end) in enumerate(spans):
        unit_jobs = jobs[begin:end]
        assert np.all(unit_jobs[:, 0] == unit) and np.all(unit_jobs[:, 1] == unit // 3)
        covered = [n for _, _, first, last in unit_jobs for n in range(first, last)]
        assert covered == list(range(blocks[unit]))
    return lengths


def test_jobs_cover_all_blocks_once_in_nearly_equal_pieces() -> None:
    rng = np.random.default_rng(9)
    for pieces, most_blocks in ((1, 400), (7, 50), (40, 3), (40, 400)):
        blocks = rng.integers(0, most_blocks + 1, size=6).astype(np.int32)
        blocks[2], blocks[4] = 0, most_blocks
        lengths = _check_jobs(blocks, pieces, most_blocks)
        allowed = max(-(-blocks.sum() // pieces), paged_triton.FEWEST)
        assert lengths.max() <= allowed
    # One long row among short ones: only the long one is split.
    lengths = _check_jobs(np.array([392, 3, 3, 3, 0, 0], np.int32), 40, 400)
    assert np.sum(lengths > 3) == 36 and lengths.max() == 11
    assert not np.any(_check_jobs(np.zeros(6, np.int32), 40, 400))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 500])
def test_number_of_jobs_does_not_change_the_result(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job per unit, or one per block: 16 for some units, more than are merged at once."""
    case = _case(2, 3, 2, 1, block=2 * BLOCK, seed=10)
    monkeypatch.setattr(paged_triton, "PROGRAMS", count)
    monkeypatch.setattr(paged_triton, "FEWEST", 1)
    attend = jax.jit(functools.partial(paged_triton.attend, tile=HALF_PAGES))
    _close(attend(*case), _xla_attend(*case))


@pytest.mark.slow
def test_merged_parts_of_pages_equal_full_attention() -> None:
    q, pages, layer, table, visible = _case(seed=11)
    split = [jnp.split(x, 2, axis=3) for x in (pages.keys, pages.values)]
    partial_attentions = [
        _triton_attend(
            q, Pages(*keys_and_values), layer, table, visible, jnp.int32(i), 2, tile=HALF_PAGES
        )
        for i, keys_and_values in enumerate(zip(*split, strict=True))
    ]
    _close(paged.merge(*partial_attentions), _xla_attend(q, pages, layer, table, visible))
    blind = [np.asarray(lse) == np.float32(paged.UNSEEN) for _, lse in partial_attentions]
    assert np.any(blind[1] & ~blind[0]), "the case should have parts that see nothing"


@pytest.mark.slow
def test_kernel_runs_in_nested_loops_under_shard_map() -> None:
    """A scan over layers in a while loop in shard_map, where the part and the layer are traced."""
    q, pages, _, table, visible = _case(seed=12)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec(None, None, None, "x")

    def on_device(q, pages):
        share = (jax.lax.axis_index("x"), 2)

        def layer(_, number):
            part_attention = paged_triton.attend(
                q, pages, number, table, visible, share, tile=HALF_PAGES
            )
            gathered = jax.lax.all_gather(part_attention, "x")
            return None, paged.merge(*[jax.tree.map(lambda x, n=n: x[n], gathered) for n in (0, 1)])

        def attend_all_layers(state):
            return state[0] + 1, jax.lax.scan(layer, None, jnp.arange(LAYERS))[1]

        empty = jnp.zeros((LAYERS, *q.shape)), jnp.zeros((LAYERS, *q.shape[:3]))
        return jax.lax.while_loop(lambda state: state[0] < 2, attend_all_layers, (0, empty))[1]

    none = PartitionSpec()
    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=(none, spec), out_specs=none, check_vma=False
    )
    attention = jax.jit(run)(q, pages)
    for number in range(LAYERS):
        expected_attention = _xla_attend(q, pages, jnp.int32(number), table, visible)
        _close([x[number] for x in attention], expected_attention)


# -------------------------------------------------------------------------------- Programs for GPUs


def _abstract(rows, time, heads, kv_heads, size, dtype, block=128, tokens=2**20, layers=28):
    """Return shapes of q, pages, layer, table and visible for prompts of up to 18K tokens."""
    array = jax.ShapeDtypeStruct
    shape = (layers, tokens // block, kv_heads, block, size)
    pool = array(shape, dtype)
    scales = array(shape[:-1], jnp.float32) if dtype == jnp.int8 else None
    q = array((rows, time, heads, size), jnp.float32 if dtype == jnp.float32 else jnp.bfloat16)
    table, visible = array((rows, 18432 // block), jnp.int32), array((rows, time), jnp.int32)
    return q, Pages(pool, pool, scales, scales), array((), jnp.int32), table, visible


SHAPES = [
    (8, 8, 28, 4, 128, jnp.bfloat16),  # siblings after prompts of 16K tokens
    (8, 8, 28, 4, 128, jnp.int8),
    (512, 1, 28, 4, 128, jnp.bfloat16),  # suffixes of slots
    (512, 1, 28, 4, 128, jnp.int8),
    (4, 512, 28, 4, 128, jnp.bfloat16),  # prefill
    (8, 8, 14, 2, 64, jnp.bfloat16),
    (8, 8, 16, 2, 80, jnp.int8),
    (8, 8, 16, 2, 256, jnp.bfloat16),
    (8, 8, 28, 4, 128, jnp.float32),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_lowers_for_gpu_without_one(shape) -> None:
    args = _abstract(*shape)
    attend = functools.partial(paged_triton.attend, interpret=False)

    def attend_in_window(*args):
        return attend(*args[:-1], first_visible=args[-1])

    windowed = programs.lowered_for_gpu(attend_in_window, *args, args[-1])
    text = programs.lowered_for_gpu(attend, *args)
    for program in (windowed, text):
        assert program.count("custom_call @__gpu$xla.gpu.triton") == 2
    for kernel in ("_job_kernel", "_merge_kernel"):
        assert f'name = "{kernel}"' in text


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_compiles_for_gpu_without_one(shape) -> None:
    attend = functools.partial(paged_triton.attend, interpret=False)
    programs.compile_for_gpu(attend, *_abstract(*shape))


@pytest.mark.slow
def test_platform_dependent_lowers_the_kernel_only_for_gpus() -> None:
    """The branch for GPUs is not even lowered on a CPU."""

    def attend(*arguments):
        cuda = functools.partial(paged_triton.attend, interpret=False)
        return jax.lax.platform_dependent(*arguments, cuda=cuda, default=paged.attend)

    assert programs.lowered_for_gpu(attend, *_abstract(*SHAPES[0])).count("xla.gpu.triton") == 2
    case = _case(seed=13)
    _close(jax.jit(attend)(*case), _xla_attend(*case))


@pytest.mark.parametrize("shape", SHAPES)
def test_dot_products_are_float32_and_memory_is_bounded(shape) -> None:
    """Dot products accumulate in float32 and do not round float32 operands.

    No array is as large as the keys that are read.
    """
    args = _abstract(*shape)
    attend = functools.partial(paged_triton.attend, interpret=False)
    equations = list(programs.equations(jax.make_jaxpr(attend)(*args).jaxpr))
    dots = [x for x in equations if x.primitive.name == "dot_general"]
    assert len(dots) == 2
    for dot in dots:
        assert {x.aval.dtype for x in dot.invars} == {args[0].dtype}
        assert dot.params["preferred_element_type"] == jnp.float32
        assert dot.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
        assert all(n >= 16 and n & (n - 1) == 0 for x in dot.invars for n in x.aval.shape)
    rows, time, heads, kv_heads, size, _ = shape
    # Size of the jobs' results: two times the queries, padded, and PROGRAMS blocks of at most 128.
    padded = rows * kv_heads * max(16, 2 * time * heads // kv_heads) + paged_triton.PROGRAMS * 128
    largest = max(x.aval.size for equation in equations for x in equation.outvars)
    assert largest <= padded * max(size, 128)


def test_unsupported_shapes_and_dtypes_are_rejected() -> None:
    def run(match: str, q_dtype=jnp.bfloat16, **sizes) -> None:
        options = {"size": 128, "dtype": jnp.bfloat16} | sizes
        q, pages, *other_arguments = _abstract(8, 8, 28, 4, **options)
        q = jax.ShapeDtypeStruct(q.shape, q_dtype)
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(paged_triton.attend, q, pages, *other_arguments)
        assert paged_triton.unsupported(q, pages)

    run("page size = 8 tokens per device: must be a power of two, at least 16", block=8)
    run("page size = 96 tokens", block=96)
    run("head size = 512: must be at most 256", size=512)
    run("dtypes q int32, keys bfloat16: must", q_dtype=jnp.int32)
    run("dtypes q bfloat16, keys int16: must", dtype=jnp.int16)
    run("3758096384 keys of one byte: must be at most 2", dtype=jnp.int8, tokens=2**18)
    for tokens in (2**17, 2**19):
        q, pages, *_ = _abstract(8, 8, 28, 4, 128, jnp.int8, tokens=tokens)
        assert paged_triton.unsupported(q, pages) is None
