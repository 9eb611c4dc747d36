"""Tests of experts: ragged products against one expert at a time, meshes against one device."""

from __future__ import annotations

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.packing import Bucket, PackingConfig
from spell_jax.policy import moe, transformer
from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
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


def _inputs(time=TIME, width=WIDTH, experts=EXPERTS):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32)

    kernels = (
        normal(experts, width, HIDDEN),
        normal(experts, width, HIDDEN),
        normal(experts, HIDDEN, width),
    )
    weights, expert_ids = moe.route(normal(ROWS, time, experts), COUNT, True)
    return normal(ROWS, time, width), weights, expert_ids, kernels


def _by_hand(x, weights, expert_ids, kernels):
    """Run every expert on every token, then pick the chosen experts: the reference."""
    gate, up, down = kernels
    hidden = nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum("btd,edf->btef", x, up)
    expert_outputs = jnp.einsum("btef,efd->bted", hidden, down)
    routed_outputs = jnp.take_along_axis(expert_outputs, expert_ids[..., None], axis=2)
    return jnp.sum(routed_outputs * weights[..., None], axis=2)


def _loss(mix):
    return lambda x, weights, expert_ids, kernels: jnp.sum(
        jnp.sin(mix(x, weights, expert_ids, kernels))
    )


def test_router_weights_with_and_without_normalization() -> None:
    logits = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))
    weights, expert_ids = moe.route(logits, 2, normalized=False)
    assert expert_ids.tolist() == [1, 3]
    np.testing.assert_allclose(weights, [0.4, 0.3], rtol=1e-6)
    weights, _ = moe.route(logits, 2, normalized=True)
    np.testing.assert_allclose(weights, [4 / 7, 3 / 7], rtol=1e-6)


def test_replayed_weights_are_the_routers_at_the_recorded_experts() -> None:
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]] * 2))
    own_ids = jnp.array([[1, 3]] * 2)
    recorded = jnp.array([[2, 1], [-1, -1]], jnp.int8)
    weights, expert_ids = moe.replay(logits, own_ids, recorded, normalized=False)
    assert expert_ids.tolist() == [[2, 1], [1, 3]]  # a token without a record keeps its own
    np.testing.assert_allclose(weights, [[0.2, 0.4], [0.4, 0.3]], rtol=1e-6)
    weights, _ = moe.replay(logits, own_ids, recorded, normalized=True)
    np.testing.assert_allclose(weights, [[1 / 3, 2 / 3], [4 / 7, 3 / 7]], rtol=1e-6)


def test_differing_experts_are_counted_as_sets_of_real_tokens() -> None:
    own_ids = jnp.array([[[0, 2], [0, 2], [1, 3], [1, 3]]])
    recorded = jnp.array([[[2, 0], [2, 1], [-1, -1], [0, 1]]], jnp.int8)
    real = jnp.array([[True, True, True, False]])
    assert moe.count_differing(own_ids, recorded, real).tolist() == [1, 2]


def test_records_have_the_smallest_dtype() -> None:
    for experts, dtype in ((128, np.int8), (129, np.int16)):
        unknown = moe.no_experts(dataclasses.replace(POLICY, experts=experts))
        assert unknown.dtype == dtype and unknown.shape == (2, 3) and (unknown == -1).all()


@pytest.mark.slow
def test_gradient_with_replay_equals_that_of_a_dense_reference() -> None:
    """The reference runs every expert and masks the probabilities of tokens without a record."""
    x, _, _, kernels = _inputs()
    rng = np.random.default_rng(1)
    router = jnp.asarray(rng.normal(size=(WIDTH, EXPERTS)), jnp.float32)
    picked = [rng.permutation(EXPERTS)[:COUNT] for _ in range(ROWS * TIME)]
    recorded = jnp.asarray(picked, jnp.int8).reshape(ROWS, TIME, COUNT)

    def replayed(x, router, kernels):
        logits = x @ router
        own_ids = moe.route(logits, COUNT, True)[1]
        return jnp.sum(jnp.sin(moe.mix(x, *moe.replay(logits, own_ids, recorded, True), kernels)))

    def dense(x, router, kernels):
        gate, up, down = kernels
        mask = jax.nn.one_hot(recorded, EXPERTS).sum(axis=2)
        weights = jax.nn.softmax(x @ router) * mask
        weights /= weights.sum(axis=-1, keepdims=True)
        hidden = nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum("btd,edf->btef", x, up)
        return jnp.sum(jnp.sin(jnp.einsum("btef,efd,bte->btd", hidden, down, weights)))

    gradients, expected_gradients = (
        jax.grad(f, argnums=(0, 1, 2))(x, router, kernels) for f in (replayed, dense)
    )
    assert np.abs(gradients[1]).max() > 0.1  # the router is trained
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), gradients, expected_gradients
    )


def test_load_counts_only_real_tokens() -> None:
    expert_ids = jnp.array([[[0, 2], [2, 1], [1, 3]]])
    real = jnp.array([[True, True, False]])
    assert moe.count_load(expert_ids, 4, real).tolist() == [1, 1, 2, 0]


@pytest.mark.slow
def test_mixture_equals_one_expert_at_a_time() -> None:
    inputs = _inputs()
    np.testing.assert_allclose(moe.mix(*inputs), _by_hand(*inputs), atol=1e-4)
    gradients = jax.grad(_loss(moe.mix), argnums=(0, 1, 3))(*inputs)
    expected_gradients = jax.grad(_loss(_by_hand), argnums=(0, 1, 3))(*inputs)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), gradients, expected_gradients
    )


def test_no_token_is_dropped_if_all_choose_the_same_experts() -> None:
    x, weights, expert_ids, kernels = _inputs()
    expert_ids = jnp.broadcast_to(jnp.array([5, 6, 7]), expert_ids.shape)
    mixture = moe.mix(x, weights, expert_ids, kernels)
    np.testing.assert_allclose(mixture, _by_hand(x, weights, expert_ids, kernels), atol=1e-4)


@on_meshes
def test_mixture_on_a_mesh_equals_one_device(mesh) -> None:
    inputs = _inputs()
    expected_gradients = jax.grad(_loss(moe.mix), argnums=(0, 1, 3))(*inputs)
    with jax.set_mesh(meshes.make_mesh(dict(mesh))):
        np.testing.assert_allclose(jax.jit(moe.mix)(*inputs), _by_hand(*inputs), atol=1e-4)
        gradients = jax.jit(jax.grad(_loss(moe.mix), argnums=(0, 1, 3)))(*inputs)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), gradients, expected_gradients
    )


def _out_and_gradients(mix, inputs):
    """Return a list: the output, and the gradients of x, weights and kernels."""

    def value(x, weights, expert_ids, kernels):
        out = mix(x, weights, expert_ids, kernels)
        return jnp.sum(jnp.sin(out)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(value, (0, 1, 3), has_aux=True))(*inputs)
    return jax.tree.leaves((out, gradients))


def _assert_close(arrays, expected_arrays, bound: float = 1e-5) -> None:
    for a, b in zip(arrays, expected_arrays, strict=True):
        assert np.abs(a - b).max() <= bound * np.abs(b).max()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, ROWS * TIME - 1])
def test_chunks_do_not_change_the_mixture(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "CHUNK", chunk)
    _assert_close(_out_and_gradients(moe.mix, _inputs()), _out_and_gradients(_by_hand, _inputs()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [
        ({"context": 4, "expert": 2}, {"time": 8}),
        ({"context": 4, "expert": 2}, {}),  # five tokens per row, all on each device of `context`
        ({"data": 2, "fsdp": 2, "context": 2}, {"time": 6}),
        ({"context": 2, "tensor": 2, "expert": 2}, {"time": 6}),
        # Sizes that the mesh does not divide: the width, experts.
        ({"fsdp": 4, "context": 2}, {"time": 6}),
        ({"context": 4, "data": 2}, {"width": 14}),
        ({"context": 2, "expert": 4}, {"time": 6, "experts": 6}),
    ],
    ids=str,
)
def test_chunked_mixture_on_a_mesh_equals_one_device(mesh, sizes, monkeypatch) -> None:
    expected_arrays = _out_and_gradients(_by_hand, _inputs(**sizes))
    monkeypatch.setattr(moe, "CHUNK", 6)
    with jax.set_mesh(meshes.make_mesh(mesh)):
        _assert_close(_out_and_gradients(moe.mix, _inputs(**sizes)), expected_arrays)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"context": 8}, {"context": 4, "fsdp": 2}], ids=str)
def test_two_stage_reduce_scatters_give_the_same_mixture(
    mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _inputs(time=8, width=16)
    monkeypatch.setattr(collectives, "_ONE_STAGE", 2)
    with jax.set_mesh(meshes.make_mesh(mesh)):
        _assert_close(_out_and_gradients(moe.mix, inputs), _out_and_gradients(_by_hand, inputs))
        program = jax.jit(lambda *x: _out_and_gradients(moe.mix, x)).lower(*inputs).as_text()
    assert program.count("stablehlo.reduce_scatter") == 3 * (1 + len(mesh))


def test_program_for_few_tokens_has_neither_loop_nor_padding() -> None:
    program = jax.jit(lambda *x: _out_and_gradients(moe.mix, x)).lower(*_inputs()).as_text()
    assert "stablehlo.while" not in program and "stablehlo.pad" not in program


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"data": 8}, {"fsdp": 2, "context": 2, "expert": 2}], ids=str)
def test_kernel_gradients_are_summed_in_float32(mesh, monkeypatch) -> None:
    """The error of sums over 256 chunks and over devices is only the final rounding."""
    rng = np.random.default_rng(0)
    rows, time, experts = 8, 512, 2

    def draw(*shape):  # positive, so that sums grow far above their terms
        return jnp.asarray(rng.uniform(0.5, 1, size=shape), jnp.bfloat16)

    kernels = draw(experts, 8, 4), draw(experts, 8, 4), draw(experts, 4, 8)
    expert_ids = jnp.asarray(rng.integers(0, experts, size=(rows, time, 1)), jnp.int32)
    out_gradient = draw(rows, time, 8)
    inputs = draw(rows, time, 8), draw(rows, time, 1), kernels

    def gradients(mix, x, weights, kernels):
        def value(kernels):
            return jnp.sum(mix(x, weights, expert_ids, kernels) * out_gradient, dtype=jnp.float32)

        return [np.asarray(g, np.float64) for g in jax.jit(jax.grad(value))(kernels)]

    expected_gradients = gradients(_by_hand, *jax.tree.map(lambda x: x.astype(jnp.float32), inputs))
    devices = math.prod(mesh.values())
    monkeypatch.setattr(moe, "CHUNK", rows * time // devices // 256 * mesh.get("expert", 1))
    with jax.set_mesh(meshes.make_mesh(mesh or {"fsdp": 1}, None if mesh else jax.devices()[:1])):
        kernel_gradients = gradients(moe.mix, *inputs)
    for a, b in zip(kernel_gradients, expected_gradients, strict=True):
        assert np.abs(a / b - 1).max() <= 2**-8


@pytest.mark.slow
def test_temporary_memory_does_not_grow_with_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = jax.ShapeDtypeStruct((EXPERTS, 64, HIDDEN), jnp.float32)
    kernels = kernel, kernel, jax.ShapeDtypeStruct((EXPERTS, HIDDEN, 64), jnp.float32)

    def bytes_of(chunk: int, tokens: int) -> int:
        monkeypatch.setattr(moe, "CHUNK", chunk)
        x = jax.ShapeDtypeStruct((1, tokens, 64), jnp.float32)
        weights = jax.ShapeDtypeStruct((1, tokens, COUNT), jnp.float32)
        expert_ids = jax.ShapeDtypeStruct((1, tokens, COUNT), jnp.int32)
        run = jax.jit(lambda *x: _out_and_gradients(moe.mix, x))
        memory = run.lower(x, weights, expert_ids, kernels).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert bytes_of(256, 4096) < 1.5 * bytes_of(256, 512)
    assert bytes_of(4096, 4096) > 6 * bytes_of(512, 512)


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@pytest.mark.parametrize(
    ("mesh", "forward", "backward"),
    [
        # Gathered are three kernels, and tokens with their weights and experts; backward, the
        # output's gradient too. Scattered are the output, and the gradients of tokens, weights and
        # kernels.
        ({"context": 4, "expert": 2}, (6, 1, 0), (7, 5, 0)),
        ({"fsdp": 4, "data": 2}, (3, 0, 0), (3, 3, 3)),
        ({"data": 2, "tensor": 4}, (0, 0, 1), (0, 0, 5)),
    ],
    ids=str,
)
def test_collectives_of_the_mixture(mesh, forward, backward) -> None:
    """Kernels are gathered in bfloat16, and their gradients summed in float32."""
    x, weights, expert_ids, kernels = _inputs(time=8, width=16)
    x, weights, kernels = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (x, weights, kernels))

    def run(x, weights, kernels):
        return moe.mix(x, weights, expert_ids, kernels)

    def back(x, weights, kernels):
        return jax.vjp(run, x, weights, kernels)[1](x)

    for function, expected_counts in ((run, forward), (back, backward)):
        with jax.set_mesh(meshes.make_mesh(mesh)):
            program = jax.jit(function).lower(x, weights, kernels).as_text()
        counts = [program.count(f"stablehlo.{name}") for name in COLLECTIVES]
        assert counts == [*expected_counts, 0]
        local_experts, hidden = EXPERTS // mesh.get("expert", 1), HIDDEN // mesh.get("tensor", 1)
        assert f"{local_experts}x16x{hidden}xbf16" in program
        assert (f"{local_experts}x16x{hidden}xf32" in program) == (function is back)


def test_gradients_of_frozen_experts_are_not_computed() -> None:
    """With adapters no expert is trained, so the program reduces no gradients of experts."""
    x, weights, expert_ids, kernels = _inputs(time=8, width=32)

    def to_x(x):
        return jnp.sum(moe.mix(x, weights, expert_ids, kernels))

    with jax.set_mesh(meshes.make_mesh({"fsdp": 8})):
        program = jax.jit(jax.grad(to_x)).lower(x).compile().as_text()
    assert "reduce-scatter" not in program


def test_each_device_holds_and_computes_its_own_experts() -> None:
    mesh = meshes.make_mesh({"expert": 8})
    shapes, axes = transformer.abstract_params(POLICY)
    placed = meshes.shardings(mesh, axes, shapes)["layers"]["moe"]["gate_kernel"]
    assert placed.shard_shape(shapes["layers"]["moe"]["gate_kernel"].shape)[1] == 1
    with jax.set_mesh(mesh):
        program = jax.jit(moe.mix).lower(*_inputs()).as_text()
    # A device has one expert of the ragged products' kernels [experts, in, out].
    assert f"tensor<1x{WIDTH}x{HIDDEN}xf32>" in program
    assert "all_gather" in program and "reduce_scatter" in program
    assert "all_reduce" not in program


@pytest.mark.slow
def test_attention_rows_are_split_over_the_expert_axis() -> None:
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


@functools.cache
def _update(mesh: tuple[tuple[str, int], ...]):
    devices = None if mesh else jax.devices()[:1]
    learner = Learner(
        POLICY,
        OptimizerConfig(learning_rate=0.01, epsilon=1e-3),
        LossConfig(),
        PackingConfig((Bucket(48, 32),), 384),
        meshes.make_mesh(dict(mesh) or {"fsdp": 1}, devices),
    )
    state, numbers = learner.update(learner.init(tiny.weights(POLICY)), tiny.groups(9))
    return jax.device_get(state.params), numbers


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[1::3], ids=str)
def test_update_on_a_mesh_equals_one_device(mesh) -> None:
    params, numbers = _update(mesh)
    expected_params, expected_numbers = _update(())
    for name, value in expected_numbers.items():
        if name not in ("fill", "micro_batches"):  # rows are a multiple of the shards
            assert numbers[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), params, expected_params)


@pytest.mark.slow
def test_router_load_is_reported() -> None:
    """Router weights of zero make a tie, and top_k then chooses the first experts."""
    learner = Learner(
        POLICY,
        OptimizerConfig(),
        LossConfig(),
        PackingConfig((Bucket(48, 32),), 192),
        meshes.make_mesh(devices=jax.devices()[:1]),
    )
    params = jax.tree.map(np.copy, tiny.weights(POLICY))
    params["layers"]["moe"]["router_kernel"][:] = 0
    _, numbers = learner.update(learner.init(params), tiny.groups(5))
    assert numbers["router_max_load"] == pytest.approx(EXPERTS / COUNT)
    assert numbers["router_idle"] == pytest.approx(1 - COUNT / EXPERTS)


@functools.cache
def _sample(mesh: tuple[tuple[str, int], ...]):
    config = SamplerConfig(
        0.7,
        0.9,
        max_tokens=10,
        max_prompt=16,
        page_size=4,
        kv_cache_tokens=2048,
        slots=24,
        samples_per_prompt_batch=3,
        prefill_tokens=128,
        decode_tokens=8,
    )
    prompts = [list(range(3, 3 + length)) for length in (5, 8, 1, 12, 16, 3, 9)]
    devices = None if mesh else jax.devices()[:1]
    device_mesh = meshes.make_mesh(dict(mesh) or {"fsdp": 1}, devices)
    shapes, axes = transformer.abstract_params(POLICY)
    params = jax.device_put(tiny.weights(POLICY), meshes.shardings(device_mesh, axes, shapes))
    return Sampler(POLICY, config, (7,), device_mesh).sample(params, prompts, 3, jax.random.key(1))


@pytest.mark.slow
@on_meshes
def test_sampling_on_a_mesh_equals_one_device(mesh) -> None:
    for samples, expected_samples in zip(_sample(mesh), _sample(()), strict=True):
        assert samples is not None and expected_samples is not None
        for a, b in zip(samples, expected_samples, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
