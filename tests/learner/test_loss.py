"""Tests of the clipped loss: reference cases, and gradients by hand."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.learner import aggregation
from spell_jax.learner.loss import kl_estimate, policy_loss
from spell_jax.learner.loss_config import LossConfig
from tests import tiny
from tests.paths import REFERENCE_CASES

# The reference's names for ours. Its "seq-mean-token-sum" and "seq-mean-token-sum-norm" are
# "sequence_sum" with certain constants: the second divides by the padded width, and not by rows.
AGGREGATIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}


def read(name: str) -> list[dict]:
    def decode(value: dict) -> object:
        return float(value["__float__"]) if "__float__" in value else value

    return json.loads((REFERENCE_CASES / f"{name}.json").read_text(), object_hook=decode)["cases"]


def _weights(mask: np.ndarray, mode: str) -> np.ndarray:
    """Compute token weights; every row is a group of one answer."""
    groups = [tiny.group([1], [[2] * int(row.sum())], [0.0]) for row in mask]
    if mode in AGGREGATIONS:
        answer_weights = aggregation.weigh(groups, AGGREGATIONS[mode])
    else:
        answer_weights = aggregation.weigh(groups, "sequence_sum", mask.shape[1])
    weights = mask * np.array(answer_weights, np.float32)
    return weights * {
        "seq-mean-token-sum": mask.shape[1],
        "seq-mean-token-sum-norm": len(mask),
    }.get(mode, 1)


def test_aggregations_match_reference_cases() -> None:
    cases = [case for case in read("agg_loss") if case["in"]["mode"] in AGGREGATIONS]
    assert len(cases) == 11
    for case in cases:
        mask = np.array(case["in"]["mask"], np.float32)
        weights = _weights(mask, case["in"]["mode"])
        total = np.sum(weights * np.array(case["in"]["mat"]))
        assert total == pytest.approx(case["out"], rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_sequence_sums_match_reference_cases() -> None:
    """Test the aggregations that are sequence_sum, alone and in the policy loss."""
    cases = [case for case in read("agg_loss") if case["in"]["mode"] not in AGGREGATIONS]
    assert len(cases) == 12
    for case in cases:
        mask = np.array(case["in"]["mask"], np.float32)
        total = np.sum(_weights(mask, case["in"]["mode"]) * np.array(case["in"]["mat"]))
        assert total == pytest.approx(case["out"], rel=1e-5, abs=1e-6)
    cases = [case for case in read("policy_loss") if case["in"]["agg"] not in AGGREGATIONS]
    assert len(cases) == 7
    for case in cases:
        assert float(_policy_loss(case)[0]) == pytest.approx(case["out"][0], rel=1e-5, abs=1e-6)


def _policy_loss(case: dict):
    inputs = {k: np.array(v, np.float32) for k, v in case["in"].items() if k != "agg"}
    weights = _weights(inputs["mask"], case["in"]["agg"])
    config = LossConfig(
        clip_low=case["in"]["clip_low"],
        clip_high=case["in"]["clip_high"],
        dual_clip=case["in"]["clip_c"],
    )
    numbers = (inputs[name] for name in ("log_prob", "old_log_prob", "advantages"))
    return policy_loss(*map(jnp.asarray, (*numbers, weights)), config)


def test_policy_loss_matches_reference_cases() -> None:
    cases = [case for case in read("policy_loss") if case["in"]["agg"] in AGGREGATIONS]
    assert len(cases) == 12
    for case in cases:
        value, sums = _policy_loss(case)
        expected_loss, clipped, kl, dual = case["out"]
        assert float(value) == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
        if case["in"]["agg"] == "token-mean":  # the reference's shares are always token means
            means = [float(sums[k]) for k in ("clip_share", "approx_kl", "dual_clip_share")]
            assert means == pytest.approx([clipped, kl, dual], rel=1e-5, abs=1e-6)


def test_k3_estimate_matches_reference_cases() -> None:
    # The reference's unclamped "k3" equals the clamped "low_var_kl" where no clamp is reached.
    cases = [case for case in read("kl_penalty") if case["in"]["kind"] in ("k3", "low_var_kl")]
    assert len(cases) == 3
    for case in cases:
        estimates = kl_estimate(
            jnp.array(case["in"]["logprob"]), jnp.array(case["in"]["ref_logprob"])
        )
        np.testing.assert_allclose(estimates, case["out"], rtol=1e-5, atol=1e-6)


def test_k1_and_k2_estimates_match_reference_cases() -> None:
    # Its "kl" is k1 and its "mse" k2; we do not have its "abs".
    names = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
    cases = [case for case in read("kl_penalty") if case["in"]["kind"] in names]
    assert len(cases) == 7
    for case in cases:
        logprobs = (jnp.array(case["in"][name]) for name in ("logprob", "ref_logprob"))
        estimates = kl_estimate(*logprobs, names[case["in"]["kind"]])
        np.testing.assert_allclose(estimates, case["out"], rtol=1e-5, atol=1e-6)


def test_on_policy_gradient_is_the_plain_policy_gradient() -> None:
    logprobs = jnp.array([-0.5, -2.0, -1.0])
    advantages, weights = jnp.array([1.0, -2.0, 3.0]), jnp.array([0.5, 0.5, 0.0])

    def value(logprobs):
        old = jax.lax.stop_gradient(logprobs)
        return policy_loss(logprobs, old, advantages, weights, LossConfig())[0]

    np.testing.assert_allclose(value(logprobs), -0.5 * 1.0 + 0.5 * 2.0, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(value)(logprobs), -advantages * weights, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.1, 1.0, -1.1),  # within the bounds
        (1.3, 1.0, 0.0),  # above the upper bound: clipped
        (0.5, 1.0, -0.5),  # below the lower bound, but should rise
        (0.7, -1.0, 0.0),  # below the lower bound: clipped
        (1.5, -1.0, 1.5),  # above the upper bound, but should fall
        (3.5, -1.0, 0.0),  # dual clip
    ],
)
def test_gradient_of_the_clipped_loss(ratio: float, advantage: float, gradient: float) -> None:
    def value(logprob):
        weight = jnp.ones(())
        return policy_loss(logprob, jnp.zeros(()), jnp.array(advantage), weight, LossConfig())[0]

    assert float(jax.grad(value)(jnp.log(ratio))) == pytest.approx(gradient, rel=1e-5)


def test_extreme_ratios_stay_finite() -> None:
    value, sums = policy_loss(
        jnp.zeros(2), jnp.array([-1e4, 1e4]), jnp.array([-1.0, 1.0]), jnp.ones(2), LossConfig()
    )
    assert np.isfinite(float(value))
    assert float(sums["approx_kl"]) == 0.0  # +20 and -20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"old_logprobs": "old"}, r"loss\.old_logprobs = 'old': must be one of \('auto', "),
        ({"tis_cap": 0.9}, r"loss\.tis_cap = 0\.9: must be at least 1"),
        (
            {"tis_cap": 2.0, "old_logprobs": "rollout"},
            r"loss\.tis_cap = 2\.0: must be 0 for loss\.",
        ),
        ({"aggregation": "mean"}, r"loss\.aggregation = 'mean': must be one of"),
        ({"support": "sampled", "kl_weight": 0.1}, r"loss\.support = 'sampled': must be 'full'"),
        ({"routing": "old"}, r"loss\.routing = 'old': must be one of \('own', 'sampled'\)"),
        (
            {
                "routing": "sampled",
                "objective": "dpo",
                "old_logprobs": "reference",
                "aggregation": "sequence_mean",
            },
            r"loss\.routing = 'sampled': must be 'own' for loss\.objective = 'dpo'",
        ),
        ({"kl_weight": -0.1}, r"loss\.kl_weight = -0\.1: must be at least 0"),
        ({"clip_low": float("nan")}, r"loss\.clip_low = nan: must be at least 0"),
        ({"dual_clip": 1.0}, r"loss\.dual_clip = 1\.0: must be above 1"),
        ({"dual_clip": -1.0}, r"loss\.dual_clip = -1\.0: must be above 1, or 0 for none"),
        (
            {"objective": "ppo"},
            r"loss\.objective = 'ppo': must be one of \('clip', 'cispo', 'dpo'\)",
        ),
        ({"ratio": "answer"}, r"loss\.ratio = 'answer': must be one of \('token', "),
        ({"kl_estimator": "kl"}, r"loss\.kl_estimator = 'kl': must be one of \('k1', "),
        ({"sequence_tokens": -1}, r"loss\.sequence_tokens = -1: must be at least 0 for loss\.agg"),
        (
            {"aggregation": "sequence_sum"},
            r"loss\.sequence_tokens = 0: must be at least 1 for loss\.aggregation = 'sequence_sum'",
        ),
    ],
)
def test_invalid_loss_config_is_rejected(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**fields)
