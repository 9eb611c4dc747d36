"""Session: serves sampling requests with fixed weights while the host does other work.

Each `advance` collects the results of the running decode calls, plans (scheduler.py), dispatches
the next calls, and returns while the device works, so the host can process answers and submit more
requests. The order of results depends only on the sampled tokens, never on the clock.

A session may stay open for ever: what it keeps of a request ends with the request, except for the
blocks of its prompt in the page pool, which later prompts share until they are evicted.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import flax.linen as nn
import jax
import numpy as np

from spell_jax.data.samples import Sample
from spell_jax.policy import transformer
from spell_jax.policy.tokenizer_base import Stream
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import batching
from spell_jax.sampler.answers import Answer, PromptExperts, SlotTokens
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.counts import Counts
from spell_jax.sampler.keys import request_keys
from spell_jax.sampler.requests import Options, SampleRequest
from spell_jax.sampler.sampled import JoinedResult
from spell_jax.sampler.scheduler import Scheduler
from spell_jax.sampler.shard import DecodeSequence, ShardShape, Tasks

log = logging.getLogger(__name__)

# While requests are queued, a decode call returns before its idle slots lose as much as a refill
# costs, during which all slots wait: about this share of a pass (the demo: 2 of 4 ms).
REFILL_COST = 0.5
NO_LIMIT = np.iinfo(np.int32).max


def most_idle_passes(active: int) -> int:
    """Return the number of idle slot passes at which a call with `active` slots returns."""
    return max(1, round(REFILL_COST * active))


@dataclasses.dataclass(frozen=True)
class _DecodeCall:
    """A decode call in flight."""

    lane: int  # index of the lane that it samples for
    # For each shard, its sequences and the token count at which each must stop.
    limits: batching.Limits
    has_queued: bool  # whether a request was queued for a slot of this lane
    cells: int  # number of cells of the decode rows in use
    empty: int  # number of cells without a sequence among `cells`
    joined: JoinedResult  # result on the device


@dataclasses.dataclass
class PendingAnswers:
    """The unfinished answers to a request, which grow with each `advance`.

    Attributes:
      answers: answers under construction [G].
      reused_tokens: number of prompt tokens taken from a shared prefix; None until the prompt is
        read.
    """

    answers: list[Answer]
    reused_tokens: int | None = None


class NonFiniteError(FloatingPointError):
    """Logits of a request that are not finite. The page pool may hold such keys and values."""

    def __init__(self, ticket: int):
        super().__init__(f"request {ticket}: the policy's logits are not finite")
        self.ticket = ticket


class CompiledSampler(Protocol):
    """The part of engine.Sampler that a session uses."""

    config: SamplerConfig
    mesh: jax.sharding.Mesh
    shape: ShardShape
    shards: int
    stream: Callable[[], Stream] | None
    has_dropout: bool
    prefill: jax.stages.Wrapped
    decode: jax.stages.Wrapped
    init_state: jax.stages.Wrapped

    def prompt_fits(self, prompt: Sequence[int]) -> bool: ...


class Session:
    """Requests that are served with the same weights."""

    def __init__(self, sampler: CompiledSampler, params: transformer.Params):
        self.counts = Counts()
        self._sampler = sampler
        self._params = params
        with jax.set_mesh(sampler.mesh):
            self._state = sampler.init_state(params["final_norm"]["scale"].dtype)
        self._scheduler = Scheduler(sampler.shape, sampler.shards)
        self._progress: dict[int, PendingAnswers] = {}
        self._running: list[_DecodeCall] = []
        self._prompt_experts = PromptExperts()
        self._processed: Counter[str] = Counter()  # tokens per agent since the last wait
        self._tickets = 0

    @property
    def reused_tokens(self) -> int:
        """Number of prompt tokens taken from a shared prefix instead of being read again."""
        return sum(shard.reused_tokens for shard in self._scheduler.shards)

    def submit(self, request: SampleRequest) -> int:
        """Queue a request and return its ticket, a number from 0.

        ValueError if the prompt or `max_tokens` is above its cap, if the request can never fit into
        the pool, or if it has stop strings or dropout and the sampler lacks them.
        """
        sampler, ticket, options = self._sampler, self._tickets, request.options
        if not sampler.prompt_fits(request.prompt):
            raise ValueError(
                f"request {ticket}: a prompt of {len(request.prompt)} tokens is over the cap of "
                f"{sampler.config.max_prompt}"
            )
        if options.max_tokens > sampler.config.max_tokens:
            raise ValueError(
                f"request {ticket}: max_tokens = {options.max_tokens} is over the cap of "
                f"{sampler.config.max_tokens}"
            )
        if options.dropout and not sampler.has_dropout:
            raise ValueError(
                f"request {ticket}: dropout = {options.dropout}: needs a sampler with has_dropout"
            )
        if options.stop_strings and sampler.stream is None:
            raise ValueError(f"request {ticket}: stop strings need a sampler with a tokenizer")
        self._scheduler.submit(ticket, request)
        self.counts.prompt_tokens += len(request.prompt)
        make_stream = sampler.stream if options.stop_strings and sampler.stream else lambda: None
        answers = [Answer(stream=make_stream()) for _ in range(request.group)]
        self._progress[ticket] = PendingAnswers(answers)
        self._tickets += 1
        return ticket

    def progress(self, ticket: int) -> PendingAnswers:
        """Return the progress of an unfinished request, an object that stays up to date."""
        return self._progress[ticket]

    def cancel(self, ticket: int) -> None:
        """Remove a request without a result; do nothing if it is finished.

        The next `advance` frees its slots and pages. A prompt that is being read is read to its
        end.
        """
        if self._progress.pop(ticket, None) is not None:
            self._scheduler.cancel(ticket)

    @property
    def unfinished(self) -> bool:
        """Whether a request is unfinished, or a canceled one still holds pages."""
        return self._scheduler.unfinished

    @property
    def queued(self) -> int:
        """Number of requests that are not admitted yet."""
        return len(self._scheduler.queue)

    @property
    def pages(self) -> tuple[int, int]:
        """Number of pages in use by unfinished requests, and number of pages."""
        pools = [shard.pool for shard in self._scheduler.shards]
        return sum(p.size - p.available for p in pools), sum(p.size for p in pools)

    def sample(
        self, prompts: Sequence[Sequence[int]], group: int, key: jax.Array, options: Options
    ) -> list[list[Sample] | None]:
        """Sample as Sampler.sample does. No other request may be unanswered."""
        keys = request_keys(key, len(prompts))
        requests = []
        for index, prompt in enumerate(prompts):
            try:
                requests.append(SampleRequest(prompt, group, keys[index], options))
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from error
        tickets, refused = {}, []
        for index, request in enumerate(requests):
            if self._sampler.prompt_fits(request.prompt):
                tickets[self.submit(request)] = index
            else:
                refused.append(len(request.prompt))
        if refused:
            cap = self._sampler.config.max_prompt
            log.warning("prompts of %s tokens are over the cap of %d: not answered", refused, cap)
        answers: list[list[Sample] | None] = [None] * len(prompts)
        for ticket, samples in self.results():
            answers[tickets[ticket]] = samples
        return answers

    def results(self) -> Iterator[tuple[int, list[Sample]]]:
        """Yield (ticket, answers) as requests finish. The caller may submit more meanwhile."""
        while self.unfinished:
            yield from self.advance()

    def advance(self) -> list[tuple[int, list[Sample]]]:
        """Collect tokens and dispatch the next calls; return the finished (ticket, answers)."""
        finished = [pair for call in self._running for pair in self._collect(call)]
        self._running = []
        self._scheduler.dispatch(self._prefill, self._decode)
        # After the dispatch, so that the device does not wait for it.
        return [
            (ticket, [answer.to_sample(experts) for answer in self._progress.pop(ticket).answers])
            for ticket, experts in finished
        ]

    # --------------------------------------------------------------------------- Dispatch to device

    def _prefill(self, tasks: Tasks) -> None:
        batch = batching.prompt_pages(self._scheduler, tasks, self._sampler.config.max_prompt)
        self.counts.prefill_calls += 1
        self.counts.prefill_pages += sum(map(len, tasks))
        self.counts.prefilled_tokens += int(batch.length.sum())
        lengths = batch.length.reshape(len(tasks), -1).tolist()
        for shard, shard_tasks in enumerate(tasks):
            for row, (admitted, _) in enumerate(shard_tasks):
                self._processed[admitted.request.agent] += lengths[shard][row]
                if progress := self._progress.get(admitted.ticket):
                    progress.reused_tokens = admitted.reused_tokens
        self._state, experts = self._call(meshes.RULES, self._sampler.prefill, batch)
        if experts is not None:
            self._prompt_experts.add(experts, tasks)

    def _decode(self, lane: int) -> None:
        scheduler, sampler = self._scheduler, self._sampler
        shards, c = scheduler.shards, sampler.config
        limits = [shard.allocate_pages(shard.lanes[lane], c.decode_tokens) for shard in shards]
        active = sum(sequence.count < cap for shard in limits for sequence, cap in shard.items())
        has_queued = scheduler.has_queued(lane)
        most_idle = most_idle_passes(active) if has_queued else NO_LIMIT
        slots = batching.slots(scheduler, lane, limits, most_idle, c, sampler.has_dropout)
        self._state, joined = self._call(meshes.DECODE_RULES, sampler.decode, slots, lane=lane)
        cells = np.count_nonzero(slots.prompt_visible[:, 0]) * slots.prompt_visible.shape[1]
        empty = cells - sum(map(len, limits))
        self._running.append(_DecodeCall(lane, limits, has_queued, cells, empty, joined))

    def _call(self, rules: meshes.Rules, function: Callable[..., Any], batch: Any, **static) -> Any:
        placed = batching.place(self._sampler.mesh, batch)
        with jax.set_mesh(self._sampler.mesh), nn.logical_axis_rules(rules):
            return function(self._params, self._state, placed, **static)

    # -------------------------------------------------------------------------- Collect from device

    def _collect(self, call: _DecodeCall) -> list[tuple[int, np.ndarray | None]]:
        """Collect a call's result; return (ticket, prompt's experts) of the finished requests."""
        clock = time.monotonic()
        tokens, scheduler = SlotTokens(call.joined), self._scheduler
        wait_seconds = time.monotonic() - clock
        finished = []
        for number, limits in enumerate(call.limits):
            shard = scheduler.shards[number]
            for sequence in limits:
                slot = number * scheduler.shape.slots + sequence.slot
                self._processed[sequence.admitted.request.agent] += tokens.new[slot]
                is_complete = self._push(sequence, tokens, slot)
                if is_complete and shard.finish(shard.lanes[call.lane], sequence):
                    experts = self._prompt_experts.take(number, sequence.admitted)
                    finished.append((sequence.admitted.ticket, experts))
        self.counts.add_decode(tokens, call.cells, call.empty, call.has_queued)
        self.counts.add_wait(wait_seconds, self._processed)
        self._processed.clear()
        return finished

    def _push(self, sequence: DecodeSequence, tokens: SlotTokens, slot: int) -> bool:
        """Append a slot's sampled tokens to its answer; return whether the answer is complete."""
        ticket, options = sequence.admitted.ticket, sequence.admitted.request.options
        if not tokens.finite[slot]:
            raise NonFiniteError(ticket)
        progress = self._progress.get(ticket)
        if progress is None:  # canceled; the scheduler drops its sequences before the next call
            return False
        answer = progress.answers[sequence.number]
        answer.extend(tokens, slot, options)
        sequence.count += tokens.new[slot]
        return answer.stopped or sequence.count == options.max_tokens
