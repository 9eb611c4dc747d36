"""Tests of names of TPU slices and GPUs, and of the errors on a machine without their compilers."""

import importlib.util
import math

import pytest

from spell_jax.config import MeshConfig, RunMeshConfig
from spell_jax.launch import step_time, topologies


@pytest.mark.parametrize(
    ("name", "layout", "chips"),
    [
        ("v4-16", "v4:2x2x2", 8),
        ("v5e-1", "v5e:1x1", 1),
        ("v6e-1", "v6e:1x1", 1),
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
    assert topologies.find("v5e-1").accelerator == "v5litepod-1"
    assert topologies.find("v5p-32").accelerator == "v5p-32"
    assert topologies.find("v5p-32").hbm > 6 * topologies.find("v5e-16").hbm > 90 * 2**30


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("v5e-12", "v5e-128 or v5e-1 or v5e-32"),
        ("a100:8", "h100:8 or a100-80:8 or a100-40:8"),
        ("h100-1", "h100:1 or h200:1 or h100:8"),
        ("rtx4900:1", "rtx4090:1 or .*"),
        ("tpu", ""),
        ("", ""),
        ("v5e:4x4", "v5e-4 or v5e-64"),
        ("h100:0", "h100:8 or .*"),
        ("h100", "h100:1"),
        ("4090", "rtx4090:1"),
        ("cpu:1234567", ""),
    ],
)
def test_unknown_name_error_has_similar_names_and_the_forms_of_all(name, similar):
    forms = (
        r"must be a slice \(v4-8 to v4-1024, v5e-1 to v5e-256, .*\) or one of a100-40:N, .*cpu:N"
    )
    hint = rf"did you mean {similar}\? It " if similar else ""
    with pytest.raises(ValueError, match=f"^topology = '{name}': {hint}{forms}$"):
        topologies.find(name)


def test_devices_of_a_machine_have_the_given_memory():
    assert topologies.find("gpu:2").hbm == topologies.find("cpu:8").hbm == topologies.ANY_MEMORY
    # jax cannot have all memory of a GPU, but all of a CPU's.
    assert topologies.find("gpu:2", 24).hbm == int(0.92 * 24 * topologies.GIB)
    assert topologies.find("cpu:8", 64).hbm == 64 * topologies.GIB
    assert (topologies.find("gpu:2").chips, topologies.find("gpu:2").hosts) == (2, 1)


@pytest.mark.parametrize(
    ("name", "memory_gib", "message"),
    [
        ("v5e-16", 16, "memory_gib = 16: must not be given with topology = 'v5e-16', of known"),
        ("l4:1", 24, "memory_gib = 24: must not be given with topology = 'l4:1', of known"),
        ("gpu:1", float("nan"), "memory_gib = nan: must be GiB of memory, 0 if unknown"),
        ("gpu:1", -1, "memory_gib = -1: must be GiB of memory"),
        ("h100:9", 0, "topology = 'h100:9': must have at most 8 GPUs, those of one machine; gpu:N"),
    ],
)
def test_memory_that_does_not_fit_the_name_is_rejected(name, memory_gib, message):
    with pytest.raises(ValueError, match=message):
        topologies.find(name, memory_gib)


@pytest.mark.skipif(bool(importlib.util.find_spec("libtpu")), reason="libtpu is installed")
def test_missing_libtpu_error_names_the_extra_to_install(monkeypatch):
    monkeypatch.setattr("os.environ", {})
    with pytest.raises(ModuleNotFoundError, match=r"needs libtpu: pip install -e '\.\[tpu\]'"):
        topologies.devices(topologies.find("v5e-16"))


@pytest.mark.skipif(bool(importlib.util.find_spec("jax_cuda13_plugin")), reason="it is installed")
def test_missing_compiler_for_gpus_error_names_the_extra_to_install():
    message = r"needs jax-cuda13-plugin: pip install -e '\.\[gpu-cuda13\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        topologies.devices(topologies.find("h100:1"))


@pytest.mark.parametrize("name", ["l4:1", "h100:8", "a100-80:1", "gpu:1", "cpu:1"])
def test_devices_without_a_compiler_are_named_in_one_line(name):
    message = f"topology = '{name}': nothing compiles for it here, must be a TPU slice or h100:1 or"
    with pytest.raises(ValueError, match=message):
        topologies.devices(topologies.find(name))


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("a100-40:1", 40),
        ("a100-80:8", 80),
        ("h100:8", 80),
        ("h200:1", 141),
        ("l4:1", 24),
        ("rtx3090:2", 24),
        ("rtx4090:1", 24),
    ],
)
def test_gpus_have_memory_peaks_and_shares(name, gigabytes):
    gpu = topologies.find(name)
    assert topologies.abstract_mesh(gpu, {"fsdp": -1}).size == gpu.chips == int(name[-1])
    # The driver takes up to 8 % of the memory, and jax gets .92 of the remainder.
    assert 0.84 < gpu.hbm / topologies.GIB / gigabytes < 0.93
    machine = step_time.machine(gpu)
    assert 70 < machine.peaks.operations / machine.peaks.memory < 450
    assert 0.3 < machine.shares.update < 0.7


@pytest.mark.parametrize("name", ["gpu:1", "cpu:8"])
def test_devices_of_unknown_speed_are_named_in_one_line(name):
    with pytest.raises(ValueError, match=f"topology = '{name}': no speed of such devices is known"):
        step_time.machine(topologies.find(name, 24))


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
        ("v5e-1", 1),
        ("a100-80:8", 1),
        ("h100:1", 1),
    ],
)
def test_hosts_of_a_slice(name, hosts):
    assert topologies.find(name).hosts == hosts


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
