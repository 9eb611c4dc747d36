"""Attention of packed training rows: several kernels with one interface.

1. Every kernel takes the mask as one int32 per key (masks.py).
2. "dense" is the reference and computes all scores at once. "chunked" works block by block on any
   device: memory is linear in T, and block pairs without a visible key are skipped. "splash" (TPU)
   and "triton" (NVIDIA GPU) do the same in Pallas; elsewhere they run in the interpreter, for
   tests.
3. "auto" uses dense for rows of up to SHORT tokens. For longer rows it uses the Pallas kernel of
   the platform the program is lowered for, else chunked.
4. The SPMD partitioner cannot split kernels that contain loops. On a mesh, each device therefore
   runs the kernel on its own rows and heads (shard_map). If the tokens of a row are sharded over
   `context`, keys are all-gathered or passed around a ring; if layers have windows, only the keys
   that other devices see are all-gathered (context.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from spell_jax.attention import chunked, context, dense, masks, splash, triton
from spell_jax.attention import kernel as kernels
from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes

# vmap where the steps of a row do not depend on its mask (dense), or where a program walks its own
# list (triton). The other two take rows one by one: under vmap a loop would run as long as the
# longest row needs.
_MODULES = {
    "dense": (jax.vmap, dense),
    "chunked": (kernels.over_rows, chunked),
    "splash": (kernels.over_rows, splash),
    "triton": (jax.vmap, triton),
}
KERNELS = {
    name: kernels.Kernel(batched(module.forward), batched(module.backward))
    for name, (batched, module) in _MODULES.items()
}


def _by_platform(part: str) -> Callable[..., Any]:
    """Dispatch to the kernel of the platform that the program is lowered for."""

    # None for `interpret` would ask for this process's backend, which is a CPU when launch.aot
    # compiles for another platform.
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
# Up to this length the scores of one row and head take at most 1 MiB; dense needs no loop.
SHORT = 512


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    last_query: Int32[Array, "B T"],
    index: Int32[Array, "B T"] | None = None,
    name: str = "auto",
    ring: bool = False,
    positions: Int32[Array, "B T"] | None = None,
    window: Int32[Array, ""] | None = None,
) -> Float[Array, "B T N H"]:
    """Compute softmax attention of packed rows on the current mesh.

    Query head n reads key head n // (N / K). `last_query` is the mask (masks.py); `index` is the
    row index of each token, None if tokens are in order. `name` is one of NAMES. With `ring`, keys
    sharded over `context` travel around a ring instead of being all-gathered. A query sees the keys
    at most `window` - 1 `positions` before it; all keys if `window` is None. With a window, only
    keys that a query of another device sees travel, in either case.

    The result has q's dtype, and zeros for queries that see no key (padding).
    """
    index = masks.row_index(last_query) if index is None else index
    q_position = last_position = None
    if window is not None:
        assert positions is not None
        q_position, last_position = positions, positions + (window - 1)
    of_tokens = index, index, last_query, q_position, last_position
    short = name == "auto" and q.shape[1] <= SHORT
    kernel = KERNELS.get("dense" if short else name, _LONG)
    mesh = collectives.current_mesh()
    if mesh is None:
        return kernels.attend(kernel, q, k, v, *of_tokens)
    if mesh.shape[meshes.CONTEXT] > 1:
        extend = context.ring if ring else context.gathered
        kernel = (extend if window is None else context.rounds)(kernel)
    # Heads that the axis does not divide stay whole on every device of the axis: the same result,
    # computed several times.
    heads, kv_heads, split = q.shape[2], k.shape[2], mesh.shape[meshes.TENSOR]
    tensor = meshes.TENSOR if heads % split == 0 else None
    if tensor and kv_heads % split:
        # The tensor axis does not divide K: give each device the keys of its own query heads.
        repeats = heads // kv_heads
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    by_heads = PartitionSpec(meshes.ROWS, meshes.CONTEXT, tensor)
    by_time = PartitionSpec(meshes.ROWS, meshes.CONTEXT)
    # With check_vma every output of a Pallas kernel would have to name the mesh axes over which it
    # varies.
    return jax.shard_map(
        lambda q, k, v, *indices: kernels.attend(kernel, q, k, v, *indices),
        in_specs=(*[by_heads] * 3, *[by_time] * len(of_tokens)),
        out_specs=by_heads,
        check_vma=False,
    )(q, k, v, *of_tokens)


def _packed(name: str, ring: bool, q, k, v, cache: Any, arrays: dict[str, Array]):
    del cache
    rows = arrays["last_query"], arrays.get("index")
    window = arrays["positions"], arrays.get("window")
    return attend(q, k, v, *rows, name, ring, *window), None


@functools.cache  # one object per kernel, so that jit finds its compiled program again
def packed(name: str = "auto", ring: bool = False) -> Callable[..., Any]:
    """Return the policy's `Attend` for packed training rows; it uses no cache."""
    return functools.partial(_packed, name, ring)
