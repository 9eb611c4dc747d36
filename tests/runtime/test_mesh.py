"""Tests of meshes, and of shardings of tensors with logical axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from spell_jax.policy import transformer
from spell_jax.runtime import mesh as meshes
from tests import tiny


def test_default_puts_every_device_on_fsdp() -> None:
    mesh = meshes.make_mesh()
    assert dict(mesh.shape) == {"data": 1, "fsdp": 8, "context": 1, "tensor": 1, "expert": 1}
    assert meshes.row_shards(mesh) == 8


def test_minus_one_takes_the_remaining_devices() -> None:
    mesh = meshes.make_mesh({"data": -1, "tensor": 4})
    assert (mesh.shape["data"], mesh.shape["tensor"]) == (2, 4)
    assert meshes.row_shards(mesh) == 2


def test_mesh_uses_the_given_devices() -> None:
    mesh = meshes.make_mesh({"tensor": 2}, jax.devices()[3:5])
    assert list(mesh.devices.flat) == jax.devices()[3:5]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"rows": 8}, "mesh.rows: not a mesh axis, must be one of .*fsdp"),
        ({"fsdp": 4}, "makes 4 devices, but there are 8"),
        ({"fsdp": 3}, "cannot be laid out on 8 devices"),
        ({"fsdp": -1, "tensor": 3}, "cannot be laid out on 8 devices"),
        ({"fsdp": -1, "tensor": -1}, "cannot be laid out"),
        ({"fsdp": 0}, "mesh.fsdp = 0: must be at least 1"),
        ({"fsdp": -2, "tensor": -4}, "mesh.fsdp = -2: must be at least 1"),
    ],
)
def test_invalid_mesh_shapes_are_rejected(shape: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        meshes.make_mesh(shape)


def test_parameters_are_sharded_by_their_logical_axes() -> None:
    mesh = meshes.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    shapes, axes = transformer.abstract_params(tiny.POLICY)
    placed = meshes.shardings(mesh, axes, shapes)
    assert placed["embedding"].spec == PartitionSpec("tensor", meshes.EMBED)
    attention = placed["layers"]["attention"]
    assert attention["q_kernel"].spec == PartitionSpec(None, meshes.EMBED, "tensor", None)
    assert attention["o_kernel"].spec == PartitionSpec(None, "tensor", None, meshes.EMBED)
    assert placed["layers"]["mlp"]["down_kernel"].spec == PartitionSpec(
        None, "tensor", meshes.EMBED
    )


def test_dimension_not_divisible_by_its_axis_is_replicated() -> None:
    mesh = meshes.make_mesh({"tensor": 4, "fsdp": 2})
    shapes, axes = transformer.abstract_params(tiny.POLICY)  # 4 query heads, 2 key/value heads
    attention = meshes.shardings(mesh, axes, shapes)["layers"]["attention"]
    assert attention["q_kernel"].spec == PartitionSpec(None, meshes.EMBED, "tensor", None)
    assert attention["k_kernel"].spec == PartitionSpec(None, meshes.EMBED, None, None)


def test_rows_are_sharded_over_data_and_fsdp() -> None:
    mesh = meshes.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    rows = jax.device_put(np.arange(8).reshape(4, 2), meshes.by_rows(mesh))
    assert {shard.data.shape for shard in rows.addressable_shards} == {(1, 2)}
    packed = jax.device_put(
        np.zeros((4, 6)), meshes.by_rows_and_time(meshes.make_mesh({"fsdp": 4, "context": 2}))
    )
    assert {shard.data.shape for shard in packed.addressable_shards} == {(1, 3)}
    everywhere = jax.device_put(jnp.ones(3), meshes.replicated(mesh))
    assert {shard.data.shape for shard in everywhere.addressable_shards} == {(3,)}
