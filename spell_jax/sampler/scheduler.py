"""Scheduler: assigns requests to shards and their sequences to decode slots, between device calls.

1. A request is admitted to the shard with room that must read the fewest of its tokens (shard.py).
2. Once a prompt is prefilled, its sequences take free slots in the order of admission.
3. A canceled request leaves the queue or its slots before the next calls are planned. A prompt that
   is being read leaves once it is read.
4. The plan depends only on requests and sampled tokens, never on the clock, so all hosts of a run
   plan alike. Nothing here touches a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from spell_jax.sampler.page_pool import block_digests
from spell_jax.sampler.requests import SampleRequest
from spell_jax.sampler.shard import Shard, ShardShape, Tasks


class Scheduler:
    """Queue of requests, and the shards that they are admitted to."""

    def __init__(self, shape: ShardShape, shards: int):
        self.shape = shape
        self.shards = [Shard(shape) for _ in range(shards)]
        # Tickets, requests, the tokens of their prompts, and the digests of their whole blocks.
        self.queue: deque[tuple[int, SampleRequest, np.ndarray, list[bytes]]] = deque()
        self._queued = [0] * len(shape.lanes)  # requests in the queue for each lane
        self._canceled: dict[int, None] = {}  # tickets of admitted requests, in order

    def submit(self, ticket: int, request: SampleRequest) -> None:
        """Queue a request; ValueError if it does not fit into the pool even alone."""
        if not self.shape.fits(request):
            prompt, longest = len(request.prompt), request.options.max_tokens
            raise ValueError(
                f"request {ticket}: a prompt of {prompt} tokens and answers of up to {longest} do "
                f"not fit into {self.shape.pages} pages of {self.shape.page_size} tokens"
            )
        tokens, size = np.asarray(request.prompt, np.int32), self.shape.page_size
        blocks_end = len(tokens) // size * size
        blocks = (tokens[i : i + size].tobytes() for i in range(0, blocks_end, size))
        self.queue.append((ticket, request, tokens, block_digests(blocks)))
        self._queued[self.shape.lane_of(request.group)] += 1

    def cancel(self, ticket: int) -> None:
        """Remove an unfinished request, at the latest when its prompt is read."""
        for entry in self.queue:
            if entry[0] == ticket:
                self.queue.remove(entry)
                self._queued[self.shape.lane_of(entry[1].group)] -= 1
                return
        self._canceled[ticket] = None

    def _drop_canceled(self) -> None:
        for ticket in list(self._canceled):
            if any(shard.drop(ticket) for shard in self.shards):
                del self._canceled[ticket]

    @property
    def unfinished(self) -> bool:
        return bool(self.queue) or any(shard.unfinished for shard in self.shards)

    def plan_prefill(self) -> Tasks | None:
        """Plan the prefill tasks of each shard; None if no free slot needs one."""
        while self._admit(lambda shard, lane: shard.lanes[lane].has_free_slots):
            pass
        if not any(shard.needs_prefill for shard in self.shards):
            return None
        # Rows of the call that would be padding read the next prompts.
        while self._admit(lambda shard, _: len(shard.tasks) < self.shape.tasks):
            pass
        return [shard.take_tasks() for shard in self.shards]

    def _admit(self, wants) -> bool:
        """Admit the first queued request to the cheapest willing shard; return whether admitted."""
        if not self.queue:
            return False
        ticket, request, tokens, digests = self.queue[0]
        lane = self.shape.lane_of(request.group)
        wanting = [shard for shard in self.shards if wants(shard, lane)]
        for shard in sorted(wanting, key=lambda shard: shard.cost(digests, request)):
            if shard.admit(ticket, request, tokens, digests):
                self.queue.popleft()
                self._queued[lane] -= 1
                return True
        return False

    def dispatch(self, prefill: Callable[[Tasks], None], decode: Callable[[int], None]) -> None:
        """Call `prefill` with the tasks of each call, then `decode` with each lane in use."""
        # No decode call is in flight here, so nothing samples into the pages that are freed.
        self._drop_canceled()
        # Prefill first: an idle slot costs a decode pass as much as a busy one.
        while (tasks := self.plan_prefill()) is not None:
            prefill(tasks)
            self.fill_slots()
        self.fill_slots()
        for lane in range(len(self.shape.lanes)):
            if any(shard.lanes[lane].running for shard in self.shards):
                decode(lane)

    def fill_slots(self) -> None:
        """Give free slots to prefilled sequences, after each prefill call and before decoding."""
        for shard in self.shards:
            shard.release_passed()
        self._drop_canceled()
        for shard in self.shards:
            for lane in shard.lanes:
                lane.fill_slots()

    def has_queued(self, lane: int) -> bool:
        """Return whether a request or sequence is queued for a slot of this lane."""
        return self._queued[lane] > 0 or any(shard.lanes[lane].queued for shard in self.shards)
