"""A question that is answered after a short context and after all documents."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from spell_jax.algorithms.base import Annotation, Reply
from spell_jax.algorithms.spell import episode as spell_episode
from spell_jax.algorithms.spell.episode import Episode
from spell_jax.data.questions import Question
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay.prompts import Prompts

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PairEpisode(Episode):
    """SPELL's episode, whose `shown` are the documents of the short context.

    `response` and its scores are those of one answer after all documents.

    Attributes:
      short_response: the reply to the question with the documents of the short context [G].
      short_predictions: extracted answers of that reply [G].
      short_rule: their scores by the rule [G].
    """

    short_response: Reply | None = None
    short_predictions: tuple[str | None, ...] = ()
    short_rule: tuple[float, ...] = ()

    @property
    def replies(self) -> tuple[Reply, ...]:
        return () if self.short_response is None else (self.short_response, *super().replies)

    def count_unparsed(self, metrics: Metrics) -> None:
        super().count_unparsed(metrics)
        for prediction in self.short_predictions:
            metrics.add("unparsed/responder", prediction is None)


def with_short_contexts(questions: Sequence[Question]) -> tuple[Question, ...]:
    """The questions whose short context is known, in `shown`.

    It is `shown` as given, or else the documents that contain a sentence of the evidence.
    ValueError if there are questions, but none has a short context.
    """
    made = [dataclasses.replace(q, shown=q.shown or _evidence_documents(q)) for q in questions]
    kept = tuple(question for question in made if question.shown)
    if made and not kept:
        raise ValueError(
            f"data.questions: none of its {len(made)} questions has a short context; a question "
            'must have "shown", or "evidence" that its documents contain'
        )
    if len(kept) < len(made):
        log.warning("%d of %d questions have no short context", len(made) - len(kept), len(made))
    return kept


def _evidence_documents(question: Question) -> tuple[int, ...]:
    return tuple(
        number
        for number, document in enumerate(question.documents)
        if any(sentence in document for sentence in question.evidence)
    )


def record(e: PairEpisode, annotation: Annotation, prompts: Prompts) -> dict[str, Any]:
    """SPELL's record, with the answers after the short context before the one after all."""
    line = spell_episode.record(e, annotation, prompts)
    if e.short_response is None:
        return line
    line["answers"] = [*e.short_response.texts, *line["answers"]]
    line["predictions"] = [*e.short_predictions, *e.predictions]
    line["rule"] = [*e.short_rule, *e.rule]
    line["scores"] = [*e.short_rule, *e.scores]
    line["votes"] = [*([] for _ in e.short_rule), *line["votes"]]
    line["judge"] = []  # only answers after all documents are judged
    documents = [len(e.shown)] * len(e.short_rule) + [len(e.cluster.documents)] * len(e.rule)
    return line | {"measures": {"documents_read": documents}}
