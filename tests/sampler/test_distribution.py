"""Tests of the sampler's distribution against the exact one: chi-square over 50,000 answers.

1. All cases are sampled in one session, so that rows of different prompts and options are next to
   each other. Each case is one prompt, with 25 requests for 2,000 answers of two tokens.
2. The exact distribution is computed here in float64 from the logits of the whole model.
3. Keys are fixed. A correct sampler is rejected by one key in 1,000 for each chi-square.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import session
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.requests import Options, SampleRequest
from tests import tiny

POLICY = PolicyConfig(
    vocab_size=48,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=8,
    feed_forward=48,
)
CONFIG = SamplerConfig(
    max_tokens=2,
    max_prompt=16,
    page_size=4,
    kv_cache_tokens=16_384,
    slots=2048,
    samples_per_prompt_batch=128,
    prefill_tokens=32,
    decode_tokens=2,
)
REQUESTS, GROUP = 25, 2000
LEAST_P = 1e-3  # smallest accepted p-value of a chi-square statistic
FEWEST = 5  # smallest expected count of a chi-square cell; rarer tokens share one cell
CASES = {
    "all": Options(max_tokens=2),
    "temperature": Options(temperature=0.6, max_tokens=2),
    "top_p": Options(temperature=0.7, top_p=0.95, max_tokens=2),
    "top_k": Options(top_k=10, max_tokens=2),
    "min_p": Options(min_p=0.2, max_tokens=2),
    "together": Options(temperature=1.4, top_k=30, top_p=0.8, min_p=0.15, max_tokens=2),
}
pytestmark = pytest.mark.slow  # 300,000 answers
every_case = pytest.mark.parametrize("case", CASES)


def _prompt(case: str) -> list[int]:
    """Make a case's prompt: it ends within a page, at the end of a page, or after several pages."""
    number = list(CASES).index(case)
    length = (3, 4, 5, 8, 14, 16)[number]
    return np.random.default_rng(number).integers(POLICY.vocab_size, size=length).tolist()


@functools.cache
def _sampled() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sample all answers of each case; return their tokens and logprobs, both [50,000, 2]."""
    mesh = meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])
    sampler_session = Sampler(POLICY, CONFIG, (), mesh).start_session(tiny.weights(POLICY))
    cases = list(CASES) * REQUESTS
    keys = session.request_keys(jax.random.key(5), len(cases))
    for case, key in zip(cases, keys, strict=True):
        sampler_session.submit(SampleRequest(_prompt(case), GROUP, key, CASES[case]))
    answers = dict(sampler_session.results())
    case_samples = {}
    for first, case in enumerate(CASES):
        samples = [s for n in range(first, len(cases), len(CASES)) for s in answers[n]]
        case_samples[case] = (
            np.stack([s.tokens for s in samples]),
            np.stack([s.logprobs for s in samples]),
        )
    return case_samples


@functools.cache
def _logprobs(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Compute the float64 log-softmax at the case's temperature, from the model without cache.

    Returns:
      Logprobs of the first token [V], and of the second token for every first one [V, V].
    """
    token_ids = np.arange(POLICY.vocab_size)
    rows = np.column_stack([np.tile(_prompt(case), (len(token_ids), 1)), token_ids])
    logits = transformer.logits(POLICY, tiny.weights(POLICY), jnp.asarray(rows))
    scaled = np.asarray(logits[:, -2:], np.float64) / CASES[case].temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    logprobs = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    return logprobs[0, 0], logprobs[:, 1]


def _filtered_distribution(probabilities: np.ndarray, options: Options) -> np.ndarray:
    """Return the distribution [V] after the filters, computed by sorting."""
    order = np.argsort(-probabilities)
    falling = probabilities[order]
    count = options.top_k or len(falling)
    masses = np.cumsum(falling[:count]) / falling[:count].sum()
    if options.top_p < 1:
        count = np.searchsorted(masses, options.top_p) + 1
    kept_mass = np.zeros_like(probabilities)
    kept_mass[order[:count]] = falling[:count]
    kept_mass[probabilities < options.min_p * falling[0]] = 0
    return kept_mass / kept_mass.sum()


def _chi_square(counts: np.ndarray, exact: np.ndarray) -> tuple[float, int]:
    """Return (statistic, degrees of freedom) of counts [V]; no impossible token may be sampled."""
    assert counts[exact == 0].sum() == 0
    expected = exact * counts.sum()
    rare = expected < FEWEST
    cells = np.append(counts[~rare], counts[rare].sum())
    expected_cells = np.append(expected[~rare], expected[rare].sum())
    # Too few even together: one cell with the rarest remaining token.
    if expected_cells[-1] < FEWEST:
        cells, expected_cells = (np.append(x[:-2], x[-2:].sum()) for x in (cells, expected_cells))
    return float(np.sum((cells - expected_cells) ** 2 / expected_cells)), len(cells) - 1


@every_case
def test_first_tokens_follow_the_exact_distribution(case: str) -> None:
    first, _ = _logprobs(case)
    tokens, _ = _sampled()[case]
    assert len(tokens) == 50_000
    counts = np.bincount(tokens[:, 0], minlength=POLICY.vocab_size)
    squares, freedom = _chi_square(counts, _filtered_distribution(np.exp(first), CASES[case]))
    assert freedom > 3 and stats.chi2.sf(squares, freedom) > LEAST_P


@pytest.mark.long
@every_case
def test_second_tokens_follow_the_exact_conditional_distribution(case: str) -> None:
    """Sum one chi-square for each first token that was sampled often."""
    _, second = _logprobs(case)
    tokens, _ = _sampled()[case]
    total, freedoms, token_count = 0.0, 0, 0
    for first in range(POLICY.vocab_size):
        behind = tokens[tokens[:, 0] == first, 1]
        if len(behind) < 200:
            continue
        counts = np.bincount(behind, minlength=POLICY.vocab_size)
        squares, freedom = _chi_square(
            counts, _filtered_distribution(np.exp(second[first]), CASES[case])
        )
        total, freedoms, token_count = (
            total + squares,
            freedoms + freedom,
            token_count + len(behind),
        )
    assert freedoms > 30 and token_count > 40_000
    assert stats.chi2.sf(total, freedoms) > LEAST_P


@every_case
def test_logprobs_are_over_the_full_vocabulary_at_temperature(case: str) -> None:
    """Filters do not change them."""
    first, second = _logprobs(case)
    tokens, logprobs = _sampled()[case]
    expected_logprobs = np.column_stack([first[tokens[:, 0]], second[tokens[:, 0], tokens[:, 1]]])
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-5)
