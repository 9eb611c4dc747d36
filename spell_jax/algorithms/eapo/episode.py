"""One question of EAPO: its data during the rollout, its record, and its metrics."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from spell_jax.algorithms.base import Annotation, Reply
from spell_jax.algorithms.eapo.config import REWARD_MODEL
from spell_jax.data.clusters import Cluster
from spell_jax.data.questions import Question
from spell_jax.learner.packing import TrainGroup
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay.evidence import StructuredAnswer
from spell_jax.selfplay.prompts import Prompts


@dataclasses.dataclass(frozen=True)
class Scoring:
    """A kept reply of the reward model, which a refresh trains it on.

    Attributes:
      prompt: token ids [P].
      answer: token ids [S], stop token included.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @classmethod
    def of(cls, reply: Reply) -> Scoring:
        """The tokens of a reply of one sample."""
        (sample,) = reply.samples
        prompt, answer = map(int, reply.prompt), map(int, sample.tokens)
        return cls(tuple(prompt), tuple(answer))

    def group(self) -> TrainGroup:
        """A supervised training group of the reward model: advantage 1, no old logprobs."""
        prompt, answer = list(self.prompt), list(self.answer)
        return TrainGroup(prompt, [answer], [1.0], REWARD_MODEL, model=REWARD_MODEL)


@dataclasses.dataclass(frozen=True)
class Episode:
    """One question and its answers. Each part of the rollout returns a new episode.

    Attributes:
      task: task of the question.
      cluster: its documents.
      question: the question.
      status: "accepted", or "overlong" if the policy's prompt is over the cap.
      response: the policy's reply, G answers.
      answers: parsed answers [G]; None for a bad format, as in the lists below.
      predictions: extracted answers [G]; None also if the answer's section states none.
      outcomes: scores of the answers [G], 1.0 (right) or 0.0, by the rule or the external judge.
      judge: the external judge's verdicts on the predictions that are not None (negative: no
        verdict); empty without a judge.
      verbatim: share of an answer's quotes that are in the documents [G].
      supported: (precision, recall) of an answer's quotes [G], if the question has its evidence.
      asked: number of calls to the reward model.
      scoring: the reward model's last reply; None if it was not asked or its prompt was over the
        cap.
      scores: its scores of the well-formed answers; None if it was not asked or failed.
      evidence: evidence rewards [G].
      totals: total rewards [G], 0.0 for a bad format.
      consistent: whether the outcomes confirm the scoring, so that a co-evolving reward model may
        be trained on it.
      refresh: kept scorings that the reward model is trained on in this step. In a step with a
        refresh, the last episode holds all of them; in all other episodes it is empty.
    """

    task: str
    cluster: Cluster
    question: Question
    status: str = "overlong"
    response: Reply | None = None
    answers: tuple[StructuredAnswer | None, ...] = ()
    predictions: tuple[str | None, ...] = ()
    outcomes: tuple[float, ...] = ()
    judge: tuple[int, ...] = ()
    verbatim: tuple[float | None, ...] = ()
    supported: tuple[tuple[float, float] | None, ...] = ()
    asked: int = 0
    scoring: Reply | None = None
    scores: tuple[int, ...] | None = None
    evidence: tuple[float | None, ...] = ()
    totals: tuple[float, ...] = ()
    consistent: bool = False
    refresh: tuple[Scoring, ...] = ()

    @property
    def mixed(self) -> bool:
        """Whether the rewards of the answers differ, so that advantages are not all zero."""
        return len(set(self.totals)) > 1

    def scored(self) -> list[tuple[int, float]]:
        """(score, outcome) of each well-formed answer; empty if there are no scores."""
        pairs = zip(self.answers, self.outcomes, strict=True)
        outcomes = [outcome for answer, outcome in pairs if answer is not None]
        return [] if self.scores is None else list(zip(self.scores, outcomes, strict=True))

    def ordered(self) -> list[float]:
        """Agreement of the scores with the F1 of the evidence, for each pair whose F1 differs.

        Returns:
          1.0 if the scores have the same order, 0.0 if the opposite one, 0.5 if they are equal.
        """
        found = [2 * p * r / ((p + r) or 1.0) for p, r in filter(None, self.supported)]
        if self.scores is None or len(found) != len(self.scores):
            return []
        pairs = itertools.combinations(zip(found, self.scores, strict=True), 2)
        return [0.5 if a == b else float((f > g) == (a > b)) for (f, a), (g, b) in pairs if f != g]


def record(e: Episode, annotation: Annotation, prompts: Prompts) -> dict[str, Any]:
    """An episode as a line of the run's files.

    "scores" are the total rewards, as the report's page reads them. "judge" has None for answers
    that the judge was not asked about. In "prompt", {documents[i]} stands for a text of the
    cluster.
    """
    verdicts, scores = iter(e.judge), iter(e.scores or ())
    texts = [f"{{documents[{i}]}}" for i in range(len(e.cluster.documents))]
    return {
        "task": e.task,
        "cluster": e.cluster.id,
        "shown": list(range(len(texts))),
        "prompt": prompts.evidence(texts, e.question.question),
        "status": e.status,
        "reason": "" if e.response else "responder_prompt",
        "question": e.question.question,
        "reference": e.question.answer,
        "answers": list(e.response.texts) if e.response else [],
        "predictions": list(e.predictions),
        "rule": list(e.outcomes),
        "judge": [p if p is None else next(verdicts) for p in e.predictions] if e.judge else [],
        "votes": [[] for _ in e.answers],
        "scores": list(e.totals),
        "advantages": dict(annotation.advantages),
        "used": dict(annotation.used),
        "measures": {
            "well_formed": [answer is not None for answer in e.answers],
            "evidence_score": [a and next(scores, None) for a in e.answers],
            "evidence_reward": list(e.evidence),
            "verbatim": list(e.verbatim),
            "evidence_precision": [found and found[0] for found in e.supported],
            "evidence_recall": [found and found[1] for found in e.supported],
        },
        "evidence_scores": None if e.scores is None else list(e.scores),
        "scoring": e.scoring.texts[0] if e.scoring else None,
        "consistent": e.consistent,
    }


def count(metrics: Metrics, e: Episode, suffix: str) -> None:
    """Adds an episode to the metrics, whether or not it is trained on; names end in `suffix`."""
    metrics.add(f"overlong{suffix}", e.response is None)
    if e.response is None:
        return
    metrics.add(f"mixed{suffix}", e.mixed)
    metrics.add(f"solve_rate{suffix}", sum(e.outcomes) / len(e.outcomes))
    for answer, outcome, total in zip(e.answers, e.outcomes, e.totals, strict=True):
        metrics.add(f"well_formed{suffix}", answer is not None)
        metrics.add(f"outcome_reward{suffix}", outcome)
        metrics.add(f"total_reward{suffix}", total)
    for verbatim, reward in zip(e.verbatim, e.evidence, strict=True):
        if verbatim is not None:
            metrics.add(f"verbatim{suffix}", verbatim)
        if reward is not None:
            metrics.add(f"evidence_reward{suffix}", reward)
    for precision, recall in filter(None, e.supported):
        metrics.add(f"evidence_precision{suffix}", precision)
        metrics.add(f"evidence_recall{suffix}", recall)
    for is_ordered in e.ordered():
        metrics.add(f"scoring_order{suffix}", is_ordered)
    if e.judge:
        failed = sum(verdict < 0 for verdict in e.judge)
        metrics.add_sum(f"judge_failed{suffix}", failed, len(e.judge))
    if e.asked:
        metrics.add(f"scoring_failed{suffix}", e.scores is None)
        metrics.add(f"scoring_retried{suffix}", e.asked > 1)
        metrics.add(f"scoring_consistent{suffix}", e.consistent)
    for score, outcome in e.scored():
        metrics.add(f"evidence_score{suffix}", score)
        kind = "right" if outcome == 1 else "wrong"
        metrics.add(f"evidence_score_{kind}{suffix}", score)
