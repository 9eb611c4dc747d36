"""QwenLong-L1: RLVR with a curriculum of context lengths (Wan et al. 2025, arXiv 2505.17667).

1. phases: the run is divided into phases of equal numbers of steps. In a phase the policy answers
   the questions with an input longer than the phase before allowed, up to the phase's own length.
2. retrospection: from the second phase on, a share of every round's questions are earlier phases'
   ones, sampled in proportion to their difficulty, the inverse of their mean reward.
3. reward: the maximum of the rule's and a judge's verdict, SPELL's responder.reward = "max". The
   judge is the policy as it verifies, and is not trained for it.

Everything else is RLVR (algorithms/rlvr/algorithm.py), on given or written questions.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spell_jax.algorithms.base import AlgorithmContext, Key
from spell_jax.algorithms.rlvr.config import VerifiedStaticConfig
from spell_jax.algorithms.rlvr.question_sets import (
    QuestionSet,
    deal_once,
    make_question_set,
)
from spell_jax.algorithms.rlvr.static_algorithm import StaticAlgorithm
from spell_jax.algorithms.spell.answering import VerifiedAnswering
from spell_jax.algorithms.spell.episode import SpellEpisode
from spell_jax.algorithms.spell.groups import role_groups
from spell_jax.algorithms.spell.metrics import count_questions
from spell_jax.algorithms.spell.sections import VerifierConfig
from spell_jax.data.clusters import Cluster, in_memory
from spell_jax.data.stream import TaskStream
from spell_jax.rollout.replies import AskModels
from spell_jax.runtime.log.metrics import Metrics

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class QwenLongConfig(VerifiedStaticConfig):
    """Fields of config.algorithm for QwenLong-L1: the curriculum.

    Attributes:
      phase_tokens: longest input of each phase, in tokens of documents and question, ascending.
        Longer questions are left out, and so are phases without a question.
      retrospective_share: share of a round's questions that are of earlier phases, in [0, 1).
    """

    name: str = "qwenlong_l1"
    # The lengths are from memory of the paper, which could not be read (docs/algorithms.md).
    phase_tokens: tuple[int, ...] = (20_000, 60_000)
    # Our choice: the paper's number is unknown to us (docs/algorithms.md, QwenLong-L1).
    retrospective_share: float = 0.25
    # The paper's judge is a separate small model, which is not trained.
    verifier: VerifierConfig = VerifierConfig(train=False)

    def __post_init__(self):
        super().__post_init__()
        lengths = self.phase_tokens
        if not lengths or lengths[0] < 1 or list(lengths) != sorted(set(lengths)):
            raise ValueError(
                f"algorithm.phase_tokens = {lengths}: must be one or more numbers of at least 1, "
                "ascending"
            )
        if not 0 <= self.retrospective_share < 1:
            raise ValueError(
                f"algorithm.retrospective_share = {self.retrospective_share}: must be from 0 to "
                "below 1"
            )


def make_qwenlong(config: QwenLongConfig, context: AlgorithmContext) -> StaticAlgorithm:
    """Make the algorithm from its parts: questions by phase, answers, and groups of two roles."""
    answering = VerifiedAnswering(config, context)
    return StaticAlgorithm(
        Phases(config, context),
        answering.answer_batches,
        lambda episodes, key: role_groups(episodes, key, config, answering),
        lambda episodes: count_questions(episodes, config, config.verifier),
    )


class Phases(QuestionSet):
    """Questions in phases of the run, by the lengths of their inputs.

    Attributes:
      questions: set that is divided.
      model_names: names of the set's models.
      streams: each phase's questions, as clusters; empty before the set is divided.
    """

    def __init__(self, config: QwenLongConfig, context: AlgorithmContext):
        self.config = config
        names_documents = config.responder.names_documents
        self.questions = make_question_set(config, context, short_contexts=names_documents)
        self.model_names = self.questions.model_names
        self.streams: list[TaskStream] = []
        self._context, self._lengths = context, config.phase_tokens
        self._episodes: dict[str, SpellEpisode] = {}  # question -> its accepted episode
        self._means: dict[str, float] = {}  # question -> mean reward when it was last answered
        self._divide()

    def prepare(self, ask: AskModels, rng: np.random.Generator) -> None:
        self.questions.prepare(ask, rng)
        self._divide()

    def _divide(self) -> None:
        """Divide the set among the phases by the input lengths of the questions."""
        episodes = [] if self.streams else self.questions.episodes()
        if not episodes:  # the set is divided, or not written yet
            return
        by_phase: list[list[Cluster]] = [[] for _ in self._lengths]
        for index, e in enumerate(episodes):
            # Written questions may share a cluster, but streams deal each question by itself.
            cluster = Cluster(f"question {index}", e.cluster.documents, (e.task,))
            self._episodes[cluster.id] = dataclasses.replace(e, cluster=cluster)
            length = _input_tokens(e, self._context)
            phase = next((k for k, limit in enumerate(self._lengths) if length <= limit), None)
            if phase is not None:
                by_phase[phase].append(cluster)
        # A phase without questions would be steps without an update.
        by_phase = [clusters for clusters in by_phase if clusters]
        if not by_phase:
            raise ValueError(
                f"algorithm.phase_tokens = {self._lengths}: must not be below the lengths of all "
                f"{len(episodes)} questions"
            )
        self.streams = [self._context.deal(in_memory(clusters)) for clusters in by_phase]
        self._phase_of = {c.id: k for k, clusters in enumerate(by_phase) for c in clusters}
        log.info("questions of the phases: %s", [len(clusters) for clusters in by_phase])
        if left_out := len(episodes) - len(self._phase_of):
            log.warning("%d questions are longer than all phases: left out", left_out)

    def remember(self, episodes: Sequence[SpellEpisode]) -> None:
        """Keep the mean reward of each answered question."""
        self._means |= {e.cluster.id: e.mean_score for e in episodes if e.response is not None}

    def batches(self, key: Key, step: int) -> Iterator[list[SpellEpisode]]:
        """Yield questions of earlier phases by difficulty, then next questions of this phase."""
        phases = len(self.streams)
        if not phases:
            return
        # Steps beyond the planned number stay in the last phase.
        phase = min((step - 1) * phases // self._context.steps, phases - 1)
        # Sorted: the choice must not depend on the order in which questions were answered.
        earlier = sorted(name for name in self._means if self._phase_of[name] < phase)
        weights = np.array([self._difficulty(name) for name in earlier])
        rng = np.random.default_rng([*key, 4])  # rollout and groups use [*key] to [*key, 2]
        # One order for all rounds, without replacement: no question comes twice in a step.
        order = rng.choice(earlier, len(earlier), False, weights / weights.sum()) if earlier else ()
        batch = self.config.generation_batch
        share = min(round(self.config.retrospective_share * batch), len(earlier))
        for number, new in enumerate(deal_once(self.streams[phase], batch - share)):
            repeated = order[number * share : (number + 1) * share]
            yield [self._episodes[name] for name in (*repeated, *(c.id for c in new))]

    def _difficulty(self, name: str) -> float:
        """Return the difficulty of a question: 1 / mean reward, capped at the group size G."""
        return 1 / max(self._means[name], 1 / self.config.group_size)

    def count(self, metrics: Metrics, episodes: Sequence[SpellEpisode]) -> None:
        self.questions.count(metrics, episodes)
        phases = [self._phase_of[e.cluster.id] for e in episodes]
        metrics.add("phase", max(phases, default=0) + 1)
        for phase in phases:
            metrics.add("retrospective", phase < max(phases))

    def state_dict(self) -> dict[str, Any]:
        phases = [stream.state_dict() for stream in self.streams]
        return self.questions.state_dict() | {"phases": phases, "means": self._means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.questions.load_state_dict(state)
        self._divide()
        for stream, saved in zip(self.streams, state["phases"], strict=True):
            stream.load_state_dict(saved)
        self._means = dict(state["means"])


def _input_tokens(e: SpellEpisode, context: AlgorithmContext) -> int:
    # Our choice: without the template, which is the same for all questions.
    return sum(context.count_tokens(text) for text in (*e.documents, e.question))
