"""Questions answered after a short and after the long context, and pairs of their answers.

Questions are RLVR's, given or written once by the starting policy. The documents that a question
was written from are the short context; all documents of the cluster are the long one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from spell_jax.algorithms.base import USED, Annotation
from spell_jax.algorithms.preference.episode import PairEpisode
from spell_jax.algorithms.rlvr.config import StaticConfig
from spell_jax.algorithms.spell.answering import Answering
from spell_jax.algorithms.spell.metrics import count_questions
from spell_jax.learner.packing import TrainGroup
from spell_jax.rollout.replies import Ask, Reply
from spell_jax.runtime.log.metrics import Metrics

CHOSEN, REJECTED = 1.0, -1.0  # advantages of the answers of a pair

# Function from an episode to the indices of the chosen and the rejected answer in its `samples`,
# or to a word for why there is no pair.
ChoosePair = Callable[[PairEpisode], tuple[int, int] | str]


class PairAnswering(Answering[PairEpisode]):
    """Answers to a question after both contexts; the long context's answer is rewarded.

    Attributes:
      group_size: answers after the short context; after all documents there is one.
    """

    async def answer(self, ask: Ask, episode: PairEpisode) -> PairEpisode:
        """Ask for answers after each context; a prompt over the cap ends the episode."""
        e, c = episode, self.config
        shown = [e.documents[i] for i in e.shown]
        # The short context first: a refused short prompt saves the long one. One answer after all
        # documents is LongPO's rejected answer, and for SoLoPO a metric.
        contexts = ((shown, self.group_size), (e.documents, 1))
        replies: list[Reply] = []
        for documents, count in contexts:
            text = self.prompts.responder(e.task, documents, e.question)
            (reply,) = answered = await ask("responder", [text], count)
            if reply is None:
                return e.without_reply("responder", answered)
            replies.append(reply)
        short, long = replies
        short_answers, long_answers = (
            c.read_answers(reply.scored_texts, e.task) for reply in replies
        )
        return dataclasses.replace(
            e,
            response=long,
            predictions=long_answers,
            stated=c.state_answers(long.scored_texts, e.task),
            rule=c.score_answers(long_answers, e.reference, e.task),
            short_response=short,
            short_predictions=short_answers,
            short_rule=c.score_answers(short_answers, e.reference, e.task),
        )


def pair_groups(
    episodes: Sequence[PairEpisode],
    choose: ChoosePair,
    pair: Callable[[PairEpisode, int, int], TrainGroup],
) -> tuple[list[TrainGroup], list[Annotation]]:
    """Return one group per pair, made by `pair`, and one annotation per episode."""
    groups, annotations = [], []
    for e in episodes:
        indices = _choose(e, choose)
        if isinstance(indices, str):
            annotations.append(Annotation(used={"responder": indices}))
            continue
        groups.append(pair(e, *indices))
        advantages = [0.0] * len(e.samples())
        advantages[indices[0]], advantages[indices[1]] = CHOSEN, REJECTED
        annotations.append(Annotation({"responder": advantages}, {"responder": USED}))
    return groups, annotations


def count_pairs(
    episodes: Sequence[PairEpisode], config: StaticConfig, choose: ChoosePair
) -> Metrics:
    """Compute the metrics of the questions, the share with a pair, and the short solve rate."""
    metrics = count_questions(episodes, config)
    for e in episodes:
        for suffix in ("", f"/{e.task}"):
            metrics.add(f"preference_pairs{suffix}", not isinstance(_choose(e, choose), str))
            for score in e.short_rule:
                metrics.add(f"short_solve_rate{suffix}", score)
    return metrics


def _choose(e: PairEpisode, choose: ChoosePair) -> tuple[int, int] | str:
    return e.status if e.response is None else choose(e)
