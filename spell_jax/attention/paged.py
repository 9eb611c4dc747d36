"""Attention of queries to keys that lie in pages, as the sampler keeps them.

1. One pool holds the keys and values of all layers in pages of C tokens. A row's table names its
   pages in order, so that page j holds positions j C to (j + 1) C - 1 of what the row reads; rows
   that begin alike name the same pages.
2. The mask is one number a query: it sees that many leading keys of its row. A prompt's tokens see
   one more each; the siblings behind a prompt all see the whole of it.
3. Rows are sorted by how much they read and taken a few at a time, pages too, with a running
   maximum and sum (online softmax): what is computed follows what is there, not the shapes.
4. Output and log-sum-exp come out, so that parts (prompt, suffix, the new token) can be merged.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spell_jax.attention.dense import MASKED

# (scores, keys) at once. A CPU's caches hold little, and rows that read nothing cost as much as
# others next to them: of 2^13 to 2^18 scores 2^15 was fastest (256 slots of the policy that ships).
# On accelerators: 64 MiB of scores.
ON_CPU, ON_ACCELERATORS = (2**15, 256), (2**24, 2048)
UNSEEN = MASKED  # the log-sum-exp of a query that sees nothing: it weighs nothing in a merge


@flax.struct.dataclass
class Pages:
    """The pool of Z pages of C tokens.

    Attributes:
      keys, values: [L, Z, K, C, H].
    """

    keys: Any  # an array, or its placement or shape
    values: Any

    @property
    def block(self) -> int:
        """C, tokens of a page."""
        return self.keys.shape[3]


def empty(layers: int, pages: int, kv_heads: int, block: int, size: int, dtype) -> Pages:
    """A pool of zeros."""
    shape = (layers, pages, kv_heads, block, size)
    return Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def attend(
    q: jax.Array,
    pages: Pages,
    layer: jax.Array,
    table: jax.Array,
    visible: jax.Array,
    share: tuple[jax.Array | int, int] = (0, 1),
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of rows of queries to the pages of each row.

    Args:
      q: [M, T, N, H].
      pages: the pool.
      layer: int32 scalar, whose keys and values.
      table: int32 [M, J], pages of each row in order.
      visible: int32 [M, T], how many leading keys of its row a query sees.
      share: (i, n) if the pool holds only the i-th of n equal parts of every page.

    Returns:
      float32 out [M, T, N, H], zeros for a query that sees nothing, and log-sum-exp [M, T, N],
      UNSEEN there.
    """

    def sized(sizes: tuple[int, int]):
        return lambda q, pages, layer, table, visible, part: attend_in_steps(
            q, pages, layer, table, visible, (part, share[1]), *sizes
        )

    given = (q, pages, layer, table, visible, jnp.int32(share[0]))
    choices = {"cpu": sized(ON_CPU), "default": sized(ON_ACCELERATORS)}
    return jax.lax.platform_dependent(*given, **choices)


def attend_in_steps(
    q, pages: Pages, layer, table, visible, share, scores_at_once: int, keys_at_once: int
) -> tuple[jax.Array, jax.Array]:
    """`attend` with bounds of what is computed at once: float32 scores of a few rows, and keys of
    each."""
    rows, time, heads, size = q.shape
    kv_heads, (part, parts) = pages.keys.shape[2], share
    width = max(1, min(keys_at_once // pages.block, table.shape[1]))
    of_a_row = time * heads * width * pages.block
    together = max(1, min(scores_at_once // of_a_row, rows))
    span = width * pages.block * parts  # positions that are passed at once
    within = jnp.arange(width)[:, None] * parts + part
    within = (within * pages.block + jnp.arange(pages.block)).reshape(-1)
    longest = jnp.max(visible, axis=1)
    order = jnp.pad(jnp.argsort(-longest), (0, -rows % together), mode="edge")
    # [M, T, N, H] as [M, K, T R, H]: the queries of a key head meet it in one product.
    queries = q.reshape(rows, time, kv_heads, -1, size).swapaxes(1, 2)
    queries = queries.reshape(rows, kv_heads, -1, size) * size**-0.5
    seen = jnp.repeat(visible, heads // kv_heads, axis=1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % width)))

    def some_rows(index, results):
        chosen = jax.lax.dynamic_slice_in_dim(order, index * together, together)
        found = _read(
            queries[chosen],
            pages,
            layer,
            table[chosen],
            seen[chosen],
            -(-longest[chosen[0]] // span),
            within,
            span,
        )
        return tuple(old.at[chosen].set(new) for old, new in zip(results, found, strict=True))

    shape = queries.shape[:3]
    results = jnp.zeros(queries.shape, jnp.float32), jnp.full(shape, UNSEEN)
    steps = -(-jnp.sum(longest > 0) // together)
    out, lse = jax.lax.fori_loop(0, steps, some_rows, results)
    out = out.reshape(rows, kv_heads, time, -1, size).swapaxes(1, 2).reshape(q.shape)
    return out, lse.reshape(rows, kv_heads, time, -1).swapaxes(1, 2).reshape(q.shape[:3])


def _read(queries, pages: Pages, layer, table, visible, steps, within, span: int):
    """Out [W, K, Q, H] and lse [W, K, Q] of queries [W, K, Q, H] of a few rows, some pages at a
    time, whose keys stand at positions `within` a span."""
    rows, kv_heads, _, size = queries.shape
    keys_at_once = len(within)
    width = keys_at_once // pages.block

    def meet(step, state):
        out, top, total = state
        which = jax.lax.dynamic_slice_in_dim(table, step * width, width, axis=1)
        keys, values = (
            x[layer, which].swapaxes(1, 2).reshape(rows, kv_heads, keys_at_once, size)
            for x in (pages.keys, pages.values)
        )
        scores = jnp.einsum("wkqh,wkch->wkqc", queries, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(step * span + within < visible[:, None, :, None], scores, MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        more = jnp.einsum(
            "wkqc,wkch->wkqh",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        total = total * shrink + jnp.sum(weights, axis=-1)
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
    return Pages(
        pages.keys.at[layer, page].set(keys.swapaxes(1, 2).astype(pages.keys.dtype)),
        pages.values.at[layer, page].set(values.swapaxes(1, 2).astype(pages.values.dtype)),
    )


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
    _, count, kv_heads, block, size = pages.keys.shape
    head = jnp.arange(kv_heads)
    row = ((layer * count + page)[:, None] * kv_heads + head) * block + offset[:, None]

    def write(pool, new):
        rows = pool.reshape(-1, size).at[row].set(new.astype(pool.dtype), mode="promise_in_bounds")
        return rows.reshape(pool.shape)

    return Pages(write(pages.keys, keys), write(pages.values, values))
