"""Attention of queries to keys in the pages of the sampler's KV cache.

1. A row's page table lists its pages of C tokens in order: page j holds positions j C to
   (j + 1) C - 1. Rows with a common prefix share pages.
2. The mask is one number per query, the number of leading keys it sees. Within a prompt it grows by
   one per token; all samples of a prompt see the whole prompt. In a layer with a window a second
   number is the first key that the query sees. Pages before the first key of all queries of a row
   are cut off its table, so they cost neither a fetch nor a product.
3. TPUs and NVIDIA GPUs have kernels that read pages in place (paged_tpu.py, paged_triton.py). The
   code here serves CPUs and shapes the kernels do not support. It sorts rows by length and gathers
   a few rows and pages at a time, with an online softmax: cost follows the keys present.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from spell_jax.attention import paged_tpu, paged_triton
from spell_jax.attention.blocks import Softmax, einsum
from spell_jax.attention.masks import MASKED
from spell_jax.attention.pages import Pages, by_kv_head, by_token, loaded


class StepLimits(NamedTuple):
    """Limits on the work done in one step of `attend_in_steps`.

    If one page of a row has at least an eighth of `scores`, a step takes M / `rows` of all M rows.
    If each row has at least an eighth of `queries`, such as pages of one prompt, a step takes
    `queries` queries, and neighboring rows with the same table share one product.
    """

    scores: int  # float32 scores of a step; one row uses at most a quarter
    keys: int  # keys of each row in a step
    # Keys of each row in a step, where they are more than a quarter of its table: most rows are
    # shorter than their table.
    short_keys: int
    numbers: int  # elements of the keys of all rows in a step
    rows: int  # divisor of the rows of a step
    queries: int  # queries of a step


# CPU caches are small: of 2^13 to 2^18 scores, 2^15 was fastest (256 slots of the bundled tiny
# policy). On accelerators: 64 MiB of scores. Prefill of 4,096 tokens in pages of 128 queries takes
# 3.0 s one page at a time and 2.1 s four at a time (2 CPU cores, 8 layers, width 512).
# 64 keys at once of tables of 192 and prompts of 48 take .10 instead of .30 ms (16 prompts of 8
# queries of the tiny policy).
ON_CPU = StepLimits(2**15, 256, 64, 2**19, 8, 512)
ON_ACCELERATORS = StepLimits(2**24, 2048, 2048, 2**30, 1, 512)
UNSEEN = MASKED  # log-sum-exp of a query that sees no key: weight 0 in a merge


def attend(
    q: Float[Array, "M T N H"],
    pages: Pages,
    layer: Int32[Array, ""],
    table: Int32[Array, "M J"],
    num_visible: Int32[Array, "M T"],
    share: tuple[Array | int, int] = (0, 1),
    kernel: str = "auto",
    first_visible: Int32[Array, "M T"] | None = None,
) -> tuple[Float32[Array, "M T N H"], Float32[Array, "M T N"]]:
    """Compute softmax attention of rows of queries to the pages of each row.

    Args:
      table: pages of each row in order. Pages that no query of the row sees may be any page.
      num_visible: number of leading keys of its row that each query sees.
      share: (i, n) if the pool holds only the i-th of n equal parts of every page.
      kernel: "auto" for the platform's kernel if it supports these shapes, or "xla" for
        attend_in_steps.
      first_visible: first key that each query sees, in layers with a window; a query sees no key if
        it is `num_visible` or more. None: all queries see their rows from the first key on.

    Returns:
      Output and log-sum-exp. A query that sees no key gets output 0 and log-sum-exp UNSEEN, so
      that parts (prompt, suffix) can be merged.
    """

    if first_visible is not None:
        passed = pages.page_size * share[1]
        table, num_visible, first_visible = _cut(table, num_visible, first_visible, passed)

    def choice(function, **options):
        def attend_part(*arrays):
            *arrays, first_visible, part = arrays
            return function(*arrays, (part, share[1]), first_visible, **options)

        return attend_part

    # platform_dependent takes arrays only, so the number of parts, which shapes depend on, is bound
    # here.
    choices = {
        "cpu": choice(attend_in_steps, sizes=ON_CPU),
        "default": choice(attend_in_steps, sizes=ON_ACCELERATORS),
    }
    if kernel == "auto" and paged_tpu.fits(q, pages, table):
        choices["tpu"] = choice(paged_tpu.attend)
    if kernel == "auto" and paged_triton.unsupported(q, pages) is None:
        choices["cuda"] = choice(paged_triton.attend, interpret=False)
    arrays = (q, pages, layer, table, num_visible, first_visible, jnp.int32(share[0]))
    return jax.lax.platform_dependent(*arrays, **choices)


def _cut(table, num_visible, first_visible, page_size: int):
    """Cut leading pages that no query sees off each row's table, int32 [M, J].

    `page_size` is the number of positions of a page on all devices. Returns the new table, padded
    by its last pages, and `num_visible` and `first_visible` counted from its first key.
    """
    seeing = first_visible < num_visible
    begin = jnp.min(jnp.where(seeing, first_visible // page_size, table.shape[1]), axis=1)
    begin = jnp.where(jnp.any(seeing, axis=1), begin, 0)[:, None]
    cut = jnp.take_along_axis(table, begin + jnp.arange(table.shape[1]), axis=1, mode="clip")
    first, num = (x - begin * page_size for x in (first_visible, num_visible))
    return cut, jnp.where(seeing, num, 0), jnp.where(seeing, first, 0)


def attend_in_steps(
    q, pages: Pages, layer, table, num_visible, share, first_visible=None, *, sizes: StepLimits
) -> tuple[jax.Array, jax.Array]:
    """Compute `attend` in plain XLA, in steps limited by `sizes`."""
    rows, time, heads, size = q.shape
    (_, _, kv_heads, page_size, _), (part, parts) = pages.keys.shape, share
    scores_of_page = time * heads * page_size
    has_many_queries = 8 * time >= sizes.queries
    if has_many_queries:
        width = sizes.queries // page_size
    else:
        width = min(sizes.keys // page_size, sizes.scores // 4 // scores_of_page)
        width = min(width, max(sizes.short_keys // page_size, table.shape[1] // 4))
    width = max(1, min(width, table.shape[1]))
    if has_many_queries:
        batch = sizes.queries // time
    elif 8 * scores_of_page >= sizes.scores:
        # Empty rows cost as much as full ones in the same step, and most rows of a call may be
        # empty.
        batch = rows // sizes.rows
    else:
        batch = sizes.numbers // (width * page_size * kv_heads * size)
        batch = min(batch, sizes.scores // (width * scores_of_page))
    batch = max(1, min(batch, rows))
    span = width * page_size * parts  # positions passed in one step, on all shares
    offsets = (jnp.arange(width)[:, None] * parts + part) * page_size + jnp.arange(page_size)
    # A step takes as long as its longest row needs, so rows of similar length share a step.
    longest = jnp.max(num_visible, axis=1)
    # With many queries per row, rows of one prompt stay neighbors, and only empty rows move.
    order = jnp.argsort(longest == 0 if has_many_queries else -longest)
    # A repeated row is written twice with the same result.
    order = jnp.pad(order, (0, -rows % batch), mode="edge")
    queries = by_kv_head(q, kv_heads) * size**-0.5
    visible = [num_visible] if first_visible is None else [num_visible, first_visible]
    # The numbers of a row's queries, int32 [M, 1 or 2, queries].
    visible = jnp.repeat(jnp.stack(visible, axis=1), heads // kv_heads, axis=2)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % width)))

    def attend_batch(index, results):
        batch_rows = jax.lax.dynamic_slice_in_dim(order, index * batch, batch)
        attend_rows = functools.partial(
            _attend_pages,
            pages=pages,
            layer=layer,
            steps=-(-jnp.max(longest[batch_rows]) // span),
            offsets=offsets.reshape(-1),
            span=span,
        )
        arrays = queries[batch_rows], table[batch_rows], visible[batch_rows]
        if has_many_queries and batch > 1:
            same_table = jnp.all(arrays[1] == arrays[1][0])
            new = jax.lax.cond(
                same_table, functools.partial(_attend_as_one_row, attend_rows), attend_rows, *arrays
            )
        else:
            new = attend_rows(*arrays)
        return tuple(x.at[batch_rows].set(y) for x, y in zip(results, new, strict=True))

    results = jnp.zeros(queries.shape, jnp.float32), jnp.full(queries.shape[:3], UNSEEN)
    steps = -(-jnp.sum(longest > 0) // batch)
    out, lse = jax.lax.fori_loop(0, steps, attend_batch, results)
    return by_token(out, time), by_token(lse, time)


def _attend_as_one_row(attend_rows, queries, table, visible):
    """Attend from rows [W, K, Q, H] with identical tables as from one row with all queries."""
    rows, kv_heads, count, size = queries.shape
    joined_queries = queries.swapaxes(0, 1).reshape(1, kv_heads, rows * count, size)
    joined_visible = visible.swapaxes(0, 1).reshape(1, -1, rows * count)
    results = attend_rows(joined_queries, table[:1], joined_visible)
    return tuple(x.reshape(kv_heads, rows, count, *x.shape[3:]).swapaxes(0, 1) for x in results)


def _attend_pages(queries, table, visible, *, pages: Pages, layer, steps, offsets, span: int):
    """Attend from scaled queries [W, K, Q, H] of a few rows to their pages, a few pages at a time.

    `table` is int32 [W, J]. `visible`, int32 [W, 1 or 2, Q], is the number of leading keys that a
    query sees, and with windows the first of them. Each of `steps` (int32 scalar) passes `span`
    positions and reads the keys at `offsets` (int32 [keys]) in them. Returns float32 out
    [W, K, Q, H] and log-sum-exp [W, K, Q].
    """
    rows, kv_heads = queries.shape[:2]
    width = len(offsets) // pages.page_size
    heads = jnp.arange(kv_heads)[:, None]

    def fetch(pool, numbers):
        """Gather pages [W, width] of a pool as [W, K, keys, ...]."""
        x = pool[layer, numbers[:, None], heads]  # [W, K, width, C, ...]
        x = x.reshape(rows, kv_heads, len(offsets), *pool.shape[4:])
        return loaded(x, queries.dtype)

    def step(n, state: Softmax):
        numbers = jax.lax.dynamic_slice_in_dim(table, n * width, width, axis=1)
        block = jax.tree.map(lambda pool: fetch(pool, numbers), pages)
        scores = einsum("wkqh,wkch->wkqc", queries, block.keys)
        if block.key_scales is not None:
            # One multiplication per score instead of one per element of the keys.
            scores *= block.key_scales[:, :, None]
        numbers, *first = (x[:, None, :, None] for x in visible.swapaxes(0, 1))
        is_visible = n * span + offsets < numbers
        for x in first:
            is_visible &= n * span + offsets >= x
        scores = jnp.where(is_visible, scores, MASKED)

        def weighted_sum(weights):
            if block.value_scales is not None:
                weights *= block.value_scales[:, :, None]
            return einsum("wkqc,wkch->wkqh", weights.astype(block.values.dtype), block.values)

        return state.add(scores, weighted_sum)

    return jax.lax.fori_loop(0, steps, step, Softmax.start(queries.shape)).finish(UNSEEN)


def merge(
    *parts: tuple[Float32[Array, "*shape H"], Float32[Array, "*shape"]],
) -> tuple[Float32[Array, "*shape H"], Float32[Array, "*shape"]]:
    """Merge attention, outputs with their log-sum-exps, over disjoint sets of keys."""
    lses = jnp.stack([lse for _, lse in parts])
    # UNSEEN is finite: where no part saw a key, all differences are 0 and all outputs too.
    top = jnp.max(lses, axis=0)
    weights = jnp.exp(lses - top)
    total = jnp.sum(weights, axis=0)
    shares = zip(weights / total, parts, strict=True)
    out = jnp.sum(jnp.stack([share[..., None] * out for share, (out, _) in shares]), axis=0)
    return out, top + jnp.log(total)
