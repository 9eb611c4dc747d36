"""Answers under construction, and the recorded experts of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from spell_jax.policy.tokenizer_base import Stream
from spell_jax.sampler.requests import Sample
from spell_jax.sampler.sampled import Sampled
from spell_jax.sampler.scheduler import PrefilledPrompt, Tasks


class SlotTokens:
    """Result of a decode call on the host, for reading slot by slot.

    Lists, because to read an item of an array takes several times as long.

    Attributes:
      ids: token ids of each slot; the first `new` are valid.
      numbers: logprob, log of the kept mass and cut-off of each token, float32 [N, steps, 3].
      finite: whether all logprobs of a slot's tokens are finite.
      new: number of tokens of each slot.
      stopped: whether the last token of a slot is a stop token.
      experts: experts of the tokens, [N, steps, L, k]; None if they are not recorded.
    """

    def __init__(self, sampled: Sampled):
        tokens = sampled.tokens
        unused = np.arange(tokens.id.shape[1]) >= sampled.new[:, None]
        self.ids: list[list[int]] = tokens.id.tolist()
        self.numbers = np.stack([tokens.logprob, tokens.kept, tokens.cutoff], axis=-1)
        self.finite: list[bool] = np.all(unused | np.isfinite(tokens.logprob), axis=1).tolist()
        self.new: list[int] = sampled.new.tolist()
        self.stopped: list[bool] = sampled.stopped.tolist()
        self.experts = sampled.experts


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

    def extend(self, tokens: SlotTokens, slot: int, strings: Sequence[str]) -> None:
        """Append a slot's tokens, up to the first that completes a stop string."""
        before, ids = len(self.tokens), tokens.ids[slot][: tokens.new[slot]]
        if self.stream is None:
            self.tokens += ids
        else:
            for token in ids:
                self.push(token, strings)
                if self.stop_string:
                    break
        kept = len(self.tokens) - before
        # Copies, which do not keep the other slots' arrays.
        self.numbers.append(tokens.numbers[slot, :kept].copy())
        if tokens.experts is not None:
            self.experts.append(np.array(tokens.experts[slot, :kept]))

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
