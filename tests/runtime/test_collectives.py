"""Tests of sums over devices in one or two stages, and of the axes that split data."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes


@pytest.mark.parametrize("one_stage", [2, 8])
@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [({"context": 8}, ("context",)), ({"fsdp": 2, "context": 4}, ("fsdp", "context"))],
    ids=str,
)
def test_sum_scatter_leaves_each_device_its_part(shape, axes, dimension, one_stage, monkeypatch):
    monkeypatch.setattr(collectives, "_ONE_STAGE", one_stage)
    x = np.random.default_rng(0).normal(size=(8, 16, 24)).astype(np.float32)  # by device
    parts = PartitionSpec(*(None,) * dimension, axes)
    mesh = meshes.make_mesh(shape)
    with jax.set_mesh(mesh):
        run = collectives.on_shards(
            collectives.current_mesh(),
            lambda shard: collectives.sum_scatter(shard[0], axes, dimension),
            (PartitionSpec(axes),),
            parts,
        )
        program = jax.jit(run).lower(x).as_text()
        np.testing.assert_allclose(jax.jit(run)(x), x.sum(axis=0), rtol=1e-5, atol=1e-5)
    stages = {2: {"context": 2, "fsdp": 1}, 8: {"context": 1, "fsdp": 1}}[one_stage]
    assert program.count("stablehlo.reduce_scatter") == sum(stages[axis] for axis in axes)


def test_mesh_axes_split_only_dimensions_that_they_divide():
    mesh = meshes.make_mesh({"fsdp": 2, "context": 2, "tensor": 2})
    with jax.set_mesh(mesh):
        current = collectives.current_mesh()
        assert current is not None
        assert collectives.splitting(current, meshes.EMBED, 12) == ("fsdp", "context")
        assert collectives.splitting(current, meshes.EMBED, 6) == ()
        assert collectives.splitting(current, meshes.ROWS, 6) == ("fsdp",)
    assert collectives.current_mesh() is None
    with jax.set_mesh(meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])):
        assert collectives.current_mesh() is None


# XLA finds no cast to float16 (__truncsfhf2) for CPUs without F16C.
without_f16c = pytest.mark.xfail(
    "SSE4_2" in os.environ.get("XLA_FLAGS", ""), reason="XLA", raises=jax.errors.JaxRuntimeError
)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=without_f16c), jnp.float32]
)
def test_rounded_equals_a_cast(dtype):
    numbers = jnp.asarray([1.0, 1 + 2**-9, -3.14159, 1e-3, 0.0])
    rounded_numbers = collectives.rounded(numbers, jnp.dtype(dtype))
    assert rounded_numbers.dtype == dtype and np.array_equal(rounded_numbers, numbers.astype(dtype))
