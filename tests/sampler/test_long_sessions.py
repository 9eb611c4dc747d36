"""Tests of sessions that stay open: canceled requests, partial answers, stop ids, flat memory."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from spell_jax.data.samples import Sample
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import session
from spell_jax.sampler.answers import Answer
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.requests import Options, SampleRequest
from spell_jax.sampler.scheduler import Scheduler
from spell_jax.sampler.session import Session
from spell_jax.sampler.shard import ShardShape
from tests import tiny

CONFIG = SamplerConfig(
    max_tokens=12,
    max_prompt=32,
    page_size=4,
    kv_cache_tokens=256,
    slots=4,
    samples_per_prompt_batch=4,
    prefill_tokens=16,
    decode_tokens=4,
)
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 64, size=n).tolist() for n in (21, 9, 30, 5)]
KEYS = session.request_keys(jax.random.key(3), len(PROMPTS))


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    mesh = meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])
    return Sampler(tiny.POLICY, CONFIG, (), mesh)


def request(index: int, group: int = 1, **options) -> SampleRequest:
    return SampleRequest(PROMPTS[index], group, KEYS[index], Options(max_tokens=12, **options))


def alone(sampler: Sampler, sample_request: SampleRequest) -> list[Sample]:
    open_session = sampler.start_session(tiny.weights())
    open_session.submit(sample_request)
    ((_, samples),) = open_session.results()
    return samples


def assert_same(samples: Sequence[Sample], expected_samples: Sequence[Sample]) -> None:
    for sample, expected_sample in zip(samples, expected_samples, strict=True):
        np.testing.assert_array_equal(sample.tokens, expected_sample.tokens)
        np.testing.assert_allclose(sample.logprobs, expected_sample.logprobs, atol=1e-6)


# ----------------------------------------------------------------------------------------- Canceled


def test_canceled_requests_free_their_pages_and_leave_others_alone(sampler):
    """Two of four slots run the first request when it is canceled; the last waits in the queue."""
    open_session = sampler.start_session(tiny.weights())
    requests = [request(0, 2), request(1, 2), request(2, 2), request(3, 2)]
    tickets = [open_session.submit(sample_request) for sample_request in requests]
    assert open_session.advance() == [] and open_session.unfinished
    for ticket in (tickets[0], tickets[3], 99):
        open_session.cancel(ticket)
    results = dict(open_session.results())
    assert sorted(results) == [tickets[1], tickets[2]]
    for index in (1, 2):
        assert_same(results[tickets[index]], alone(sampler, requests[index]))
    assert open_session.pages[0] == 0 and not open_session.queued
    # Nothing that was canceled was sampled to its end.
    assert open_session.counts.tokens <= 4 * 12 + 2 * 4


def test_canceled_request_frees_its_slots_at_the_next_call(sampler):
    open_session = sampler.start_session(tiny.weights())
    first = open_session.submit(request(0, 4))
    second = open_session.submit(request(1, 4))
    (answer, *_) = open_session.progress(second).answers
    lengths = []
    for _ in range(3):
        open_session.advance()
        open_session.cancel(first)
        lengths.append(answer.length)
    assert lengths == [0, 0, 4]  # the first call was in flight
    assert dict(open_session.results()).keys() == {second}


def _host_scheduler() -> Scheduler:
    """Make a scheduler with one slot, in which two prompts of 3 blocks share prefill calls."""
    shape = ShardShape(4, pages=20, slots=1, prompts=2, lanes=((1, 1),), tasks=4)
    scheduler = Scheduler(shape, 1)
    for ticket in range(2):
        tokens = [10 * ticket + i for i in range(12)]
        options = Options(max_tokens=4)
        scheduler.submit(ticket, SampleRequest(tokens, 1, np.zeros(2, np.uint32), options))
    return scheduler


def test_canceled_prompt_is_read_to_its_end_and_never_decoded():
    scheduler = _host_scheduler()
    (shard,) = scheduler.shards
    prefilled, decoded = [], []

    def dispatch() -> None:
        scheduler.dispatch(
            lambda tasks: prefilled.extend((a.ticket, n) for a, n in tasks[0]),
            lambda lane: decoded.extend(s.admitted.ticket for s in shard.lanes[lane].running),
        )

    dispatch()
    # The first block of the second prompt fills the row that the first prompt leaves.
    assert prefilled == [(0, 0), (0, 1), (0, 2), (1, 0)] and decoded == [0]
    scheduler.cancel(1)
    dispatch()
    assert shard.pool.size - shard.pool.available == 3 + 3  # the second is half read
    shard.finish(shard.lanes[0], next(iter(shard.lanes[0].running)))
    dispatch()
    assert prefilled[4:] == [(1, 1), (1, 2)] and set(decoded) == {0}
    assert not scheduler.unfinished and shard.pool.available == shard.pool.size


# ------------------------------------------------------------------------------------------ Answers


def test_progress_has_the_tokens_of_each_call(sampler):
    open_session = sampler.start_session(tiny.weights())
    progress = open_session.progress(open_session.submit(request(0, 2)))
    pieces, lengths, samples = [[], []], [], []
    while open_session.unfinished:
        samples += open_session.advance()
        lengths.append(progress.answers[0].length)
        for answer, answer_pieces in zip(progress.answers, pieces, strict=True):
            read = sum(len(ids) for ids, _ in answer_pieces)
            answer_pieces.append(answer.tokens_from(read))
    assert lengths == [0, 4, 8, 12]
    ((_, finished),) = samples
    for sample, answer_pieces in zip(finished, pieces, strict=True):
        ids, logprobs = (np.concatenate(parts) for parts in zip(*answer_pieces, strict=True))
        np.testing.assert_array_equal(ids, sample.tokens)
        np.testing.assert_array_equal(logprobs, sample.logprobs)


def test_tokens_from_the_middle_of_a_call():
    answer = Answer(bits=[np.arange(12, dtype=np.int32).reshape(4, 3) for _ in range(3)])
    for first in range(10):
        assert answer.tokens_from(first)[0].tolist() == (3 * [0, 1, 2])[first:]


def test_stop_ids_of_a_request_end_its_answers(sampler):
    (plain,) = alone(sampler, request(0))
    stop_id = int(plain.tokens[5])
    first = plain.tokens.tolist().index(stop_id)
    for config in (CONFIG, dataclasses.replace(CONFIG, decode_tokens=12)):
        config_sampler = Sampler(tiny.POLICY, config, (), sampler.mesh)
        (sample,) = alone(config_sampler, request(0, stop_ids=(stop_id, 1000)))
        assert sample.stopped and not sample.stop_string
        assert sample.tokens.tolist() == plain.tokens[: first + 1].tolist()
        assert sample.content == plain.tokens[:first].tolist()
    (sample,) = alone(sampler, request(0, stop_ids=(1000,)))
    assert not sample.stopped and len(sample.tokens) == 12


def test_reused_tokens_are_counted_for_each_request(sampler):
    open_session = sampler.start_session(tiny.weights())
    for expected in (0, 20):  # whole blocks of 4, of a prompt of 21 tokens
        progress = open_session.progress(open_session.submit(request(0)))
        list(open_session.results())
        assert progress.reused_tokens == expected


# ------------------------------------------------------------------------------------------- Memory


def _items(root: object) -> int:
    """Count the items of all containers that a session holds, and of their containers."""
    seen_ids, stack, count = set(), [root], 0
    while stack:
        value = stack.pop()
        if id(value) in seen_ids:
            continue
        seen_ids.add(id(value))
        if isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set) or type(value).__name__ in ("deque", "Counter"):
            stack += list(value)
        elif type(value).__module__.startswith("spell_jax.sampler") and hasattr(value, "__dict__"):
            if not isinstance(value, Sampler):
                stack += list(vars(value).values())
            continue
        else:
            continue
        count += len(value)
    return count


def test_memory_of_a_session_does_not_grow_with_its_requests(sampler):
    open_session: Session = sampler.start_session(tiny.weights())
    rng, sizes = np.random.default_rng(1), []
    for _ in range(3):
        for _ in range(12):  # more prompts than the pool of 64 pages keeps
            prompt = rng.integers(3, 64, size=24).tolist()
            ticket = open_session.submit(SampleRequest(prompt, 2, KEYS[0], Options(max_tokens=4)))
            open_session.advance()
            if rng.random() < 0.3:
                open_session.cancel(ticket)
        list(open_session.results())
        sizes.append(_items(open_session))
    assert sizes[1] == sizes[2], sizes
