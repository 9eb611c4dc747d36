"""Tests of the thread that owns the device: errors of one job and of all, streams, scores."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence

import jax
import numpy as np
import pytest

from spell_jax.policy import transformer
from spell_jax.sampler import session as sessions
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.requests import Options, SampleRequest
from spell_jax.serving.protocol import ProtocolError
from spell_jax.serving.scoring import Scorer
from spell_jax.serving.service import Failure, Job, NewTokens, ScoreRequest, Service
from tests import tiny
from tests.serving.running import one_device

CONFIG = SamplerConfig(
    max_tokens=16,
    max_prompt=32,
    page_size=4,
    kv_cache_tokens=512,
    slots=4,
    samples_per_prompt_batch=2,
    prefill_tokens=16,
    decode_tokens=4,
)
BAD = 63  # token with an embedding that is not finite, which is never sampled
RNG = np.random.default_rng(2)
PROMPTS = [RNG.integers(3, 60, size=n).tolist() for n in (9, 14, 5)]
# Without tied embeddings, only a prompt with the token has logits that are not finite.
POLICY = dataclasses.replace(tiny.POLICY, tied_embeddings=False, unused_ids=((BAD, BAD + 1),))


@functools.cache
def sampler() -> Sampler:
    return Sampler(POLICY, CONFIG, (), one_device())


@functools.cache
def params() -> transformer.Params:
    weights = jax.tree.map(np.array, tiny.weights(POLICY))
    weights["embedding"][BAD] = np.nan
    return weights


@functools.cache
def scorer() -> Scorer:
    return Scorer(POLICY, params(), one_device(), CONFIG.longest)


def request(prompt: Sequence[int], group: int = 1, max_tokens: int = 16) -> SampleRequest:
    return SampleRequest(prompt, group, np.zeros(2, np.uint32), Options(max_tokens=max_tokens))


def expected_tokens(sample_request: SampleRequest) -> list[list[int]]:
    session = sampler().start_session(params())
    session.submit(sample_request)
    ((_, samples),) = session.results()
    return [sample.tokens.tolist() for sample in samples]


def serve(use: Callable[[Service], Awaitable[None]], max_queued: int = 8) -> Service:
    """Run a coroutine with a service, and end both."""

    async def run() -> Service:
        start = functools.partial(sampler().start_session, params())
        service = Service(start, scorer(), max_queued)
        service.start(asyncio.get_running_loop())
        try:
            async with asyncio.timeout(60):
                await use(service)
        finally:
            await asyncio.to_thread(service.stop)
        return service

    return asyncio.run(run())


async def streamed(job: Job) -> dict[tuple[int, int], list[int]]:
    """Return the streamed tokens of each answer of a job."""
    tokens: dict[tuple[int, int], list[int]] = {}
    while job.unanswered:
        event = await job.next_event()
        if isinstance(event, Failure):
            raise event.error
        if isinstance(event, NewTokens):
            tokens.setdefault((event.prompt, event.sample), []).extend(event.ids.tolist())
    return tokens


def test_logits_that_are_not_finite_fail_their_job_alone():
    """The others go on in a new session: the same tokens, none streamed twice."""
    requests = [request(PROMPTS[0], 2), request(PROMPTS[1])]

    async def use(service: Service) -> None:
        job = Job(requests, streams=True)
        service.submit(job)
        first = await job.next_event()
        assert isinstance(first, NewTokens)
        bad = Job([request(PROMPTS[2]), request([5, BAD, 7])])
        service.submit(bad)
        with pytest.raises(ProtocolError, match="the policy's logits are not finite") as caught:
            await bad.wait()
        assert caught.value.status == 500
        tokens = await streamed(job)
        tokens[first.prompt, first.sample][:0] = first.ids.tolist()
        for prompt, sample_request in enumerate(requests):
            for number, expected in enumerate(expected_tokens(sample_request)):
                assert tokens[prompt, number] == expected
        assert service.state.restarts == 1

    serve(use)


def test_other_errors_fail_all_jobs_and_the_next_is_answered(monkeypatch, caplog):
    advance, calls = sessions.Session.advance, []

    def fail_second(session):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return advance(session)

    monkeypatch.setattr(sessions.Session, "advance", fail_second)

    async def use(service: Service) -> None:
        jobs = [Job([request(prompt)]) for prompt in PROMPTS]
        for job in jobs:
            service.submit(job)
        for job in jobs:
            with pytest.raises(ProtocolError, match="the server failed: RuntimeError"):
                await job.wait()
        service.submit(last := Job([request(PROMPTS[0])]))
        (answers,) = await last.wait()
        assert answers.samples[0].tokens.tolist() == expected_tokens(request(PROMPTS[0]))[0]

    serve(use)
    assert "RESOURCE_EXHAUSTED" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_session_that_cannot_be_opened_ends_all_jobs():
    starts = [lambda: sampler().start_session(params())]

    def start_once():
        if not starts:
            raise MemoryError("no room for a pool")
        return starts.pop()()

    async def run() -> None:
        service = Service(start_once, scorer(), 8)
        service.start(asyncio.get_running_loop())
        jobs = [Job([request(PROMPTS[0])]), Job([request([5, BAD, 7])])]
        for job in jobs:
            service.submit(job)
        async with asyncio.timeout(60):
            for job, status in zip(jobs, (503, 500), strict=True):
                with pytest.raises(ProtocolError) as caught:
                    await job.wait()
                assert caught.value.status == status
        await asyncio.to_thread(service.stop)
        assert not service.is_alive

    asyncio.run(run())


def test_canceled_jobs_have_no_further_events():
    async def use(service: Service) -> None:
        jobs = [Job([request(prompt, 4) for prompt in PROMPTS]) for _ in range(2)]
        for job in jobs:
            service.submit(job)
        await asyncio.sleep(0.01)
        service.cancel(jobs[0])
        await jobs[1].wait()
        service.cancel(jobs[1])  # finished: nothing happens
        service.submit(last := Job([request(PROMPTS[0])]))
        await last.wait()
        count = jobs[0].unanswered - jobs[0].events.qsize()
        assert count > 0 and service.state.pages == 0

    serve(use)


def test_capacity_counts_prompts_that_arrive_and_wait():
    async def use(service: Service) -> None:
        service.submit(job := Job([request(prompt, 2) for prompt in PROMPTS]))
        with pytest.raises(ProtocolError, match="3 prompts wait already, at most 4") as caught:
            service.submit(Job([request(prompt) for prompt in PROMPTS[:2]]))
        assert caught.value.status == 429
        await job.wait()
        assert service.state.waiting == 0
        service.submit(job := Job([request(prompt) for prompt in PROMPTS]))
        await job.wait()

    serve(use, max_queued=4)


def test_request_that_does_not_fit_fails_with_the_reason():
    async def use(service: Service) -> None:
        service.submit(job := Job([request(PROMPTS[0]), request([5] * 33)]))
        with pytest.raises(ProtocolError, match="a prompt of 33 tokens is over the cap of 32"):
            await job.wait()
        assert job.events.empty()

    serve(use)


def test_submitting_to_an_ended_thread_is_refused():
    async def use(service: Service) -> None:
        await asyncio.to_thread(service.stop)
        with pytest.raises(ProtocolError, match="must be started again") as caught:
            service.submit(Job([request(PROMPTS[0])]))
        assert caught.value.status == 503

    serve(use)


@pytest.mark.parametrize("echo", [False, True])
def test_scores_are_logprobs_of_the_whole_sequences(echo):
    """Three answers and a prompt in rows of 128: as logprobs of the model on each sequence."""

    async def use(service: Service) -> None:
        job = Job([request(PROMPTS[0], 3)], scoring=ScoreRequest(0.5, echo))
        service.submit(job)
        (answers,) = await job.wait()
        for sample, scores in zip(answers.samples, answers.scores, strict=True):
            ids = np.array([*PROMPTS[0], *sample.tokens])
            first = 1 if echo else len(PROMPTS[0])
            logits = transformer.logits(POLICY, params(), ids[None])[0, :-1] / 0.5
            expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))[first - 1 :]
            targets = ids[first:]
            values = expected[np.arange(len(targets)), targets]
            np.testing.assert_allclose(scores.logprobs, values, atol=1e-4)
            np.testing.assert_array_equal(scores.top_ids[:, 0], expected.argmax(axis=-1))
            ordered = -np.sort(-expected, axis=-1)[:, : scores.top_ids.shape[1]]
            np.testing.assert_allclose(scores.top_logprobs, ordered, atol=1e-4)

    serve(use)


def test_all_lengths_that_a_request_may_have_are_compiled_before(monkeypatch):
    """The thread of the device must not wait for the compiler."""
    fresh = Scorer(POLICY, params(), one_device(), 700)
    fresh.prepare(3, 16)
    assert fresh._compiled.keys() == {512}
    fresh.prepare(3, 600)
    assert fresh._compiled.keys() == {512, 768}
    monkeypatch.setattr(fresh, "_run", None)
    fresh.score([5, 6], [np.array([7, 8])], 1.0)


def test_scores_that_are_not_finite_fail_their_job():
    async def use(service: Service) -> None:
        job = Job([request([5, BAD, 7, 9])], scoring=ScoreRequest(1.0, True), samples=False)
        service.submit(job)
        with pytest.raises(ProtocolError, match="logits are not finite"):
            await job.wait()

    serve(use)


def test_scores_with_int8_weights_are_of_the_policy_that_samples():
    int8_sampler = Sampler(
        POLICY, dataclasses.replace(CONFIG, weights_dtype="int8"), (), one_device()
    )
    weights = int8_sampler.quantized(params())
    session = int8_sampler.start_session(weights)
    session.submit(request(PROMPTS[0]))
    ((_, (sample,)),) = session.results()
    scored, plain = (
        Scorer(POLICY, w, one_device(), CONFIG.longest).score(PROMPTS[0], [sample.tokens], 1.0)[0]
        for w in (weights, params())
    )
    np.testing.assert_allclose(scored.logprobs, sample.logprobs, rtol=0, atol=1e-4)
    assert np.abs(plain.logprobs - sample.logprobs).max() > 1e-3
