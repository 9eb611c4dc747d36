"""One question of EAPO and all that became of it: as the algorithm plays it, on disk, in
metrics."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from spell_jax.algorithms.base import Reply
from spell_jax.algorithms.spell.episode import USED
from spell_jax.data.clusters import Cluster
from spell_jax.data.questions import Question
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay.evidence import Structured
from spell_jax.selfplay.prompts import Prompts


@dataclasses.dataclass
class Episode:
    """One question; lists have an entry for each of its G answers, None for one of bad format.

    Attributes:
      task, cluster, question: what was asked about.
      status: "accepted", or "overlong" where the prompt was over the cap.
      response: the policy's reply, G answers.
      answers: the same, parsed.
      predictions: extracted answers; None also where a section states none.
      outcomes: 1.0 for a right answer, else 0.0.
      judge: the external judge's verdicts on predictions (negative: none), where it is asked.
      verbatim: share of what is quoted that stands in the documents.
      supported: precision and recall of what is quoted, where the question has its evidence.
      asked: how often the reward model was asked.
      scoring: its last reply; None where it was not asked, or its prompt was over the cap.
      scores: its scores of the well-formed answers; None where it was not asked or failed.
      evidence: evidence rewards.
      totals: total rewards, 0.0 for a bad format.
      consistent: whether the outcomes bear the scoring out; a co-evolving reward model then learns
        from it.
      advantages: of the answers, where they are trained on (`rows`).
    """

    task: str
    cluster: Cluster
    question: Question
    status: str = "overlong"
    response: Reply | None = None
    answers: list[Structured | None] = dataclasses.field(default_factory=list)
    predictions: list[str | None] = dataclasses.field(default_factory=list)
    outcomes: list[float] = dataclasses.field(default_factory=list)
    judge: list[int] = dataclasses.field(default_factory=list)
    verbatim: list[float | None] = dataclasses.field(default_factory=list)
    supported: list[tuple[float, float] | None] = dataclasses.field(default_factory=list)
    asked: int = 0
    scoring: Reply | None = None
    scores: tuple[int, ...] | None = None
    evidence: list[float | None] = dataclasses.field(default_factory=list)
    totals: list[float] = dataclasses.field(default_factory=list)
    consistent: bool = False
    advantages: list[float] = dataclasses.field(default_factory=list)

    @property
    def mixed(self) -> bool:
        """Whether the group has reward spread, so that something can be learned from it."""
        return len(set(self.totals)) > 1

    def scored(self) -> list[tuple[int, float]]:
        """(score, outcome) of each well-formed answer; empty where there are no scores."""
        pairs = zip(self.answers, self.outcomes, strict=True)
        outcomes = [outcome for answer, outcome in pairs if answer is not None]
        return [] if self.scores is None else list(zip(self.scores, outcomes, strict=True))

    def ordered(self) -> list[float]:
        """Whether the scores put two answers in the order of their evidence's F1, for each pair in
        which it differs: 1.0, 0.0, or 0.5 where both have the same score."""
        found = [2 * p * r / ((p + r) or 1.0) for p, r in filter(None, self.supported)]
        if self.scores is None or len(found) != len(self.scores):
            return []
        pairs = itertools.combinations(zip(found, self.scores, strict=True), 2)
        return [0.5 if a == b else float((f > g) == (a > b)) for (f, a), (g, b) in pairs if f != g]


def record(e: Episode, prompts: Prompts) -> dict[str, Any]:
    """What an episode's line in the run's files holds: "scores" are the total rewards, as the
    report's page reads them, and "judge" has None for answers that the judge was not asked about.
    In "prompt", {documents[i]} stands for a text of the cluster."""
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
        "predictions": e.predictions,
        "rule": e.outcomes,
        "judge": [p if p is None else next(verdicts) for p in e.predictions] if e.judge else [],
        "votes": [[] for _ in e.answers],
        "scores": e.totals,
        "advantages": {"responder": e.advantages} if e.advantages else {},
        "used": {"responder": _use(e)},
        "measures": {
            "well_formed": [answer is not None for answer in e.answers],
            "evidence_score": [a and next(scores, None) for a in e.answers],
            "evidence_reward": e.evidence,
            "verbatim": e.verbatim,
            "evidence_precision": [found and found[0] for found in e.supported],
            "evidence_recall": [found and found[1] for found in e.supported],
        },
        "evidence_scores": None if e.scores is None else list(e.scores),
        "scoring": e.scoring.texts[0] if e.scoring else None,
        "consistent": e.consistent,
    }


def _use(e: Episode) -> str:
    if e.advantages:
        return USED
    return "equal_rewards" if e.response else e.status


def count(metrics: Metrics, e: Episode, suffix: str) -> None:
    """Adds what an episode came to, before anything is filtered out; names end in `suffix`."""
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
