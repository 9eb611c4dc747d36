"""Mixture of experts: every token goes through the few SwiGLUs that its router chooses.

1. The router scores all E experts for a token; the best k, with weights from a float32 softmax,
   are its experts (Qwen3-MoE: k = 8 of 128, the k weights scaled to sum 1).
2. The T * k (token, expert) pairs are sorted by expert and multiplied in one ragged matrix product
   a kernel: each expert's rows meet its own matrix. No token is dropped, nothing is padded.
3. Where experts are split over the mesh's `expert` axis, so are the tokens of all other layers.
   The tokens of an expert group are gathered, each device computes the pairs of its own experts,
   and partial sums are scattered back to where the tokens came from.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spell_jax.runtime import mesh as meshes

Kernels = tuple[jax.Array, jax.Array, jax.Array]


def route(logits: jax.Array, count: int, normalised: bool) -> tuple[jax.Array, jax.Array]:
    """The experts of each token.

    Args:
      logits: [..., E], any dtype.
      count: k, experts of a token.
      normalised: whether the k weights are scaled to sum 1.

    Returns:
      float32 weights [..., k], and int32 experts [..., k].
    """
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), count)
    if normalised:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


def load(chosen: jax.Array, experts: int, real: jax.Array) -> jax.Array:
    """Tokens that each expert got, float32 [E].

    Args:
      chosen: int32 [B, T, k].
      experts: E.
      real: bool [B, T]; padding does not count.
    """
    counted = jnp.broadcast_to(real[..., None], chosen.shape).astype(jnp.float32)
    return jnp.zeros(experts).at[chosen.reshape(-1)].add(counted.reshape(-1))


def mix(x: jax.Array, weights: jax.Array, chosen: jax.Array, kernels: Kernels) -> jax.Array:
    """Weighted sum of the outputs of each token's experts [B, T, D], on the mesh that is set.

    Args:
      x: [B, T, D].
      weights: [B, T, k].
      chosen: int32 [B, T, k].
      kernels: gate and up [E, D, F], down [E, F, D].
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return _local(x, weights, chosen, kernels, jnp.int32(0))
    experts, _, hidden = kernels[0].shape
    expert = _axis(mesh, meshes.EXPERT, experts)
    tensor = _axis(mesh, meshes.TENSOR, hidden)
    # Tokens of a row are split over `context`, but for the siblings of a group in decoding.
    rows = PartitionSpec(meshes.ROWS, _axis(mesh, meshes.CONTEXT, x.shape[1]))
    wide = PartitionSpec(expert, None, tensor)
    return jax.shard_map(
        functools.partial(_on_mesh, expert=expert, tensor=tensor),
        in_specs=(rows, rows, rows, (wide, wide, PartitionSpec(expert, tensor, None))),
        out_specs=rows,
        check_vma=False,
    )(x, weights, chosen, kernels)


def _axis(mesh: jax.sharding.AbstractMesh, name: str, size: int) -> str | None:
    """The mesh axis if it splits this size; as in meshes.shardings, what it does not divide is on
    all of its devices."""
    return name if mesh.shape[name] > 1 and size % mesh.shape[name] == 0 else None


def _on_mesh(x, weights, chosen, kernels: Kernels, expert: str | None, tensor: str | None):
    """One device's part of `mix`; arguments are its shards."""
    first = jnp.int32(0)
    if expert:
        gather = functools.partial(jax.lax.all_gather, axis_name=expert, axis=0, tiled=True)
        x, weights, chosen = gather(x), gather(weights), gather(chosen)
        first = jax.lax.axis_index(expert) * kernels[0].shape[0]
    out = _local(x, weights, chosen, kernels, first)
    if expert:
        out = jax.lax.psum_scatter(out, expert, scatter_dimension=0, tiled=True)
    return jax.lax.psum(out, tensor) if tensor else out


def _local(x, weights, chosen, kernels: Kernels, first: jax.Array) -> jax.Array:
    """The part of `mix` that belongs to the held experts, numbered from `first` on.

    Pairs of other experts are sorted behind all groups, where a ragged product leaves zeros.
    """
    gate, up, down = kernels
    held, count = gate.shape[0], chosen.shape[-1]
    tokens = x.reshape(-1, x.shape[-1])
    expert = chosen.reshape(-1) - first
    here = (expert >= 0) & (expert < held)
    expert = jnp.where(here, expert, held)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=held + 1)[:held].astype(jnp.int32)
    rows = jnp.take(tokens, order // count, axis=0)
    hidden = nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    outputs = jax.lax.ragged_dot(hidden, down, sizes)
    outputs = jnp.take(outputs, jnp.argsort(order), axis=0).reshape(-1, count, x.shape[-1])
    shares = jnp.where(here, weights.reshape(-1), 0).reshape(-1, count, 1).astype(x.dtype)
    return jnp.sum(outputs * shares, axis=1).reshape(x.shape)
