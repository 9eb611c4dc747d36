"""Tests of names of TPU slices and GPUs, and of the errors on a machine without their compilers."""

import importlib.util
import math

import pytest

from launch import topologies


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
