"""A pool of eight bits: what it costs in quality, and that all else is as with a whole one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.engine import Sampler, SamplerConfig
from tests import tiny

KEY = jax.random.key(5)
WHOLE = SamplerConfig(
    temperature=1.0,
    top_p=1.0,
    max_tokens=16,
    max_verdict_tokens=1,
    max_prompt=24,
    block=8,
    cache_tokens=2048,
    slots=32,
    siblings=4,
    prefill_tokens=64,
    decode_tokens=8,
)
INT8 = dataclasses.replace(WHOLE, cache_dtype="int8")
RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(64, size=int(n)).tolist() for n in RNG.integers(1, 24, size=40)]


def _sampler(config: SamplerConfig, mesh: dict[str, int] | None = None) -> Sampler:
    devices = None if mesh else jax.devices()[:1]
    return Sampler(tiny.POLICY, config, (), meshes.make_mesh(mesh or {"fsdp": 1}, devices))


def test_first_tokens_differ_by_rounding_and_no_more() -> None:
    """Keys and values of a prompt are read rounded: log-probs of tokens that both draw."""
    found, wanted = (
        _sampler(config).sample(tiny.weights(), PROMPTS, 4, KEY) for config in (INT8, WHOLE)
    )
    pairs = [
        (a, b)
        for one, other in zip(found, wanted, strict=True)
        for a, b in zip(one or (), other or (), strict=True)
    ]
    same = np.array([np.array_equal(a.tokens, b.tokens) for a, b in pairs])
    assert same.mean() > 0.5  # .61; one token that differs is followed by fifteen others
    differences = [
        a.log_probs - b.log_probs for (a, b), alike in zip(pairs, same, strict=True) if alike
    ]
    differences = np.concatenate(differences)
    assert 1e-6 < np.abs(differences).max() < 0.3
    assert np.abs(differences).mean() < 0.02


def test_a_pool_of_eight_bits_takes_a_quarter_and_its_scales() -> None:
    def size(config: SamplerConfig) -> int:
        state = jax.eval_shape(lambda: _sampler(config).make_empty(jnp.float32))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.pages))

    head = tiny.POLICY.head_size
    assert size(INT8) * 4 * head == size(WHOLE) * (head + 4)


@pytest.mark.parametrize("mesh", [{"data": 2, "context": 2, "tensor": 2}, {"fsdp": 8}])
def test_on_a_mesh_equals_one_device(mesh: dict[str, int]) -> None:
    config = dataclasses.replace(INT8, cache_tokens=8 * 1024)
    found = _sampler(config, mesh).sample(tiny.weights(), PROMPTS[:9], 4, KEY)
    wanted = _sampler(INT8).sample(tiny.weights(), PROMPTS[:9], 4, KEY)
    for one, other in zip(found, wanted, strict=True):
        for a, b in zip(one or (), other or (), strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)


def test_an_unknown_dtype_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"sampler.cache_dtype = 'int4': must be one of"):
        dataclasses.replace(WHOLE, cache_dtype="int4")
