"""Dry sampler: the sampler's scheduler without a device, for counting the calls of a run.

1. Requests are admitted, prefilled, decoded and refilled as session.Session does, so the numbers of
   prefill calls and decode passes are those of a run (tests/sampler/test_dry.py).
2. `write` supplies the tokens of all answers. Every answer ends with a stop token, also at its cap.
3. Calls are counted by agent, over all sessions: `DrySampler.counts_by_agent`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spell_jax.data.samples import Sample
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.counts import Counts
from spell_jax.sampler.requests import SampleRequest
from spell_jax.sampler.scheduler import Scheduler
from spell_jax.sampler.session import NO_LIMIT, most_idle_passes
from spell_jax.sampler.shard import AdmittedPrompt, DecodeSequence, ShardShape, Tasks


@dataclasses.dataclass
class AgentCounts:
    """Counts of one agent's share of the calls; a call for several agents is divided.

    Attributes:
      requests: requests submitted.
      calls: prefill calls.
      prompt_tokens: tokens that prefill reads; tokens of shared pages are not read again.
      prompt_pairs: pairs of a prompt token and a key that the token attends to. Row shards wait for
        the busiest shard: a call counts as if all shards had as many pairs.
      prompt_keys: keys that prefill reads: the keys that a page's tokens see, once a page.
      passes: decode passes.
      tokens: sampled tokens.
      pairs: pairs of a sampled token and a key that the token attends to.
      keys: keys that decoding reads: a prompt's keys once for all its samples, and their own.

    Pairs and keys are means over the layers: a layer with a window has fewer.
    """

    requests: int = 0
    calls: float = 0.0
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    prompt_keys: float = 0.0
    passes: float = 0.0
    tokens: int = 0
    pairs: float = 0.0
    keys: float = 0.0


class DrySampler:
    """Stand-in for engine.Sampler, for counting."""

    def __init__(
        self,
        config: SamplerConfig,
        shape: ShardShape,
        shards: int,
        write: Callable[[SampleRequest], Sequence[np.ndarray]],
        mean_pairs: Callable[[int, int], float],
    ):
        """Create a sampler of `shards` row shards, each with the sizes in `shape`.

        `write` maps a request to its G answers, token ids int32 [S] with 1 <= S <= max_tokens.
        `mean_pairs` is PolicyConfig.mean_pairs of the policy.
        """
        self.config, self.shape, self.shards, self.write = config, shape, shards, write
        self.mean_pairs = mean_pairs
        self.counts_by_agent: dict[str, AgentCounts] = defaultdict(AgentCounts)
        self.refused = 0  # prompts above the cap

    def prompt_fits(self, prompt: Sequence[int]) -> bool:
        fits = len(prompt) <= self.config.max_prompt
        self.refused += not fits
        return fits

    def start_session(self, params: Any) -> DrySession:
        """Start a session; `params` are not read."""
        return DrySession(self)


class DrySession:
    """Stand-in for session.Session, with answers that are known when a request is submitted."""

    def __init__(self, sampler: DrySampler):
        self.counts = Counts()
        self.reused_tokens = 0
        self._sampler = sampler
        self._scheduler = Scheduler(sampler.shape, sampler.shards)
        self._answers: list[Sequence[np.ndarray]] = []  # of each ticket
        # Running sequences of each lane: shard, sequence, and tokens that the call samples.
        self._running: list[tuple[int, list[tuple[int, DecodeSequence, int]]]] = []

    def submit(self, request: SampleRequest) -> int:
        """Queue a request and return its ticket, a number from 0."""
        ticket = len(self._answers)
        self._scheduler.submit(ticket, request)
        self._answers.append(self._sampler.write(request))
        self._count(request).requests += 1
        self.counts.prompt_tokens += len(request.prompt)
        return ticket

    def advance(self) -> list[tuple[int, list[Sample]]]:
        """Finish the planned calls and plan the next; return the finished (ticket, answers)."""
        finished = []
        for lane, sampled in self._running:
            for number, sequence, new in sampled:
                sequence.count += new
                ticket, shard = sequence.admitted.ticket, self._scheduler.shards[number]
                if sequence.count < len(self._answers[ticket][sequence.number]):
                    continue
                if shard.finish(shard.lanes[lane], sequence):
                    finished.append(ticket)
        self._running = []
        self._scheduler.dispatch(self._prefill, self._decode)
        return [
            (ticket, [Sample(tokens) for tokens in self._answers[ticket]]) for ticket in finished
        ]

    def _count(self, request: SampleRequest) -> AgentCounts:
        return self._sampler.counts_by_agent[request.agent]

    def _prefill(self, tasks: Tasks) -> None:
        """Count a prefill call."""
        size, mean_pairs = self._scheduler.shape.page_size, self._sampler.mean_pairs
        pairs: list[dict[str, float]] = [defaultdict(float) for _ in tasks]  # of shards, by agent
        count = sum(map(len, tasks))
        for shard, shard_tasks in enumerate(tasks):
            for admitted, number in shard_tasks:
                before = number * size
                tokens = min(len(admitted.tokens) - before, size)
                agent_counts = self._count(admitted.request)
                agent_counts.calls += 1 / count
                agent_counts.prompt_tokens += tokens
                # The page's first token sees the earlier keys, the page adds its own.
                agent_counts.prompt_keys += mean_pairs(before, 1) + tokens - 1
                pairs[shard][admitted.request.agent] += mean_pairs(before, tokens)
                self.counts.prefilled_tokens += tokens
        totals = [sum(shard_pairs.values()) for shard_pairs in pairs]
        for agent, agent_pairs in itertools.chain(*(shard_pairs.items() for shard_pairs in pairs)):
            self._sampler.counts_by_agent[agent].prompt_pairs += (
                agent_pairs * max(totals) * len(totals) / sum(totals)
            )

    def _decode(self, lane: int) -> None:
        """Plan a decode call of a lane, and count its passes."""
        scheduler, decode_tokens = self._scheduler, self._sampler.config.decode_tokens
        limits = [
            shard.allocate_pages(shard.lanes[lane], decode_tokens) for shard in scheduler.shards
        ]
        left = []  # tokens until each active sequence ends or pauses
        for number, shard_limits in enumerate(limits):
            for sequence, limit in shard_limits.items():
                length = len(self._answers[sequence.admitted.ticket][sequence.number])
                if sequence.count < limit:
                    left.append((number, sequence, min(limit, length) - sequence.count))
        if not left:  # all wait for pages
            return
        most_idle = most_idle_passes(len(left)) if scheduler.has_queued(lane) else NO_LIMIT
        steps = _passes(np.array([tokens for *_, tokens in left]), decode_tokens, most_idle)
        sampled = [(number, sequence, min(tokens, steps)) for number, sequence, tokens in left]
        self._running.append((lane, sampled))
        self._count_passes(steps, [(sequence, new) for _, sequence, new in sampled])

    def _count_passes(self, steps: int, sampled: list[tuple[DecodeSequence, int]]) -> None:
        """Count a call of `steps` passes, in which each sequence samples its number of tokens."""
        total = sum(new for _, new in sampled)
        self.counts.tokens += total
        # A pass reads a prompt's keys once for all its samples.
        # Prompt -> its keys that the sample with the most passes reads.
        prompt_keys: dict[AdmittedPrompt, float] = {}
        mean_pairs = self._sampler.mean_pairs
        for sequence, new in sampled:
            admitted = sequence.admitted
            agent_counts = self._count(admitted.request)
            answer_keys = mean_pairs(sequence.count, new)
            pairs = mean_pairs(len(admitted.tokens) + sequence.count, new)
            agent_counts.passes += steps * new / total
            agent_counts.tokens += new
            agent_counts.pairs += pairs
            agent_counts.keys += answer_keys
            prompt_keys[admitted] = max(prompt_keys.get(admitted, 0.0), pairs - answer_keys)
        for admitted, keys in prompt_keys.items():
            self._count(admitted.request).keys += keys


def _passes(left: np.ndarray, decode_tokens: int, most_idle: int) -> int:
    """Return the passes of a decode call, from the tokens `left` to each sequence, int [N].

    The device ends a call when idle slots have lost `most_idle` slot passes, so that they are
    refilled (docs/sampler.md). Here the passes until then follow from the lengths.
    """
    steps = min(decode_tokens, left.max())
    # Slot passes lost after each number of passes, the next pass included.
    passes = np.arange(1, steps + 1)[:, None]
    idle = np.maximum(passes + 1 - left, 0).sum(axis=1)
    return int(min(steps, 1 + np.searchsorted(idle, most_idle)))
