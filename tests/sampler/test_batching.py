"""Tests of batching: arrays arrive in a program as they were packed."""

import dataclasses

import jax
import numpy as np
import pytest

from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import batching
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.scheduler import Scheduler

CONFIG = SamplerConfig(
    max_tokens=12, max_verdict_tokens=12, max_prompt=32, page_size=4, kv_cache_tokens=1024, slots=8
)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("changes", [{}, {"vocabulary_dropout": 0.5, "speculative_tokens": 2}])
def test_packed_arrays_are_the_same_in_a_program(shards: int, changes: dict) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    mesh = meshes.make_mesh({"fsdp": shards}, jax.devices()[:shards])
    scheduler = Scheduler(config.shape(mesh), shards)
    batches = [
        batching.prompt_pages(scheduler, [[] for _ in range(shards)], config.max_prompt),
        batching.slots(scheduler, 1, [{} for _ in range(shards)], 1, config),
    ]
    rng = np.random.default_rng(shards)
    for batch in batches:
        # Any bits: the floats are negative, subnormal, infinite and NaN too.
        noise = jax.tree.map(
            lambda x: rng.integers(2**32, size=x.shape, dtype=np.uint32).view(x.dtype), batch
        )
        program = jax.jit(batching.unpacking(lambda config, params, state, arrays: arrays))
        arrays = program(None, None, None, batching.place(mesh, noise))
        assert jax.tree.structure(arrays) == jax.tree.structure(noise)
        for array, wanted in zip(jax.tree.leaves(arrays), jax.tree.leaves(noise), strict=True):
            assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
            np.testing.assert_array_equal(np.asarray(array).view(np.int32), wanted.view(np.int32))
