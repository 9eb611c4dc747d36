"""Static sets of questions: given in a file, or written once by the starting policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spell_jax.algorithms.base import AlgorithmContext, Key
from spell_jax.algorithms.rlvr.config import StaticConfig
from spell_jax.algorithms.spell.episode import SpellEpisode
from spell_jax.algorithms.spell.questioner import QuestionWriter
from spell_jax.data.clusters import Cluster
from spell_jax.data.questions import Question, as_clusters, in_blocks, with_short_contexts
from spell_jax.data.stream import TaskStream
from spell_jax.rollout.replies import AskModels
from spell_jax.runtime.log.metrics import Metrics

# Fields of an episode that a written question keeps, beside its cluster and shown documents.
_KEPT = ("task", "question", "reference", "own_reference", "leaked", "hidden")
_WRITTEN = 3  # separates the random stream of the written questions' order from others of the seed


class QuestionSet:
    """A set of questions, as an algorithm takes its batches; its states are of base.Algorithm."""

    model_names: tuple[str, ...] = ()

    def prepare(self, ask: AskModels, rng: np.random.Generator) -> None:
        """Write the set, if it is to be written and is not there."""

    def batches(self, key: Key, step: int) -> Iterator[list[SpellEpisode]]:
        """Yield batches of accepted episodes, each question at most once in a step."""
        raise NotImplementedError

    def remember(self, episodes: Sequence[SpellEpisode]) -> None:
        """Take note of the answers of a step."""

    def count(self, metrics: Metrics, episodes: Sequence[SpellEpisode]) -> None:
        """Add the metrics of the set."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class GivenQuestions(QuestionSet):
    """Questions of data.questions, dealt epoch after epoch by the weights of their tasks."""

    # No model_names: given questions keep their references, so no frozen reader is asked.

    def __init__(
        self,
        questions: Sequence[Question],
        config: StaticConfig,
        context: AlgorithmContext,
        episode: type[SpellEpisode],
    ):
        source, by_cluster = as_clusters(questions)
        self._stream = context.deal(source)
        self._batch = config.generation_batch
        self._episodes = {
            c.id: _accepted(episode, by_cluster[c.id], c) for c in source.read([*by_cluster])
        }

    def __len__(self) -> int:
        return len(self._stream)

    def episodes(self) -> list[SpellEpisode]:
        """Return the accepted episodes of the whole set."""
        return list(self._episodes.values())

    def batches(self, key: Key, step: int) -> Iterator[list[SpellEpisode]]:
        for clusters in deal_once(self._stream, self._batch):
            yield [self._episodes[c.id] for c in clusters]

    def count(self, metrics: Metrics, episodes: Sequence[SpellEpisode]) -> None:
        metrics.add("stream_repeats", self._stream.repeats)
        metrics.add("static_questions", len(self))

    def state_dict(self) -> dict[str, Any]:
        return {"spell": {"stream": self._stream.state_dict()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state["spell"]["stream"])


class WrittenQuestions(QuestionSet):
    """Questions that the starting policy writes in the first step, dealt epoch after epoch."""

    def __init__(
        self, config: StaticConfig, context: AlgorithmContext, episode: type[SpellEpisode]
    ):
        self._writer = QuestionWriter(config, context, config.static_temperature)
        self.model_names = self._writer.model_names
        self._config = config
        self._seed = context.seed
        self._episode = episode
        self._written: list[dict[str, Any]] = []  # the set, as `state_dict` stores it
        self._dealt = 0  # batches of the set that have been dealt

    def __len__(self) -> int:
        return len(self._written)

    def prepare(self, ask: AskModels, rng: np.random.Generator) -> None:
        """Write the set by SPELL's parts 1 to 3, of all proposals at once, unless it is there.

        The number of proposals is rounded up to whole batches.
        """
        if self._written:
            return
        batches = math.ceil(self._config.static_questions / self._config.generation_batch)
        started = [e for _ in range(batches) for e in self._writer.start_episodes(rng)]
        self._written = [
            {"cluster": e.cluster.id, "shown": list(e.shown)}
            | {name: getattr(e, name) for name in _KEPT}
            for e in self._writer.write_all(ask, started)
            if e.status == "accepted"
        ]

    def episodes(self) -> list[SpellEpisode]:
        """Return the accepted episodes of the whole set."""
        return self._read(range(len(self)))

    def batches(self, key: Key, step: int) -> Iterator[list[SpellEpisode]]:
        dealt_indices: set[int] = set()
        # The rounds of a step may cross an epoch, but no question comes twice in a step.
        while len(dealt_indices) < len(self._written):
            new = [index for index in self._deal() if index not in dealt_indices]
            dealt_indices.update(new)
            yield self._read(new)

    def _read(self, indices: Sequence[int]) -> list[SpellEpisode]:
        """Return the accepted episode of each index."""
        lines = [self._written[index] for index in indices]
        clusters = self._writer.stream.read([line["cluster"] for line in lines])
        return [
            self._episode(
                cluster=cluster,
                shown=tuple(line["shown"]),
                history=(),
                status="accepted",
                **{name: line[name] for name in _KEPT},
            )
            for line, cluster in zip(lines, clusters, strict=True)
        ]

    def _deal(self) -> list[int]:
        """Return the indices of the next batch of written questions."""
        batch = min(self._config.generation_batch, len(self._written))
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
        together = self._config.questioner.questions_per_cluster
        if together == 1:
            return indices
        return in_blocks(indices, lambda i: self._written[i]["cluster"], together, rng)

    def count(self, metrics: Metrics, episodes: Sequence[SpellEpisode]) -> None:
        metrics.add("stream_repeats", self._writer.stream.repeats)
        metrics.add("static_questions", len(self))

    def state_dict(self) -> dict[str, Any]:
        spell = self._writer.state_dict()
        return {"spell": spell, "questions": self._written, "dealt": self._dealt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._writer.load_state_dict(state["spell"])
        self._written, self._dealt = list(state["questions"]), state["dealt"]


def make_question_set(
    config: StaticConfig,
    context: AlgorithmContext,
    episode: type[SpellEpisode] = SpellEpisode,
    short_contexts: bool = False,
) -> GivenQuestions | WrittenQuestions:
    """Return the given questions of a run, or the set to write if none are given.

    Args:
      config: config of the algorithm.
      context: context of the algorithm.
      episode: class of the episodes.
      short_contexts: whether given questions without a known short context are left out.
    """
    questions = context.questions()
    # The teacher reads the documents that a question is about.
    if short_contexts or context.teacher_prompt is not None:
        questions = with_short_contexts(questions)
    if questions:
        return GivenQuestions(questions, config, context, episode)
    return WrittenQuestions(config, context, episode)


def _accepted(episode: type[SpellEpisode], question: Question, cluster: Cluster) -> SpellEpisode:
    return episode(
        question.task,
        cluster,
        question.shown,
        history=(),
        status="accepted",
        question=question.question,
        reference=question.answer,
        references=question.right,
        own_reference=question.answer,
    )


def deal_once(stream: TaskStream, batch: int) -> Iterator[list[Cluster]]:
    """Yield batches of the next clusters of a stream, each once; drop repeats of a new epoch."""
    dealt_ids: set[str] = set()
    while len(dealt_ids) < len(stream):
        dealt = stream.next(min(batch, len(stream) - len(dealt_ids)))
        new = [cluster for _, cluster in dealt if cluster.id not in dealt_ids]
        dealt_ids |= {cluster.id for cluster in new}
        yield new
