"""Counting: how many documents name a word? The reward follows from the documents alone."""

import dataclasses
import re

import numpy as np

from spell_jax.algorithms.base import AlgorithmContext, Key
from spell_jax.algorithms.config import AlgorithmConfig
from spell_jax.algorithms.episode import QuestionEpisode, count_fields, responder_groups
from spell_jax.data.clusters import Cluster
from spell_jax.rollout.replies import AskModels, Reply
from spell_jax.runtime.config import check_least
from spell_jax.runtime.log.metrics import Metrics


@dataclasses.dataclass(frozen=True)
class CountingConfig(AlgorithmConfig):
    """Sizes of a step: clusters, and answers to the question about each."""

    name: str = "counting"
    clusters: int = 32
    group_size: int = 8

    def __post_init__(self):
        super().__post_init__()
        check_least(self, "algorithm.", clusters=1, group_size=2)


class Counting:
    """Asks one question about each cluster, and trains on GRPO groups of the answers."""

    model_names = trained = ()

    def __init__(self, config: CountingConfig, context: AlgorithmContext):
        self._config = config
        self._stream = context.deal(context.clusters())

    def rollout(self, ask: AskModels, key: Key, step: int) -> list[QuestionEpisode]:
        rng, count = np.random.default_rng([*key]), self._config.clusters
        episodes = [pose(rng, cluster) for _, cluster in self._stream.next(count)]
        replies = ask("responder", [*map(write_prompt, episodes)], self._config.group_size)
        return [_score(e, reply) for e, reply in zip(episodes, replies, strict=True)]

    def groups(self, episodes: list[QuestionEpisode], key: Key) -> tuple:
        return responder_groups(episodes, self._config.to_advantages)

    def metrics(self, episodes: list[QuestionEpisode]) -> Metrics:
        metrics = Metrics()
        for episode in episodes:
            metrics.add("overlong", episode.response is None)
            count_fields(metrics, episode, {"scores": "solve_rate"})
        return metrics

    def state_dict(self) -> dict:
        return self._stream.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self._stream.load_state_dict(state)


def pose(rng: np.random.Generator, cluster: Cluster) -> QuestionEpisode:
    texts = [re.findall(r"[^\W\d_]+", text) for text in cluster.documents]
    # A word that occurs more often is chosen more often: otherwise most answers would be 1.
    words = [word for text in texts for word in text]
    word = words[rng.integers(len(words))]
    question, truth = f"How many name {word}?", str(sum(word in text for text in texts))
    return QuestionEpisode("counting", cluster, question=question, reference=truth)


def write_prompt(episode: QuestionEpisode) -> str:
    return "\n".join([*episode.cluster.documents, episode.question])


def score(text: str, truth: int) -> float:
    """Score 1 for the right number, less the further off the last number is, 0 without any."""
    numbers = re.findall(r"[0-9]{1,6}", text)
    return 1 / (1 + abs(int(numbers[-1]) - truth)) if numbers else 0.0


def _score(episode: QuestionEpisode, reply: Reply | None) -> QuestionEpisode:
    if reply is None:
        return episode
    scores = tuple(score(text, int(episode.reference)) for text in reply.scored_texts)
    return dataclasses.replace(episode, status="accepted", response=reply, scores=scores)
