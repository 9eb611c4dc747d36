"""Requests to the sampler, which answers them with samples (data/samples.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from spell_jax.runtime.config import check_least

# Logits over a smaller temperature overflow float32: of 100 below 3e-37. 1e-6 leaves a margin.
LEAST_TEMPERATURE = 1e-6


@dataclasses.dataclass(frozen=True)
class Options:
    """Sampling options of a request.

    Attributes:
      temperature: softmax temperature, 0 or at least LEAST_TEMPERATURE; 0 takes the most likely
        token each time.
      top_p: mass of the nucleus, in (0, 1].
      top_k: number of most likely tokens to keep; 0 keeps all.
      min_p: least probability of a kept token, as a share of the most likely token's, in [0, 1].
      max_tokens: maximum length S of an answer, in tokens.
      dropout: share of tokens that vocabulary dropout disfavors in a whole answer (arXiv
        2604.03472), for a sampler with `has_dropout`. Logprobs are computed without dropout.
      dropout_penalty: nats that the logits of disfavored tokens lose.
      stop_strings: non-empty texts that end an answer. They need not align with token boundaries.
      stop_ids: token ids that end an answer, besides the stop ids of the sampler. The last token of
        the sample is the stop id, which is no part of the answer's text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 4096
    dropout: float = 0.0
    dropout_penalty: float = 0.0
    stop_strings: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self):
        check_least(self, "", temperature=0, top_k=0, max_tokens=1)
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature = {self.temperature}: must be 0, or at least {LEAST_TEMPERATURE}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: must be in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p = {self.min_p}: must be in [0, 1]")
        if "" in self.stop_strings:
            raise ValueError("stop_strings: none may be empty")


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """A prompt to be answered `group` times.

    Attributes:
      prompt: token ids [P].
      group: number of samples, G.
      key: PRNG key data, uint32 [2]; the sampler folds sample and token index into it.
      options: sampling options of the answers.
      agent: name of the agent that asks; device time is counted by agent.
    """

    prompt: Sequence[int]
    group: int
    key: np.ndarray
    options: Options
    agent: str = ""

    def __post_init__(self):
        if not len(self.prompt):
            raise ValueError("the prompt is empty")
        check_least(self, "", group=1)
