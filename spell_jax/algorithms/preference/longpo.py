"""LongPO: the policy prefers its answers after short contexts (Chen et al. 2025, arXiv 2502.13922).

1. questions: as in RLVR, given or written once by the starting policy from a few documents. These
   documents are the short context x_S; all documents of the cluster are the long one, x_L.
2. answer: the policy answers each question once after x_S (chosen, y_S) and once after x_L
   (rejected, y_L). No reward chooses between them.
3. groups: one pair per question, after the long prompt. With the loss fields of configs/longpo.py
   the update minimizes, with lambda and beta of .01 in the authors' training script,

       NLL(y_S | x_L) - lambda log sigmoid(r(y_S) - r(y_L)),
       r(y) = beta (log pi(y | x_L) - log pi_ref(y | x_S)).

   The reference model reads the short context: that is the short-to-long constraint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from spell_jax.algorithms.base import (
    USED,
    AlgorithmContext,
    Annotation,
    Ask,
    Episode,
    Key,
    RolloutBudget,
)
from spell_jax.algorithms.preference import episode as pairs
from spell_jax.algorithms.preference.episode import CHOSEN, REJECTED, PairEpisode
from spell_jax.algorithms.rlvr.algorithm import Rlvr, RlvrConfig
from spell_jax.learner.packing import TrainGroup
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay import rules


@dataclasses.dataclass(frozen=True)
class LongPoConfig(RlvrConfig):
    """RLVR's fields; those of rewards matter only for metrics, `group_size` not at all.

    A step has a pair for each of `generation_batch` questions.
    """

    name: str = "longpo"
    responder_reward: str = "rule"

    def budgets(self) -> list[RolloutBudget]:
        batch = self.generation_batch
        what = "answers, after the short context and after all documents"
        return [RolloutBudget(what, "responder", batch, 2, batch)]


class LongPo(Rlvr):
    """RLVR's questions, with a preference pair instead of a group of rewarded answers."""

    episode = PairEpisode

    def __init__(self, config: LongPoConfig, context: AlgorithmContext):
        given = pairs.with_short_contexts(context.questions())
        super().__init__(config, dataclasses.replace(context, questions=lambda: given))

    async def answer(self, ask: Ask, episode: Episode) -> PairEpisode:
        """Asks for an answer after each context; a prompt over the cap ends the episode."""
        e: PairEpisode = episode
        shown = [e.cluster.documents[i] for i in e.shown]
        both = (shown, e.cluster.documents)
        texts = [self.prompts.responder(e.task, documents, e.question) for documents in both]
        short, long = await ask("responder", texts)
        if short is None or long is None:
            return dataclasses.replace(e, status="overlong", reason="responder_prompt")
        return dataclasses.replace(
            e,
            response=long,
            predictions=(rules.extract_answer(long.texts[0], e.task),),
            rule=(rules.score(long.texts[0], e.reference, e.task),),
            short_response=short,
            short_predictions=(rules.extract_answer(short.texts[0], e.task),),
            short_rule=(rules.score(short.texts[0], e.reference, e.task),),
        )

    def groups(
        self, episodes: Sequence[Episode], key: Key
    ) -> tuple[list[TrainGroup], list[Annotation]]:
        """The pairs, without those of two equal answers, which have no preference."""
        groups, annotations = [], []
        for e in episodes:
            if why := e.why_no_pair:
                annotations.append(Annotation(used={"responder": why}))
                continue
            groups.append(e.pair())
            annotations.append(Annotation({"responder": [CHOSEN, REJECTED]}, {"responder": USED}))
        return groups, annotations

    def metrics(self, episodes: Sequence[Episode]) -> Metrics:
        metrics = super().metrics(episodes)
        for e in episodes:
            for suffix in ("", f"/{e.task}"):
                metrics.add(f"preference_pairs{suffix}", not e.why_no_pair)
                for score in e.short_rule:
                    metrics.add(f"short_solve_rate{suffix}", score)
        return metrics

    def record(self, episode: Episode, annotation: Annotation) -> dict[str, Any]:
        return pairs.record(episode, annotation, self.prompts)
