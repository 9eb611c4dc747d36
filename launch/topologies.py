"""TPU slices that programs are compiled for, by the name that one rents them under.

1. A name is a chip's generation and a number: of chips for v5e and v6e, of TensorCores, two a chip,
   for v4 and v5p.
2. The table gives the arrangement of a slice's chips and what one chip's memory leaves to a
   program, as the compiler says it ("exceeds available HBM (15.75G)").
3. devices() asks libtpu (`pip install -e '.[tpu]'`) for the slice's devices. They can be compiled
   for, on any CPU, but hold no arrays and run nothing.
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
    """A slice.

    Attributes:
      name: as it is rented, "v5e-16".
      layout: as jax.experimental.topologies wants it, "v5e:4x4".
      chips: how many; each is one JAX device.
      shape: chips along each physical axis.
      hbm: bytes of a chip's memory that a program may use.
      accelerator: as Google Cloud's virtual machines call it, "v5litepod-16".
      options: further ones of get_topology_desc.
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
    """What a generation's slices share; names count `counted` to a chip."""

    accelerator: str
    counted: int
    hbm_gib: float
    shapes: tuple[tuple[int, ...], ...]
    options: tuple[tuple[str, str], ...] = ()


_FLAT = ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8))
_GENERATIONS = {
    # Without the option libtpu makes two devices of a v4 chip, and a program sees half its memory.
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
    """The slice of that name.

    Raises:
      ValueError: there is none; the message lists those that there are.
    """
    if name not in TOPOLOGIES:
        raise ValueError(f"topology = {name!r}: must be one of {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[name]


def devices(topology: Topology) -> list[Any]:
    """The slice's devices, to compile for; for a process that has not used libtpu before.

    Raises:
      ModuleNotFoundError: libtpu is not installed.
    """
    # Read by libtpu when it is loaded: no server is asked what this machine is, and a second
    # process that compiles at the same time is not ended for the first one's lock file.
    os.environ.update(
        TPU_ACCELERATOR_TYPE=topology.accelerator,
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    # What runs here (random keys, constants) runs on the CPU, though libtpu is there.
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
