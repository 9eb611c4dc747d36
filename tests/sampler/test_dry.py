"""Tests of sampler/dry.py: its counts are those of a session of the sampler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest

from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.dry import AgentCounts, DrySampler, DrySession
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.page_groups import page_groups
from spell_jax.sampler.requests import SampleRequest
from spell_jax.sampler.session import Session
from tests import tiny

SAMPLING = SamplerConfig(
    max_tokens=12,
    max_prompt=256,
    page_size=16,
    kv_cache_tokens=16 * 64,
    slots=8,
    samples_per_prompt_batch=4,
    prefill_tokens=64,
    decode_tokens=4,
)
QUESTIONS = 8


def _write(request: SampleRequest) -> list[np.ndarray]:
    """Write answers of the longest length."""
    return [np.ones(request.options.max_tokens, np.int32)] * request.group


def _dry(
    sampling: SamplerConfig = SAMPLING,
    write: Callable = _write,
    policy: PolicyConfig = tiny.POLICY,
) -> DrySampler:
    mesh = meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])
    kinds = page_groups(policy).kinds
    sizes = sampling, sampling.shape(mesh, kinds), meshes.row_shards(mesh)
    return DrySampler(*sizes, write, policy.mean_pairs)


def _request(agent: str, prompt: list[int], group: int, sampling=SAMPLING) -> SampleRequest:
    options = sampling.options(sampling.max_tokens)
    return SampleRequest(prompt, group, np.zeros(2, np.uint32), options, agent)


def _prompt(number: int, tokens: int) -> list[int]:
    return [2 + number] * tokens


def _run(session: Session | DrySession, submitted: int, later: Callable[[int], None]) -> int:
    """Advance until all requests are answered; call `later` with each of the first tickets."""
    answered = 0
    while answered < 2 * submitted:
        for ticket, _ in session.advance():
            answered += 1
            if ticket < submitted:
                later(ticket)
    return answered


def _self_play(session: Session | DrySession, sampling: SamplerConfig, group: int) -> None:
    """Ask for a question after each prompt, and for a group of answers as soon as it is there."""
    for number in range(QUESTIONS):
        session.submit(_request("questioner", _prompt(number, 80), 1, sampling))

    def answer(number: int) -> None:
        prompt = _prompt(number, 160) + _prompt(QUESTIONS + number, 64)
        session.submit(_request("responder", prompt, group, sampling))

    _run(session, QUESTIONS, answer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pages", "cap", "group", "window"),
    [
        (64, 12, 4, 0),
        (40, 12, 4, 0),
        (64, 12, 3, 0),
        (40, 12, 3, 0),
        (40, 5, 3, 0),
        (24, 12, 3, 20),
    ],
)
def test_counts_equal_those_of_a_session(pages: int, cap: int, group: int, window: int) -> None:
    """With 40 pages, or 24 with windows, prompts fill the pool and sequences wait for pages.

    Groups of 3 do not fill the 8 slots. Answers of 5 tokens end within calls of 4, and their slots
    are idle until the call returns.
    """
    sampling = dataclasses.replace(SAMPLING, kv_cache_tokens=16 * pages, max_tokens=cap)
    mesh = meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])
    layers = (1,) if window else ()
    policy = dataclasses.replace(tiny.POLICY, window=window, window_layers=layers)
    session = Sampler(policy, sampling, (), mesh).start_session(tiny.weights(policy))
    _self_play(session, sampling, group)
    dry = _dry(sampling, policy=policy)
    dry_session = dry.start_session(None)
    _self_play(dry_session, sampling, group)
    counts, agents = session.counts, dry.counts_by_agent.values()
    assert sum(agent.calls for agent in agents) == pytest.approx(counts.prefill_calls)
    assert sum(agent.passes for agent in agents) == pytest.approx(counts.decode_steps)
    assert sum(agent.prompt_tokens for agent in agents) == counts.prefilled_tokens
    assert sum(agent.tokens for agent in agents) == counts.tokens
    for name in ("prompt_tokens", "prefilled_tokens", "tokens"):
        assert getattr(dry_session.counts, name) == getattr(counts, name)


def test_answers_are_those_that_were_written() -> None:
    lengths = iter((3, 1, 12, 7))

    def write(request: SampleRequest) -> list[np.ndarray]:
        return [np.full(next(lengths), 5, np.int32) for _ in range(request.group)]

    session = _dry(write=write).start_session(None)
    ticket = session.submit(_request("responder", _prompt(0, 20), 4))
    finished = [pair for _ in range(8) for pair in session.advance()]
    assert [number for number, _ in finished] == [ticket]
    samples = finished[0][1]
    assert [len(sample.tokens) for sample in samples] == [3, 1, 12, 7]
    assert all(sample.stopped for sample in samples)


def _count(prompts: Iterator[list[int]], group: int = 4) -> AgentCounts:
    dry = _dry()
    session = dry.start_session(None)
    for prompt in prompts:
        session.submit(_request("responder", prompt, group))
    for _ in range(200):
        session.advance()
    return dry.counts_by_agent["responder"]


def test_prompts_with_equal_beginnings_are_read_once() -> None:
    """Prompts of 160 tokens differ in the last 64: 96 tokens, whole pages, are shared."""

    def prompts(clusters: int) -> Iterator[list[int]]:
        for number in range(8):
            yield _prompt(number % clusters, 96) + _prompt(20 + number, 64)

    assert _count(prompts(8)).prompt_tokens == 8 * 160
    assert _count(prompts(2)).prompt_tokens == 2 * (160 + 3 * 64)
    assert _count(prompts(2)).prompt_pairs < _count(prompts(8)).prompt_pairs


def test_pairs_and_keys_of_prompts_and_answers() -> None:
    counts = _count(iter([_prompt(0, 160)]))
    assert counts.prompt_tokens == 160 and counts.prompt_pairs == 160 * 161 // 2
    assert counts.prompt_keys == 16 * sum(range(1, 11))
    assert counts.pairs == 4 * (12 * 160 + 12 * 13 // 2)
    assert counts.keys == 12 * 160 + 4 * 12 * 13 // 2  # the prompt's once for its four samples
    assert counts.passes == 12


def test_prompts_over_the_cap_are_counted() -> None:
    dry = _dry()
    assert dry.prompt_fits(range(256)) and not dry.prompt_fits(range(257))
    assert dry.refused == 1
