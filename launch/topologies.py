"""Devices to plan and compile for, by name.

    v5e-16       a TPU slice, by the name under which Google rents it
    h100:8       GPUs of one machine: a kind of _GPUS, and their number
    gpu:2 cpu:8  other devices of one machine; --memory_gib says how much memory each has

launch.plan, launch.check and launch.aot take the same names. launch.aot compiles for slices, h100:1
and h200:1.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from absl import flags
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType

from spell_jax.config import RunMeshConfig
from spell_jax.runtime import mesh as meshes

GIB = 2**30
ANY_MEMORY = sys.maxsize


class Topology(NamedTuple):
    """A TPU slice, or devices of one machine; `accelerator` is "" if not a slice.

    Programs can be compiled for it unless `layout` is "".
    """

    name: str  # such as "v5e-16" or "h100:8"
    layout: str  # name in jax.experimental.topologies, such as "v5e:4x4"; "cuda" for a GPU
    chips: int  # each is one JAX device
    shape: tuple[int, ...]  # number of chips along each physical axis
    hbm: int  # bytes of a chip's memory that a program may use; ANY_MEMORY if unknown
    accelerator: str  # type of Google Cloud's virtual machines, such as "v5litepod-16"
    host_chips: int = 0  # chips of each host; 0: one host has all

    @property
    def hosts(self) -> int:
        return self.chips // (self.host_chips or self.chips)

    @property
    def kind(self) -> str:
        """Kind of the chips: a key of _GENERATIONS or _GPUS, "gpu" or "cpu"."""
        return self.name.partition("-" if self.accelerator else ":")[0]


class Meshes(NamedTuple):
    """Meshes of a run, real or abstract."""

    training: Any
    rollout: Any = None  # of mesh.rollout_devices; None if the training mesh samples too

    @property
    def are_split(self) -> bool:
        return self.rollout is not None

    @property
    def sampling(self) -> Any:
        return self.rollout if self.are_split else self.training

    def by_field(self) -> dict[str, Any]:
        """Return each mesh by the section of the config that lays it out."""
        by_field = {"mesh": self.training, "mesh.rollout": self.rollout}
        return {field: mesh for field, mesh in by_field.items() if mesh is not None}


# Slices that Google rents: generations with two physical axes (v5e, v6e) and with three (v4, v5p).
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8))
# Generation -> prefix of the accelerator type, units per chip that names count (chips or
# TensorCores, two per chip), usable GiB of a chip (as in the compiler's "exceeds available HBM
# (15.75G)"), chips along each physical axis of every slice.
_GENERATIONS = {
    "v4": ("v4", 2, 30.75, _CUBES),
    "v5e": ("v5litepod", 1, 15.75, _FLAT),
    "v5p": ("v5p", 2, 95.74, _CUBES),
    "v6e": ("v6e", 1, 31.25, _FLAT),
}
# A virtual machine has four chips. Slices of v5e and v6e with up to eight chips have one machine
# with all (Google Cloud's pages "TPU v5e", "v6e", "v4" and "v5p", tables of slice shapes: 2x4 is
# ct5lp-hightpu-8t or ct6e-standard-8t, and larger slices have one machine for each four chips).
_HOST_CHIPS, _LARGEST_HOST = 4, {"v5e": 8, "v6e": 8}
# jax.Device.device_kind, for the generations that runtime.mesh.check_rollout_devices treats apart.
_DEVICE_KINDS = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite"}


class Peaks(NamedTuple):
    """Peaks of one chip per second, as stated by its maker."""

    operations: float  # in matrix products of bfloat16
    memory: float  # bytes of its memory
    link: float  # bytes received from other chips, over all links


# Google Cloud's pages "TPU v4", "v5e", "v5p" and "v6e" (docs.cloud.google.com/tpu/docs/v5e): peak
# compute, HBM bandwidth, and half of the bidirectional inter-chip bandwidth (v4: six links of 45
# GB/s, How To Scale Your Model, part 2).
_TPU_PEAKS = {
    "v4": Peaks(275e12, 1200e9, 270e9),
    "v5e": Peaks(197e12, 819e9, 200e9),
    "v5p": Peaks(459e12, 2765e9, 600e9),
    "v6e": Peaks(918e12, 1638e9, 400e9),
}


class Gpu(NamedTuple):
    """A kind of NVIDIA GPU.

    Attributes:
      memory: GiB that CUDA reports of one GPU.
      peaks: peaks of one GPU.
    """

    memory: float
    peaks: Peaks


# Memory: what CUDA reports, less than the name says; the least that users' out-of-memory errors
# show, since drivers and ECC take different parts ("GPU 0 has a total capacity of 22.03 GiB": an
# L4; 23.52 and 23.68: RTX 4090 and 3090; 39.38: an A100 of 40 GB). H200: measured.
# Peaks: NVIDIA's data sheets of the A100 40GB and 80GB SXM, H100 SXM, H200 SXM: bfloat16 without
# sparsity, HBM, half of NVLink's 600 and 900 GB/s; of the L4: half of the 242 TFLOP/s with
# sparsity, GDDR6, half of the 64 GB/s of PCIe; NVIDIA's Ada and Ampere GA102 whitepapers of the RTX
# 4090 and 3090: bfloat16 with float32 sums and without sparsity, GDDR6X, half of PCIe's 64 GB/s.
_GPUS = {
    "a100-40": Gpu(39.38, Peaks(312e12, 1555e9, 300e9)),
    "a100-80": Gpu(79.14, Peaks(312e12, 2039e9, 300e9)),
    "h100": Gpu(79.11, Peaks(989e12, 3350e9, 450e9)),
    "h200": Gpu(139.78, Peaks(989e12, 4800e9, 450e9)),
    "l4": Gpu(22.03, Peaks(121e12, 300e9, 32e9)),
    "rtx3090": Gpu(23.68, Peaks(71e12, 936e9, 32e9)),
    "rtx4090": Gpu(23.52, Peaks(165e12, 1008e9, 32e9)),
}
_MACHINE_GPUS = 8  # most GPUs of a machine
PEAKS = _TPU_PEAKS | {name: gpu.peaks for name, gpu in _GPUS.items()}
# Share of a GPU's memory that a program may use. jax takes as much when a process starts, with
# XLA_PYTHON_CLIENT_MEM_FRACTION=.92, and 75 % without; the remainder holds CUDA's own data.
GPU_SHARE = 0.92
_COMPILED_GPUS = ("h100:1", "h200:1")
# Without this option, libtpu splits a v4 chip into two devices with half the memory each.
_OPTIONS = {"v4": {"chip_config_name": "megacore"}}


def _slices():
    for generation, (accelerator, counted, gib, shapes) in _GENERATIONS.items():
        for shape in shapes:
            chips = math.prod(shape)
            size = chips * counted
            yield Topology(
                name=f"{generation}-{size}",
                layout=f"{generation}:{'x'.join(map(str, shape))}",
                chips=chips,
                shape=shape,
                hbm=int(gib * GIB),
                accelerator=f"{accelerator}-{size}",
                host_chips=0 if chips <= _LARGEST_HOST.get(generation, 0) else _HOST_CHIPS,
            )


TOPOLOGIES = {topology.name: topology for topology in _slices()}
# What XLA's compiler asks a GPU's driver for, as text of its GpuTargetConfigProto: limits of CUDA
# for compute capability 9.0 and numbers of NVIDIA's data sheets. Only the memory differs.
_HOPPER = """
gpu_device_info {{
  name: "{kind}"
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{kind}"
"""


def define_flags(*, required: bool = False, memory: bool = True) -> None:
    """Define the flags that name devices.

    --topology is required if `required`. With `memory`, --memory_gib gives the memory of devices
    that have no name here.
    """
    flags.DEFINE_string(
        "topology",
        None,
        "Devices: v5e-16, v6e-1, h100:8, l4:1, gpu:N, cpu:N (launch/topologies.py).",
    )
    if memory:
        flags.DEFINE_float(
            "memory_gib",
            0.0,
            "Memory of each device of gpu:N, as CUDA reports it (an L4 of 24 GB: 22), or cpu:N; 0: "
            "unknown.",
            lower_bound=0.0,
        )
    if required:
        flags.mark_flag_as_required("topology")


def find(name: str, memory_gib: float = 0.0) -> Topology:
    """Return the devices of that name.

    `memory_gib` is the memory of each device of "gpu:N" or "cpu:N"; 0 means unknown. ValueError for
    an unknown name, with names like it, and for `memory_gib` of a device whose memory is known.
    """
    if not 0 <= memory_gib < math.inf:
        raise ValueError(f"memory_gib = {memory_gib}: must be GiB of memory, 0 if unknown")
    kind, _, count = name.partition(":")
    is_other = kind in ("gpu", "cpu")
    if name in TOPOLOGIES:
        topology = TOPOLOGIES[name]
    elif re.fullmatch(r"[1-9]\d{0,5}", count) and (is_other or kind in _GPUS):
        topology = _machine(kind, int(count), memory_gib)
    else:
        raise ValueError(f"topology = {name!r}: {_remedy(name)}")
    if memory_gib and not is_other:
        raise ValueError(
            f"memory_gib = {memory_gib:g}: must not be given with topology = {name!r}, of known "
            "memory; gpu:N and cpu:N take it"
        )
    return topology


def _machine(kind: str, count: int, memory_gib: float) -> Topology:
    """Make the topology of one machine's GPUs or CPU devices."""
    name = f"{kind}:{count}"
    if kind in _GPUS:
        if count > _MACHINE_GPUS:
            raise ValueError(
                f"topology = {name!r}: must have at most {_MACHINE_GPUS} GPUs, those of one "
                "machine; gpu:N with --memory_gib has no limit"
            )
        memory_gib = _GPUS[kind].memory
    share = 1.0 if kind == "cpu" else GPU_SHARE
    hbm = int(share * memory_gib * GIB) if memory_gib else ANY_MEMORY
    return Topology(name, "cuda" if name in _COMPILED_GPUS else "", count, (count,), hbm, "")


def _remedy(name: str) -> str:
    """Return what may stand in place of an unknown name: names like it, and the forms of all."""
    gpus = [f"{kind}:{count}" for kind in _GPUS for count in (1, 2, 4, 8)]
    # "4090" and "h100" name a GPU without the number of GPUs.
    close_names = [f"{kind}:1" for kind in _GPUS if name and kind.endswith(name)]
    close_names = close_names or difflib.get_close_matches(name, [*TOPOLOGIES, *gpus], 3)
    hint = f"did you mean {' or '.join(close_names)}? It " if close_names else ""
    slices = []
    for generation in _GENERATIONS:
        first, *_, last = (name for name in TOPOLOGIES if name.startswith(f"{generation}-"))
        slices.append(f"{first} to {last}")
    machines = [f"{kind}:N" for kind in (*_GPUS, "gpu", "cpu")]
    return f"{hint}must be a slice ({', '.join(slices)}) or one of {', '.join(machines)}"


def peaks(topology: Topology) -> Peaks:
    """Return the peaks of a chip; ValueError if they are not known."""
    if topology.kind not in PEAKS:
        raise ValueError(
            f"topology = {topology.name!r}: no speed of such devices is known, must be a slice or "
            f"one of {', '.join(f'{kind}:N' for kind in _GPUS)}"
        )
    return PEAKS[topology.kind]


def abstract_mesh(topology: Topology, shape: Mapping[str, int]) -> AbstractMesh:
    """Make a mesh without devices; errors as in runtime.mesh.axis_sizes."""
    return _abstract_mesh(shape, topology.chips)


def _abstract_mesh(shape: Mapping[str, int], chips: int, field: str = "mesh") -> AbstractMesh:
    sizes = meshes.axis_sizes(dict(shape), chips, field)
    # Auto axes, as the trainer's own mesh has: shardings are propagated by XLA, not by types.
    return AbstractMesh(sizes, meshes.AXES, axis_types=(AxisType.Auto,) * len(sizes))


def abstract_meshes(topology: Topology, section: RunMeshConfig) -> Meshes:
    """Make the meshes of a run without devices; ValueError if they do not fit the topology."""
    if not section.rollout_devices:
        return Meshes(abstract_mesh(topology, section.axes))
    check_split(topology, section.rollout_devices)
    sampling = topology.hosts * section.rollout_devices
    return Meshes(
        _abstract_mesh(section.axes, topology.chips - sampling),
        _abstract_mesh(section.rollout.axes, sampling, "mesh.rollout"),
    )


def check_split(topology: Topology, rollout_devices: int) -> None:
    """Raise ValueError unless the hosts of a topology can have as many sampling devices."""
    hosts, device_kind = topology.hosts, _DEVICE_KINDS.get(topology.kind, "")
    meshes.check_rollout_devices(rollout_devices, topology.chips // hosts, hosts, device_kind)


def make_meshes(topology: Topology, section: RunMeshConfig) -> Meshes:
    """Make the meshes of a run over the slice's devices, as the trainer would on that slice."""
    abstract_meshes(topology, section)  # refuses what the slice cannot have
    slice_devices = devices(topology)
    try:
        training = section.make(slice_devices)
        is_split = section.rollout_devices > 0
        return Meshes(training, section.make_sampling(slice_devices) if is_split else None)
    except NotImplementedError as error:  # raised by jax.make_mesh
        raise ValueError(
            f"mesh = {section.axes}: each axis must be a product of physical ones of "
            f"{topology.name}, which are {topology.shape}"
        ) from error


def describe(topology: Topology, run_meshes: Meshes) -> str:
    """Format name, number of devices, memory and meshes on one line."""
    is_known = topology.hbm < ANY_MEMORY
    memory = f"{topology.hbm / GIB:.2f} GiB each" if is_known else "unknown memory"
    if is_known and topology.kind in ("gpu", *_GPUS):
        memory += f" with XLA_PYTHON_CLIENT_MEM_FRACTION={GPU_SHARE:.2}"
    plural = "s" * (topology.chips > 1)
    layout = f"mesh {describe_mesh(run_meshes.training)}"
    if run_meshes.are_split:
        training, sampling = run_meshes.training, run_meshes.rollout
        layout = f"{training.size} train, {layout}; {sampling.size} sample, mesh "
        layout += describe_mesh(sampling)
    return f"{topology.name}: {topology.chips} device{plural}, {memory}; {layout}"


def describe_mesh(mesh: Any) -> str:
    """Format the axes of a mesh that have several devices; "1" if there is none."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "1"


def devices(topology: Topology) -> list[Any]:
    """Get the devices of a slice or GPU from its compiler; they hold no arrays and run nothing.

    Raises ValueError if nothing compiles for the topology here, ModuleNotFoundError if the compiler
    is not installed.
    """
    if not topology.layout:
        raise ValueError(
            f"topology = {topology.name!r}: nothing compiles for it here, must be a TPU slice or "
            f"{' or '.join(_COMPILED_GPUS)}; launch.plan and launch.check estimate its memory"
        )
    # Random keys and constants must be computed on the CPU although the compiler is installed.
    jax.config.update("jax_platforms", "cpu")
    return _gpu_devices(topology) if topology.layout == "cuda" else _tpu_devices(topology)


def _tpu_devices(topology: Topology) -> list[Any]:
    """Get the slice's devices from libtpu; the process must not have used libtpu before."""
    # libtpu reads these when it is loaded. With them it does not query the metadata server about
    # this machine, and a second process that compiles meanwhile does not abort on the lock file.
    os.environ.update(
        TPU_ACCELERATOR_TYPE=topology.accelerator,
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "compiling for TPUs needs libtpu: pip install -e '.[tpu]' (no TPU is needed)"
        ) from error
    options: dict[str, Any] = dict(_OPTIONS.get(topology.kind, {}))
    if topology.hosts == 1:  # else libtpu puts four chips on a host
        options["chips_per_host_bounds"] = [*topology.shape, 1, 1][:3]
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=topology.layout, **options
    )
    return list(description.devices)


def _gpu_devices(topology: Topology) -> list[Any]:
    """Get the GPU from jax's plugin for CUDA 13, which needs no driver to compile."""
    name, gpu = f"NVIDIA {topology.kind.upper()}", _GPUS[topology.kind]
    memory, bandwidth = int(gpu.memory * GIB), int(gpu.peaks.memory)
    target = _HOPPER.format(kind=name, memory=memory, bandwidth=bandwidth)
    try:
        import jax_cuda13_plugin  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "compiling for NVIDIA GPUs needs jax-cuda13-plugin: pip install -e '.[gpu-cuda13]' "
            "(no GPU is needed)"
        ) from error
    description = topologies.get_topology_desc(
        platform="cuda", topology_name=name, topology="1x1x1", target_config=target
    )
    return list(description.devices)
