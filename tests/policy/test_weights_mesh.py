"""Tests of weights read onto a mesh: values, shardings, and no redundant reads."""

from __future__ import annotations

import collections
import math

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from spell_jax.policy import tensor_table, transformer, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.formats import safetensors as files
from spell_jax.runtime import mesh as meshes
from tests import tiny
from tests.policy.test_weights import POLICIES, SHARD, assert_same_bits, contents, every_policy

MESHES = [
    {"fsdp": 2, "tensor": 2, "data": 2},
    {"fsdp": 4, "expert": 2},
    {"tensor": 4, "expert": 2},  # 2 key/value heads: replicated
]


@pytest.fixture
def counted(monkeypatch) -> collections.Counter:
    """Count the bytes read of each tensor."""
    count: collections.Counter = collections.Counter()
    read_tensor = files.Tensor.read

    def counting(self, index):
        block = read_tensor(self, index)
        count[self.name] += block.nbytes
        return block

    monkeypatch.setattr(files.Tensor, "read", counting)
    return count


@pytest.mark.slow
@every_policy
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_load_onto_a_mesh_equals_a_plain_load(policy: PolicyConfig, shape, tmp_path) -> None:
    weights.save(tmp_path / "a", policy, tiny.weights(policy), shard_bytes=SHARD)
    mesh = meshes.make_mesh(shape)
    config, params = weights.load(tmp_path / "a", mesh)
    assert config == policy
    assert_same_bits(params, tiny.weights(policy))
    shapes, axes = transformer.abstract_params(policy)
    expected_shardings = meshes.shardings(mesh, axes, shapes)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == expected_shardings
    # Weights split over devices are saved like unsplit ones.
    weights.save(tmp_path / "b", policy, params, shard_bytes=SHARD)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.slow
def test_bfloat16_load_onto_a_mesh_equals_a_plain_load(tmp_path) -> None:
    policy = POLICIES["qwen3_moe untied"]
    weights.save(tmp_path, policy, tiny.weights(policy))
    _, params = weights.load(tmp_path, meshes.make_mesh(MESHES[0]), "bfloat16")
    assert_same_bits(params, weights.load(tmp_path, dtype="bfloat16")[1])


@pytest.mark.parametrize("name", ["qwen2 untied", "qwen3_moe"])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_no_byte_is_read_twice(name: str, shape, tmp_path, counted) -> None:
    """One host holds all of each parameter, for any split."""
    policy = POLICIES[name]
    weights.save(tmp_path, policy, tiny.weights(policy))
    weights.load(tmp_path, meshes.make_mesh(shape))
    assert counted == {tensor.name: 4 * math.prod(tensor.shape) for tensor in _tensors(tmp_path)}


def _tensors(folder) -> list[files.Tensor]:
    return list(files.scan(folder)[1].values())


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_device_reads_only_its_own_shards(name: str, shape, tmp_path, counted) -> None:
    """Each device's part of every parameter alone, as on a host that has only this device."""
    policy = POLICIES[name]
    weights.save(tmp_path, policy, tiny.weights(policy))
    shapes, axes = transformer.abstract_params(policy)
    places = flatten_dict(meshes.shardings(meshes.make_mesh(shape), axes, shapes), sep="/")
    matched_tensors = weights.match(policy, *files.scan(tmp_path))
    source = weights._Source(policy, *matched_tensors, "float32")
    params = flatten_dict(tiny.weights(policy), sep="/")
    split = 0
    for path, place in places.items():
        parameter = params[path]
        layered = source.entries[path].layered
        for index in place.devices_indices_map(parameter.shape).values():
            bounds = [
                part.indices(size)[:2] for part, size in zip(index, parameter.shape, strict=True)
            ]
            part = parameter[index]
            out = np.empty(part.shape, np.float32)
            counted.clear()
            for layer in range(policy.layers if layered else 1):
                inner = tuple(slice(*bound) for bound in bounds[layered:])
                source.fill(out[layer] if layered else out, path, layer, inner)
            assert_same_bits(out, part)
            assert counted.total() == part.nbytes
            split += part.nbytes < parameter.nbytes
    assert split > 40  # otherwise nothing was tested


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_load_requests_the_shards_of_single_devices(
    name: str, shape, tmp_path, monkeypatch
) -> None:
    policy = POLICIES[name]
    weights.save(tmp_path, policy, tiny.weights(policy))
    requested_shapes = collections.defaultdict(set)
    fill = weights._Source.fill

    def watching(self, out, path, layer, index):
        requested_shapes[path].add(out.shape)
        fill(self, out, path, layer, index)

    monkeypatch.setattr(weights._Source, "fill", watching)
    _, params = weights.load(tmp_path, meshes.make_mesh(shape))
    for path, leaf in flatten_dict(params, sep="/").items():
        part = leaf.sharding.shard_shape(leaf.shape)
        assert requested_shapes[path] == {part[1:] if path.startswith("layers/") else part}


def test_arbitrary_slices_of_attention_heads_are_read(tmp_path) -> None:
    """No sharding rule splits H, the second of two flattened axes, but such reads are correct."""
    policy = tiny.POLICY
    weights.save(tmp_path, policy, tiny.weights())
    source = weights._Source(policy, *weights.match(policy, *files.scan(tmp_path)), "float32")
    attention = tiny.weights()["layers"]["attention"]
    for path, index in (
        ("q_kernel", (slice(3, 20), slice(1, 3), slice(2, 7))),
        ("o_kernel", (slice(1, 3), slice(2, 7), slice(3, 20))),
        ("k_bias", (slice(1, 2), slice(2, 7))),
    ):
        expected_slice = attention[path][1][index]
        out = np.empty(expected_slice.shape, np.float32)
        source.fill(out, f"layers/attention/{path}", 1, index)
        np.testing.assert_array_equal(out, expected_slice)


@pytest.mark.slow
def test_layer_insertion_is_traced_once_per_parameter(tmp_path, monkeypatch) -> None:
    policy = POLICIES["llama"]
    weights.save(tmp_path, policy, tiny.weights(policy))
    traced = []
    insert = jax.lax.dynamic_update_slice_in_dim

    def counting(stack, piece, layer, axis):
        traced.append(stack.shape)
        return insert(stack, piece, layer, axis)

    monkeypatch.setattr(jax.lax, "dynamic_update_slice_in_dim", counting)
    weights.load(tmp_path, meshes.make_mesh())
    assert 0 < len(traced) <= sum(entry.layered for entry in tensor_table.table(policy).values())


def test_non_finite_values_are_reported_on_a_mesh(tmp_path) -> None:
    params = jax.tree.map(np.copy, tiny.weights())
    params["layers"]["mlp"]["up_kernel"][1, 5, 7] = np.nan
    weights.save(tmp_path, tiny.POLICY, params)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has values that"):
        weights.load(tmp_path, meshes.make_mesh())
