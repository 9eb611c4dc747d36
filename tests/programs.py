"""Programs as text and as equations, for tests of their content."""

from __future__ import annotations

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def lowered_for_gpu(f, *args) -> str:
    """StableHLO for an NVIDIA GPU that is not present."""
    # jax 0.11 asks for the kind of GPU; 0.10 needs no answer.
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def equations(jaxpr):
    """All equations of a jaxpr, nested ones included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
