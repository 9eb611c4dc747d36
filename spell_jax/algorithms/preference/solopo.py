"""SoLoPO: preferences after short contexts, rewards aligned with the long one.

Sun et al. 2025 (arXiv 2505.11166) divide preference optimization on long contexts in two:

1. answer: the policy answers each question G times after its short context x_S, and once after the
   long one, x_L, which is only scored.
2. groups: a right answer y_w and a wrong one y_l, both to x_S, are a pair after the short prompt.
   y_w is also put after the long prompt. With the loss fields of configs/solopo.py the update
   minimizes

       -log sigmoid(r(x_S, y_w) - r(x_S, y_l)) + alpha |r(x_L, y_w) - r(x_S, y_w)|,
       r(x, y) = beta (log pi(y | x) - log pi_ref(y | x)):

   DPO on the short context, and the short-to-long reward alignment of the chosen answer.
"""

from __future__ import annotations

import dataclasses

from spell_jax.algorithms.base import AlgorithmContext
from spell_jax.algorithms.config import RolloutBudget
from spell_jax.algorithms.preference.episode import PairEpisode
from spell_jax.algorithms.preference.pairs import (
    CHOSEN,
    REJECTED,
    PairAnswering,
    count_pairs,
    pair_groups,
)
from spell_jax.algorithms.rlvr.config import StaticConfig
from spell_jax.algorithms.rlvr.question_sets import make_question_set
from spell_jax.algorithms.rlvr.static_algorithm import StaticAlgorithm
from spell_jax.learner.packing import TrainGroup
from spell_jax.runtime.config import check_least


@dataclasses.dataclass(frozen=True)
class SoLoPoConfig(StaticConfig):
    """Fields of config.algorithm for SoLoPO.

    The rule chooses the pair. A step has at most one pair for each of `generation_batch` questions:
    questions without a pair are not replaced.

    Attributes:
      group_size: G, answers to a question after the short context.
    """

    name: str = "solopo"
    group_size: int = 8

    def __post_init__(self):
        super().__post_init__()
        check_least(self, "algorithm.", group_size=2)

    def budgets(self) -> list[RolloutBudget]:
        batch = self.generation_batch
        return [
            RolloutBudget("answers after the short context", "responder", batch, self.group_size),
            # A pair's row has two prompts and three answers: at most three such groups.
            RolloutBudget("answers after all documents", "responder", batch, 1, 3 * batch),
        ]


def make_solopo(config: SoLoPoConfig, context: AlgorithmContext) -> StaticAlgorithm:
    """Make the algorithm from its parts: questions, answers after two contexts, and pairs."""
    return StaticAlgorithm(
        # A question without a known short context cannot form a pair.
        make_question_set(config, context, PairEpisode, short_contexts=True),
        PairAnswering(config, context, config.group_size).answer_batches,
        lambda episodes, key: pair_groups(episodes, choose_answers, pair_answers),
        lambda episodes: count_pairs(episodes, config, choose_answers),
    )


def choose_answers(episode: PairEpisode) -> tuple[int, int] | str:
    # Which answers form the pair is from memory of the paper (docs/algorithms.md, SoLoPO).
    right = [bool(score) for score in episode.short_rule]
    return "equal_rewards" if len(set(right)) < 2 else (right.index(True), right.index(False))


def pair_answers(episode: PairEpisode, chosen_index: int, rejected_index: int) -> TrainGroup:
    """Pair answers after the short context; add the chosen answer after all documents."""
    assert episode.short_response is not None and episode.response is not None
    samples = episode.samples()
    return TrainGroup(
        episode.short_response.prompt,
        [samples[chosen_index], samples[rejected_index]],
        [CHOSEN, REJECTED],
        "responder",
        # No advantage: this answer counts by the distance of its rewards alone
        # (loss.align_weight).
        aligned=TrainGroup(episode.response.prompt, [samples[chosen_index]], [0.0], "responder"),
    )
