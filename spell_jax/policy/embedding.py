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

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.collectives import Axes


def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows [B, T, D] of tokens, in the table's dtype.

    Args:
      table: [V, D].
      tokens: int32 [B, T], in [0, V).
    """
    return _lookup(_split(table.shape, tokens.shape), table, tokens)


@dataclasses.dataclass(frozen=True)
class _Split:
    """Over which mesh axes the tensors are split; no axes on a single device.

    Attributes:
      mesh: None on a single device.
      rows, time: of tokens, B and T.
      vocab, width: of the table, V and D.
    """

    mesh: AbstractMesh | None = None
    rows: Axes = ()
    time: Axes = ()
    vocab: Axes = ()
    width: Axes = ()

    @property
    def tokens_spec(self) -> PartitionSpec:
        return PartitionSpec(self.rows or None, self.time or None)

    @property
    def table_spec(self) -> PartitionSpec:
        return PartitionSpec(self.vocab or None, self.width or None)

    @property
    def summed(self) -> Axes:
        """Axes that split tokens but not the table: its gradient is summed over them."""
        return tuple(axis for axis in self.rows + self.time if axis not in self.width)

    @property
    def copies(self) -> int:
        """How many devices that exchange tokens hold the same ones: those of `context` where it
        splits the width but not the siblings of a group."""
        return self.count(tuple(axis for axis in self.width if axis not in self.rows + self.time))

    def count(self, axes: Axes) -> int:
        """Parts that these axes split a size into."""
        return math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh else 1


def _split(table: tuple[int, ...], tokens: tuple[int, ...]) -> _Split:
    """The split of a table [V, D] and tokens [B, T] on the mesh that is set."""
    mesh = collectives.current_mesh()
    if mesh is None:
        return _Split()
    return _Split(
        mesh,
        rows=tuple(axis for axis in meshes.ROWS if mesh.shape[axis] > 1),
        time=collectives.splitting(mesh, (meshes.CONTEXT,), tokens[1]),
        vocab=collectives.splitting(mesh, (meshes.TENSOR,), table[0]),
        width=collectives.splitting(mesh, meshes.EMBED, table[1]),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(split: _Split, table: jax.Array, tokens: jax.Array) -> jax.Array:
    tokens_spec, run = split.tokens_spec, functools.partial(_forward, split)
    run = collectives.on_shards(split.mesh, run, (split.table_spec, tokens_spec), tokens_spec)
    return run(table, tokens)


def _lookup_forward(split: _Split, table, tokens):
    return _lookup(split, table, tokens), (table, tokens)


def _lookup_backward(split: _Split, inputs, to_out):
    table, tokens = inputs
    held = len(table) // split.count(split.vocab)
    specs, run = (split.tokens_spec,) * 2, functools.partial(_backward, split, held)
    run = collectives.on_shards(split.mesh, run, specs, split.table_spec)
    return run(tokens, to_out), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def _forward(split: _Split, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """One device's part of `lookup`; arguments are its shards."""
    place, here = _places(split, tokens, len(table))
    found = jnp.take(table, place, axis=0, mode="clip")
    if split.vocab:  # one device has the row, of the others come zeros
        found = jax.lax.psum(jnp.where(here[..., None], found, 0), split.vocab)
    if not split.width:
        return found
    # [n b, T, D / n], tokens of device after device -> [b, T, D]
    return jax.lax.all_to_all(found, split.width, split_axis=0, concat_axis=2, tiled=True)


def _backward(split: _Split, held: int, tokens: jax.Array, to_out: jax.Array) -> jax.Array:
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


def _places(split: _Split, tokens: jax.Array, held: int) -> tuple[jax.Array, jax.Array]:
    """Of the tokens of all devices that split the width [n b, T]: their rows in the device's part
    of the table, int32, and whether they are among the rows that it holds."""
    if split.width:
        tokens = jax.lax.all_gather(tokens, split.width, axis=0, tiled=True)
    first = jax.lax.axis_index(split.vocab) * held if split.vocab else 0
    place = tokens - first
    return place, (place >= 0) & (place < held)
