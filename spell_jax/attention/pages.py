"""The pool of pages that holds the sampler's KV cache: its layout, its allocation, writes to it."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Float32, Int8, Int32, Shaped

from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.bits import from_bits


@flax.struct.dataclass
class Pages:
    """Pool of Z pages of C tokens in S layers (sampler/page_groups.py).

    In an int8 pool, a key or value is its vector times its scale. On CPUs a pool of bfloat16 holds
    bits (runtime/bits.py).

    Attributes:
      keys: array [S, Z, K, C, H], or its sharding or shape.
      values: array like `keys`.
      key_scales: float32 [S, Z, K, C] for int8 keys, else None.
      value_scales: array like `key_scales`.
    """

    keys: Any
    values: Any
    key_scales: Any = None
    value_scales: Any = None

    @property
    def page_size(self) -> int:
        """Tokens per page, C."""
        return self.keys.shape[3]


def stored_dtype(dtype: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return the dtype of a pool on a mesh that holds keys and values of `dtype`."""
    # XLA for CPUs converts a whole bfloat16 pool in every layer; it leaves bits alone.
    return jnp.uint16 if dtype == jnp.bfloat16 and meshes.is_of_cpus(mesh) else dtype


def empty_pages(layers: int, pages: int, kv_heads: int, page_size: int, size: int, dtype) -> Pages:
    """Make a pool of zeros; sizes are S, Z, K, C, H in order, `dtype` is from `stored_dtype`."""
    shape = (layers, pages, kv_heads, page_size, size)
    pool = Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    if pool.keys.dtype != jnp.int8:
        return pool
    scales = jnp.zeros(shape[:-1], jnp.float32)
    return dataclasses.replace(pool, key_scales=scales, value_scales=scales)


def write_pages(
    pages: Pages,
    layer: Int32[Array, ""],
    page: Int32[Array, " pages"],
    keys: Float[Array, "pages C K H"],
    values: Float[Array, "pages C K H"],
) -> Pages:
    """Write keys and values to whole pages; return the new pool."""

    def write_array(pool, new):
        return pool.at[layer, page].set(new.swapaxes(1, 2))

    return _write_arrays(pages, keys, values, write_array)


def write_tokens(
    pages: Pages,
    layer: Int32[Array, ""],
    page: Int32[Array, " tokens"],
    offset: Int32[Array, " tokens"],
    keys: Float[Array, "tokens K H"],
    values: Float[Array, "tokens K H"],
) -> Pages:
    """Write keys and values of tokens at their `offset` of their `page`; return the new pool.

    All indices must be in range.
    """
    # On CPUs the pool is indexed by its own axes, elsewhere as a matrix with rows of H elements.
    # Otherwise XLA copies the whole pool in every layer: as a matrix on CPUs if K is 1 (a decode
    # pass of 64 slots took 37 ms instead of 4), and by its own axes on TPUs.
    _, count, kv_heads, page_size, _ = pages.keys.shape
    head, page, offset = jnp.arange(kv_heads), page[:, None], offset[:, None]

    def by_axes(pool, new):
        return pool.at[layer, page, head, offset].set(new, mode="promise_in_bounds")

    def as_matrix(pool, new):
        row = ((layer * count + page) * kv_heads + head) * page_size + offset
        rows = pool.reshape(-1, *pool.shape[4:]).at[row].set(new, mode="promise_in_bounds")
        return rows.reshape(pool.shape)

    def write_array(pool, new):
        return jax.lax.platform_dependent(pool, new, cpu=by_axes, default=as_matrix)

    return _write_arrays(pages, keys, values, write_array)


def _write_arrays(pages: Pages, keys: Array, values: Array, write_array) -> Pages:
    """Write keys, values and (for int8 pools) their scales with write_array(pool, new)."""
    if pages.key_scales is None:
        new = Pages(*(_stored(x, pages.keys.dtype) for x in (keys, values)))
    else:
        (keys, key_scales), (values, value_scales) = quantize(keys), quantize(values)
        new = Pages(keys, values, key_scales, value_scales)
    return jax.tree.map(write_array, pages, new)


def _stored(x: Array, dtype: Any) -> Array:
    """Return keys or values as a pool of this dtype holds them; `loaded` is the inverse."""
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), dtype)
    return x.astype(dtype)


def loaded(x: Shaped[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """Return keys, values or scales that were read from a pool; int8 becomes `dtype`, unscaled."""
    return x.astype(dtype) if x.dtype == jnp.int8 else from_bits(x)


def quantize(
    x: Float[Array, "*shape H"],
) -> tuple[Int8[Array, "*shape H"], Float32[Array, "*shape"]]:
    """Quantize vectors to int8 and their scales; the error is at most half a scale."""
    x = x.astype(jnp.float32)
    # The largest element becomes 127 or -127: int8's -128 has no positive counterpart.
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    # A vector of zeros has scale 0 and must stay 0.
    return jnp.round(x / jnp.maximum(scale, 1e-30)[..., None]).astype(jnp.int8), scale


def by_kv_head(q: Shaped[Array, "M T N H"], kv_heads: int) -> Shaped[Array, "M K rows H"]:
    """Reshape queries to the T N / K rows of one product per key head."""
    batch, time, _, size = q.shape
    q = q.reshape(batch, time, kv_heads, -1, size).swapaxes(1, 2)
    return q.reshape(batch, kv_heads, -1, size)


def by_token(x: Shaped[Array, "M K rows *shape"], time: int) -> Shaped[Array, "M T N *shape"]:
    """Reshape rows of key heads to tokens, the inverse of by_kv_head."""
    batch, kv_heads, _, *size = x.shape
    x = x.reshape(batch, kv_heads, time, -1, *size).swapaxes(1, 2)
    return x.reshape(batch, time, -1, *size)
