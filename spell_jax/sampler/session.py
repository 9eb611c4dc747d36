"""Session: serves sampling requests with fixed weights while the host does other work.

1. Each `advance` collects the results of the running decode calls, plans (scheduler.py), and
   dispatches the next calls to the device.
2. `advance` returns while the device works. The host can process finished answers and submit more
   requests, which join at the next `advance`.
3. The order of results depends only on the sampled tokens, never on the clock.
4. Stop strings are searched for here, in the decoded text. Tokens sampled after a stop string are
   dropped.
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

from spell_jax.policy import transformer
from spell_jax.policy.tokenizer_base import Stream
from spell_jax.runtime import mesh as meshes
from spell_jax.sampler import batching, programs
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.keys import request_keys
from spell_jax.sampler.requests import Options, Sample, SampleRequest
from spell_jax.sampler.scheduler import DecodeSequence, Scheduler, Shape

log = logging.getLogger(__name__)

# While requests are queued, a decode call returns as soon as 1 in 16 of its active slots is free.
# Few slots are then idle, and refills are planned in batches instead of one at a time.
_REFILLED = 16


@dataclasses.dataclass
class Counts:
    """Counters of a session.

    Attributes:
      prompt_tokens: prompt tokens of all submitted requests.
      prefill_calls: calls of the prefill program.
      prefill_pages: pages read by these calls.
      decode_calls: calls of the decode program.
      decode_steps: passes of the decode loop, over all calls.
      tokens: sampled tokens.
      slot_steps: slots times decode passes.
      busy: slot steps that sampled at least one token (more than one with speculation).
      starved_slot_steps: slot steps that sampled nothing while a request was queued.
      group_slot_steps: cells times passes, over the decode rows in use.
      padded_group_slots: those of the above whose cell had no sequence.
      prefilled_tokens: prompt tokens that were read, not taken from a shared prefix.
      waited: seconds per agent in which the host was blocked by the device. A decode call serves
        many agents, so its wait is divided in proportion to their sampled tokens and to their
        prompt tokens prefilled since the previous wait.
    """

    prompt_tokens: int = 0
    prefill_calls: int = 0
    prefill_pages: int = 0
    decode_calls: int = 0
    decode_steps: int = 0
    tokens: int = 0
    slot_steps: int = 0
    busy: int = 0
    starved_slot_steps: int = 0
    group_slot_steps: int = 0
    padded_group_slots: int = 0
    prefilled_tokens: int = 0
    waited: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Answer:
    """An answer under construction.

    Attributes:
      tokens: token ids so far.
      logprobs: logprob of each token.
      text: decoded text so far, searched for stop strings.
      stream: incremental decoder that produces the text; None if there are no stop strings.
      stop_string: stop string that was found, or "".
      stopped: whether the answer ended by a stop token or stop string.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    stream: Stream | None = None
    stop_string: str = ""
    stopped: bool = False

    def push(self, token: int, logprob: float, strings: Sequence[str]) -> None:
        """Appends one token; sets `stopped` if it completes a stop string."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.stream is not None:
            begin = max(0, len(self.text) - max(map(len, strings)) + 1)
            self.text += self.stream.push(token)
            found = [s for s in strings if s in self.text[begin:]]
            if found:
                self.stop_string = min(found, key=self.text[begin:].index)
                self.stopped = True

    def sample(self) -> Sample:
        logprobs = np.array(self.logprobs, np.float32)
        return Sample(np.array(self.tokens, np.int32), logprobs, self.stopped, self.stop_string)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A decode call in flight.

    Attributes:
      lane: index of the lane that it samples for.
      limits: for each shard, its sequences and the token count at which each must stop.
      waited: whether a request was queued for a slot of this lane.
      cells: number of cells of the decode rows in use.
      empty: number of these cells without a sequence.
      sampled: result on the device.
    """

    lane: int
    limits: batching.Limits
    waited: bool
    cells: int
    empty: int
    sampled: programs.Sampled


class CompiledSampler(Protocol):
    """The part of engine.Sampler that a session uses.

    Attributes:
      config: sampling parameters and sizes.
      mesh: device mesh.
      shape: sizes of one shard of the mesh's row axes.
      shards: number of these shards.
      stream: constructor of a tokenizer's incremental decoder; None without a tokenizer.
      prefill: jitted programs.prefill.
      decode: jitted programs.decode.
      empty: jitted constructor of the initial state; takes the compute dtype.
    """

    config: SamplerConfig
    mesh: jax.sharding.Mesh
    shape: Shape
    shards: int
    stream: Callable[[], Stream] | None
    prefill: jax.stages.Wrapped
    decode: jax.stages.Wrapped
    empty: jax.stages.Wrapped

    def fits(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt is within the cap `max_prompt`."""
        ...


class Session:
    """Requests that are served with the same weights."""

    def __init__(self, sampler: CompiledSampler, params: transformer.Params):
        self.counts = Counts()
        self._sampler = sampler
        self._params = params
        with jax.set_mesh(sampler.mesh):
            self._state = sampler.empty(params["final_norm"]["scale"].dtype)
        self._scheduler = Scheduler(sampler.shape, sampler.shards)
        self._answers: dict[int, list[_Answer]] = {}
        self._running: list[_Call] = []
        self._worked: Counter[str] = Counter()  # tokens per agent since the last wait
        self._tickets = 0

    @property
    def reused_tokens(self) -> int:
        """Number of prompt tokens taken from a shared prefix instead of being read again."""
        return sum(shard.reused_tokens for shard in self._scheduler.shards)

    def submit(self, request: SampleRequest) -> int:
        """Queues a request and returns its ticket, a number from 0.

        Raises:
          ValueError: if the prompt or `max_tokens` is above its cap, if the request can never fit
            into the pool, or if it has stop strings and the sampler has no tokenizer.
        """
        sampler, ticket, options = self._sampler, self._tickets, request.options
        if not sampler.fits(request.prompt):
            raise ValueError(
                f"request {ticket}: a prompt of {len(request.prompt)} tokens is over the cap of "
                f"{sampler.config.max_prompt}"
            )
        if options.max_tokens > sampler.config.longest_answer:
            raise ValueError(
                f"request {ticket}: max_tokens = {options.max_tokens} is over the cap of "
                f"{sampler.config.longest_answer}"
            )
        if options.stop_strings and sampler.stream is None:
            raise ValueError(f"request {ticket}: stop strings need a sampler with a tokenizer")
        self._scheduler.submit(ticket, request)
        self.counts.prompt_tokens += len(request.prompt)
        stream = sampler.stream if options.stop_strings else None
        self._answers[ticket] = [
            _Answer(stream=stream() if stream else None) for _ in range(request.group)
        ]
        self._tickets += 1
        return ticket

    def sample(
        self, prompts: Sequence[Sequence[int]], group: int, key: jax.Array, options: Options
    ) -> list[list[Sample] | None]:
        """See Sampler.sample. All other requests must have been answered before."""
        answers: list[list[Sample] | None] = [None] * len(prompts)
        keys = request_keys(key, len(prompts))
        requests = []
        for index, prompt in enumerate(prompts):
            try:
                requests.append(SampleRequest(prompt, group, keys[index], options))
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from error
        fitting = [self._sampler.fits(prompt) for prompt in prompts]
        if refused := [len(p) for p, fits in zip(prompts, fitting, strict=True) if not fits]:
            cap = self._sampler.config.max_prompt
            log.warning("prompts of %s tokens are over the cap of %d: not answered", refused, cap)
        places = {
            self.submit(request): index for index, request in enumerate(requests) if fitting[index]
        }
        for ticket, samples in self.results():
            answers[places[ticket]] = samples
        return answers

    def results(self) -> Iterator[tuple[int, list[Sample]]]:
        """Yields (ticket, answers) as requests finish, until none is left.

        More requests may be submitted meanwhile.
        """
        while self._scheduler.unfinished:
            yield from self.advance()

    def advance(self) -> list[tuple[int, list[Sample]]]:
        """Collects sampled tokens, dispatches the next device calls, and returns while they run.

        Returns:
          (ticket, answers) of the requests that finished.
        """
        finished = [pair for call in self._running for pair in self._collect(call)]
        self._running = []
        self._dispatch()
        return finished

    # --------------------------------------------------------------------------- Dispatch to device

    def _dispatch(self) -> None:
        scheduler = self._scheduler
        while (tasks := scheduler.plan_prefill()) is not None:
            self._prefill(tasks)
            scheduler.seat()
        scheduler.seat()
        for lane in range(len(scheduler.shape.lanes)):
            if any(any(shard.lanes[lane].slots) for shard in scheduler.shards):
                self._decode(lane)

    def _prefill(self, tasks: batching.Tasks) -> None:
        batch = batching.prompt_pages(self._scheduler, tasks, self._sampler.config.max_prompt)
        self.counts.prefill_calls += 1
        self.counts.prefill_pages += sum(map(len, tasks))
        for prefilled, number in (task for some in tasks for task in some):
            start, prompt = number * self._scheduler.shape.page_size, prefilled.request.prompt
            tokens = min(len(prompt) - start, self._scheduler.shape.page_size)
            self.counts.prefilled_tokens += tokens
            self._worked[prefilled.request.agent] += tokens
        self._state = self._call(meshes.RULES, self._sampler.prefill, batch)

    def _decode(self, lane: int) -> None:
        """Dispatches one call of a lane's decode program."""
        scheduler, c = self._scheduler, self._sampler.config
        limits = [shard.grow(shard.lanes[lane], c.decode_tokens) for shard in scheduler.shards]
        going = sum(sequence.count < limit for one in limits for sequence, limit in one.items())
        waited = scheduler.waiting(lane)
        enough = max(1, going // _REFILLED) if waited else going + 1
        slots = batching.slots(scheduler, lane, limits, enough, c)
        self._state, sampled = self._call(
            meshes.DECODE_RULES, self._sampler.decode, slots, lane=lane
        )
        rows = np.sum(np.any(slots.prompt_visible, axis=-1))
        cells = int(rows) * slots.prompt_visible.shape[-1]
        empty = cells - int(np.count_nonzero(slots.prompt_visible))
        self._running.append(_Call(lane, limits, waited, cells, empty, sampled))
        for sequence in (sequence for one in limits for sequence in one):
            sequence.fresh = False

    def _call(self, rules: meshes.Rules, function: Callable[..., Any], batch: Any, **static) -> Any:
        mesh = self._sampler.mesh
        placed = meshes.device_put(batch, batching.shardings(mesh, batch))
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
            return function(self._params, self._state, placed, **static)

    # -------------------------------------------------------------------------- Collect from device

    def _collect(self, call: _Call) -> Iterator[tuple[int, list[Sample]]]:
        """Collects the result of a call; yields (ticket, answers) of requests that it finished."""
        clock = time.monotonic()
        sampled, scheduler = jax.device_get(call.sampled), self._scheduler
        waited = time.monotonic() - clock
        finished = []
        for number, limits in enumerate(call.limits):
            shard = scheduler.shards[number]
            for sequence in limits:
                slot = number * scheduler.shape.slots + sequence.slot
                self._worked[sequence.prefilled.request.agent] += int(sampled.new[slot])
                if self._push(sequence, sampled, slot):
                    ticket = sequence.prefilled.ticket
                    if shard.finish(shard.lanes[call.lane], sequence):
                        finished.append(ticket)
        self._count(call, sampled, waited)
        for ticket in finished:
            yield ticket, [answer.sample() for answer in self._answers.pop(ticket)]

    def _push(self, sequence: DecodeSequence, sampled: programs.Sampled, slot: int) -> bool:
        """Appends a slot's sampled tokens to its answer; returns whether the answer is complete."""
        ticket, options = sequence.prefilled.ticket, sequence.prefilled.request.options
        answer = self._answers[ticket][sequence.number]
        new = int(sampled.new[slot])
        tokens, logprobs = sampled.tokens[slot, :new], sampled.logprobs[slot, :new]
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(f"request {ticket}: the policy's logits are not finite")
        for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
            answer.push(token, logprob, options.stop_strings)
            if answer.stop_string:
                return True
        sequence.count += new
        answer.stopped = bool(sampled.stopped[slot])
        return answer.stopped or sequence.count == options.max_tokens

    def _count(self, call: _Call, sampled: programs.Sampled, waited: float) -> None:
        counts, taken = self.counts, int(sampled.steps)
        slot_steps, tokens = taken * len(sampled.new), int(sampled.new.sum())
        counts.decode_calls += 1
        counts.decode_steps += taken
        counts.tokens += tokens
        counts.slot_steps += slot_steps
        busy = int(sampled.busy.sum())
        counts.busy += busy
        counts.starved_slot_steps += (slot_steps - busy) * call.waited
        counts.group_slot_steps += taken * call.cells
        counts.padded_group_slots += taken * call.empty
        worked = self._worked.total() or 1
        for agent, tokens in self._worked.items():
            before = counts.waited.get(agent, 0.0)
            counts.waited[agent] = before + waited * tokens / worked
        self._worked.clear()
