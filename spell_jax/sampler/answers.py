"""Answers under construction, and the recorded experts of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from spell_jax.policy.tokenizer_base import Stream
from spell_jax.sampler.requests import Sample
from spell_jax.sampler.scheduler import PrefilledPrompt, Tasks


@dataclasses.dataclass
class Answer:
    """An answer under construction."""

    tokens: list[int] = dataclasses.field(default_factory=list)  # token ids so far
    # Logprob, log of the kept mass and cut-off of its tokens (sampling.SampledToken), by decode
    # call, float32 [n, 3].
    numbers: list[np.ndarray] = dataclasses.field(default_factory=list)
    # Experts of its tokens by decode call, [n, L, k]; empty if they are not recorded.
    experts: list[np.ndarray] = dataclasses.field(default_factory=list)
    text: str = ""  # decoded text so far, searched for stop strings
    # Incremental decoder that produces the text; None if there are no stop strings.
    stream: Stream | None = None
    stop_string: str = ""  # stop string that was found, or ""
    stopped: bool = False  # whether the answer ended by a stop token or stop string

    def push(self, token: int, strings: Sequence[str]) -> None:
        """Appends one token; sets `stopped` if it completed a stop string."""
        self.tokens.append(token)
        if self.stream is not None:
            begin = max(0, len(self.text) - max(map(len, strings)) + 1)
            self.text += self.stream.push(token)
            found = [s for s in strings if s in self.text[begin:]]
            if found:
                self.stop_string = min(found, key=self.text[begin:].index)
                self.stopped = True

    def sample(self, prompt_experts: np.ndarray | None) -> Sample:
        tokens = np.array(self.tokens, np.int32)
        logprobs, kept, cutoffs = np.concatenate(self.numbers).T
        experts = np.concatenate(self.experts) if self.experts else None
        ended = self.stopped, self.stop_string
        return Sample(tokens, logprobs, *ended, kept, cutoffs, experts, prompt_experts)


class PromptExperts:
    """Experts of the prompt tokens in the pool, by shard and page; empty if not recorded.

    A page that several prompts share has the experts with which its keys and values were computed.
    """

    def __init__(self):
        self._pages: dict[tuple[int, int], np.ndarray] = {}  # [C, L, k]
        self._pending: list[tuple[jax.Array, Tasks]] = []

    def add(self, experts: jax.Array, tasks: Tasks) -> None:
        """Adds the result [B, C, L, k] of a prefill call; does not wait for the device."""
        self._pending.append((experts, tasks))

    def take(self, shard: int, prefilled: PrefilledPrompt) -> np.ndarray | None:
        """Experts of a prompt [P, L, k] whose pages have not been released to others yet."""
        self._collect()
        if not self._pages:
            return None
        pages = [self._pages[shard, page] for page in prefilled.pages]
        return np.concatenate(pages)[: len(prefilled.tokens)]

    def _collect(self) -> None:
        for experts, tasks in self._pending:
            by_shard = jax.device_get(experts).reshape(len(tasks), -1, *experts.shape[1:])
            for shard, some in enumerate(tasks):
                for row, (prefilled, number) in enumerate(some):
                    # A copy: a page may outlive the others of its call.
                    self._pages[shard, prefilled.pages[number]] = by_shard[shard, row].copy()
        self._pending = []
