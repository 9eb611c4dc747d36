"""Flash attention on NVIDIA GPUs: Pallas (Triton) kernels for the mask of packed rows.

The kernels work on one row on one device, which may hold only a part of the row, in any order:
queries and keys carry their row indices. Partial outputs are merged by their log-sum-exp.

1. Queries and keys are cut into blocks. Minima and maxima of q_index and last_query classify each
   pair of blocks as dead, full (all visible) or partial. For each block of queries, the device
   lists its blocks of keys: full ones first, then partial ones (`list_pairs`).
2. Forward: a program handles one block of queries of one head. It walks through its list, first
   through full pairs without a mask, then through partial ones, with a running maximum and sum
   (online softmax). Dead pairs come after the end of the walk and cost nothing.
3. Backward: two kernels, so that nothing larger than the gradients is stored. One computes dq by
   the same walk. In the other, a program holds one block of keys and walks through the blocks of
   queries that see it, all R query heads of each, for dk and dv. Scores are recomputed, and the
   log-sum-exp turns them into weights.

Reasons for lists instead of a loop that tests every pair of blocks:
- In a row of short groups nearly all pairs are dead. Testing them all may take longer than the work
  on the others.
- Triton prefetches the next blocks (num_stages) only in loops without branches. Compiled with a
  branch, the forward kernel has no asynchronous copies left.

A list costs at most one int32 per pair of blocks, shared by all heads: for 131,072 queries and keys
8 MiB per kernel in bfloat16 (up to 256 MiB with the small blocks of float32), and the same again
while it is sorted. A program reads its own few KiB of it, one word per step. Lists are in global
memory, unlike the scalar memory of a TPU, so nothing else limits their size.

Limits: offsets count elements. Pallas uses 64-bit offsets for arrays above 4 GiB, else 32-bit ones,
so no array that fits in memory overflows. Head sizes are padded to 16, 32, 64, 128 or 256, lengths
to whole blocks.

Scores inside the kernels are in base 2, because the GPU's native exponential is 2**x. The returned
log-sum-exp is natural.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from spell_jax.attention.dense import MASKED

SMALLEST = 16  # smallest side of a product in Triton; all sides are powers of two
LARGEST_HEAD = 256
_LOG2_E = math.log2(math.e)
_COUNTS = 2  # words before a list: number of full pairs, number of live pairs


class Tile(NamedTuple):
    """Block sizes and launch parameters of a kernel.

    Attributes:
      queries: most queries per block; a power of two, at least SMALLEST.
      keys: most keys per block; a power of two, at least SMALLEST.
      warps: warps of 32 threads per program.
      stages: pipeline stages, the blocks in shared memory or in transfer to it.
    """

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """One tile for each kernel."""

    forward: Tile
    dq: Tile
    dkv: Tile


# By element size in bytes and head size. Compiled for the H200 (sm_90a) with jaxlib 0.10.2's Triton
# and CUDA 12.9's ptxas: at most 193 of 227 KiB of shared memory, at most 64 bytes of spilled
# registers per thread. Products of 2-byte inputs run on the tensor cores (wgmma), those of float32
# as ordinary multiply-adds, for tests. The choice of tiles is estimated, not measured.
DEFAULT_TILES = {
    (2, 64): Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    (2, 128): Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    (2, 256): Tiles(Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(32, 64, 8, 2)),
    (4, 64): Tiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    (4, 128): Tiles(Tile(32, 32, 16, 2), Tile(32, 16, 8, 2), Tile(16, 32, 8, 2)),
    (4, 256): Tiles(Tile(16, 16, 8, 2), Tile(16, 16, 8, 2), Tile(16, 16, 8, 2)),
}


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_index: jax.Array,
    k_index: jax.Array,
    last_query: jax.Array,
    *,
    tiles: Tiles | None = None,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of some queries of a row to some of its keys; not differentiable by itself.

    May be vmapped over rows, because a program walks only as far as its own list. Inside shard_map
    this needs check_vma=False.

    Args:
      q: queries [Tq, K, R, H], float32, bfloat16 or float16.
      k: keys [Tk, K, H], in q's dtype.
      v: values [Tk, K, H], in q's dtype.
      q_index: row indices of the queries, int32 [Tq], in any order.
      k_index: row indices of the keys, int32 [Tk], in any order.
      last_query: the mask, int32 [Tk]: query q sees key j iff
        k_index[j] <= q_index[q] <= last_query[j].
      tiles: block sizes; None takes DEFAULT_TILES.
      interpret: whether to run in the Pallas interpreter; None does so unless the default backend
        is a GPU.

    Returns:
      out [Tq, K, R, H] in q's dtype, and the log-sum-exp of the scaled scores, float32 [K, R, Tq].
      A query that sees no key gets output 0 and log-sum-exp 1e30.

    Raises:
      ValueError: if the dtypes differ or are not supported, H exceeds 256, or a tile is invalid.
    """
    time, kv_heads, heads, size = q.shape
    kept = (q, k, v, q_index, k_index, last_query)
    tile, pairs, data = _prepare(kept, tiles, "forward")
    specs = _query_specs(tile, data)
    numbers = jax.ShapeDtypeStruct((kv_heads, heads, len(data.q)), jnp.float32)
    out, lse = _call(
        functools.partial(_forward_kernel, tile.keys, size**-0.5),
        tile,
        grid=(heads, len(pairs), kv_heads),
        inputs=[(specs["pairs"], pairs), *_inputs(specs, data)],
        outputs=[(specs["queries"], data.q), (specs["numbers"], numbers)],
        interpret=interpret,
    )
    return out[:time, ..., :size], lse[..., :time]


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_index: jax.Array,
    k_index: jax.Array,
    last_query: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
    *,
    tiles: Tiles | None = None,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of attention, or the contribution of these keys to them.

    Args:
      q: queries [Tq, K, R, H].
      k: keys [Tk, K, H], in q's dtype.
      v: values [Tk, K, H], in q's dtype.
      q_index: row indices of the queries, int32 [Tq].
      k_index: row indices of the keys, int32 [Tk].
      last_query: the mask, int32 [Tk].
      lse: log-sum-exp of each query's scores over all keys it attends to, float32 [K, R, Tq].
      delta: sum over H of d_out * out, with the output over all keys, float32 [K, R, Tq].
      d_out: gradient of the output [Tq, K, R, H].
      tiles: block sizes, as in forward.
      interpret: as in forward.

    Returns:
      dq [Tq, K, R, H], dk and dv [Tk, K, H] in q's dtype.

    Raises:
      ValueError: as in forward.
    """
    kept = (q, k, v, q_index, k_index, last_query)
    given = (lse, delta, d_out.astype(q.dtype))
    dq = _backward_queries(kept, given, tiles, interpret)
    return dq, *_backward_keys(kept, given, tiles, interpret)


def _backward_queries(kept, given, tiles: Tiles | None, interpret: bool | None) -> jax.Array:
    time, kv_heads, heads, size = kept[0].shape
    tile, pairs, data = _prepare(kept, tiles, "dq")
    specs = _query_specs(tile, data)
    (dq,) = _call(
        functools.partial(_dq_kernel, tile.keys, size**-0.5),
        tile,
        grid=(heads, len(pairs), kv_heads),
        inputs=[(specs["pairs"], pairs), *_inputs(specs, data, given)],
        outputs=[(specs["queries"], data.q)],
        interpret=interpret,
    )
    return dq[:time, ..., :size]


def _backward_keys(kept, given, tiles, interpret) -> tuple[jax.Array, jax.Array]:
    time, kv_heads, size = kept[1].shape
    tile, pairs, data = _prepare(kept, tiles, "dkv")
    specs = _key_specs(tile, data)
    dk, dv = _call(
        functools.partial(_dkv_kernel, tile.queries, size**-0.5),
        tile,
        grid=(len(pairs), kv_heads),
        inputs=[(specs["pairs"], pairs), *_inputs(specs, data, given)],
        outputs=[(specs["keys"], data.k), (specs["keys"], data.v)],
        interpret=interpret,
    )
    return dk[:time, :, :size], dv[:time, :, :size]


def list_pairs(
    q_index: jax.Array,
    k_index: jax.Array,
    last_query: jax.Array,
    block_q: int,
    block_k: int,
    by_keys: bool,
) -> jax.Array:
    """List for each block the blocks of the other side to visit.

    Args:
      q_index: row indices of the queries, int32 [Tq].
      k_index: row indices of the keys, int32 [Tk].
      last_query: the mask, int32 [Tk].
      block_q: queries per block; divides Tq.
      block_k: keys per block; divides Tk.
      by_keys: whether to list blocks of queries for each block of keys (True), or blocks of keys
        for each block of queries (False).

    Returns:
      int32 [lists, 2 + n], with n blocks on the other side. A list holds the number of full pairs,
      the number of live (full or partial) pairs, then block numbers: full, partial, and dead (never
      read), each in ascending order.
    """
    queries = q_index.reshape(-1, block_q)
    keys, readers = (x.reshape(-1, block_k) for x in (k_index, last_query))
    earliest, latest = queries.min(1)[:, None], queries.max(1)[:, None]
    live = (keys.min(1) <= latest) & (earliest <= readers.max(1))
    full = (keys.max(1) <= earliest) & (latest <= readers.min(1))
    if by_keys:
        live, full = live.T, full.T
    others = live.shape[1]
    place = jnp.arange(others, dtype=jnp.int32)
    # One sort with one word per pair.
    offset = jnp.where(full, 0, jnp.where(live, others, 2 * others)).astype(jnp.int32)
    order = jnp.sort(offset + place, axis=1) % others
    counts = [jnp.sum(x, axis=1, dtype=jnp.int32)[:, None] for x in (full, live)]
    return jnp.concatenate([*counts, order], axis=1)


# Conversion from the caller's arrays to those of the kernels.


class _Data(NamedTuple):
    """Arrays that the kernels read, padded to whole blocks and H to a power of two.

    Attributes:
      q_index: row indices of the queries [Tq].
      k_index: row indices of the keys [Tk].
      last_query: the mask [Tk].
      q: queries [Tq, K, R, H].
      k: keys [Tk, K, H].
      v: values [Tk, K, H].
    """

    q_index: jax.Array
    k_index: jax.Array
    last_query: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array


def _prepare(kept, tiles: Tiles | None, kernel: str) -> tuple[Tile, jax.Array, _Data]:
    """Choose the tile that fits the row, list the pairs and pad the arrays."""
    q, k, v, q_index, k_index, last_query = kept
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; want one of float32, bfloat16 and"
            " float16 for all"
        )
    size = _power(q.shape[-1])
    if size > LARGEST_HEAD:
        raise ValueError(f"a head size of {q.shape[-1]}; at most {LARGEST_HEAD}")
    tiles = tiles or DEFAULT_TILES[q.dtype.itemsize, max(size, 64)]
    tile = _fit(getattr(tiles, kernel), len(q), len(k))
    # Padding repeats the last index, so it does not change the limits of its block. The outputs of
    # padded queries are cut off, their d_out and delta are 0. No query sees a padded key.
    queries = jnp.pad(q_index, (0, -len(q) % tile.queries), mode="edge")
    keys = jnp.pad(k_index, (0, -len(k) % tile.keys), mode="edge")
    readers = _pad(last_query, 0, tile.keys, jnp.iinfo(jnp.int32).min)
    by_keys = kernel == "dkv"
    pairs = list_pairs(queries, keys, readers, tile.queries, tile.keys, by_keys)
    q = _pad(_pad(q, -1, size), 0, tile.queries)
    k, v = (_pad(_pad(x, -1, size), 0, tile.keys) for x in (k, v))
    return tile, pairs, _Data(queries, keys, readers, q, k, v)


def _power(number: int) -> int:
    """Smallest power of two that is at least `number` and SMALLEST."""
    return max(SMALLEST, pl.next_power_of_2(number))


def _fit(tile: Tile, queries: int, keys: int) -> Tile:
    """Shrink a tile to the size of the row."""
    for side in tile[:2]:
        if side < SMALLEST or side & (side - 1):
            raise ValueError(f"a block of {side} is no power of two from {SMALLEST} on")
    return tile._replace(
        queries=min(tile.queries, _power(queries)), keys=min(tile.keys, _power(keys))
    )


def _pad(x: jax.Array, axis: int, block: int, value: float = 0) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths, constant_values=value)


def _query_specs(tile: Tile, data: _Data) -> dict[str, pl.BlockSpec]:
    """Block specs by kind of array for programs on grid [R, query blocks, K].

    The R heads of a block of queries run at the same time and share the keys they read.
    """
    time, _, size = data.k.shape
    # Of tokens in order, later queries see more keys. They run first, so that short programs fill
    # the end.
    last = len(data.q) // tile.queries - 1
    return {
        "pairs": pl.BlockSpec((None, _COUNTS + time // tile.keys), lambda r, i, h: (last - i, 0)),
        "query_index": pl.BlockSpec((tile.queries,), lambda r, i, h: (last - i,)),
        "key_index": pl.BlockSpec((time,), lambda r, i, h: (0,)),
        "queries": pl.BlockSpec(
            (tile.queries, None, None, size), lambda r, i, h: (last - i, h, r, 0)
        ),
        "numbers": pl.BlockSpec((None, None, tile.queries), lambda r, i, h: (h, r, last - i)),
        "keys": pl.BlockSpec((time, None, size), lambda r, i, h: (0, h, 0)),
    }


def _key_specs(tile: Tile, data: _Data) -> dict[str, pl.BlockSpec]:
    """Block specs by kind of array for programs on grid [key blocks, K]."""
    time, _, heads, size = data.q.shape
    return {
        "pairs": pl.BlockSpec((None, _COUNTS + time // tile.queries), lambda j, h: (j, 0)),
        "query_index": pl.BlockSpec((time,), lambda j, h: (0,)),
        "key_index": pl.BlockSpec((tile.keys,), lambda j, h: (j,)),
        "queries": pl.BlockSpec((time, None, heads, size), lambda j, h: (0, h, 0, 0)),
        "numbers": pl.BlockSpec((None, heads, time), lambda j, h: (h, 0, 0)),
        "keys": pl.BlockSpec((tile.keys, None, size), lambda j, h: (j, h, 0)),
    }


def _inputs(specs, data: _Data, given=()) -> list[tuple[pl.BlockSpec, jax.Array]]:
    """Inputs of a kernel; backward kernels also get `given`: lse, delta and d_out, unpadded."""
    found = [
        (specs["query_index"], data.q_index),
        (specs["key_index"], data.k_index),
        (specs["key_index"], data.last_query),
        (specs["queries"], data.q),
        (specs["keys"], data.k),
        (specs["keys"], data.v),
    ]
    if given:
        lse, delta, d_out = given
        more = [(0, n - m) for n, m in zip(data.q.shape, d_out.shape, strict=True)]
        found += [
            (specs["numbers"], jnp.pad(lse, ((0, 0), (0, 0), more[0]), constant_values=-MASKED)),
            (specs["numbers"], jnp.pad(delta, ((0, 0), (0, 0), more[0]))),
            (specs["queries"], jnp.pad(d_out, more)),
        ]
    return found


def _call(
    kernel: Callable[..., None],
    tile: Tile,
    grid: tuple[int, ...],
    inputs: list[tuple[pl.BlockSpec, jax.Array]],
    outputs: list[tuple[pl.BlockSpec, Any]],
    interpret: bool | None,
) -> list[jax.Array]:
    """Run a kernel; `outputs` give the shape and dtype of each output."""
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


# The kernels. Leading arguments are static (block size of the other side, scale of the scores), the
# others are references. A program loads its own block once; `step` handles one block of the other
# side.


def _dot(a: jax.Array, b: jax.Array, b_turned: bool = False) -> jax.Array:
    """Multiply a [m, n] by b [n, p] (turned: [p, n]) into float32.

    float32 inputs are multiplied at full precision.
    """
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if b_turned else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _mask(scores, query, key, reader) -> jax.Array:
    """Set scores to MASKED where a query does not see a key; the arguments broadcast."""
    return jnp.where((key <= query) & (query <= reader), scores, MASKED)


def _walk(pairs, step: Callable[..., Any], state: Any, repeats: int = 1) -> Any:
    """Fold step(masked, n, state) over the live pairs, with `repeats` values of n per pair."""
    full, live = pairs[0] * repeats, pairs[1] * repeats
    state = lax.fori_loop(0, full, functools.partial(step, False), state)
    return lax.fori_loop(full, live, functools.partial(step, True), state)


def _forward_kernel(block_k, scale, pairs, q_index, k_index, last_query, q, k, v, out, lse) -> None:
    """Forward kernel, grid [R, query blocks, K].

    Shapes: q and out [queries, H]; k and v [Tk, H]; lse [queries].
    """
    queries, query = q[...], q_index[...][:, None]

    def step(masked: bool, n, state):
        gathered, top, total = state
        place = pl.ds(pairs[_COUNTS + n] * block_k, block_k)
        scores = _dot(queries, k[place, :], b_turned=True) * (scale * _LOG2_E)
        if masked:
            scores = _mask(scores, query, k_index[place][None, :], last_query[place][None, :])
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=1)
        values = v[place, :]
        return gathered * shrink[:, None] + _dot(weights.astype(v.dtype), values), new_top, total

    # The top score starts above MASKED, so that masked scores always have weight 0.
    start = (
        jnp.zeros(queries.shape, jnp.float32),
        jnp.full(queries.shape[:1], MASKED / 2, jnp.float32),
        jnp.zeros(queries.shape[:1], jnp.float32),
    )
    gathered, top, total = _walk(pairs, step, start)
    positive = jnp.maximum(total, 1e-30)
    out[...] = (gathered / positive[:, None]).astype(out.dtype)
    # 1e30 for a query that sees no key makes all its weights 0 in the backward pass.
    lse[...] = jnp.where(total > 0, (top + jnp.log2(positive)) / _LOG2_E, -MASKED)


def _dq_kernel(
    block_k, scale, pairs, q_index, k_index, last_query, q, k, v, lse, delta, d_out, dq
) -> None:
    """Backward kernel for dq, grid [R, query blocks, K].

    Shapes: q, d_out and dq [queries, H]; k and v [Tk, H]; lse and delta [queries].
    """
    queries, query = q[...], q_index[...][:, None]
    lse2, own_delta, d_outs = lse[...][:, None] * _LOG2_E, delta[...][:, None], d_out[...]

    def step(masked: bool, n, gathered):
        place = pl.ds(pairs[_COUNTS + n] * block_k, block_k)
        keys = k[place, :]
        scores = _dot(queries, keys, b_turned=True) * (scale * _LOG2_E)
        if masked:
            scores = _mask(scores, query, k_index[place][None, :], last_query[place][None, :])
        d_weights = _dot(d_outs, v[place, :], b_turned=True)
        d_scores = jnp.exp2(scores - lse2) * (d_weights - own_delta)
        return gathered + _dot(d_scores.astype(k.dtype), keys)

    gathered = _walk(pairs, step, jnp.zeros(queries.shape, jnp.float32))
    dq[...] = (gathered * scale).astype(dq.dtype)


def _dkv_kernel(
    block_q, scale, pairs, q_index, k_index, last_query, q, k, v, lse, delta, d_out, dk, dv
) -> None:
    """Backward kernel for dk and dv, grid [key blocks, K].

    Shapes: k, v, dk and dv [keys, H]; q and d_out [Tq, R, H]; lse and delta [R, Tq]. Scores are
    transposed, [keys, queries], as the products for dk and dv need them.
    """
    keys, values = k[...], v[...]
    key, reader = k_index[...][:, None], last_query[...][:, None]
    heads = q.shape[1]

    def step(masked: bool, n, state):
        gathered_k, gathered_v = state
        # All heads of a query block before the next block: they are adjacent in memory.
        head = lax.rem(n, heads)
        place = pl.ds(pairs[_COUNTS + lax.div(n, heads)] * block_q, block_q)
        queries, d_outs = q[place, head, :], d_out[place, head, :]
        scores = _dot(keys, queries, b_turned=True) * (scale * _LOG2_E)
        if masked:
            scores = _mask(scores, q_index[place][None, :], key, reader)
        weights = jnp.exp2(scores - lse[head, place][None, :] * _LOG2_E)
        gathered_v += _dot(weights.astype(q.dtype), d_outs)
        d_weights = _dot(values, d_outs, b_turned=True)
        d_scores = weights * (d_weights - delta[head, place][None, :])
        return gathered_k + _dot(d_scores.astype(q.dtype), queries), gathered_v

    nothing = jnp.zeros(keys.shape, jnp.float32)
    gathered_k, gathered_v = _walk(pairs, step, (nothing, nothing), heads)
    dk[...] = (gathered_k * scale).astype(dk.dtype)
    dv[...] = gathered_v.astype(dv.dtype)
