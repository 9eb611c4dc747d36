"""The base of LongPO and SoLoPO: questions answered after a short and after the long context.

Questions are RLVR's, given or written once by the starting policy. The documents that a question
was written from are the short context; all documents of the cluster are the long one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from spell_jax.algorithms.base import USED, AlgorithmContext, Annotation, Episode, Key
from spell_jax.algorithms.preference import episode as pairs
from spell_jax.algorithms.preference.episode import PairEpisode
from spell_jax.algorithms.rlvr.algorithm import Rlvr, RlvrConfig
from spell_jax.data.questions import with_short_contexts
from spell_jax.data.samples import Sample
from spell_jax.learner.packing import TrainGroup
from spell_jax.rollout.replies import Ask, Reply
from spell_jax.runtime.metrics import Metrics

CHOSEN, REJECTED = 1.0, -1.0  # advantages of the answers of a pair


class ShortToLong(Rlvr):
    """RLVR's questions, with a preference pair instead of a group of rewarded answers."""

    episode = PairEpisode

    def __init__(self, config: RlvrConfig, context: AlgorithmContext, short_answers: int):
        # A question without a known short context cannot form a pair and is left out.
        questions = with_short_contexts(context.questions())
        super().__init__(config, dataclasses.replace(context, questions=lambda: questions))
        self._short_answers = short_answers

    async def answer(self, ask: Ask, episode: Episode) -> PairEpisode:
        """Ask for answers after each context; a prompt over the cap ends the episode."""
        e: PairEpisode = episode
        shown = [e.documents[i] for i in e.shown]
        # The short context first: a refused short prompt saves the long one. One answer after all
        # documents is LongPO's rejected answer, and for SoLoPO a metric.
        contexts = ((shown, self._short_answers), (e.documents, 1))
        replies: list[Reply] = []
        for documents, count in contexts:
            text = self.prompts.responder(e.task, documents, e.question)
            (reply,) = answered = await ask("responder", [text], count)
            if reply is None:
                return e.without_reply("responder", answered)
            replies.append(reply)
        short, long = replies
        short_answers, long_answers = (
            self.config.read_answers(reply.scored_texts, e.task) for reply in replies
        )
        return dataclasses.replace(
            e,
            response=long,
            predictions=long_answers,
            stated=self.config.state_answers(long.scored_texts, e.task),
            rule=self.config.score_answers(long_answers, e.reference, e.task),
            short_response=short,
            short_predictions=short_answers,
            short_rule=self.config.score_answers(short_answers, e.reference, e.task),
        )

    def choose(self, episode: PairEpisode) -> tuple[int, int] | str:
        """Return the indices of the chosen and rejected answer, or a word for why there is no pair.

        Indices count the answers after the short context, then the answer after all documents.
        """
        raise NotImplementedError

    def pair(self, episode: PairEpisode, chosen_index: int, rejected_index: int) -> TrainGroup:
        raise NotImplementedError

    def groups(
        self, episodes: Sequence[Episode], key: Key
    ) -> tuple[list[TrainGroup], list[Annotation]]:
        """Return one group per pair, and one annotation per episode."""
        groups, annotations = [], []
        for e in episodes:
            pair = self._choose(e)
            if isinstance(pair, str):
                annotations.append(Annotation(used={"responder": pair}))
                continue
            groups.append(self.pair(e, *pair))
            advantages = [0.0] * len(answers_of(e))
            advantages[pair[0]], advantages[pair[1]] = CHOSEN, REJECTED
            annotations.append(Annotation({"responder": advantages}, {"responder": USED}))
        return groups, annotations

    def _choose(self, episode: PairEpisode) -> tuple[int, int] | str:
        return episode.status if episode.response is None else self.choose(episode)

    def metrics(self, episodes: Sequence[Episode]) -> Metrics:
        metrics = super().metrics(episodes)
        for e in episodes:
            for suffix in ("", f"/{e.task}"):
                metrics.add(f"preference_pairs{suffix}", not isinstance(self._choose(e), str))
                for score in e.short_rule:
                    metrics.add(f"short_solve_rate{suffix}", score)
        return metrics

    def record(self, episode: Episode, annotation: Annotation) -> dict[str, Any]:
        return pairs.make_pair_record(episode, annotation, self.prompts)


def answers_of(episode: PairEpisode) -> list[Sample]:
    """Return the answers after the short context, then the answer after all documents.

    A pair may put an answer after another prompt, for which the sampler's logprobs do not count.
    """
    assert episode.short_response is not None and episode.response is not None
    replies = (episode.short_response, episode.response)
    return [sample.as_written() for reply in replies for sample in reply.samples]
