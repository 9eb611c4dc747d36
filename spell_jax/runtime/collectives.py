"""What programs written out for a mesh (shard_map) share: splits, and sums over devices.

libtpu 0.0.42.1 (compiled, not run) writes sums over devices that are not what was asked for:
`sum_scatter` and `rounded` say where, and what makes it write them.
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

# Over axes of up to 8 devices a reduce-scatter is compiled as one, over 16, 32 or 64 often as an
# all-reduce of the whole.
_ONE_STAGE = 8


def current_mesh() -> AbstractMesh | None:
    """The mesh that is set; None if there is none, or one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def splitting(mesh: AbstractMesh, names: Axes, size: int) -> Axes:
    """The mesh axes of these that split this size; as in mesh.shardings, what they do not divide
    is on all of their devices."""
    if size % math.prod(mesh.shape[name] for name in names):
        return ()
    return tuple(name for name in names if mesh.shape[name] > 1)


@dataclasses.dataclass(frozen=True)
class Split:
    """Over which mesh axes a layer's tokens and weights are split; no axes on a single device.

    Attributes:
      mesh: None on a single device.
      rows, time: of tokens, B and T; `context` splits T, but not the siblings of a group.
      leading, width: of weights, the axis that comes first (V of a table, E of experts), and D.
    """

    mesh: AbstractMesh | None = None
    rows: Axes = ()
    time: Axes = ()
    leading: Axes = ()
    width: Axes = ()

    @classmethod
    def of(cls, tokens: tuple[int, ...], leading: int, width: int, over: str, **more: Any) -> Self:
        """That of tokens [B, T, ...] and of weights on the mesh that is set.

        Args:
          tokens: shape.
          leading, width: sizes of the weights' axes.
          over: the mesh axis that splits the leading one.
          **more: fields of a subclass.
        """
        mesh = current_mesh()
        if mesh is None:
            return cls(**more)
        return cls(
            mesh=mesh,
            rows=tuple(axis for axis in meshes.ROWS if mesh.shape[axis] > 1),
            time=splitting(mesh, (meshes.CONTEXT,), tokens[1]),
            leading=splitting(mesh, (over,), leading),
            width=splitting(mesh, meshes.EMBED, width),
            **more,
        )

    def count(self, axes: Axes) -> int:
        """Parts that these axes split a size into."""
        return math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh else 1

    @property
    def tokens_spec(self) -> PartitionSpec:
        """Of arrays [B, T, ...]."""
        return PartitionSpec(self.rows or None, self.time or None)

    @property
    def table_spec(self) -> PartitionSpec:
        """Of weights [leading, width]."""
        return PartitionSpec(self.leading or None, self.width or None)

    @property
    def summed(self) -> Axes:
        """Axes that split tokens but not weights: a gradient of weights is summed over them."""
        weights = self.leading + self.width
        return tuple(axis for axis in self.rows + self.time if axis not in weights)

    @property
    def copies(self) -> int:
        """How many devices that share a gradient's sum hold the same tokens: those of `context`
        where it splits the width but not the siblings of a group."""
        tokens = self.rows + self.time
        return self.count(tuple(axis for axis in self.width if axis not in tokens))


def on_shards(mesh: AbstractMesh | None, run: Callable[..., Any], in_specs: Any, out_specs: Any):
    """A function of shards as one of whole arrays; without a mesh they are the same."""
    if mesh is None:
        return run
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def sum_scatter(x: jax.Array, axes: Axes, dimension: int = 0) -> jax.Array:
    """The sum over mesh axes, of which each device keeps its part of a dimension.

    Over more than 8 devices in two stages. Also an all-reduce is: one that scatters the last
    dimension by parts that are no multiple of 128, or a dimension of an array of three.
    """
    for axis in axes:
        for groups in _stages(jax.lax.axis_size(axis)):
            x = jax.lax.psum_scatter(
                x, axis, scatter_dimension=dimension, axis_index_groups=groups, tiled=True
            )
    return x


def _stages(count: int) -> list[list[list[int]] | None]:
    """Groups of so many devices for reduce-scatters one after the other; None: all of them."""
    outer = max(i for i in range(1, math.isqrt(count) + 1) if count % i == 0)
    if count <= _ONE_STAGE or outer == 1:
        return [None]
    ranks = np.arange(count).reshape(outer, -1)
    return [ranks.T.tolist(), ranks.tolist()]


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """float32 in another dtype, rounded here: a cast alone is moved to before a sum over devices,
    which then adds in bfloat16 (an optimization_barrier does not keep it)."""
    kept = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, kept.nexp, kept.nmant).astype(dtype)
