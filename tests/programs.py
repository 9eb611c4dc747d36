"""Programs as text and as equations, for tests of their content."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from spell_jax.launch import topologies


def lowered_for_gpu(f, *args) -> str:
    """Lower a function to StableHLO for an NVIDIA GPU that is not present."""
    # jax 0.11 asks for the kind of GPU; 0.10 needs no answer.
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def compile_for_gpu(f, *args) -> jax.stages.Compiled:
    """Compile a function of shapes for one NVIDIA GPU that is not present.

    Raises JaxRuntimeError if a kernel spills registers or exceeds the shared memory.
    """
    pytest.importorskip(
        "jax_cuda13_plugin", reason="compiling for NVIDIA GPUs needs jax-cuda13-plugin"
    )
    mesh = jax.sharding.Mesh(topologies.devices(topologies.find("h100:1")), "x")
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
    with jax.set_mesh(mesh):
        lowered = jax.jit(f).lower(*args)
    return lowered.compile(
        {
            "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
            # Other tests of the process may have switched optimizations off (tests/tiny.py).
            "xla_backend_optimization_level": 3,
            "xla_llvm_disable_expensive_passes": False,
        }
    )


def equations(jaxpr):
    """Yield all equations of a jaxpr, nested ones included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
