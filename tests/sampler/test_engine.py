"""Tests of the sampler against a loop that runs the whole model for every token."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from spell_jax.attention import attend
from spell_jax.data.samples import Sample
from spell_jax.learner import aggregation, packing
from spell_jax.learner.lm_head import score_tokens
from spell_jax.policy import transformer
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import programs, sampling
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.keys import request_keys
from spell_jax.sampler.requests import SampleRequest
from tests import tiny
from tests.paths import REFERENCE_CASES

RESPONSE_MASK = REFERENCE_CASES / "response_mask.json"
STOPS = (7, 11, 23)
CONFIG = SamplerConfig(
    temperature=0.7,
    top_p=0.9,
    max_tokens=10,
    max_prompt=16,
    page_size=4,
    kv_cache_tokens=512,
    slots=8,
    samples_per_prompt_batch=3,
    prefill_tokens=32,
    decode_tokens=4,
)
GROUP = 3
KEY = jax.random.key(42)
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(3, 64, size=length).tolist() for length in (5, 8, 1, 12, 16, 3, 9)]


@functools.cache
def _sampler(config: SamplerConfig = CONFIG, mesh: tuple[tuple[str, int], ...] = ()) -> Sampler:
    devices = None if mesh else jax.devices()[:1]
    return Sampler(tiny.POLICY, config, STOPS, meshes.make_mesh(dict(mesh) or {"fsdp": 1}, devices))


@functools.cache
def _samples() -> list[list[Sample]]:
    return _present(_sampler().sample(tiny.weights(), PROMPTS, GROUP, KEY))


def _present(answers: list[list[Sample] | None]) -> list[list[Sample]]:
    present = [answer for answer in answers if answer is not None]
    assert len(present) == len(answers)
    return present


def _assert_same(
    groups: list[list[Sample]], expected_groups: list[list[Sample]], atol: float
) -> None:
    for a_group, b_group in zip(groups, expected_groups, strict=True):
        for a, b in zip(a_group, b_group, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=atol)
            assert a.stopped == b.stopped


@functools.partial(jax.jit, static_argnames="temperature")
def _next(params, tokens, length, key, step, temperature: float) -> tuple[jax.Array, jax.Array]:
    logits = transformer.logits(tiny.POLICY, params, tokens[None])[0, length - 1]
    uniform = jax.random.uniform(jax.random.fold_in(key, step))
    filters = tiny.sampling(1, temperature, CONFIG.top_p)
    sampled = sampling.sample(logits[None], uniform[None], filters)
    return sampled.id[0], sampled.logprob[0]


def _one_by_one(prompt: list[int], request: int, sample_index: int, temperature: float) -> Sample:
    """Sample an answer without cache, siblings or batch: run the whole model for every token."""
    key = jax.random.fold_in(jax.random.fold_in(KEY, request), sample_index)
    tokens, logprobs = list(prompt), []
    while len(logprobs) < CONFIG.max_tokens:
        row = np.zeros(32, np.int32)
        row[: len(tokens)] = tokens
        step = len(logprobs)
        token, logprob = _next(tiny.weights(), row, len(tokens), key, step, temperature)
        tokens.append(int(token))
        logprobs.append(float(logprob))
        if tokens[-1] in STOPS:
            break
    answer = np.array(tokens[len(prompt) :], np.int32)
    return Sample(answer, np.array(logprobs, np.float32), tokens[-1] in STOPS)


def test_samples_equal_token_by_token_decoding_without_cache() -> None:
    """Sharing prompts changes nothing: every sample_index is sampled here on its own."""
    expected_groups = [
        [_one_by_one(prompt, i, g, CONFIG.temperature) for g in range(GROUP)]
        for i, prompt in enumerate(PROMPTS)
    ]
    _assert_same(_samples(), expected_groups, 1e-4)
    lengths = {len(sample.tokens) for group in expected_groups for sample in group}
    assert len(lengths) > 2, "the case should have answers of several lengths"


def test_greedy_samples_are_the_argmax_of_the_model() -> None:
    groups = _present(_sampler().sample(tiny.weights(), PROMPTS, 1, KEY, temperature=0.0))
    expected_groups = [[_one_by_one(prompt, i, 0, 0.0)] for i, prompt in enumerate(PROMPTS)]
    _assert_same(groups, expected_groups, 1e-4)


def test_samples_differ_within_and_across_requests() -> None:
    answers = [tuple(s.tokens.tolist()) for group in _samples() for s in group]
    assert len(set(answers)) > len(answers) / 2
    twice = _present(_sampler().sample(tiny.weights(), [PROMPTS[0]] * 7, GROUP, KEY))
    assert len({tuple(s.tokens.tolist()) for group in twice for s in group}) > 10


def test_logprobs_equal_those_of_the_learner() -> None:
    groups = [
        packing.TrainGroup(prompt, samples, [1.0] * GROUP, "")
        for prompt, samples in zip(PROMPTS, _samples(), strict=True)
    ]
    bucket = packing.Bucket(64, 48)
    parts, _ = packing.split_groups(groups, bucket)
    (batch,) = packing.pack(parts, aggregation.weigh(groups), [bucket], 256)
    batch = jax.tree.map(jnp.asarray, batch)

    @jax.jit
    def score(params):
        hidden, *_ = transformer.hidden_states(
            tiny.POLICY,
            params,
            batch.tokens,
            batch.positions,
            attend.packed(),
            context={"last_query": batch.last_query},
        )
        return score_tokens(
            tiny.POLICY, params, hidden, batch.source, batch.target, CONFIG.temperature
        )[0]

    real = np.asarray(batch.weight) > 0
    assert real.sum() == sum(len(s.tokens) for group in _samples() for s in group)
    learner_logprobs = np.asarray(score(tiny.weights()))
    np.testing.assert_allclose(
        learner_logprobs[real], np.asarray(batch.old_logprob)[real], atol=1e-4
    )


# ------------------------------------------------------------------------------------ Independence


def test_neighboring_requests_do_not_change_samples() -> None:
    other_prompts = [RNG.integers(3, 64, size=len(p) % 16 + 1).tolist() for p in PROMPTS]
    mixed = [p if i in (1, 4) else other_prompts[i] for i, p in enumerate(PROMPTS)]
    groups = _present(_sampler().sample(tiny.weights(), [*mixed, *other_prompts], GROUP, KEY))
    _assert_same([groups[1], groups[4]], [_samples()[1], _samples()[4]], 1e-5)
    assert not np.array_equal(groups[0][0].tokens, _samples()[0][0].tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"page_size": 8, "samples_per_prompt_batch": 1, "slots": 32, "decode_tokens": 16},
        # The longest prompt and the longest answer just fit into the pool.
        {
            **{"kv_cache_tokens": 28, "prefill_tokens": 4, "slots": 3},
            **{"samples_per_prompt_batch": 2, "decode_tokens": 1},
        },
    ],
    ids=str,
)
def test_compiled_shapes_do_not_change_samples(sizes: dict[str, int]) -> None:
    config = dataclasses.replace(CONFIG, **sizes)
    groups = _present(_sampler(config).sample(tiny.weights(), PROMPTS, GROUP, KEY))
    _assert_same(groups, _samples(), 1e-5)


def test_samples_are_bit_identical_in_any_order_of_requests() -> None:
    """Answers do not depend on slots, neighbors or the time of submission.

    This holds within one compiled shape.
    """
    keys = request_keys(KEY, len(PROMPTS))
    options = CONFIG.options(CONFIG.max_tokens)
    requests = [SampleRequest(p, GROUP, k, options) for p, k in zip(PROMPTS, keys, strict=True)]
    for seed in range(3):
        rng, session = np.random.default_rng(seed), _sampler().start_session(tiny.weights())
        order = rng.permutation(len(requests)).tolist()
        first, later = order[: seed + 2], order[seed + 2 :]
        tickets = {session.submit(requests[i]): i for i in first}
        request_samples: dict[int, list[Sample]] = {}
        for ticket, samples in session.results():
            request_samples[tickets[ticket]] = samples
            if later:
                i = later.pop(0)
                tickets[session.submit(requests[i])] = i
        for i, samples in request_samples.items():
            for a, b in zip(samples, _samples()[i], strict=True):
                np.testing.assert_array_equal(a.tokens, b.tokens)
                np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert len(request_samples) == len(requests)


def test_smaller_group_and_token_limit_give_a_prefix() -> None:
    groups = _present(_sampler().sample(tiny.weights(), PROMPTS, 1, KEY, max_tokens=4))
    for (short,), (long, *_) in zip(groups, _samples(), strict=True):
        np.testing.assert_array_equal(short.tokens, long.tokens[:4])
        np.testing.assert_allclose(short.logprobs, long.logprobs[:4], atol=1e-5)
        assert short.stopped == (long.stopped and len(long.tokens) <= 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        (("data", 2), ("fsdp", 2), ("tensor", 2)),
        (("context", 2), ("fsdp", 2), ("tensor", 2)),
    ],
    ids=lambda mesh: " ".join(f"{axis}={size}" for axis, size in mesh),
)
def test_samples_on_eight_devices_equal_one_device(mesh: tuple[tuple[str, int], ...]) -> None:
    sampler = _sampler(dataclasses.replace(CONFIG, page_size=8), mesh)
    shapes, axes = transformer.abstract_params(tiny.POLICY)
    params = jax.device_put(tiny.weights(), meshes.shardings(sampler.mesh, axes, shapes))
    groups = _present(sampler.sample(params, PROMPTS, GROUP, KEY))
    _assert_same(groups, _samples(), 1e-4)


# --------------------------------------------------------------------------------- Stops and caps


def test_answers_end_at_a_stop_token_or_at_max_tokens() -> None:
    kinds = set()
    for sample in (s for group in _samples() for s in group):
        assert len(sample.tokens) == len(sample.logprobs) <= CONFIG.max_tokens
        assert not set(sample.tokens[:-1].tolist()) & set(STOPS)
        assert sample.stopped == (int(sample.tokens[-1]) in STOPS)
        assert sample.stopped or len(sample.tokens) == CONFIG.max_tokens
        kinds.add(sample.stopped)
    assert kinds == {True, False}


@pytest.mark.slow
def test_decoding_stops_after_the_last_answer() -> None:
    """The loop runs once, not up to max_tokens, if every answer stops at its first token."""
    (stop,), *_ = _present(_sampler().sample(tiny.weights(), PROMPTS[:1], 1, KEY, max_tokens=1))
    sampler = Sampler(tiny.POLICY, CONFIG, stop.tokens.tolist(), _sampler().mesh)
    for group, prompts, steps in ((1, PROMPTS[:1], 1), (1, PROMPTS[1:2], 4)):
        session = sampler.start_session(tiny.weights())
        session.sample(prompts, group, KEY, CONFIG.options(4))
        assert session.counts.decode_steps == steps


@pytest.mark.slow
@pytest.mark.parametrize("stops", [[2], [1, 2], [0]], ids=str)
def test_answer_ends_after_its_first_stop_token(stops, monkeypatch) -> None:
    """response_mask.json: that token is kept, everything after it is masked.

    All cases with the same stop tokens run at once, padded with token 9.
    """
    cases = [
        (ids, mask)
        for case in json.loads(RESPONSE_MASK.read_text())["cases"]
        if np.ravel(case["in"]["eos"]).tolist() == stops
        for ids, mask in zip(case["in"]["ids"], case["out"], strict=True)
    ]
    rows, longest = len(cases), max(len(ids) for ids, _ in cases)
    script = np.array([ids + [9] * (longest - len(ids)) for ids, _ in cases])
    column = iter(range(longest))

    def scripted(logits, *_):
        shape = jax.ShapeDtypeStruct((len(logits),), jnp.int32)
        tokens = io_callback(lambda: script[:, next(column)].astype(np.int32), shape)
        return sampling.SampledToken(tokens, *[jnp.zeros(tokens.shape)] * 3)

    monkeypatch.setattr(programs, "sample", scripted)
    sizes = {
        "slots": rows,
        "samples_per_prompt_batch": 1,
        "decode_tokens": longest,
        "max_tokens": longest,
    }
    config = dataclasses.replace(CONFIG, **sizes)
    sampler = Sampler(tiny.POLICY, config, stops, _sampler().mesh)
    groups = _present(sampler.sample(tiny.weights(), [[2]] * rows, 1, KEY))
    for (sample,), row, (_, mask) in zip(groups, script, cases, strict=True):
        np.testing.assert_array_equal(np.arange(len(mask)) < len(sample.tokens), mask)
        np.testing.assert_array_equal(sample.tokens, row[: len(sample.tokens)])


def test_overlong_prompts_give_none_and_others_are_answered() -> None:
    prompts = [*PROMPTS[:3], [5] * 17, *PROMPTS[4:]]
    groups = _sampler().sample(tiny.weights(), prompts, GROUP, KEY)
    assert groups[3] is None
    answered_groups = [group for group in groups if group is not None]
    _assert_same(answered_groups, [group for i, group in enumerate(_samples()) if i != 3], 1e-5)
    assert _sampler().sample(tiny.weights(), [[5] * 17], GROUP, KEY) == [None]
    assert _sampler().sample(tiny.weights(), [], GROUP, KEY) == []


# ---------------------------------------------------------------------------------------- Mistakes


def test_invalid_requests_are_rejected() -> None:
    with pytest.raises(ValueError, match="request 1: the prompt is empty"):
        _sampler().sample(tiny.weights(), [[5], []], GROUP, KEY)
    with pytest.raises(ValueError, match="group = 0: must be at least 1"):
        _sampler().sample(tiny.weights(), PROMPTS, 0, KEY)
    with pytest.raises(ValueError, match="max_tokens = 0: must be at least 1"):
        _sampler().sample(tiny.weights(), PROMPTS, GROUP, KEY, max_tokens=0)


def test_non_finite_weights_raise() -> None:
    params = {**tiny.weights(), "embedding": np.full((64, 32), np.nan, np.float32)}
    with pytest.raises(FloatingPointError, match="request 0: the policy's logits are not finite"):
        _sampler().sample(params, PROMPTS, GROUP, KEY)


@pytest.mark.slow
def test_error_names_the_request_with_non_finite_logprobs() -> None:
    """A token with a NaN embedding affects only the prompt that contains it."""
    table = tiny.weights()["embedding"].copy()
    table[63] = np.nan
    params = {**tiny.weights(), "embedding": table, "unembedding": tiny.weights()["embedding"]}
    policy = dataclasses.replace(tiny.POLICY, tied_embeddings=False)
    sampler = Sampler(policy, CONFIG, STOPS, _sampler().mesh)
    prompts = [[5, 6], [7, 8, 9], [5, 63, 4], [8]]
    with pytest.raises(FloatingPointError, match="request 2: the policy's logits are not finite"):
        sampler.sample(params, prompts, 1, KEY, max_tokens=3, top_k=1)


# ------------------------------------------------------------------------------------- Compilation


@pytest.mark.slow
def test_one_program_is_compiled_per_decode_shape() -> None:
    sampler = _sampler()
    for seed, count in enumerate((7, 2, 5, 9)):
        prompts = (PROMPTS * 2)[seed : seed + count]
        for group in (GROUP, 1, 5):
            sampler.sample(tiny.weights(), prompts, group, jax.random.key(seed))
    assert sampler.prefill._cache_size() == 1
    assert sampler.decode._cache_size() == 2  # for one answer, and for several
