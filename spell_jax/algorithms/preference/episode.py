"""A question that is answered after a short context and after all documents."""

from __future__ import annotations

import dataclasses
from typing import Any

from spell_jax.algorithms.base import Annotation
from spell_jax.algorithms.spell.episode import SpellEpisode
from spell_jax.algorithms.spell.record import make_record
from spell_jax.rollout.replies import Reply
from spell_jax.runtime.metrics import Metrics
from spell_jax.selfplay.prompts import Prompts


@dataclasses.dataclass(frozen=True)
class PairEpisode(SpellEpisode):
    """SPELL's episode; `shown` lists the documents of the short context.

    `response` and its scores belong to one answer after all documents.

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


def make_pair_record(e: PairEpisode, annotation: Annotation, prompts: Prompts) -> dict[str, Any]:
    """Return SPELL's record; answers after the short context precede the long-context answer."""
    line = make_record(e, annotation, prompts)
    if e.short_response is None:
        return line
    line["answers"] = [*e.short_response.texts, *line["answers"]]
    line["predictions"] = [*e.short_predictions, *e.predictions]
    line["rule"] = [*e.short_rule, *e.rule]
    line["scores"] = [*e.short_rule, *e.scores]
    line["votes"] = [*([] for _ in e.short_rule), *line["votes"]]
    line["judge"] = []  # only answers after all documents are judged
    # The report page shows "measures" beside each answer.
    documents = [len(e.shown)] * len(e.short_rule) + [len(e.cluster.documents)] * len(e.rule)
    return line | {"measures": {"documents_read": documents}}
