"""Tests of token sampling: the kept set, the frequencies, and the recorded logprobs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.sampler.sampling import Sampling, penalties, sample, threshold
from tests import tiny

DRAWS = 50_000


def _by_sorting(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """Mark the most likely tokens of one row: the fewest with a total mass of at least top_p."""
    order = np.argsort(-probabilities, kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1
    nucleus = np.zeros(len(probabilities), bool)
    nucleus[order[:count]] = True
    return nucleus


def _kept_mask(probabilities: np.ndarray, **filters: float) -> np.ndarray:
    """Return the mask [N, V] of the probabilities [N, V] that are kept."""
    below = _below(probabilities)
    least = jax.jit(threshold)(below, tiny.sampling(len(below), **filters))
    return np.asarray(below >= least[:, None])


def _below(probabilities: np.ndarray) -> jax.Array:
    """Return the logarithms of the probabilities, minus the largest logarithm of each row."""
    logs = jnp.log(jnp.asarray(probabilities, jnp.float32))
    return logs - jnp.max(logs, axis=-1, keepdims=True)


def _rows(count: int, seed: int, width: int = 200) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(count, width)) * rng.uniform(0.1, 6, size=(count, 1))
    return np.asarray(jax.nn.softmax(jnp.asarray(logits, jnp.float32)))


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.95, 0.999])
def test_top_p_keeps_the_same_tokens_as_sorting(top_p: float) -> None:
    probabilities = _rows(60, int(top_p * 1000))
    checked = 0
    for row, mask in zip(probabilities, _kept_mask(probabilities, top_p=top_p), strict=True):
        masses = np.cumsum(np.sort(row.astype(float))[::-1])
        if np.abs(masses - top_p).min() < 1e-6:
            continue  # float32 cannot tell on which side of top_p this sum lies
        expected_mask = _by_sorting(row.astype(float), top_p)
        assert mask[expected_mask].all()
        # Tokens as likely as the least likely kept one, up to 3e-5, may be kept too.
        assert (row[mask & ~expected_mask] > row[expected_mask].min() * (1 - 5e-5)).all()
        checked += (mask == expected_mask).all()
    assert checked > 50


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [1, 3, 40, 199, 200, 1000])
def test_top_k_keeps_the_most_likely_tokens(top_k: int) -> None:
    probabilities = _rows(20, top_k)
    for row, mask in zip(probabilities, _kept_mask(probabilities, top_k=top_k), strict=True):
        assert mask.sum() == min(top_k, 200) and row[mask].min() >= row[~mask].max(initial=0)


def test_filters_are_applied_in_sequence() -> None:
    """top_p applies to the tokens kept by top_k, scaled to 1; min_p is a share of the largest."""
    probabilities = _rows(30, 7)
    masks = _kept_mask(probabilities, top_k=5, top_p=0.8, min_p=0.1)
    for row, mask in zip(probabilities.astype(float), masks, strict=True):
        first = np.where(row >= np.sort(row)[-5], row, 0)
        expected_mask = _by_sorting(first / first.sum(), 0.8) & (row >= 0.1 * row.max())
        np.testing.assert_array_equal(mask, expected_mask)
    assert len(set(masks.sum(axis=1).tolist())) > 2


@pytest.mark.slow
def test_each_row_uses_its_own_filters() -> None:
    probabilities = np.repeat(_rows(1, 6), 4, axis=0)
    options = Sampling(
        np.ones(4, np.float32),
        np.array([0, 2, 0, 0], np.int32),
        np.array([1, 1, 0.5, 1], np.float32),
        np.array([0, 0, 0, 0.3], np.float32),
    )
    below = _below(probabilities)
    masks = np.asarray(below >= threshold(below, options)[:, None])
    row_filters = [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}]
    for row, filters in enumerate(row_filters):
        np.testing.assert_array_equal(masks[row], _kept_mask(probabilities[:1], **filters)[0])
    assert len(set(masks.sum(axis=1).tolist())) == 4


def test_top_p_handles_ties_and_exact_thresholds() -> None:
    for probabilities, top_p, expected_mask in (
        ([0.0, 1.0, 0.0], 0.1, [0, 1, 0]),
        ([0.125] * 8, 0.3, [1] * 8),  # ties at the threshold are all kept
        ([0.6, 0.3, 0.1], 1.0, [1, 1, 1]),
        ([0.6, 0.3, 0.1], 0.6, [1, 0, 0]),
        ([0.6, 0.3, 0.1], 0.61, [1, 1, 0]),
    ):
        masks = _kept_mask(np.array([probabilities], np.float32), top_p=top_p)
        np.testing.assert_array_equal(masks, [np.array(expected_mask, bool)])


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.8), (1.3, 0.5)])
def test_sampled_frequencies_match_the_exact_distribution(temperature: float, top_p: float) -> None:
    logits = np.random.default_rng(5).normal(size=12).astype(np.float32) * 1.5
    exact = np.exp(logits.astype(float) / temperature)
    exact /= exact.sum()
    exact = np.where(_by_sorting(exact, top_p), exact, 0.0) if top_p < 1 else exact
    exact /= exact.sum()
    uniform = jax.random.uniform(jax.random.key(1), (DRAWS,))
    rows = jnp.broadcast_to(logits, (DRAWS, 12))
    sampling = tiny.sampling(DRAWS, temperature, top_p)
    tokens = jax.jit(sample)(rows, uniform, sampling).id
    counts = np.bincount(tokens, minlength=12)
    possible = exact > 0
    assert counts[~possible].sum() == 0
    expected = DRAWS * exact[possible]
    assert expected.min() > 50
    squares = np.sum((counts[possible] - expected) ** 2 / expected)
    freedom = possible.sum() - 1
    # Three deviations of the chi-square distribution; the keys are fixed.
    assert squares < freedom + 3 * np.sqrt(2 * freedom)


@pytest.mark.slow
def test_uniform_numbers_select_by_cumulative_probability() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))
    uniform = jnp.array([0.0, 0.49, 0.51, 0.74, 0.76, 0.874, 0.876, 0.99999994])
    tokens = sample(jnp.broadcast_to(logits, (8, 4)), uniform, tiny.sampling(8)).id
    np.testing.assert_array_equal(tokens, [0, 0, 1, 1, 2, 2, 3, 3])


def test_temperature_0_takes_the_first_of_the_largest_logits() -> None:
    logits = jnp.array([[1.0, 3.0, 3.0, 2.0], [-1e4, 2e4, 2e4, 0.0], [0.0, 1.0, 0.5, -jnp.inf]])
    options = tiny.sampling(3, 0.0)
    options.temperature[2] = 0.7  # rows have temperatures of their own
    tokens = sample(logits, jnp.array([0.99, 0.99, 0.0]), options).id
    np.testing.assert_array_equal(tokens, [1, 1, 0])


def test_temperature_0_is_right_where_xla_computes_the_logits_twice() -> None:
    """Capped logits are fused into their users, so that the largest is rounded in two ways."""
    rng = np.random.default_rng(0)
    hidden, table = (jnp.asarray(rng.normal(size=(n, 64)), jnp.float32) for n in (128, 896))

    def capped(hidden: jax.Array, table: jax.Array) -> jax.Array:
        return 30 * jnp.tanh(jnp.einsum("nd,vd->nv", hidden, table) / 30)

    @jax.jit
    def tokens_of(hidden: jax.Array, table: jax.Array, options: Sampling) -> jax.Array:
        return sample(capped(hidden, table), jnp.full(128, 0.5), options).id

    tokens = tokens_of(hidden, table, tiny.sampling(128, 0.0))
    logits = np.asarray(jax.jit(capped)(hidden, table))
    token_logits = logits[np.arange(128), np.asarray(tokens)]
    np.testing.assert_allclose(token_logits, logits.max(axis=1), atol=1e-4)


@pytest.mark.slow
def test_rounding_never_selects_a_token_outside_the_nucleus() -> None:
    """A parallel cumulative sum rises and falls by rounding errors between equal values.

    Uniform numbers next to each of its values must still select tokens of the nucleus.
    """
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=1024) * 3, jnp.float32)
    below = (logits - jnp.max(logits))[None]
    nucleus = np.asarray(below >= threshold(below, tiny.sampling(1, top_p=0.9))[:, None])[0]
    sums = np.cumsum(np.where(nucleus, np.exp(below[0]), 0))
    uniform = np.concatenate([np.nextafter(sums, 0), sums, np.nextafter(sums, 1)]) / sums[-1]
    uniform = jnp.clip(uniform.astype(np.float32), 0, 1 - 2**-24)
    rows = jnp.broadcast_to(logits, (len(uniform), 1024))
    tokens = jax.jit(sample)(rows, uniform, tiny.sampling(len(rows), top_p=0.9)).id
    assert nucleus[np.asarray(tokens)].all()
    assert len(set(np.asarray(tokens).tolist())) > 0.9 * nucleus.sum()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_logprobs_are_over_the_full_vocabulary(temperature: float) -> None:
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(40, 30)) * 2, jnp.float32)
    uniform = jax.random.uniform(jax.random.key(0), (40,))
    sampled = sample(logits, uniform, tiny.sampling(40, temperature, 0.5))
    tokens, logprobs = sampled.id, sampled.logprob
    vocab_logprobs = jax.nn.log_softmax(logits / (temperature or 1.0))
    expected_logprobs = np.take_along_axis(
        np.asarray(vocab_logprobs), np.asarray(tokens)[:, None], 1
    )[:, 0]
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-6)
    if temperature == 0:
        np.testing.assert_array_equal(tokens, jnp.argmax(logits, axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nan_logits_give_nan_logprobs(temperature: float) -> None:
    sampling = tiny.sampling(1, temperature, 0.9)
    sampled = sample(jnp.full((1, 5), jnp.nan), jnp.array([0.3]), sampling)
    assert 0 <= int(sampled.id[0]) < 5 and np.isnan(sampled.logprob[0])


FILTERS = [{"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.7, "top_k": 9, "min_p": 0.05}]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_cutoff_separates_the_kept_tokens_whose_mass_is_kept(filters: dict[str, float]) -> None:
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(40, 30)) * 2, jnp.float32)
    options = tiny.sampling(40, 0.7, **filters)  # type: ignore[arg-type]
    sampled = sample(logits, jax.random.uniform(jax.random.key(0), (40,)), options)
    scaled = np.asarray(logits, float) / 0.7
    below = jnp.asarray(scaled - scaled.max(-1, keepdims=True), jnp.float32)
    kept_mask = np.asarray(below >= threshold(below, options)[:, None])
    centered = scaled - scaled.mean(-1, keepdims=True)
    np.testing.assert_array_equal(centered > np.asarray(sampled.cutoff)[:, None], kept_mask)
    assert 1 < kept_mask.sum(-1).mean() < 20
    probability = np.exp(scaled) / np.exp(scaled).sum(-1, keepdims=True)
    mass = np.where(kept_mask, probability, 0).sum(-1)
    np.testing.assert_allclose(np.exp(sampled.kept_log_mass), mass, rtol=1e-5)
    assert kept_mask[np.arange(40), np.asarray(sampled.id)].all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_everything_is_kept_without_filters_and_by_greedy_sampling(temperature: float) -> None:
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(4, 30)), jnp.float32)
    options = tiny.sampling(4, temperature, 1.0 if temperature else 0.5)
    sampled = sample(logits, jnp.full(4, 0.3), options)
    np.testing.assert_array_equal(sampled.kept_log_mass, 0.0)
    np.testing.assert_array_equal(sampled.cutoff, -np.inf)


def test_vocabulary_dropout_disfavors_a_share_of_tokens_in_rows_that_have_it() -> None:
    options = tiny.sampling(3)
    options = options.replace(
        dropout=np.array([0.0, 0.25, 0.25], np.float32),
        dropout_penalty=np.array([2, 2, 3], np.float32),
    )
    keys = jax.random.split(jax.random.key(0), 3)
    row_penalties = np.asarray(penalties(keys, 4000, options))
    assert not row_penalties[0].any()
    for row, nats in ((1, 2), (2, 3)):
        assert set(row_penalties[row].tolist()) == {0, nats}
        assert abs((row_penalties[row] > 0).mean() - 0.25) < 0.03
    assert ((row_penalties[1] > 0) != (row_penalties[2] > 0)).any(), (
        "each answer has its own tokens"
    )
    np.testing.assert_array_equal(row_penalties, penalties(keys, 4000, options))


def test_penalty_changes_what_is_sampled_but_not_the_logprobs() -> None:
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.5, 0.3, 0.2])), (4000, 3))
    uniform = jax.random.uniform(jax.random.key(1), (4000,))
    penalty = jnp.broadcast_to(jnp.array([jnp.log(5.0), 0.0, 0.0]), logits.shape)
    sampled_tokens = jax.jit(sample)(logits, uniform, tiny.sampling(4000), penalty)
    shares = np.bincount(sampled_tokens.id, minlength=3) / 4000
    np.testing.assert_allclose(shares, [1 / 6, 1 / 2, 1 / 3], atol=0.03)
    expected_logprobs = np.log([0.5, 0.3, 0.2])[np.asarray(sampled_tokens.id)]
    np.testing.assert_allclose(sampled_tokens.logprob, expected_logprobs, atol=1e-6)
