"""Drawing tokens: the kept set, the frequencies, and the recorded log-probs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.sampler import nucleus

DRAWS = 50_000


def _by_sorting(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """The fewest most likely tokens whose mass reaches top_p, one row."""
    order = np.argsort(-probabilities, kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1
    kept = np.zeros(len(probabilities), bool)
    kept[order[:count]] = True
    return kept


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.95, 0.999])
def test_kept_set_equals_sorting(top_p: float) -> None:
    rng = np.random.default_rng(int(top_p * 1000))
    logits = rng.normal(size=(60, 200)) * rng.uniform(0.1, 6, size=(60, 1))
    probabilities = np.asarray(jax.nn.softmax(jnp.asarray(logits, jnp.float32)))
    found = np.asarray(jax.jit(nucleus.nucleus, static_argnums=1)(probabilities, top_p))
    checked = 0
    for row, kept in zip(probabilities, found, strict=True):
        masses = np.cumsum(np.sort(row.astype(float))[::-1])
        if np.abs(masses - top_p).min() < 1e-6:
            continue  # float32 cannot say on which side of top_p this sum lies
        np.testing.assert_array_equal(kept > 0, _by_sorting(row.astype(float), top_p))
        np.testing.assert_array_equal(kept[kept > 0], row[kept > 0])
        checked += 1
    assert checked > 50


def test_corner_cases_of_the_kept_set() -> None:
    one = jnp.array([0.0, 1.0, 0.0])
    np.testing.assert_array_equal(nucleus.nucleus(one, 0.1), one)
    even = jnp.full(8, 0.125)  # ties at the threshold are all kept
    np.testing.assert_array_equal(nucleus.nucleus(even, 0.3), even)
    some = jnp.array([0.6, 0.3, 0.1])
    np.testing.assert_array_equal(nucleus.nucleus(some, 1.0), some)
    np.testing.assert_allclose(nucleus.nucleus(some, 0.6), [0.6, 0.0, 0.0])
    np.testing.assert_allclose(nucleus.nucleus(some, 0.61), [0.6, 0.3, 0.0])


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.8), (1.3, 0.5)])
def test_frequencies_are_the_exact_distribution(temperature: float, top_p: float) -> None:
    logits = np.random.default_rng(5).normal(size=12).astype(np.float32) * 1.5
    exact = np.exp(logits.astype(float) / temperature)
    exact /= exact.sum()
    exact = np.where(_by_sorting(exact, top_p), exact, 0.0) if top_p < 1 else exact
    exact /= exact.sum()
    uniform = jax.random.uniform(jax.random.key(1), (DRAWS,))
    rows = jnp.broadcast_to(logits, (DRAWS, 12))
    tokens, _ = jax.jit(nucleus.draw, static_argnums=(2, 3))(rows, uniform, temperature, top_p)
    counts = np.bincount(tokens, minlength=12)
    possible = exact > 0
    assert counts[~possible].sum() == 0
    expected = DRAWS * exact[possible]
    assert expected.min() > 50
    squares = np.sum((counts[possible] - expected) ** 2 / expected)
    freedom = possible.sum() - 1
    # Three deviations of the chi-square distribution; the draws are fixed.
    assert squares < freedom + 3 * np.sqrt(2 * freedom)


def test_uniforms_walk_through_the_tokens_in_order() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))
    uniform = jnp.array([0.0, 0.49, 0.51, 0.74, 0.76, 0.874, 0.876, 0.99999994])
    tokens, _ = nucleus.draw(jnp.broadcast_to(logits, (8, 4)), uniform, 1.0, 1.0)
    np.testing.assert_array_equal(tokens, [0, 0, 1, 1, 2, 2, 3, 3])


def test_no_token_outside_the_nucleus_whatever_the_rounding() -> None:
    """A parallel cumulative sum rises and falls by rounding errors between equal values.

    Uniform numbers that aim at every single value of it must still find tokens of the nucleus.
    """
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=4096) * 3, jnp.float32)
    kept = nucleus.nucleus(jax.nn.softmax(logits), 0.9)
    sums = np.asarray(jnp.cumsum(kept))
    assert (np.diff(sums)[np.asarray(kept)[1:] == 0] != 0).any(), "the case is not met"
    uniform = np.concatenate([np.nextafter(sums, 0), sums, np.nextafter(sums, 1)]) / sums[-1]
    draw = jax.jit(jax.vmap(lambda u: nucleus.draw(logits, u, 1.0, 0.9)[0]))
    tokens = np.asarray(draw(jnp.clip(uniform.astype(np.float32), 0, 1 - 2**-24)))
    assert (np.asarray(kept)[tokens] > 0).all()
    assert len(set(tokens.tolist())) > 0.9 * (np.asarray(kept) > 0).sum()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_log_probs_are_of_the_full_vocabulary(temperature: float) -> None:
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(40, 30)) * 2, jnp.float32)
    uniform = jax.random.uniform(jax.random.key(0), (40,))
    tokens, log_probs = nucleus.draw(logits, uniform, temperature, 0.5)
    every = jax.nn.log_softmax(logits / (temperature or 1.0))
    wanted = np.take_along_axis(np.asarray(every), np.asarray(tokens)[:, None], 1)[:, 0]
    np.testing.assert_allclose(log_probs, wanted, atol=1e-6)
    if temperature == 0:
        np.testing.assert_array_equal(tokens, jnp.argmax(logits, axis=-1))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_no_numbers_give_no_log_prob(temperature: float) -> None:
    tokens, log_probs = nucleus.draw(jnp.full((1, 5), jnp.nan), jnp.array([0.3]), temperature, 0.9)
    assert 0 <= int(tokens[0]) < 5 and np.isnan(log_probs[0])
