"""What a game and the trainer know of each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from spell_jax.learner.packing import Group
from spell_jax.runtime.metrics import Metrics
from spell_jax.sampler.requests import Sample


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
    """How a game reaches a model: each prompt is answered `group` times, in request order.

    None stands where a prompt is over the sampler's cap. `temperature` replaces the configured one.
    """

    def __call__(
        self,
        role: str,
        prompts: Sequence[str],
        group: int = 1,
        model: str = "policy",
        temperature: float | None = None,
    ) -> list[Reply | None]: ...


class Game(Protocol):
    """What is played; the trainer is the same for all games.

    Attributes:
      models: names of the models that the game asks besides "policy". They begin as copies of it
        and are not trained.
    """

    models: tuple[str, ...]

    def play(self, ask: Ask, step: int) -> Sequence[Any]:
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

    def state_dict(self) -> dict[str, Any]:
        """Everything besides weights that the next step depends on, JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
