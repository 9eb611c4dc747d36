"""Tests of every variant of the loss, value and gradient, against plain loops in float64."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.learner import loss as losses
from spell_jax.learner.loss_config import KL_ESTIMATORS, RATIOS, LossConfig
from spell_jax.learner.packing import Bucket, MicroBatch
from spell_jax.learner.token_sums import sum_by_answer
from tests import tiny

# Answers of 3, 2, 4; of 2, 6, 1, 2 tokens; and padding.
ANSWER = np.array(
    [
        [0, 0, 0, 1, 1, 2, 2, 2, 2, -1, -1, -1],
        [0, 0, 1, 1, 1, 1, 1, 1, 2, 3, 3, -1],
    ]
)
CORRECTIONS = {
    "on_policy": {},
    "rollout": {"old_logprobs": "rollout"},
    "tis": {"tis_cap": 1.3},
    "recompute": {"old_logprobs": "recompute"},
}
WITH_RATIO = ("clip", "cispo")  # objectives with an importance ratio
CHOICES = itertools.product(WITH_RATIO, RATIOS, CORRECTIONS)
# A KL estimator and a dual clip for each, in turn.
TURNS = itertools.cycle(itertools.product(KL_ESTIMATORS, (0.0, 1.5)))
VARIANTS = [(*choice, *turn) for choice, turn in zip(CHOICES, TURNS, strict=False)]


@functools.cache
def loss_inputs() -> tuple[MicroBatch, dict[str, np.ndarray]]:
    """Create a micro-batch as the loss reads it, and logprobs, reference logprobs, entropies."""
    rng = np.random.default_rng(40)
    logprobs = -rng.exponential(1.5, ANSWER.shape)
    real = ANSWER >= 0
    # One advantage and one weight per answer: numbers by row and answer.
    row, slot = np.arange(2)[:, None], np.maximum(ANSWER, 0)
    advantage = rng.normal(size=(2, 4))[row, slot] * real
    weight = rng.uniform(0.02, 0.1, size=(2, 4))[row, slot] * real
    tokens = {name: np.zeros((2, 1), np.int32) for name in ("tokens", "positions", "index")}
    batch = MicroBatch(
        **tokens,
        last_query=tokens["index"],
        source=np.zeros_like(ANSWER),
        target=np.zeros_like(ANSWER),
        advantage=advantage.astype(np.float32),
        weight=weight.astype(np.float32),
        old_logprob=((logprobs - 0.25 * rng.normal(size=ANSWER.shape)) * real).astype(np.float32),
        cutoff=np.full(ANSWER.shape, -np.inf, np.float32),
        group_name=np.zeros_like(ANSWER),
        answer=ANSWER,
        group=ANSWER,
        answer_id=ANSWER,
    )
    numbers = {
        "logprobs": logprobs.astype(np.float32),
        "reference": (logprobs + 0.7 * rng.normal(size=ANSWER.shape)).astype(np.float32),
        "entropy": rng.exponential(1.0, ANSWER.shape).astype(np.float32),
    }
    return batch, numbers


def _ratio(kind: str, now: np.ndarray, before: np.ndarray, tokens: list[int], token: int) -> float:
    if kind == "token":
        return math.exp(now[token] - before[token])
    product = 1.0
    for each in tokens:
        product *= math.exp(now[each] - before[each])
    return product if kind == "sequence" else product ** (1 / len(tokens))


def _kl(estimator: str, policy: float, reference: float) -> float:
    quotient = math.exp(reference - policy)
    return {
        "k1": math.log(1 / quotient),
        "k2": math.log(quotient) ** 2 / 2,
        "k3": quotient - math.log(quotient) - 1,
    }[estimator]


def by_hand(config: LossConfig, moved: np.ndarray) -> dict[str, float]:
    """Compute the loss and its sums at logprobs `moved`, answer by answer and token by token.

    Terms without gradient stay at the given logprobs.
    """
    batch, numbers = loss_inputs()
    here = numbers["logprobs"].astype(float)
    sums = dict.fromkeys(("loss", "clip_share", "dual_clip_share", "approx_kl", "kl"), 0.0)
    for row in range(2):
        sampled = batch.old_logprob[row].astype(float)
        old = here[row] if config.is_on_policy else sampled
        for answer in range(4):
            tokens = [t for t in range(12) if batch.answer[row, t] == answer]
            for t in tokens:
                advantage, share = float(batch.advantage[row, t]), float(batch.weight[row, t])
                weight = share
                if config.tis_cap:
                    since = _ratio(config.ratio, here[row], sampled, tokens, t)
                    weight *= min(since, config.tis_cap)
                ratio = _ratio(config.ratio, moved[row], old, tokens, t)
                fixed = _ratio(config.ratio, here[row], old, tokens, t)
                low, high = 1 - config.clip_low, 1 + config.clip_high
                if config.objective == "cispo":
                    value = min(max(fixed, low), high) * advantage * moved[row, t]
                    sums["clip_share"] += weight * (fixed < low or fixed > high)
                else:
                    clipped = min(max(ratio, low), high) * advantage
                    value = min(ratio * advantage, clipped)
                    sums["clip_share"] += weight * (clipped < ratio * advantage)
                    if advantage < 0 and config.dual_clip:
                        floor = config.dual_clip * advantage
                        sums["dual_clip_share"] += weight * (value < floor)
                        value = max(value, floor)
                kl = _kl(config.kl_estimator, moved[row, t], float(numbers["reference"][row, t]))
                sums["kl"] += share * kl
                sums["approx_kl"] -= weight * (moved[row, t] - old[t])
                bonus = config.entropy_weight * float(numbers["entropy"][row, t])
                sums["loss"] += config.kl_weight * share * kl - weight * value - share * bonus
    return sums


def slope(config: LossConfig) -> np.ndarray:
    """Estimate the gradient [2, 12] of by_hand by central differences."""
    at, gradient = loss_inputs()[1]["logprobs"].astype(float), np.zeros(ANSWER.shape)
    for place in np.ndindex(*ANSWER.shape):
        step = np.zeros(ANSWER.shape)
        step[place] = 1e-6
        up, down = (by_hand(config, at + sign * step)["loss"] for sign in (1, -1))
        gradient[place] = (up - down) / 2e-6
    return gradient


def loss_and_gradient(config: LossConfig):
    """Return ((loss, sums), gradient) of the loss itself."""
    batch, numbers = loss_inputs()

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def value(logprobs):
        return losses.batch_loss(
            logprobs,
            jnp.array(numbers["entropy"]),
            jax.tree.map(jnp.asarray, batch),
            config,
            jnp.array(numbers["reference"]),
        )

    return value(jnp.array(numbers["logprobs"]))


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "ratio", "correction", "kl", "dual_clip"), VARIANTS)
def test_loss_sums_and_gradient_match_plain_loops(
    objective: str, ratio: str, correction: str, kl: str, dual_clip: float
) -> None:
    config = LossConfig(
        objective=objective,
        ratio=ratio,
        **CORRECTIONS[correction],
        dual_clip=dual_clip,
        clip_low=0.2,
        clip_high=0.28,
        kl_weight=0.3,
        kl_estimator=kl,
        entropy_weight=0.1,
    )
    (value, sums), gradient = loss_and_gradient(config)
    expected_sums = by_hand(config, loss_inputs()[1]["logprobs"].astype(float))
    assert float(value) == pytest.approx(expected_sums["loss"], rel=1e-5)
    for name, number in expected_sums.items():
        assert float(sums[name]) == pytest.approx(number, rel=1e-5, abs=1e-6), name
    np.testing.assert_allclose(gradient, slope(config), rtol=1e-4, atol=1e-6)
    assert set(sums) == {*config.sums}
    if correction in ("rollout", "recompute"):  # some ratios are clipped, some are not
        assert 0 < expected_sums["clip_share"] < 0.9 * float(sums["weight"])
        is_live = bool(dual_clip) and objective == "clip" and ratio != "sequence_mean"
        assert bool(expected_sums["dual_clip_share"]) == is_live


def _gradient(**fields: Any) -> np.ndarray:
    """Return the gradient of the policy term alone."""
    return np.asarray(loss_and_gradient(LossConfig(dual_clip=0.0, **fields))[1])


@pytest.mark.slow
def test_eapo_equation_1_and_its_gradient() -> None:
    """1 / G sum_i min(r_i A_i, clip(r_i) A_i), r_i = pi(o_i) / pi_old(o_i), over groups of one."""
    logs = [[-1.0, -2.0, -0.5], [-0.3, -0.7], [-1.1], [-2.0, -1.0]]
    olds = [[-1.2, -1.9, -0.6], [-0.9, -0.4], [-0.7], [-2.1, -1.4]]
    advantages = [1.0, 1.0, -1.0, -0.5]
    group = tiny.group([1], [[2] * len(x) for x in logs], advantages, logprobs=olds)
    config = LossConfig(
        ratio="sequence",
        old_logprobs="rollout",
        clip_high=0.28,
        aggregation="sequence_mean",
        dual_clip=0.0,
    )
    (batch,) = jax.tree.map(jnp.asarray, tiny.pack([group], Bucket(9, 8), config.aggregation))
    flat = jnp.array([[x for log in logs for x in log]])

    def value(logprobs):
        return losses.batch_loss(logprobs, jnp.zeros_like(logprobs), batch, config)[0]

    ratios = [math.exp(sum(log) - sum(old)) for log, old in zip(logs, olds, strict=True)]
    pairs = list(zip(ratios, advantages, strict=True))
    terms = [min(r * a, min(max(r, 0.8), 1.28) * a) for r, a in pairs]
    assert float(value(flat)) == pytest.approx(-sum(terms) / 4, rel=1e-5)
    # Each token of an answer has the whole answer's gradient. The second and the third answer are
    # clipped, so their gradient is 0.
    moving = [0.0 if (a > 0 and r > 1.28) or (a < 0 and r < 0.8) else -r * a / 4 for r, a in pairs]
    expected_gradient = [g for g, log in zip(moving, logs, strict=True) for _ in log]
    np.testing.assert_allclose(jax.grad(value)(flat)[0], expected_gradient, rtol=1e-5)
    assert moving.count(0.0) == 2


def test_gspo_gradient_by_hand() -> None:
    """s_i A_i / |y_i| for every token of an answer, s_i its geometric mean ratio."""
    batch, numbers = loss_inputs()
    gradient = _gradient(ratio="sequence_mean", old_logprobs="rollout", clip_low=9, clip_high=99)
    for row, answer in itertools.product(range(2), range(4)):
        mine = batch.answer[row] == answer
        if mine.any():
            s = np.exp(np.mean((numbers["logprobs"] - batch.old_logprob)[row, mine]))
            share = batch.weight[row, mine].sum()  # of the answer in the loss; 1 / G in the paper
            expected_gradient = -share * s * batch.advantage[row, mine] / mine.sum()
            np.testing.assert_allclose(gradient[row, mine], expected_gradient, rtol=1e-5)
    assert not gradient[batch.answer < 0].any()


def test_cispo_clipping_keeps_the_gradient_of_every_token() -> None:
    batch, numbers = loss_inputs()
    gradient = _gradient(objective="cispo", old_logprobs="rollout", clip_low=1.0, clip_high=0.28)
    ratios = np.exp(numbers["logprobs"] - batch.old_logprob)
    expected_gradient = -batch.weight * np.minimum(ratios, 1.28) * batch.advantage
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5)
    assert gradient[batch.answer >= 0].all()
    assert not _gradient(old_logprobs="rollout")[batch.answer >= 0].all()


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("objective", WITH_RATIO)
def test_on_policy_gradient_is_the_plain_policy_gradient(objective: str, ratio: str) -> None:
    """Compare with the gradient of A log pi, times the weight of each token.

    GSPO has this gradient too. In equation 1 of EAPO it is multiplied by the answer's length.
    """
    batch, _ = loss_inputs()
    gradient = _gradient(objective=objective, ratio=ratio)
    length = np.array([[np.sum(row == a) * (a >= 0) for a in row] for row in batch.answer])
    times = length if (objective, ratio) == ("clip", "sequence") else 1
    np.testing.assert_allclose(gradient, -batch.weight * batch.advantage * times, rtol=1e-5)


@pytest.mark.slow
def test_truncated_importance_weight_uses_the_sequence_ratio() -> None:
    batch, numbers = loss_inputs()
    for ratio in ("sequence", "sequence_mean"):
        plain = _gradient(ratio=ratio)
        weighed = _gradient(ratio=ratio, tis_cap=1.3)
        for row, answer in ((0, 2), (1, 1), (1, 3)):
            mine = batch.answer[row] == answer
            far = (numbers["logprobs"] - batch.old_logprob)[row, mine]
            far = far.sum() if ratio == "sequence" else far.mean()
            np.testing.assert_allclose(
                weighed[row, mine], plain[row, mine] * min(np.exp(far), 1.3), rtol=1e-5
            )


@pytest.mark.slow
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("objective", WITH_RATIO)
def test_extreme_ratios_stay_finite(objective: str, ratio: str) -> None:
    batch, _ = loss_inputs()
    config = LossConfig(objective=objective, ratio=ratio, old_logprobs="rollout", clip_high=1e9)
    for logprob, old in ((0.0, -1e4), (-1e4, 0.0)):
        extreme = batch.replace(old_logprob=np.full(ANSWER.shape, old, np.float32))
        extreme = jax.tree.map(jnp.asarray, extreme)
        at = jnp.full(ANSWER.shape, logprob)
        loss = functools.partial(losses.batch_loss, batch=extreme, config=config)
        (value, _), gradient = jax.value_and_grad(
            lambda x, loss=loss: loss(x, jnp.zeros_like(x)), has_aux=True
        )(at)
        assert np.isfinite(float(value)) and np.isfinite(gradient).all()


def test_sequence_ratio_without_answer_numbers_raises() -> None:
    with pytest.raises(ValueError, match="ratio 'sequence': needs to know which token"):
        losses.log_ratio(jnp.zeros((1, 2)), jnp.zeros((1, 2)), "sequence")


# ------------------------------------------------------------------------------------ KL estimators


def _mean_gradient(estimator: str, logits: jax.Array, reference: jax.Array) -> jax.Array:
    """Compute the exact mean of the estimate's gradient over tokens sampled from the policy."""

    def estimates(logits):
        return losses.kl_estimate(
            jax.nn.log_softmax(logits), jax.nn.log_softmax(reference), estimator
        )

    return jax.nn.softmax(logits) @ jax.jacobian(estimates)(logits)


def _divergence(left: jax.Array, right: jax.Array) -> jax.Array:
    log_left, log_right = jax.nn.log_softmax(left), jax.nn.log_softmax(right)
    return jnp.sum(jnp.exp(log_left) * (log_left - log_right))


@pytest.mark.slow
def test_means_and_gradients_of_kl_estimates() -> None:
    """Properties that the docstring of the estimators states."""
    logits, reference = jnp.array([0.3, -1.0, 0.8, 0.1]), jnp.array([-0.2, 0.4, 0.9, -0.7])
    kl = _divergence(logits, reference)
    policy, of_reference = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    means = {
        name: jnp.sum(jnp.exp(policy) * losses.kl_estimate(policy, of_reference, name))
        for name in KL_ESTIMATORS
    }
    assert float(means["k1"]) == pytest.approx(float(kl), rel=1e-5)
    assert float(means["k3"]) == pytest.approx(float(kl), rel=1e-5)
    assert float(means["k2"]) != pytest.approx(float(kl), rel=1e-2)
    right = jax.grad(_divergence)(logits, reference)
    swapped_gradient = jax.grad(_divergence, 1)(reference, logits)
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    assert_close(_mean_gradient("k1", logits, reference), jnp.zeros(4))
    assert_close(_mean_gradient("k2", logits, reference), right)
    assert_close(_mean_gradient("k3", logits, reference), swapped_gradient)
    assert np.abs(right - swapped_gradient).max() > 0.01


@pytest.mark.slow
def test_k3_estimate_is_clamped() -> None:
    logprobs, swapped_logprobs = jnp.array([0.0, -100.0]), jnp.array([-100.0, 0.0])
    for estimator, expected_estimates in {
        "k1": [100, -100],
        "k2": [5000, 5000],
        "k3": [10, 10],
    }.items():
        np.testing.assert_allclose(
            losses.kl_estimate(logprobs, swapped_logprobs, estimator), expected_estimates
        )
    gradient = jax.grad(lambda x: jnp.sum(losses.kl_estimate(x, swapped_logprobs)))(logprobs)
    np.testing.assert_array_equal(gradient, [0.0, 0.0])


# ------------------------------------------------------------------------------------ Normalization


@pytest.mark.slow
def test_sum_by_answer_adds_the_tokens_of_each_answer() -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 12)
    expected_sums = np.zeros_like(values)
    for row, slot in np.argwhere(ANSWER >= 0):
        expected_sums[row, slot] = values[row][ANSWER[row] == ANSWER[row, slot]].sum()
    sums = sum_by_answer(jnp.asarray(values), jnp.asarray(ANSWER))
    np.testing.assert_array_equal(sums, expected_sums)
    # There are as many answers as slots.
    full = jnp.arange(12)[None]
    np.testing.assert_array_equal(sum_by_answer(jnp.asarray(values[:1]), full), values[:1])
