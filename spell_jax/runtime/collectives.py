"""Shared parts of programs written with shard_map: splits, and sums over devices.

libtpu 0.0.42.1 (compiled, not run) does not always compile a sum over devices as requested.
`sum_scatter` and `rounded` describe the cases and the workarounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from spell_jax.runtime import mesh as meshes

Axes = tuple[str, ...]

# Over axes of up to 8 devices a reduce-scatter is compiled as such. Over 16, 32 or 64 it is often
# compiled as an all-reduce of the whole array.
_ONE_STAGE = 8


def current_mesh() -> AbstractMesh | None:
    """Return the current mesh; None if there is none or it has a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def is_for_cpu() -> bool:
    """Return whether the traced program is for CPUs, by the current mesh or jax's backend."""
    # The mesh decides where there is one: a plan compiles for a TPU slice on a host with CPUs only.
    mesh = jax.sharding.get_abstract_mesh()
    return jax.default_backend() == "cpu" if mesh.empty else meshes.is_of_cpus(mesh)


def splitting(mesh: AbstractMesh, names: Axes, size: int) -> Axes:
    """Return the axes of `names` that split a dimension of `size`; () if they do not divide it."""
    if size % math.prod(mesh.shape[name] for name in names):
        return ()
    return tuple(name for name in names if mesh.shape[name] > 1)


@dataclasses.dataclass(frozen=True)
class Split:
    """Mesh axes over which a layer's tokens and weights are split; all empty on a single device.

    Attributes:
      mesh: current mesh; None on a single device.
      rows: axes that split the rows B of tokens.
      time: axes that split the time T of tokens, but not the samples of a group.
      leading: axes that split the first dimension of weights (V of a table, E of experts).
      width: axes that split the width D of weights.
    """

    mesh: AbstractMesh | None = None
    rows: Axes = ()
    time: Axes = ()
    leading: Axes = ()
    width: Axes = ()

    @classmethod
    def of(
        cls, tokens: tuple[int, ...], leading: int, width: int, over: str, **fields: Any
    ) -> Self:
        """Return how the current mesh splits tokens [B, T, ...] and weights [leading, width].

        `over` is the mesh axis that splits `leading`, such as the tensor axis for a table of V.
        """
        mesh = current_mesh()
        if mesh is None:
            return cls(**fields)
        return cls(
            mesh=mesh,
            rows=tuple(axis for axis in meshes.ROWS if mesh.shape[axis] > 1),
            time=splitting(mesh, (meshes.CONTEXT,), tokens[1]),
            leading=splitting(mesh, (over,), leading),
            width=splitting(mesh, meshes.EMBED, width),
            **fields,
        )

    def count(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh else 1

    @property
    def tokens_spec(self) -> PartitionSpec:
        return PartitionSpec(self.rows or None, self.time or None)

    @property
    def table_spec(self) -> PartitionSpec:
        return PartitionSpec(self.leading or None, self.width or None)

    @property
    def summed(self) -> Axes:
        """Axes that split tokens but not weights; weight gradients are summed over them."""
        weights = self.leading + self.width
        return tuple(axis for axis in self.rows + self.time if axis not in weights)

    @property
    def copies(self) -> int:
        """Number of devices in a gradient's sum that hold the same tokens.

        These are the devices of `context` if it splits the width but not the samples of a group.
        """
        tokens = self.rows + self.time
        return self.count(tuple(axis for axis in self.width if axis not in tokens))


def on_shards(mesh: AbstractMesh | None, run: Callable[..., Any], in_specs: Any, out_specs: Any):
    """Turn a function of shards into a function of whole arrays; the identity without a mesh."""
    if mesh is None:
        return run
    # The check of varying axes is off: Pallas kernels inside of shard_map do not pass it.
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def sum_scatter(x: jax.Array, axes: Axes, dimension: int = 0) -> jax.Array:
    """Sum over mesh axes and scatter one dimension (reduce-scatter).

    XLA for TPUs makes an all-reduce when scattering the last dimension in parts that are not a
    multiple of 128, or a dimension of a three-dimensional array.
    """
    # Over more than 8 devices in two stages: a single stage is often compiled as an all-reduce,
    # which sends about twice the bytes of a reduce-scatter.
    for axis in axes:
        for groups in _stages(jax.lax.axis_size(axis)):
            x = jax.lax.psum_scatter(
                x, axis, scatter_dimension=dimension, axis_index_groups=groups, tiled=True
            )
    return x


def _stages(count: int) -> list[list[list[int]] | None]:
    """Return device groups of consecutive reduce-scatters over `count` devices; None means all."""
    # The first stage sums over strided ranks and the second over consecutive ranks, so that device
    # r ends with part r, as after a single stage. Equal factors make the longer stage shortest.
    outer = max(i for i in range(1, math.isqrt(count) + 1) if count % i == 0)
    if count <= _ONE_STAGE or outer == 1:
        return [None]
    ranks = np.arange(count).reshape(outer, -1)
    return [ranks.T.tolist(), ranks.tolist()]


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Round float32 to another dtype in place of a cast."""
    # XLA moves a plain cast before a sum over devices, which then adds in bfloat16. An
    # optimization_barrier does not prevent that; reduce_precision does.
    float_info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, float_info.nexp, float_info.nmant).astype(dtype)
