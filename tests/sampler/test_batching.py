"""Tests of batching: arrays arrive in a program as they were packed, and results on the host."""

import dataclasses

import jax
import numpy as np
import pytest

from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import batching
from spell_jax.sampler.answers import Answer, SlotTokens
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.requests import Options
from spell_jax.sampler.sampled import Sampled, join
from spell_jax.sampler.sampling import SampledToken
from spell_jax.sampler.scheduler import Scheduler

CONFIG = SamplerConfig(max_tokens=12, max_prompt=32, page_size=4, kv_cache_tokens=1024, slots=8)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("all_options", [False, True])
def test_packed_arrays_are_the_same_in_a_program(shards: int, all_options: bool) -> None:
    config = dataclasses.replace(CONFIG, speculative_tokens=2 * all_options)
    mesh = meshes.make_mesh({"fsdp": shards}, jax.devices()[:shards])
    scheduler = Scheduler(config.shape(mesh), shards)
    batches = [
        batching.prompt_pages(scheduler, [[] for _ in range(shards)], config.max_prompt),
        batching.slots(
            scheduler, 1, [{} for _ in range(shards)], 1, config, has_dropout=all_options
        ),
    ]
    rng = np.random.default_rng(shards)
    for batch in batches:
        # Any bits: the floats are negative, subnormal, infinite and NaN too.
        noise = jax.tree.map(
            lambda x: rng.integers(2**32, size=x.shape, dtype=np.uint32).view(x.dtype), batch
        )
        arrays = jax.jit(batching.unpack)(batching.place(mesh, noise))
        assert jax.tree.structure(arrays) == jax.tree.structure(noise)
        for array, expected_array in zip(
            jax.tree.leaves(arrays), jax.tree.leaves(noise), strict=True
        ):
            assert (array.shape, array.dtype) == (expected_array.shape, expected_array.dtype)
            np.testing.assert_array_equal(
                np.asarray(array).view(np.int32), expected_array.view(np.int32)
            )


@pytest.mark.parametrize("recorded", [False, True])
def test_joined_result_is_the_same_on_the_host(recorded: bool) -> None:
    slots, steps, rng = 5, 3, np.random.default_rng(0)
    bits = rng.integers(2**32, size=(4, slots, steps), dtype=np.uint32)  # of all kinds of floats
    ids, *floats = bits.view(np.int32)[0], *bits[1:].view(np.float32)
    floats[0][:] = -1
    floats[0][1, 1], floats[0][2, 2], floats[0][4, 0] = np.nan, np.inf, -np.inf
    sampled = Sampled(
        tokens=SampledToken(ids, *floats),
        new=np.array([0, 2, 2, 3, 1], np.int32),
        stopped=np.array([False, True, False, True, False]),
        busy=np.array([0, 2, 1, 3, 1], np.int32),
        steps=np.int32(3),
        experts=rng.integers(256, size=(slots, steps, 2, 2), dtype=np.uint8) if recorded else None,
    )
    tokens = SlotTokens(jax.jit(join)(sampled))
    expected_bits = np.stack([ids, *(x.view(np.int32) for x in floats)], axis=1)
    np.testing.assert_array_equal(tokens.bits, expected_bits)
    assert tokens.new == [0, 2, 2, 3, 1] and tokens.stopped == [0, 1, 0, 1, 0]
    assert tokens.finite == [1, 0, 1, 1, 0], "the third slot's infinite logprob is not in use"
    assert (tokens.busy, tokens.passes) == (7, 3)
    answer = Answer()
    answer.extend(tokens, 3, Options())
    assert answer.bits[0].base is None, "it would keep the arrays of all slots"
    if recorded:
        np.testing.assert_array_equal(tokens.experts, sampled.experts)
    else:
        assert tokens.experts is None
