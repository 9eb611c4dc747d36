"""The rows of the embedding that belong to tokens, on the mesh that is set.

1. On a mesh the table [V, D] stays where it lies: the vocabulary over `tensor`, the width over
   `fsdp` and `context`. Each device gets the tokens (int32) of all n devices that split the width,
   takes its own D / n numbers of each, and an all-to-all gives every device its own tokens with all
   of D. No device holds [V, D].
2. The gradient goes the same way back, and is added up in float32: in bfloat16 a frequent token's
   256th addition and all after it would change nothing. It is rounded at the end.
3. Both passes are written out, each in one shard_map, so that all that is summed over devices
   stands here.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.collectives import Split


def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows [B, T, D] of tokens, in the table's dtype.

    Args:
      table: [V, D].
      tokens: int32 [B, T], in [0, V).
    """
    return _lookup(Split.of(tokens.shape, *table.shape, over=meshes.TENSOR), table, tokens)


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
    """One device's part of `lookup`; arguments are its shards."""
    place, here = _places(split, tokens, len(table))
    found = jnp.take(table, place, axis=0, mode="clip")
    if split.leading:  # one device has the row, of the others come zeros
        found = jax.lax.psum(jnp.where(here[..., None], found, 0), split.leading)
    if not split.width:
        return found
    # [n b, T, D / n], tokens of device after device -> [b, T, D]
    return jax.lax.all_to_all(found, split.width, split_axis=0, concat_axis=2, tiled=True)


def _backward(split: Split, held: int, tokens: jax.Array, to_out: jax.Array) -> jax.Array:
    """One device's part of the table's gradient, `held` rows."""
    place, here = _places(split, tokens, held)
    given = to_out
    if split.width:
        given = jax.lax.all_to_all(given, split.width, split_axis=2, concat_axis=0, tiled=True)
    total = jnp.zeros((held, given.shape[-1]), jnp.float32)
    # Of a row behind the last one nothing is added.
    total = total.at[jnp.where(here, place, held)].add(given.astype(jnp.float32), mode="drop")
    if split.summed:
        total = jax.lax.psum(total, split.summed)
    return collectives.rounded(total / split.copies, to_out.dtype)


def _places(split: Split, tokens: jax.Array, held: int) -> tuple[jax.Array, jax.Array]:
    """Of the tokens of all devices that split the width [n b, T]: their rows in the device's part
    of the table, int32, and whether they are among the rows that it holds."""
    if split.width:
        tokens = jax.lax.all_gather(tokens, split.width, axis=0, tiled=True)
    first = jax.lax.axis_index(split.leading) * held if split.leading else 0
    place = tokens - first
    return place, (place >= 0) & (place < held)
