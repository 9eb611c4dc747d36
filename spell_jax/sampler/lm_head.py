"""Decode logits on the current mesh, without moving the unembedding table [V, D].

The table is sharded with its vocabulary over `tensor` and its width over `fsdp` and `context`. Each
device multiplies its part; partial products are summed in float32 and scattered, so that each
device has whole rows of logits for its share of the slots.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32

from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.collectives import Split


def logits(
    config: PolicyConfig, params: transformer.Params, hidden: Float[Array, "N D"]
) -> Float32[Array, "N V"]:
    """Compute logits of hidden states; the device count must divide N.

    Logits of ids without a token are -inf.
    """
    if collectives.current_mesh() is None:
        return transformer.unembed(config, params, hidden)
    table = params["embedding" if config.tied_embeddings else "unembedding"]
    split = Split.of((len(hidden), 1), *table.shape, over=meshes.TENSOR)
    sampled = PartitionSpec((*meshes.ROWS, meshes.CONTEXT, meshes.TENSOR))
    on_mesh = jax.shard_map(
        functools.partial(_on_device, split),
        in_specs=(PartitionSpec(meshes.ROWS), split.table_spec),
        out_specs=sampled,
        check_vma=False,
    )
    return transformer.without_unused_ids(config, on_mesh(hidden, table))


def _on_device(split: Split, hidden: jax.Array, table: jax.Array) -> jax.Array:
    """Compute one device's rows of logits from its shards of hidden states and table."""
    # Devices that split both rows and width exchange hidden states [N, D], which are far smaller
    # than the table [V, D] that stays in place.
    together = tuple(axis for axis in split.width if axis in split.rows)
    if together:
        hidden = jax.lax.all_gather(hidden, together, axis=0, tiled=True)
    if split.width:
        share = table.shape[1]
        first = jax.lax.axis_index(split.width) * share
        hidden = jax.lax.dynamic_slice_in_dim(hidden, first, share, axis=1)
    # float32, because partial products of bfloat16 would be rounded before their sum.
    part = jnp.einsum("nd,vd->nv", hidden, table, preferred_element_type=jnp.float32)
    part = collectives.sum_scatter(part, together)
    part = _own_rows(part, meshes.CONTEXT, meshes.CONTEXT in split.width)
    # Sampling needs whole rows, so a sharded vocabulary exchanges rows for columns.
    if split.leading:
        return jax.lax.all_to_all(part, meshes.TENSOR, split_axis=0, concat_axis=1, tiled=True)
    return _own_rows(part, meshes.TENSOR, summed=False)


def _own_rows(x: jax.Array, axis: str, summed: bool) -> jax.Array:
    """Take a device's share of rows that a whole axis holds; if `summed`, sum partial rows."""
    if summed:
        return collectives.sum_scatter(x, (axis,))
    share = len(x) // jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * share, share)
