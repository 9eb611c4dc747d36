"""Flash attention on TPU: Pallas kernels for the mask of packed rows that skip dead block pairs.

The stock splash kernels cannot compare a query's index with one number per key (`last_query`).
These work on one row on one device, which may hold only a part of the row: queries in any order and
some of the keys. Partial outputs are merged by their log-sum-exp.

1. Queries and keys are cut into blocks. Minima and maxima of the numbers that decide who sees whom
   (masks.sees) classify each pair of blocks as dead, full (all visible) or partial. `list_pairs`
   lists the live pairs on the device, one word per pair.
2. The grid of a kernel runs over that list. Its length is a runtime value; its words are prefetched
   to scalar memory and select the blocks to load. Dead pairs cost no step and no load. Full pairs
   are not masked.
3. Forward: an online softmax goes through a run, all pairs with the same block of queries. Output
   and log-sum-exp are written at its end.
4. Backward: two kernels, so that nothing larger than the gradients is stored. One computes dq over
   the same runs; the other dk and dv over runs with the same block of keys, with all R query heads
   of a pair in turn. Scores are recomputed, and the log-sum-exp turns them into weights.

Queries lie along lanes and scores are [keys, queries]. Per-query numbers (maximum, sum,
log-sum-exp, delta) are then plain rows, and a head size of 64 wastes no lanes of queries or output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from spell_jax.attention import blocks as common
from spell_jax.attention import masks
from spell_jax.attention.kernel import Inputs
from spell_jax.attention.masks import MASKED

LANES = 128  # block sizes are multiples of this
# Longest list of pairs, in words: it must fit scalar memory (512 KiB).
MOST_PAIRS = 2**17
# Bits of a block number. Two numbers, two flags and two bits of kind take 30 bits, so that a word
# is never negative and shifts need no mask.
_BITS = 13
_MOST = 2**_BITS
_DEAD, _PARTIAL, _FULL = 0, 1, 2


class Blocks(NamedTuple):
    """Upper limits (queries, keys) of the block size of each kernel; multiples of 128."""

    forward: tuple[int, int]
    dq: tuple[int, int]
    dkv: tuple[int, int]


# By element size in bytes. Compiled for v5e with head sizes 64 and 128, every kernel uses at most
# 8 MiB of the 16 MiB of VMEM available.
DEFAULT_BLOCKS = {
    2: Blocks(forward=(1024, 1024), dq=(1024, 1024), dkv=(1024, 1024)),
    4: Blocks(forward=(512, 512), dq=(512, 512), dkv=(512, 512)),
}


def forward(
    inputs: Inputs, *, blocks: Blocks | None = None, interpret: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    """Compute Kernel.forward for one row.

    Use lax.map, not vmap, over rows, because their lists differ in length. Inside shard_map this
    needs check_vma=False. `blocks` (None: DEFAULT_BLOCKS) limits the size of blocks. `interpret`
    runs the Pallas interpreter; None does so unless the default backend is a TPU.

    Raises ValueError if a block size is not a positive multiple of 128, or if there are too many
    pairs of blocks for scalar memory.
    """
    time, kv_heads, heads, size = inputs.q.shape
    blocks = blocks or DEFAULT_BLOCKS[inputs.q.dtype.itemsize]
    pairs, data = _prepare(inputs, blocks.forward, by_keys=False)
    statistics = jax.ShapeDtypeStruct((kv_heads, heads, 1, data.q.shape[-1]), jnp.float32)
    out, lse = _run_kernel(
        _forward_kernel,
        pairs,
        data,
        inputs=[("queries", data.q), ("keys", data.k), ("keys_transposed", data.v.swapaxes(1, 2))],
        outputs=[("queries", data.q), ("statistics", statistics)],
        scratch=[(1, pairs.block_q), (1, pairs.block_q), (size, pairs.block_q)],
        interpret=interpret,
    )
    return out[..., :time].transpose(3, 0, 1, 2), lse[:, :, 0, :time]


def backward(
    inputs: Inputs,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
    *,
    blocks: Blocks | None = None,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute Kernel.backward for one row; options and errors as in forward."""
    blocks = blocks or DEFAULT_BLOCKS[inputs.q.dtype.itemsize]
    (time, _, _, size), keys = inputs.q.shape, len(inputs.k)

    def prepare(block, by_keys):
        pairs, data = _prepare(inputs, block, by_keys)
        of_queries = [
            ("queries", _transpose_queries(d_out.astype(inputs.q.dtype), pairs.block_q)),
            *(("statistics", _pad_statistics(x, pairs.block_q)) for x in (lse, delta)),
        ]
        return pairs, data, of_queries

    pairs, data, of_queries = prepare(blocks.dq, by_keys=False)
    keys_and_values = [
        ("keys", data.k),
        ("keys_transposed", data.k.swapaxes(1, 2)),
        ("keys", data.v),
    ]
    (dq,) = _run_kernel(
        _dq_kernel,
        pairs,
        data,
        inputs=[("queries", data.q), *keys_and_values, *of_queries],
        outputs=[("queries", data.q)],
        scratch=[(size, pairs.block_q)],
        interpret=interpret,
    )
    pairs, data, of_queries = prepare(blocks.dkv, by_keys=True)
    dk, dv = _run_kernel(
        _dkv_kernel,
        pairs,
        data,
        inputs=[("queries", data.q), ("keys", data.k), ("keys", data.v), *of_queries],
        outputs=[("keys", data.k), ("keys", data.v)],
        scratch=[(pairs.block_k, size), (pairs.block_k, size)],
        interpret=interpret,
    )
    dq = dq[..., :time].transpose(3, 0, 1, 2)
    return dq, dk[:, :keys].transpose(1, 0, 2), dv[:, :keys].transpose(1, 0, 2)


# Selection and order of block pairs.


class Pairs(NamedTuple):
    """Live pairs of blocks in the format that the kernels read.

    Each of the int32 `words` [query blocks * key blocks], of which `count` are valid, encodes a
    pair from the highest bit: query block, key block, whether the pair is the first of its run,
    whether it is the last, and its kind (dead, partial, full).
    """

    words: jax.Array
    count: jax.Array  # int32 scalar
    block_q: int
    block_k: int
    by_keys: bool  # whether the pairs of a run share their block of keys, not of queries


def list_pairs(
    of_queries: Sequence[jax.Array],
    of_keys: Sequence[jax.Array],
    block_q: int,
    block_k: int,
    by_keys: bool,
) -> Pairs:
    """List the live pairs of blocks, run by run; `block_q` divides Tq and `block_k` Tk.

    `of_queries` and `of_keys` are as in masks.sees. A block without a live pair gets one dead pair.
    Raises ValueError if there are too many blocks for scalar memory.
    """
    time, keys = len(of_queries[0]), len(of_keys[0])
    q_blocks, k_blocks = time // block_q, keys // block_k
    if q_blocks * k_blocks > MOST_PAIRS or max(q_blocks, k_blocks) > _MOST:
        raise ValueError(
            f"{time} queries by {keys} keys in blocks of {block_q} by {block_k}"
            f" are {q_blocks} by {k_blocks} blocks; at most {_MOST} a side and {MOST_PAIRS}"
            " pairs fit scalar memory: take larger blocks, or fewer queries a device"
        )
    live, full = masks.live_and_full_blocks(
        [x.reshape(-1, block_q) for x in of_queries], [x.reshape(-1, block_k) for x in of_keys]
    )
    kind = jnp.where(full, _FULL, jnp.where(live, _PARTIAL, _DEAD))
    kind = kind.T if by_keys else kind
    listed = kind > _DEAD
    # Every block of the output must be visited once to be written, if only with zeros.
    listed = listed.at[:, 0].set(listed[:, 0] | ~jnp.any(listed, axis=1))
    # Stable, so that the pairs of a run stay together and in ascending order.
    order = jnp.argsort(~listed.reshape(-1), stable=True).astype(jnp.int32)
    count = jnp.sum(listed, dtype=jnp.int32)
    run, partner = order // kind.shape[1], order % kind.shape[1]
    place = jnp.arange(len(order), dtype=jnp.int32)
    first = (place == 0) | (run != jnp.roll(run, 1))
    last = (place == count - 1) | (run != jnp.roll(run, -1))
    query, key = (partner, run) if by_keys else (run, partner)
    word = (query * _MOST + key) * 16 + first * 8 + last * 4 + kind.reshape(-1)[order]
    return Pairs(word.astype(jnp.int32), count, block_q, block_k, by_keys)


def _blocks_of(word):
    """Return the query block and the key block of a word."""
    return word >> (_BITS + 4), (word >> 4) & (_MOST - 1)


def _is_first(word):
    return (word & 8) != 0


def _is_last(word):
    return (word & 4) != 0


# Conversion from the caller's arrays to the kernels' arrays.


def _prepare(inputs: Inputs, block: tuple[int, int], by_keys: bool) -> tuple[Pairs, Inputs]:
    """List the pairs; pad q to [K, R, H, Tq], k and v to [K, Tk, H], int32 arrays to [1, T]."""
    block_q, block_k = _block_size(block[0], len(inputs.q)), _block_size(block[1], len(inputs.k))
    padded = common.pad_inputs(inputs, block_q, block_k)
    pairs = list_pairs(padded.of_queries, padded.of_keys, block_q, block_k, by_keys)
    k, v = (x.transpose(1, 0, 2) for x in (padded.k, padded.v))
    numbers = jax.tree.map(lambda x: x[None], padded[3:])
    return pairs, Inputs(padded.q.transpose(1, 2, 3, 0), k, v, *numbers)


def _block_size(wanted_size: int, time: int) -> int:
    """Return the least multiple of LANES that cuts `time` into as few blocks as `wanted_size`."""
    if wanted_size <= 0 or wanted_size % LANES:
        raise ValueError(f"a block of {wanted_size} is no positive multiple of {LANES}")
    # Equal blocks: a row of 1,025 tokens takes two blocks of 640, not of 1,024, which would be half
    # padding.
    return pl.cdiv(pl.cdiv(time, pl.cdiv(time, wanted_size)), LANES) * LANES


def _transpose_queries(x: jax.Array, block: int) -> jax.Array:
    """Transpose [Tq, K, R, H] to [K, R, H, Tq], padded to whole blocks."""
    return common.pad(x.transpose(1, 2, 3, 0), 3, block)


def _pad_statistics(x: jax.Array, block: int) -> jax.Array:
    """Convert per-query numbers [K, R, Tq] to float32 [K, R, 1, Tq], padded to whole blocks."""
    return common.pad(x.astype(jnp.float32)[:, :, None], 3, block)


def _specs(pairs: Pairs, size: int) -> dict[str, pl.BlockSpec]:
    """Return block specs by kind of array: the part that a grid step holds in VMEM."""

    def spec(shape, index):
        def index_map(kv_head, second, third, words):
            step, head = (second, third) if pairs.by_keys else (third, second)
            return index(kv_head, head, *_blocks_of(words[step]))

        return pl.BlockSpec(shape, index_map)

    block_q, block_k = pairs.block_q, pairs.block_k
    return {
        "query_numbers": spec((1, block_q), lambda h, r, i, j: (0, i)),
        "key_numbers": spec((1, block_k), lambda h, r, i, j: (0, j)),
        "queries": spec((None, None, size, block_q), lambda h, r, i, j: (h, r, 0, i)),
        "statistics": spec((None, None, 1, block_q), lambda h, r, i, j: (h, r, 0, i)),
        "keys": spec((None, block_k, size), lambda h, r, i, j: (h, j, 0)),
        "keys_transposed": spec((None, size, block_k), lambda h, r, i, j: (h, 0, j)),
    }


def _run_kernel(
    kernel: Callable[..., None],
    pairs: Pairs,
    data: Inputs,
    inputs: list[tuple[str, Any]],
    outputs: list[tuple[str, Any]],
    scratch: list[tuple[int, int]],
    interpret: bool | None,
) -> tuple[jax.Array, ...]:
    """Run a kernel over the pairs: grid [K, R, pairs], or [K, pairs, R] if `pairs.by_keys`.

    The kernel receives words, of_queries, of_keys, inputs, outputs and float32 scratch.
    Inputs and outputs come with their kind, a key of _specs; outputs give only shape and dtype.
    """
    kv_heads, heads, size, _ = data.q.shape
    specs, count = _specs(pairs, size), pairs.count
    numbers = [("query_numbers", data.of_queries), ("key_numbers", data.of_keys)]
    inputs = [*numbers, *inputs]
    grid = (kv_heads, count, heads) if pairs.by_keys else (kv_heads, heads, count)
    run = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[jax.tree.map(lambda _, kind=kind: specs[kind], x) for kind, x in inputs],
            out_specs=[specs[kind] for kind, _ in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        compiler_params=pltpu.CompilerParams(
            # Grid axes that are summed over (pairs; by keys, also heads) run in order on one core.
            dimension_semantics=(
                "parallel",
                "arbitrary" if pairs.by_keys else "parallel",
                "arbitrary",
            )
        ),
        interpret=jax.default_backend() != "tpu" if interpret is None else interpret,
        name=f"splash{kernel.__name__.removesuffix('_kernel')}",
    )
    return run(pairs.words, *(x for _, x in inputs))


# The kernels. Blocks in VMEM: queries [H, queries], keys [keys, H] or transposed [H, keys].


def _scores(q, k, of_queries, of_keys, masked: bool) -> jax.Array:
    """Score two blocks: scaled [keys, queries], MASKED where a query does not see a key."""
    # The product is scaled, not q: unless H is a power of 4, scaled bfloat16 queries would lose
    # precision.
    scores = common.dot(k[...], q[...]) * k.shape[1] ** -0.5
    if not masked:
        return scores
    is_seen = masks.sees([x[...] for x in of_queries], [x[...].reshape(-1, 1) for x in of_keys])
    return jnp.where(is_seen, scores, MASKED)


def _when_live(word, step: Callable[[bool], None]) -> None:
    """Run step(masked) if the pair is live, with masked=False for a full pair."""
    pl.when(word & 3 == _PARTIAL)(functools.partial(step, True))
    pl.when(word & 3 == _FULL)(functools.partial(step, False))


def _forward_kernel(
    words, of_queries, of_keys, q, k, v_transposed, out, lse, top, total, summed
) -> None:
    """Run forward, grid [K, R, pairs]: out, summed [H, queries]; lse, top, total [1, queries]."""
    word = words[pl.program_id(2)]

    @pl.when(_is_first(word))
    def _():
        # Above MASKED, so that masked scores always have weight 0.
        top[...] = jnp.full(top.shape, MASKED / 2, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        summed[...] = jnp.zeros(summed.shape, jnp.float32)

    def step(masked: bool) -> None:
        scores = _scores(q, k, of_queries, of_keys, masked)
        new_top = jnp.maximum(top[...], jnp.max(scores, axis=0, keepdims=True))
        weights = jnp.exp(scores - new_top)
        shrink = jnp.exp(top[...] - new_top)
        top[...] = new_top
        total[...] = total[...] * shrink + jnp.sum(weights, axis=0, keepdims=True)
        part_out = common.dot(v_transposed[...], weights.astype(v_transposed.dtype))
        summed[...] = summed[...] * shrink + part_out

    _when_live(word, step)

    @pl.when(_is_last(word))
    def _():
        positive = jnp.maximum(total[...], 1e-30)
        out[...] = (summed[...] / positive).astype(out.dtype)
        # 1e30 for a query that sees no key makes all its weights 0 in the backward pass.
        lse[...] = jnp.where(total[...] > 0, top[...] + jnp.log(positive), -MASKED)


def _dq_kernel(
    words, of_queries, of_keys, q, k, k_transposed, v, d_out, lse, delta, dq, summed
) -> None:
    """Compute dq [H, queries] of the backward pass, grid [K, R, pairs]."""
    word = words[pl.program_id(2)]

    @pl.when(_is_first(word))
    def _():
        summed[...] = jnp.zeros(summed.shape, jnp.float32)

    def step(masked: bool) -> None:
        scores = _scores(q, k, of_queries, of_keys, masked)
        weights = jnp.exp(scores - lse[...])
        d_scores = weights * (common.dot(v[...], d_out[...]) - delta[...])
        summed[...] += common.dot(k_transposed[...], d_scores.astype(k_transposed.dtype))

    _when_live(word, step)

    @pl.when(_is_last(word))
    def _():
        # The scale of the scores, once per sum instead of once per pair of blocks.
        dq[...] = (summed[...] * k.shape[1] ** -0.5).astype(dq.dtype)


def _dkv_kernel(
    words, of_queries, of_keys, q, k, v, d_out, lse, delta, dk, dv, sum_k, sum_v
) -> None:
    """Compute dk and dv [keys, H] of the backward pass, grid [K, pairs, R], summed over R heads."""
    word = words[pl.program_id(1)]
    head = pl.program_id(2)

    @pl.when(_is_first(word) & (head == 0))
    def _():
        sum_k[...] = jnp.zeros(sum_k.shape, jnp.float32)
        sum_v[...] = jnp.zeros(sum_v.shape, jnp.float32)

    def step(masked: bool) -> None:
        scores = _scores(q, k, of_queries, of_keys, masked)
        weights = jnp.exp(scores - lse[...])
        sum_v[...] += common.dot(weights.astype(d_out.dtype), d_out[...], b_transposed=True)
        d_scores = weights * (common.dot(v[...], d_out[...]) - delta[...])
        sum_k[...] += common.dot(d_scores.astype(q.dtype), q[...], b_transposed=True)

    _when_live(word, step)

    @pl.when(_is_last(word) & (head == pl.num_programs(2) - 1))
    def _():
        dk[...] = (sum_k[...] * k.shape[1] ** -0.5).astype(dk.dtype)
        dv[...] = sum_v[...].astype(dv.dtype)
