"""Config of EAPO: the paper's recipe, its ablations, and what the paper leaves open."""

from __future__ import annotations

import dataclasses

from spell_jax.algorithms.config import AlgorithmConfig, RolloutBudget
from spell_jax.runtime.config import check_choice, check_least
from spell_jax.selfplay import evidence

REWARD_MODEL = "reward_model"
REWARD_MODELS = ("co_evolving", "static", "logged", "none")
REWARDED = ("co_evolving", "static")  # their scores are part of the reward


@dataclasses.dataclass(frozen=True)
class EapoConfig(AlgorithmConfig):
    """Fields of config.algorithm for EAPO. The defaults are the paper's where it states them.

    Attributes:
      questions: questions per step [paper: batch size].
      group_size: G, answers to a question.
      format_weight: weight of the format in the total reward (Eq. 2, alpha).
      evidence_weight: weight of the evidence in the total reward (Eq. 2, beta).
      outcome_weight: weight of the outcome in the total reward (Eq. 2, gamma).
      reward_model: "co_evolving"; "static" (it scores and is never trained); "none": evidence is
        not scored and evidence_weight is added to the outcome's (section 5.3 with beta 0: GRPO by
        outcome alone, the paper's control, which still requires the format); or "logged": the same
        rewards as with "none", but evidence is scored for the metrics (the control's curve in
        Figure 6).
      refresh_every: steps between two refreshes of a co-evolving reward model.
      most_rollouts: most scorings kept for a refresh, each with the confirmed scores of a group;
        the oldest are dropped first.
      scoring_temperature: sampling temperature of the reward model; 0: greedy. Rejection
        fine-tuning (section 3.3) selects among replies that differ. In the tiny world the reward
        model learned to order answers neither from greedy nor from sampled replies
        (launch/experiments/notebooks/eapo_tiny.md).
      retries: further calls to the reward model after a malformed reply.
      keep_equal: whether groups of equal rewards are trained on too (Eq. 1 leaves none out:
        configs/eapo.py). Their advantages are 0, but the loss is averaged over them as well.
    """

    name: str = "eapo"
    questions: int = 64
    group_size: int = 6
    # The weights of the paper's Eq. 2.
    format_weight: float = 0.1
    evidence_weight: float = 0.3
    outcome_weight: float = 0.6
    reward_model: str = "co_evolving"
    refresh_every: int = 20
    most_rollouts: int = 1280
    scoring_temperature: float = 1.0
    # The paper does not say what happens after a malformed reply (docs/algorithms.md, EAPO).
    retries: int = 1
    keep_equal: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_choice(self, "algorithm.", reward_model=REWARD_MODELS)
        check_least(self, "algorithm.", questions=1, group_size=2, refresh_every=1, most_rollouts=1)
        check_least(self, "algorithm.", format_weight=0, evidence_weight=0, outcome_weight=0)
        check_least(self, "algorithm.", scoring_temperature=0, retries=0)

    def budgets(self) -> list[RolloutBudget]:
        answers = RolloutBudget(
            "answers", "responder", self.questions, self.group_size, self.questions
        )
        if self.reward_model == "none":
            return [answers]
        # An upper bound: every first reply may be malformed.
        scoring_prompts = self.questions * (1 + self.retries)
        trained_scorings = self.most_rollouts if self.reward_model == "co_evolving" else 0
        return [
            answers,
            RolloutBudget(
                "scorings", REWARD_MODEL, scoring_prompts, 1, trained_scorings, REWARD_MODEL
            ),
        ]

    @property
    def weights(self) -> evidence.Weights:
        """Weights of Eq. 2; without rewarded evidence, of section 5.3 with beta 0."""
        shares = self.evidence_weight, self.outcome_weight
        if self.reward_model not in REWARDED:
            # The outcome gets the evidence's weight, so that the largest reward stays the same.
            shares = 0.0, sum(shares)
        return evidence.Weights(self.format_weight, *shares)
