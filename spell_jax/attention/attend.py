"""One attend() for training rows: several kernels behind one contract.

1. The mask is one int32 a key (masks.py), whatever the kernel.
2. A kernel is named by PolicyConfig.attention: "dense" (the reference: all scores at once),
   "chunked" (blocks; memory linear in T, nothing is computed where nothing is seen; any device),
   "splash" or "triton" (the same in Pallas, for TPUs and for NVIDIA GPUs; interpreted elsewhere,
   for tests). "auto" takes dense for rows of up to SHORT tokens; for longer ones what is made for
   the platform of the program, else chunked.
3. Kernels with loops of their own are not for the partitioner: on a mesh each device runs them on
   its own rows and heads (shard_map).
4. Where the tokens of a row are split over `context`, each device keeps its queries and meets the
   keys of the others by gathering them or around a ring (context.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spell_jax.attention import chunked, context, dense, masks, splash, triton
from spell_jax.attention import kernel as kernels
from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes

KERNELS = {
    "dense": kernels.vmapped(dense.forward, dense.backward),
    "chunked": kernels.row_loop(chunked.forward, chunked.backward),
    "splash": kernels.row_loop(splash.forward, splash.backward),
    "triton": kernels.vmapped(triton.forward, triton.backward),
}


def _by_platform(part: str) -> Callable[..., Any]:
    """Decided when the program is lowered, which may be for another platform than this one."""

    def compiled(module):
        return functools.partial(getattr(module, part), interpret=False)

    choices = {
        "tpu": kernels.over_rows(compiled(splash)),
        "cuda": jax.vmap(compiled(triton)),
        "default": kernels.over_rows(getattr(chunked, part)),
    }
    return lambda *rows: jax.lax.platform_dependent(*rows, **choices)


_LONG = kernels.Kernel(_by_platform("forward"), _by_platform("backward"))
NAMES = ("auto", *KERNELS)
# Up to here all scores of a row and head take 1 MiB or less, and dense has no loop to set up.
SHORT = 512


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    last_query: jax.Array,
    index: jax.Array | None = None,
    name: str = "auto",
    ring: bool = False,
) -> jax.Array:
    """Softmax attention of packed rows on the mesh that is set.

    Args:
      q: [B, T, N, H].
      k, v: [B, T, K, H]; query head n reads key head n // (N / K).
      last_query: int32 [B, T], see masks.py.
      index: int32 [B, T], row indices of the tokens; None: they stand in their order.
      name: the kernel, one of NAMES.
      ring: how keys on other devices of `context` are met: around a ring, or gathered.

    Returns:
      [B, T, N, H] in q's dtype; zeros for a query that sees nothing (padding).
    """
    index = masks.row_index(last_query) if index is None else index
    short = name == "auto" and q.shape[1] <= SHORT
    kernel = KERNELS.get("dense" if short else name, _LONG)
    mesh = collectives.current_mesh()
    if mesh is None:
        return kernels.attend(kernel, q, k, v, index, index, last_query)
    if mesh.shape[meshes.CONTEXT] > 1:
        kernel = (context.ring if ring else context.gathered)(kernel)
    heads, kv_heads, split = q.shape[2], k.shape[2], mesh.shape[meshes.TENSOR]
    tensor = meshes.TENSOR if heads % split == 0 else None
    if tensor and kv_heads % split:
        # Each device needs the key heads of its own query heads.
        repeats = heads // kv_heads
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    by_heads = PartitionSpec(meshes.ROWS, meshes.CONTEXT, tensor)
    by_time = PartitionSpec(meshes.ROWS, meshes.CONTEXT)
    return jax.shard_map(
        lambda q, k, v, *indices: kernels.attend(kernel, q, k, v, *indices),
        in_specs=(by_heads, by_heads, by_heads, by_time, by_time, by_time),
        out_specs=by_heads,
        check_vma=False,
    )(q, k, v, index, index, last_query)


def _packed(name: str, ring: bool, q, k, v, cache: Any, given: dict[str, jax.Array]):
    del cache
    return attend(q, k, v, given["last_query"], given.get("index"), name, ring), None


@functools.cache  # one object a kernel, so that what is compiled for it is found again
def packed(name: str = "auto", ring: bool = False) -> Callable[..., Any]:
    """The policy's `Attend` for packed training rows; it keeps nothing."""
    return functools.partial(_packed, name, ring)
