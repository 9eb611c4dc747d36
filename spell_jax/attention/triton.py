"""Flash attention on NVIDIA GPUs: Pallas (Triton) kernels for the mask of packed rows.

The kernels work on one row on one device, which may hold only a part of the row, in any order:
queries and keys carry their row indices. Partial outputs are merged by their log-sum-exp.

1. Queries and keys are cut into blocks. Minima and maxima of the numbers that decide who sees whom
   (masks.sees) classify each pair of blocks as dead, full (all visible) or partial. For each block
   of queries, the device lists its blocks of keys: full ones first, then partial ones
   (`list_pairs`).
2. Forward: a program handles one block of queries of one head. It walks through its list with an
   online softmax, first through full pairs without a mask, then through partial ones.
3. Backward: two kernels, so that nothing larger than the gradients is stored. One computes dq by
   the same walk. In the other, a program holds one block of keys and walks through the blocks of
   queries that see it, all R query heads of each, for dk and dv. Scores are recomputed, and the
   log-sum-exp turns them into weights.

Lists replace a loop that tests every pair of blocks. In a row of short groups nearly all pairs are
dead, and testing dead pairs may take longer than the work on live pairs. Triton prefetches the next
blocks (num_stages) only in loops without branches: compiled with a branch, the forward kernel has
no asynchronous copies left.

A list costs at most one int32 per pair of blocks, shared by all heads: for 131,072 queries and keys
8 MiB per kernel in bfloat16 (up to 256 MiB with the small blocks of float32), and the same again
while it is sorted. A list is in global memory, and a program reads its own few KiB.

Offsets count elements. Pallas uses 64-bit offsets for arrays above 4 GiB, else 32-bit ones, so no
array that fits in memory overflows. Head sizes are padded to 16, 32, 64, 128 or 256. Scores inside
the kernels are in base 2, because the GPU's native exponential is 2**x; the returned log-sum-exp is
natural.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from spell_jax.attention import blocks, masks
from spell_jax.attention.kernel import Inputs
from spell_jax.attention.masks import MASKED

SMALLEST = 16  # smallest side of a product in Triton; all sides are powers of two
LARGEST_HEAD = 256
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_COUNTS = 2  # words before a list: number of full pairs, number of live pairs


class Tile(NamedTuple):
    """Block sizes (at most; powers of two, at least SMALLEST) and launch parameters of a kernel."""

    queries: int
    keys: int
    warps: int  # of 32 threads, per program
    stages: int  # of the pipeline: blocks in shared memory or in transfer to it


class Tiles(NamedTuple):
    """One tile for each kernel."""

    forward: Tile
    dq: Tile
    dkv: Tile


# By element size in bytes and head size. For 2-byte elements and heads of 64 and 128, the fastest
# of 13 tiles, or within 1 % of the fastest, on an H200 with 16,384 causal tokens (tiles_* in
# docs/measurements/accelerator_h200.json). In ms, from the tiles before them: forward 1.49 to 1.42,
# dq 2.27 to 1.60, dk and dv 3.22 to 2.53 with 14 heads of 64; 5.69 to 4.80, 6.44 to 5.60, 8.29 to
# 8.23 with 28 heads of 128. The other tiles are not measured. Compiled for sm_90a by jaxlib 0.11.2
# and ptxas 13.5, no kernel uses more than 193 of 227 KiB of shared memory or spills a register.
# Products of 2-byte inputs run on the tensor cores (wgmma), products of float32 as ordinary
# multiply-adds, for tests.
DEFAULT_TILES = {
    (2, 64): Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    (2, 128): Tiles(Tile(128, 128, 8, 2), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    (2, 256): Tiles(Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(32, 64, 8, 2)),
    (4, 64): Tiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    (4, 128): Tiles(Tile(32, 32, 16, 2), Tile(32, 16, 8, 2), Tile(16, 32, 8, 2)),
    (4, 256): Tiles(Tile(16, 16, 8, 2), Tile(16, 16, 8, 2), Tile(16, 16, 8, 2)),
}


def forward(
    inputs: Inputs, *, tiles: Tiles | None = None, interpret: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    """Compute Kernel.forward for one row, in float32, bfloat16 or float16.

    May be vmapped over rows, because a program walks only as far as its own list. Inside shard_map
    this needs check_vma=False. `tiles` None takes DEFAULT_TILES. `interpret` runs the Pallas
    interpreter; None does so unless the default backend is a GPU.

    Raises ValueError if the dtypes differ or are not supported, H exceeds 256, or a tile is
    invalid.
    """
    time, kv_heads, heads, size = inputs.q.shape
    tile, pairs, data = _prepare(inputs, tiles, "forward")
    specs = _query_specs(tile, data)
    statistics = jax.ShapeDtypeStruct((kv_heads, heads, len(data.q)), jnp.float32)
    out, lse = _run_kernel(
        functools.partial(_forward_kernel, tile.keys, size**-0.5),
        tile,
        grid=(heads, len(pairs), kv_heads),
        inputs=[(specs["pairs"], pairs), *_array_specs(specs, data)],
        outputs=[(specs["queries"], data.q), (specs["statistics"], statistics)],
        interpret=interpret,
    )
    return out[:time, ..., :size], lse[..., :time]


def backward(
    inputs: Inputs,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
    *,
    tiles: Tiles | None = None,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute Kernel.backward for one row; options and errors as in forward."""
    (time, kv_heads, heads, size), keys = inputs.q.shape, len(inputs.k)
    gradients = lse, delta, d_out.astype(inputs.q.dtype)
    tile, pairs, data = _prepare(inputs, tiles, "dq")
    specs = _query_specs(tile, data)
    (dq,) = _run_kernel(
        functools.partial(_dq_kernel, tile.keys, size**-0.5),
        tile,
        grid=(heads, len(pairs), kv_heads),
        inputs=[(specs["pairs"], pairs), *_array_specs(specs, data, gradients)],
        outputs=[(specs["queries"], data.q)],
        interpret=interpret,
    )
    tile, pairs, data = _prepare(inputs, tiles, "dkv")
    specs = _key_specs(tile, data)
    dk, dv = _run_kernel(
        functools.partial(_dkv_kernel, tile.queries, size**-0.5),
        tile,
        grid=(len(pairs), kv_heads),
        inputs=[(specs["pairs"], pairs), *_array_specs(specs, data, gradients)],
        outputs=[(specs["keys"], data.k), (specs["keys"], data.v)],
        interpret=interpret,
    )
    return dq[:time, ..., :size], dk[:keys, :, :size], dv[:keys, :, :size]


def list_pairs(
    of_queries: Sequence[jax.Array],
    of_keys: Sequence[jax.Array],
    block_q: int,
    block_k: int,
    by_keys: bool,
) -> jax.Array:
    """List the blocks of keys that each block of queries visits, or with `by_keys` the reverse.

    `of_queries` and `of_keys` are as in masks.sees; `block_q` divides Tq and `block_k` Tk. The
    lists are int32 [lists, 2 + n], with n blocks on the other side: the number of full pairs, the
    number of live (full or partial) pairs, then block numbers, full, partial and dead (never read),
    each in ascending order.
    """
    live, full = masks.live_and_full_blocks(
        [x.reshape(-1, block_q) for x in of_queries], [x.reshape(-1, block_k) for x in of_keys]
    )
    if by_keys:
        live, full = live.T, full.T
    num_blocks = live.shape[1]
    place = jnp.arange(num_blocks, dtype=jnp.int32)
    # One sort with one word per pair.
    offset = jnp.where(full, 0, jnp.where(live, num_blocks, 2 * num_blocks)).astype(jnp.int32)
    order = jnp.sort(offset + place, axis=1) % num_blocks
    counts = [jnp.sum(x, axis=1, dtype=jnp.int32)[:, None] for x in (full, live)]
    return jnp.concatenate([*counts, order], axis=1)


# Conversion from the caller's arrays to the kernels' arrays.


def _prepare(inputs: Inputs, tiles: Tiles | None, kernel: str) -> tuple[Tile, jax.Array, Inputs]:
    """Choose the tile that fits the row, list the pairs and pad the arrays, H to a power of two."""
    q, k, v, *_ = inputs
    if not q.dtype == k.dtype == v.dtype or q.dtype not in FLOATS:
        raise ValueError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; must be one of float32, bfloat16 "
            "and float16 for all"
        )
    # Zeros in the padding of H change no product. Triton needs sides that are powers of two.
    size = padded_size(q.shape[-1])
    if size > LARGEST_HEAD:
        raise ValueError(f"head size {q.shape[-1]}: must be at most {LARGEST_HEAD}")
    tiles = tiles or DEFAULT_TILES[q.dtype.itemsize, max(size, 64)]
    tile = _fit_tile(getattr(tiles, kernel), len(q), len(k))
    padded = blocks.pad_inputs(inputs, tile.queries, tile.keys)
    q, k, v = (blocks.pad(x, -1, size) for x in padded[:3])
    sides = padded.of_queries, padded.of_keys, tile.queries, tile.keys
    pairs = list_pairs(*sides, by_keys=kernel == "dkv")
    return tile, pairs, padded._replace(q=q, k=k, v=v)


def padded_size(number: int) -> int:
    """Return the smallest power of two that is at least `number` and SMALLEST."""
    return max(SMALLEST, pl.next_power_of_2(number))


def _fit_tile(tile: Tile, queries: int, keys: int) -> Tile:
    """Shrink a tile to the size of the row."""
    for side in tile[:2]:
        if side < SMALLEST or side & (side - 1):
            raise ValueError(f"a block of {side} is no power of two from {SMALLEST} on")
    return tile._replace(
        queries=min(tile.queries, padded_size(queries)), keys=min(tile.keys, padded_size(keys))
    )


def _query_specs(tile: Tile, data: Inputs) -> dict[str, pl.BlockSpec]:
    """Return block specs by kind of array for programs on grid [R, query blocks, K].

    The R heads of a block of queries run at the same time and share the keys they read.
    """
    time, _, size = data.k.shape
    # Of tokens in order, later queries see more keys. They run first, so that short programs fill
    # the end.
    last = len(data.q) // tile.queries - 1
    return {
        "pairs": pl.BlockSpec((None, _COUNTS + time // tile.keys), lambda r, i, h: (last - i, 0)),
        "query_numbers": pl.BlockSpec((tile.queries,), lambda r, i, h: (last - i,)),
        "key_numbers": pl.BlockSpec((time,), lambda r, i, h: (0,)),
        "queries": pl.BlockSpec(
            (tile.queries, None, None, size), lambda r, i, h: (last - i, h, r, 0)
        ),
        "statistics": pl.BlockSpec((None, None, tile.queries), lambda r, i, h: (h, r, last - i)),
        "keys": pl.BlockSpec((time, None, size), lambda r, i, h: (0, h, 0)),
    }


def _key_specs(tile: Tile, data: Inputs) -> dict[str, pl.BlockSpec]:
    """Return block specs by kind of array for programs on grid [key blocks, K]."""
    time, _, heads, size = data.q.shape
    return {
        "pairs": pl.BlockSpec((None, _COUNTS + time // tile.queries), lambda j, h: (j, 0)),
        "query_numbers": pl.BlockSpec((time,), lambda j, h: (0,)),
        "key_numbers": pl.BlockSpec((tile.keys,), lambda j, h: (j,)),
        "queries": pl.BlockSpec((time, None, heads, size), lambda j, h: (0, h, 0, 0)),
        "statistics": pl.BlockSpec((None, heads, time), lambda j, h: (h, 0, 0)),
        "keys": pl.BlockSpec((tile.keys, None, size), lambda j, h: (j, h, 0)),
    }


def _array_specs(specs, data: Inputs, backward=()) -> list[tuple[Any, Any]]:
    """Pair arrays of a kernel with specs; `backward` has lse, delta and d_out, unpadded."""
    arrays = [
        (tuple(specs["query_numbers"] for _ in data.of_queries), data.of_queries),
        (tuple(specs["key_numbers"] for _ in data.of_keys), data.of_keys),
        (specs["queries"], data.q),
        (specs["keys"], data.k),
        (specs["keys"], data.v),
    ]
    if backward:
        lse, delta, d_out = backward
        widths = [(0, n - m) for n, m in zip(data.q.shape, d_out.shape, strict=True)]
        time = ((0, 0), (0, 0), widths[0])
        arrays += [
            (specs["statistics"], jnp.pad(lse, time, constant_values=-MASKED)),
            (specs["statistics"], jnp.pad(delta, time)),
            (specs["queries"], jnp.pad(d_out, widths)),
        ]
    return arrays


def _run_kernel(
    kernel: Callable[..., None],
    tile: Tile,
    grid: tuple[int, ...],
    inputs: list[tuple[Any, Any]],
    outputs: list[tuple[pl.BlockSpec, Any]],
    interpret: bool | None,
) -> tuple[jax.Array, ...]:
    """Run a kernel on arrays or tuples of arrays; `outputs` give each output's shape and dtype."""
    run = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in outputs],
        grid=grid,
        in_specs=[spec for spec, _ in inputs],
        out_specs=[spec for spec, _ in outputs],
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=jax.default_backend() != "gpu" if interpret is None else interpret,
    )
    return run(*(x for _, x in inputs))


# The kernels. Leading arguments are static (block size of the other side, scale of the scores), all
# further arguments are references. A program loads its own block once; `step` handles one block of
# the other side.


def _mask(scores, of_queries, of_keys) -> jax.Array:
    """Set scores to MASKED where a query does not see a key; the arguments broadcast."""
    return jnp.where(masks.sees(of_queries, of_keys), scores, MASKED)


def _rows(references, block: Any = ...) -> list[jax.Array]:
    """Load a block of each array [T] as a row [1, block]."""
    return [x[block][None, :] for x in references]


def _columns(references, block: Any = ...) -> list[jax.Array]:
    """Load a block of each array [T] as a column [block, 1]."""
    return [x[block][:, None] for x in references]


def _walk(pairs, step: Callable[..., Any], state: Any, repeats: int = 1) -> Any:
    """Fold step(masked, n, state) over the live pairs, with `repeats` values of n per pair."""
    full, live = pairs[0] * repeats, pairs[1] * repeats
    state = lax.fori_loop(0, full, functools.partial(step, False), state)
    return lax.fori_loop(full, live, functools.partial(step, True), state)


def _forward_kernel(block_k, scale, pairs, of_queries, of_keys, q, k, v, out, lse) -> None:
    """Run forward, grid [R, query blocks, K]: q, out [queries, H]; k, v [Tk, H]; lse [queries]."""
    queries, query_numbers = q[...], _columns(of_queries)

    def step(masked: bool, n, state: blocks.Softmax):
        keys = pl.ds(pairs[_COUNTS + n] * block_k, block_k)
        scores = blocks.dot(queries, k[keys, :], b_transposed=True) * (scale * blocks.LOG2_E)
        if masked:
            scores = _mask(scores, query_numbers, _rows(of_keys, keys))
        values = v[keys, :]
        return state.add(scores, lambda w: blocks.dot(w.astype(v.dtype), values), base2=True)

    softmax_out, lse[...] = _walk(pairs, step, blocks.Softmax.start(queries.shape)).finish(
        -MASKED, base2=True
    )
    out[...] = softmax_out.astype(out.dtype)


def _dq_kernel(block_k, scale, pairs, of_queries, of_keys, q, k, v, lse, delta, d_out, dq) -> None:
    """Compute dq (backward), grid and shapes as forward; d_out [queries, H]; delta [queries]."""
    queries, query_numbers = q[...], _columns(of_queries)
    lse2, own_delta, d_outs = lse[...][:, None] * blocks.LOG2_E, delta[...][:, None], d_out[...]

    def step(masked: bool, n, total):
        block = pl.ds(pairs[_COUNTS + n] * block_k, block_k)
        keys = k[block, :]
        scores = blocks.dot(queries, keys, b_transposed=True) * (scale * blocks.LOG2_E)
        if masked:
            scores = _mask(scores, query_numbers, _rows(of_keys, block))
        d_weights = blocks.dot(d_outs, v[block, :], b_transposed=True)
        d_scores = jnp.exp2(scores - lse2) * (d_weights - own_delta)
        return total + blocks.dot(d_scores.astype(k.dtype), keys)

    # The scale of the scores is applied once per sum, not once per pair of blocks.
    total = _walk(pairs, step, jnp.zeros(queries.shape, jnp.float32))
    dq[...] = (total * scale).astype(dq.dtype)


def _dkv_kernel(
    block_q, scale, pairs, of_queries, of_keys, q, k, v, lse, delta, d_out, dk, dv
) -> None:
    """Compute dk and dv of the backward pass, grid [key blocks, K].

    Shapes: k, v, dk and dv [keys, H]; q and d_out [Tq, R, H]; lse and delta [R, Tq]. Scores are
    transposed, [keys, queries], as the products for dk and dv need them.
    """
    keys, values, key_numbers = k[...], v[...], _columns(of_keys)
    heads = q.shape[1]

    def step(masked: bool, n, state):
        sum_k, sum_v = state
        # All heads of a query block before the next block: they are adjacent in memory.
        head = lax.rem(n, heads)
        block = pl.ds(pairs[_COUNTS + lax.div(n, heads)] * block_q, block_q)
        queries, d_outs = q[block, head, :], d_out[block, head, :]
        scores = blocks.dot(keys, queries, b_transposed=True) * (scale * blocks.LOG2_E)
        if masked:
            scores = _mask(scores, _rows(of_queries, block), key_numbers)
        weights = jnp.exp2(scores - lse[head, block][None, :] * blocks.LOG2_E)
        sum_v += blocks.dot(weights.astype(q.dtype), d_outs)
        d_weights = blocks.dot(values, d_outs, b_transposed=True)
        d_scores = weights * (d_weights - delta[head, block][None, :])
        return sum_k + blocks.dot(d_scores.astype(q.dtype), queries), sum_v

    zeros = jnp.zeros(keys.shape, jnp.float32)
    sum_k, sum_v = _walk(pairs, step, (zeros, zeros), heads)
    dk[...] = (sum_k * scale).astype(dk.dtype)
    dv[...] = sum_v.astype(dv.dtype)
