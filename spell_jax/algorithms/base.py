"""The interface between an algorithm and the trainer.

An episode is a frozen dataclass of the algorithm's own. Nothing changes it after `rollout` returned
it: `groups` and `metrics` are functions of their arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from spell_jax.algorithms.own_reward import RewardFunction
from spell_jax.data.clusters import Cluster, ClusterSource
from spell_jax.data.questions import Question
from spell_jax.data.stream import TaskStream
from spell_jax.learner.packing import TrainGroup
from spell_jax.rollout.judge import JudgeFunction
from spell_jax.rollout.replies import AskModels
from spell_jax.runtime.log.metrics import Metrics
from spell_jax.selfplay.prompts import Prompts

# (seed, step): the entropy of all numpy generators of a step, default_rng([*key]),
# default_rng([*key, 1]), ... A resumed run therefore repeats its random numbers.
Key = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class AlgorithmContext:
    """Inputs of an algorithm besides its config.

    Attributes:
      prompts: templates of the prompts.
      count_tokens: function from a text to its number of tokens.
      prompt_cap: most tokens of a prompt's text, without the chat layout.
      seed: seed of the run.
      steps: number of training steps of the run.
      clusters: function that opens the training clusters.
      held_out: function that opens the clusters that training never reads.
      deal: function from clusters to a stream of them, by the run's tasks, weights and seed.
      questions: function that reads config.data.questions.
      judge: external judge; None if algorithm.rule has none.
      reward: the user's reward function; None if algorithm.reward names none.
      teacher_prompt: function from a prompt's text to token ids, for the teacher of
        loss.distillation_weight; None without a teacher.
    """

    prompts: Prompts
    count_tokens: Callable[[str], int]
    prompt_cap: int
    seed: int
    steps: int
    clusters: Callable[[], ClusterSource]
    held_out: Callable[[], ClusterSource]
    deal: Callable[[ClusterSource], TaskStream]
    questions: Callable[[], tuple[Question, ...]]
    judge: JudgeFunction | None = None
    reward: RewardFunction | None = None
    teacher_prompt: Callable[[str], Sequence[int]] | None = None


class Episode(Protocol):
    """Documents and record of an episode; algorithms/episode.py has a class to start from."""

    @property
    def cluster(self) -> Cluster: ...

    def record(self) -> dict[str, Any]:
        """Return the episode as a JSON-able dict for the run's files."""
        ...


@dataclasses.dataclass(frozen=True)
class Annotation:
    """Use of one episode in the update.

    A role with several replies per episode (SPELL's verifier) has a list of both, one item per
    reply; its advantages are empty where a reply is not used.

    Attributes:
      advantages: role -> advantages of its samples, for the trained roles.
      used: role -> USED, or one word for why the reply is not trained on.
    """

    advantages: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    used: Mapping[str, str | Sequence[str]] = dataclasses.field(default_factory=dict)


USED = "used"


class Algorithm(Protocol):
    """A self-play or RL algorithm, as the trainer calls it.

    A step, with key = (seed, step):

        episodes = algorithm.rollout(ask, key, step)
        groups, annotations = algorithm.groups(episodes, key)
        metrics = algorithm.metrics(episodes)
        lines = records(episodes, annotations)
    """

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the models besides "policy".

        A name with a section in the config has its own weights, any other is a frozen copy of the
        first policy.
        """
        ...

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the models that are trained, on the groups with their name."""
        ...

    def rollout(self, ask: AskModels, key: Key, step: int) -> Sequence[Any]:
        """Sample the episodes of a step (from 1) and advance the state that `state_dict` saves."""
        ...

    def groups(
        self, episodes: Sequence[Any], key: Key
    ) -> tuple[list[TrainGroup], list[Annotation]]:
        """Return training groups of all trained models, if any, and an annotation per episode."""
        ...

    def metrics(self, episodes: Sequence[Any]) -> Metrics:
        """Return the metrics of a step over all episodes, trained on or not."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next rollout depends on besides weights, seed and step, JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def make_record(episode: Episode, annotation: Annotation) -> dict[str, Any]:
    """Return an episode and its use as a line of the run's files."""
    use = {"advantages": dict(annotation.advantages), "used": dict(annotation.used)}
    return episode.record() | use


def records(
    episodes: Iterable[Episode], annotations: Iterable[Annotation]
) -> Iterator[dict[str, Any]]:
    """Yield each record with the documents of the cluster, as EpisodeWriter takes them."""
    for episode, annotation in zip(episodes, annotations, strict=True):
        yield make_record(episode, annotation) | {"documents": list(episode.cluster.documents)}
