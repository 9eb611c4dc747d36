"""Episodes of one question with a group of answers: record, metrics, groups, external judge.

An episode's fields with the metadata `recorded` are the lines of the run's files, so an algorithm
that adds a field to its episode writes no code for its record.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Self, TypeVar

from spell_jax.algorithms.base import USED, Annotation
from spell_jax.data.clusters import Cluster
from spell_jax.learner.packing import TrainGroup
from spell_jax.rollout.judge import JudgeFunction
from spell_jax.rollout.replies import Replies, Reply
from spell_jax.runtime.hosts import distributed
from spell_jax.runtime.log.metrics import Metrics


def recorded(
    name: str = "", write: Callable[[Any], Any] | None = None, omit_empty: bool = False
) -> Mapping[str, Any]:
    """Return the metadata of a field that is part of the record.

    Args:
      name: name in the record; empty: the field's name.
      write: function from the field's value to a JSON value; None: `_to_json`.
      omit_empty: whether records leave out an empty value.
    """
    return {"recorded": (name, write or _to_json, omit_empty)}


def texts_of(reply: Reply | None) -> list[str]:
    return list(reply.texts) if reply else []


def only_text(reply: Reply | None) -> str | None:
    return reply.texts[0] if reply else None


def _to_json(value: Any) -> Any:
    return [_to_json(part) for part in value] if isinstance(value, tuple) else value


@dataclasses.dataclass(frozen=True)
class QuestionEpisode:
    """One question and its answers. Each part of a rollout returns a new episode.

    Attributes:
      task: task of the question, one of TASKS.
      cluster: documents that the question is about.
      status: "accepted", or where the episode ended: "overlong" (a prompt over the cap), or a word
        of the algorithm's.
      reason: one word for why the episode ended, for counting.
      template: prompt in the record, in which {documents[i]} stands for a text of the cluster;
        empty: the record's other fields tell it.
      question: text of the question.
      reference: answer that the responder's answers are compared with.
      response: responder's reply, of G answers; None if the episode ended before.
      predictions: extracted answers [G]; None if an answer states none.
      stated: words of the answers [G] that an external judge reads, by rules.stated_answer; None if
        an answer states nothing.
      rule: scores of the answers [G], by the rule or the external judge.
      judge: the external judge's verdicts on the answers [G] (negative: no verdict), None where it
        was not asked; empty without a judge.
      scores: rewards of the answers [G].
      dropped_texts: texts of a prompt without a reply, because algorithm.truncated = "drop".
    """

    task: str = field(metadata=recorded())
    cluster: Cluster = field(metadata=recorded(write=lambda cluster: cluster.id))
    _: dataclasses.KW_ONLY
    # Documents of up to 16K tokens would repeat in every line: placeholders stand for the texts,
    # which the writer stores once.
    template: str = field(default="", metadata=recorded("prompt"))
    status: str = field(default="overlong", metadata=recorded())
    reason: str = field(default="", metadata=recorded())
    question: str = field(default="", metadata=recorded())
    reference: str = field(default="", metadata=recorded())
    response: Reply | None = field(default=None, metadata=recorded("answers", texts_of))
    predictions: tuple[str | None, ...] = field(default=(), metadata=recorded())
    stated: tuple[str | None, ...] = ()
    rule: tuple[float, ...] = field(default=(), metadata=recorded())
    judge: tuple[int | None, ...] = field(default=(), metadata=recorded())
    scores: tuple[float, ...] = field(default=(), metadata=recorded())
    dropped_texts: tuple[str, ...] = ()

    @property
    def mean_score(self) -> float:
        return sum(self.scores) / len(self.scores) if self.scores else 0.0

    @property
    def mixed(self) -> bool:
        """Whether the rewards differ, so that advantages are not all zero."""
        return len(set(self.scores)) > 1

    def without_reply(self, role: str, replies: Replies) -> Self:
        """Return the episode, ended because a role has no reply to its only prompt."""
        return dataclasses.replace(
            self,
            status="overlong",
            reason=f"no_{role}_reply",
            dropped_texts=replies.dropped[0],
        )

    @property
    def replies(self) -> tuple[Reply, ...]:
        """The replies with the answers, in the order of the record's answers."""
        return () if self.response is None else (self.response,)

    def record(self) -> dict[str, Any]:
        """Return the fields with the metadata `recorded`, and what the token cap cut off."""
        line: dict[str, Any] = {}
        for part in dataclasses.fields(self):
            if "recorded" in part.metadata:
                name, write, omit_empty = part.metadata["recorded"]
                value = getattr(self, part.name)
                if value or not omit_empty:
                    line[name or part.name] = write(value)
        samples = [sample for reply in self.replies for sample in reply.samples]
        dropped = [text for reply in self.replies for text in reply.dropped]
        return line | {
            "truncated": [not sample.stopped for sample in samples],
            "dropped": [*self.dropped_texts, *dropped],
        }

    def count_unparsed(self, metrics: Metrics) -> None:
        """Count the replies of each role from which nothing could be read, as unparsed/ROLE."""
        for prediction in self.predictions:
            metrics.add("unparsed/responder", prediction is None)

    def count_failed_verdicts(self, metrics: Metrics, suffix: str) -> None:
        """Count the questions on which the external judge gave no verdict."""
        verdicts = [verdict for verdict in self.judge if verdict is not None]
        if verdicts:
            failed = sum(verdict < 0 for verdict in verdicts)
            metrics.add_sum(f"judge_failed{suffix}", failed, len(verdicts))


def count_fields(
    metrics: Metrics, episode: QuestionEpisode, names: Mapping[str, str], suffix: str = ""
) -> None:
    """Add an episode's fields to the metrics, by `names`: field -> metric without `suffix`.

    A tuple counts as its numbers; None counts for nothing.
    """
    for part, name in names.items():
        value = getattr(episode, part)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None:
                metrics.add(f"{name}{suffix}", number)


def count_reasons(metrics: Metrics, episodes: Sequence[QuestionEpisode]) -> None:
    """Add the share of episodes that each reason ended, as reason/REASON."""
    for reason, count in Counter(e.reason for e in episodes if e.reason).items():
        metrics.add_sum(f"reason/{reason}", count, len(episodes))


AnyEpisode = TypeVar("AnyEpisode", bound=QuestionEpisode)


def ask_judge(
    judge: JudgeFunction | None, rule: str, episodes: Sequence[AnyEpisode]
) -> Sequence[AnyEpisode]:
    """Change scores by a judge's verdicts as `rule` (algorithm.rule) says, if there is a judge."""
    if judge is None:
        return episodes
    judged = judge_answers(judge, rule, [(e, e.stated, e.rule) for e in episodes])
    return [
        dataclasses.replace(e, rule=scores, judge=verdicts)
        for e, (scores, verdicts) in zip(episodes, judged, strict=True)
    ]


def judge_answers(
    judge: JudgeFunction,
    rule: str,
    answered: Sequence[tuple[QuestionEpisode, Sequence[str | None], Sequence[float]]],
) -> list[tuple[tuple[float, ...], tuple[int | None, ...]]]:
    """Return (scores, verdicts) after the judge for (question, stated answers, text-rule scores).

    With rule "judge" all stated answers are judged, with "match_or_judge" answers below score 1. A
    score without a verdict stays.
    """
    # The result of match_or_judge is a maximum: an answer that scores 1 by its text needs no judge
    # (QwenLong-L1).
    judged_answers = [
        [
            answer if rule == "judge" or score < 1 else None
            for answer, score in zip(stated, scores, strict=True)
        ]
        for _, stated, scores in answered
    ]
    items = [
        (e.question, answer, e.reference)
        for (e, _, _), answers in zip(answered, judged_answers, strict=True)
        for answer in answers
        if answer is not None
    ]
    # One host asks, because two calls might not agree; then rewards would differ between hosts.
    verdicts = iter(distributed.broadcast(lambda: list(judge(items))))
    outcomes = []
    for (_, _, scores), answers in zip(answered, judged_answers, strict=True):
        question_verdicts = tuple(None if a is None else next(verdicts) for a in answers)
        changed = (
            # Without a verdict, after a failed request, the score by the text stays
            # (docs/algorithm.md, 11).
            old if new is None or new < 0 else float(new)
            for old, new in zip(scores, question_verdicts, strict=True)
        )
        outcomes.append((tuple(changed), question_verdicts))
    return outcomes


def responder_groups(
    episodes: Sequence[QuestionEpisode],
    to_advantages: Callable[[Sequence[float]], list[float]],
    keep_equal: bool = False,
) -> tuple[list[TrainGroup], list[Annotation]]:
    """Return the responder's groups (GRPO), without groups of equal rewards unless `keep_equal`.

    `to_advantages` maps a group's scores [G] to advantages [G] (AlgorithmConfig.to_advantages).
    If algorithm.truncated = "drop" leaves one answer, it has nothing to compare with: no group.
    ValueError if an episode has not as many scores as answers.
    """
    groups, annotations = [], []
    for e in episodes:
        if e.response and e.scores and len(e.scores) != len(e.response.samples):
            count = len(e.response.samples)
            raise ValueError(f"scores: {len(e.scores)} of them, but {count} samples, must be equal")
        # Equal rewards have advantages of 0. Such groups give no gradient, but with keep_equal the
        # loss is averaged over them too.
        if e.response is None or not (e.mixed or (keep_equal and len(e.scores) > 1)):
            why = "equal_rewards" if e.response else e.status
            annotations.append(Annotation(used={"responder": why}))
            continue
        advantages = to_advantages(e.scores)
        groups.append(e.response.group(advantages, "responder"))
        annotations.append(Annotation({"responder": advantages}, {"responder": USED}))
    return groups, annotations
