"""Tests of greedy answers of every family, for several page sizes, against generate().

Prompts of many lengths are answered twice each in one session with few slots, with answers of
several lengths: slots are freed and refilled while their neighbors continue.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from spell_jax.policy import weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import session
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.requests import Options, SampleRequest
from tests.policy import families

pytestmark = pytest.mark.slow

# (tokens of a prompt, of its answer): prompts end within pages, fill them or exceed them.
LENGTHS = ((129, 32), (3, 45), (16, 38), (61, 32), (1, 50), (32, 35), (20, 41), (57, 36))
RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(families.VOCAB, size=length).tolist() for length, _ in LENGTHS]
PROMPTS[-1][:50] = PROMPTS[0][:50]
GROUP = 2
BLOCKS = (4, 16, 128)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a cached maker of a family's (config, weights, transformers' answers to PROMPTS)."""

    @functools.cache
    def make(family: str) -> tuple[PolicyConfig, Any, list[list[int]]]:
        folder = tmp_path_factory.mktemp("family")
        their_model = families.save(family, folder)
        answers = [
            _generate(their_model, prompt, tokens)
            for prompt, (_, tokens) in zip(PROMPTS, LENGTHS, strict=True)
        ]
        return *weights.load(folder), answers

    return make


def _generate(model, prompt: list[int], tokens: int) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    sequences = model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return sequences[0, len(prompt) :].tolist()


def _combinations() -> list[Any]:
    """Pair every family with every page size; the quick set has one size per family, in turn."""
    cases = []
    for number, family in enumerate(families.FAMILIES):
        for turn, block in enumerate(BLOCKS):
            quick = number % len(BLOCKS) == turn
            cases.append(pytest.param(family, block, marks=() if quick else pytest.mark.long))
    return cases


@pytest.mark.parametrize(("family", "page_size"), _combinations())
def test_greedy_answers_equal_transformers(family: str, page_size: int, model) -> None:
    config, params, expected_answers = model(family)
    longest_prompt, longest = (max(column) for column in zip(*LENGTHS, strict=True))
    sizes = SamplerConfig(
        max_tokens=longest,
        max_prompt=longest_prompt,
        page_size=page_size,
        kv_cache_tokens=8 * 128,
        slots=3,
        samples_per_prompt_batch=GROUP,
        prefill_tokens=128,
        decode_tokens=7,
    )
    sampler = Sampler(config, sizes, (), meshes.make_mesh({"fsdp": 1}, jax.devices()[:1]))
    sampler_session = sampler.start_session(params)
    keys = session.request_keys(jax.random.key(0), len(PROMPTS))
    for prompt, answer, key in zip(PROMPTS, expected_answers, keys, strict=True):
        options = Options(temperature=0.0, max_tokens=len(answer))
        sampler_session.submit(SampleRequest(prompt, GROUP, key, options))
    answers = dict(sampler_session.results())
    for ticket, answer in enumerate(expected_answers):
        for sample in answers[ticket]:
            assert sample.tokens.tolist() == answer, f"prompt of {len(PROMPTS[ticket])} tokens"
    sampled = GROUP * sum(tokens for _, tokens in LENGTHS)
    assert sampler_session.counts.decode_steps < 1.2 * sampled / sizes.slots, (
        "slots should not rest"
    )
