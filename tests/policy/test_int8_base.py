"""Tests of adapters over an int8 base: equal to the dequantized base, which never exists."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.packing import Bucket, PackingConfig
from spell_jax.policy import int8, lora, transformer, weights
from spell_jax.policy.config import LoraConfig, PolicyConfig
from spell_jax.policy.model import ModelConfig, shape_policy
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from tests import tiny
from tests.policy.test_weights import assert_same_bits

ADAPTERS = LoraConfig(rank=4, alpha=8.0, base_dtype="int8")
POLICY = dataclasses.replace(tiny.POLICY, tied_embeddings=False, lora=ADAPTERS)
POLICIES = {
    "untied": POLICY,
    "tied": dataclasses.replace(POLICY, tied_embeddings=True, qkv_bias=False, qk_norm=True),
    "attention": dataclasses.replace(
        POLICY, lora=dataclasses.replace(ADAPTERS, pattern="self_attn"), remat="block"
    ),
    "mlp": dataclasses.replace(
        POLICY, lora=dataclasses.replace(ADAPTERS, pattern="mlp"), remat="dots"
    ),
}
every_policy = pytest.mark.parametrize(
    "policy",
    [
        *(pytest.param(POLICIES[name], id=name) for name in ("untied", "tied")),
        *(
            pytest.param(POLICIES[name], id=name, marks=pytest.mark.slow)
            for name in ("attention", "mlp")
        ),
    ],
)
TOKENS = np.random.default_rng(0).integers(0, 64, size=(2, 20)).astype(np.int32)
MESHES = [{"fsdp": 2, "tensor": 2, "data": 2}, {"fsdp": 2, "context": 4}]


def _float(policy: PolicyConfig) -> PolicyConfig:
    """Return the policy with a base in the compute dtype."""
    assert policy.lora is not None
    return dataclasses.replace(policy, lora=dataclasses.replace(policy.lora, base_dtype="compute"))


def _params(policy: PolicyConfig) -> transformer.Params:
    return int8.quantize_base(tiny.weights(_float(policy)))


def _dequantized(params: transformer.Params) -> transformer.Params:
    """Return params with float32 kernels, computed with numpy, and without scales."""
    flat = flatten_dict(jax.device_get(params), sep="/")
    result = {}
    for path, leaf in flat.items():
        if leaf.dtype == np.int8:
            scale = flat[path.removesuffix("_kernel") + "_scale"]
            inputs = (1, 2) if path.endswith("o_kernel") else (1,)
            result[path] = leaf.astype(np.float32) * np.expand_dims(scale, inputs)
        elif not path.endswith("_scale"):
            result[path] = leaf
    return unflatten_dict(result, sep="/")


def _learner(policy: PolicyConfig, mesh: dict[str, int] | None = None, **fields) -> Learner:
    return Learner(
        policy,
        OptimizerConfig(learning_rate=0.01),
        LossConfig(**fields),
        PackingConfig((Bucket(48, 32),), 192),
        meshes.make_mesh(mesh or {"fsdp": 1}, None if mesh else jax.devices()[:1]),
    )


def test_base_is_int8_with_scales_except_the_head() -> None:
    shapes = flatten_dict(transformer.abstract_params(POLICY)[0], sep="/")
    small = {path for path, shape in shapes.items() if shape.dtype == jnp.int8}
    kernels = {f"layers/attention/{x}_kernel" for x in "qkvo"}
    kernels |= {f"layers/mlp/{x}_kernel" for x in ("gate", "up", "down")}
    assert small == kernels | {"embedding"}
    assert {path: shapes[int8.scale_path(path)].dtype for path in small} == dict.fromkeys(
        small, jnp.float32
    )
    assert shapes["unembedding"].dtype == jnp.float32
    tied = flatten_dict(transformer.abstract_params(POLICIES["tied"])[0], sep="/")
    assert {path for path, shape in tied.items() if shape.dtype == jnp.int8} == kernels
    table = tiny.weights(_float(POLICY))["embedding"]
    rows = _dequantized(_params(POLICY))["embedding"]
    assert np.abs(rows - table).max() < 0.501 * np.abs(table).max() / 127
    assert np.all(np.abs(rows - table).max(1) < 0.501 * np.abs(table).max(1) / 127)


@every_policy
def test_logits_and_gradients_equal_those_of_the_dequantized_base(policy: PolicyConfig) -> None:
    params = _params(policy)
    adapters, frozen = lora.split(policy, params)
    _, plain = lora.split(policy, _dequantized(params))

    def value_and_gradient(policy, frozen):
        def loss(adapters):
            logits = transformer.logits(policy, lora.join(adapters, frozen), TOKENS)
            return jnp.sum(jax.nn.log_softmax(logits)[..., 7]), logits

        return jax.jit(jax.grad(loss, has_aux=True))(adapters)

    gradient, logits = value_and_gradient(policy, frozen)
    expected_gradient, expected_logits = value_and_gradient(_float(policy), plain)
    scale = np.abs(expected_logits).max()
    np.testing.assert_allclose(logits, expected_logits, atol=1e-5 * scale)
    for leaf, expected in zip(
        jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True
    ):
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(leaf, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("remat", ["none", "block", "dots"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_program_holds_the_dequantized_base(remat: str, dtype: str) -> None:
    """Kernels of all layers exist in int8 alone, also for the gradient."""
    policy = dataclasses.replace(POLICY, remat=remat)
    adapters, frozen = lora.split(policy, int8.cast(_params(policy), dtype))

    def loss(adapters, frozen):
        return transformer.logits(policy, lora.join(adapters, frozen), TOKENS).sum()

    text = jax.jit(jax.grad(loss)).lower(adapters, frozen).compile().as_text() or ""
    for path, kernel in int8.kernels(frozen).items():
        shape = f"[{','.join(map(str, kernel.shape))}]"
        assert f"s8{shape}" in text, path
        assert not any(f"{wide}{shape}" in text for wide in ("f32", "bf16", "u16")), path


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_updates_on_a_mesh_equal_those_of_the_dequantized_base(mesh: dict[str, int]) -> None:
    params, groups = _params(POLICY), tiny.groups(5)
    adapters, frozen = lora.split(POLICY, params)
    _, plain = lora.split(POLICY, _dequantized(params))

    def update(learner: Learner, frozen: transformer.Params):
        state = learner.init(frozen)
        start = jax.device_put(adapters, learner.fns.param_shardings)
        return learner.update(dataclasses.replace(state, params=start), groups)[1]

    numbers = update(_learner(POLICY, mesh), frozen)
    expected_numbers = update(_learner(_float(POLICY)), plain)
    for name in ("loss", "gradient_norm", "mean_logprob"):
        assert numbers[name] == pytest.approx(expected_numbers[name], rel=1e-4), name


def test_sampler_trainer_and_reference_share_one_base() -> None:
    learner = _learner(POLICY, kl_weight=0.1)
    state = learner.init(lora.split(_float(POLICY), tiny.weights(_float(POLICY)))[1])
    assert_same_bits(learner.frozen, lora.split(POLICY, _params(POLICY))[1])
    before = flatten_dict(learner.frozen)
    sampled = flatten_dict(learner.cast(state.params))
    assert all(sampled[path] is leaf for path, leaf in before.items())
    config = SamplerConfig(weights_dtype="int8", max_tokens=8, max_prompt=24, kv_cache_tokens=1024)
    sampler = Sampler(POLICY, config, (), learner.mesh)
    session = sampler.start_session(learner.cast(state.params))
    held = flatten_dict(session._params)
    assert all(held[path] is leaf for path, leaf in before.items())
    reference = jax.tree.map(jnp.copy, state.params)  # adapters alone
    state, numbers = learner.update(state, tiny.groups(5), reference)
    # The reference is the base, as the policy before its first step.
    assert numbers["kl"] == pytest.approx(0.0, abs=1e-9)
    _, numbers = learner.update(state, tiny.groups(5), reference)
    assert numbers["kl"] > 1e-6
    assert all(flatten_dict(learner.frozen)[path] is leaf for path, leaf in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("policy", [POLICIES["untied"], POLICIES["tied"]], ids=["untied", "tied"])
def test_sampler_and_trainer_give_the_same_logprobs(policy: PolicyConfig) -> None:
    learner = _learner(policy)
    params = _params(policy)
    adapters, frozen = lora.split(policy, params)
    state = learner.init(frozen)
    state = dataclasses.replace(state, params=jax.device_put(adapters))
    config = SamplerConfig(
        1.0, 1.0, max_tokens=8, max_prompt=24, page_size=8, kv_cache_tokens=512, slots=4
    )
    sampler = Sampler(policy, config, (), learner.mesh)
    prompt = TOKENS[0].tolist()
    (samples,) = sampler.sample(learner.cast(state.params), [prompt], 4, jax.random.key(0))
    assert samples is not None
    group = tiny.group(prompt, [sample.tokens for sample in samples], [1.0] * 4)
    (scored,) = learner.recompute(state, [group])
    for sample, logprobs in zip(samples, tiny.logprobs(scored), strict=True):
        np.testing.assert_allclose(sample.logprobs, logprobs, atol=1e-4)


# ------------------------------------------------------------------------------- Loading and saving


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 1}, *MESHES], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", [POLICIES["untied"], POLICIES["tied"]], ids=["untied", "tied"])
def test_base_is_quantized_to_the_same_bits_on_every_mesh(
    policy: PolicyConfig, dtype: str, mesh: dict[str, int], tmp_path
) -> None:
    plain = dataclasses.replace(policy, lora=None)
    weights.save(tmp_path, plain, tiny.weights(plain))
    device_mesh = meshes.make_mesh(mesh, jax.devices()[:1] if mesh == {"fsdp": 1} else None)
    _, params = weights.load(tmp_path, device_mesh, dtype, int8_base=True)
    assert_same_bits(params, int8.cast(int8.quantize_base(tiny.weights(plain)), dtype))
    shapes, axes = transformer.abstract_params(policy)
    _, expected_shardings = lora.split(policy, meshes.shardings(device_mesh, axes, shapes))
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == expected_shardings


def test_loading_never_holds_more_than_a_layer_of_float_kernels(tmp_path, monkeypatch) -> None:
    policy = dataclasses.replace(tiny.POLICY, layers=4)
    weights.save(tmp_path, policy, tiny.weights(policy))
    numbers, read_piece = [], weights._piece

    def held() -> int:
        leaves = (leaf for leaf in jax.live_arrays() if leaf.dtype == jnp.float32)
        return sum(leaf.size for leaf in leaves)

    def piece(*arguments):
        result = read_piece(*arguments)
        numbers.append(held() - before)
        return result

    monkeypatch.setattr(weights, "_piece", piece)
    before = held()
    mesh = meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])
    _, params = weights.load(tmp_path, mesh, int8_base=True)
    kernel, left = policy.width * policy.feed_forward, held() - before
    # Two pieces: the layer before is held until the next one is read.
    assert left < max(numbers) <= left + 2 * kernel < params["layers"]["mlp"]["up_kernel"].size * 4


@every_policy
def test_merged_and_saved_weights_are_the_dequantized_base_and_adapters(
    policy: PolicyConfig, tmp_path
) -> None:
    params = _params(policy)
    expected_config, expected = lora.merge(_float(policy), _dequantized(params))
    config, merged = lora.merge(policy, params)
    assert config == expected_config and config.lora is None
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), merged, expected)
    weights.save(tmp_path, policy, params)
    assert_same_bits(weights.load(tmp_path)[1], merged)
    logits = transformer.logits(config, merged, TOKENS)
    unmerged = transformer.logits(policy, params, TOKENS)
    np.testing.assert_allclose(logits, unmerged, atol=1e-4)


# ---------------------------------------------------------------------------------------- Mistakes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_rank": 0}, r"policy\.base_dtype = 'int8': must be 'compute', or policy\.lora_rank"),
        ({"base_dtype": "int4"}, r"policy\.base_dtype = 'int4': must be one of"),
    ],
)
def test_invalid_fields_are_rejected(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"lora_rank": 2, "base_dtype": "int8"} | fields)


def test_int8_base_of_a_mixture_of_experts_is_rejected() -> None:
    policy = dataclasses.replace(tiny.POLICY, experts=4, experts_per_token=2)
    model = ModelConfig(lora_rank=2, base_dtype="int8")
    with pytest.raises(ValueError, match=r"policy.base_dtype = 'int8': a mixture of experts has"):
        shape_policy(model, policy)
    assert shape_policy(model, tiny.POLICY).has_int8_base
