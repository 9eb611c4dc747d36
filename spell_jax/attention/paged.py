"""Attention of queries to keys that lie in pages, as the sampler keeps them.

1. One pool holds the keys and values of all layers in pages of C tokens. A row's table names its
   pages in order, so that page j holds positions j C to (j + 1) C - 1 of what the row reads; rows
   that begin alike name the same pages.
2. The mask is one number a query: it sees that many leading keys of its row. A prompt's tokens see
   one more each; the siblings behind a prompt all see the whole of it.
3. Rows are sorted by how much they read and taken a few at a time, pages too, with a running
   maximum and sum (online softmax): what is computed follows what is there, not the shapes.
4. Output and log-sum-exp come out, so that parts (prompt, suffix) can be merged.
5. TPUs and NVIDIA GPUs have kernels that read pages where they lie (paged_tpu.py, paged_triton.py);
   what is here gathers a few at a time, for CPUs and for shapes that these do not take.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from spell_jax.attention import paged_tpu, paged_triton
from spell_jax.attention.dense import MASKED


class Sizes(NamedTuple):
    """What is computed at once.

    Attributes:
      scores: float32 numbers; a row takes at most a quarter of them.
      keys: of each row; numbers: of all of these keys.
      rows: of large ones, with an eighth of the scores or more a page, one in so many of all. Rows
        that read nothing cost as much as others next to them, and most rows of a call may be such.
      queries: of rows with an eighth of it or more each, such as pages of one prompt. So many of
        neighbors that have one table meet as many keys in one product.
    """

    scores: int
    keys: int
    numbers: int
    rows: int
    queries: int


# A CPU's caches hold little: of 2^13 to 2^18 scores 2^15 was fastest (256 slots of the policy that
# ships). On accelerators: 64 MiB of scores. A prompt of 4,096 tokens, in pages of 128 that meet
# keys one by one, is read in 3.0 s on 2 CPU cores, in fours in 2.1 (8 layers, width 512).
ON_CPU = Sizes(2**15, 256, 2**19, 8, 512)
ON_ACCELERATORS = Sizes(2**24, 2048, 2**30, 1, 512)
UNSEEN = MASKED  # the log-sum-exp of a query that sees nothing: it weighs nothing in a merge


@flax.struct.dataclass
class Pages:
    """The pool of Z pages of C tokens.

    Attributes:
      keys, values: [L, Z, K, C, H].
      key_scales, value_scales: float32 [L, Z, K, C] where keys and values are int8, which stand for
        so many times themselves; else None.
    """

    keys: Any  # an array, or its placement or shape
    values: Any
    key_scales: Any = None
    value_scales: Any = None

    @property
    def block(self) -> int:
        """C, tokens of a page."""
        return self.keys.shape[3]


def empty(layers: int, pages: int, kv_heads: int, block: int, size: int, dtype) -> Pages:
    """A pool of zeros."""
    shape = (layers, pages, kv_heads, block, size)
    made = Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    if made.keys.dtype != jnp.int8:
        return made
    scales = jnp.zeros(shape[:-1], jnp.float32)
    return dataclasses.replace(made, key_scales=scales, value_scales=scales)


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
      q: [M, T, N, H].
      pages: the pool.
      layer: int32 scalar, whose keys and values.
      table: int32 [M, J], pages of each row in order.
      visible: int32 [M, T], how many leading keys of its row a query sees.
      share: (i, n) if the pool holds only the i-th of n equal parts of every page.
      kernel: "auto", the one for the platform where there is one for these shapes, or "xla".

    Returns:
      float32 out [M, T, N, H], zeros for a query that sees nothing, and log-sum-exp [M, T, N],
      UNSEEN there.
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
    """`attend` with bounds of what is computed at once."""
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
    span = width * pages.block * parts  # positions that are passed at once
    within = jnp.arange(width)[:, None] * parts + part
    within = (within * pages.block + jnp.arange(pages.block)).reshape(-1)
    longest = jnp.max(visible, axis=1)
    order = jnp.argsort(longest == 0 if are_many else -longest)  # neighbors stay neighbors
    order = jnp.pad(order, (0, -rows % together), mode="edge")
    # [M, T, N, H] as [M, K, T R, H]: the queries of a key head meet it in one product.
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
    """`_read` of rows [W, K, Q, H] whose tables are the same."""
    rows, kv_heads, many, size = queries.shape
    one = queries.swapaxes(0, 1).reshape(1, kv_heads, rows * many, size)
    out, lse = read(one, table[:1], visible.reshape(1, -1))
    return (
        out.reshape(kv_heads, rows, many, size).swapaxes(0, 1),
        lse.reshape(kv_heads, rows, many).swapaxes(0, 1),
    )


def _read(queries, table, visible, *, pages: Pages, layer, steps, within, span: int):
    """Out [W, K, Q, H] and lse [W, K, Q] of queries [W, K, Q, H] of a few rows, some pages at a
    time, whose keys stand at positions `within` a span."""
    rows, kv_heads = queries.shape[:2]
    keys_at_once = len(within)
    width = keys_at_once // pages.block

    def fetch(pool, which) -> Any:
        """[W, K, keys, ...] of pages [W, width]."""
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
    # Masked scores weigh nothing behind any real one: the running maximum begins above them.
    start = jnp.zeros(queries.shape, jnp.float32), jnp.full(shape, MASKED / 2), jnp.zeros(shape)
    out, top, total = jax.lax.fori_loop(0, steps, meet, start)
    positive = jnp.maximum(total, 1e-30)
    lse = jnp.where(total > 0, top + jnp.log(positive), UNSEEN)
    return out / positive[..., None], lse


def merge(*parts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Attention to all keys, of (out [..., H], log-sum-exp [...]) by parts of them."""
    lses = jnp.stack([lse for _, lse in parts])
    top = jnp.max(lses, axis=0)
    weights = jnp.exp(lses - top)
    total = jnp.sum(weights, axis=0)
    shares = zip(weights / total, parts, strict=True)
    out = jnp.sum(jnp.stack([share[..., None] * out for share, (out, _) in shares]), axis=0)
    return out, top + jnp.log(total)


def write_pages(
    pages: Pages, layer: jax.Array, page: jax.Array, keys: jax.Array, values: jax.Array
) -> Pages:
    """The pool with whole pages [B] written: keys and values [B, C, K, H]."""

    def write(pool, new):
        return pool.at[layer, page].set(new.swapaxes(1, 2))

    return _write(pages, keys, values, write)


def write_tokens(
    pages: Pages,
    layer: jax.Array,
    page: jax.Array,
    offset: jax.Array,
    keys: jax.Array,
    values: jax.Array,
) -> Pages:
    """The pool with a token [N] written at offsets in pages: keys and values [N, K, H].

    Rows of H numbers are written into the pool seen as a matrix: indexed by its own axes, XLA for
    TPUs turns the whole pool around, twice a layer.
    """
    _, count, kv_heads, block, _ = pages.keys.shape
    head = jnp.arange(kv_heads)
    row = ((layer * count + page)[:, None] * kv_heads + head) * block + offset[:, None]

    def write(pool, new):
        rows = pool.reshape(-1, *pool.shape[4:]).at[row].set(new, mode="promise_in_bounds")
        return rows.reshape(pool.shape)

    return _write(pages, keys, values, write)


def _write(pages: Pages, keys: jax.Array, values: jax.Array, write) -> Pages:
    """Writes keys, values and their scales each by write(pool, new)."""
    if pages.key_scales is None:
        dtype = pages.keys.dtype
        written = (keys.astype(dtype), None), (values.astype(dtype), None)
    else:
        written = quantize(keys), quantize(values)
    (keys, key_scales), (values, value_scales) = written
    new = Pages(keys, values, key_scales, value_scales)
    return jax.tree.map(write, pages, new)


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 [..., H] and float32 scales [...] whose product is x [..., H], to half a scale."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    return jnp.round(x / jnp.maximum(scale, 1e-30)[..., None]).astype(jnp.int8), scale
