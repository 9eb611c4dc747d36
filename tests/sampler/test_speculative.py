"""Tests of prompt lookup: proposals, and answers equal to plain decoding."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.data.samples import Sample
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import speculative
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.counts import Counts
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.keys import request_keys
from spell_jax.sampler.requests import SampleRequest
from tests import tiny

KEY = jax.random.key(11)
PLAIN = SamplerConfig(
    temperature=0.3,
    top_p=0.9,
    max_tokens=40,
    max_prompt=24,
    page_size=8,
    kv_cache_tokens=4096,
    slots=12,
    samples_per_prompt_batch=3,
    prefill_tokens=64,
    decode_tokens=8,
)
RNG = np.random.default_rng(2)
PROMPTS = [RNG.integers(64, size=int(n)).tolist() for n in (1, 5, 8, 17, 24, 3, 9)]


# ---------------------------------------------------------------------------------------- Proposals


def _proposal_of(text: list[int], match: int, tokens: int) -> list[int]:
    """Propose tokens by a plain loop over one sequence."""
    suffix = text[len(text) - match :]
    for end in range(len(text) - 1, match - 1, -1):
        if len(suffix) == match and text[end - match : end] == suffix:
            following = text[end : end + tokens]
            return following + [speculative.NO_TOKEN] * (tokens - len(following))
    return [speculative.NO_TOKEN] * tokens


@pytest.mark.parametrize("match", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 4])
def test_proposal_continues_the_last_match(match: int, tokens: int) -> None:
    rng = np.random.default_rng(0)
    slot_tokens = rng.integers(3, size=(60, 20)).astype(np.int32)
    count = rng.integers(1, 21, size=60).astype(np.int32)
    prompts = np.full((2, 4), 9, np.int32)  # nothing can be found
    row, length = np.arange(60) % 2, np.full(60, 4)
    propose = jax.jit(functools.partial(speculative.propose, match=match, tokens=tokens))
    proposals = propose(prompts, row, length, slot_tokens, count)
    for i in range(60):
        assert proposals[i].tolist() == _proposal_of(
            slot_tokens[i, : count[i]].tolist(), match, tokens
        )


@pytest.mark.slow
def test_proposals_come_from_the_slots_own_prompt() -> None:
    prompts = jnp.array([[0, 0, 5, 6, 7, 8], [5, 6, 1, 2, 3, 4]])
    row, length = jnp.array([1, 0, 0, 1]), jnp.array([6, 4, 1, 6])
    slot_tokens = jnp.array([[5, 6, 9], [5, 6, 9], [5, 6, 9], [3, 4, 9]])
    count = jnp.array([2, 2, 2, 2])
    proposals = speculative.propose(prompts, row, length, slot_tokens, count, 2, 3)
    no_token = speculative.NO_TOKEN
    assert proposals.tolist() == [
        [1, 2, 3],
        [7, 8, 5],  # beyond the end of the prompt: the slot's own tokens follow
        [no_token] * 3,  # a prompt of one token, without a match
        [3, 4, no_token],
    ]


# ---------------------------------------------------------- Answers are the same as without lookup


@functools.cache
def _answers(
    config: SamplerConfig, stops=(), mesh=(), groups=(3,)
) -> tuple[list[list[Sample]], Counts]:
    devices = None if mesh else jax.devices()[:1]
    placed = meshes.make_mesh(dict(mesh) or {"fsdp": 1}, devices)
    session = Sampler(tiny.POLICY, config, stops, placed).start_session(tiny.weights())
    keys = request_keys(KEY, 2 * len(PROMPTS))
    for i, key in enumerate(keys):
        group, how = groups[i % len(groups)], config.options(40 - i)
        session.submit(SampleRequest(PROMPTS[i // 2], group, key, how))
    answers = dict(session.results())
    return [answers[i] for i in range(len(keys))], session.counts


def _assert_same(groups: list[list[Sample]], expected_groups: list[list[Sample]]) -> None:
    for samples, expected_samples in zip(groups, expected_groups, strict=True):
        for a, b in zip(samples, expected_samples, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
            assert a.stopped == b.stopped


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "match"), [(3, 2), (7, 1)])
def test_answers_equal_plain_decoding(tokens: int, match: int) -> None:
    speculation = dataclasses.replace(PLAIN, speculative_tokens=tokens, speculative_ngram=match)
    (groups, counts), (expected_groups, plain_counts) = _answers(speculation), _answers(PLAIN)
    _assert_same(groups, expected_groups)
    assert counts.tokens == plain_counts.tokens == plain_counts.busy_slot_steps
    assert counts.busy_slot_steps < 0.9 * counts.tokens  # some proposals were right


@pytest.mark.slow
def test_stop_tokens_end_an_answer_inside_a_proposal() -> None:
    stops = tuple(range(0, 64, 7))
    speculation = dataclasses.replace(PLAIN, speculative_tokens=4, speculative_ngram=1)
    # Both lanes: for groups of three samples and of one.
    (groups, _), (expected_groups, _) = (
        _answers(c, stops, (), (3, 1)) for c in (speculation, PLAIN)
    )
    _assert_same(groups, expected_groups)
    answers = [answer for samples in groups for answer in samples]
    assert any(a.stopped for a in answers) and any(not a.stopped for a in answers)
    for answer in answers:
        assert not set(answer.tokens[:-1].tolist()) & set(stops)


@pytest.mark.slow
def test_answers_on_a_mesh_equal_plain_decoding() -> None:
    mesh = (("data", 2), ("context", 2), ("tensor", 2))
    speculation = dataclasses.replace(PLAIN, speculative_tokens=3, kv_cache_tokens=8 * 1024)
    (groups, _), (expected_groups, _) = _answers(speculation, (), mesh), _answers(PLAIN)
    for samples, expected_samples in zip(groups, expected_groups, strict=True):
        for a, b in zip(samples, expected_samples, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.parametrize(("field", "value"), [("speculative_tokens", -1), ("speculative_ngram", 0)])
def test_invalid_speculation_sizes_are_rejected(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"sampler.{field} = {value}: must be at least"):
        dataclasses.replace(PLAIN, **{field: value})
