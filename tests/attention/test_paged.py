"""Tests of paged attention against dense attention in NumPy, row by row and head by head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.attention import paged
from spell_jax.attention.pages import (
    Pages,
    empty_pages,
    loaded,
    quantize,
    stored_dtype,
    write_pages,
    write_tokens,
)
from spell_jax.launch import topologies
from spell_jax.runtime import mesh as meshes

LAYERS, PAGES, KV_HEADS, BLOCK, SIZE = 3, 14, 2, 4, 8
HEADS, TABLE = 6, 5
LONGEST = TABLE * BLOCK


@functools.partial(jax.jit, static_argnames=("parts", "scores_at_once", "keys_at_once", "queries"))
def _attend(
    q,
    pages,
    layer,
    table,
    visible,
    part,
    parts,
    first=None,
    scores_at_once=0,
    keys_at_once=256,
    queries=512,
):
    """Attend with limits on a step's work, or (scores_at_once = 0) with the platform's limits."""
    arguments = (q, pages, layer, table, visible, (part, parts))
    if not scores_at_once:
        return paged.attend(*arguments, first_visible=first)
    return paged.attend_in_steps(
        *arguments,
        first,
        sizes=paged.StepLimits(scores_at_once, keys_at_once, 8, 2**20, 1, queries),
    )


def _attend_all(q, pages: Pages, layer: int, table, visible, **sizes):
    return _attend(q, pages, layer, table, visible, 0, 1, **sizes)


def _pool(rng: np.random.Generator, dtype=np.float32) -> Pages:
    shape = (LAYERS, PAGES, KV_HEADS, BLOCK, SIZE)
    keys, values = 2 * rng.normal(size=(2, *shape))
    return Pages(jnp.asarray(keys, dtype), jnp.asarray(values, dtype))


def _table(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Make page tables in any order; rows share some pages, partly at the same places."""
    table = np.array([rng.permutation(np.arange(1, PAGES))[:TABLE] for _ in range(rows)])
    table[1::2, :2] = table[0, :2]
    return table.astype(np.int32)


def _case(rows: int, time: int, seed: int = 0, dtype=np.float32):
    """Make q, pages, table and visible: one row sees nothing, one query sees all keys."""
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.normal(size=(rows, time, HEADS, SIZE)), dtype)
    visible = rng.integers(0, LONGEST + 1, size=(rows, time)).astype(np.int32)
    visible[rows // 2] = 0
    visible[0, -1], visible[-1, 0] = LONGEST, 1
    return q, _pool(rng, dtype), _table(rng, rows), visible


def _dense(
    q, pages: Pages, layer: int, table, visible, first=None
) -> tuple[np.ndarray, np.ndarray]:
    """Attend with each query of each head alone, in float64."""
    first = np.zeros_like(visible) if first is None else first
    q, keys, values = (np.asarray(x, np.float64) for x in (q, pages.keys, pages.values))
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], paged.UNSEEN)
    for row, t, head in np.ndindex(*q.shape[:3]):
        key_count, kv_head = visible[row, t], head // (q.shape[2] // keys.shape[2])
        if first[row, t] >= key_count:
            continue
        k, v = (
            x[layer, table[row], kv_head].reshape(-1, q.shape[3])[first[row, t] : key_count]
            for x in (keys, values)
        )
        scores = k @ q[row, t, head] / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        out[row, t, head] = weights @ v / weights.sum()
        lse[row, t, head] = scores.max() + np.log(weights.sum())
    return out, lse


def _close(arrays, expected_arrays, atol: float = 1e-5) -> None:
    for array, expected in zip(arrays, expected_arrays, strict=True):
        assert array.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(array), np.asarray(expected), atol=atol, rtol=atol)


# -------------------------------------------------------------------------------------- Attention


@pytest.mark.parametrize("rows, time", [(7, 1), (3, 5), (1, 1)])
def test_equals_dense_attention_in_every_layer(rows: int, time: int) -> None:
    q, pages, table, visible = _case(rows, time)
    visible[0] = np.maximum(visible[0], 1)
    outs = []
    for layer in range(LAYERS):
        attention = _attend_all(q, pages, layer, table, visible)
        _close(attention, _dense(q, pages, layer, table, visible))
        outs.append(np.asarray(attention[0]))
    assert min(np.abs(outs[0] - outs[1]).max(), np.abs(outs[1] - outs[2]).max()) > 0.1


@pytest.mark.parametrize("scores_at_once", [1, 300, 900, 10**6])
@pytest.mark.parametrize("keys_at_once", [1, 8, 12, 1000])
def test_step_sizes_do_not_change_the_result(scores_at_once: int, keys_at_once: int) -> None:
    q, pages, table, visible = _case(7, 3, seed=1)
    sizes = {"scores_at_once": scores_at_once, "keys_at_once": keys_at_once}
    expected_attention = _dense(q, pages, 1, table, visible)
    _close(_attend_all(q, pages, 1, table, visible, **sizes), expected_attention)


@pytest.mark.parametrize("keys_at_once", [4, 256])
def test_every_number_of_visible_keys_equals_dense(keys_at_once: int) -> None:
    """One row for each number of visible keys: no key at a page's edge is lost or extra."""
    q, pages, table, _ = _case(LONGEST + 1, 1, seed=2)
    visible = np.random.default_rng(0).permutation(LONGEST + 1).astype(np.int32)[:, None]
    attention = _attend_all(
        q, pages, 2, table, visible, scores_at_once=300, keys_at_once=keys_at_once
    )
    _close(attention, _dense(q, pages, 2, table, visible))


@pytest.mark.slow
def test_queries_without_visible_keys_get_zeros() -> None:
    q, pages, table, visible = _case(5, 3, seed=3)
    visible[1] = [0, 9, 0]  # in a row with and without queries that see keys
    blind = visible == 0
    for scores_at_once in (1, 10**6):
        out, lse = _attend_all(q, pages, 0, table, visible, scores_at_once=scores_at_once)
        assert not np.any(np.asarray(out)[blind])
        assert np.all(np.asarray(lse)[blind] == np.float32(paged.UNSEEN))
        assert np.all(np.abs(np.asarray(lse)[~blind]) < 100)
    out, lse = _attend_all(q, pages, 0, table, np.zeros_like(visible))
    assert not np.any(out) and np.all(np.asarray(lse) == np.float32(paged.UNSEEN))


def test_prompt_tokens_attend_causally() -> None:
    """Rows that begin anywhere, like pages of prompts, and one that ends in padding."""
    q, pages, table, _ = _case(4, 6, seed=4)
    visible = np.array([0, 3, 14, 8])[:, None] + np.arange(6) + 1
    visible[3, 4:] = 0
    for keys_at_once in (4, 256):
        attention = _attend_all(
            q, pages, 1, table, visible, scores_at_once=300, keys_at_once=keys_at_once
        )
        _close(attention, _dense(q, pages, 1, table, visible))


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_query_heads_share_key_heads_in_order(heads: int) -> None:
    _, pages, table, visible = _case(3, 2, seed=5)
    q = np.random.default_rng(0).normal(size=(3, 2, heads, SIZE)).astype(np.float32)
    _close(_attend_all(q, pages, 0, table, visible), _dense(q, pages, 0, table, visible))


def test_rows_with_equal_pages_get_equal_results() -> None:
    q, pages, table, visible = _case(6, 2, seed=6)
    q, table, visible = (np.repeat(x[:1], 6, axis=0) for x in (np.asarray(q), table, visible))
    out, lse = _attend_all(q, pages, 0, table, visible, scores_at_once=200)
    assert np.all(np.asarray(out) == np.asarray(out)[:1])
    assert np.all(np.asarray(lse) == np.asarray(lse)[:1])


def test_keys_past_the_visible_count_have_no_effect() -> None:
    """Replace later pages in the table and later keys in a page, as left by an earlier prompt."""
    q, pages, table, visible = _case(6, 2, seed=7)
    visible[:] = np.minimum(visible, 10)
    expected_attention = _attend_all(q, pages, 1, table, visible)
    table = table.copy()
    table[:, 3:] = 0
    attention = _attend_all(q, pages, 1, table, visible)
    for array, expected in zip(attention, expected_attention, strict=True):
        np.testing.assert_array_equal(array, expected)
    table[:, :3] = np.arange(1, 4)
    visible[:] = 10
    expected_attention = _attend_all(q, pages, 1, table, visible)
    keys, values = (x.at[:, 3, :, 2:].set(1e3) for x in (pages.keys, pages.values))
    attention = _attend_all(q, Pages(keys, values), 1, table, visible)
    for array, expected in zip(attention, expected_attention, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_extreme_scores_give_finite_results() -> None:
    """Scores far beyond the range of exp, rising and falling along the keys."""
    q, pages, table, visible = _case(7, 3, seed=8)
    for factor in (60.0, -60.0):
        attention = _attend_all(
            factor * q, pages, 0, table, visible, scores_at_once=300, keys_at_once=4
        )
        expected_attention = _dense(factor * q, pages, 0, table, visible)
        _close(attention, expected_attention, atol=1e-4)
        assert np.nanmax(np.abs(expected_attention[1][visible > 0])) > 200


def test_bfloat16_pages_and_queries_are_close_to_dense() -> None:
    q, pages, table, visible = _case(7, 3, seed=9, dtype=jnp.bfloat16)
    attention = _attend_all(q, pages, 1, table, visible)
    _close(attention, _dense(q, pages, 1, table, visible), atol=5e-2)


# ----------------------------------------------------------------------------------------- Windows


def _first(visible: np.ndarray, seed: int = 0) -> np.ndarray:
    """Draw the first key that each query sees; some queries see nothing."""
    rng = np.random.default_rng(seed)
    return np.maximum(visible - rng.integers(0, 9, size=visible.shape), 0).astype(np.int32)


@pytest.mark.parametrize("sizes", [{}, {"scores_at_once": 300, "keys_at_once": 4}], ids=str)
def test_keys_before_the_first_visible_key_are_masked(sizes: dict[str, int]) -> None:
    q, pages, table, visible = _case(7, 3, seed=15)
    first = _first(visible)
    assert np.any((first >= visible) & (visible > 0)) and np.any(first == visible - 1)
    attention = _attend_all(q, pages, 1, table, visible, first=first, **sizes)
    _close(attention, _dense(q, pages, 1, table, visible, first))


def test_every_window_equals_dense() -> None:
    """One row for each pair of first key and number of keys, at all edges of pages."""
    pairs = [(a, b) for b in range(LONGEST + 1) for a in range(0, b + 1, 3)]
    q, pages, table, _ = _case(len(pairs), 1, seed=16)
    first, visible = np.array(pairs, np.int32)[:, :, None].swapaxes(0, 1)
    attention = _attend_all(q, pages, 2, table, visible, first=first)
    _close(attention, _dense(q, pages, 2, table, visible, first))


@pytest.mark.parametrize("time", [1, 3])
def test_pages_before_the_window_are_not_read(time: int) -> None:
    q, pages, table, _ = _case(6, time, seed=17)
    visible = 3 * BLOCK + np.arange(1, time + 1) + np.array([[0, 1, 4, 5, 2, 3]]).T
    visible = visible.astype(np.int32)
    first = visible - 6
    table[:] = np.where(table == 0, 1, table)
    expected_attention = _dense(q, pages, 1, table, visible, first)
    for row, begin in enumerate(first.min(axis=1) // BLOCK):
        assert begin > 0
        table[row, :begin] = 0
    spoiled = Pages(*(x.at[:, 0].set(jnp.nan) for x in (pages.keys, pages.values)))
    _close(_attend_all(q, spoiled, 1, table, visible, first=first), expected_attention)


def test_merged_parts_of_windows_equal_full_attention() -> None:
    q, pages, table, visible = _case(7, 3, seed=18)
    first = _first(visible)
    partial_attentions = [
        _attend(q, part, 1, table, visible, i, 2, first) for i, part in enumerate(_parts(pages, 2))
    ]
    expected_attention = _dense(q, pages, 1, table, visible, first)
    _close(jax.jit(paged.merge)(*partial_attentions), expected_attention)


@pytest.mark.slow
def test_adjacent_rows_with_windows_equal_dense() -> None:
    """Pages of prompts in prefill, whose rows begin at different pages of one table."""
    q, pages, _, _ = _case(8, 3)
    rng = np.random.default_rng(4)
    table = np.repeat([rng.permutation(np.arange(1, PAGES))[:TABLE] for _ in range(2)], 4, axis=0)
    visible = (np.array([0, 4, 8, 12] * 2)[:, None] + np.arange(1, 4)).astype(np.int32)
    for window in (1, 5, 9, 2**30):
        first = np.maximum(visible - window, 0)
        sizes = {"scores_at_once": 300, "keys_at_once": 8, "queries": 24}
        arguments = q, pages, 1, table.astype(np.int32), visible
        for limits in ({}, sizes):
            _close(_attend_all(*arguments, first=first, **limits), _dense(*arguments, first))


# ------------------------------------------------------------------------------------------- Parts


def _parts(pages: Pages, parts: int) -> list[Pages]:
    """Split the pool's pages by their tokens into `parts` pools."""
    split = [jnp.split(x, parts, axis=3) for x in (pages.keys, pages.values)]
    return [Pages(*keys_and_values) for keys_and_values in zip(*split, strict=True)]


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("keys_at_once", [2, 6, 256])
def test_merged_parts_of_pages_equal_full_attention(parts: int, keys_at_once: int) -> None:
    q, pages, table, visible = _case(7, 3, seed=10)
    partial_attentions = [
        _attend(q, part, 1, table, visible, i, parts, scores_at_once=200, keys_at_once=keys_at_once)
        for i, part in enumerate(_parts(pages, parts))
    ]
    expected_attention = _dense(q, pages, 1, table, visible)
    _close(jax.jit(paged.merge)(*partial_attentions), expected_attention)
    blind = [np.asarray(lse) == np.float32(paged.UNSEEN) for _, lse in partial_attentions]
    assert np.any(blind[-1] & ~blind[0]), "the case should have parts that see nothing"


def test_part_attends_only_to_its_own_keys() -> None:
    """The second half of every page alone: positions 2, 3, 6, 7, ..."""
    q, pages, table, visible = _case(7, 1, seed=11)
    second = _parts(pages, 2)[1]
    attention = _attend(q, second, 0, table, visible, 1, 2)
    half = BLOCK // 2
    part_visible = visible // BLOCK * half + np.maximum(visible % BLOCK - half, 0)
    _close(attention, _dense(q, second, 0, table, part_visible))


@pytest.mark.slow
def test_merged_prompt_and_suffix_equal_attention_to_both() -> None:
    q, pages, table, visible = _case(7, 2, seed=12)
    suffix_visible = np.full((7, 2), 3, np.int32)
    suffix = table[:, -1:]
    prompt = np.minimum(visible, LONGEST - BLOCK)
    attention = paged.merge(
        _attend_all(q, pages, 0, table, prompt), _attend_all(q, pages, 0, suffix, suffix_visible)
    )
    for row in range(7):
        for t in range(2):
            keys, values = (
                np.concatenate(
                    [
                        np.asarray(x)[0, table[row]]
                        .swapaxes(0, 1)
                        .reshape(KV_HEADS, -1, SIZE)[:, : prompt[row, t]],
                        np.asarray(x)[0, suffix[row, 0], :, :3],
                    ],
                    axis=1,
                )
                for x in (pages.keys, pages.values)
            )
            joined_pages = Pages(keys[None, None], values[None, None])
            count = np.array([[prompt[row, t] + 3]])
            expected_attention = _dense(
                q[row : row + 1, t : t + 1], joined_pages, 0, np.array([[0]]), count
            )
            _close([x[row : row + 1, t : t + 1] for x in attention], expected_attention)


@pytest.mark.slow
def test_merging_a_part_without_visible_keys_changes_nothing() -> None:
    rng = np.random.default_rng(13)
    out = rng.normal(size=(3, 2, 4)).astype(np.float32)
    lse = np.array([[0.0, -50.0], [80.0, 3.0], [paged.UNSEEN, 1.0]], np.float32)
    out[2, 0] = 0
    out, lse = jnp.asarray(out), jnp.asarray(lse)
    nothing = jnp.zeros_like(out), jnp.full_like(lse, paged.UNSEEN)
    for parts in (((out, lse), nothing), (nothing, (out, lse)), (nothing, (out, lse), nothing)):
        merged_attention = paged.merge(*parts)
        np.testing.assert_array_equal(merged_attention[0], out)
        np.testing.assert_allclose(merged_attention[1], lse, rtol=1e-6)
    np.testing.assert_allclose(paged.merge((out, lse))[0], out)


# ------------------------------------------------------------------------------------------ Writing


def _numbered(dtype=np.float32) -> Pages:
    """Make a pool in which no two numbers are equal."""
    shape = (LAYERS, PAGES, KV_HEADS, BLOCK, SIZE)
    keys = np.arange(np.prod(shape)).reshape(shape)
    return Pages(jnp.asarray(keys, dtype), jnp.asarray(-1 - keys, dtype))


def _same(pages: Pages, keys: np.ndarray, values: np.ndarray) -> None:
    np.testing.assert_array_equal(pages.keys, keys)
    np.testing.assert_array_equal(pages.values, values)


def test_empty_pool_is_zeros() -> None:
    pages = empty_pages(LAYERS, PAGES, KV_HEADS, BLOCK, SIZE, jnp.bfloat16)
    assert pages.keys.shape == pages.values.shape == (LAYERS, PAGES, KV_HEADS, BLOCK, SIZE)
    assert pages.keys.dtype == pages.values.dtype == jnp.bfloat16
    assert pages.page_size == BLOCK
    assert not np.any(pages.keys) and not np.any(pages.values)


def test_write_pages_changes_only_the_given_pages() -> None:
    pages, which = _numbered(), [9, 2, 5]
    keys, values = np.random.default_rng(0).normal(size=(2, 3, BLOCK, KV_HEADS, SIZE))
    keys, values = jnp.asarray(keys, jnp.float32), jnp.asarray(values, jnp.float32)
    expected_keys, expected_values = np.array(pages.keys), np.array(pages.values)
    for i, page in enumerate(which):
        for token in range(BLOCK):
            expected_keys[1, page, :, token] = keys[i, token]
            expected_values[1, page, :, token] = values[i, token]
    written_pages = write_pages(pages, jnp.int32(1), jnp.array(which), keys, values)
    _same(written_pages, expected_keys, expected_values)


def test_write_tokens_changes_only_the_given_tokens() -> None:
    """Two tokens go to the same page."""
    pages, places = _numbered(), [(4, 3), (11, 0), (4, 1), (13, 2)]
    keys, values = np.random.default_rng(1).normal(size=(2, len(places), KV_HEADS, SIZE))
    keys, values = jnp.asarray(keys, jnp.float32), jnp.asarray(values, jnp.float32)
    expected_keys, expected_values = np.array(pages.keys), np.array(pages.values)
    for i, (page, offset) in enumerate(places):
        expected_keys[2, page, :, offset] = keys[i]
        expected_values[2, page, :, offset] = values[i]
    page, offset = jnp.array(places).T
    written_pages = write_tokens(pages, jnp.int32(2), page, offset, keys, values)
    _same(written_pages, expected_keys, expected_values)


def test_only_pools_on_cpus_hold_bits_of_bfloat16() -> None:
    plan = topologies.abstract_mesh(topologies.find("v5e-8"), {"fsdp": -1})
    assert stored_dtype(jnp.bfloat16, meshes.make_mesh()) == jnp.uint16
    assert stored_dtype(jnp.bfloat16, plan) == jnp.bfloat16
    assert stored_dtype(jnp.float32, meshes.make_mesh()) == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.uint16])
def test_writes_are_cast_to_the_pools_dtype(dtype) -> None:
    pages = empty_pages(1, 3, KV_HEADS, BLOCK, SIZE, dtype)
    keys = jnp.full((1, BLOCK, KV_HEADS, SIZE), 1.001, jnp.float32)
    filled_pages = write_pages(pages, jnp.int32(0), jnp.array([1]), keys, -keys)
    token = jnp.array([2]), jnp.array([3])
    written = write_tokens(filled_pages, jnp.int32(0), *token, keys[:, 0], -keys[:, 0])
    loaded_keys, loaded_values = (loaded(x, jnp.float32) for x in (written.keys, written.values))
    assert loaded_keys.dtype == loaded_values.dtype == jnp.bfloat16
    assert np.asarray(loaded_keys, np.float32).sum() == (BLOCK + 1) * KV_HEADS * SIZE
    assert np.asarray(loaded_values, np.float32).sum() == -(BLOCK + 1) * KV_HEADS * SIZE


def test_a_pool_of_bfloat16_is_never_converted_as_a_whole_on_cpus() -> None:
    """XLA for CPUs scatters into bfloat16, and reads it, by way of float32 copies."""
    dtype = stored_dtype(jnp.bfloat16, meshes.make_mesh())
    pages = empty_pages(2, PAGES, KV_HEADS, BLOCK, SIZE, dtype)
    q = jnp.ones((1, 1, KV_HEADS, SIZE), jnp.bfloat16)

    def step(pages: Pages):
        token = jnp.array([2]), jnp.array([3])
        pages = write_tokens(pages, jnp.int32(1), *token, q[:, 0], q[:, 0])
        table_and_visible = jnp.array([[2]]), jnp.array([[4]])
        return paged.attend(q, pages, jnp.int32(1), *table_and_visible), pages

    program = jax.jit(step, donate_argnums=0).lower(pages).compile().as_text()
    assert f"[2,{PAGES},{KV_HEADS},{BLOCK},{SIZE}]" in program
    assert f"f32[2,{PAGES},{KV_HEADS},{BLOCK},{SIZE}]" not in program
    (out, _), _ = step(pages)
    # Three keys of zeros, and one of ones with the value one.
    weight = np.exp(SIZE**0.5)
    np.testing.assert_allclose(out, np.full(out.shape, weight / (weight + 3)), rtol=2e-3)


def test_prompt_written_page_by_page_is_read_in_order() -> None:
    """Write pages and then single tokens of a row; compare with attention to the original row."""
    rng = np.random.default_rng(14)
    tokens = 2 * BLOCK + 3
    keys, values = jnp.asarray(rng.normal(size=(2, tokens, KV_HEADS, SIZE)), jnp.float32)
    table = np.array([[6, 3, 12]])
    pages = _pool(rng)
    for j in range(2):
        token_slice = slice(j * BLOCK, (j + 1) * BLOCK)
        where = jnp.asarray(table[0, j : j + 1])
        pages = write_pages(
            pages, jnp.int32(1), where, keys[None, token_slice], values[None, token_slice]
        )
    for t in range(2 * BLOCK, tokens):
        where = jnp.array([12]), jnp.array([t % BLOCK])
        pages = write_tokens(pages, jnp.int32(1), *where, keys[t : t + 1], values[t : t + 1])
    q = rng.normal(size=(1, 2, HEADS, SIZE)).astype(np.float32)
    visible = np.array([[tokens, 6]])
    row = Pages(*(x.swapaxes(0, 1)[None, None] for x in (keys, values)))
    attention = _attend_all(q, pages, 1, table, visible)
    _close(attention, _dense(q, row, 0, np.array([[0]]), visible))


@pytest.mark.slow
@pytest.mark.parametrize("queries", [6, 9, 24])
def test_adjacent_rows_with_one_page_table_equal_dense(queries: int) -> None:
    """Pages of some prompts in their order, as in prefill, and rows that read nothing."""
    q, pages, _, _ = _case(9, 3)
    rng = np.random.default_rng(4)
    prompts = [rng.permutation(np.arange(1, PAGES))[:TABLE] for _ in range(3)]
    which = [0, 0, 0, 0, 1, 1, 2, 2, 2]
    table = np.array([prompts[i] for i in which], np.int32)
    first = np.array([0, 4, 8, 12, 0, 4, 0, 4, 8])[:, None]
    visible = (first + np.arange(1, 4)).astype(np.int32)
    visible[5] = 0
    attention = _attend_all(
        q, pages, 1, table, visible, scores_at_once=300, keys_at_once=8, queries=queries
    )
    _close(attention, _dense(q, pages, 1, table, visible))


# ------------------------------------------------------------------------------------------- int8


def _int8(pages: Pages) -> tuple[Pages, Pages]:
    """Return the pool as int8, and the pool with the dequantized values."""
    (keys, key_scales), (values, value_scales) = map(quantize, (pages.keys, pages.values))
    meant = Pages(keys * key_scales[..., None], values * value_scales[..., None])
    return Pages(keys, values, key_scales, value_scales), meant


def test_int8_quantization_error_is_at_most_half_a_scale() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 16)), jnp.float32).at[1, 2].set(0)
    integers, scale = quantize(x)
    assert integers.dtype == jnp.int8 and scale.shape == (5, 3)
    assert np.max(np.abs(integers)) == 127 and not np.any(integers[1, 2])
    error = np.abs(np.asarray(x) - np.asarray(integers * scale[..., None]))
    assert np.all(error <= 0.5001 * np.asarray(scale)[..., None])


@pytest.mark.slow
def test_int8_pool_equals_attention_to_dequantized_values() -> None:
    q, pages, table, visible = _case(7, 3)
    small, meant = _int8(pages)
    attention = _attend_all(q, small, 1, table, visible, scores_at_once=300, keys_at_once=8)
    _close(attention, _dense(q, meant, 1, table, visible))


@pytest.mark.slow
def test_writes_to_an_int8_pool_are_quantized() -> None:
    rng = np.random.default_rng(3)
    pages = empty_pages(LAYERS, PAGES, KV_HEADS, BLOCK, SIZE, jnp.int8)
    keys, values = jnp.asarray(rng.normal(size=(2, 2, BLOCK, KV_HEADS, SIZE)), jnp.float32)
    page = jnp.array([5, 2])
    pages = write_pages(pages, jnp.int32(1), page, keys, values)
    token, offset = 3 * keys[:, 0], jnp.array([1, 3])
    pages = write_tokens(pages, jnp.int32(1), page, offset, token, -token)
    for pool, scales, page_contents, new in (
        (pages.keys, pages.key_scales, keys, token),
        (pages.values, pages.value_scales, values, -token),
    ):
        assert pool.dtype == jnp.int8
        expected_pool = np.zeros(pool.shape, np.float32)
        expected_pool[1, page] = np.asarray(page_contents).swapaxes(1, 2)
        for i in range(2):
            expected_pool[1, page[i], :, offset[i]] = np.asarray(new[i])
        error = np.abs(np.asarray(pool * scales[..., None]) - expected_pool)
        assert np.all(error <= 0.5001 * np.asarray(scales)[..., None])
        assert not np.any(pool[0]) and np.any(pool[1, 5])
