"""Tests of sampling from policies whose layers see only a window of the last tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn

from spell_jax.data.samples import Sample
from spell_jax.learner import update
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.packing import Bucket, PackingConfig, TrainGroup
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import in_jit
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from tests import tiny

# Windows that are shorter than a page of 4 tokens, and longer. All are shorter than most prompts.
LAYERS = {"half": (0, 2), "all": (0, 1, 2, 3), "most": (0, 1, 2)}
HALF_FIRST = ["half", *(pytest.param(name, marks=pytest.mark.long) for name in ("all", "most"))]
CONFIG = SamplerConfig(
    temperature=0.7,
    top_p=1.0,
    max_tokens=12,
    max_prompt=40,
    page_size=4,
    kv_cache_tokens=2048,
    slots=6,
    samples_per_prompt_batch=3,
    prefill_tokens=16,
    decode_tokens=5,
)
RNG = np.random.default_rng(3)
_TEXT = RNG.integers(64, size=40).tolist()
# Prompts of several calls and of one token; three of them share a prefix of 6 pages.
PROMPTS = [
    _TEXT[:37],
    [5],
    [*_TEXT[:25], 1, 2, 3],
    RNG.integers(64, size=18).tolist(),
    [*_TEXT[:27], 9],
    RNG.integers(64, size=40).tolist(),
]
KEY = jax.random.key(8)


def _policy(layers: str, window: int) -> PolicyConfig:
    return dataclasses.replace(tiny.POLICY, layers=4, window=window, window_layers=LAYERS[layers])


@functools.cache
def _mesh() -> jax.sharding.Mesh:
    return meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])


@functools.cache
def _sampled(
    policy: PolicyConfig, config: SamplerConfig = CONFIG, mesh: tuple[tuple[str, int], ...] = ()
) -> tuple[list[list[Sample]], int]:
    """Sample three answers to each prompt; return them and the number of reused prompt tokens."""
    sampler = Sampler(policy, config, (), meshes.make_mesh(dict(mesh)) if mesh else _mesh())
    session = sampler.start_session(tiny.weights(policy))
    groups = session.sample(PROMPTS, 3, KEY, config.options())
    for shard in session._scheduler.shards:
        assert shard.pool.available == shard.shape.pages, "a request leaves no page in use"
        assert not shard.pool.firm_pages and not shard._reserved()
    return [samples for samples in groups if samples is not None], session.reused_tokens


def _assert_same(policy: PolicyConfig, **changes: Any) -> None:
    """Compare the samples of another config or mesh with those of CONFIG on one device."""
    groups, _ = _sampled(policy, **changes)
    expected_groups, _ = _sampled(policy)
    for samples, expected_samples in zip(groups, expected_groups, strict=True):
        for a, b in zip(samples, expected_samples, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def _sampler_logprobs(groups: list[list[Sample]]) -> np.ndarray:
    rows = [sample.logprobs for samples in groups for sample in samples]
    return np.concatenate([row for row in rows if row is not None])


def _learner_logprobs(policy: PolicyConfig, groups: list[list[Sample]]) -> np.ndarray:
    """Return the learner's logprobs of all answers, one packed row for each group."""
    answers = 3 * CONFIG.max_tokens
    bucket = Bucket(CONFIG.max_prompt + answers, answers)
    layout = PackingConfig((bucket,), bucket.length)
    learner = Learner(policy, OptimizerConfig(), LossConfig(), layout, _mesh(), CONFIG.temperature)
    train_groups = [
        TrainGroup(prompt, samples, [1.0] * 3, "answers")
        for prompt, samples in zip(PROMPTS, groups, strict=True)
    ]
    score = jax.jit(functools.partial(update.score, learner.spec))
    logprobs = []
    with jax.set_mesh(_mesh()), nn.logical_axis_rules(meshes.RULES):
        for group in train_groups:
            ((batch,), refused) = learner.pack([group], learner.weigh([group]))
            assert not refused
            scores, *_ = score(tiny.weights(policy), batch)
            logprobs.append(np.asarray(scores)[batch.weight > 0])
    return np.concatenate(logprobs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "window"),
    [
        ("half", 3),
        ("all", 6),
        pytest.param("half", 7, marks=pytest.mark.long),
        pytest.param("all", 2, marks=pytest.mark.long),
        pytest.param("most", 9, marks=pytest.mark.long),
    ],
)
def test_logprobs_equal_the_learners(layers: str, window: int) -> None:
    """Answers and most prompts are longer than the window, so pages are released on the way."""
    policy = _policy(layers, window)
    groups, reused = _sampled(policy)
    assert reused >= 2 * 24, "two prompts begin like the first"
    sampled = _sampler_logprobs(groups)
    np.testing.assert_allclose(sampled, _learner_logprobs(policy, groups), atol=1e-4)
    full = dataclasses.replace(policy, window=0, window_layers=())
    assert np.abs(sampled - _learner_logprobs(full, groups)).max() > 0.1, "windows should matter"


@pytest.mark.slow
@pytest.mark.parametrize("layers", HALF_FIRST)
def test_tight_pools_give_the_same_answers(layers: str) -> None:
    """In a tight pool prompts wait, answers pause, and idle pages are evicted."""
    policy = _policy(layers, 6)
    for tokens in (56, 80, 120):
        _assert_same(policy, config=dataclasses.replace(CONFIG, kv_cache_tokens=tokens))


@pytest.mark.slow
def test_other_sizes_of_pages_and_calls_give_the_same_answers() -> None:
    policy = _policy("half", 7)
    for sizes in ({"page_size": 16}, {"prefill_tokens": 4}, {"decode_tokens": 12, "slots": 2}):
        _assert_same(policy, config=dataclasses.replace(CONFIG, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize("layers", HALF_FIRST[:2])
def test_speculation_changes_no_answer(layers: str) -> None:
    speculative = dataclasses.replace(CONFIG, speculative_tokens=3, speculative_ngram=1)
    _assert_same(_policy(layers, 5), config=speculative)


@pytest.mark.slow
def test_int8_cache_changes_logprobs_only_by_rounding() -> None:
    policy = _policy("most", 6)
    groups, _ = _sampled(policy, dataclasses.replace(CONFIG, cache_dtype="int8"))
    sampled = _sampler_logprobs(groups)
    difference = np.abs(sampled - _learner_logprobs(policy, groups))
    assert 1e-6 < difference.max() < 0.3 and difference.mean() < 0.03


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [{"data": 2, "context": 2, "tensor": 2}, {"context": 4, "fsdp": 2}], ids=str
)
@pytest.mark.parametrize("layers", HALF_FIRST[:2])
def test_meshes_give_the_same_answers(layers: str, mesh: dict[str, int]) -> None:
    """The `context` axis splits pages: a window may begin on any device's part."""
    sizes = dataclasses.replace(CONFIG, kv_cache_tokens=4096, slots=8)
    _assert_same(_policy(layers, 6), config=sizes, mesh=tuple(mesh.items()))


@pytest.mark.slow
@pytest.mark.parametrize("layers", HALF_FIRST[:2])
def test_replies_inside_a_program_equal_the_samplers(layers: str) -> None:
    policy = _policy(layers, 6)
    tokens = np.zeros((len(PROMPTS), 40), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    prompts = in_jit.PaddedPrompts(tokens, np.array([*map(len, PROMPTS)], np.int32))
    sizes = {"replies": 1, "max_tokens": CONFIG.max_tokens, "stop_ids": (), "temperature": 0.0}
    sample = functools.partial(in_jit.sample, policy, mesh=_mesh(), key=KEY, **sizes)
    with jax.set_mesh(_mesh()):
        replies = jax.jit(lambda params, prompts: sample(params=params, prompts=prompts))(
            tiny.weights(policy), prompts
        )
    groups, _ = _sampled(policy, dataclasses.replace(CONFIG, temperature=0.0))
    for row, samples in enumerate(groups):
        np.testing.assert_array_equal(replies.tokens[row], samples[0].tokens)
