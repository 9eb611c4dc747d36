"""Tests of sampling inside a jitted program against the scheduler's sampler."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from spell_jax.policy import transformer
from spell_jax.policy.config import LoraConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import in_jit
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from tests import tiny

STOPS, K, S, P = (7, 11, 23), 3, 10, 16
CONFIG = SamplerConfig(
    max_tokens=S,
    max_prompt=P,
    page_size=4,
    kv_cache_tokens=512,
    slots=8,
    samples_per_prompt_batch=3,
    prefill_tokens=32,
    decode_tokens=4,
)
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(3, 64, size=length).tolist() for length in (5, 16, 1, 12)]


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])


def padded(prompts: list[list[int]]) -> in_jit.PaddedPrompts:
    tokens = np.zeros((len(prompts), P), np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    return in_jit.PaddedPrompts(tokens, np.array([*map(len, prompts)], np.int32))


def sample(prompts: in_jit.PaddedPrompts, temperature: float, **sizes) -> in_jit.PaddedReplies:
    sizes = {"replies": K, "max_tokens": S, "stop_ids": STOPS, "temperature": temperature} | sizes
    program = jax.jit(
        lambda params, prompts, key: in_jit.sample(
            tiny.POLICY, params, mesh(), prompts, key, **sizes
        )
    )
    with jax.set_mesh(mesh()):
        return jax.device_get(program(tiny.weights(), prompts, jax.random.key(0)))


def test_greedy_replies_equal_the_samplers():
    config = dataclasses.replace(CONFIG, temperature=0.0)
    sampler = Sampler(tiny.POLICY, config, STOPS, mesh())
    expected = sampler.sample(tiny.weights(), PROMPTS, 1, jax.random.key(1))
    replies = sample(padded(PROMPTS), 0.0)
    for row, group in enumerate(expected):
        assert group is not None
        for n in range(row * K, row * K + K):
            length, logprobs = replies.length[n], group[0].logprobs
            assert logprobs is not None
            np.testing.assert_array_equal(replies.tokens[n, :length], group[0].tokens)
            np.testing.assert_allclose(replies.logprobs[n, :length], logprobs, atol=1e-5)
            assert replies.stopped[n] == group[0].stopped


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_replies_over_an_int8_base_equal_the_samplers(tied: bool):
    lora = LoraConfig(rank=4, base_dtype="int8")
    policy = dataclasses.replace(tiny.POLICY, tied_embeddings=tied, lora=lora)
    params = transformer.init(policy, jax.random.key(2))
    sizes = {"replies": 1, "max_tokens": S, "stop_ids": STOPS, "temperature": 0.0}
    with jax.set_mesh(mesh()):
        program = jax.jit(
            lambda params, prompts: in_jit.sample(
                policy, params, mesh(), prompts, jax.random.key(0), **sizes
            )
        )
        replies = jax.device_get(program(params, padded(PROMPTS)))
    config = dataclasses.replace(CONFIG, temperature=0.0)
    expected = Sampler(policy, config, STOPS, mesh()).sample(params, PROMPTS, 1, jax.random.key(1))
    for n, group in enumerate(expected):
        assert group is not None
        np.testing.assert_array_equal(replies.tokens[n, : replies.length[n]], group[0].tokens)


@pytest.mark.slow
def test_a_prompt_of_length_0_has_no_reply_and_changes_no_other():
    prompts = padded(PROMPTS)
    length = prompts.length.copy()
    length[1] = 0
    full, part = sample(prompts, 1.0), sample(prompts._replace(length=length), 1.0)
    assert not part.length[K : 2 * K].any() and not part.stopped[K : 2 * K].any()
    for n in (*range(K), *range(2 * K, 4 * K)):
        assert full.length[n] == part.length[n] > 0
        real = slice(full.length[n])
        np.testing.assert_array_equal(full.tokens[n, real], part.tokens[n, real])
    assert len({full.tokens[n, : full.length[n]].tobytes() for n in range(K)}) > 1


def test_replies_longer_than_prompts_and_an_uneven_number_of_prompts_are_refused():
    with pytest.raises(ValueError, match="max_tokens = 17: must be at most 16"):
        sample(padded(PROMPTS), 1.0, max_tokens=P + 1)
    on_eight = functools.partial(
        in_jit.sample, tiny.POLICY, {}, meshes.make_mesh({"fsdp": 8}), padded(PROMPTS)
    )
    with pytest.raises(ValueError, match="prompts: 4; must be a multiple of 8"):
        on_eight(jax.random.key(0), replies=K, max_tokens=S, stop_ids=STOPS)
