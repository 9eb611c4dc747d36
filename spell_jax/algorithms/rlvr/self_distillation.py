"""Self-distillation from short to long contexts (arXiv 2604.17535): no reference, no verdict.

1. answer: the policy answers each question G times from all documents. The questions are RLVR's,
   given or written once by the starting policy; their answers are used for metrics alone.
2. groups: every answer of every question, with an advantage of 0. The teacher, a frozen copy of the
   starting policy, reads only the documents that the question was written from, and scores each
   token of the answer. The token's advantage is

       loss.distillation_weight * (log p_teacher(token | short prompt) - log p(token | all)),

   which the learner adds (learner/old_logprobs.py), so that the update lowers
   KL(policy || teacher). SPELL and RLVR take the same field beside their own advantages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from spell_jax.algorithms.base import USED, AlgorithmContext, Annotation
from spell_jax.algorithms.config import RolloutBudget
from spell_jax.algorithms.rlvr.config import StaticConfig
from spell_jax.algorithms.rlvr.question_sets import make_question_set
from spell_jax.algorithms.rlvr.static_algorithm import StaticAlgorithm
from spell_jax.algorithms.spell.answering import Answering
from spell_jax.algorithms.spell.episode import SpellEpisode
from spell_jax.algorithms.spell.metrics import count_questions
from spell_jax.learner.packing import TrainGroup
from spell_jax.runtime.config import check_least


@dataclasses.dataclass(frozen=True)
class SelfDistillationConfig(StaticConfig):
    """Fields of config.algorithm for self-distillation.

    Every answered question is trained on, so a step has one round of `generation_batch` questions.

    Attributes:
      group_size: G, answers to a question.
    """

    name: str = "self_distillation"
    group_size: int = 8

    def __post_init__(self):
        super().__post_init__()
        check_least(self, "algorithm.", group_size=2)

    def budgets(self) -> list[RolloutBudget]:
        batch = self.generation_batch
        return [RolloutBudget("answers", "responder", batch, self.group_size, batch)]


def make_self_distillation(
    config: SelfDistillationConfig, context: AlgorithmContext
) -> StaticAlgorithm:
    """Make the algorithm from its parts: questions, answers, and groups for the teacher."""
    answering = Answering(config, context, config.group_size)
    return StaticAlgorithm(
        make_question_set(config, context),
        answering.answer_batches,
        lambda episodes, key: _teacher_groups(episodes, answering),
        lambda episodes: count_questions(episodes, config),
    )


def _teacher_groups(
    episodes: Sequence[SpellEpisode], answering: Answering
) -> tuple[list[TrainGroup], list[Annotation]]:
    """Return a group for each answered question, whatever the rewards are."""
    groups, annotations = [], []
    for e in episodes:
        if e.response is None:
            annotations.append(Annotation(used={"responder": e.status}))
            continue
        # The learner adds the teacher's advantages token by token; rewards have no part in
        # them.
        advantages = [0.0] * len(e.response.samples)
        groups.append(answering.responder_group(e, advantages))
        annotations.append(Annotation({"responder": advantages}, {"responder": USED}))
    return groups, annotations
