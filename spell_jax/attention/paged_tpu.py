"""Paged attention on TPU: a Pallas kernel that overlaps page fetches with compute.

XLA would gather pages into a new array before multiplying. Here each page is read once, from HBM.

1. A grid step is one row, or one block of its queries. The queries of the R = N / K query heads of
   a key head are the rows of one product with that head's keys.
2. The number of pages that a step's queries see is computed outside and prefetched to scalar
   memory. No other page is fetched, and a step that sees none does no product.
3. Asynchronous copies fetch pages in chunks of about 2 MiB, all key heads at once, into one of two
   buffers. While one chunk is used, the next one is fetched: of this row, or the first chunk of the
   next step's row, so that short rows overlap too.
4. Scalar memory holds the page tables of the current row and the next. All tables would not fit:
   512 rows of 1024 pages take 2 MiB, and there is 1 MiB.
5. A chunk is used in pieces of about 512 keys, as many as hold fetched pages, with a float32 online
   softmax.
6. int8 keys and values are cast to the queries' dtype. Scores are multiplied by the key scales and
   weights by the value scales: one multiplication per key, not H.
7. The first grid axis splits odd and even steps over the two cores of a v4 or v5p chip. Each core
   prefetches for itself.

Compiled for v5e and v5p, and run in the interpreter; never run on a TPU.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from spell_jax.attention.blocks import dot
from spell_jax.attention.masks import MASKED
from spell_jax.attention.pages import Pages, by_kv_head, by_token

# With these limits, kernels for shapes that fit use 4 to 12 of the available 16 MiB of VMEM.
_CHUNK = 2**21  # bytes of keys and values, in each of two buffers
# Bytes of a step's queries [K, queries, H], and of one head's weights [queries, keys] of a piece.
_STEP = 2**19
_PIECE = 512  # keys per product
_MOST_PAGES = 2**15  # per row: the tables of two rows, double-buffered, take 512 KiB


class _BlockSizes(NamedTuple):
    """Block sizes of the kernel."""

    queries: int  # rows of one product, a multiple of the tile height
    blocks: int  # query blocks per row
    piece: int  # pages per product
    chunk: int  # pages fetched at once, a multiple of `piece`


def attend(
    q: jax.Array,
    pages: Pages,
    layer: jax.Array,
    table: jax.Array,
    num_visible: jax.Array,
    share: tuple[jax.Array | int, int] = (0, 1),
    first_visible: jax.Array | None = None,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute `paged.attend` on TPU, for shapes that `fits` accepts.

    `first_visible` only masks: paged.attend has cut the pages before it off the table. Keys and
    values are cast to q's dtype. `interpret` runs the Pallas interpreter, on any device.
    Inside shard_map this needs check_vma=False.
    """
    rows, time, heads, size = q.shape
    kv_heads = pages.keys.shape[2]
    sizes = _block_sizes(q, pages, table.shape[1])
    padded = sizes.queries * sizes.blocks - time * heads // kv_heads
    queries = by_kv_head(q, kv_heads) * size**-0.5
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, padded), (0, 0)))
    visible = [num_visible] if first_visible is None else [num_visible, first_visible]
    visible = jnp.repeat(jnp.stack(visible, axis=1), heads // kv_heads, axis=2)
    visible = jnp.pad(visible, ((0, 0), (0, 0), (0, padded)))
    visible = visible.reshape(rows, -1, sizes.blocks, sizes.queries).swapaxes(1, 2)
    out, lse = _run_kernel(queries, pages, layer, table, visible, share, sizes, interpret)
    lse = lse.swapaxes(1, 2).reshape(rows, kv_heads, -1)
    out, lse = (x[:, :, : x.shape[2] - padded] for x in (out, lse))
    return by_token(out, time), by_token(lse, time)


def fits(q: jax.Array, pages: Pages, table: jax.Array) -> bool:
    """Return whether the kernel compiles for these shapes; the interpreter takes any shapes.

    VMEM must hold two pages in q's dtype (with 4 key heads of size 128: 1024 tokens in bfloat16),
    and scalar memory the tables of two rows. XLA would copy the pool unless pages consist of whole
    tiles: a head size that is a multiple of 128, and pages of a multiple of 8 tokens for 4-byte
    dtypes, 16 for 2-byte dtypes and 128 for int8 (because of the scales).
    """
    kv_heads, page_size, size = pages.keys.shape[2:]
    itemsize = pages.keys.dtype.itemsize
    page = 2 * kv_heads * page_size * size * max(q.dtype.itemsize, itemsize)
    is_tiled = size % 128 == 0 and page_size % (128 if itemsize == 1 else 32 // itemsize) == 0
    return is_tiled and page <= _CHUNK and table.shape[1] <= _MOST_PAGES


def _block_sizes(q: jax.Array, pages: Pages, table: int) -> _BlockSizes:
    kv_heads, page_size, size = pages.keys.shape[2:]
    page = 2 * kv_heads * page_size * size * pages.keys.dtype.itemsize
    tile = 32 // q.dtype.itemsize
    count = pl.cdiv(q.shape[1] * q.shape[2] // kv_heads, tile)  # query tiles per key head
    piece = max(1, min(_PIECE // page_size, table, _CHUNK // page))
    max_queries = _STEP // q.dtype.itemsize // max(kv_heads * size, piece * page_size, _PIECE)
    blocks = pl.cdiv(count, max(1, max_queries // tile))
    pieces = max(1, min(_CHUNK // (page * piece), pl.cdiv(table, piece)))
    return _BlockSizes(pl.cdiv(count, blocks) * tile, blocks, piece, pieces * piece)


def _run_kernel(
    queries, pages: Pages, layer, table, visible, share, sizes: _BlockSizes, interpret
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel on scaled queries [M, K, blocks * queries, H].

    `visible` is int32 [M, blocks, 1 or 2, queries], the number of keys that a query sees and with
    windows the first of them. Returns out like the queries and log-sum-exp
    [M, blocks, K, queries], float32.
    """
    rows, kv_heads, _, size = queries.shape
    page_size, (part, parts) = pages.page_size, share
    longest = jnp.max(visible[:, :, 0], axis=2).reshape(-1)
    # Of page j a device holds the positions from (j parts + part) C on.
    counts = jnp.clip(pl.cdiv(longest - part * page_size, parts * page_size), 0, table.shape[1])
    origin = jnp.stack([jnp.int32(layer), jnp.int32(part * page_size)])
    offsets = jnp.arange(sizes.piece)[:, None] * parts * page_size + jnp.arange(page_size)
    steps = len(counts)
    # A grid is rectangular: an odd number of steps stays on one core.
    cores = 2 if steps % 2 == 0 else 1

    def of_step(shape, index, ahead: int = 0, **options):
        def index_map(core, step, counts, origin):
            step = jnp.minimum((step + ahead) * cores + core, steps - 1)
            blocks = jnp.int32(sizes.blocks)
            return index(lax.div(step, blocks), lax.rem(step, blocks))

        return pl.BlockSpec(shape, index_map, **options)

    by_heads = of_step((None, kv_heads, sizes.queries, size), lambda i, j: (i, 0, j, 0))
    a_table = functools.partial(
        of_step, (None, 1, table.shape[1]), lambda i, j: (i, 0, 0), memory_space=pltpu.SMEM
    )
    pools = _pools(pages, interpret)
    state = pltpu.VMEM((kv_heads, sizes.queries, 1), jnp.float32)
    buffers = [pltpu.VMEM((2, sizes.chunk, *x.shape[2:]), x.dtype) for x in pools]
    run = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes, stride=parts * page_size),
        out_shape=[
            jax.ShapeDtypeStruct(queries.shape, jnp.float32),
            jax.ShapeDtypeStruct((rows, sizes.blocks, kv_heads, sizes.queries), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores, steps // cores),
            in_specs=[
                a_table(),
                a_table(ahead=1),
                pl.BlockSpec((1, sizes.piece * page_size), lambda *_: (0, 0)),
                of_step((None, None, *visible.shape[2:]), lambda i, j: (i, j, 0, 0)),
                by_heads,
                *[pl.BlockSpec(memory_space=pltpu.HBM) for _ in pools],
            ],
            out_specs=[
                by_heads,
                of_step((None, None, kv_heads, sizes.queries), lambda i, j: (i, j, 0, 0)),
            ],
            scratch_shapes=[
                state,
                state,
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                *buffers,
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="paged_attention",
    )
    tables = table.astype(jnp.int32)[:, None]
    offsets = offsets.reshape(1, -1).astype(jnp.int32)
    indices = counts.astype(jnp.int32), origin, tables, tables, offsets, visible
    return run(*indices, queries, *pools)


def _pools(pages: Pages, interpret) -> list[Any]:
    """Return the arrays of the pool in HBM: keys, values and (int8) their scales."""
    pools = [pages.keys, pages.values]
    if pages.key_scales is not None:
        pools += [pages.key_scales, pages.value_scales]
    if interpret:
        return pools
    # Without the constraint XLA copies small pools (scales) to VMEM before every layer.
    return [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in pools]


# The kernel. `pools` in HBM are keys, values and (int8) their scales; `buffers` in VMEM have shape
# [2, pages per chunk, ...].


def _kernel(
    counts, origin, table, next_table, offsets, visible, queries, *refs, sizes, stride
) -> None:
    """Compute the attention of one block of queries of a row, grid [cores, steps].

    Shapes: queries and out [K, queries, H]; visible [1 or 2, queries]; lse [K, queries]; top and
    total [K, queries, 1]. `origin` is the layer and the first position of a page; `first` is the
    number of the buffer for the row's first chunk.
    """
    count = (len(refs) - 6) // 2
    pools, (out, lse, top, total, first, arrived, *buffers) = refs[:count], refs[count:]
    cores, step = pl.num_programs(0), pl.program_id(1)
    place = step * cores + pl.program_id(0)
    num_pages = counts[place]
    is_last = step == pl.num_programs(1) - 1
    # No step would wait for copies that the last step starts.
    next_pages = jnp.where(is_last, 0, counts[jnp.where(is_last, place, place + cores)])

    def copies(page, slot, i):
        for pool, buffer in zip(pools, buffers, strict=True):
            source, target = pool.at[origin[0], page], buffer.at[slot, i]
            yield pltpu.make_async_copy(source, target, arrived.at[slot])

    def fetch(table, pages, chunk, slot) -> None:
        @pl.loop(0, jnp.minimum(pages - chunk * sizes.chunk, sizes.chunk))
        def _(i):
            for copy in copies(table[0, chunk * sizes.chunk + i], slot, i):
                copy.start()

    @pl.when(step == 0)
    def _():
        first[0] = 0
        # Uninitialized values may be NaN, and a weight of 0 times NaN would not be 0.
        for buffer in buffers[1::2]:
            buffer[...] = jnp.zeros(buffer.shape, buffer.dtype)
        fetch(table, num_pages, 0, 0)

    # The running maximum starts above MASKED, so that masked scores always have weight 0.
    top[...] = jnp.full(top.shape, MASKED / 2, jnp.float32)
    total[...] = jnp.zeros(total.shape, jnp.float32)
    out[...] = jnp.zeros(out.shape, jnp.float32)
    begin, chunks = first[0], _ceil(num_pages, sizes.chunk)

    @pl.loop(0, chunks)
    def _(chunk):
        slot = (begin + chunk) & 1
        live = jnp.minimum(num_pages - chunk * sizes.chunk, sizes.chunk)

        @pl.when(chunk + 1 < chunks)
        def _():
            fetch(table, num_pages, chunk + 1, 1 - slot)

        @pl.when(chunk + 1 == chunks)
        def _():
            fetch(next_table, next_pages, 0, 1 - slot)

        @pl.loop(0, live)
        def _(i):
            for copy in copies(0, slot, i):
                copy.wait()

        @pl.loop(0, _ceil(live, sizes.piece))
        def _(piece):
            page = chunk * sizes.chunk + piece * sizes.piece
            before = page * stride + origin[1]
            is_visible = offsets[...] < visible[0:1].reshape(-1, 1) - before
            if len(visible) > 1:
                is_visible &= offsets[...] >= visible[1:2].reshape(-1, 1) - before
            page_range = (slot, pl.ds(piece * sizes.piece, sizes.piece))
            _add_pages(queries, buffers, page_range, is_visible, (out, top, total))

    # A step without pages has no last chunk in which to fetch for the next step.
    pl.when(chunks == 0)(lambda: fetch(next_table, next_pages, 0, begin))
    first[0] = (begin + chunks) & 1
    positive = jnp.maximum(total[...], 1e-30)
    out[...] = out[...] / positive
    log_sum_exp = jnp.where(total[...] > 0, top[...] + jnp.log(positive), MASKED)
    lse[...] = log_sum_exp.reshape(lse.shape)


def _ceil(count, size: int):
    """Divide a count >= 0, rounded up; without a TPU, Mosaic supports only lax.div."""
    return lax.div(count + (size - 1), jnp.int32(size))


def _add_pages(queries, buffers, page_range, visible, state) -> None:
    """Add some pages of the buffers, with a mask [queries, keys], to the softmax state in place."""
    out, top, total = state
    keys, values, *scales = buffers
    for head in range(len(queries)):
        q = queries[head]
        scores = dot(q, _tokens(keys, page_range, head, q), b_transposed=True)
        if scales:
            scores = scores * _row(scales[0], page_range, head)
        scores = jnp.where(visible, scores, MASKED)
        new_top = jnp.maximum(top[head], jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - new_top)
        shrink = jnp.exp(top[head] - new_top)
        top[head] = new_top
        total[head] = total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        if scales:
            weights = weights * _row(scales[1], page_range, head)
        part_out = dot(weights.astype(q.dtype), _tokens(values, page_range, head, q))
        out[head] = out[head] * shrink + part_out


def _tokens(buffer, page_range, head: int, q: jax.Array) -> jax.Array:
    """Return the keys or values of some pages [pages, C] as [keys, H] in q's dtype."""
    return buffer[*page_range, head].reshape(-1, q.shape[1]).astype(q.dtype)


def _row(buffer, page_range, head: int) -> jax.Array:
    """Return the scales [1, keys] of some pages [pages, C]."""
    scales = buffer[*page_range, head]
    return jnp.concatenate([scales[i : i + 1] for i in range(len(scales))], axis=1)
