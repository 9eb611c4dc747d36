"""TPU slices to compile for, by the name under which they are rented.

1. A name is a chip generation and a count: of chips for v5e and v6e, of TensorCores (two per chip)
   for v4 and v5p.
2. The table has the arrangement of a slice's chips and the memory of one chip that a program can
   use, as the compiler reports it ("exceeds available HBM (15.75G)").
3. devices() gets the slice's devices from libtpu (`pip install -e '.[tpu]'`). Programs can be
   compiled for them on any CPU, but they hold no arrays and run nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import jax
from jax.experimental import topologies

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Topology:
    """A TPU slice.

    Attributes:
      name: name under which it is rented, such as "v5e-16".
      layout: name in jax.experimental.topologies, such as "v5e:4x4".
      chips: number of chips; each is one JAX device.
      shape: number of chips along each physical axis.
      hbm: bytes of a chip's memory that a program may use.
      accelerator: accelerator type of Google Cloud's virtual machines, such as "v5litepod-16".
      options: additional (name, value) options of get_topology_desc.
    """

    name: str
    layout: str
    chips: int
    shape: tuple[int, ...]
    hbm: int
    accelerator: str
    options: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class _Generation:
    """Properties shared by the slices of a generation.

    Attributes:
      accelerator: prefix of Google Cloud's accelerator type.
      counted: units per chip that slice names count: 1 (chips) or 2 (TensorCores).
      hbm_gib: GiB of a chip's memory that a program may use.
      shapes: chips along each physical axis, of every slice.
      options: additional options of get_topology_desc.
    """

    accelerator: str
    counted: int
    hbm_gib: float
    shapes: tuple[tuple[int, ...], ...]
    options: tuple[tuple[str, str], ...] = ()


_FLAT = ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8))
_GENERATIONS = {
    # Without the option, libtpu splits a v4 chip into two devices with half the memory each.
    "v4": _Generation("v4", 2, 30.75, _CUBES, (("chip_config_name", "megacore"),)),
    "v5e": _Generation("v5litepod", 1, 15.75, _FLAT),
    "v5p": _Generation("v5p", 2, 95.74, _CUBES),
    "v6e": _Generation("v6e", 1, 31.25, _FLAT),
}


def _slices():
    for generation, kind in _GENERATIONS.items():
        for shape in kind.shapes:
            chips = math.prod(shape)
            size = chips * kind.counted
            yield Topology(
                name=f"{generation}-{size}",
                layout=f"{generation}:{'x'.join(map(str, shape))}",
                chips=chips,
                shape=shape,
                hbm=int(kind.hbm_gib * _GIB),
                accelerator=f"{kind.accelerator}-{size}",
                options=kind.options,
            )


TOPOLOGIES = {topology.name: topology for topology in _slices()}


def find(name: str) -> Topology:
    """Return the slice of that name.

    Raises:
      ValueError: if the name is unknown; the message lists the known ones.
    """
    if name not in TOPOLOGIES:
        raise ValueError(f"topology = {name!r}: must be one of {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[name]


def devices(topology: Topology) -> list[Any]:
    """Get the slice's devices to compile for; the process must not have used libtpu before.

    Raises:
      ModuleNotFoundError: if libtpu is not installed.
    """
    # libtpu reads these when it is loaded. With them it does not query the metadata server about
    # this machine, and a second process that compiles meanwhile does not abort on the lock file.
    os.environ.update(
        TPU_ACCELERATOR_TYPE=topology.accelerator,
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    # Random keys and constants must be computed on the CPU although libtpu is installed.
    jax.config.update("jax_platforms", "cpu")
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "compiling for TPUs needs libtpu: pip install -e '.[tpu]' (no TPU is needed)"
        ) from error
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=topology.layout, **dict(topology.options)
    )
    return list(description.devices)
