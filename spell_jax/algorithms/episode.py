"""Episodes of one question with a group of answers: rewards, training groups, external judge."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from spell_jax.algorithms.base import USED, Annotation, JudgeFunction, Reply
from spell_jax.data.clusters import Cluster
from spell_jax.learner.advantages import group_advantages
from spell_jax.learner.packing import TrainGroup
from spell_jax.runtime import distributed


@dataclasses.dataclass(frozen=True)
class QuestionEpisode:
    """One question and its answers. Each part of a rollout returns a new episode.

    Attributes:
      status: "accepted", or where the episode ended: "overlong" (a prompt over the cap), or a word
        of the algorithm's.
      reason: one word for why it ended, for counting.
      predictions: extracted answers [G]; None if an answer states none.
      rule: scores of the answers [G], by the rule or the external judge.
      judge: the external judge's verdicts on the predictions that are not None (negative: no
        verdict); empty without a judge.
      scores: rewards of the answers [G].
    """

    task: str
    cluster: Cluster
    _: dataclasses.KW_ONLY
    status: str = "overlong"
    reason: str = ""
    question: str = ""
    reference: str = ""
    response: Reply | None = None
    predictions: tuple[str | None, ...] = ()
    rule: tuple[float, ...] = ()
    judge: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()

    @property
    def mean_score(self) -> float:
        return sum(self.scores) / len(self.scores) if self.scores else 0.0

    @property
    def mixed(self) -> bool:
        """Whether the rewards differ, so that advantages are not all zero."""
        return len(set(self.scores)) > 1


AnyEpisode = TypeVar("AnyEpisode", bound=QuestionEpisode)


def ask_judge(judge: JudgeFunction | None, episodes: Sequence[AnyEpisode]) -> Sequence[AnyEpisode]:
    """(Option) Replaces scores by a judge's verdicts, where it gives one."""
    if judge is None:
        return episodes
    judged = []
    verdicts = judge_predictions(judge, [(e, e.predictions) for e in episodes])
    for e, given in zip(episodes, verdicts, strict=True):
        stated = [v for v, p in zip(given, e.predictions, strict=True) if p is not None]
        rule = with_verdicts(e.rule, given)
        judged.append(dataclasses.replace(e, rule=rule, judge=tuple(stated)))
    return judged


def judge_predictions(
    judge: JudgeFunction, answered: Sequence[tuple[QuestionEpisode, Sequence[str | None]]]
) -> list[list[int]]:
    """The judge's verdict on each prediction about a question; -1 if there is none.

    One host asks: two calls might not agree.
    """
    items = [(e.question, p, e.reference) for e, some in answered for p in some if p is not None]
    verdicts = iter(distributed.broadcast(lambda: list(judge(items))))
    return [[-1 if p is None else next(verdicts) for p in some] for _, some in answered]


def with_verdicts(scores: Sequence[float], verdicts: Sequence[int]) -> tuple[float, ...]:
    """The verdicts as scores; a score stays where there is no verdict."""
    return tuple(s if v < 0 else float(v) for s, v in zip(scores, verdicts, strict=True))


def responder_groups(
    episodes: Sequence[QuestionEpisode], divide_by_deviation: bool, keep_equal: bool = False
) -> tuple[list[TrainGroup], list[Annotation]]:
    """The responder's groups (GRPO), without those of equal rewards unless `keep_equal`."""
    groups, annotations = [], []
    for e in episodes:
        if e.response is None or not (e.mixed or keep_equal):
            why = "equal_rewards" if e.response else e.status
            annotations.append(Annotation(used={"responder": why}))
            continue
        advantages = group_advantages(e.scores, divide_by_deviation=divide_by_deviation).tolist()
        groups.append(e.response.group(advantages, "responder"))
        annotations.append(Annotation({"responder": advantages}, {"responder": USED}))
    return groups, annotations
