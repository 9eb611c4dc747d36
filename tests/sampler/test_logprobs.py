"""Tests of the sampler's logprobs against the learner's, after prompts of 1K to 16K tokens.

The sampler reads a prompt page by page and samples token by token. The learner reads the prompt and
all of its answers at once, as one packed row. Weights and activations are float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn

from spell_jax.learner import old_logprobs, update
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.packing import Bucket, PackingConfig, TrainGroup
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.rope import RopeConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from tests import tiny

pytestmark = pytest.mark.slow

QWEN2 = PolicyConfig(
    vocab_size=96,
    width=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=16,
    feed_forward=96,
    rope=RopeConfig(theta=1e6),
)
QWEN3 = dataclasses.replace(QWEN2, qkv_bias=False, qk_norm=True)
# Each family with a different RoPE. All prompts exceed the original contexts of scaled ones.
POLICIES = {
    "qwen2": QWEN2,
    "qwen3, yarn": dataclasses.replace(
        QWEN3, rope=RopeConfig(1e6, "yarn", factor=32.0, original_positions=512)
    ),
    "qwen3_moe, linear": dataclasses.replace(
        QWEN3,
        experts=4,
        experts_per_token=2,
        feed_forward=48,
        rope=RopeConfig(1e4, "linear", factor=4.0),
    ),
    "llama untied, llama3": dataclasses.replace(
        QWEN2,
        qkv_bias=False,
        tied_embeddings=False,
        rope=RopeConfig(5e5, "llama3", factor=8.0, original_positions=512),
    ),
}
PADDED = dataclasses.replace(QWEN2, unused_ids=((7, 9), (60, 96)))
SIBLINGS, ANSWER = 3, 24
# Lengths of a session's prompts, and tokens per page. The page divides neither length. The prompts
# have a common prefix and share its pages.
SIZES = {
    "1K": ((1001, 777), 48),
    "4K": ((4099, 2050), 128),
    "16K": ((16_381, 9001), 128),
}


@functools.cache
def _mesh() -> jax.sharding.Mesh:
    return meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])


def _prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    """Make prompts of these lengths that share all tokens except for the last five tokens."""
    rng = np.random.default_rng(2)
    text = rng.integers(QWEN2.vocab_size, size=max(lengths)).tolist()
    return [text[: n - 5] + rng.integers(QWEN2.vocab_size, size=5).tolist() for n in lengths]


def _sampled(
    policy: PolicyConfig, size: str, temperature: float, **filters: Any
) -> list[TrainGroup]:
    """Sample answers; return groups of prompts, answers and the sampler's logprobs."""
    lengths, block = SIZES[size]
    config = SamplerConfig(
        temperature=temperature,
        **({"top_p": 0.9} | filters),
        max_tokens=ANSWER,
        max_prompt=max(lengths),
        page_size=block,
        kv_cache_tokens=2 * sum(lengths),
        slots=4,
        samples_per_prompt_batch=2,
        prefill_tokens=1024,
        decode_tokens=8,
    )
    prompts = _prompts(lengths)
    session = Sampler(policy, config, (), _mesh()).start_session(tiny.weights(policy))
    answers = session.sample(prompts, SIBLINGS, jax.random.key(1), config.options(ANSWER))
    assert session.reused_tokens == (min(lengths) - 5) // block * block
    groups = []
    for prompt, samples in zip(prompts, answers, strict=True):
        assert samples is not None
        groups.append(TrainGroup(prompt, samples, [1.0] * SIBLINGS, "answers"))
    return groups


def _scored(
    policy: PolicyConfig, groups: list[TrainGroup], temperature: float, support: str = "full"
) -> tuple[np.ndarray, np.ndarray]:
    """Return (sampler logprobs, learner logprobs) of all answer tokens."""
    answers = SIBLINGS * ANSWER
    bucket = Bucket(max(len(group.prompt) for group in groups) + answers, answers)
    layout = PackingConfig((bucket,), bucket.length)
    loss = LossConfig(support=support)
    learner = Learner(policy, OptimizerConfig(), loss, layout, _mesh(), temperature)
    batches, refused = learner.pack(groups, learner.weigh(groups))
    assert not refused and len(batches) == len(groups)
    score = jax.jit(functools.partial(update.score, learner.spec))
    sampler_logprobs, learner_logprobs = [], []
    with jax.set_mesh(_mesh()), nn.logical_axis_rules(meshes.RULES):
        for batch in batches:
            real = batch.weight > 0
            assert real.sum() == answers
            logprobs, *_ = score(tiny.weights(policy), batch)
            learner_logprobs.append(np.asarray(logprobs)[real])
            sampler_logprobs.append(batch.old_logprob[real])
    return np.concatenate(sampler_logprobs), np.concatenate(learner_logprobs)


def _check(policy: PolicyConfig, size: str, temperature: float) -> None:
    groups = _sampled(policy, size, temperature)
    sampler_logprobs, learner_logprobs = _scored(policy, groups, temperature)
    np.testing.assert_allclose(sampler_logprobs, learner_logprobs, atol=1e-4)
    assert learner_logprobs.std() > 0.3, "the case should have tokens of several probabilities"
    texts = {tuple(answer) for group in groups for answer in tiny.answers(group)}
    assert len(texts) == (len(groups) if temperature == 0 else len(groups) * SIBLINGS)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", POLICIES)
def test_logprobs_equal_the_learners_after_1k_prompt_tokens(name: str, temperature: float) -> None:
    _check(POLICIES[name], "1K", temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_without_ids_of_padding_equal_the_learners(temperature: float) -> None:
    _check(PADDED, "1K", temperature)


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        pytest.param(name, temperature, marks=() if name == "qwen3, yarn" else pytest.mark.long)
        for name, temperature in zip(POLICIES, [0.0, 0.7] * 2, strict=True)
    ],
)
def test_logprobs_equal_the_learners_after_4k_prompt_tokens(name: str, temperature: float) -> None:
    _check(POLICIES[name], "4K", temperature)


@pytest.mark.long
@pytest.mark.parametrize(("name", "temperature"), list(zip(POLICIES, [0.7, 0.0] * 2, strict=True)))
def test_logprobs_equal_the_learners_after_16k_prompt_tokens(name: str, temperature: float) -> None:
    _check(POLICIES[name], "16K", temperature)


FILTERS = [{"top_p": 0.6}, {"top_p": 1.0, "top_k": 4}, {"top_p": 1.0, "min_p": 0.1}]


CASES = [*zip(POLICIES.values(), FILTERS, strict=False), (PADDED, FILTERS[0])]


@pytest.mark.parametrize(("policy", "filters"), CASES, ids=["top_p", "top_k", "min_p", "padded"])
def test_renormalized_logprobs_equal_the_learners(
    policy: PolicyConfig, filters: dict[str, Any]
) -> None:
    """loss.support = "sampled": the update has the policy that sampled, filters included."""
    groups = _sampled(policy, "1K", 0.7, **filters)
    before = np.concatenate([row for group in groups for row in tiny.logprobs(group)])
    sampler_logprobs, learner_logprobs = _scored(
        policy, old_logprobs.on_sampled_support(groups), 0.7, "sampled"
    )
    np.testing.assert_allclose(sampler_logprobs, learner_logprobs, atol=1e-4)
    assert (sampler_logprobs - before).mean() > 0.1, "the filters should drop some mass"
    full, _ = _scored(policy, groups, 0.7)
    assert np.abs(full - learner_logprobs).max() > 0.1
