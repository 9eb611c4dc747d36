"""Answers under construction, and the recorded experts of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from spell_jax.data.samples import Sample
from spell_jax.policy.tokenizer_base import Stream
from spell_jax.sampler.requests import Options
from spell_jax.sampler.sampled import JoinedResult
from spell_jax.sampler.shard import AdmittedPrompt, Tasks


class SlotTokens:
    """Result of a decode call on the host, for reading slot by slot.

    Attributes:
      bits: ids, and as bits logprobs, logs of the kept mass and cut-offs of each slot's tokens,
        int32 [N, 4, steps]; the first `new` are valid.
      new: number of tokens of each slot.
      stopped: whether the last token of a slot is a stop token.
      finite: whether all logprobs of a slot's tokens are finite.
      busy: number of passes that sampled, summed over the slots.
      passes: number of passes of the call.
      experts: experts of the tokens, [N, steps, L, k]; None if they are not recorded.
    """

    def __init__(self, joined: JoinedResult):
        numbers, self.experts = jax.device_get((joined.numbers, joined.experts))
        slots = len(numbers)
        self.bits: np.ndarray = numbers[:, :-5].reshape(slots, 4, -1)
        # Lists: reading a number from an array takes several times as long as from a list.
        self.new: list[int]
        self.stopped: list[int]
        self.finite: list[int]
        self.new, self.stopped, self.finite, busy, passes = numbers[:, -5:].T.tolist()
        self.busy, self.passes = sum(busy), passes[0]


@dataclasses.dataclass
class Answer:
    """An answer under construction."""

    # Ids, and as bits logprobs, logs of the kept mass and cut-offs (sampling.SampledToken) of its
    # tokens, by decode call, int32 [4, n].
    bits: list[np.ndarray] = dataclasses.field(default_factory=list)
    # Experts of its tokens by decode call, [n, L, k]; empty if they are not recorded.
    experts: list[np.ndarray] = dataclasses.field(default_factory=list)
    text: str = ""  # decoded text so far, searched for stop strings
    # Incremental decoder that produces the text; None if there are no stop strings.
    stream: Stream | None = None
    stop_string: str = ""  # stop string that was found, or ""
    stopped: bool = False  # whether the answer ended by a stop token or stop string

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return sum(bits.shape[1] for bits in self.bits)

    def tokens_from(self, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens from number `first` on: ids int32 [n] and logprobs float32 [n]."""
        begin, parts = self.length, []
        for bits in reversed(self.bits):  # the new tokens of a long answer are its last few calls
            if begin <= first:
                break
            begin -= bits.shape[1]
            parts.insert(0, bits[:2, max(0, first - begin) :])
        ids, logprobs = np.concatenate(parts, axis=1) if parts else np.zeros((2, 0), np.int32)
        return ids, logprobs.view(np.float32)

    def extend(self, tokens: SlotTokens, slot: int, options: Options) -> None:
        """Append a slot's tokens, up to a stop token or the token that completes a stop string."""
        count, self.stopped = tokens.new[slot], bool(tokens.stopped[slot])
        if self.stream is not None or options.stop_ids:
            count = self._find_stop(tokens.bits[slot, 0, :count].tolist(), options)
        # A copy. A view would keep the arrays of all slots in memory.
        self.bits.append(tokens.bits[slot, :, :count].copy())
        if tokens.experts is not None:
            self.experts.append(np.array(tokens.experts[slot, :count]))

    def _find_stop(self, ids: Sequence[int], options: Options) -> int:
        """Return the number of ids up to the request's first stop id or stop string."""
        stop_ids = options.stop_ids
        content = next((n for n, token in enumerate(ids) if token in stop_ids), len(ids))
        if self.stream is not None:
            count = self.decode_ids(self.stream, ids[:content], options.stop_strings)
            if self.stop_string:
                return count
        if content == len(ids):
            return content
        self.stopped = True
        return content + 1

    def decode_ids(self, stream: Stream, ids: Sequence[int], strings: Sequence[str]) -> int:
        """Decode ids up to the first id that completes a stop string; return the number decoded."""
        for number, token in enumerate(ids, 1):
            # A stop string may span tokens, so the search begins before the new characters.
            begin = max(0, len(self.text) - max(map(len, strings)) + 1)
            self.text += stream.push(token)
            completed_strings = [s for s in strings if s in self.text[begin:]]
            if completed_strings:
                # One token can complete several stop strings; the earliest string ends the answer.
                self.stop_string = min(completed_strings, key=self.text[begin:].index)
                self.stopped = True
                return number
        return len(ids)

    def to_sample(self, prompt_experts: np.ndarray | None) -> Sample:
        """Convert the finished answer; `prompt_experts` are [P, L, k], None if not recorded."""
        # An answer that one decode call sampled needs no copy.
        bits = self.bits[0] if len(self.bits) == 1 else np.concatenate(self.bits, axis=1)
        logprobs, kept_log_masses, cutoffs = bits[1:].view(np.float32)
        experts = np.concatenate(self.experts) if self.experts else None
        ended = self.stopped, self.stop_string
        return Sample(bits[0], logprobs, *ended, kept_log_masses, cutoffs, experts, prompt_experts)


class PromptExperts:
    """Experts of the prompt tokens in the pool, by shard and page; empty if not recorded.

    A page that several prompts share has the experts with which its keys and values were computed.
    """

    def __init__(self):
        self._pages: dict[tuple[int, int], np.ndarray] = {}  # [C, L, k]
        # Fetched only when a prompt finishes, so that prefill calls overlap with the host's work.
        self._pending: list[tuple[jax.Array, Tasks]] = []

    def add(self, experts: jax.Array, tasks: Tasks) -> None:
        """Add the result [B, C, L, k] of a prefill call without waiting for the device."""
        self._pending.append((experts, tasks))

    def take(self, shard: int, admitted: AdmittedPrompt) -> np.ndarray | None:
        """Return a prompt's experts [P, L, k] before its pages are released; None if unrecorded."""
        self._collect()
        if not self._pages:
            return None
        # The first group has no window, so the prompt holds all of its pages (engine.Sampler).
        pages = [self._pages[shard, page] for page in admitted.table[0].tolist()]
        return np.concatenate(pages)[: len(admitted.tokens)]

    def _collect(self) -> None:
        for experts, tasks in self._pending:
            by_shard = jax.device_get(experts).reshape(len(tasks), -1, *experts.shape[1:])
            for shard, shard_tasks in enumerate(tasks):
                for row, (admitted, number) in enumerate(shard_tasks):
                    # A copy. A view would keep the whole call in memory as long as one page.
                    page = int(admitted.table[0, number])
                    self._pages[shard, page] = by_shard[shard, row].copy()
        self._pending = []
