"""Tests of copies of weights from the devices of one mesh to those of another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from spell_jax.runtime import mesh as meshes
from spell_jax.trainer.transfer import Transfer, largest_piece

SPECS = {
    "embedding": PartitionSpec("tensor", ("fsdp", "context")),
    "layers": PartitionSpec(None, ("fsdp", "context"), "tensor"),
    "norm": PartitionSpec(),
    "scalar": PartitionSpec(),
}


def make_tree(dtype) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"embedding": (24, 16), "layers": (5, 16, 8), "norm": (16,), "scalar": ()}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def shardings(mesh: jax.sharding.Mesh) -> dict[str, NamedSharding]:
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


@pytest.fixture(scope="module")
def training_mesh():
    return meshes.make_mesh({"fsdp": 2, "context": 2}, jax.devices()[:4])


@pytest.mark.parametrize("piece_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize(
    "shape", [{"fsdp": 4}, {"tensor": 2, "fsdp": 2}, {"data": 2, "context": 2}, {"fsdp": 1}]
)
def test_copies_equal_the_weights_on_the_other_mesh(shape, piece_bytes, training_mesh):
    devices = jax.devices()[4:]
    devices = devices[:1] if shape == {"fsdp": 1} else devices
    mesh = meshes.make_mesh(shape, devices)
    tree = make_tree(jnp.bfloat16)
    source = jax.device_put(tree, shardings(training_mesh))
    transfer = Transfer(shardings(mesh), piece_bytes)
    copies = transfer(source)
    for name, copy in copies.items():
        assert copy.sharding == shardings(mesh)[name] and copy.dtype == tree[name].dtype
        np.testing.assert_array_equal(copy, tree[name])
    # Not read before: NumPy's view of an array on a CPU would keep its memory.
    copies = transfer(source)
    newer = jax.tree.map(lambda x: x + 1, source)
    newer_copies = transfer(newer, copies)
    for name, copy in newer_copies.items():
        assert copies[name].is_deleted() or copies[name].ndim == 0
        np.testing.assert_array_equal(copy, newer[name])
    # The weights themselves stay where they are.
    for name, array in source.items():
        np.testing.assert_array_equal(array, tree[name])


def test_largest_piece_is_a_row_or_as_many_as_fit() -> None:
    tree = make_tree(np.float32)
    # A layer of 16 x 8 numbers has 512 bytes, a row of the embedding 64.
    assert [largest_piece(tree, n) for n in (1, 1100, 1 << 20)] == [512, 1088, 5 * 512]
