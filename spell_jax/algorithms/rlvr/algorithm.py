"""RLVR on a static set of questions: the baseline of self-play.

1. The set is given (data/questions.py), or written: in the first step the starting policy writes
   questions as in SPELL, once. Questions that pass SPELL's filters form the set.
2. Every step takes questions of the set in rounds, until enough have mixed rewards, and answers,
   rewards and trains the responder as SPELL does. The reward "rule" is plain RLVR (SPELL, Appendix
   E.5); "max" with a verifier is the matched control. Questions are dealt epoch after epoch, each
   at most once an epoch: given ones by the weights of their tasks, written ones with
   `questions_per_cluster` K about a cluster together. A step asks no question twice. No questioner
   group is trained on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spell_jax.algorithms.base import AlgorithmContext, Annotation, Key
from spell_jax.algorithms.config import RolloutBudget
from spell_jax.algorithms.spell.algorithm import Spell
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.episode import SpellEpisode
from spell_jax.data.clusters import Cluster
from spell_jax.data.questions import Question, as_clusters, in_blocks, with_short_contexts
from spell_jax.data.stream import TaskStream
from spell_jax.learner.packing import TrainGroup
from spell_jax.rollout.replies import AskModels
from spell_jax.runtime.config import check_least
from spell_jax.runtime.metrics import Metrics

_WRITTEN = 3  # separates the random stream of the written questions' order from others of the seed


@dataclasses.dataclass(frozen=True)
class RlvrConfig(SpellConfig):
    """SPELL's fields; fields of the questioner matter only if questions are written.

    Attributes:
      static_questions: number of proposals for the static set, which keeps questions that pass the
        filters. Unused with given questions.
      static_temperature: temperature of the samples from which the set is made (proposals, answers
        without documents, the frozen reader's answers).
    """

    name: str = "rlvr"
    static_questions: int = 960
    # SPELL's public script samples all roles at 0.7.
    static_temperature: float = 0.7

    def __post_init__(self):
        super().__post_init__()
        check_least(self, "algorithm.", static_questions=1, static_temperature=0)

    def budgets(self) -> list[RolloutBudget]:
        return self.round_budgets(writes=False)

    def budget_summary(self) -> str:
        return (
            f"up to {self.max_generations} rounds of {self.generation_batch} of "
            f"{self.static_questions} questions, written once (or of those given), until "
            f"{self.questions} have mixed rewards; a round asks for"
        )


class Rlvr(Spell):
    """SPELL but for the origin of the questions; given ones keep their references."""

    episode: type[SpellEpisode] = SpellEpisode  # of an accepted question of the set

    def __init__(self, config: RlvrConfig, context: AlgorithmContext):
        questions = context.questions()
        # The teacher reads, and the responder names, the documents that a question is about.
        if context.teacher_prompt is not None or config.document_share:
            questions = with_short_contexts(questions)
        source, self._given_questions = as_clusters(questions)
        if self._given_questions:
            context = dataclasses.replace(context, clusters=lambda: source)
        super().__init__(config, context)
        self.writing_temperature = config.static_temperature
        if self._given_questions:
            # Given questions keep their references, so no frozen reader is asked.
            self.model_names = ()
        self._proposals = config.static_questions
        self._written: list[dict[str, Any]] = []  # the set, as `state_dict` stores it
        self._dealt = 0  # batches of the written set that have been dealt
        self._seed = context.seed

    def rollout(self, ask: AskModels, key: Key, step: int) -> list[SpellEpisode]:
        rng = np.random.default_rng([*key])
        if not self._given_questions and not self._written:
            self._written = self._write(ask, rng)
        batches = (self._given_batches if self._given_questions else self._written_batches)(
            key, step
        )
        episodes = self.fill((ask.run_all(self.solve, batch) for batch in batches), rng)
        # No questioner took part in the step, so it gets no reward.
        return [dataclasses.replace(e, reward=None) for e in episodes]

    def _given_batches(self, key: Key, step: int) -> Iterator[list[SpellEpisode]]:
        for clusters in deal_once(self.stream, self.config.generation_batch):
            yield self._accept(self._given_questions, clusters)

    def _accept(
        self, questions: Mapping[str, Question], clusters: Sequence[Cluster]
    ) -> list[SpellEpisode]:
        """Make episodes of the questions with the clusters' ids (data.questions.as_clusters)."""
        pairs = [(questions[cluster.id], cluster) for cluster in clusters]
        return [self._accepted(q.task, c, q.shown, q.question, q.answer) for q, c in pairs]

    def _written_batches(self, key: Key, step: int) -> Iterator[list[SpellEpisode]]:
        dealt_indices: set[int] = set()
        # The rounds of a step may cross an epoch, but no question comes twice in a step.
        while len(dealt_indices) < len(self._written):
            new = [index for index in self._deal() if index not in dealt_indices]
            dealt_indices.update(new)
            questions = [self._written[index] for index in new]
            clusters = self.stream.read([q["cluster"] for q in questions])
            yield [
                self._accepted(
                    q["task"],
                    c,
                    tuple(q["shown"]),
                    q["question"],
                    q["reference"],
                    q.get("hidden", ""),
                )
                for q, c in zip(questions, clusters, strict=True)
            ]

    def _deal(self) -> list[int]:
        """Return the indices of the next batch of written questions."""
        batch = min(self.config.generation_batch, len(self._written))
        # The order is a function of seed and epoch, so a checkpoint stores this counter alone.
        epoch, number = divmod(self._dealt, len(self._written) // batch)
        self._dealt += 1
        return self._epoch_order(epoch, batch)[number * batch : (number + 1) * batch]

    def _epoch_order(self, epoch: int, batch: int) -> list[int]:
        """Return the indices of an epoch's questions; their number is a multiple of `batch`.

        `questions_per_cluster` questions about a cluster stay together. Fewer than `batch`
        questions are left out, other ones every epoch.
        """
        rng = np.random.default_rng([self._seed, _WRITTEN, epoch])
        size = len(self._written)
        indices = rng.permutation(size)[: size - size % batch].tolist()
        together = self.config.questions_per_cluster
        if together == 1:
            return indices
        return in_blocks(indices, lambda i: self._written[i]["cluster"], together, rng)

    def _accepted(
        self,
        task: str,
        cluster: Cluster,
        shown: tuple[int, ...],
        question: str,
        reference: str,
        hidden: str = "",
    ) -> SpellEpisode:
        """Return an episode with an accepted question of the set.

        `shown` are the documents that the questioner read; `hidden` is as in SpellEpisode.
        """
        return self.episode(
            task,
            cluster,
            shown,
            history=(),
            status="accepted",
            question=question,
            reference=reference,
            hidden=hidden,
            own_reference=reference,
        )

    def _write(self, ask: AskModels, rng: np.random.Generator) -> list[dict[str, Any]]:
        """Write the static set by SPELL's parts 1 to 3, of all proposals at once.

        The number of proposals is rounded up to whole batches.
        """
        batches = math.ceil(self._proposals / self.config.generation_batch)
        started = [episode for _ in range(batches) for episode in self.start_episodes(rng)]
        return [
            {
                "task": e.task,
                "cluster": e.cluster.id,
                "shown": list(e.shown),
                "question": e.question,
                "reference": e.reference,
                "hidden": e.hidden,
            }
            for e in self.write_all(ask, started)
            if e.status == "accepted"
        ]

    def groups(
        self, episodes: Sequence[SpellEpisode], key: Key
    ) -> tuple[list[TrainGroup], list[Annotation]]:
        groups, annotations = super().groups(episodes, key)
        # Without questioner, its use would read "no_proposal" in every record.
        return groups, [
            dataclasses.replace(a, used={r: use for r, use in a.used.items() if r != "questioner"})
            for a in annotations
        ]

    def metrics(self, episodes: Sequence[SpellEpisode]) -> Metrics:
        metrics = super().metrics(episodes)
        metrics.add(
            "static_questions", len(self.stream if self._given_questions else self._written)
        )
        return metrics

    def state_dict(self) -> dict[str, Any]:
        spell = super().state_dict()
        return {"spell": spell, "questions": self._written, "dealt": self._dealt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["spell"])
        self._written, self._dealt = list(state["questions"]), state["dealt"]


def deal_once(stream: TaskStream, batch: int) -> Iterator[list[Cluster]]:
    """Yield batches of the next clusters of a stream, each once; drop repeats of a new epoch."""
    dealt_ids: set[str] = set()
    while len(dealt_ids) < len(stream):
        dealt = stream.next(min(batch, len(stream) - len(dealt_ids)))
        new = [cluster for _, cluster in dealt if cluster.id not in dealt_ids]
        dealt_ids |= {cluster.id for cluster in new}
        yield new
