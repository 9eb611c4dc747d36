"""One question of SPELL: its data during the rollout, its record, and its metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spell_jax.algorithms.base import USED, Annotation, Reply
from spell_jax.algorithms.episode import QuestionEpisode
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay import rewards, selection
from spell_jax.selfplay.memory import Entry
from spell_jax.selfplay.prompts import Prompts

STATUSES = (
    *("accepted", "bad_format", "declined", "duplicate", "ungrounded", "overlong", "too_small"),
)

# (index of the episode, role, index of the judged answer or 0) -> advantages of the reply's
# samples, for the replies that are trained on.
Advantages = dict[tuple[int, str, int], list[float]]


@dataclasses.dataclass(frozen=True)
class Episode(QuestionEpisode):
    """One proposed question and its answers; statuses are STATUSES.

    Attributes:
      shown: indices of the documents that the questioner reads, ascending.
      history: remembered questions in the questioner's prompt, oldest first.
      dropped: documents and remembered questions left out of it to keep it under the cap.
      reduced: whether m is reduced because the cluster has too few documents to leave some unread.
      letter: letter that the right option of a multiple-choice question shall have, else None.
      cue: last word of the questioner's prompt, one of the config's cues; empty without them.
      leaks: whether the question passes even if the frozen reader's answers do not agree.
      leaked: whether it did.
      proposal: the questioner's reply.
      own_reference: the questioner's reference answer; `reference` may be the frozen reader's.
      blind: extracted answers to the question without documents.
      blind_scores: their scores, by the rule or the external judge.
      judged: the verifier's reply to each answer [G]; None if there was nothing to compare.
      unjudged: answers without a verdict because the verifier's prompt was over the cap.
      votes: G_v votes on each answer [G], 1, 0 or -1; empty where there are no verdicts.
      reward: the questioner's reward; None if the question earns none and is not trained on.
    """

    shown: tuple[int, ...]
    history: tuple[Entry, ...]
    dropped: int = 0
    reduced: bool = False
    letter: str | None = None
    cue: str = ""
    questioner_prompt: str = ""
    leaks: bool = False
    leaked: bool = False
    proposal: Reply | None = None
    own_reference: str = ""
    blind: tuple[str | None, ...] = ()
    blind_scores: tuple[float, ...] = ()
    judged: tuple[Reply | None, ...] = ()
    unjudged: int = 0
    votes: tuple[tuple[int, ...], ...] = ()
    reward: float | None = None

    @property
    def new(self) -> tuple[int, ...]:
        """Indices of the shown documents that no remembered question is about."""
        seen = documents_of(self.history)
        return tuple(index for index in self.shown if index not in seen)

    def count_unparsed(self, metrics: Metrics) -> None:
        super().count_unparsed(metrics)
        if self.proposal is not None:
            unread = self.status == "bad_format" or self.reason == "unfinished_thought"
            metrics.add("unparsed/questioner", unread)
        for votes in self.votes:
            metrics.add_sum("unparsed/verifier", votes.count(-1), len(votes))

    def reply(self, role: str, answer: int) -> Reply:
        """The reply of a role that gave one; the verifier gives one to each answer."""
        replies = {"questioner": self.proposal, "responder": self.response}
        reply = self.judged[answer] if role == "verifier" else replies[role]
        assert reply is not None
        return reply


def documents_of(history: Sequence[Entry]) -> set[int]:
    return {index for entry in history for index in entry.documents}


def reject(e: Episode, reason: str) -> Episode:
    ungrounded = {"status": "ungrounded", "reward": rewards.UNGROUNDED}
    return dataclasses.replace(e, reason=reason, **ungrounded)


def is_eligible_verdict(e: Episode, i: int, config: SpellConfig) -> bool:
    """Whether the verifier may be trained on its votes on answer i."""
    gate = config.consistency_gate
    return selection.eligible_verifier_group(e.votes[i], e.rule[i], consistency=gate)


def annotate(
    episodes: Sequence[Episode],
    advantages: Mapping[tuple[int, str, int], list[float]],
    config: SpellConfig,
) -> list[Annotation]:
    """Advantages by role for each episode, and the use of each role's replies or why not."""
    annotations = []
    for n, e in enumerate(episodes):
        roles = [role for role in ("responder", "questioner") if (n, role, 0) in advantages]
        votes = [advantages.get((n, "verifier", i), []) for i in range(len(e.judged))]
        used = {
            "questioner": USED if "questioner" in roles else _why_no_question(e, config),
            "responder": USED if "responder" in roles else _why_no_answers(e),
            "verifier": [
                USED if own else _why_no_votes(e, i, config) for i, own in enumerate(votes)
            ],
        }
        own = {role: advantages[n, role, 0] for role in roles}
        annotations.append(Annotation(own | {"verifier": votes}, used))
    return annotations


def _why_no_question(e: Episode, config: SpellConfig) -> str:
    if e.proposal is None:
        return "no_proposal"
    if not config.train_questioner:
        return "not_trained"
    if e.reward is None:
        return "no_reward"
    return "surplus" if e.mixed else "not_sampled"


def _why_no_answers(e: Episode) -> str:
    if e.response is None:
        return e.status
    return "surplus" if e.mixed else "equal_rewards"


def _why_no_votes(e: Episode, i: int, config: SpellConfig) -> str:
    if e.judged[i] is None:
        return "not_judged"
    if not config.train_verifier:
        return "not_trained"
    return "not_sampled" if is_eligible_verdict(e, i, config) else "nothing_to_learn"


def record(e: Episode, annotation: Annotation, prompts: Prompts) -> dict[str, Any]:
    """An episode as a line of the run's files.

    "prompt" is the questioner's prompt, in which {documents[i]} stands for a text of the cluster.
    The prompts of the other roles follow from the same documents and the other fields. "used" says
    for each role (for the verifier, for each answer) whether it is trained on, or why not.
    """
    texts = [f"{{documents[{i}]}}" for i in e.shown]
    prompt = e.questioner_prompt and prompts.questioner(e.task, texts, e.history, e.letter, e.cue)
    return {
        "task": e.task,
        "cluster": e.cluster.id,
        "shown": list(e.shown),
        "known": [entry.question for entry in e.history],
        "prompt": prompt,
        "status": e.status,
        "reason": e.reason,
        "proposal": e.proposal.texts[0] if e.proposal else None,
        "question": e.question,
        "reference": e.reference,
        "own_reference": e.own_reference,
        "blind": list(e.blind),
        "answers": list(e.response.texts) if e.response else [],
        "predictions": list(e.predictions),
        **e.truncation(),
        "rule": list(e.rule),
        "judge": list(e.judge),
        "votes": [list(votes) for votes in e.votes],
        "scores": list(e.scores),
        "reward": e.reward,
        "advantages": dict(annotation.advantages),
        "used": dict(annotation.used),
    }


def count(metrics: Metrics, e: Episode, suffix: str) -> None:
    """Adds an episode to the metrics, whether or not it is trained on; names end in `suffix`."""
    for status in STATUSES:
        metrics.add(f"{status}{suffix}", e.status == status)
    if e.status != "too_small":
        metrics.add(f"documents_shown{suffix}", len(e.shown))
        metrics.add(f"reduced_m{suffix}", e.reduced)
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
    metrics.add(f"leaked{suffix}", e.leaked)
    metrics.add_sum(f"unjudged{suffix}", e.unjudged, len(e.scores))
    e.count_failed_verdicts(metrics, suffix)
    for rule, votes, prediction in zip(e.rule, e.votes, e.predictions, strict=True):
        metrics.add(f"rule_reward{suffix}", rule)
        metrics.add(f"no_answer{suffix}", prediction is None)
        if votes:
            verdict = rewards.majority(votes)
            metrics.add(f"malformed_votes{suffix}", votes.count(-1) / len(votes))
            metrics.add(f"verdict_ignored{suffix}", verdict == -1)
            metrics.add(f"verdict_differs_from_rule{suffix}", verdict != rule, verdict != -1)
            metrics.add(f"verdict_yes{suffix}", verdict == 1)
