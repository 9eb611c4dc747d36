"""One question of EAPO: its data during the rollout, and its metrics."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import numpy as np

from spell_jax.algorithms.eapo.config import REWARD_MODEL
from spell_jax.algorithms.episode import QuestionEpisode, count_fields, only_text, recorded
from spell_jax.data.samples import Sample
from spell_jax.learner.packing import TrainGroup
from spell_jax.rollout.replies import Reply
from spell_jax.runtime.log.metrics import Metrics
from spell_jax.selfplay.evidence import StructuredAnswer, best_chosen, pairs_in_order


def _token_at(reply: Reply, place: int) -> int:
    """Return the index of the token that writes character `place` of the only answer's text."""
    assert reply.decode is not None
    (sample,), (text,), decode = reply.samples, reply.texts, reply.decode
    # The prompt may have written the start of the text.
    place -= len(text) - len(decode(sample.content))
    ends = range(1, len(sample.content) + 1)  # the first token with a later end writes the place
    return bisect.bisect_right(ends, place, key=lambda end: len(decode(sample.content[:end])))


@dataclasses.dataclass(frozen=True)
class Scoring:
    """A reply of the reward model with its confirmed scores, which a refresh trains it on.

    Attributes:
      prompt: token ids [P].
      answer: token ids [S].
      confirmed: indices in `answer` of the tokens of the confirmed scores, ascending.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    confirmed: tuple[int, ...]

    @classmethod
    def of(cls, reply: Reply, places: Sequence[int], consistent: Sequence[bool]) -> Scoring:
        """Make the scoring of a reply from the places of its scores in the text."""
        (sample,) = reply.samples
        at = [_token_at(reply, place) for place in places]
        flags = consistent[: len(at)]
        # A token of several scores is trained only if all of them are confirmed.
        rejected = {token for token, flag in zip(at, flags, strict=True) if not flag}
        confirmed = sorted({*at} - rejected)
        return cls(tuple(map(int, reply.prompt)), tuple(map(int, sample.tokens)), tuple(confirmed))

    def group(self) -> TrainGroup:
        """Return a supervised training group of the reward model, without old logprobs.

        The advantage is 1 at the confirmed scores and 0 at all other tokens.
        """
        # Tokens alone: logprobs would be of weights that are up to `refresh_every` steps old.
        sample = Sample(np.array(self.answer, np.int32))
        terms = np.full(len(self.answer), -1.0, np.float32)
        terms[list(self.confirmed)] = 0.0
        return TrainGroup(
            self.prompt, [sample], [1.0], REWARD_MODEL, REWARD_MODEL, token_advantages=[terms]
        )


@dataclasses.dataclass(frozen=True)
class EapoEpisode(QuestionEpisode):
    """One question and its answers; lists have None for an answer of bad format.

    Attributes:
      answers: parsed answers [G].
      verbatim: share of an answer's quotes that are in the documents [G].
      supported: (precision, recall) of an answer's quotes [G], if `known_evidence` is given.
      rouge_l: ROUGE-L recall of the known evidence by an answer's evidence [G], likewise.
      scoring_calls: number of calls to the reward model.
      scoring: the reward model's last reply; None without one, or if its prompt was over the cap.
      evidence_scores: its scores of the well-formed answers; None if it was not asked or failed.
      evidence: evidence rewards [G].
      consistent: whether the outcome confirms the score, of each well-formed answer; empty if there
        are no scores.
      refresh: scorings to train the reward model on in this step; its last episode holds them all.
    """

    known_evidence: tuple[str, ...] = ()
    answers: tuple[StructuredAnswer | None, ...] = ()
    verbatim: tuple[float | None, ...] = ()
    supported: tuple[tuple[float, float] | None, ...] = ()
    rouge_l: tuple[float | None, ...] = ()
    scoring_calls: int = 0
    scoring: Reply | None = field(default=None, metadata=recorded(write=only_text))
    evidence_scores: tuple[int, ...] | None = field(default=None, metadata=recorded())
    evidence: tuple[float | None, ...] = ()
    consistent: tuple[bool, ...] = ()
    refresh: tuple[Scoring, ...] = ()

    def count_unparsed(self, metrics: Metrics) -> None:
        super().count_unparsed(metrics)
        if self.scoring is not None:
            metrics.add("unparsed/reward_model", self.evidence_scores is None)

    def record(self) -> dict[str, Any]:
        scores, consistent = iter(self.evidence_scores or ()), iter(self.consistent)
        return super().record() | {
            "shown": list(range(len(self.cluster.documents))),
            # The report page has a list of votes for each answer, as SPELL's records do.
            "votes": [[] for _ in self.answers],
            "measures": {
                "well_formed": [answer is not None for answer in self.answers],
                "evidence_score": [a and next(scores, None) for a in self.answers],
                "consistent": [None if a is None else next(consistent, None) for a in self.answers],
                "evidence_reward": list(self.evidence),
                "verbatim": list(self.verbatim),
                "evidence_precision": [pair and pair[0] for pair in self.supported],
                "evidence_recall": [pair and pair[1] for pair in self.supported],
                "evidence_rouge_l": list(self.rouge_l),
            },
        }

    def scored(self) -> list[tuple[int, float]]:
        """Return (score, outcome) of each well-formed answer; empty if there are no scores."""
        if self.evidence_scores is None:
            return []
        pairs = zip(self.answers, self.rule, strict=True)
        outcomes = [outcome for answer, outcome in pairs if answer is not None]
        return list(zip(self.evidence_scores, outcomes, strict=True))

    def ordered_by_evidence(self) -> list[float]:
        """Return whether scores have the order of the evidence's F1, per pair of different F1."""
        # Quotes that share nothing with the evidence have p = r = 0, and an F1 of 0.
        f1s = [2 * p * r / ((p + r) or 1.0) for p, r in filter(None, self.supported)]
        # Scores and F1s pair up only if the evidence of every well-formed answer is known.
        if self.evidence_scores is None or len(f1s) != len(self.evidence_scores):
            return []
        return pairs_in_order(f1s, self.evidence_scores)

    def best_chosen(self) -> float | None:
        """Return whether the evidence with the highest ROUGE-L recall has the highest score."""
        recalls = [recall for recall in self.rouge_l if recall is not None]
        if self.evidence_scores is None or len(recalls) != len(self.evidence_scores):
            return None
        return best_chosen(recalls, self.evidence_scores)

    def ordered_by_outcome(self) -> list[float]:
        """Return whether scores have the order of the outcomes, per pair of different outcomes."""
        scored = self.scored()
        return pairs_in_order([outcome for _, outcome in scored], [score for score, _ in scored])


# Fields of an answered episode, and the metrics that count them.
_COUNTED = {
    "rule": "outcome_reward",
    "scores": "total_reward",
    "verbatim": "verbatim",
    "evidence": "evidence_reward",
    "rouge_l": "evidence_rouge_l",
    "consistent": "scoring_consistent",
}


def count_episode(metrics: Metrics, e: EapoEpisode, suffix: str) -> None:
    """Add an episode to the metrics, trained on or not; metric names end in `suffix`."""
    metrics.add(f"overlong{suffix}", e.response is None)
    if e.response is None:
        return
    metrics.add(f"mixed{suffix}", e.mixed)
    # The outcome alone: `scores` also contain format and evidence, and would not compare between
    # values of reward_model.
    metrics.add(f"solve_rate{suffix}", sum(e.rule) / len(e.rule))
    for answer in e.answers:
        metrics.add(f"well_formed{suffix}", answer is not None)
    count_fields(metrics, e, _COUNTED, suffix)
    for precision, recall in filter(None, e.supported):
        metrics.add(f"evidence_precision{suffix}", precision)
        metrics.add(f"evidence_recall{suffix}", recall)
    for is_ordered in e.ordered_by_evidence():
        metrics.add(f"scoring_order{suffix}", is_ordered)
    if (is_best_chosen := e.best_chosen()) is not None:
        metrics.add(f"scoring_best{suffix}", is_best_chosen)
    for is_ordered in e.ordered_by_outcome():
        metrics.add(f"scoring_accuracy{suffix}", is_ordered)
    e.count_failed_verdicts(metrics, suffix)
    if e.scoring_calls:
        metrics.add(f"scoring_failed{suffix}", e.evidence_scores is None)
        metrics.add(f"scoring_retried{suffix}", e.scoring_calls > 1)
    for score, outcome in e.scored():
        metrics.add(f"evidence_score{suffix}", score)
        kind = "right" if outcome == 1 else "wrong"
        metrics.add(f"evidence_score_{kind}{suffix}", score)
