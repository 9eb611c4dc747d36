"""Tests of the int8 cache and of int8 weights: rounding errors, and equality otherwise."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.policy import int8
from spell_jax.policy.config import LoraConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from tests import tiny

KEY = jax.random.key(5)
WHOLE = SamplerConfig(
    temperature=1.0,
    top_p=1.0,
    max_tokens=16,
    max_prompt=24,
    page_size=8,
    kv_cache_tokens=2048,
    slots=32,
    samples_per_prompt_batch=4,
    prefill_tokens=64,
    decode_tokens=8,
)
INT8 = dataclasses.replace(WHOLE, cache_dtype="int8")
RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(64, size=int(n)).tolist() for n in RNG.integers(1, 24, size=40)]


def _sampler(config: SamplerConfig, mesh: dict[str, int] | None = None) -> Sampler:
    devices = None if mesh else jax.devices()[:1]
    return Sampler(tiny.POLICY, config, (), meshes.make_mesh(mesh or {"fsdp": 1}, devices))


@pytest.mark.slow
def test_int8_cache_changes_logprobs_only_by_rounding() -> None:
    """Keys and values are rounded: compare logprobs of answers that both caches give."""
    int8_groups, plain_groups = (
        _sampler(config).sample(tiny.weights(), PROMPTS, 4, KEY) for config in (INT8, WHOLE)
    )
    pairs = [
        (a, b)
        for int8_samples, plain_samples in zip(int8_groups, plain_groups, strict=True)
        for a, b in zip(int8_samples or (), plain_samples or (), strict=True)
    ]
    same = np.array([np.array_equal(a.tokens, b.tokens) for a, b in pairs])
    assert same.mean() > 0.5  # .61: after one different token, the rest of an answer differs
    differences = [
        a.logprobs - b.logprobs for (a, b), alike in zip(pairs, same, strict=True) if alike
    ]
    differences = np.concatenate(differences)
    assert 1e-6 < np.abs(differences).max() < 0.3
    assert np.abs(differences).mean() < 0.02


def test_int8_cache_takes_a_quarter_of_the_memory_plus_scales() -> None:
    def size(config: SamplerConfig) -> int:
        state = jax.eval_shape(lambda: _sampler(config).init_state(jnp.float32))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.pages))

    head = tiny.POLICY.head_size
    assert size(INT8) * 4 * head == size(WHOLE) * (head + 4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2, "context": 2, "tensor": 2}, {"fsdp": 8}])
def test_int8_cache_on_a_mesh_equals_one_device(mesh: dict[str, int]) -> None:
    config = dataclasses.replace(INT8, kv_cache_tokens=8 * 1024)
    groups = _sampler(config, mesh).sample(tiny.weights(), PROMPTS[:9], 4, KEY)
    expected_groups = _sampler(INT8).sample(tiny.weights(), PROMPTS[:9], 4, KEY)
    for samples, expected_samples in zip(groups, expected_groups, strict=True):
        for a, b in zip(samples or (), expected_samples or (), strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


# ---------------------------------------------------------------------------------------- Weights


def _quantize(params):
    return int8.with_int8(params, int8.quantize(int8.kernels(params)))


@pytest.mark.slow
def test_int8_weights_are_accurate_to_half_a_scale() -> None:
    params = tiny.weights()
    small = _quantize(params)
    for room, kernels in (("attention", "qkvo"), ("mlp", ("gate", "up", "down"))):
        for name in kernels:
            kernel = params["layers"][room][f"{name}_kernel"]
            int8_kernel = small["layers"][room][f"{name}_kernel"]
            inputs = (1, 2) if name == "o" else (1,)
            scale = np.expand_dims(small["layers"][room][f"{name}_scale"], inputs)
            assert int8_kernel.dtype == jnp.int8 and int8_kernel.shape == kernel.shape
            assert np.all(np.max(np.abs(int8_kernel), axis=inputs) == 127)
            assert np.all(np.abs(int8_kernel * scale - kernel) <= 0.5001 * scale)
    sampler = _sampler(dataclasses.replace(WHOLE, weights_dtype="int8"))
    params = jax.device_put(params)
    small = sampler.start_session(params)._params
    assert sampler.quantized(small) is small
    assert small["embedding"] is params["embedding"]
    bias = small["layers"]["attention"]["q_bias"]
    assert bias is params["layers"]["attention"]["q_bias"]


def _meant(params):
    """Return plain weights with the dequantized values of the int8 weights."""
    small = _quantize(params)
    layers = dict(small["layers"])
    for room in ("attention", "mlp"):
        plain_weights = {}
        for name, leaf in layers[room].items():
            if name.endswith("_kernel"):
                scale = layers[room][name.replace("_kernel", "_scale")]
                inputs = (1, 2) if name == "o_kernel" else (1,)
                plain_weights[name] = leaf * np.expand_dims(scale, inputs)
            elif not name.endswith("_scale"):
                plain_weights[name] = leaf
        layers[room] = plain_weights
    return small | {"layers": layers}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, {"fsdp": 2, "context": 2, "tensor": 2}])
def test_int8_weights_sample_like_their_dequantized_values(mesh: dict[str, int] | None) -> None:
    plain = dataclasses.replace(WHOLE, kv_cache_tokens=8 * 1024)
    small = dataclasses.replace(plain, weights_dtype="int8")
    groups = _sampler(small, mesh).sample(tiny.weights(), PROMPTS[:9], 4, KEY)
    expected_groups = _sampler(plain).sample(_meant(tiny.weights()), PROMPTS[:9], 4, KEY)
    for samples, expected_samples in zip(groups, expected_groups, strict=True):
        for a, b in zip(samples or (), expected_samples or (), strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.slow
def test_lora_adapters_are_not_quantized() -> None:
    policy = dataclasses.replace(tiny.POLICY, lora=LoraConfig(2))
    config = dataclasses.replace(WHOLE, weights_dtype="int8", max_tokens=6)
    params = tiny.weights(policy)
    sampler = Sampler(policy, config, (), meshes.make_mesh({"fsdp": 1}, jax.devices()[:1]))
    plain = dataclasses.replace(config, weights_dtype="compute")
    plain_sampler = Sampler(policy, plain, (), sampler.mesh)
    (samples,), (expected_samples,) = (
        s.sample(p, PROMPTS[:1], 4, KEY)
        for s, p in ((sampler, params), (plain_sampler, _meant(params)))
    )
    for a, b in zip(samples or (), expected_samples or (), strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_int8_weights_of_a_mixture_of_experts_are_rejected() -> None:
    policy = dataclasses.replace(tiny.POLICY, experts=4, experts_per_token=2)
    config = dataclasses.replace(WHOLE, weights_dtype="int8")
    with pytest.raises(ValueError, match=r"sampler.weights_dtype = 'int8': a mixture of experts"):
        Sampler(policy, config, (), meshes.make_mesh({"fsdp": 1}, jax.devices()[:1]))


@pytest.mark.parametrize("field", ["cache_dtype", "weights_dtype", "attention"])
def test_unknown_config_choice_is_rejected(field: str) -> None:
    with pytest.raises(ValueError, match=rf"sampler.{field} = 'int4': must be one of"):
        dataclasses.replace(WHOLE, **{field: "int4"})
