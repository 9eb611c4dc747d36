"""Paged attention on NVIDIA GPUs: Pallas (Triton) kernels with the interface of paged.attend.

1. A unit is 16 to 128 of the T R queries of a row that share a key head (R query heads each), as
   the rows of one product. Its keys are read once. Prefill cuts its queries into many units; in
   decode all samples of a prompt form one unit.
2. The kernel looks up pages in the row's table block by block. Nothing is gathered beforehand.
3. The keys of a row that a device sees are the leading keys of its own part. The kernels therefore
   know nothing of shares; a unit's work is a number of key blocks.
4. `list_jobs` cuts the work of all units into jobs of nearly equal length, so that long rows among
   short ones do not leave the GPU idle (flash decoding). The number of programs depends only on
   shapes: PROGRAMS plus one per unit; those after the end of the list exit at once.
5. Each job stores its output and log-sum-exp. A second kernel merges the jobs of each unit, always
   in the same order.
6. int8 keys and values are cast to the queries' dtype in the kernel. Key scales multiply scores,
   value scales multiply weights.

The part of a page on a device must be a power of two of at least 16 tokens, the head size at most
256. Head sizes that are not powers of two use masked loads, because the pool cannot be padded at
each call. Pallas uses 64-bit offsets for arrays above 4 GiB, else signed 32-bit offsets. Arrays of
1-byte elements with more than 2^31 elements in at most 4 GiB are therefore refused. Scores inside
the kernels are in base 2, because the GPU's native exponential is 2**x; the returned log-sum-exp is
natural.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from spell_jax.attention.blocks import LOG2_E, Softmax
from spell_jax.attention.masks import MASKED
from spell_jax.attention.pages import Pages, by_kv_head, by_token
from spell_jax.attention.triton import FLOATS, LARGEST_HEAD, SMALLEST, Tile, padded_size

# Four per multiprocessor of the H200 (132), where two or more run at a time: the ends even out.
# With 8 prompts of 16K tokens, a job of 64 queries writes a sixteenth of the bytes it reads.
PROGRAMS = 528
FEWEST = 4  # blocks per job; with 1, a job of 64 queries would write as much as it reads
_MERGED_ROWS, _MERGED_JOBS = 4, 8  # queries per merge program; jobs it reads at once

# Largest tile by element size of the pool in bytes (4 if products are in float32) and head size. A
# tile of at most 64 queries uses 4 warps. Other tiles were not tried. On an H200 a layer reads 16K
# keys of 8 prompts at 1,375 GB/s for 8 answers each and at 2,158 GB/s for one (a copy: 4,205;
# docs/measurements/accelerator_h200.json, paged_*). Compiled for sm_90a with jaxlib 0.11.2's Triton
# and CUDA 13.5's ptxas, the kernels use at most 128 of 227 KiB of shared memory; registers spill
# only with int8 keys and float32 queries. Shared memory and registers of a program, with head size
# 128:
#   2-byte pool, 64 queries (samples of a prompt): 112 KiB, 168 registers, 2 per multiprocessor
#   2-byte pool, 1 query per row:                   70 KiB,  80 registers, 3 per multiprocessor
#   int8 pool, 64 queries:                          82 KiB, 168 registers
#   int8 pool, 1 query per row:                     56 KiB, 128 registers
# Loads in flight per program: 64 KiB (2-byte) or 48 KiB (int8). Products of 2-byte inputs run on
# the tensor cores, with wgmma from 64 queries on. float32 is for tests.
TILES = {
    (1, 128): Tile(128, 64, 8, 4),
    (1, 256): Tile(64, 32, 4, 3),
    (2, 128): Tile(128, 64, 8, 3),
    (2, 256): Tile(64, 32, 4, 2),
    (4, 128): Tile(32, 16, 8, 2),
    (4, 256): Tile(16, 16, 8, 2),
}


def unsupported(q: Any, pages: Pages) -> str | None:
    """Explain why `attend` does not support these shapes and dtypes; None if it does."""
    keys, page_size, size = pages.keys, pages.page_size, q.shape[-1]
    if page_size < SMALLEST or page_size & (page_size - 1):
        return (
            f"page size = {page_size} tokens per device: must be a power of two, at least "
            f"{SMALLEST}"
        )
    if size > LARGEST_HEAD:
        return f"head size = {size}: must be at most {LARGEST_HEAD}"
    if q.dtype not in FLOATS or keys.dtype not in (*FLOATS, jnp.int8):
        return f"dtypes q {q.dtype}, keys {keys.dtype}: must be 2- or 4-byte floats, or int8 keys"
    if keys.dtype.itemsize == 1 and 2**31 < keys.size <= 2**32:
        return f"{keys.size} keys of one byte: must be at most 2^31 elements, or more than 2^32"
    return None


def attend(
    q: jax.Array,
    pages: Pages,
    layer: jax.Array | int,
    table: jax.Array,
    num_visible: jax.Array,
    share: tuple[jax.Array | int, int] = (0, 1),
    first_visible: jax.Array | None = None,
    *,
    tile: Tile | None = None,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute `paged.attend` on NVIDIA GPUs; ValueError if `unsupported` gives a reason not to.

    Inside shard_map this needs check_vma=False. The default `tile` is from TILES. By default the
    Pallas interpreter runs unless the default backend is a GPU.
    """
    if reason := unsupported(q, pages):
        raise ValueError(reason)
    rows, time, heads, size = q.shape
    pool, kv_heads, page_size = pages.keys, pages.keys.shape[2], pages.page_size
    if pool.dtype != jnp.int8:
        # A pool in float32 is not rounded to the dtype of bfloat16 queries.
        q = q.astype(jnp.promote_types(q.dtype, pool.dtype))
    tile = tile or _default_tile(q, pages)
    longest = table.shape[1] * page_size
    visible = [num_visible] if first_visible is None else [num_visible, first_visible]
    visible = [jnp.minimum(_local_keys(x, page_size, *share), longest) for x in visible]
    queries, visible = _units(q, jnp.stack(visible, axis=1), kv_heads, tile.queries)
    blocks = pl.cdiv(jnp.max(visible[:, 0], axis=1), tile.keys)
    max_blocks, pieces = pl.cdiv(longest, tile.keys), max(1, PROGRAMS // kv_heads)
    jobs, spans = list_jobs(blocks, len(visible) // rows, max_blocks, pieces)
    # Whole blocks plus one, because the kernel looks up one block ahead. Entries after a row's end
    # may be invalid, hence the clip.
    pages_per_block = max(1, tile.keys // page_size)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages_per_block + pages_per_block)))
    table = jnp.clip(table, 0, pool.shape[1] - 1)
    # The layer is data, so that one compiled kernel serves the loop over layers.
    indices = jobs, jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)), table, visible
    if interpret is None:
        interpret = jax.default_backend() != "gpu"
    outs, lses = _run_jobs(indices, queries, pages, size, tile, interpret)
    out, lse = _merge_jobs(spans, outs, lses, time * heads // kv_heads, interpret)

    def from_units(x):
        """Reshape [U, K, queries, ...] to [M, T, N, ...]."""
        x = x.reshape(rows, -1, *x.shape[1:]).swapaxes(1, 2)
        x = x.reshape(rows, kv_heads, -1, *x.shape[4:])[:, :, : time * heads // kv_heads]
        return by_token(x, time)

    return from_units(out)[..., :size], from_units(lse)


def list_jobs(
    blocks: jax.Array, units_of_row: int, max_blocks: int, pieces: int
) -> tuple[jax.Array, jax.Array]:
    """Cut the key blocks of all units into jobs of similar length.

    `blocks` is int32 [U], each at most `max_blocks`. `units_of_row` units share a row's table.
    There would be `pieces` jobs if all had equal length and no unit ended with a shorter one.

    Returns:
      jobs: unit, row, first block and end (exclusive) of each job, int32 [E, 4]; entries after the
        end of the list have no blocks.
      spans: first job and end (exclusive) of each unit, int32 [U, 2].
    """
    units = len(blocks)
    # Each unit has at most one shorter job, its last. All others have at least FEWEST blocks.
    count = min(units + pieces, units * pl.cdiv(max_blocks, FEWEST))
    # Equal jobs: the GPU is busy until all end, however different the units are.
    length = jnp.maximum(pl.cdiv(jnp.sum(blocks), pieces), FEWEST)
    of_unit = pl.cdiv(blocks, length)
    ends = jnp.cumsum(of_unit)
    begins = ends - of_unit
    job = jnp.arange(count, dtype=jnp.int32)
    unit = jnp.sum(ends <= job[:, None], axis=1, dtype=jnp.int32)
    live, unit = unit < units, jnp.minimum(unit, units - 1)
    first = (job - begins[unit]) * length
    last = jnp.where(live, jnp.minimum(first + length, blocks[unit]), first)
    jobs = jnp.stack([unit, unit // units_of_row, first, last], axis=1)
    return jobs, jnp.stack([begins, ends], axis=1)


# Conversion from the caller's arrays to the kernels' arrays.


def _default_tile(q: jax.Array, pages: Pages) -> Tile:
    """Return the tile from TILES, no larger than the queries of one row and key head."""
    rows = q.shape[1] * q.shape[2] // pages.keys.shape[2]
    itemsize = 4 if q.dtype == jnp.float32 else pages.keys.dtype.itemsize
    tile = TILES[itemsize, max(padded_size(q.shape[-1]), 128)]
    queries = min(tile.queries, padded_size(rows))
    return tile._replace(queries=queries, warps=4 if queries <= 64 and itemsize < 4 else tile.warps)


def _local_keys(num_visible: jax.Array, page_size: int, part: jax.Array | int, parts: int):
    """Count the device's own keys among the leading `num_visible` keys of a row.

    Of page j the device holds positions (j parts + part) C to (j parts + part + 1) C - 1.
    """
    pages, remainder = jnp.divmod(num_visible, page_size * parts)
    return pages * page_size + jnp.clip(remainder - part * page_size, 0, page_size)


def _units(q: jax.Array, visible: jax.Array, kv_heads: int, size: int) -> list[jax.Array]:
    """Split queries [M, T, N, H] and their visible keys [M, 1 or 2, T] into units.

    Returns queries [U, K, queries, padded H], `size` queries each, and the numbers of keys that
    they see and with windows the first of these keys, [U, 1 or 2, queries], 0 for padding.
    """
    rows, _, heads, head_size = q.shape
    q = by_kv_head(q, kv_heads)
    visible = jnp.repeat(visible, heads // kv_heads, axis=2)
    padding = -q.shape[2] % size
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, padded_size(head_size) - head_size)))
    q = q.reshape(rows, kv_heads, -1, size, q.shape[-1]).swapaxes(1, 2)
    visible = jnp.pad(visible, ((0, 0), (0, 0), (0, padding)))
    visible = visible.reshape(rows, visible.shape[1], -1, size).swapaxes(1, 2)
    return [q.reshape(-1, *q.shape[2:]), visible.reshape(-1, *visible.shape[2:])]


def _whole_array_spec(x: jax.Array, *head_axes: int) -> pl.BlockSpec:
    """Return the spec of a whole array; `head_axes` hold only the program's key head."""
    axes = range(x.ndim)
    shape = tuple(None if n in head_axes else x.shape[n] for n in axes)
    return pl.BlockSpec(shape, lambda e, h: tuple(h if n in head_axes else 0 for n in axes))


def _run_jobs(
    indices: tuple[jax.Array, ...],
    queries: jax.Array,
    pages: Pages,
    size: int,
    tile: Tile,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Run the job kernel: float32 out [E, K, queries, padded H], log-sum-exp [E, K, queries].

    Takes jobs [E, 4], layer [1], table [M, J] and visible keys [U, 1 or 2, queries], all int32, and
    queries [U, K, queries, padded H]. Results of empty jobs are not written.
    """
    count, (_, kv_heads, together, padded) = len(indices[0]), queries.shape
    pools = jax.tree.leaves((pages.keys, pages.values, pages.key_scales, pages.value_scales))
    shapes = (count, kv_heads, together, padded), (count, kv_heads, together)
    return pl.pallas_call(
        functools.partial(_job_kernel, tile.keys, pages.page_size, size),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid=(count, kv_heads),
        in_specs=[
            pl.BlockSpec((None, 4), lambda e, h: (e, 0)),
            *[_whole_array_spec(x) for x in indices[1:]],
            _whole_array_spec(queries, 1),
            *[_whole_array_spec(x, 2) for x in pools],
        ],
        out_specs=[
            pl.BlockSpec((None, None, together, padded), lambda e, h: (e, h, 0, 0)),
            pl.BlockSpec((None, None, together), lambda e, h: (e, h, 0)),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(*indices, queries, *pools)


def _merge_jobs(
    spans: jax.Array, outs: jax.Array, lses: jax.Array, queries: int, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Merge the jobs of each unit: output [U, K, queries, padded H] and log-sum-exp, float32.

    If a unit holds all queries of a row, its padding is dropped (up to a multiple of _MERGED_ROWS).
    """
    (count, kv_heads, together, size), piece_rows = outs.shape, _MERGED_ROWS
    together = min(together, pl.cdiv(queries, piece_rows) * piece_rows)
    shapes = (len(spans), kv_heads, together, size), (len(spans), kv_heads, together)
    return pl.pallas_call(
        _merge_kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid=(together // piece_rows, kv_heads, len(spans)),
        in_specs=[
            pl.BlockSpec((None, 2), lambda i, h, u: (u, 0)),
            pl.BlockSpec((count, None, piece_rows, size), lambda i, h, u: (0, h, i, 0)),
            pl.BlockSpec((count, None, piece_rows), lambda i, h, u: (0, h, i)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, piece_rows, size), lambda i, h, u: (u, h, i, 0)),
            pl.BlockSpec((None, None, piece_rows), lambda i, h, u: (u, h, i)),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(spans, outs, lses)


# The kernels. Leading arguments are static, all further arguments are references.


def _page(table, row, number, block_k: int, page_size: int) -> jax.Array:
    """Look up the page of a block of keys, or one page per key if the block spans several."""
    if block_k <= page_size:
        return table[row, lax.div(number, page_size // block_k)]
    place = lax.iota(jnp.int32, block_k)
    return table[
        row, number * (block_k // page_size) + lax.div(place, jnp.full_like(place, page_size))
    ]


def _tokens(number, block_k: int, page_size: int) -> Any:
    """Locate a block of keys in its page: a slice, or one offset per key for several pages."""
    if block_k <= page_size:
        return pl.ds(lax.rem(number, page_size // block_k) * block_k, block_k)
    place = lax.iota(jnp.int32, block_k)
    return lax.rem(place, jnp.full_like(place, page_size))


def _fetch(pool, layer, page, token, size: int, padded: int, dtype) -> jax.Array:
    """Load keys or values [keys, H] at some tokens of the pool."""
    if size == padded:
        return pool[layer, page, token, :].astype(dtype)
    if isinstance(token, pl.Slice):
        token = token.start + lax.iota(jnp.int32, int(token.size))
        page = jnp.full_like(token, page)
    shape = (token.shape[0], padded)
    page, token = (lax.broadcast_in_dim(x, shape, (0,)) for x in (page, token))
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    place = pool.at[layer, page, token, lane]
    return plgpu.load(place, mask=lane < size, other=0).astype(dtype)


def _job_kernel(
    block_k, page_size, size, job, layer, table, visible, q, keys, values, *scales_and_results
) -> None:
    """Compute the attention of one job, grid [E, K].

    Shapes: q [U, queries, H]; keys and values [L, Z, C, H]; scales [L, Z, C], for int8 only; out
    [queries, H]; lse [queries].
    """
    *scales, out, lse = scales_and_results
    unit, row, begin, end = (job[n] for n in range(4))
    # float32 accumulation; jax before 0.9 has this function in pallas itself
    dot = functools.partial(getattr(plgpu, "dot", None) or pl.dot, allow_tf32=False)

    @pl.when(begin < end)
    def _():
        queries, which = q[unit, :, :], layer[0]
        limit, *first = (visible[unit, n, :][:, None] for n in range(visible.shape[1]))

        def step(number, state):
            softmax, page = state
            token = _tokens(number, block_k, page_size)
            fetch = functools.partial(_fetch, layer=which, page=page, token=token)
            fetch = functools.partial(fetch, size=size, padded=q.shape[-1], dtype=q.dtype)
            scores = dot(queries, fetch(keys), trans_b=True) * (size**-0.5 * LOG2_E)
            if scales:
                scores *= scales[0][which, page, token][None, :]
            position = number * block_k + lax.iota(jnp.int32, block_k)
            is_visible = position[None, :] < limit
            for x in first:
                is_visible &= position[None, :] >= x
            scores = jnp.where(is_visible, scores, MASKED)

            def weighted_sum(weights):
                if scales:
                    weights *= scales[1][which, page, token][None, :]
                return dot(weights.astype(q.dtype), fetch(values))

            softmax = softmax.add(scores, weighted_sum, base2=True)
            # Looked up one iteration ahead. A lookup next to its use would take the pipeline stages
            # of the copies that depend on it: compiled that way, a program waits for the block it
            # has just started to fetch.
            return softmax, _page(table, row, number + 1, block_k, page_size)

        start = Softmax.start(queries.shape), _page(table, row, begin, block_k, page_size)
        softmax, _ = lax.fori_loop(begin, end, step, start)
        out[...], lse[...] = softmax.finish(MASKED, base2=True)


def _merge_kernel(span, outs, lses, out, lse) -> None:
    """Merge a unit's jobs, grid [query pieces, K, U]: outs [E, queries, H], out [queries, H]."""
    begin, end = span[0], span[1]

    def step(number, state):
        job = begin + number * _MERGED_JOBS + lax.iota(jnp.int32, _MERGED_JOBS)
        live = (job < end)[:, None]
        # Jobs after the end were never written.
        job = jnp.minimum(job, end - 1)
        scores = jnp.where(live, lses[job, :], MASKED)
        top = jnp.maximum(state.top, jnp.max(scores, axis=0))
        weights = jnp.exp(scores - top[None, :])
        shrink = jnp.exp(state.top - top)
        part_out = jnp.sum(weights[:, :, None] * outs[job, :, :], axis=0)
        total = state.total * shrink + jnp.sum(weights, axis=0)
        return Softmax(state.out * shrink[:, None] + part_out, top, total)

    steps = pl.cdiv(end - begin, _MERGED_JOBS)
    out[...], lse[...] = lax.fori_loop(0, steps, step, Softmax.start(out.shape)).finish(MASKED)
