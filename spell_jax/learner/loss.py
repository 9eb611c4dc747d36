"""The clipped policy-gradient loss."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from spell_jax.learner import packing

BEHAVIOURS = ("current", "sampler", "truncated")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Hyper-parameters of the loss (paper section E.3; spec section 9).

    Attributes:
      clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
      dual_clip: with a negative advantage the loss is at most dual_clip * |advantage|.
      kl_weight: weight of the k3 estimate of KL(policy || reference); 0 needs no reference model.
      entropy_weight: weight of the entropy bonus.
      behaviour: whose log-probs the ratio is taken against: "current" (on-policy: the ratio is
        exactly 1 and no pass is run) or "sampler" (the log-probs recorded while sampling); or
        "truncated": as "current", each token weighed by how much more likely it is now than it was
        when it was sampled, at most importance_cap.
      importance_cap: see behaviour.
      aggregation: see packing.weigh.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    kl_weight: float = 0.0
    entropy_weight: float = 0.0
    behaviour: str = "current"
    importance_cap: float = 2.0
    aggregation: str = "token_mean"

    def __post_init__(self):
        for field in ("clip_low", "clip_high", "kl_weight", "entropy_weight"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"loss.{field} = {getattr(self, field)}: must be 0 or more")
        if not self.importance_cap >= 1:
            raise ValueError(
                f"loss.importance_cap = {self.importance_cap}: must be at least 1, for what is "
                "sampled from the policy itself"
            )
        if not self.dual_clip > 1:
            raise ValueError(f"loss.dual_clip = {self.dual_clip}: must be above 1")
        if self.behaviour not in BEHAVIOURS:
            raise ValueError(f"loss.behaviour = {self.behaviour!r}: must be one of {BEHAVIOURS}")
        packing.check_aggregation(self.aggregation)


def policy_loss(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    weights: jax.Array,
    config: LossConfig = LossConfig(),
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Clipped surrogate, summed with token weights (paper Eq. 2 without KL; spec section 9).

    Args:
      log_probs: float32, any shape, of the policy that is trained.
      old_log_probs: float32, same shape, of the policy that sampled.
      advantages: float32, same shape.
      weights: float32, same shape; sums to 1 over a batch for a token mean, 0 masks a token.
      config: clipping constants.

    Returns:
      The scalar loss, and weighted sums: clipped share, dual-clipped share, approximate KL.
    """
    log_ratio = jnp.clip(log_probs - old_log_probs, -20.0, 20.0)
    ratio = jnp.exp(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    pessimistic = jnp.maximum(plain, clipped)
    ceiling = -advantages * config.dual_clip
    negative = advantages < 0
    losses = jnp.where(negative, jnp.minimum(pessimistic, ceiling), pessimistic)
    sums = {
        "clip_share": jnp.sum(weights * (clipped > plain)),
        "dual_clip_share": jnp.sum(weights * (negative & (pessimistic > ceiling))),
        "approx_kl": -jnp.sum(weights * log_ratio),
    }
    return jnp.sum(weights * losses), sums


def importance(log_probs: jax.Array, old_log_probs: jax.Array, cap: float) -> jax.Array:
    """Truncated importance weights min(pi / pi_old, cap) of tokens, a constant of the gradient.

    Source: Espeholt et al. 2018 (arXiv 1802.01561), the truncation of IMPALA.

    Args:
      log_probs: float32, any shape, of the policy that is trained.
      old_log_probs: float32, same shape, of the policy that sampled.
      cap: at least 1.
    """
    log_ratio = jnp.minimum(log_probs - old_log_probs, math.log(cap))
    return jax.lax.stop_gradient(jnp.exp(log_ratio))


def kl_estimate(log_probs: jax.Array, reference_log_probs: jax.Array) -> jax.Array:
    """The k3 estimate of KL(policy || reference) per token: exp(d) - d - 1, d = ref - policy."""
    difference = jnp.clip(reference_log_probs - log_probs, -20.0, 20.0)
    return jnp.clip(jnp.exp(difference) - difference - 1.0, -10.0, 10.0)
