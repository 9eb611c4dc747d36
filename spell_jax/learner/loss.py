"""The policy-gradient loss of a micro-batch, and its variants.

1. Of every answer token there is a log-ratio: how much more likely it is now than under the
   behavior policy; `ratio` says whether it is the token's own or that of its whole answer.
2. `objective` makes a loss of ratio and advantage: "clip" (PPO's, which GRPO, DAPO and GSPO have)
   or "cispo".
3. With `tis_cap`, truncated importance weights correct for samples of older weights.
4. Token losses are added with the weights that packing.weigh gave them; estimates of the KL to a
   reference model and an entropy bonus are added with the same.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from spell_jax.learner import packing
from spell_jax.runtime.config import check_choice

OLD_LOGPROBS = ("on_policy", "rollout", "recompute")
OBJECTIVES = ("clip", "cispo")
RATIOS = ("token", "sequence", "sequence_mean")
KL_ESTIMATORS = ("k1", "k2", "k3")
_FARTHEST = 20.0  # log-ratios are kept within it, so that nothing overflows


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Hyper-parameters of the loss (paper section E.3; spec section 9).

    Attributes:
      objective: "clip": the pessimistic one of the ratio and the clipped ratio, times the advantage
        (paper Eq. 2). "cispo": the clipped ratio, a constant, times advantage and logprob, so that
        no token loses its gradient (CISPO of MiniMax-M1, arXiv 2506.13585; in effect it has no
        lower bound, which clip_low = 1 is).
      ratio: "token": of each token by itself. "sequence": of an answer, the product over its
        tokens (EAPO Eq. 1). "sequence_mean": its geometric mean over them (GSPO, arXiv 2507.18071),
        so that clip_low and clip_high of 3e-4 and 4e-4 are usual. All tokens of an answer then have
        one ratio, of which each has a gradient. Both papers average over answers: aggregation
        "sequence_mean"; any other weighs an answer's loss by its length as well.
      clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; a higher clip_high
        is DAPO's clip-higher (arXiv 2503.14476).
      dual_clip: with a negative advantage the loss is at most dual_clip * |advantage| (objective
        "clip" only); 0: no such bound.
      kl_weight: weight of an estimate of KL(policy || reference); 0 needs no reference model.
      kl_estimator: see kl_estimate.
      entropy_weight: weight of the entropy bonus.
      old_logprobs: denominator of the ratio. "on_policy": the current logprobs, so that the ratio
        is exactly 1 and no extra pass runs. "rollout": the logprobs recorded while sampling.
        "recompute": the logprobs of the weights before the step (one forward pass, needed when a
        step has several mini-batches).
      tis_cap: cap C of truncated importance sampling, 0 to switch it off. Each token's loss is
        weighted by min(pi / pi_rollout, C), a constant of the gradient; `ratio` says whether pi is
        of the token or of its answer. Requires old_logprobs = "on_policy" and C >= 1; 2 is usual.
      aggregation: see packing.weigh.
      sequence_tokens: the constant of aggregation "sequence_sum", in tokens; the longest answer
        that may be sampled is usual.
    """

    objective: str = "clip"
    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    kl_weight: float = 0.0
    kl_estimator: str = "k3"
    entropy_weight: float = 0.0
    old_logprobs: str = "on_policy"
    tis_cap: float = 0.0
    aggregation: str = "token_mean"
    sequence_tokens: int = 0

    def __post_init__(self):
        check_choice(self, "loss.", objective=OBJECTIVES, ratio=RATIOS)
        check_choice(self, "loss.", kl_estimator=KL_ESTIMATORS, old_logprobs=OLD_LOGPROBS)
        for field in ("clip_low", "clip_high", "kl_weight", "entropy_weight"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"loss.{field} = {getattr(self, field)}: must be 0 or more")
        if self.tis_cap and not self.tis_cap >= 1:
            raise ValueError(f"loss.tis_cap = {self.tis_cap}: must be at least 1, or 0 for none")
        if self.tis_cap and self.old_logprobs != "on_policy":
            raise ValueError(
                f"loss.tis_cap = {self.tis_cap}: must be 0 for loss.old_logprobs = "
                f"{self.old_logprobs!r}; truncated importance sampling needs 'on_policy'"
            )
        if not (self.dual_clip > 1 or self.dual_clip == 0):
            raise ValueError(f"loss.dual_clip = {self.dual_clip}: must be above 1, or 0 for none")
        packing.check_aggregation(self.aggregation, self.sequence_tokens)

    @property
    def uses_rollout_logprobs(self) -> bool:
        """Whether the loss accounts for samples of other weights than the current ones."""
        return self.old_logprobs == "rollout" or bool(self.tis_cap)

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the numbers that batch_loss sums up over a micro-batch's tokens."""
        names = ["loss", "weight", "tokens", "entropy", "mean_logprob"]
        names += ["clip_share", "dual_clip_share", "approx_kl"]
        names += ["sampler_difference"] if self.old_logprobs != "recompute" else []
        return (*names, "kl") if self.kl_weight else tuple(names)


ROLE_SUMS = ("role_tokens", "role_entropy")  # as LossConfig.sums, but one a role


def batch_loss(
    logprobs: jax.Array,
    entropy: jax.Array,
    batch: packing.MicroBatch,
    config: LossConfig,
    reference_logprobs: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of a micro-batch with all its terms.

    Args:
      logprobs: float32 [B, A], of the policy that is trained.
      entropy: float32 [B, A], in nats.
      batch: whose logprobs these are.
      config: the loss.
      reference_logprobs: float32 [B, A], of the reference model, if kl_weight is not 0.

    Returns:
      The scalar loss; LossConfig.sums and ROLE_SUMS by name.
    """
    old, weight = jax.lax.stop_gradient(logprobs), batch.weight
    if config.old_logprobs != "on_policy":
        old = batch.old_logprob
    if config.tis_cap:
        since_rollout = log_ratio(logprobs, batch.old_logprob, config.ratio, batch.answer)
        weight *= importance(since_rollout, config.tis_cap)
    value, sums = policy_loss(logprobs, old, batch.advantage, weight, config, batch.answer)
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
        "role_tokens": packing.sum_by_role(real, batch.role),
        "role_entropy": packing.sum_by_role(entropy * real, batch.role),
    }
    if config.old_logprobs != "recompute":
        given = real & (batch.old_logprob != 0)
        sums["sampler_difference"] = jnp.sum(jnp.abs(logprobs - batch.old_logprob) * given)
    return value, sums


def policy_loss(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    weights: jax.Array,
    config: LossConfig = LossConfig(),
    answer: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Surrogate loss, summed with token weights (paper Eq. 2 without KL; spec section 9).

    Args:
      logprobs: float32, any shape, of the policy that is trained.
      old_logprobs: float32, same shape, of the policy that sampled.
      advantages: float32, same shape.
      weights: float32, same shape; sums to 1 over a batch for a token mean, 0 masks a token.
      config: objective, ratio and clipping constants.
      answer: int32, same shape, which is then [B, A]: see MicroBatch; needed for the ratio of a
        sequence.

    Returns:
      The scalar loss, and weighted sums: clipped share (of objective "cispo": of tokens whose ratio
      is not in bounds), dual-clipped share, approximate KL (of tokens, whatever the ratio is of).
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
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    ratio: str = "token",
    answer: jax.Array | None = None,
) -> jax.Array:
    """log(pi / pi_old) of tokens, or of the answers that they are in.

    Args:
      logprobs, old_logprobs: float32, any shape; [B, A] unless the ratio is of tokens.
      ratio: "token"; "sequence": the sum over the token's answer; "sequence_mean": the mean.
      answer: int32 [B, A], see MicroBatch; needed unless the ratio is of tokens.

    Returns:
      float32, same shape; of an answer's ratio 0 where padded.

    Raises:
      ValueError: the answers are not given, and needed.
    """
    tokens = logprobs - old_logprobs
    if ratio == "token":
        return tokens
    if answer is None:
        raise ValueError(f"ratio {ratio!r}: needs to know which token is of which answer")
    sums = packing.sum_by_answer(tokens, answer)
    if ratio == "sequence":
        return sums
    return sums / jnp.maximum(packing.sum_by_answer(jnp.ones_like(tokens), answer), 1.0)


def importance(log_ratio: jax.Array, cap: float) -> jax.Array:
    """Truncated importance weights min(pi / pi_old, cap), a constant of the gradient.

    Source: Espeholt et al. 2018 (arXiv 1802.01561), the truncation of IMPALA.

    Args:
      log_ratio: float32, any shape, log(pi / pi_old).
      cap: at least 1.
    """
    return jax.lax.stop_gradient(jnp.exp(jnp.minimum(log_ratio, math.log(cap))))


def kl_estimate(
    logprobs: jax.Array, reference_logprobs: jax.Array, estimator: str = "k3"
) -> jax.Array:
    """An estimate of KL(policy || reference) per token, of tokens that the policy drew.

    With d = log reference - log policy (Schulman 2020, "Approximating KL divergence"):

      k1 = -d: unbiased, and often negative. As a term of a loss it does nothing but add noise: the
        mean of its gradient is 0. It is here because others offer it.
      k2 = d^2 / 2: biased, but the mean of its gradient is that of KL(policy || reference).
      k3 = exp(d) - d - 1: unbiased and never negative; the mean of its gradient is that of
        KL(reference || policy). It is at most 10, beyond which it has no gradient.

    Args:
      logprobs, reference_logprobs: float32, same shape.
      estimator: one of KL_ESTIMATORS.
    """
    difference = reference_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference**2 / 2
    difference = jnp.clip(difference, -_FARTHEST, _FARTHEST)
    return jnp.clip(jnp.exp(difference) - difference - 1.0, -10.0, 10.0)
