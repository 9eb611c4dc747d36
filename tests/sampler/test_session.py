"""Tests of sessions: options per request, shared prefixes, full pools, stop strings, limits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.data.samples import Sample
from spell_jax.policy import transformer
from spell_jax.policy.tokenizer_base import Stream
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import session
from spell_jax.sampler.answers import Answer
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.requests import Options, SampleRequest
from tests import tiny

CONFIG = SamplerConfig(
    max_tokens=12,
    max_prompt=32,
    page_size=4,
    kv_cache_tokens=1024,
    slots=8,
    samples_per_prompt_batch=4,
    prefill_tokens=32,
    decode_tokens=4,
)
KEY = jax.random.key(7)
RNG = np.random.default_rng(11)
BEGINNING = RNG.integers(3, 64, size=21).tolist()
PROMPTS = [BEGINNING + RNG.integers(3, 64, size=n).tolist() for n in (1, 3, 7, 11)]
OPTIONS = [
    Options(temperature=0.7, top_p=0.9, max_tokens=12),
    Options(temperature=0.0, max_tokens=5),
    Options(temperature=1.3, top_k=4, max_tokens=9),
    Options(temperature=1.0, min_p=0.2, max_tokens=12),
]


class Letters:
    """A tokenizer with the letter n of the alphabet, twice, as token n."""

    def decode(self, ids) -> str:
        return "".join(2 * chr(97 + i % 26) for i in ids)

    def shows(self, token_id: int) -> bool:
        return True

    def waits(self, token_id: int) -> bool:
        return False

    def stream(self) -> Stream:
        return Stream(self)  # type: ignore[arg-type]


@functools.cache
def _sampler(config: SamplerConfig = CONFIG, has_dropout: bool = False) -> Sampler:
    mesh = meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])
    return Sampler(tiny.POLICY, config, (), mesh, Letters().stream, has_dropout=has_dropout)


def _requests(groups=(4, 1, 3, 6)) -> list[SampleRequest]:
    keys = session.request_keys(KEY, len(PROMPTS))
    return [SampleRequest(*fields) for fields in zip(PROMPTS, groups, keys, OPTIONS, strict=True)]


def _answer(sampler_session: session.Session, requests: list[SampleRequest]) -> list[list[Sample]]:
    places = {sampler_session.submit(request): index for index, request in enumerate(requests)}
    groups: list[list[Sample]] = [[] for _ in requests]
    for ticket, samples in sampler_session.results():
        groups[places[ticket]] = samples
    return groups


def _alone(request: SampleRequest, config: SamplerConfig = CONFIG) -> list[Sample]:
    return _answer(_sampler(config).start_session(tiny.weights()), [request])[0]


def _assert_identical(samples: list[Sample], expected_samples: list[Sample]) -> None:
    for a, b in zip(samples, expected_samples, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert (a.stopped, a.stop_string) == (b.stopped, b.stop_string)


@pytest.mark.slow
def test_mixed_options_are_bit_identical_to_separate_requests() -> None:
    requests = _requests()
    groups = _answer(_sampler().start_session(tiny.weights()), requests)
    for request, samples in zip(requests, groups, strict=True):
        _assert_identical(samples, _alone(request))
        assert {len(s.tokens) for s in samples} == {request.options.max_tokens}


@pytest.mark.slow
def test_each_request_is_sampled_with_its_own_options() -> None:
    """Compare rank and probability share of all sampled tokens with each request's options."""
    groups = _answer(_sampler().start_session(tiny.weights()), _requests((8, 8, 8, 8)))
    ranks, shares = [], []
    for prompt, options, samples in zip(PROMPTS, OPTIONS, groups, strict=True):
        rows = np.zeros((len(samples), 48), np.int32)
        for row, sample in zip(rows, samples, strict=True):
            row[: len(prompt) + len(sample.tokens)] = [*prompt, *sample.tokens]
        behind = np.arange(options.max_tokens) + len(prompt)
        logits = np.asarray(transformer.logits(tiny.POLICY, tiny.weights(), rows))[:, behind - 1]
        sampled = np.take_along_axis(logits, rows[:, behind, None], axis=-1)
        ranks.append(int(np.sum(logits > sampled, axis=-1).max()))
        below = (sampled[..., 0] - logits.max(axis=-1)) / (options.temperature or 1.0)
        shares.append(float(np.exp(below).min()))
    assert ranks[1] == 0 and 1 <= ranks[2] <= 3 and 0.2 <= shares[3] < 0.6
    assert ranks[0] > 3 and ranks[3] > 3 and shares[0] < 0.2


@pytest.mark.slow
def test_vocabulary_dropout_leaves_other_requests_alone() -> None:
    """Requests without it are as without the sampler's option, and logprobs are the policy's."""
    requests = _requests()
    options = dataclasses.replace(OPTIONS[0], dropout=0.5, dropout_penalty=20.0)
    changed_request = dataclasses.replace(requests[0], options=options)
    with pytest.raises(ValueError, match=r"request 0: dropout = 0\.5: needs a sampler with"):
        _sampler().start_session(tiny.weights()).submit(changed_request)
    groups = _answer(
        _sampler(has_dropout=True).start_session(tiny.weights()), [changed_request, *requests[1:]]
    )
    for request, samples in zip(requests[1:], groups[1:], strict=True):
        for sample, expected_sample in zip(samples, _alone(request), strict=True):
            np.testing.assert_array_equal(sample.tokens, expected_sample.tokens)
            np.testing.assert_allclose(sample.logprobs, expected_sample.logprobs, atol=1e-5)
    plain = _alone(requests[0])
    assert any(
        a.tokens.tolist() != b.tokens.tolist() for a, b in zip(groups[0], plain, strict=True)
    )
    row = np.zeros((1, 48), np.int32)
    row[0, : len(PROMPTS[0]) + 12] = [*PROMPTS[0], *groups[0][0].tokens]
    params = jax.tree.map(jnp.asarray, tiny.weights())
    logits = transformer.logits(tiny.POLICY, params, row)[0] / options.temperature
    behind = np.arange(12) + len(PROMPTS[0])
    logprobs = jax.nn.log_softmax(logits, axis=-1)[behind - 1, groups[0][0].tokens]
    np.testing.assert_allclose(groups[0][0].logprobs, logprobs, atol=1e-4)


@pytest.mark.slow
def test_shared_prefixes_are_prefilled_once_and_bit_identical() -> None:
    """The content of a page does not depend on the request that prefilled it."""
    requests, sampler_session = _requests(), _sampler().start_session(tiny.weights())
    groups = _answer(sampler_session, requests)
    # Five whole pages, shared by all requests but the first.
    assert sampler_session.reused_tokens == 3 * 20
    repeated_groups = _answer(sampler_session, requests)  # the pages of all prompts are idle by now
    assert sampler_session.reused_tokens == 3 * 20 + sum((len(p) - 1) // 4 * 4 for p in PROMPTS)
    for request, *sample_lists in zip(requests, groups, repeated_groups, strict=True):
        for samples in sample_lists:
            _assert_identical(samples, _alone(request))


def test_no_page_of_a_prefix_survives_an_update_of_the_weights() -> None:
    """A session has fixed weights. The next one, with new weights, reads every prompt again."""
    requests, new = _requests(), tiny.weights(seed=1)
    before = _sampler().start_session(tiny.weights())
    old = _answer(before, requests)
    after = _sampler().start_session(new)
    groups = _answer(after, requests)
    assert after.reused_tokens == before.reused_tokens
    fresh_sampler = Sampler(tiny.POLICY, CONFIG, (), _sampler().mesh, Letters().stream)
    for samples, expected_samples in zip(
        groups, _answer(fresh_sampler.start_session(new), requests), strict=True
    ):
        _assert_identical(samples, expected_samples)
    assert any((a.tokens != b.tokens).any() for a, b in zip(groups[0], old[0], strict=True))


@pytest.mark.slow
def test_pool_with_room_for_one_answer_gives_the_same_answers() -> None:
    small = dataclasses.replace(CONFIG, kv_cache_tokens=CONFIG.longest)
    requests, sampler_session = _requests(), _sampler(small).start_session(tiny.weights())
    for request, samples in zip(requests, _answer(sampler_session, requests), strict=True):
        for a, b in zip(samples, _alone(request), strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@pytest.mark.slow
def test_straggler_does_not_hold_its_neighbors_slots() -> None:
    options = [Options(max_tokens=12), *[Options(max_tokens=2)] * 11]
    keys = session.request_keys(KEY, 12)
    requests = [SampleRequest([5, 6, n], 1, keys[n], options[n]) for n in range(12)]
    config = dataclasses.replace(CONFIG, slots=2)
    sampler_session = _sampler(config).start_session(tiny.weights())
    _answer(sampler_session, requests)
    # Two slots: one samples 12 tokens, the other 22 for eleven requests in turn.
    assert sampler_session.counts.tokens == 12 + 22 and sampler_session.counts.decode_steps <= 26
    assert sampler_session.counts.starved_slot_steps <= 0.05 * sampler_session.counts.slot_steps


@pytest.mark.parametrize(("requests", "passes"), [(5, 3), (4, 8)])
def test_call_returns_before_idle_slots_lose_half_a_pass(requests: int, passes: int) -> None:
    """One of four slots ends after 2 tokens: it is idle in pass 3, and would be again in pass 4.

    Without a fifth request, the call goes on to its cap of 8.
    """
    keys = session.request_keys(KEY, requests)
    config = dataclasses.replace(CONFIG, slots=4, decode_tokens=8)
    sampler_session = _sampler(config).start_session(tiny.weights())
    for number in range(requests):
        options = Options(max_tokens=12 if number else 2)
        sampler_session.submit(SampleRequest([5, 6, number], 1, keys[number], options))
    sampler_session.advance()
    sampler_session.advance()
    assert (sampler_session.counts.decode_calls, sampler_session.counts.decode_steps) == (1, passes)


def test_empty_cells_and_slots_are_counted_separately() -> None:
    sampler_session = _sampler().start_session(tiny.weights())
    _answer(sampler_session, [_requests((3, 1, 3, 3))[2]])  # three siblings in a row of four cells
    counts = sampler_session.counts
    assert counts.decode_steps == 9 and counts.tokens == 27 and counts.starved_slot_steps == 0
    assert (counts.slot_steps, counts.group_slot_steps, counts.padded_group_slots) == (72, 36, 9)


# ------------------------------------------------------------------------------------ Stop strings


@pytest.mark.slow
def test_stop_string_across_tokens_ends_the_answer() -> None:
    """The string spans two tokens. Tokens sampled after it are dropped, for any call length."""
    (request,) = _requests()[:1]
    plain = _alone(request)
    text = Letters().decode(plain[0].tokens[:9].tolist())
    string = text[13:16]  # from the middle of token 6 to the end of token 7
    first = next(n for n in range(1, 10) if string in text[: 2 * n])
    options = dataclasses.replace(request.options, stop_strings=("never there", string))
    for config in (CONFIG, dataclasses.replace(CONFIG, decode_tokens=12)):
        samples = _alone(dataclasses.replace(request, options=options), config)
        assert samples[0].stopped and samples[0].stop_string == string
        np.testing.assert_array_equal(samples[0].tokens, plain[0].tokens[:first])
        np.testing.assert_allclose(samples[0].logprobs, plain[0].logprobs[:first], atol=1e-6)
        assert samples[0].content == samples[0].tokens.tolist()
        assert samples[0].text(Letters().decode) == text[: text.index(string)]
        other_samples = [s for s in samples[1:] if string not in Letters().decode(s.tokens)]
        assert all(not s.stopped and len(s.tokens) == 12 for s in other_samples)


def test_earliest_of_several_stop_strings_ends_the_answer() -> None:
    stream = Letters().stream()
    answer = Answer(stream=stream)
    assert answer.decode_ids(stream, (0, 1, 2), ("cc", "bb", "ab")) == 2
    assert answer.stop_string == "ab" and answer.stopped


# ------------------------------------------------------------------------------------------ Limits


def test_unanswerable_requests_are_rejected_at_submission() -> None:
    sampler_session = _sampler().start_session(tiny.weights())
    key = session.request_keys(KEY, 1)[0]
    with pytest.raises(ValueError, match="a prompt of 33 tokens is over the cap of 32"):
        sampler_session.submit(SampleRequest([5] * 33, 1, key, OPTIONS[0]))
    with pytest.raises(ValueError, match="max_tokens = 13 is over the cap of 12"):
        sampler_session.submit(SampleRequest([5], 1, key, Options(max_tokens=13)))
    mesh = _sampler().mesh
    blind = Sampler(tiny.POLICY, CONFIG, (), mesh).start_session(tiny.weights())
    with pytest.raises(ValueError, match="stop strings need a sampler with a tokenizer"):
        blind.submit(SampleRequest([5], 1, key, Options(max_tokens=3, stop_strings=("a",))))
    assert sampler_session.submit(SampleRequest([5], 1, key, OPTIONS[0])) == 0  # nothing was kept


def test_too_small_pool_is_rejected_by_the_constructor() -> None:
    with pytest.raises(ValueError, match=r"sampler\.kv_cache_tokens = 40: a prompt of 32 tokens"):
        Sampler(tiny.POLICY, dataclasses.replace(CONFIG, kv_cache_tokens=40), (), _sampler().mesh)


def test_overlong_prompts_are_logged_with_lengths_and_limit(caplog) -> None:
    prompts = [[5] * 33, [5] * 3, [6] * 40]
    answers = _sampler().sample(tiny.weights(), prompts, 1, KEY, max_tokens=2)
    assert [answer is None for answer in answers] == [True, False, True]
    assert "[33, 40] tokens are over the cap of 32" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, r"temperature = -1\.0: must be at least 0"),
        ({"temperature": float("nan")}, r"temperature = nan: must be at least 0"),
        ({"top_p": 0.0}, r"top_p = 0\.0: must be in \(0, 1\]"),
        ({"top_k": -1}, r"top_k = -1: must be at least 0"),
        ({"min_p": 1.1}, r"min_p = 1\.1: must be in \[0, 1\]"),
        ({"max_tokens": 0}, r"max_tokens = 0: must be at least 1"),
        ({"stop_strings": ("",)}, "none may be empty"),
    ],
)
def test_options_out_of_range_are_rejected(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**fields)


@pytest.fixture
def seconds(monkeypatch) -> list[float]:
    """Replace the clock: each fetch from the device advances the returned time by one second."""
    now, fetch = [0.0], jax.device_get

    def fetch_slowly(arrays):
        now[0] += 1.0
        return fetch(arrays)

    monkeypatch.setattr(session.jax, "device_get", fetch_slowly)
    monkeypatch.setattr(session.time, "monotonic", lambda: now[0])
    return now


def test_device_wait_is_divided_among_agents(seconds):
    sampler_session = _sampler().start_session(tiny.weights())
    agents = ("questioner", "responder", "responder", "verifier")
    requests = [
        dataclasses.replace(request, agent=agent)
        for request, agent in zip(_requests(), agents, strict=True)
    ]
    answers = _answer(sampler_session, requests)
    counts = sampler_session.counts
    assert counts.prefilled_tokens == counts.prompt_tokens - sampler_session.reused_tokens > 0
    assert sampler_session.reused_tokens > 0
    assert counts.device_wait_seconds.keys() == set(agents)
    assert sum(counts.device_wait_seconds.values()) == pytest.approx(seconds[0])
    assert seconds[0] == counts.decode_calls
    # A single agent has all of the wait.
    single_session = _sampler().start_session(tiny.weights())
    _answer(single_session, [requests[3]])
    assert single_session.counts.device_wait_seconds == {
        "verifier": pytest.approx(single_session.counts.decode_calls)
    }
    assert single_session.counts.prefilled_tokens == len(requests[3].prompt)
    assert len(answers[3]) == 6


def test_device_wait_is_divided_in_proportion_to_tokens(seconds):
    """The first call prefills both prompts and samples four tokens of each, the second serves b."""
    sampler_session = _sampler().start_session(tiny.weights())
    key = np.zeros(2, np.uint32)
    for prompt, tokens, agent in (([5] * 10, 4, "a"), ([6] * 30, 8, "b")):
        options = Options(temperature=0.0, max_tokens=tokens)
        sampler_session.submit(SampleRequest(prompt, 1, key, options, agent))
    list(sampler_session.results())
    assert seconds == [2.0]
    assert sampler_session.counts.device_wait_seconds == pytest.approx(
        {"a": 14 / 48, "b": 34 / 48 + 1}
    )
