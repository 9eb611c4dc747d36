"""Tests of names of TPU slices and GPUs, and of the errors on a machine without their compilers."""

import importlib.util
import math

import pytest

from launch import topologies
from spell_jax.config import MeshConfig, RunMeshConfig


@pytest.mark.parametrize(
    ("name", "layout", "chips"),
    [
        ("v4-16", "v4:2x2x2", 8),
        ("v5e-4", "v5e:2x2", 4),
        ("v5e-16", "v5e:4x4", 16),
        ("v5e-64", "v5e:8x8", 64),
        ("v5e-256", "v5e:16x16", 256),
        ("v5p-16", "v5p:2x2x2", 8),
        ("v5p-32", "v5p:2x2x4", 16),
        ("v5p-64", "v5p:2x4x4", 32),
        ("v5p-128", "v5p:4x4x4", 64),
        ("v6e-16", "v6e:4x4", 16),
    ],
)
def test_slice_name_gives_layout_and_chip_count(name, layout, chips):
    topology = topologies.find(name)
    assert (topology.layout, topology.chips, math.prod(topology.shape)) == (layout, chips, chips)


def test_accelerator_name_and_hbm_size_of_a_slice():
    assert topologies.find("v5e-16").accelerator == "v5litepod-16"
    assert topologies.find("v5p-32").accelerator == "v5p-32"
    assert topologies.find("v5p-32").hbm > 6 * topologies.find("v5e-16").hbm > 90 * 2**30


@pytest.mark.parametrize("name", ["v5e-12", "v5litepod-16", "", "v5e:4x4"])
def test_unknown_slice_name_error_lists_known_names(name):
    with pytest.raises(ValueError, match=f"topology = '{name}': must be one of .*v5e-16, .*v5p-8"):
        topologies.find(name)


@pytest.mark.skipif(bool(importlib.util.find_spec("libtpu")), reason="libtpu is installed")
def test_missing_libtpu_error_names_the_extra_to_install(monkeypatch):
    monkeypatch.setattr("os.environ", {})
    with pytest.raises(ModuleNotFoundError, match=r"needs libtpu: pip install -e '\.\[tpu\]'"):
        topologies.devices(topologies.find("v5e-16"))


@pytest.mark.skipif(bool(importlib.util.find_spec("jax_cuda13_plugin")), reason="it is installed")
def test_missing_compiler_for_gpus_error_names_the_extra_to_install():
    message = r"needs jax-cuda13-plugin: pip install -e '\.\[gpu-cuda13\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        topologies.devices(topologies.find("h100-1", *topologies.GPUS))


def test_gpu_of_24_gb_is_planned_but_not_compiled_for():
    gpu = topologies.find("l4-1", *topologies.PLANNED_ONLY)
    assert not gpu.layout and 0.93 < gpu.hbm / 2**30 / 24 < 0.95  # ECC takes a part
    assert topologies.peaks(gpu).operations / topologies.peaks(gpu).memory > 200


def test_gpus_have_memory_and_peaks():
    for gpu in topologies.GPUS:
        kind, peaks = gpu.name.partition("-")[0], topologies.peaks(gpu)
        assert topologies.abstract_mesh(gpu, {"fsdp": -1}).size == gpu.chips == 1
        gigabytes = {"h100": 80, "h200": 141}[kind]
        assert 0.98 < gpu.hbm / 2**30 / gigabytes < 1.03
        assert peaks.operations / peaks.memory > 200


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("v4-8", 1),
        ("v4-16", 2),
        ("v5p-32", 4),
        ("v5e-4", 1),
        ("v5e-8", 1),
        ("v5e-16", 4),
        ("v6e-8", 1),
        ("v6e-64", 16),
        ("a100-8", 1),
        ("h100-1", 1),
    ],
)
def test_hosts_of_a_slice(name, hosts):
    topology = topologies.find(name, *topologies.PLANNED_ONLY, *topologies.GPUS)
    assert topology.hosts == hosts


def test_meshes_of_a_split_run():
    v5p = topologies.find("v5p-32")
    section = RunMeshConfig(data=3, rollout_devices=1, rollout=MeshConfig(tensor=2))
    split = topologies.abstract_meshes(v5p, section)
    assert split.are_split and list(split.by_field()) == ["mesh", "mesh.rollout"]
    assert split.training.shape == {"data": 3, "fsdp": 4, "context": 1, "tensor": 1, "expert": 1}
    assert split.sampling.shape == {"data": 1, "fsdp": 2, "context": 1, "tensor": 2, "expert": 1}
    text = "v5p-32: 16 devices, 95.74 GiB each; "
    described = f"{text}12 train, mesh data=3 fsdp=4; 4 sample, mesh fsdp=2 tensor=2"
    assert topologies.describe(v5p, split) == described
    # Two meshes also if their sizes are equal.
    halves = topologies.abstract_meshes(v5p, RunMeshConfig(rollout_devices=2))
    assert halves.are_split and halves.training.size == halves.sampling.size == 8
    shared = topologies.abstract_meshes(v5p, RunMeshConfig())
    assert shared.sampling is shared.training and list(shared.by_field()) == ["mesh"]
    assert topologies.describe(v5p, shared) == f"{text}mesh fsdp=16"


@pytest.mark.parametrize(
    ("name", "section", "message"),
    [
        ("v5p-32", RunMeshConfig(rollout_devices=4), "mesh.rollout_devices = 4: must leave dev"),
        ("v5e-64", RunMeshConfig(rollout_devices=2), "mesh.rollout_devices = 2: must be 0 on 16 "),
        ("v6e-8", RunMeshConfig(rollout_devices=2), "mesh.rollout_devices = 2: must be 4 on a h"),
        ("v5p-32", RunMeshConfig(tensor=3, rollout_devices=2), "mesh = .*on 8 devices"),
        (
            "v5p-32",
            RunMeshConfig(rollout_devices=2, rollout=MeshConfig(fsdp=4)),
            "mesh.rollout = .*: makes 4 devices, but there are 8",
        ),
    ],
)
def test_meshes_that_a_slice_cannot_have_are_rejected(name, section, message, monkeypatch):
    monkeypatch.setattr(topologies, "devices", None)  # not asked for
    for make_meshes in (topologies.abstract_meshes, topologies.make_meshes):
        with pytest.raises(ValueError, match=message):
            make_meshes(topologies.find(name), section)
