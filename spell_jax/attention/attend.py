"""One attend() for training rows and prompts: several kernels behind one contract.

1. The mask is one int32 a key (masks.py), whatever the kernel.
2. A kernel is named by PolicyConfig.attention: "dense" (the reference: all scores at once),
   "chunked" (blocks; memory linear in T, nothing is computed where nothing is seen; any device) or
   "splash" (the same in Pallas, for TPUs; interpreted elsewhere, for tests). "auto" takes dense for
   rows of up to SHORT tokens; for longer ones splash where the program is for a TPU, else chunked.
3. Kernels with loops of their own are not for the partitioner: on a mesh each device runs them on
   its own rows and heads (shard_map).
4. Where the tokens of a row are split over `context`, each device keeps its queries and gathers the
   keys and values of the row; the gather's transpose is a reduce-scatter of their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spell_jax.attention import chunked, dense, masks, splash
from spell_jax.runtime import mesh as meshes

KERNELS: dict[str, Callable[..., jax.Array]] = {
    "dense": dense.attend,
    "chunked": chunked.attend,
    "splash": splash.attend,
}
NAMES = ("auto", *KERNELS)
# Up to here all scores of a row and head take 1 MiB or less, and dense has no loop to set up.
SHORT = 512


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    last_reader: jax.Array,
    index: jax.Array | None = None,
    kernel: str = "auto",
) -> jax.Array:
    """Softmax attention of packed rows on the mesh that is set.

    Args:
      q: [B, T, N, H].
      k, v: [B, T, K, H]; query head n reads key head n // (N / K).
      last_reader: int32 [B, T], see masks.py.
      index: int32 [B, T], row indices of the tokens; None: they stand in their order.
      kernel: one of NAMES.

    Returns:
      [B, T, N, H] in q's dtype; of a query that sees nothing (padding), anything finite.
    """
    run = KERNELS.get(kernel, _by_platform)
    if kernel == "auto" and q.shape[1] <= SHORT:
        run = KERNELS["dense"]
    index = masks.row_index(last_reader) if index is None else index
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(q, k, v, index, index, last_reader)
    heads, kv_heads, split = q.shape[2], k.shape[2], mesh.shape[meshes.TENSOR]
    tensor = meshes.TENSOR if heads % split == 0 else None
    if tensor and kv_heads % split:
        # Each device needs the key heads of its own query heads.
        repeats = heads // kv_heads
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    by_heads = PartitionSpec(meshes.ROWS, meshes.CONTEXT, tensor)
    by_time = PartitionSpec(meshes.ROWS, meshes.CONTEXT)
    return jax.shard_map(
        functools.partial(_on_device, run, mesh.shape[meshes.CONTEXT] > 1),
        in_specs=(by_heads, by_heads, by_heads, by_time, by_time),
        out_specs=by_heads,
        check_vma=False,
    )(q, k, v, index, last_reader)


def _by_platform(*inputs: jax.Array) -> jax.Array:
    """Decided when the program is lowered, which may be for another platform than this one."""
    compiled = functools.partial(KERNELS["splash"], interpret=False)
    return jax.lax.platform_dependent(*inputs, tpu=compiled, default=KERNELS["chunked"])


def _on_device(run: Callable[..., jax.Array], gathers: bool, q, k, v, index, last_reader):
    """One device's queries; arguments are its shards."""
    keys = (k, v, index, last_reader)
    if gathers:
        gather = functools.partial(jax.lax.all_gather, axis_name=meshes.CONTEXT, axis=1, tiled=True)
        keys = tuple(gather(x) for x in keys)
    k, v, k_index, last_reader = keys
    return run(q, k, v, index, k_index, last_reader)


def _packed(kernel: str, q, k, v, cache: Any, context: dict[str, jax.Array]):
    del cache
    return attend(q, k, v, context["last_reader"], context.get("index"), kernel), None


def _prefill(kernel: str, q, k, v, cache: Any, context: dict[str, jax.Array]):
    del cache
    return attend(q, k, v, context["last_reader"], kernel=kernel), (k, v)


@functools.cache  # one object a kernel, so that what is compiled for it is found again
def packed(kernel: str = "auto") -> Callable[..., Any]:
    """The policy's `Attend` for packed training rows; it keeps nothing."""
    return functools.partial(_packed, kernel)


@functools.cache
def prefill(kernel: str = "auto") -> Callable[..., Any]:
    """The policy's `Attend` for prompts; it keeps keys and values [B, T, K, H] for the sampler."""
    return functools.partial(_prefill, kernel)
