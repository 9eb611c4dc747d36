"""One question of SPELL and all that became of it: as the algorithm plays it, on disk, in
metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from spell_jax.algorithms.base import Reply
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.data.clusters import Cluster
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay import rewards, selection
from spell_jax.selfplay.memory import Entry
from spell_jax.selfplay.prompts import Prompts

USED = "used"  # what a role learned from, in a record


@dataclasses.dataclass
class Episode:
    """One proposed question and all that became of it.

    Attributes:
      task, cluster: what was asked about.
      shown: indices of the documents that the questioner read.
      history: remembered questions that it was shown.
      dropped: documents and remembered questions left out of its prompt to keep it under the cap.
      letter: of the right option of the choice that the questioner was asked for.
      questioner_prompt: its prompt.
      proposal: the questioner's reply.
      status: "accepted", or where it ended: "overlong" (a prompt over the cap), "bad_format",
        "skipped", "ungrounded".
      reason: a word that says why, for counting.
      blind: extracted answers to the question without documents.
      question, reference: as parsed; `own_reference` is the questioner's where it was replaced.
      response: the responder's reply, G answers.
      predictions: extracted answers, None where there is none.
      rule: rule scores of the answers.
      judge: the external judge's verdicts on them (negative: none), where it is asked.
      judged: for each answer the verifier's reply, None where there was nothing to judge.
      unjudged: answers that were not judged because the verifier's prompt was over the cap.
      votes: for each answer its G_v votes.
      scores: the responder's rewards.
      reward: the questioner's reward; None when it earns none and is not trained on.
      advantages: of the proposal and the answers by role, where they are trained on (`rows`).
      verdict_advantages: of the votes on each answer; none on those that are not trained on.
    """

    task: str
    cluster: Cluster
    shown: tuple[int, ...]
    history: tuple[Entry, ...]
    dropped: int = 0
    letter: str | None = None
    questioner_prompt: str = ""
    proposal: Reply | None = None
    status: str = "overlong"
    reason: str = ""
    question: str = ""
    reference: str = ""
    own_reference: str = ""
    blind: list[str | None] = dataclasses.field(default_factory=list)
    response: Reply | None = None
    predictions: list[str | None] = dataclasses.field(default_factory=list)
    rule: list[float] = dataclasses.field(default_factory=list)
    judge: list[int] = dataclasses.field(default_factory=list)
    judged: list[Reply | None] = dataclasses.field(default_factory=list)
    unjudged: int = 0
    votes: list[list[int]] = dataclasses.field(default_factory=list)
    scores: list[float] = dataclasses.field(default_factory=list)
    reward: float | None = None
    advantages: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    verdict_advantages: list[list[float]] = dataclasses.field(default_factory=list)

    @property
    def new(self) -> tuple[int, ...]:
        """Documents among the shown that no remembered question brought."""
        seen = documents_of(self.history)
        return tuple(index for index in self.shown if index not in seen)

    @property
    def mean_score(self) -> float:
        return sum(self.scores) / len(self.scores) if self.scores else 0.0

    @property
    def mixed(self) -> bool:
        """Whether the group has reward spread, so that something can be learned from it."""
        return len(set(self.scores)) > 1


def documents_of(history: Sequence[Entry]) -> set[int]:
    """Indices of the documents that remembered questions were about."""
    return {index for entry in history for index in entry.documents}


def may_teach(e: Episode, i: int, config: SpellConfig) -> bool:
    """Whether the verifier may learn from its verdicts on answer i."""
    gate = config.consistency_gate
    return selection.eligible_verifier_group(e.votes[i], e.rule[i], consistency=gate)


# ----------------------------------------------------------------------------------------- On disk


def record(e: Episode, config: SpellConfig, prompts: Prompts) -> dict[str, Any]:
    """What an episode's line in the run's files holds.

    In "prompt", the questioner's, {documents[i]} stands for a text of the cluster; the other
    roles' are filled from the same documents and what the record has. "used" says for each role
    whether it learned from the episode, or why not (for the verifier an answer).
    """
    texts = [f"{{documents[{i}]}}" for i in e.shown]
    asked = e.questioner_prompt and prompts.questioner(e.task, texts, e.history, e.letter)
    return {
        "task": e.task,
        "cluster": e.cluster.id,
        "shown": list(e.shown),
        "known": [entry.question for entry in e.history],
        "prompt": asked,
        "status": e.status,
        "reason": e.reason,
        "proposal": e.proposal.texts[0] if e.proposal else None,
        "question": e.question,
        "reference": e.reference,
        "own_reference": e.own_reference,
        "blind": e.blind,
        "answers": list(e.response.texts) if e.response else [],
        "predictions": e.predictions,
        "rule": e.rule,
        "judge": e.judge,
        "votes": e.votes,
        "scores": e.scores,
        "reward": e.reward,
        "advantages": e.advantages | {"verifier": e.verdict_advantages},
        "used": {
            "questioner": _use_of_proposal(e, config),
            "responder": _use_of_answers(e),
            "verifier": [_use_of_verdicts(e, i, config) for i in range(len(e.judged))],
        },
    }


def _use_of_proposal(e: Episode, config: SpellConfig) -> str:
    if "questioner" in e.advantages:
        return USED
    if e.proposal is None:
        return "no_proposal"
    if not config.train_questioner:
        return "not_trained"
    if e.reward is None:
        return "no_reward"
    return "surplus" if e.mixed else "not_drawn"


def _use_of_answers(e: Episode) -> str:
    if "responder" in e.advantages:
        return USED
    if e.response is None:
        return e.status
    return "surplus" if e.mixed else "equal_rewards"


def _use_of_verdicts(e: Episode, i: int, config: SpellConfig) -> str:
    if e.verdict_advantages[i]:
        return USED
    if e.judged[i] is None:
        return "not_judged"
    if not config.train_verifier:
        return "not_trained"
    return "not_drawn" if may_teach(e, i, config) else "nothing_to_learn"


# -------------------------------------------------------------------------------------- In metrics


def count(metrics: Metrics, e: Episode, suffix: str) -> None:
    """Adds what an episode came to, before anything is filtered out; names end in `suffix`."""
    for status in ("accepted", "bad_format", "skipped", "ungrounded", "overlong"):
        metrics.add(f"{status}{suffix}", e.status == status)
    metrics.add(f"documents_shown{suffix}", len(e.shown))
    metrics.add(f"dropped_from_prompt{suffix}", e.dropped)
    metrics.add(f"history{suffix}", len(e.history))
    if e.reward is not None:
        metrics.add(f"questioner_reward{suffix}", e.reward)
    for score in e.scores:
        metrics.add(f"responder_reward{suffix}", score)
    if not e.scores:
        return
    metrics.add(f"solve_rate{suffix}", e.mean_score)
    metrics.add(f"mixed{suffix}", e.mixed)
    metrics.add(f"unsolved{suffix}", max(e.scores) <= 0)
    metrics.add(f"fully_solved{suffix}", min(e.scores) >= 1)
    metrics.add(f"reference_replaced{suffix}", e.own_reference != e.reference)
    metrics.add_sum(f"unjudged{suffix}", e.unjudged, len(e.scores))
    if e.judge:
        failed = sum(verdict < 0 for verdict in e.judge)
        metrics.add_sum(f"judge_failed{suffix}", failed, len(e.judge))
    for rule, votes, prediction in zip(e.rule, e.votes, e.predictions, strict=True):
        metrics.add(f"rule_reward{suffix}", rule)
        metrics.add(f"no_answer{suffix}", prediction is None)
        if votes:
            verdict = rewards.majority(votes)
            metrics.add(f"malformed_votes{suffix}", votes.count(-1) / len(votes))
            metrics.add(f"verdict_ignored{suffix}", verdict == -1)
            metrics.add(f"verdict_differs_from_rule{suffix}", verdict != rule, verdict != -1)
            metrics.add(f"verdict_yes{suffix}", verdict == 1)
