"""One question of SPELL: its data during the rollout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import field

from spell_jax.algorithms.episode import QuestionEpisode, only_text, recorded
from spell_jax.rollout.replies import Reply
from spell_jax.runtime.log.metrics import Metrics
from spell_jax.selfplay import cloze, rewards
from spell_jax.selfplay.memory import Entry

STATUSES = (
    *("accepted", "bad_format", "declined", "duplicate", "ungrounded", "overlong", "too_small"),
)

# (index of the episode, role, index of the judged answer or 0) -> advantages of the reply's
# samples, for the replies that are trained on.
Advantages = dict[tuple[int, str, int], list[float]]


def _questions_of(history: Sequence[Entry]) -> list[str]:
    return [entry.question for entry in history]


@dataclasses.dataclass(frozen=True)
class SpellEpisode(QuestionEpisode):
    """One proposed question and its answers; statuses are STATUSES.

    Attributes:
      shown: indices of the documents that the questioner reads, ascending.
      history: remembered questions in the questioner's prompt, oldest first.
      dropped: documents and remembered questions left out of the prompt by its cap.
      reduced: whether m is reduced because the cluster has too few documents to leave some unread.
      questioner_prompt: text of the questioner's prompt; empty without one.
      span: answer that the question shall have (answer_first); else empty.
      leaks: whether the question passes even if the frozen reader's answers do not agree.
      leaked: whether it did.
      proposal: the questioner's reply.
      hidden: sentence of a cloze question, which nobody reads but its questioner.
      references: all right answers to a given question; (): only `reference`.
      own_reference: the questioner's reference answer; `reference` may be the frozen reader's.
      blind: extracted answers to the question without documents.
      blind_stated: words of these answers that an external judge reads.
      blind_scores: their scores, by the rule or the external judge.
      named: whether each answer begins with the number of a document in `shown` [G].
      judged: the verifier's reply to each answer [G]; None if there was nothing to compare.
      unjudged: answers without a verdict because the verifier's prompt was over the cap.
      votes: G_v votes on each answer [G], 1, 0 or -1; empty where there are no verdicts.
      reward: the questioner's reward; None if the question earns none and is not trained on.
    """

    shown: tuple[int, ...] = field(metadata=recorded())
    history: tuple[Entry, ...] = field(metadata=recorded("known", _questions_of))
    dropped: int = 0
    reduced: bool = False
    questioner_prompt: str = ""
    span: str = ""
    leaks: bool = False
    leaked: bool = False
    proposal: Reply | None = field(default=None, metadata=recorded(write=only_text))
    hidden: str = field(default="", metadata=recorded(omit_empty=True))
    references: tuple[str, ...] = ()
    own_reference: str = field(default="", metadata=recorded())
    blind: tuple[str | None, ...] = field(default=(), metadata=recorded())
    blind_stated: tuple[str | None, ...] = ()
    blind_scores: tuple[float, ...] = ()
    named: tuple[bool, ...] = field(default=(), metadata=recorded(omit_empty=True))
    judged: tuple[Reply | None, ...] = ()
    unjudged: int = 0
    votes: tuple[tuple[int, ...], ...] = field(default=(), metadata=recorded())
    reward: float | None = field(default=None, metadata=recorded())

    @property
    def new(self) -> tuple[int, ...]:
        """Indices of the shown documents that no remembered question is about."""
        seen_documents = documents_of(self.history)
        return tuple(index for index in self.shown if index not in seen_documents)

    @property
    def documents(self) -> tuple[str, ...]:
        """The documents as all roles but the questioner read them."""
        return cloze.hide(self.cluster.documents, [self.hidden])

    def count_unparsed(self, metrics: Metrics) -> None:
        super().count_unparsed(metrics)
        if self.proposal is not None:
            # A thought without its end is declined (spec 2.3), but nothing could be read from it.
            unread = self.status == "bad_format" or self.reason == "unfinished_thought"
            metrics.add("unparsed/questioner", unread)
        for votes in self.votes:
            metrics.add_sum("unparsed/verifier", votes.count(-1), len(votes))

    def reply(self, role: str, answer: int) -> Reply:
        """Return the reply of a role that gave a reply; the verifier replies to each answer."""
        replies = {"questioner": self.proposal, "responder": self.response}
        reply = self.judged[answer] if role == "verifier" else replies[role]
        assert reply is not None
        return reply


def documents_of(history: Sequence[Entry]) -> set[int]:
    return {index for entry in history for index in entry.documents}


def reject(e: SpellEpisode, reason: str) -> SpellEpisode:
    # Eq. 7: -0.5, less than never solved (0) and more than a bad format (-1).
    ungrounded = {"status": "ungrounded", "reward": rewards.UNGROUNDED}
    return dataclasses.replace(e, reason=reason, **ungrounded)
