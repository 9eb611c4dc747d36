"""Device meshes, and the table that maps logical axes to mesh axes.

Parameters are sharded over `fsdp` and `context` and gathered layer by layer. Rows (packed groups,
or requests) are sharded over `data`, `fsdp` and `expert`, and the tokens of a row over `context`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

CONTEXT, TENSOR, EXPERT = "context", "tensor", "expert"
AXES = ("data", "fsdp", CONTEXT, TENSOR, EXPERT)
_AUTO = (AxisType.Auto,) * len(AXES)  # shardings are propagated by XLA, not by types
# Kinds of devices (v5e, v6e) whose links reach neighbors only. libtpu 0.0.42.1 refuses programs for
# parts of their slices above 16 chips, and aborts for parts of 16 and in collectives over 6 of 8.
_RIGID = ("TPU v5 lite", "TPU v6 lite")

Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]

# `expert` divides rows, too: outside of the experts its devices would otherwise repeat the same
# work.
ROWS = ("data", "fsdp", EXPERT)  # mesh axes of the batch axis of activations
# Mesh axes of the model width of parameters. Devices of `context` share the tokens of a row, and
# would otherwise hold equal copies of the parameters and of the optimizer's moments.
EMBED = ("fsdp", CONTEXT)
# Logical axis -> mesh axes, for training and prefill. `rows`, `time` and `width` are axes of
# activations; all other names are axes of weights.
RULES: Rules = (
    ("rows", ROWS),
    ("time", CONTEXT),
    ("width", None),
    ("embed", EMBED),
    ("vocab", TENSOR),
    ("heads", TENSOR),
    ("kv_heads", TENSOR),
    ("head", None),
    ("mlp", TENSOR),
    ("experts", EXPERT),
    ("router", None),
    ("rank", None),
    ("layers", None),
)
# In decoding a row is one token. Weights stay in place and activations move to them: each device
# multiplies all rows by its part of the width.
_IN_DECODING = {"rows": "data", "time": None, "width": EMBED}
DECODE_RULES: Rules = tuple((name, _IN_DECODING.get(name, axes)) for name, axes in RULES)


def make_mesh(
    shape: Mapping[str, int] | None = None,
    devices: Sequence[Any] | None = None,
    field: str = "mesh",
) -> jax.sharding.Mesh:
    """Make a mesh over `devices` (jax.Device), by default all devices.

    `shape` has the number of devices along each axis of AXES. Missing axes are 1; -1 (at most one
    axis) takes the remaining devices. The default puts every device on `fsdp`. ValueError if an
    axis is unknown, or if the sizes do not make the number of devices; `field` is the name of
    `shape` in its message.
    """
    sizes = axis_sizes(shape, jax.device_count() if devices is None else len(devices), field)
    return jax.make_mesh(sizes, AXES, axis_types=_AUTO, devices=devices)


def make_part_mesh(
    shape: Mapping[str, int], devices: Sequence[Any], field: str = "mesh"
) -> jax.sharding.Mesh:
    """Make a mesh as make_mesh does, over devices that may be any part of a TPU slice."""
    try:
        return make_mesh(shape, devices, field)
    except (AssertionError, NotImplementedError):
        # jax.make_mesh lays axes along the links between chips. It has no layout for chips that
        # form no cuboid, or for axes that are no products of the cuboid's sides. The given order
        # keeps the devices of a host together, so neighbors along the last axes share a host.
        grid = np.array(devices).reshape(axis_sizes(shape, len(devices), field))
        return jax.sharding.Mesh(grid, AXES, axis_types=_AUTO)


def split_devices(
    rollout_devices: int, devices: Sequence[Any] | None = None
) -> tuple[list[Any], list[Any]]:
    """Split the devices of each process: (devices that train, devices that sample).

    The last `rollout_devices` of each process sample. `devices` (jax.Device) are by default all
    devices. ValueError unless every process keeps at least one device of either kind.
    """
    by_process: dict[int, list[Any]] = {}
    devices = jax.devices() if devices is None else devices
    for device in sorted(devices, key=lambda device: (device.process_index, device.id)):
        by_process.setdefault(device.process_index, []).append(device)
    for host_devices in by_process.values():
        kind = host_devices[0].device_kind
        check_rollout_devices(rollout_devices, len(host_devices), len(by_process), kind)
    training = [device for devices in by_process.values() for device in devices[:-rollout_devices]]
    sampling = [device for devices in by_process.values() for device in devices[-rollout_devices:]]
    return training, sampling


def check_rollout_devices(
    rollout_devices: int, host_devices: int, hosts: int = 1, kind: str = ""
) -> None:
    """Raise ValueError unless the devices of `hosts` hosts, of a kind of device, can be split."""
    field = f"mesh.rollout_devices = {rollout_devices}"
    if not 0 < rollout_devices < host_devices:
        raise ValueError(
            f"{field}: must leave devices for training on each host, which has {host_devices}; 0 "
            "trains and samples on the same devices"
        )
    if kind in _RIGID and hosts > 1:
        raise ValueError(
            f"{field}: must be 0 on {hosts} hosts of {kind}; libtpu compiles no programs for a "
            "part of such a slice"
        )
    if kind in _RIGID and host_devices == 8 and rollout_devices != 4:
        raise ValueError(
            f"{field}: must be 4 on a host of 8 {kind}; libtpu compiles no collectives over 6"
        )


def axis_sizes(shape: Mapping[str, int] | None, count: int, field: str = "mesh") -> tuple[int, ...]:
    """Return the sizes of AXES for `count` devices; arguments and errors as in make_mesh."""
    # `fsdp` by default: it divides parameters, gradients and moments by the number of devices, and
    # needs no choice that depends on the model.
    shape = dict(shape or {"fsdp": -1})
    if unknown := set(shape) - set(AXES):
        raise ValueError(f"{field}.{min(unknown)}: not a mesh axis, must be one of {AXES}")
    check_sizes(shape, field)
    sizes = [shape.get(axis, 1) for axis in AXES]
    fixed_product = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) > 1 or count % fixed_product:
        raise ValueError(
            f"{field} = {shape}: cannot be laid out on {count} devices; the product of the sizes "
            "must be their number, and one size may be -1, for what is left"
        )
    sizes = [count // fixed_product if size == -1 else size for size in sizes]
    if math.prod(sizes) != count:
        raise ValueError(
            f"{field} = {shape}: makes {math.prod(sizes)} devices, but there are {count}"
        )
    return tuple(sizes)


def check_sizes(shape: Mapping[str, int], field: str = "mesh") -> None:
    """Raise ValueError for an axis of no devices."""
    for axis, size in shape.items():
        if size < 1 and size != -1:
            raise ValueError(f"{field}.{axis} = {size}: must be at least 1, or -1 for what is left")


def row_shards(mesh: jax.sharding.Mesh) -> int:
    """Return the number of shards of the row axis, which divides the rows of every batch."""
    return _axis_size(mesh, ROWS)


def context_shards(mesh: jax.sharding.Mesh) -> int:
    return mesh.shape[CONTEXT]


def is_of_cpus(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> bool:
    """Return whether the devices are CPUs; False for the slice of a plan, which has no devices."""
    device = mesh.abstract_mesh.abstract_device
    # The kind of the device, because jax 0.8 does not tell the platform.
    return device is not None and device.device_kind == "cpu"


def shardings(mesh: jax.sharding.Mesh, axes, shapes):
    """Map PartitionSpecs of logical axes to shardings; an indivisible dimension is replicated."""

    def sharding(spec: PartitionSpec, array) -> NamedSharding:
        axes = [dict(RULES)[name] for name in spec]
        # Shards must be equal. A small dimension, such as 2 key/value heads over 4 devices, is
        # copied.
        divided = [
            axis if axis is None or size % _axis_size(mesh, axis) == 0 else None
            for axis, size in zip(axes, array.shape, strict=True)
        ]
        return NamedSharding(mesh, PartitionSpec(*divided))

    return jax.tree.map(sharding, axes, shapes, is_leaf=lambda x: isinstance(x, PartitionSpec))


def with_sharding(tree: Any, shardings: Any) -> Any:
    """Return a tree as jax.ShapeDtypeStructs with shardings."""

    def abstract(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(abstract, tree, shardings)


def device_put(tree: Any, shardings: Any) -> Any:
    """Put numpy arrays that are equal on every host onto devices."""
    # With several hosts jax.device_put would first compare the arrays of all hosts, on all devices:
    # it would wait for running device work, and meet programs of a thread with its own devices.
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(shardings)):
        return jax.device_put(tree, shardings)

    def put(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(np.shape(x), sharding, np.asarray(x).__getitem__)

    return jax.tree.map(put, tree, shardings)


def _axis_size(mesh: jax.sharding.Mesh, axis: str | tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in ((axis,) if isinstance(axis, str) else axis))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Return the sharding of host batches [rows, ...]."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def by_rows_and_time(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Return the sharding of packed rows [rows, time]."""
    return NamedSharding(mesh, PartitionSpec(ROWS, CONTEXT))
