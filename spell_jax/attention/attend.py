"""One attend() for training rows and prompts: several kernels behind one contract.

1. The mask is one int32 a key (masks.py), whatever the kernel.
2. A kernel is named by PolicyConfig.attention: "dense" (the reference: all scores at once) or
   "chunked" (blocks; memory linear in T, nothing is computed where nothing is seen); "auto" takes
   dense for rows of up to SHORT tokens and chunked for longer ones.
3. Kernels with loops of their own are not for the partitioner: on a mesh each device runs them on
   its own rows and heads (shard_map).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spell_jax.attention import chunked, dense
from spell_jax.runtime import mesh as meshes

KERNELS: dict[str, Callable[..., jax.Array]] = {"dense": dense.attend, "chunked": chunked.attend}
NAMES = ("auto", *KERNELS)
# Up to here all scores of a row and head take 1 MiB or less, and dense has no loop to set up.
SHORT = 512


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, last_reader: jax.Array, kernel: str = "auto"
) -> jax.Array:
    """Softmax attention of packed rows on the mesh that is set.

    Args:
      q: [B, T, N, H].
      k, v: [B, T, K, H]; query head n reads key head n // (N / K).
      last_reader: int32 [B, T], see masks.py.
      kernel: one of NAMES.

    Returns:
      [B, T, N, H] in q's dtype; of a query that sees nothing (padding), anything finite.
    """
    if kernel == "auto":
        kernel = "dense" if q.shape[1] <= SHORT else "chunked"
    mesh = jax.sharding.get_abstract_mesh()
    if kernel == "dense" or mesh.empty or mesh.size == 1:
        return KERNELS[kernel](q, k, v, last_reader)
    heads, kv_heads, split = q.shape[2], k.shape[2], mesh.shape[meshes.TENSOR]
    tensor = meshes.TENSOR if heads % split == 0 else None
    if tensor and kv_heads % split:
        # Each device needs the key heads of its own query heads.
        repeats = heads // kv_heads
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    by_heads = PartitionSpec(meshes.ROWS, None, tensor)
    return jax.shard_map(
        KERNELS[kernel],
        in_specs=(by_heads, by_heads, by_heads, PartitionSpec(meshes.ROWS)),
        out_specs=by_heads,
        check_vma=False,
    )(q, k, v, last_reader)


def _packed(kernel: str, q, k, v, cache: Any, context: dict[str, jax.Array]):
    del cache
    return attend(q, k, v, context["last_reader"], kernel), None


def _prefill(kernel: str, q, k, v, cache: Any, context: dict[str, jax.Array]):
    del cache
    return attend(q, k, v, context["last_reader"], kernel), (k, v)


@functools.cache  # one object a kernel, so that what is compiled for it is found again
def packed(kernel: str = "auto") -> Callable[..., Any]:
    """The policy's `Attend` for packed training rows; it keeps nothing."""
    return functools.partial(_packed, kernel)


@functools.cache
def prefill(kernel: str = "auto") -> Callable[..., Any]:
    """The policy's `Attend` for prompts; it keeps keys and values [B, T, K, H] for the sampler."""
    return functools.partial(_prefill, kernel)
