"""A question that is answered after a short context and after all documents."""

from __future__ import annotations

import dataclasses
from typing import Any

from spell_jax.algorithms.episode import texts_of
from spell_jax.algorithms.spell.episode import SpellEpisode
from spell_jax.data.samples import Sample
from spell_jax.rollout.replies import Reply
from spell_jax.runtime.log.metrics import Metrics


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

    def record(self) -> dict[str, Any]:
        """Return SPELL's record; answers after the short context precede the long-context one."""
        line = super().record()
        if self.short_response is None:
            return line
        # The report page shows "measures" beside each answer.
        documents = [len(self.shown)] * len(self.short_rule)
        documents += [len(self.cluster.documents)] * len(self.rule)
        return line | {
            "answers": [*texts_of(self.short_response), *line["answers"]],
            "predictions": [*self.short_predictions, *self.predictions],
            "rule": [*self.short_rule, *self.rule],
            "scores": [*self.short_rule, *self.scores],
            "votes": [*([] for _ in self.short_rule), *line["votes"]],
            "judge": [],  # only answers after all documents are judged
            "measures": {"documents_read": documents},
        }

    def samples(self) -> list[Sample]:
        """Return the answers after the short context, then the answer after all documents.

        Without logprobs: a pair may put an answer after another prompt than it was sampled for.
        """
        return [sample.as_written() for reply in self.replies for sample in reply.samples]
