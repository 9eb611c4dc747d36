"""Tests of meshes, and of shardings of tensors with logical axes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

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


class FakeDevice(NamedTuple):
    id: int
    process_index: int
    device_kind: str = "cpu"


def test_last_devices_of_each_host_sample() -> None:
    devices = [FakeDevice(number, number // 2 % 2) for number in reversed(range(8))]
    training, sampling = meshes.split_devices(1, devices)
    assert [device.id for device in training] == [0, 1, 4, 2, 3, 6]
    assert [device.id for device in sampling] == [5, 7]


@pytest.mark.parametrize(
    ("kind", "hosts", "host_devices", "rollout_devices", "message"),
    [
        ("cpu", 1, 4, 4, "rollout_devices = 4: must leave devices for training on each host, whi"),
        ("TPU v5 lite", 4, 4, 2, "rollout_devices = 2: must be 0 on 4 hosts of TPU v5 lite; libt"),
        ("TPU v6 lite", 1, 8, 2, "rollout_devices = 2: must be 4 on a host of 8 TPU v6 lite; lib"),
        ("TPU v6 lite", 1, 8, 4, ""),
        ("TPU v5 lite", 1, 4, 1, ""),
        ("TPU v5", 4, 4, 1, ""),
    ],
)
def test_devices_that_cannot_be_split_are_rejected(
    kind: str, hosts: int, host_devices: int, rollout_devices: int, message: str
) -> None:
    count = hosts * host_devices
    devices = [FakeDevice(number, number // host_devices, kind) for number in range(count)]
    if not message:
        assert len(meshes.split_devices(rollout_devices, devices)[1]) == hosts * rollout_devices
        return
    with pytest.raises(ValueError, match=f"mesh.{message}"):
        meshes.split_devices(rollout_devices, devices)


@pytest.mark.parametrize("error", [AssertionError, NotImplementedError])
def test_part_of_a_slice_without_a_layout_keeps_the_order_of_its_devices(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error("jax.make_mesh has no layout")

    devices = [jax.devices()[number] for number in (0, 2, 3, 5, 6, 7)]
    monkeypatch.setattr(jax, "make_mesh", refuse)
    mesh = meshes.make_part_mesh({"data": 3, "tensor": -1}, devices)
    assert dict(mesh.shape) == {"data": 3, "fsdp": 1, "context": 1, "tensor": 2, "expert": 1}
    assert mesh.devices.reshape(3, 2).tolist() == [devices[:2], devices[2:4], devices[4:]]
    assert set(mesh.axis_types) == {AxisType.Auto}
    with pytest.raises(error):
        meshes.make_mesh({"fsdp": -1}, devices)
    with pytest.raises(ValueError, match=r"mesh.rollout = .*: cannot be laid out on 6 devices"):
        meshes.make_part_mesh({"fsdp": 4}, devices, "mesh.rollout")


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
