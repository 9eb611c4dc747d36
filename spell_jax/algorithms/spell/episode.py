"""One question of SPELL: its data during the rollout, its record, and its metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from spell_jax.algorithms.base import USED, Annotation, Reply
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.data.clusters import Cluster
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay import rewards, selection
from spell_jax.selfplay.memory import Entry
from spell_jax.selfplay.prompts import Prompts

STATUSES = ("accepted", "bad_format", "declined", "ungrounded", "overlong")


@dataclasses.dataclass(frozen=True)
class Episode:
    """One proposed question and its answers. Each part of the rollout returns a new episode.

    Attributes:
      task: task of the question, one of TASKS.
      cluster: documents that the question is about.
      shown: indices of the documents that the questioner reads, ascending.
      history: remembered questions in the questioner's prompt, oldest first.
      dropped: number of documents and remembered questions left out of the questioner's prompt to
        keep it under the cap.
      letter: letter that the right option of a multiple-choice question shall have, else None.
      questioner_prompt: text of the questioner's prompt.
      proposal: the questioner's reply.
      status: "accepted", or where the episode ended: "overlong" (a prompt over the cap),
        "bad_format", "declined" (a question that is neither rewarded nor trained on), "ungrounded".
      reason: one word for why it ended, for counting.
      blind: extracted answers to the question without documents.
      question: the question as parsed.
      reference: reference answer, the questioner's or the frozen reader's.
      own_reference: the questioner's reference answer.
      response: the responder's reply, G answers.
      predictions: extracted answers [G]; None if an answer states none.
      rule: scores of the answers [G], by the rule or the external judge.
      judge: the external judge's verdicts on the predictions that are not None (negative: no
        verdict); empty without a judge.
      judged: the verifier's reply to each answer [G]; None if there was nothing to compare.
      unjudged: number of answers without a verdict because the verifier's prompt was over the cap.
      votes: G_v votes on each answer [G], 1, 0 or -1; empty where there are no verdicts.
      scores: rewards of the answers [G].
      reward: the questioner's reward; None if the question earns none and is not trained on.
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
    blind: tuple[str | None, ...] = ()
    response: Reply | None = None
    predictions: tuple[str | None, ...] = ()
    rule: tuple[float, ...] = ()
    judge: tuple[int, ...] = ()
    judged: tuple[Reply | None, ...] = ()
    unjudged: int = 0
    votes: tuple[tuple[int, ...], ...] = ()
    scores: tuple[float, ...] = ()
    reward: float | None = None

    @property
    def new(self) -> tuple[int, ...]:
        """Indices of the shown documents that no remembered question is about."""
        seen = documents_of(self.history)
        return tuple(index for index in self.shown if index not in seen)

    @property
    def mean_score(self) -> float:
        return sum(self.scores) / len(self.scores) if self.scores else 0.0

    @property
    def mixed(self) -> bool:
        """Whether the rewards of the answers differ, so that advantages are not all zero."""
        return len(set(self.scores)) > 1


def documents_of(history: Sequence[Entry]) -> set[int]:
    """Indices of the documents that remembered questions are about."""
    return {index for entry in history for index in entry.documents}


def is_eligible_verdict(e: Episode, i: int, config: SpellConfig) -> bool:
    """Whether the verifier may be trained on its votes on answer i."""
    gate = config.consistency_gate
    return selection.eligible_verifier_group(e.votes[i], e.rule[i], consistency=gate)


# ------------------------------------------------------------------------------------- Annotations


@dataclasses.dataclass(frozen=True)
class TrainedReply:
    """A reply that the update trains on.

    Attributes:
      episode: index of its episode in the step.
      role: role that gave it.
      reply: the reply.
      advantages: one advantage per sample.
      answer: for the verifier, index of the judged answer; else 0.
    """

    episode: int
    role: str
    reply: Reply
    advantages: list[float]
    answer: int = 0


def annotate(
    episodes: Sequence[Episode], trained: Sequence[TrainedReply], config: SpellConfig
) -> list[Annotation]:
    """For each episode, advantages by role, and the use of each role's replies or why not."""
    advantages: list[dict[str, list[float]]] = [{} for _ in episodes]
    verdicts: list[dict[int, list[float]]] = [{} for _ in episodes]
    for one in trained:
        if one.role == "verifier":
            verdicts[one.episode][one.answer] = one.advantages
        else:
            advantages[one.episode][one.role] = one.advantages
    found = []
    for e, own, of_answer in zip(episodes, advantages, verdicts, strict=True):
        answers = range(len(e.judged))
        used: dict[str, str | list[str]] = {
            "questioner": USED if "questioner" in own else _why_no_question(e, config),
            "responder": USED if "responder" in own else _why_no_answers(e),
            "verifier": [USED if i in of_answer else _why_no_votes(e, i, config) for i in answers],
        }
        found.append(Annotation(own | {"verifier": [of_answer.get(i, []) for i in answers]}, used))
    return found


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


# ----------------------------------------------------------------------------------------- On disk


def record(e: Episode, annotation: Annotation, prompts: Prompts) -> dict[str, Any]:
    """An episode as a line of the run's files.

    "prompt" is the questioner's prompt, in which {documents[i]} stands for a text of the cluster.
    The prompts of the other roles follow from the same documents and the other fields. "used" says
    for each role (for the verifier, for each answer) whether it is trained on, or why not.
    """
    texts = [f"{{documents[{i}]}}" for i in e.shown]
    prompt = e.questioner_prompt and prompts.questioner(e.task, texts, e.history, e.letter)
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
        "rule": list(e.rule),
        "judge": list(e.judge),
        "votes": [list(votes) for votes in e.votes],
        "scores": list(e.scores),
        "reward": e.reward,
        "advantages": dict(annotation.advantages),
        "used": dict(annotation.used),
    }


# -------------------------------------------------------------------------------------- In metrics


def count(metrics: Metrics, e: Episode, suffix: str) -> None:
    """Adds an episode to the metrics, whether or not it is trained on; names end in `suffix`."""
    for status in STATUSES:
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
