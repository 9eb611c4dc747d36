"""Loss of a micro-batch: policy gradients and their variants, or preferences (DPO).

`objective` combines an answer token's importance ratio (its own or that of its answer: `ratio`)
with its advantage; `tis_cap` corrects for samples of older weights. Objective "dpo" compares the
two answers of a group instead. Token losses, KL estimates to a reference model and an entropy bonus
are summed with the weights from packing.weigh.
"""

from __future__ import annotations

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp

from spell_jax.learner import packing, preference
from spell_jax.runtime.config import check_choice, check_least

OLD_LOGPROBS = ("on_policy", "rollout", "recompute", "reference")
OBJECTIVES = ("clip", "cispo", "dpo")
RATIOS = ("token", "sequence", "sequence_mean")
KL_ESTIMATORS = ("k1", "k2", "k3")
_FARTHEST = 20.0  # log-ratios are clipped to +-20, so that exp does not overflow


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Hyper-parameters of the loss (paper section E.3; spec section 9).

    Attributes:
      objective: "clip": the advantage times the ratio or the clipped ratio, whichever is more
        pessimistic (PPO, GRPO, DAPO, GSPO; paper Eq. 2). "cispo": the clipped ratio, a constant,
        times advantage and logprob, so that no token loses its gradient (CISPO of MiniMax-M1, arXiv
        2506.13585; it has in effect no lower bound, as with clip_low = 1). "dpo": preference of a
        group's chosen answer (advantage 1) over its rejected one (-1), see preference.py; it
        needs old_logprobs = "reference" and aggregation "sequence_mean", and has no ratio to clip.
      ratio: "token": the ratio of each token. "sequence": the product over the answer's tokens
        (EAPO Eq. 1). "sequence_mean": their geometric mean (GSPO, arXiv 2507.18071); clip_low and
        clip_high of 3e-4 and 4e-4 are usual for it. With the last two, all tokens of an answer
        share one ratio and each of them receives a gradient. Both papers average over answers,
        which is aggregation "sequence_mean"; any other aggregation also weights an answer's loss by
        its length.
      clip_low: lower clipping constant; the ratio is clipped to [1 - clip_low, 1 + clip_high].
      clip_high: upper clipping constant; above clip_low it is DAPO's clip-higher (arXiv
        2503.14476).
      dual_clip: bound for negative advantages: the loss is at most dual_clip * |advantage|
        (objective "clip" only); 0 disables it.
      kl_weight: weight of an estimate of KL(policy || reference); 0 needs no reference model.
      kl_estimator: name of the estimator, see kl_estimate.
      entropy_weight: weight of the entropy bonus.
      old_logprobs: denominator of the ratio. "on_policy": the current logprobs, so the ratio is
        exactly 1 and no extra pass runs. "rollout": the logprobs recorded while sampling.
        "recompute": the logprobs of the weights before the step (one forward pass, needed if a step
        has several mini-batches). "reference": those of the reference model, a frozen copy of the
        first policy, after the group's reference_prompt (one forward pass; objective "dpo" only).
      tis_cap: cap C of truncated importance sampling; 0 disables it. Each token's loss is weighted
        by min(pi / pi_rollout, C), a constant for the gradient; `ratio` says whether pi is of the
        token or of its answer. Requires old_logprobs = "on_policy" and C >= 1; 2 is usual.
      aggregation: name of the loss aggregation, see packing.weigh.
      sequence_tokens: constant of aggregation "sequence_sum", in tokens; usually the maximum answer
        length.
      beta: scale of the implicit rewards of objective "dpo" [DPO: 0.1; LongPO: 0.01].
      preference_weight: weight of the preference loss of objective "dpo".
      nll_weight: weight of the negative log-likelihood of the chosen answers, per token; 0: none.
        Objective "dpo" only.
      align_weight: weight of the distance between the rewards of a chosen answer after its two
        prompts (TrainGroup.aligned) [SoLoPO: alpha]. Objective "dpo" only.
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
    beta: float = 0.1
    preference_weight: float = 1.0
    nll_weight: float = 0.0
    align_weight: float = 0.0

    def __post_init__(self):
        check_choice(self, "loss.", objective=OBJECTIVES, ratio=RATIOS)
        check_choice(self, "loss.", kl_estimator=KL_ESTIMATORS, old_logprobs=OLD_LOGPROBS)
        check_least(self, "loss.", clip_low=0, clip_high=0, kl_weight=0, entropy_weight=0)
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
        self._check_preferences()

    def _check_preferences(self) -> None:
        """Checks the fields that objective "dpo" needs, or that only it has."""
        check_least(self, "loss.", beta=0, preference_weight=0, nll_weight=0, align_weight=0)
        if (self.objective == "dpo") != (self.old_logprobs == "reference"):
            raise ValueError(
                f"loss.old_logprobs = {self.old_logprobs!r}: must be 'reference' if, and only if, "
                f"loss.objective is 'dpo'; it is {self.objective!r}"
            )
        if self.objective != "dpo":
            for field in ("nll_weight", "align_weight"):
                if getattr(self, field):
                    raise ValueError(
                        f"loss.{field} = {getattr(self, field)}: must be 0 for loss.objective = "
                        f"{self.objective!r}, which has no chosen answers"
                    )
            return
        if self.kl_weight:
            raise ValueError(
                f"loss.kl_weight = {self.kl_weight}: must be 0 for loss.objective = 'dpo', whose "
                "rewards already measure the distance to the reference model"
            )
        if self.aggregation != "sequence_mean":
            raise ValueError(
                f"loss.aggregation = {self.aggregation!r}: must be 'sequence_mean' for "
                "loss.objective = 'dpo', so that every pair counts the same"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the update needs the weights of the reference model."""
        return bool(self.kl_weight) or self.old_logprobs == "reference"

    @property
    def uses_rollout_logprobs(self) -> bool:
        return self.old_logprobs == "rollout" or bool(self.tis_cap)

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the quantities that batch_loss sums over a micro-batch's tokens."""
        names = ["loss", "weight", "tokens", "entropy", "mean_logprob"]
        if self.objective == "dpo":
            names += preference.SUMS
            return (*names, "alignment") if self.align_weight else tuple(names)
        names += ["clip_share", "dual_clip_share", "approx_kl"]
        names += ["sampler_difference"] if self.old_logprobs != "recompute" else []
        return (*names, "kl") if self.kl_weight else tuple(names)


ROLE_SUMS = ("role_tokens", "role_entropy")  # like LossConfig.sums, but one value per role


def batch_loss(
    logprobs: jax.Array,
    entropy: jax.Array,
    batch: packing.MicroBatch,
    config: LossConfig,
    reference_logprobs: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The scalar loss of a micro-batch, and the sums named in LossConfig.sums and ROLE_SUMS.

    Logprobs and entropies (nats) are float32 [B, A]; the reference's are needed for a KL term.
    """
    chex.assert_equal_shape([logprobs, entropy, batch.weight])
    if config.objective == "dpo":
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
        "role_tokens": packing.sum_by_role(real, batch.role),
        "role_entropy": packing.sum_by_role(entropy * real, batch.role),
    }
    if "sampler_difference" in config.sums:
        given = real & (batch.old_logprob != 0)
        sums["sampler_difference"] = jnp.sum(jnp.abs(logprobs - batch.old_logprob) * given)
    return value, sums


def _ratio_loss(
    logprobs: jax.Array, batch: packing.MicroBatch, config: LossConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """policy_loss of a micro-batch, with the old logprobs and the weights of the config."""
    old, weight = jax.lax.stop_gradient(logprobs), batch.weight
    if config.old_logprobs != "on_policy":
        old = batch.old_logprob
    if config.tis_cap:
        since_rollout = log_ratio(logprobs, batch.old_logprob, config.ratio, batch.answer)
        weight *= importance(since_rollout, config.tis_cap)
    return policy_loss(logprobs, old, batch.advantage, weight, config, batch.answer)


def policy_loss(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    weights: jax.Array,
    config: LossConfig = LossConfig(),
    answer: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Surrogate loss, summed with token weights (paper Eq. 2 without KL; spec section 9).

    Arrays are float32 of one shape. Weights sum to 1 over a batch for a token mean; 0 masks a
    token. Sequence ratios need shapes [B, A] and the `answer` index of each token, int32 [B, A].
    Returns the scalar loss and weighted sums: share of clipped tokens (for "cispo": tokens whose
    ratio is out of bounds), share of dual-clipped tokens, and approximate KL (always of tokens).
    """
    chex.assert_equal_shape([logprobs, old_logprobs, advantages, weights])
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
    """log(pi / pi_old) of each token, or the sum or mean over its answer; float32.

    `ratio` is "token", "sequence" (the sum) or "sequence_mean". The last two take shapes [B, A] and
    need the `answer` index of each token, int32 (else ValueError); they are 0 where padded.
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
    """Truncated importance weights min(pi / pi_old, cap), constants for the gradient; cap >= 1.

    Source: Espeholt et al. 2018 (arXiv 1802.01561), the truncation of IMPALA.
    """
    return jax.lax.stop_gradient(jnp.exp(jnp.minimum(log_ratio, math.log(cap))))


def kl_estimate(
    logprobs: jax.Array, reference_logprobs: jax.Array, estimator: str = "k3"
) -> jax.Array:
    """Estimate of KL(policy || reference) per token, for tokens sampled from the policy.

    With d = log reference - log policy (Schulman 2020, "Approximating KL divergence"):

      k1 = -d: unbiased, often negative. As a loss term it only adds noise, because the mean of its
        gradient is 0. Other libraries offer it.
      k2 = d^2 / 2: biased, but the mean of its gradient is that of KL(policy || reference).
      k3 = exp(d) - d - 1: unbiased and never negative; the mean of its gradient is that of
        KL(reference || policy). It is clipped to at most 10, beyond which it has no gradient.
    """
    chex.assert_equal_shape([logprobs, reference_logprobs])
    difference = reference_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference**2 / 2
    difference = jnp.clip(difference, -_FARTHEST, _FARTHEST)
    return jnp.clip(jnp.exp(difference) - difference - 1.0, -10.0, 10.0)
