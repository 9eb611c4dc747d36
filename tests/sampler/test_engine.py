"""The sampler against a loop that runs the whole model for every token."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from spell_jax.attention import attend
from spell_jax.learner import packing
from spell_jax.learner.loss import score_tokens
from spell_jax.policy import transformer
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import decode, nucleus
from spell_jax.sampler.engine import Sample, Sampler, SamplerConfig
from tests import tiny

RESPONSE_MASK = pathlib.Path(__file__).parents[1] / "reference_cases" / "response_mask.json"
STOPS = (7, 11, 23)
CONFIG = SamplerConfig(
    temperature=0.7,
    top_p=0.9,
    prompt_buckets=(8, 16),
    token_budget=64,
    max_streams=24,
    max_tokens=10,
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


def _assert_same(found: list[list[Sample]], wanted: list[list[Sample]], atol: float) -> None:
    for a_group, b_group in zip(found, wanted, strict=True):
        for a, b in zip(a_group, b_group, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.log_probs, b.log_probs, atol=atol)
            assert a.stopped == b.stopped


@functools.partial(jax.jit, static_argnames="temperature")
def _next(params, tokens, length, key, step, temperature: float) -> tuple[jax.Array, jax.Array]:
    logits = transformer.logits(tiny.POLICY, params, tokens[None])[0, length - 1]
    uniform = jax.random.uniform(jax.random.fold_in(key, step))
    return nucleus.draw(logits, uniform, temperature, CONFIG.top_p)


def _one_by_one(prompt: list[int], request: int, sibling: int, temperature: float) -> Sample:
    """The answer without cache, siblings or batch: the whole model again for every token."""
    key = jax.random.fold_in(jax.random.fold_in(KEY, request), sibling)
    tokens, log_probs = list(prompt), []
    while len(log_probs) < CONFIG.max_tokens:
        row = np.zeros(32, np.int32)
        row[: len(tokens)] = tokens
        step = len(log_probs)
        token, log_prob = _next(tiny.weights(), row, len(tokens), key, step, temperature)
        tokens.append(int(token))
        log_probs.append(float(log_prob))
        if tokens[-1] in STOPS:
            break
    answer = np.array(tokens[len(prompt) :], np.int32)
    return Sample(answer, np.array(log_probs, np.float32), tokens[-1] in STOPS)


def test_equals_one_token_at_a_time_without_cache() -> None:
    """Shared prompts change nothing: every sibling is sampled here on its own."""
    wanted = [
        [_one_by_one(prompt, i, g, CONFIG.temperature) for g in range(GROUP)]
        for i, prompt in enumerate(PROMPTS)
    ]
    _assert_same(_samples(), wanted, 1e-4)
    lengths = {len(sample.tokens) for group in wanted for sample in group}
    assert len(lengths) > 2, "the case should have answers of several lengths"


def test_greedy_is_the_argmax_of_the_model() -> None:
    found = _present(_sampler().sample(tiny.weights(), PROMPTS, 1, KEY, temperature=0.0))
    wanted = [[_one_by_one(prompt, i, 0, 0.0)] for i, prompt in enumerate(PROMPTS)]
    _assert_same(found, wanted, 1e-4)


def test_siblings_and_requests_differ() -> None:
    answers = [tuple(s.tokens.tolist()) for group in _samples() for s in group]
    assert len(set(answers)) > len(answers) / 2
    twice = _present(_sampler().sample(tiny.weights(), [PROMPTS[0]] * 7, GROUP, KEY))
    assert len({tuple(s.tokens.tolist()) for group in twice for s in group}) > 10


def test_log_probs_equal_the_learners() -> None:
    groups = [
        packing.Group(
            prompt, [s.tokens for s in group], [1.0] * GROUP, "", [s.log_probs for s in group]
        )
        for prompt, group in zip(PROMPTS, _samples(), strict=True)
    ]
    (batch,) = packing.pack(packing.weigh(groups), [packing.Bucket(64, 48)], 256)

    @jax.jit
    def score(params):
        hidden, *_ = transformer.hidden_states(
            tiny.POLICY,
            params,
            batch.tokens,
            batch.positions,
            attend.packed(),
            context={"last_reader": batch.last_reader},
        )
        return score_tokens(
            tiny.POLICY, params, hidden, batch.source, batch.target, CONFIG.temperature
        )[0]

    real = np.asarray(batch.weight) > 0
    assert real.sum() == sum(len(s.tokens) for group in _samples() for s in group)
    found = np.asarray(score(tiny.weights()))
    np.testing.assert_allclose(found[real], np.asarray(batch.old_log_prob)[real], atol=1e-4)


# ------------------------------------------------------------------------------------ Independence


def test_neighbours_change_nothing() -> None:
    others = [RNG.integers(3, 64, size=len(p) % 16 + 1).tolist() for p in PROMPTS]
    mixed = [p if i in (1, 4) else others[i] for i, p in enumerate(PROMPTS)]
    found = _present(_sampler().sample(tiny.weights(), [*mixed, *others], GROUP, KEY))
    _assert_same([found[1], found[4]], [_samples()[1], _samples()[4]], 1e-5)
    assert not np.array_equal(found[0][0].tokens, _samples()[0][0].tokens)


def test_compiled_shapes_change_nothing() -> None:
    config = SamplerConfig(**{**vars(CONFIG), "prompt_buckets": (20,), "token_budget": 20})
    assert _sampler(config).rows(20, GROUP) == 1
    found = _present(_sampler(config).sample(tiny.weights(), PROMPTS, GROUP, KEY))
    _assert_same(found, _samples(), 1e-5)


def test_fewer_siblings_and_tokens_are_the_beginning_of_more() -> None:
    found = _present(_sampler().sample(tiny.weights(), PROMPTS, 1, KEY, max_tokens=4))
    for (short,), (long, *_) in zip(found, _samples(), strict=True):
        np.testing.assert_array_equal(short.tokens, long.tokens[:4])
        np.testing.assert_allclose(short.log_probs, long.log_probs[:4], atol=1e-5)
        assert short.stopped == (long.stopped and len(long.tokens) <= 4)


@pytest.mark.parametrize(
    "mesh",
    [
        (("data", 2), ("fsdp", 2), ("tensor", 2)),
        (("fsdp", 8),),
        (("context", 2), ("fsdp", 2), ("tensor", 2)),
    ],
    ids=lambda mesh: " ".join(f"{axis}={size}" for axis, size in mesh),
)
def test_eight_devices_equal_one(mesh: tuple[tuple[str, int], ...]) -> None:
    sampler = _sampler(SamplerConfig(**{**vars(CONFIG), "prompt_buckets": (16,)}), mesh)
    shapes, axes = transformer.abstract_params(tiny.POLICY)
    params = jax.device_put(tiny.weights(), meshes.shardings(sampler.mesh, axes, shapes))
    found = _present(sampler.sample(params, PROMPTS, GROUP, KEY))
    _assert_same(found, _samples(), 1e-4)


# --------------------------------------------------------------------------------- Stops and caps


def test_answers_end_at_a_stop_token_or_at_the_cap() -> None:
    kinds = set()
    for sample in (s for group in _samples() for s in group):
        assert len(sample.tokens) == len(sample.log_probs) <= CONFIG.max_tokens
        assert not set(sample.tokens[:-1].tolist()) & set(STOPS)
        assert sample.stopped == (int(sample.tokens[-1]) in STOPS)
        assert sample.stopped or len(sample.tokens) == CONFIG.max_tokens
        kinds.add(sample.stopped)
    assert kinds == {True, False}


def test_decoding_ends_with_the_last_answer(monkeypatch) -> None:
    """The loop runs once where every answer stops at once, not to the cap."""
    steps = []
    real = nucleus.draw

    def counted(*args):
        jax.debug.callback(lambda: steps.append(1))
        return real(*args)

    monkeypatch.setattr(nucleus, "draw", counted)
    options = {"group": 2, "max_tokens": 5, "temperature": 0.0, "top_p": 1.0}
    run = jax.jit(functools.partial(decode.decode, tiny.POLICY, stop_ids=(9,), **options))
    shape = (tiny.POLICY.layers, 1, 2, tiny.POLICY.kv_heads, tiny.POLICY.head_size)
    prompt, lengths, requests = (jnp.zeros(shape),) * 2, jnp.array([2]), jnp.array([0])
    for first, count in ((9, 1), (8, 5)):
        steps.clear()
        logits = jax.nn.one_hot(jnp.array([first]), tiny.POLICY.vocab_size)
        answers = run(tiny.weights(), prompt, logits, lengths, requests, KEY)
        jax.effects_barrier()
        assert len(steps) == count
        np.testing.assert_array_equal(answers.lengths, [[count, count]])
        np.testing.assert_array_equal(answers.tokens[..., 0], [[first, first]])


@pytest.mark.parametrize("case", json.loads(RESPONSE_MASK.read_text())["cases"])
def test_an_answer_ends_behind_its_first_stop_token(case, monkeypatch) -> None:
    """response_mask.json: that token is kept, everything after it is masked."""
    script, stops = np.array(case["in"]["ids"]), np.ravel(case["in"]["eos"])
    column = iter(range(script.shape[1]))

    def scripted(logits, *_):
        shape = jax.ShapeDtypeStruct(logits.shape[:-1], jnp.int32)
        tokens = io_callback(lambda: script[:, [next(column)]].astype(np.int32), shape)
        return tokens, jnp.zeros(tokens.shape)

    monkeypatch.setattr(nucleus, "draw", scripted)
    rows, longest = script.shape
    shape = (tiny.POLICY.layers, rows, 2, tiny.POLICY.kv_heads, tiny.POLICY.head_size)
    answers = decode.decode(
        tiny.POLICY,
        tiny.weights(),
        (jnp.zeros(shape),) * 2,
        jnp.zeros((rows, tiny.POLICY.vocab_size)),
        jnp.full(rows, 2),
        jnp.arange(rows),
        KEY,
        group=1,
        max_tokens=longest,
        stop_ids=tuple(int(stop) for stop in stops),
        temperature=1.0,
        top_p=1.0,
    )
    mask = np.arange(longest) < np.asarray(answers.lengths)
    np.testing.assert_array_equal(mask, case["out"])
    np.testing.assert_array_equal(answers.tokens[:, 0] * mask, script * mask)


def test_prompts_over_the_cap_give_none_and_the_rest_go_on() -> None:
    prompts = [*PROMPTS[:3], [5] * 17, *PROMPTS[4:]]
    found = _sampler().sample(tiny.weights(), prompts, GROUP, KEY)
    assert found[3] is None
    rest = [group for group in found if group is not None]
    _assert_same(rest, [group for i, group in enumerate(_samples()) if i != 3], 1e-5)
    assert _sampler().sample(tiny.weights(), [[5] * 17], GROUP, KEY) == [None]
    assert _sampler().sample(tiny.weights(), [], GROUP, KEY) == []


# ---------------------------------------------------------------------------------------- Mistakes


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="request 1: the prompt is empty"):
        _sampler().sample(tiny.weights(), [[5], []], GROUP, KEY)
    with pytest.raises(ValueError, match="group = 0: must be at least 1"):
        _sampler().sample(tiny.weights(), PROMPTS, 0, KEY)
    with pytest.raises(ValueError, match="max_tokens = 0: must be at least 1"):
        _sampler().sample(tiny.weights(), PROMPTS, GROUP, KEY, max_tokens=0)


def test_weights_that_are_no_numbers_are_named() -> None:
    params = {**tiny.weights(), "embedding": np.full((64, 32), np.nan, np.float32)}
    with pytest.raises(FloatingPointError, match="request 0: the policy's logits are not finite"):
        _sampler().sample(params, PROMPTS, GROUP, KEY)


def test_the_request_whose_log_probs_are_no_numbers_is_named(monkeypatch) -> None:
    sampler = _sampler()
    real = sampler.decode

    def spoiled(*args, **options):
        answers = real(*args, **options)
        return answers.replace(log_probs=answers.log_probs.at[1, 2, 0].set(jnp.nan))

    monkeypatch.setattr(sampler, "decode", spoiled)
    # Row 1 of the first batch, the shorter bucket's: the second prompt of at most 8 tokens.
    prompts = [PROMPTS[3], PROMPTS[0], PROMPTS[4], PROMPTS[1]]
    with pytest.raises(FloatingPointError, match="request 3: the policy's logits are not finite"):
        sampler.sample(tiny.weights(), prompts, GROUP, KEY)


# ------------------------------------------------------------------------------------- Compilation


def test_one_program_a_bucket() -> None:
    sampler = Sampler(tiny.POLICY, CONFIG, STOPS, _sampler().mesh)
    for seed, count in enumerate((7, 2, 5, 9)):
        prompts = (PROMPTS * 2)[seed : seed + count]
        sampler.sample(tiny.weights(), prompts, GROUP, jax.random.key(seed))
    assert sampler.prefill._cache_size() == len(CONFIG.prompt_buckets)
    assert sampler.decode._cache_size() == len(CONFIG.prompt_buckets)


def test_rows_of_a_batch_are_bounded_by_tokens_and_streams() -> None:
    sampler = _sampler()
    assert (sampler.rows(8, 3), sampler.rows(16, 3), sampler.rows(8, 24)) == (8, 4, 1)
    assert sampler.rows(100, 1) == sampler.rows(8, 100) == 1  # never none
    wide = _sampler(mesh=(("data", 2), ("fsdp", 2), ("tensor", 2)))
    assert (wide.rows(8, 3), wide.rows(16, 4), wide.rows(16, 24)) == (8, 4, 4)
