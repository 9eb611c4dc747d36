"""Experts: sorted and ragged = one expert at a time; on a mesh = on one device."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.learner.loss import LossConfig
from spell_jax.learner.packing import Bucket
from spell_jax.learner.update import Learner, OptimiserConfig, PackingConfig
from spell_jax.policy import moe, transformer
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.engine import Sampler, SamplerConfig
from tests import tiny

POLICY = dataclasses.replace(
    tiny.POLICY, qkv_bias=False, qk_norm=True, experts=8, experts_per_token=3, feed_forward=24
)
ROWS, TIME, WIDTH, EXPERTS, COUNT, HIDDEN = 8, 5, 12, 8, 3, 16
MESHES = [
    (("expert", 8),),
    (("expert", 2), ("tensor", 2), ("fsdp", 2)),
    (("data", 2), ("fsdp", 2), ("expert", 2)),
    (("tensor", 8),),
    (("context", 2), ("expert", 2), ("fsdp", 2)),
]
on_meshes = pytest.mark.parametrize(
    "mesh", MESHES, ids=lambda mesh: " ".join(f"{axis}={size}" for axis, size in mesh)
)


def _inputs():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32)

    kernels = (
        normal(EXPERTS, WIDTH, HIDDEN),
        normal(EXPERTS, WIDTH, HIDDEN),
        normal(EXPERTS, HIDDEN, WIDTH),
    )
    weights, chosen = moe.route(normal(ROWS, TIME, EXPERTS), COUNT, True)
    return normal(ROWS, TIME, WIDTH), weights, chosen, kernels


def _by_hand(x, weights, chosen, kernels):
    """Every expert on every token, then the chosen ones are picked."""
    gate, up, down = kernels
    hidden = nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum("btd,edf->btef", x, up)
    every = jnp.einsum("btef,efd->bted", hidden, down)
    picked = jnp.take_along_axis(every, chosen[..., None], axis=2)
    return jnp.sum(picked * weights[..., None], axis=2)


def _loss(mix):
    return lambda x, weights, chosen, kernels: jnp.sum(jnp.sin(mix(x, weights, chosen, kernels)))


def test_router_weights() -> None:
    logits = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))
    weights, chosen = moe.route(logits, 2, normalised=False)
    assert chosen.tolist() == [1, 3]
    np.testing.assert_allclose(weights, [0.4, 0.3], rtol=1e-6)
    weights, _ = moe.route(logits, 2, normalised=True)
    np.testing.assert_allclose(weights, [4 / 7, 3 / 7], rtol=1e-6)


def test_load_counts_real_tokens() -> None:
    chosen = jnp.array([[[0, 2], [2, 1], [1, 3]]])
    real = jnp.array([[True, True, False]])
    assert moe.load(chosen, 4, real).tolist() == [1, 1, 2, 0]


def test_equals_one_expert_at_a_time() -> None:
    inputs = _inputs()
    np.testing.assert_allclose(moe.mix(*inputs), _by_hand(*inputs), atol=1e-4)
    found = jax.grad(_loss(moe.mix), argnums=(0, 1, 3))(*inputs)
    wanted = jax.grad(_loss(_by_hand), argnums=(0, 1, 3))(*inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, wanted)


def test_all_tokens_to_the_same_experts_drop_none() -> None:
    x, weights, chosen, kernels = _inputs()
    chosen = jnp.broadcast_to(jnp.array([5, 6, 7]), chosen.shape)
    found = moe.mix(x, weights, chosen, kernels)
    np.testing.assert_allclose(found, _by_hand(x, weights, chosen, kernels), atol=1e-4)


@on_meshes
def test_a_mesh_equals_one_device(mesh) -> None:
    inputs = _inputs()
    wanted = jax.grad(_loss(moe.mix), argnums=(0, 1, 3))(*inputs)
    with jax.set_mesh(meshes.make_mesh(dict(mesh))):
        np.testing.assert_allclose(jax.jit(moe.mix)(*inputs), _by_hand(*inputs), atol=1e-4)
        found = jax.jit(jax.grad(_loss(moe.mix), argnums=(0, 1, 3)))(*inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, wanted)


def test_each_device_holds_and_computes_its_own_experts() -> None:
    mesh = meshes.make_mesh({"expert": 8})
    shapes, axes = transformer.abstract_params(POLICY)
    placed = meshes.shardings(mesh, axes, shapes)["layers"]["moe"]["gate_kernel"]
    assert placed.shard_shape(shapes["layers"]["moe"]["gate_kernel"].shape)[1] == 1
    with jax.set_mesh(mesh):
        program = jax.jit(moe.mix).lower(*_inputs()).as_text()
    # Of the ragged products' kernels [experts, in, out], a device has one expert.
    assert f"tensor<1x{WIDTH}x{HIDDEN}xf32>" in program
    assert "all_gather" in program and "reduce_scatter" in program
    assert "all_reduce" not in program


def test_rows_of_all_layers_are_split_over_the_expert_axis_too() -> None:
    """Each of eight devices attends for one of eight rows."""
    mesh = meshes.make_mesh({"expert": 8})
    shapes, axes = transformer.abstract_params(POLICY)
    tokens = np.zeros((8, 6), np.int32)
    with jax.set_mesh(mesh), nn.logical_axis_rules(meshes.RULES):
        params = jax.device_put(tiny.weights(POLICY), meshes.shardings(mesh, axes, shapes))
        run = jax.jit(lambda params, tokens: transformer.logits(POLICY, params, tokens))
        program = run.lower(params, jax.device_put(tokens, meshes.by_rows(mesh))).compile()
    scores = f"[1,{POLICY.kv_heads},{POLICY.heads // POLICY.kv_heads},6,6]"
    assert scores in program.as_text() and f"[8,{scores[3:]}" not in program.as_text()


def _update(mesh: tuple[tuple[str, int], ...]):
    devices = None if mesh else jax.devices()[:1]
    learner = Learner(
        POLICY,
        OptimiserConfig(learning_rate=0.01, epsilon=1e-3),
        LossConfig(),
        PackingConfig((Bucket(48, 32),), 384),
        meshes.make_mesh(dict(mesh) or {"fsdp": 1}, devices),
    )
    state, numbers = learner.update(learner.init(tiny.weights(POLICY)), tiny.groups(9))
    return jax.device_get(state.params), numbers


@on_meshes
def test_an_update_on_a_mesh_equals_one_device(mesh) -> None:
    params, numbers = _update(mesh)
    wanted_params, wanted = _update(())
    for name, value in wanted.items():
        if name not in ("fill", "micro_batches"):  # rows are a multiple of the shards
            assert numbers[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), params, wanted_params)


def test_router_load_is_reported() -> None:
    """Weights of zero leave a tie, which top_k gives to the first experts."""
    learner = Learner(
        POLICY,
        OptimiserConfig(),
        LossConfig(),
        PackingConfig((Bucket(48, 32),), 192),
        meshes.make_mesh(devices=jax.devices()[:1]),
    )
    params = jax.tree.map(np.copy, tiny.weights(POLICY))
    params["layers"]["moe"]["router_kernel"][:] = 0
    _, numbers = learner.update(learner.init(params), tiny.groups(5))
    assert numbers["router_max_load"] == pytest.approx(EXPERTS / COUNT)
    assert numbers["router_idle"] == pytest.approx(1 - COUNT / EXPERTS)


@on_meshes
def test_sampling_on_a_mesh_equals_one_device(mesh) -> None:
    config = SamplerConfig(0.7, 0.9, (16,), 128, 24, 10)
    prompts = [list(range(3, 3 + length)) for length in (5, 8, 1, 12, 16, 3, 9)]

    def sample(mesh):
        devices = None if mesh else jax.devices()[:1]
        placed = meshes.make_mesh(dict(mesh) or {"fsdp": 1}, devices)
        shapes, axes = transformer.abstract_params(POLICY)
        params = jax.device_put(tiny.weights(POLICY), meshes.shardings(placed, axes, shapes))
        return Sampler(POLICY, config, (7,), placed).sample(params, prompts, 3, jax.random.key(1))

    for found, wanted in zip(sample(mesh), sample(()), strict=True):
        assert found is not None and wanted is not None
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
