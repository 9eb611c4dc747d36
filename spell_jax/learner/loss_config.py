"""Config of the loss: the paper's, variants, and the variants that exclude each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from spell_jax.learner import aggregation, packing, preference
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime.config import check_choice, check_least

OLD_LOGPROBS = ("auto", "on_policy", "rollout", "recompute", "reference")
OBJECTIVES = ("clip", "cispo", "dpo")
RATIOS = ("token", "sequence", "sequence_mean")
KL_ESTIMATORS = ("k1", "k2", "k3")
SUPPORTS = ("full", "sampled")
ROUTINGS = ("own", "sampled")


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
        share one ratio, and every token receives a gradient. Both papers average over answers
        (aggregation "sequence_mean"). Any other aggregation also weights an answer's loss by its
        length.
      clip_low: lower clipping constant; the ratio is clipped to [1 - clip_low, 1 + clip_high].
      clip_high: upper clipping constant; above clip_low it is DAPO's clip-higher (arXiv
        2503.14476).
      dual_clip: bound for negative advantages: the loss is at most dual_clip * |advantage|
        (objective "clip" only); 0 disables it.
      kl_weight: weight of an estimate of KL(policy || reference); 0 needs no reference model.
      kl_estimator: name of the estimator, see kl_estimate.
      entropy_weight: weight of the entropy bonus.
      distillation_weight: weight of the distance to a teacher, the reference model, that reads a
        shorter prompt (TrainGroup.reference_prompt). Each token's advantage grows by this weight
        times log p_teacher(token | shorter prompt) - log p(token | prompt), so that the update
        lowers KL(policy || teacher) of each token (self-distillation from short to long contexts,
        arXiv 2604.17535). 0: no teacher. Groups without a shorter prompt have no teacher.
      old_logprobs: denominator of the ratio. "auto": "rollout" if answers are sampled from older
        weights (config.staleness) and tis_cap is 0, else "on_policy". "on_policy": the current
        logprobs, so the ratio is exactly 1 and no extra pass runs. "rollout": the logprobs recorded
        while sampling. "recompute": the logprobs of the weights before the step (one forward pass,
        needed if a step has several mini-batches). "reference": the logprobs of the reference
        model, a frozen copy of the first policy, after the group's reference_prompt (one forward
        pass; "dpo" only).
      tis_cap: cap C of truncated importance sampling; 0 disables it. Each token's loss is weighted
        by min(pi / pi_rollout, C), a constant for the gradient; `ratio` says whether pi is of the
        token or of its answer. Requires old_logprobs = "on_policy" and C >= 1; 2 is usual.
      support: tokens over which logprobs and entropies are normalized. "full": the vocabulary (the
        paper). "sampled": at each answer token, the tokens that the sampler's top-k, top-p and
        min-p kept there, so that the update's policy is the policy that sampled.
      routing: experts of a mixture that the update's policy uses. "own": the router's choice.
        "sampled": the experts that processed each token of prompt and answer while sampling, so
        that rounding changes no expert (rollout routing replay, arXiv 2510.11370). The router
        still weights the experts, and is trained through these weights.
      aggregation: name of the loss aggregation, see aggregation.weigh.
      sequence_tokens: constant of aggregation "sequence_sum", in tokens; usually the maximum answer
        length.
      beta: scale of the implicit rewards of objective "dpo" [DPO: 0.1; LongPO: 0.01].
      preference_weight: weight of the preference loss of objective "dpo".
      nll_weight: weight of the negative log-likelihood of the chosen answers, per token; 0: none.
        Objective "dpo" only.
      align_weight: weight of the distance between the rewards of a chosen answer after its two
        prompts (TrainGroup.aligned) [SoLoPO: alpha]. Objective "dpo" only.
    """

    # With old_logprobs "on_policy" the ratio is 1, so that neither clip acts. Both matter from the
    # second update on the same samples.
    objective: str = "clip"
    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    kl_weight: float = 0.0
    kl_estimator: str = "k3"
    entropy_weight: float = 0.0
    distillation_weight: float = 0.0
    old_logprobs: str = "auto"
    tis_cap: float = 0.0
    support: str = "full"
    routing: str = "own"
    # The mean over all answer tokens does not depend on how groups are packed or split.
    aggregation: str = "token_mean"
    sequence_tokens: int = 0
    beta: float = 0.1
    preference_weight: float = 1.0
    nll_weight: float = 0.0
    align_weight: float = 0.0

    def __post_init__(self):
        check_choice(self, "loss.", objective=OBJECTIVES, ratio=RATIOS)
        check_choice(self, "loss.", kl_estimator=KL_ESTIMATORS, old_logprobs=OLD_LOGPROBS)
        check_choice(self, "loss.", support=SUPPORTS, routing=ROUTINGS)
        if self.support == "sampled" and self.needs_reference:
            raise ValueError(
                "loss.support = 'sampled': must be 'full' for loss.kl_weight above 0, "
                "loss.distillation_weight above 0 and loss.objective = 'dpo'; the reference model "
                "gives mass to other tokens"
            )
        check_least(self, "loss.", clip_low=0, clip_high=0, kl_weight=0, entropy_weight=0)
        check_least(self, "loss.", distillation_weight=0)
        # A cap below 1 would scale down tokens that both policies rate alike.
        if self.tis_cap and not self.tis_cap >= 1:
            raise ValueError(f"loss.tis_cap = {self.tis_cap}: must be at least 1, or 0 for none")
        # The other old logprobs already correct for older weights: the correction would count
        # twice.
        if self.tis_cap and not self.is_on_policy:
            raise ValueError(
                f"loss.tis_cap = {self.tis_cap}: must be 0 for loss.old_logprobs = "
                f"{self.old_logprobs!r}; truncated importance sampling needs 'on_policy'"
            )
        # A bound below 1 would cut off tokens at ratio 1, which then had no gradient at all.
        if not (self.dual_clip > 1 or self.dual_clip == 0):
            raise ValueError(f"loss.dual_clip = {self.dual_clip}: must be above 1, or 0 for none")
        aggregation.check_aggregation(self.aggregation, self.sequence_tokens)
        self._check_preferences()

    def _check_preferences(self) -> None:
        """Check the fields that objective "dpo" needs, or that only "dpo" has."""
        check_least(self, "loss.", beta=0, preference_weight=0, nll_weight=0, align_weight=0)
        if (self.objective == "dpo") != (self.old_logprobs == "reference"):
            raise ValueError(
                f"loss.old_logprobs = {self.old_logprobs!r}: must be 'reference' if, and only if, "
                f"loss.objective is 'dpo'; it is {self.objective!r}"
            )
        if self.routing == "sampled" and self.objective == "dpo":
            raise ValueError(
                "loss.routing = 'sampled': must be 'own' for loss.objective = 'dpo', whose answers "
                "may follow other prompts than those that they were sampled after"
            )
        if self.objective != "dpo":
            for field in ("nll_weight", "align_weight"):
                if getattr(self, field):
                    raise ValueError(
                        f"loss.{field} = {getattr(self, field)}: must be 0 for loss.objective = "
                        f"{self.objective!r}, which has no chosen answers"
                    )
            return
        # DPO maximizes reward under a KL constraint to the reference (arXiv 2305.18290, Eq. 3).
        for field in ("kl_weight", "distillation_weight"):
            if getattr(self, field):
                raise ValueError(
                    f"loss.{field} = {getattr(self, field)}: must be 0 for loss.objective = 'dpo', "
                    "whose rewards already measure the distance to the reference model"
                )
        if self.aggregation != "sequence_mean":
            raise ValueError(
                f"loss.aggregation = {self.aggregation!r}: must be 'sequence_mean' for "
                "loss.objective = 'dpo', so that every pair counts the same"
            )

    def check_policy(self, policy: PolicyConfig) -> None:
        """Raise ValueError if the loss needs a mixture of experts and the policy has none."""
        if self.routing == "sampled" and not policy.experts:
            raise ValueError(
                "loss.routing = 'sampled': must be 'own', the policy has no mixture of experts"
            )

    def check_groups(self, groups: Sequence[packing.TrainGroup]) -> None:
        """Raise ValueError if a group does not have what the loss needs."""
        samples = [sample for group in groups for sample in group.samples]
        needs_logprobs = self.uses_rollout_logprobs or self.distillation_weight
        if needs_logprobs and any(sample.logprobs is None for sample in samples):
            raise ValueError(
                f"loss.old_logprobs = {self.old_logprobs!r}, loss.tis_cap = {self.tis_cap}, "
                f"loss.distillation_weight = {self.distillation_weight}: need the logprobs of "
                "every sample"
            )
        if self.align_weight and any(group.aligned is None for group in groups):
            raise ValueError(
                f"loss.align_weight = {self.align_weight}: needs an aligned group in every group"
            )
        if self.routing == "sampled" and any(
            sample.experts is None or sample.prompt_experts is None for sample in samples
        ):
            raise ValueError("loss.routing = 'sampled': needs the experts of every sample")

    def settled(self, is_stale: bool) -> LossConfig:
        """Replace old_logprobs "auto", given whether answers are sampled from older weights."""
        if self.old_logprobs != "auto":
            return self
        # With a cap, truncated importance sampling already corrects for the older weights.
        old_logprobs = "rollout" if is_stale and not self.tis_cap else "on_policy"
        return dataclasses.replace(self, old_logprobs=old_logprobs)

    @property
    def is_on_policy(self) -> bool:
        """Whether the current logprobs are the denominator of the ratio, which is then 1."""
        return self.old_logprobs in ("auto", "on_policy")

    @property
    def needs_reference(self) -> bool:
        """Whether the update needs the weights of the reference model."""
        return bool(self.kl_weight or self.distillation_weight) or self.old_logprobs == "reference"

    @property
    def scores_answers(self) -> bool:
        """Whether a forward pass scores the answers before the update."""
        return self.old_logprobs in ("recompute", "reference") or bool(self.distillation_weight)

    @property
    def is_paired(self) -> bool:
        """Whether the loss compares the two answers of a group, which then share a row."""
        return self.objective == "dpo"

    @property
    def uses_rollout_logprobs(self) -> bool:
        return self.old_logprobs == "rollout" or bool(self.tis_cap)

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the quantities that batch_loss sums over a micro-batch's tokens."""
        # The carry of the jitted update has these names before the first micro-batch, so they
        # follow from the config alone.
        names = ["loss", "weight", "tokens", "entropy", "mean_logprob"]
        if self.objective == "dpo":
            names += preference.SUMS
            return (*names, "alignment") if self.align_weight else tuple(names)
        names += ["clip_share", "dual_clip_share", "approx_kl"]
        # Recomputed logprobs replace the sampler's, which learner.start compares before that.
        names += ["sampler_difference"] if self.old_logprobs != "recompute" else []
        return (*names, "kl") if self.kl_weight else tuple(names)
