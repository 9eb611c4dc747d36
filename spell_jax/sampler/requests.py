"""What is asked of the sampler, and what it gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Options:
    """How the answers of a request are sampled.

    Attributes:
      temperature: of the softmax; 0 takes the most likely token each time.
      top_p: mass of the nucleus, in (0, 1].
      top_k: most likely tokens that are kept; 0 keeps all.
      min_p: least probability as a share of the most likely token's, in [0, 1].
      max_tokens: cap of an answer [S].
      stop_strings: texts that end an answer, wherever tokens begin and end; none of them is empty.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 4096
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature = {self.temperature}: must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: must be in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}: must be 0 (all) or more")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p = {self.min_p}: must be in [0, 1]")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens = {self.max_tokens}: must be at least 1")
        if "" in self.stop_strings:
            raise ValueError("stop_strings: none may be empty")


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt that is to be answered `group` times.

    Attributes:
      prompt: token ids [P].
      group: G, siblings.
      key: uint32 [2], key data; sibling and token are folded into it.
      options: how its answers are sampled.
      agent: for whom the device works on it; a name to count by.
    """

    prompt: Sequence[int]
    group: int
    key: np.ndarray
    options: Options
    agent: str = ""

    def __post_init__(self):
        if not len(self.prompt):
            raise ValueError("the prompt is empty")
        if self.group < 1:
            raise ValueError(f"group = {self.group}: must be at least 1")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One answer.

    Attributes:
      tokens: int32 [S], stop token included.
      logprobs: float32 [S], at the sampling temperature.
      stopped: whether it ended by itself rather than at the cap.
      stop_string: the text that ended it, if one did; tokens go up to the one that completed it.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    stop_string: str = ""

    @property
    def content(self) -> list[int]:
        """The tokens without the stop token."""
        by_token = self.stopped and not self.stop_string
        return self.tokens[: len(self.tokens) - by_token].tolist()

    def text(self, decode: Callable[[list[int]], str]) -> str:
        """The answer as a text, up to the string that ended it."""
        text = decode(self.content)
        return text.split(self.stop_string, 1)[0] if self.stop_string else text
