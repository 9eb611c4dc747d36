"""Attention to pages on NVIDIA GPUs: Pallas kernels (Triton) with the contract of paged.attend.

1. A token's keys are read once for all queries of a row: the T R queries that share a key head (of
   R query heads each) are the rows of one product, at least 16, at most 128 of them: a unit.
   Prefill cuts its queries into many units, siblings behind a prompt are one.
2. Pages are looked up in the row's table inside the kernel, block by block of keys: nothing is
   gathered into memory first.
3. What a device sees of a row is a number of leading keys of its own, whatever its share of each
   page is. So the kernels know nothing of shares, and a unit's work is a number of blocks.
4. One list for all units cuts that work into jobs, pieces of nearly equal length, so that long rows
   among short ones do not keep the GPU waiting (`list_jobs`). How many programs there are depends
   on shapes alone: PROGRAMS and one a unit; those behind the end of the list end at once. Where few
   rows are long, each becomes many jobs (flash decoding).
5. A job leaves its output and log-sum-exp; a second kernel merges those of each unit, whose number
   only the list knows, always in the same order.
6. int8 keys become the queries' dtype in the kernel. Their scales multiply scores, those of values
   multiply weights.

Limits: pages are a power of two of at least 16 tokens of a device; head sizes up to 256, no powers
of two among them by loads under a mask, since a pool cannot be padded at each call. Offsets have 64
bits in arrays above 4 GiB, else 32 with a sign (Pallas decides by the array's bytes): of numbers of
one byte, more than 2^31 in at most 4 GiB cannot be reached and are refused.

Scores are kept in base 2 inside (a GPU's exponential is 2**x), the log-sum-exp outside is natural.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from spell_jax.attention.dense import MASKED
from spell_jax.attention.triton import LARGEST_HEAD, SMALLEST

if TYPE_CHECKING:
    from spell_jax.attention.paged import Pages

# Four for each of the H200's 132 multiprocessors, where two or more run at a time: the end evens
# out. Of 8 prompts of 16K tokens a job of 64 queries then leaves a sixteenth of what it read.
PROGRAMS = 528
FEWEST = 4  # blocks of a job: of one, 64 queries would leave as much as they read
_MERGED_ROWS, _MERGED_JOBS = 4, 8  # queries of a program that merges; jobs that it reads at once
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_LOG2_E = math.log2(math.e)


class Tile(NamedTuple):
    """How the kernel is cut.

    Attributes:
      queries: of a unit, query heads counted; a power of two from SMALLEST on.
      keys: of a block, likewise.
      warps: of 32 threads, that share a program.
      stages: blocks that are in shared memory or on their way to it.
    """

    queries: int
    keys: int
    warps: int
    stages: int


# The largest by bytes of the pool's numbers (4 wherever products are of float32) and head size; a
# tile of at most 64 queries has 4 warps. Compiled for the H200 (sm_90a) with jaxlib 0.10.2's Triton
# and CUDA 12.9's ptxas, never run: at most 128 of 227 KiB of shared memory; no registers spill but
# with int8 keys and float32 queries (284 bytes a thread). For heads of 128, siblings (64 queries)
# take 112 KiB and 168 registers, one query a row 70 KiB and 72: 2 and 3 programs share a
# multiprocessor, each with 64 KiB on their way. Of int8 it is 82 KiB and 187 registers, 56 KiB and
# 96, with 48 KiB on their way. Products of two-byte numbers are in the tensor cores, from 64
# queries on by wgmma; those of float32 are for tests. Which tiles are the fastest is not measured.
TILES = {
    (1, 128): Tile(128, 64, 8, 4),
    (1, 256): Tile(64, 32, 4, 3),
    (2, 128): Tile(128, 64, 8, 3),
    (2, 256): Tile(64, 32, 4, 2),
    (4, 128): Tile(32, 16, 8, 2),
    (4, 256): Tile(16, 16, 8, 2),
}


def unsupported(q: Any, pages: Pages) -> str | None:
    """Why `attend` takes no arrays of these shapes and dtypes, or None."""
    keys, block, size = pages.keys, pages.keys.shape[3], q.shape[-1]
    if block < SMALLEST or block & (block - 1):
        return f"block: pages of {block} tokens a device; want a power of two from {SMALLEST} on"
    if size > LARGEST_HEAD:
        return f"head_size: {size}; want at most {LARGEST_HEAD}"
    if q.dtype not in _FLOATS or keys.dtype not in (*_FLOATS, jnp.int8):
        return (
            f"dtype: q {q.dtype}, pages.keys {keys.dtype}; want 2- or 4-byte floats, or int8 keys"
        )
    if (keys.dtype == jnp.int8) == (pages.key_scales is None):
        return f"pages.key_scales: want them beside int8 and nothing else; keys are {keys.dtype}"
    if keys.dtype.itemsize == 1 and 2**31 < keys.size <= 2**32:
        return f"pages.keys: {keys.size} numbers of one byte; want at most 2^31 or more than 2^32"
    return None


def attend(
    q: jax.Array,
    pages: Pages,
    layer: jax.Array | int,
    table: jax.Array,
    visible: jax.Array,
    share: tuple[jax.Array | int, int] = (0, 1),
    *,
    tile: Tile | None = None,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of rows of queries to the pages of each row; not differentiable.

    Arguments and results are those of paged.attend. Inside shard_map this needs check_vma=False.

    Args:
      share: its part may be traced.
      tile: None: from TILES.
      interpret: run by the interpreter; None: unless the default backend is a GPU.
    """
    why = unsupported(q, pages)
    if why:
        raise ValueError(why)
    rows, time, heads, size = q.shape
    pool, kv_heads = pages.keys, pages.keys.shape[2]
    if pool.dtype != jnp.int8:
        q = q.astype(jnp.promote_types(q.dtype, pool.dtype))
    tile = tile or _default_tile(q, pages)
    seen = jnp.minimum(_own(visible, pages.block, *share), table.shape[1] * pages.block)
    queries, seen = _units(q, seen, kv_heads, tile.queries)
    most = pl.cdiv(table.shape[1] * pages.block, tile.keys)
    blocks = pl.cdiv(jnp.max(seen, axis=1), tile.keys)
    jobs, spans = list_jobs(blocks, len(seen) // rows, most, max(1, PROGRAMS // kv_heads))
    # Whole blocks and one more, which is looked up ahead; behind a row's end may be no page.
    of_block = max(1, tile.keys // pages.block)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % of_block + of_block)))
    table = jnp.clip(table, 0, pool.shape[1] - 1)
    indices = jobs, jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)), table, seen
    if interpret is None:
        interpret = jax.default_backend() != "gpu"
    outs, lses = _run_jobs(indices, queries, pages, size, tile, interpret)
    out, lse = _merge_jobs(spans, outs, lses, time * heads // kv_heads, interpret)

    def from_units(x):
        """[U, K, queries, ...] to [M, T, N, ...]."""
        x = x.reshape(rows, -1, *x.shape[1:]).swapaxes(1, 2)
        x = x.reshape(rows, kv_heads, -1, *x.shape[4:])[:, :, : time * heads // kv_heads]
        x = x.reshape(rows, kv_heads, time, -1, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(rows, time, heads, *x.shape[4:])

    return from_units(out)[..., :size], from_units(lse)


def list_jobs(
    blocks: jax.Array, units_of_row: int, most: int, pieces: int
) -> tuple[jax.Array, jax.Array]:
    """Cuts the blocks of all units into pieces of nearly equal length.

    Args:
      blocks: int32 [U], of keys that a unit has to meet.
      units_of_row: units that share a row's table.
      most: bound of `blocks`.
      pieces: how many there would be if all were equally long and no unit ended.

    Returns:
      jobs int32 [E, 4]: unit, row, first block and the one behind the last; behind the end of the
      list no blocks. And spans int32 [U, 2]: of each unit the first of its jobs and the one behind
      the last.
    """
    units = len(blocks)
    # Each unit has one piece that is not full, and no piece is shorter than FEWEST but such ones.
    count = min(units + pieces, units * pl.cdiv(most, FEWEST))
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


# From the caller's arrays to the kernels'.


def _default_tile(q: jax.Array, pages: Pages) -> Tile:
    """No larger than the queries of a row and key head."""
    wanted = q.shape[1] * q.shape[2] // pages.keys.shape[2]
    count = 4 if q.dtype == jnp.float32 else pages.keys.dtype.itemsize
    tile = TILES[count, max(_power(q.shape[-1]), 128)]
    queries = min(tile.queries, _power(wanted))
    return tile._replace(queries=queries, warps=4 if queries <= 64 and count < 4 else tile.warps)


def _power(number: int) -> int:
    """The next power of two from SMALLEST on."""
    return max(SMALLEST, pl.next_power_of_2(number))


def _own(visible: jax.Array, block: int, part: jax.Array | int, parts: int) -> jax.Array:
    """How many of the device's own keys are among so many leading keys of a row: of page j it has
    positions (j parts + part) C to (j parts + part + 1) C - 1."""
    whole, rest = visible // (block * parts), visible % (block * parts)
    return whole * block + jnp.clip(rest - part * block, 0, block)


def _units(q: jax.Array, seen: jax.Array, kv_heads: int, together: int) -> list[jax.Array]:
    """[U, K, queries, H], H padded, of q [M, T, N, H], and [U, queries] of what they see [M, T]:
    queries of padding see nothing."""
    rows, time, heads, size = q.shape
    q = q.reshape(rows, time, kv_heads, -1, size).swapaxes(1, 2)
    q = q.reshape(rows, kv_heads, -1, size)
    seen = jnp.repeat(seen, heads // kv_heads, axis=1)
    more = -q.shape[2] % together
    q = jnp.pad(q, ((0, 0), (0, 0), (0, more), (0, _power(size) - size)))
    q = q.reshape(rows, kv_heads, -1, together, q.shape[-1]).swapaxes(1, 2)
    seen = jnp.pad(seen, ((0, 0), (0, more)))
    return [q.reshape(-1, *q.shape[2:]), seen.reshape(-1, together)]


def _whole(x: jax.Array, *own: int) -> pl.BlockSpec:
    """All of an array but, of axes `own`, what the program's key head (grid axis 1) has."""
    axes = range(x.ndim)
    shape = tuple(None if n in own else x.shape[n] for n in axes)
    return pl.BlockSpec(shape, lambda e, h: tuple(h if n in own else 0 for n in axes))


def _run_jobs(
    indices: tuple[jax.Array, ...],
    queries: jax.Array,
    pages: Pages,
    size: int,
    tile: Tile,
    interpret: bool,
) -> list[jax.Array]:
    """Out [E, K, queries, H] and log-sum-exp [E, K, queries] of each job; empty ones leave none.
    Indices: jobs [E, 4], layer [1], table [M, J], seen [U, queries]."""
    count, (_, kv_heads, together, padded) = len(indices[0]), queries.shape
    pools = jax.tree.leaves((pages.keys, pages.values, pages.key_scales, pages.value_scales))
    shapes = (count, kv_heads, together, padded), (count, kv_heads, together)
    return pl.pallas_call(
        functools.partial(_job_kernel, tile.keys, pages.block, size),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid=(count, kv_heads),
        in_specs=[
            pl.BlockSpec((None, 4), lambda e, h: (e, 0)),
            *[_whole(x) for x in indices[1:]],
            _whole(queries, 1),
            *[_whole(x, 2) for x in pools],
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
    """Out [U, K, queries, H] and log-sum-exp [U, K, queries] of all jobs of each unit; where a
    row's queries are one unit, its padding is left out."""
    (count, kv_heads, together, size), some = outs.shape, _MERGED_ROWS
    together = min(together, pl.cdiv(queries, some) * some)
    shapes = (len(spans), kv_heads, together, size), (len(spans), kv_heads, together)
    return pl.pallas_call(
        _merge_kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid=(together // some, kv_heads, len(spans)),
        in_specs=[
            pl.BlockSpec((None, 2), lambda i, h, u: (u, 0)),
            pl.BlockSpec((count, None, some, size), lambda i, h, u: (0, h, i, 0)),
            pl.BlockSpec((count, None, some), lambda i, h, u: (0, h, i)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, some, size), lambda i, h, u: (u, h, i, 0)),
            pl.BlockSpec((None, None, some), lambda i, h, u: (u, h, i)),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(spans, outs, lses)


# The kernels, of static numbers and of references.


def _nothing(queries: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What was gathered [queries, H], the top score and the total weight [queries] before any key:
    the top is above MASKED, so that masked scores have no weight then either."""
    gathered, total = jnp.zeros((queries, size), jnp.float32), jnp.zeros((queries,), jnp.float32)
    return gathered, jnp.full_like(total, MASKED / 2), total


def _page(table, row, number, block_k: int, block: int) -> jax.Array:
    """The page of a block of keys, or of each of its keys if it takes several pages."""
    if block_k <= block:
        return table[row, lax.div(number, block // block_k)]
    place = lax.iota(jnp.int32, block_k)
    return table[row, number * (block_k // block) + lax.div(place, jnp.full_like(place, block))]


def _tokens(number, block_k: int, block: int) -> Any:
    """Where a block of keys lies in its page: a slice, or places in several pages."""
    if block_k <= block:
        return pl.ds(lax.rem(number, block // block_k) * block_k, block_k)
    place = lax.iota(jnp.int32, block_k)
    return lax.rem(place, jnp.full_like(place, block))


def _fetch(pool, layer, page, token, size: int, padded: int, dtype) -> jax.Array:
    """Keys or values [keys, H] of some tokens."""
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
    block_k, block, size, job, layer, table, seen, q, keys, values, *scales_and_results
) -> None:
    """Grid [E, K]; q [U, queries, H]; keys and values [L, Z, C, H]; scales [L, Z, C], if any;
    out [queries, H]; lse [queries]."""
    *scales, out, lse = scales_and_results
    unit, row, begin, end = (job[n] for n in range(4))
    dot = functools.partial(plgpu.dot, allow_tf32=False)  # summed in float32

    @pl.when(begin < end)
    def _():
        queries, sees, which = q[unit, :, :], seen[unit, :][:, None], layer[0]

        def step(number, state):
            gathered, top, total, page = state
            token = _tokens(number, block_k, block)
            fetch = functools.partial(_fetch, layer=which, page=page, token=token)
            fetch = functools.partial(fetch, size=size, padded=q.shape[-1], dtype=q.dtype)
            scores = dot(queries, fetch(keys), trans_b=True) * (size**-0.5 * _LOG2_E)
            if scales:
                scores *= scales[0][which, page, token][None, :]
            place = number * block_k + lax.iota(jnp.int32, block_k)
            scores = jnp.where(place[None, :] < sees, scores, MASKED)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            weights = jnp.exp2(scores - new_top[:, None])
            shrink = jnp.exp2(top - new_top)
            total = total * shrink + jnp.sum(weights, axis=1)
            if scales:
                weights *= scales[1][which, page, token][None, :]
            more = dot(weights.astype(q.dtype), fetch(values))
            # Looked up where it is used, the page would take up the stages of the copies that wait
            # for it: compiled so, a program waits for the block that it has just begun to fetch.
            page = _page(table, row, number + 1, block_k, block)
            return gathered * shrink[:, None] + more, new_top, total, page

        start = (*_nothing(*queries.shape), _page(table, row, begin, block_k, block))
        gathered, top, total, _ = lax.fori_loop(begin, end, step, start)
        positive = jnp.maximum(total, 1e-30)
        out[...] = gathered / positive[:, None]
        lse[...] = jnp.where(total > 0, (top + jnp.log2(positive)) / _LOG2_E, MASKED)


def _merge_kernel(span, outs, lses, out, lse) -> None:
    """Grid [pieces of units, K, U]; outs [E, queries, H]; lses [E, queries]; out [queries, H];
    lse [queries]."""
    begin, end = span[0], span[1]

    def step(number, state):
        gathered, top, total = state
        job = begin + number * _MERGED_JOBS + lax.iota(jnp.int32, _MERGED_JOBS)
        live = (job < end)[:, None]
        # Behind the end is what nobody wrote.
        job = jnp.minimum(job, end - 1)
        found = jnp.where(live, lses[job, :], MASKED)
        new_top = jnp.maximum(top, jnp.max(found, axis=0))
        weights = jnp.exp(found - new_top[None, :])
        shrink = jnp.exp(top - new_top)
        more = jnp.sum(weights[:, :, None] * outs[job, :, :], axis=0)
        total = total * shrink + jnp.sum(weights, axis=0)
        return gathered * shrink[:, None] + more, new_top, total

    steps = pl.cdiv(end - begin, _MERGED_JOBS)
    gathered, top, total = lax.fori_loop(0, steps, step, _nothing(*out.shape))
    positive = jnp.maximum(total, 1e-30)
    out[...] = gathered / positive[:, None]
    lse[...] = jnp.where(total > 0, top + jnp.log(positive), MASKED)
