"""Attention of queries to keys in the pages of the sampler's KV cache.

1. One pool holds the keys and values of all layers, in pages of C tokens. A row's page table lists
   its pages in order: page j holds positions j C to (j + 1) C - 1. Rows with a common prefix share
   pages.
2. The mask is one number per query, the number of leading keys it sees. Within a prompt it grows
   by one per token; all samples of a prompt see the whole prompt.
3. Rows are sorted by length and processed a few rows and a few pages at a time, with a running
   maximum and sum (online softmax). Cost follows the keys present, not the padded shapes.
4. The log-sum-exp is returned with the output, so that parts (prompt, suffix) can be merged.
5. TPUs and NVIDIA GPUs have kernels that read pages in place (paged_tpu.py, paged_triton.py). The
   code here gathers a few pages at a time. It serves CPUs and shapes the kernels do not support.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spell_jax.attention import paged_tpu, paged_triton
from spell_jax.attention.dense import MASKED
from spell_jax.attention.pages import Pages


class Sizes(NamedTuple):
    """Limits on the work done in one step of `attend_in_steps`.

    Attributes:
      scores: float32 scores of a step; one row uses at most a quarter of them.
      keys: keys of each row in a step.
      numbers: elements of the keys of all rows in a step.
      rows: divisor for large rows, those with at least an eighth of `scores` per page: a step takes
        M / rows of all M rows. Empty rows cost as much as the others in their step, and most rows
        of a call may be empty.
      queries: queries in a step for rows that each have at least an eighth of it, such as pages of
        one prompt. Neighboring rows with the same table share one product of this many queries and
        this many keys.
    """

    scores: int
    keys: int
    numbers: int
    rows: int
    queries: int


# CPU caches are small: of 2^13 to 2^18 scores, 2^15 was fastest (256 slots of the bundled tiny
# policy). On accelerators: 64 MiB of scores. Prefill of 4,096 tokens in pages of 128 queries takes
# 3.0 s one page at a time and 2.1 s four at a time (2 CPU cores, 8 layers, width 512).
ON_CPU = Sizes(2**15, 256, 2**19, 8, 512)
ON_ACCELERATORS = Sizes(2**24, 2048, 2**30, 1, 512)
UNSEEN = MASKED  # log-sum-exp of a query that sees no key: weight 0 in a merge


def attend(
    q: jax.Array,
    pages: Pages,
    layer: jax.Array,
    table: jax.Array,
    visible: jax.Array,
    share: tuple[jax.Array | int, int] = (0, 1),
    kernel: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of rows of queries to the pages of each row.

    Args:
      q: queries [M, T, N, H].
      pages: the pool.
      layer: layer number, int32 scalar.
      table: pages of each row in order, int32 [M, J].
      visible: number of leading keys of its row that each query sees, int32 [M, T].
      share: (i, n) if the pool holds only the i-th of n equal parts of every page.
      kernel: "auto" for the platform's kernel if it supports these shapes, or "xla" for
        attend_in_steps.

    Returns:
      out float32 [M, T, N, H] and log-sum-exp float32 [M, T, N]. A query that sees no key gets
      output 0 and log-sum-exp UNSEEN.
    """

    def choice(function, **options):
        def on_platform(q, pages, layer, table, visible, part):
            return function(q, pages, layer, table, visible, (part, share[1]), **options)

        return on_platform

    choices = {
        "cpu": choice(attend_in_steps, sizes=ON_CPU),
        "default": choice(attend_in_steps, sizes=ON_ACCELERATORS),
    }
    if kernel == "auto" and paged_tpu.fits(q, pages, table):
        choices["tpu"] = choice(paged_tpu.attend)
    if kernel == "auto" and paged_triton.unsupported(q, pages) is None:
        choices["cuda"] = choice(paged_triton.attend, interpret=False)
    given = (q, pages, layer, table, visible, jnp.int32(share[0]))
    return jax.lax.platform_dependent(*given, **choices)


def attend_in_steps(
    q, pages: Pages, layer, table, visible, share, sizes: Sizes
) -> tuple[jax.Array, jax.Array]:
    """Compute `attend` in plain XLA, in steps limited by `sizes`."""
    rows, time, heads, size = q.shape
    kv_heads, (part, parts) = pages.keys.shape[2], share
    of_a_page = time * heads * pages.block
    are_many = 8 * time >= sizes.queries
    fitting = min(sizes.keys // pages.block, sizes.scores // 4 // of_a_page)
    if are_many:
        fitting = sizes.queries // pages.block
    width = max(1, min(fitting, table.shape[1]))
    fitting = sizes.numbers // (width * pages.block * kv_heads * size)
    fitting = min(fitting, sizes.scores // (width * of_a_page))
    if 8 * of_a_page >= sizes.scores:
        fitting = rows // sizes.rows
    if are_many:
        fitting = sizes.queries // time
    together = max(1, min(fitting, rows))
    span = width * pages.block * parts  # positions passed in one step, on all shares
    within = jnp.arange(width)[:, None] * parts + part
    within = (within * pages.block + jnp.arange(pages.block)).reshape(-1)
    longest = jnp.max(visible, axis=1)
    order = jnp.argsort(longest == 0 if are_many else -longest)  # many queries: keep order
    order = jnp.pad(order, (0, -rows % together), mode="edge")
    # [M, T, N, H] to [M, K, T R, H]: one product per key head.
    queries = q.reshape(rows, time, kv_heads, -1, size).swapaxes(1, 2)
    queries = queries.reshape(rows, kv_heads, -1, size) * size**-0.5
    seen = jnp.repeat(visible, heads // kv_heads, axis=1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % width)))

    def some_rows(index, results):
        chosen = jax.lax.dynamic_slice_in_dim(order, index * together, together)
        steps = -(-jnp.max(longest[chosen]) // span)
        read = functools.partial(
            _read, pages=pages, layer=layer, steps=steps, within=within, span=span
        )
        given = queries[chosen], table[chosen], seen[chosen]
        if are_many and together > 1:
            is_one = jnp.all(given[1] == given[1][0])
            found = jax.lax.cond(is_one, functools.partial(_read_as_one, read), read, *given)
        else:
            found = read(*given)
        return tuple(old.at[chosen].set(new) for old, new in zip(results, found, strict=True))

    shape = queries.shape[:3]
    results = jnp.zeros(queries.shape, jnp.float32), jnp.full(shape, UNSEEN)
    steps = -(-jnp.sum(longest > 0) // together)
    out, lse = jax.lax.fori_loop(0, steps, some_rows, results)
    out = out.reshape(rows, kv_heads, time, -1, size).swapaxes(1, 2).reshape(q.shape)
    return out, lse.reshape(rows, kv_heads, time, -1).swapaxes(1, 2).reshape(q.shape[:3])


def _read_as_one(read, queries, table, visible):
    """Run `read` on rows [W, K, Q, H] with identical tables as one row with all their queries."""
    rows, kv_heads, many, size = queries.shape
    one = queries.swapaxes(0, 1).reshape(1, kv_heads, rows * many, size)
    out, lse = read(one, table[:1], visible.reshape(1, -1))
    return (
        out.reshape(kv_heads, rows, many, size).swapaxes(0, 1),
        lse.reshape(kv_heads, rows, many).swapaxes(0, 1),
    )


def _read(queries, table, visible, *, pages: Pages, layer, steps, within, span: int):
    """Attend from the queries of a few rows to their pages, a few pages at a time.

    Args:
      queries: scaled queries [W, K, Q, H].
      table: pages of each row, int32 [W, J].
      visible: number of leading keys that each query sees, int32 [W, Q].
      pages: the pool.
      layer: layer number, int32 scalar.
      steps: number of loop steps, int32 scalar.
      within: positions within a span of the keys read in one step, int32 [keys].
      span: positions passed in one step.

    Returns:
      out float32 [W, K, Q, H] and log-sum-exp float32 [W, K, Q].
    """
    rows, kv_heads = queries.shape[:2]
    keys_at_once = len(within)
    width = keys_at_once // pages.block

    def fetch(pool, which) -> Any:
        """Gather pages [W, width] of a pool as [W, K, keys, ...]."""
        if pool is None:
            return None
        found = pool[layer, which].swapaxes(1, 2)
        found = found.reshape(rows, kv_heads, keys_at_once, *pool.shape[4:])
        return found.astype(queries.dtype) if found.dtype == jnp.int8 else found

    def meet(step, state):
        out, top, total = state
        which = jax.lax.dynamic_slice_in_dim(table, step * width, width, axis=1)
        keys, key_scales = fetch(pages.keys, which), fetch(pages.key_scales, which)
        values, value_scales = fetch(pages.values, which), fetch(pages.value_scales, which)
        scores = jnp.einsum("wkqh,wkch->wkqc", queries, keys, preferred_element_type=jnp.float32)
        if key_scales is not None:
            scores *= key_scales[:, :, None]
        scores = jnp.where(step * span + within < visible[:, None, :, None], scores, MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=-1)
        if value_scales is not None:
            weights *= value_scales[:, :, None]
        more = jnp.einsum(
            "wkqc,wkch->wkqh",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return out * shrink[..., None] + more, new_top, total

    shape = queries.shape[:3]
    # The running maximum starts above MASKED, so that masked scores always have weight 0.
    start = jnp.zeros(queries.shape, jnp.float32), jnp.full(shape, MASKED / 2), jnp.zeros(shape)
    out, top, total = jax.lax.fori_loop(0, steps, meet, start)
    positive = jnp.maximum(total, 1e-30)
    lse = jnp.where(total > 0, top + jnp.log(positive), UNSEEN)
    return out / positive[..., None], lse


def merge(*parts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Merge attention (out [..., H], log-sum-exp [...]) over disjoint sets of keys."""
    lses = jnp.stack([lse for _, lse in parts])
    top = jnp.max(lses, axis=0)
    weights = jnp.exp(lses - top)
    total = jnp.sum(weights, axis=0)
    shares = zip(weights / total, parts, strict=True)
    out = jnp.sum(jnp.stack([share[..., None] * out for share, (out, _) in shares]), axis=0)
    return out, top + jnp.log(total)
