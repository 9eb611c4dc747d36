"""Requests to the sampler and the samples that it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from spell_jax.runtime.config import check_least


@dataclasses.dataclass(frozen=True)
class Options:
    """Sampling options of a request."""

    # Softmax temperature, 0 or more; 0 takes the most likely token each time.
    temperature: float = 1.0
    top_p: float = 1.0  # mass of the nucleus, in (0, 1]
    top_k: int = 0  # number of most likely tokens to keep; 0 keeps all
    # Least probability of a kept token, as a share of the most likely token's, in [0, 1].
    min_p: float = 0.0
    max_tokens: int = 4096  # maximum length S of an answer, in tokens
    # Vocabulary dropout, if the sampler's config has it: share of tokens, nats that they lose.
    dropout: float = 0.0
    dropout_penalty: float = 0.0
    # Non-empty texts that end an answer. They need not align with token boundaries.
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self):
        check_least(self, "", temperature=0, top_k=0, max_tokens=1)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: must be in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p = {self.min_p}: must be in [0, 1]")
        if "" in self.stop_strings:
            raise ValueError("stop_strings: none may be empty")


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """A prompt to be answered `group` times."""

    prompt: Sequence[int]  # token ids [P]
    group: int  # number of samples, G
    key: np.ndarray  # PRNG key data, uint32 [2]; sample and token index are folded into it
    options: Options  # sampling options of its answers
    agent: str = ""  # name of the agent that asks; device time is counted by it

    def __post_init__(self):
        if not len(self.prompt):
            raise ValueError("the prompt is empty")
        check_least(self, "", group=1)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sampled answer."""

    tokens: np.ndarray  # token ids, int32 [S], including the stop token
    # Logprobs at the sampling temperature, under the full vocabulary, float32 [S].
    logprobs: np.ndarray
    # Whether a stop token or stop string ended it; False if it was truncated at the cap.
    stopped: bool
    # Stop string that ended it, or "". The last token is the one that completed it.
    stop_string: str = ""
    # What top-k, top-p and min-p kept at each token: the log of its probability mass, and the
    # cut-off (sampling.SampledToken), float32 [S]; None if it is not known.
    kept_log_masses: np.ndarray | None = None
    cutoffs: np.ndarray | None = None
    # Experts that processed each token [S, L, k], and each token of the prompt [P, L, k], in one
    # array for all samples of the prompt (moe.no_experts); None if they were not recorded.
    experts: np.ndarray | None = None
    prompt_experts: np.ndarray | None = None

    @property
    def content(self) -> list[int]:
        """The tokens without the stop token."""
        by_token = self.stopped and not self.stop_string
        return self.tokens[: len(self.tokens) - by_token].tolist()

    def text(self, decode: Callable[[list[int]], str]) -> str:
        """Decode the text of the answer, up to its stop string."""
        text = decode(self.content)
        return text.split(self.stop_string, 1)[0] if self.stop_string else text
