"""Algorithms on a static set of questions: RLVR and its relatives, which differ in their parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from spell_jax.algorithms.base import Annotation, Key
from spell_jax.algorithms.rlvr.question_sets import QuestionSet
from spell_jax.learner.packing import TrainGroup
from spell_jax.rollout.replies import AskModels
from spell_jax.runtime.log.metrics import Metrics

Groups = tuple[list[TrainGroup], list[Annotation]]


@dataclasses.dataclass
class StaticAlgorithm:
    """Questions of a set, their answers, and the groups of an update; see base.Algorithm.

    Attributes:
      questions: the set, which a step takes batches of.
      answer: function that answers and rewards batches of accepted episodes, until enough questions
        have mixed rewards (Answering.answer_batches).
      to_groups: function from episodes and key to groups and annotations, as Algorithm.groups.
      to_metrics: function from episodes to metrics.
    """

    questions: QuestionSet
    answer: Callable[[AskModels, Iterator[list[Any]], np.random.Generator], list[Any]]
    to_groups: Callable[[Sequence[Any], Key], Groups]
    to_metrics: Callable[[Sequence[Any]], Metrics]
    trained: tuple[str, ...] = ()

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.questions.model_names

    def rollout(self, ask: AskModels, key: Key, step: int) -> list[Any]:
        rng = np.random.default_rng([*key])
        self.questions.prepare(ask, rng)
        episodes = self.answer(ask, self.questions.batches(key, step), rng)
        self.questions.remember(episodes)
        return episodes

    def groups(self, episodes: Sequence[Any], key: Key) -> Groups:
        return self.to_groups(episodes, key)

    def metrics(self, episodes: Sequence[Any]) -> Metrics:
        metrics = self.to_metrics(episodes)
        self.questions.count(metrics, episodes)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return self.questions.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.questions.load_state_dict(state)
