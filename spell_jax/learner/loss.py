"""Loss of a micro-batch: policy gradients and their variants, or preferences (DPO).

`objective` combines an answer token's importance ratio (of the token or of its answer: `ratio`)
with its advantage; `tis_cap` corrects for samples of older weights. Objective "dpo" compares the
two answers of a group instead. Token losses, KL estimates to a reference model and an entropy bonus
are summed with the weights from aggregation.weigh.
"""

from __future__ import annotations

import math

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, Shaped

from spell_jax.learner import packing, preference
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.token_sums import sum_by_answer

_FARTHEST = 20.0  # log-ratios are clipped to +-20, so that exp does not overflow


def batch_loss(
    logprobs: Float32[Array, "B A"],
    entropy: Float32[Array, "B A"],
    batch: packing.MicroBatch,
    config: LossConfig,
    reference_logprobs: Float32[Array, "B A"] | None = None,
) -> tuple[Float32[Array, ""], dict[str, Shaped[Array, ""]]]:
    """Return the loss of a micro-batch, and the sums of LossConfig.sums.

    Entropies are in nats; a KL term needs the reference's logprobs.
    """
    # A weight [B, 1] would broadcast, and the loss would be wrong without an error.
    per_token = batch.answer, batch.advantage, batch.weight, batch.old_logprob
    chex.assert_equal_shape((logprobs, entropy, *per_token))
    if config.is_paired:
        weights = config.preference_weight, config.nll_weight, config.align_weight
        value, sums = preference.preference_loss(logprobs, batch, config.beta, *weights)
    else:
        value, sums = _ratio_loss(logprobs, batch, config)
    if reference_logprobs is not None:
        estimate = kl_estimate(logprobs, reference_logprobs, config.kl_estimator)
        kl = jnp.sum(batch.weight * estimate)
        value, sums["kl"] = value + config.kl_weight * kl, kl
    if config.entropy_weight:
        value -= config.entropy_weight * jnp.sum(batch.weight * entropy)
    real = batch.weight > 0
    sums |= {
        "loss": value,
        "weight": jnp.sum(batch.weight),
        "tokens": jnp.sum(real),
        "entropy": jnp.sum(entropy * real),
        "mean_logprob": jnp.sum(batch.weight * logprobs),
    }
    if "sampler_difference" in config.sums:
        # 0 stands for a missing logprob (MicroBatch.old_logprob).
        has_old = real & (batch.old_logprob != 0)
        sums["sampler_difference"] = jnp.sum(jnp.abs(logprobs - batch.old_logprob) * has_old)
    return value, sums


def _ratio_loss(
    logprobs: Float32[Array, "B A"], batch: packing.MicroBatch, config: LossConfig
) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
    """Compute policy_loss of a micro-batch, with the config's old logprobs and weights."""
    old, weight = jax.lax.stop_gradient(logprobs), batch.weight
    if not config.is_on_policy:
        old = batch.old_logprob
    # On policy the ratio below is 1. The weight alone corrects for the sampler's policy.
    if config.tis_cap:
        since_rollout = log_ratio(logprobs, batch.old_logprob, config.ratio, batch.answer)
        weight *= importance(since_rollout, config.tis_cap)
    return policy_loss(logprobs, old, batch.advantage, weight, config, batch.answer)


def policy_loss(
    logprobs: Float32[Array, "*shape"],
    old_logprobs: Float32[Array, "*shape"],
    advantages: Float32[Array, "*shape"],
    weights: Float32[Array, "*shape"],
    config: LossConfig,
    answer: Int32[Array, "*shape"] | None = None,
) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
    """Sum the surrogate loss with token weights (paper Eq. 2 without KL; spec section 9).

    Weights sum to 1 over a batch for a token mean; 0 masks a token. Sequence ratios need rows
    [B, A] and the `answer` index of each token. Returns the loss and weighted sums: share of
    clipped tokens (for "cispo": tokens with a ratio out of bounds), share of dual-clipped tokens,
    and approximate KL (always of tokens).
    """
    tokens = log_ratio(logprobs, old_logprobs)
    far = log_ratio(logprobs, old_logprobs, config.ratio, answer)
    ratio = jnp.exp(jnp.clip(far, -_FARTHEST, _FARTHEST))
    bounded = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    dual_clipped = jnp.zeros_like(ratio)
    if config.objective == "cispo":
        losses = -advantages * jax.lax.stop_gradient(bounded) * logprobs
        is_clipped = bounded != ratio
    else:
        plain, clipped = -advantages * ratio, -advantages * bounded
        losses, is_clipped = jnp.maximum(plain, clipped), clipped > plain
        if config.dual_clip:
            ceiling = -advantages * config.dual_clip
            negative = advantages < 0
            dual_clipped = negative & (losses > ceiling)
            losses = jnp.where(negative, jnp.minimum(losses, ceiling), losses)
    sums = {
        "clip_share": jnp.sum(weights * is_clipped),
        "dual_clip_share": jnp.sum(weights * dual_clipped),
        "approx_kl": -jnp.sum(weights * jnp.clip(tokens, -_FARTHEST, _FARTHEST)),
    }
    return jnp.sum(weights * losses), sums


def log_ratio(
    logprobs: Float32[Array, "*shape"],
    old_logprobs: Float32[Array, "*shape"],
    ratio: str = "token",
    answer: Int32[Array, "*shape"] | None = None,
) -> Float32[Array, "*shape"]:
    """Return log(pi / pi_old) of each token, or the sum or mean over its answer.

    `ratio` is "token", "sequence" (the sum) or "sequence_mean". The last two take rows [B, A] and
    need the `answer` index of each token (else ValueError); they are 0 where padded.
    """
    tokens = logprobs - old_logprobs
    if ratio == "token":
        return tokens
    if answer is None:
        raise ValueError(f"ratio {ratio!r}: needs to know which token is of which answer")
    sums = sum_by_answer(tokens, answer)
    if ratio == "sequence":
        return sums
    return sums / jnp.maximum(sum_by_answer(jnp.ones_like(tokens), answer), 1.0)


def importance(log_ratio: Float32[Array, "*shape"], cap: float) -> Float32[Array, "*shape"]:
    """Truncate importance weights to min(pi / pi_old, cap), constants for the gradient; cap >= 1.

    Source: Espeholt et al. 2018 (arXiv 1802.01561), the truncation of IMPALA.
    """
    return jax.lax.stop_gradient(jnp.exp(jnp.minimum(log_ratio, math.log(cap))))


def kl_estimate(
    logprobs: Float32[Array, "*shape"],
    reference_logprobs: Float32[Array, "*shape"],
    estimator: str = "k3",
) -> Float32[Array, "*shape"]:
    """Estimate KL(policy || reference) per token, for tokens sampled from the policy.

    With d = log reference - log policy (Schulman 2020, "Approximating KL divergence"):

      k1 = -d: unbiased, often negative. As a loss term it only adds noise, because its mean
        gradient is 0. Other libraries offer it.
      k2 = d^2 / 2: biased, but its mean gradient is the gradient of KL(policy || reference).
      k3 = exp(d) - d - 1: unbiased and never negative; its mean gradient is the gradient of
        KL(reference || policy). It is clipped to at most 10, beyond which it has no gradient.
    """
    difference = reference_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference**2 / 2
    difference = jnp.clip(difference, -_FARTHEST, _FARTHEST)
    return jnp.clip(jnp.exp(difference) - difference - 1.0, -10.0, 10.0)
