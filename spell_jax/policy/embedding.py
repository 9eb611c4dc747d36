"""Token embedding lookup on the current mesh, which never gathers the table [V, D].

The vocabulary is sharded over `tensor`, the width over `fsdp` and `context`. Each device looks up
its D / n columns of the tokens (int32) of all n devices that shard the width; an all-to-all then
gives every device its own tokens with all of D. The gradient takes the same path back.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int8, Int32

from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.bits import as_bits, from_bits
from spell_jax.runtime.collectives import Split


def lookup(
    table: Float[Array, "V D"] | Float[np.ndarray, "V D"] | Int8[Array, "V D"],
    tokens: Int32[Array, "B T"],
    scale: Float32[Array, " V"] | None = None,
) -> Float[Array, "B T D"]:
    """Return rows of a table, in its dtype, for tokens in [0, V).

    Rows of an int8 table are multiplied by their `scale`, and float32.
    """
    rows = _rows(table, tokens)
    return rows if scale is None else rows * _rows(scale[:, None], tokens)


def _rows(table: jax.Array | np.ndarray, tokens: jax.Array) -> jax.Array:
    return _lookup(Split.of(tokens.shape, *table.shape, over=meshes.TENSOR), table, tokens)


def has_token(
    ids: Int32[Array, "*B"], unused_ids: tuple[tuple[int, int], ...]
) -> Bool[Array, "*B"]:
    """Return a mask: False for ids in a range of PolicyConfig.unused_ids."""
    bounds = jnp.asarray(unused_ids, jnp.int32).reshape(-1)
    # An id in a range is at or above an odd number of the ordered bounds. One comparison per bound
    # fuses with the caller's loop; a constant mask of V bools would be sent to every device.
    return jnp.sum(ids[..., None] >= bounds, axis=-1) % 2 == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(split: Split, table: jax.Array, tokens: jax.Array) -> jax.Array:
    tokens_spec, run = split.tokens_spec, functools.partial(_forward, split)
    run = collectives.on_shards(split.mesh, run, (split.table_spec, tokens_spec), tokens_spec)
    return run(table, tokens)


def _lookup_forward(split: Split, table, tokens):
    return _lookup(split, table, tokens), (table, tokens)


def _lookup_backward(split: Split, inputs, to_out):
    table, tokens = inputs
    held = len(table) // split.count(split.leading)
    specs, run = (split.tokens_spec,) * 2, functools.partial(_backward, split, held)
    run = collectives.on_shards(split.mesh, run, specs, split.table_spec)
    return run(tokens, to_out), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def _forward(split: Split, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Compute one device's part of `lookup` from the device's shards."""
    place, here = _places(split, tokens, len(table))
    # The default mode would look for invalid indices, at the cost of a copy of the result.
    rows = from_bits(jnp.take(as_bits(table), place, axis=0, mode="clip"))
    if split.leading:  # one device has the row, all further devices add zeros
        rows = jax.lax.psum(jnp.where(here[..., None], rows, 0), split.leading)
    if not split.width:
        return rows
    # [n b, T, D / n], ordered by device -> [b, T, D]
    return jax.lax.all_to_all(rows, split.width, split_axis=0, concat_axis=2, tiled=True)


def _backward(split: Split, held: int, tokens: jax.Array, to_out: jax.Array) -> jax.Array:
    """Compute one device's part of the table's gradient, `held` rows."""
    place, here = _places(split, tokens, held)
    gradient = to_out
    if split.width:
        gradient = jax.lax.all_to_all(
            gradient, split.width, split_axis=2, concat_axis=0, tiled=True
        )
    # float32: in bfloat16 the 256th addition for a frequent token, and all further additions, would
    # change nothing.
    total = jnp.zeros((held, gradient.shape[-1]), jnp.float32)
    # Row `held` is out of range, so mode="drop" ignores the tokens of other devices.
    total = total.at[jnp.where(here, place, held)].add(gradient.astype(jnp.float32), mode="drop")
    if split.summed:
        total = jax.lax.psum(total, split.summed)
    # Where `context` splits the width but not the tokens, its devices added the same gradient.
    return collectives.rounded(total / split.copies, to_out.dtype)


def _places(split: Split, tokens: jax.Array, held: int) -> tuple[jax.Array, jax.Array]:
    """Return each token's index in this device's `held` table rows, and whether the rows have it.

    Both are [n b, T], for the tokens [b, T] of each of the n devices that shard the width.
    """
    if split.width:
        tokens = jax.lax.all_gather(tokens, split.width, axis=0, tiled=True)
    first = jax.lax.axis_index(split.leading) * held if split.leading else 0
    place = tokens - first
    return place, (place >= 0) & (place < held)
