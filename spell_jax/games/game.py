"""What a game and the trainer know of each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from spell_jax.data.clusters import Cluster
from spell_jax.learner.packing import Group
from spell_jax.runtime.metrics import Metrics
from spell_jax.sampler.requests import Sample

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a model said to one prompt.

    Attributes:
      prompt: token ids of the prompt [P].
      samples: G answers as tokens with log-probs.
      texts: the same answers as text, without stop tokens.
    """

    prompt: Sequence[int]
    samples: Sequence[Sample]
    texts: Sequence[str]

    def group(self, advantages: Iterable[float], role: str) -> Group:
        """This prompt and its answers as a training group."""
        return Group(
            self.prompt,
            [sample.tokens for sample in self.samples],
            [float(a) for a in advantages],
            role,
            [sample.log_probs for sample in self.samples],
        )


class Ask(Protocol):
    """How a coroutine of a game reaches a model: each prompt is answered `group` times, in order.

    None stands where a prompt is over the sampler's cap. `temperature` replaces the configured one.
    """

    async def __call__(
        self,
        role: str,
        prompts: Sequence[str],
        group: int = 1,
        model: str = "policy",
        temperature: float | None = None,
    ) -> list[Reply | None]: ...


class Models(Protocol):
    """The models of a game. Called like an Ask, they answer at once."""

    def __call__(
        self,
        role: str,
        prompts: Sequence[str],
        group: int = 1,
        model: str = "policy",
        temperature: float | None = None,
    ) -> list[Reply | None]: ...

    def together(
        self, play: Callable[[Ask, Item], Coroutine[Any, Any, None]], items: Sequence[Item]
    ) -> None:
        """Runs play(ask, item) for all items at the same time.

        Each goes on as soon as what it asked is answered: none waits for the slowest answer of the
        others. What it is told does not depend on them.
        """
        ...


class Game(Protocol):
    """What is played; the trainer is the same for all games.

    Attributes:
      models: names of the models that the game asks besides "policy". They begin as copies of it
        and are not trained.
    """

    models: tuple[str, ...]

    def play(self, models: Models, step: int) -> Sequence[Any]:
        """One step's episodes, dataclasses with JSON-able fields apart from replies."""
        ...

    def rows(self, episodes: Sequence[Any]) -> list[Group]:
        """The training groups of a step; empty when nothing can be learned from it."""
        ...

    def metrics(self, episodes: Sequence[Any]) -> Metrics:
        """What happened in a step, before anything was filtered out."""
        ...

    def record(self, episode: Any) -> dict[str, Any]:
        """An episode as a JSON-able dict for the run's files."""
        ...

    def cluster(self, episode: Any) -> Cluster:
        """The documents that an episode is about."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything besides weights that the next step depends on, JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def records(game: Game, episodes: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Episodes as EpisodeWriter takes them: with the texts of their clusters."""
    for episode in episodes:
        yield game.record(episode) | {"documents": list(game.cluster(episode).documents)}
