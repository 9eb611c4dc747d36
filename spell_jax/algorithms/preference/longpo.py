"""LongPO: the policy prefers its answers after short contexts (Chen et al. 2025, arXiv 2502.13922).

1. answer: the policy answers each question once after its short context x_S (chosen, y_S) and once
   after the long one, x_L (rejected, y_L). No reward chooses between them.
2. groups: one pair per question, after the long prompt. With the loss fields of configs/longpo.py
   the update minimizes, with lambda and beta of .01 in the authors' training script,

       NLL(y_S | x_L) - lambda log sigmoid(r(y_S) - r(y_L)),
       r(y) = beta (log pi(y | x_L) - log pi_ref(y | x_S)).

   The reference model reads the short context: that is the short-to-long constraint.
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


@dataclasses.dataclass(frozen=True)
class LongPoConfig(StaticConfig):
    """Fields of config.algorithm for LongPO.

    A step has a pair for each of `generation_batch` questions. Pairs need no mixed rewards, so a
    second round would only add pairs. The paper samples its pairs once (docs/algorithms.md,
    "Departures" of LongPO).
    """

    name: str = "longpo"

    def budgets(self) -> list[RolloutBudget]:
        batch = self.generation_batch
        what = "answers, after the short context and after all documents"
        return [RolloutBudget(what, "responder", batch, 2, batch)]


def make_longpo(config: LongPoConfig, context: AlgorithmContext) -> StaticAlgorithm:
    """Make the algorithm from its parts: questions, answers after two contexts, and pairs."""
    return StaticAlgorithm(
        # A question without a known short context cannot form a pair.
        make_question_set(config, context, PairEpisode, short_contexts=True),
        PairAnswering(config, context).answer_batches,
        lambda episodes, key: pair_groups(episodes, choose_answers, pair_answers),
        lambda episodes: count_pairs(episodes, config, choose_answers),
    )


def choose_answers(episode: PairEpisode) -> tuple[int, int] | str:
    chosen_sample, rejected_sample = episode.samples()
    assert episode.short_response is not None
    if not (chosen_sample.stopped or episode.short_response.scored_truncated):
        return "truncated"  # the loss would teach an answer without its end
    # Equal answers state no preference: their log-probabilities are equal for any weights.
    return "equal_answers" if list(chosen_sample.tokens) == list(rejected_sample.tokens) else (0, 1)


def pair_answers(episode: PairEpisode, chosen_index: int, rejected_index: int) -> TrainGroup:
    """Pair both answers after all documents; the reference model reads the short context."""
    assert episode.short_response is not None and episode.response is not None
    samples = episode.samples()
    return TrainGroup(
        episode.response.prompt,
        [samples[chosen_index], samples[rejected_index]],
        [CHOSEN, REJECTED],
        "responder",
        reference_prompt=episode.short_response.prompt,
    )
