"""Copies of weights from the devices of one mesh to those of another, without the host's memory.

1. The source mesh gathers a piece of a weight onto each of its devices.
2. Each target device gets its part of the piece from a source device of the same host, so no data
   crosses hosts but in the gather.
3. The next piece waits for the copy of the piece before, so one piece needs memory at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from spell_jax.runtime import mesh as meshes

# Bytes of a piece, which every source device holds as a whole. A layer of a 7B policy in bfloat16
# has 466 MB in seven weights, so most pieces are some layers of one weight.
PIECE_BYTES = 256 * 2**20


class Transfer:
    """Function that copies a tree of weights to the devices of `shardings`, a tree like it.

    All processes must call it together. The source arrays lie on one mesh, which has devices on
    every process.
    """

    def __init__(self, shardings: Any, piece_bytes: int = PIECE_BYTES):
        self._shardings, self._piece_bytes = shardings, piece_bytes

    def __call__(self, tree: Any, before: Any = None) -> Any:
        """Return the copies, which are complete.

        The arrays of `before`, an earlier result, give their memory to the copies and are lost.
        """
        arrays, structure = jax.tree.flatten(tree)
        lost = [None] * len(arrays) if before is None else structure.flatten_up_to(before)
        targets = structure.flatten_up_to(self._shardings)
        copies = map(self._copy, arrays, targets, lost)
        return jax.tree.unflatten(structure, copies)

    def _copy(
        self, source: jax.Array, target: NamedSharding, before: jax.Array | None
    ) -> jax.Array:
        indices: Any = target.addressable_devices_indices_map(source.shape)
        buffers: dict[Any, jax.Array] = {}
        if before is not None:
            buffers = {shard.device: shard.data for shard in before.addressable_shards}
        for start, piece in _pieces(source, self._piece_bytes):
            parts = list(_parts(start, piece, indices))
            for device, offset, part in parts:
                moved = jax.device_put(part, device)
                shape = _shape(indices[device], source.shape)
                if moved.shape == shape:
                    if device in buffers:
                        buffers[device].delete()
                    buffers[device] = moved
                    continue
                if device not in buffers:
                    buffers[device] = jnp.zeros(shape, source.dtype, device=device)
                buffers[device] = _overwrite(buffers[device], moved, offset)
            jax.block_until_ready([buffers[device] for device, *_ in parts])
        arrays = [buffers[device] for device in indices]
        return jax.make_array_from_single_device_arrays(source.shape, target, arrays)


def _pieces(source: jax.Array, piece_bytes: int) -> Iterator[tuple[int, jax.Array]]:
    """Yield (first index on axis 0, piece of the array on every device of its mesh)."""
    length, count = _lengths(source.shape, source.nbytes, piece_bytes)
    assert isinstance(source.sharding, NamedSharding)
    gather = _gather(source.sharding.mesh)
    if count >= length:
        yield 0, gather(source, 0, None)
        return
    for start in range(0, length, count):
        # The last piece has full length, too: another length would be another program.
        start = min(start, length - count)
        yield start, gather(source, start, count)


def _lengths(shape: tuple[int, ...], nbytes: int, piece_bytes: int) -> tuple[int, int]:
    """Return the length of axis 0 of an array, 1 for a scalar, and of each of its pieces."""
    length = shape[0] if shape else 1
    return length, max(1, min(length, piece_bytes * length // max(1, nbytes)))


def largest_piece(tree: Any, piece_bytes: int = PIECE_BYTES) -> int:
    """Return the bytes of the largest piece of a tree of arrays or of their shapes."""
    sizes = []
    for leaf in jax.tree.leaves(tree):
        nbytes = leaf.size * leaf.dtype.itemsize
        length, count = _lengths(leaf.shape, nbytes, piece_bytes)
        sizes.append(nbytes * count // length)
    return max(sizes)


@functools.cache
def _gather(mesh: Any) -> jax.stages.Wrapped:
    def gather(source: jax.Array, start: jax.Array, count: int | None) -> jax.Array:
        if count is None:
            return source
        return jax.lax.dynamic_slice_in_dim(source, start, count)

    return jax.jit(gather, static_argnums=2, out_shardings=meshes.replicated(mesh))


def _parts(
    start: int, piece: jax.Array, indices: Mapping[Any, tuple[slice, ...]]
) -> Iterator[tuple[Any, int, jax.Array]]:
    """Yield (target device, offset on axis 0 of its array, its part of the piece)."""
    copies = [shard.data for shard in piece.addressable_shards]
    for number, (device, index) in enumerate(indices.items()):
        # In turn, so that the source devices share the work.
        copy = copies[number % len(copies)]
        if not index:
            yield device, 0, copy
            continue
        first, last, _ = index[0].indices(np.iinfo(np.int64).max)
        low, high = max(first, start), min(last, start + copy.shape[0])
        if low < high:
            yield device, low - first, copy[low - start : high - start, *index[1:]]


def _shape(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a part of an array of this shape."""
    sizes = (len(range(*axis.indices(size))) for axis, size in zip(index, shape, strict=True))
    return tuple(sizes)


@functools.partial(jax.jit, donate_argnums=0)
def _overwrite(buffer: jax.Array, part: jax.Array, offset: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(buffer, part, offset, 0)
