"""Scheduler: assigns pages and decode slots to requests between device calls.

1. A request is admitted to a shard that has room. It shares the pages of its known prefix, and its
   other pages become prefill tasks.
2. Once a prompt is prefilled, its sequences take free slots in the order of admission.
3. The first admitted sequence can always continue: others receive pages only while enough remain
   for the longest requested answer. A sequence without a page pauses in its slot, so nothing is
   evicted and recomputed.
4. The plan depends only on requests and sampled tokens, never on the clock, so all hosts of a run
   plan alike. Nothing here touches a device.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spell_jax.sampler.page_pool import PagePool
from spell_jax.sampler.requests import SampleRequest


@dataclasses.dataclass(frozen=True)
class ShardShape:
    """Fixed sizes of one shard of the mesh's row axes.

    Attributes:
      page_size: tokens of a page, C.
      pages: pages of the pool.
      slots: decode slots of each lane.
      prompts: maximum number of prompts in the pool at once.
      lanes: (cells G of a row, rows M) of each compiled decode shape, in ascending order. A request
        uses the first lane with a cell for each of its sequences, or else the last.
      tasks: pages of a prefill call.
    """

    page_size: int
    pages: int
    slots: int
    prompts: int
    lanes: tuple[tuple[int, int], ...]
    tasks: int

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def lane_of(self, group: int) -> int:
        """Return the index of the lane for requests with `group` sequences."""
        fitting = (i for i, (cells, _) in enumerate(self.lanes) if group <= cells)
        return next(fitting, len(self.lanes) - 1)

    def fits(self, request: SampleRequest) -> bool:
        """Return whether the request fits into an otherwise empty pool."""
        longest = self.pages_of(request.options.max_tokens)
        return self.pages_of(len(request.prompt)) + longest <= self.pages


@dataclasses.dataclass(eq=False)
class AdmittedPrompt:
    """An admitted prompt. Its pages are in the pool or about to be prefilled."""

    ticket: int  # number of the request
    request: SampleRequest
    tokens: np.ndarray  # token ids of the prompt, int32 [P]
    index: int  # row of the prompt in State.prompt_hidden, within its shard
    pages: list[int]  # pages of its blocks, in order
    unread: int  # number of pages that no prefill call has read yet
    unfinished: int  # number of its sequences that still run or wait


@dataclasses.dataclass(eq=False)
class DecodeSequence:
    """One answer that is being sampled.

    Attributes:
      admitted: prompt of the answer.
      number: index of the sample in its request.
      slot: slot in the lane; -1 while the sequence is queued.
      pages: pages of the answer's own tokens, in order.
      count: number of tokens sampled so far.
      max_tokens: number of tokens at which the answer is cut off.
    """

    admitted: AdmittedPrompt
    number: int
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    count: int = 0
    max_tokens: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.max_tokens = self.admitted.request.options.max_tokens


class Lane:
    """Slots of one compiled decode shape, and the queue of sequences for them."""

    def __init__(self, cells: int, rows: int, slots: int):
        self.cells, self.rows = cells, rows
        self.slots: list[DecodeSequence | None] = [None] * slots
        self.queued: deque[DecodeSequence] = deque()
        self.running: dict[DecodeSequence, None] = {}  # in the order of admission
        self._slot_counts: Counter[AdmittedPrompt] = Counter()
        self._row_count = 0  # decode rows in use

    @property
    def free(self) -> int:
        return self.slots.count(None)

    @property
    def has_free_slots(self) -> bool:
        """Whether slots stay free after all queued sequences have taken one."""
        return self.free > len(self.queued)

    def groups(self) -> list[tuple[AdmittedPrompt, list[int]]]:
        """List decode rows (prompt, slots of its sequences), at most `cells` slots each."""
        by_prompt: dict[AdmittedPrompt, list[int]] = {}
        for slot, sequence in enumerate(self.slots):
            if sequence is not None:
                by_prompt.setdefault(sequence.admitted, []).append(slot)
        return [
            (admitted, slots[i : i + self.cells])
            for admitted, slots in by_prompt.items()
            for i in range(0, len(slots), self.cells)
        ]

    def fill_slots(self) -> None:
        """Assign free slots to queued sequences, until one has no prefilled prompt or no row."""
        # First in, first out: a later sequence must not delay an earlier one for ever.
        free_slots = [slot for slot, sequence in enumerate(self.slots) if sequence is None]
        for slot in free_slots:
            if not self.queued or self.queued[0].admitted.unread:
                return
            admitted = self.queued[0].admitted
            opens_row = self._slot_counts[admitted] % self.cells == 0
            if opens_row and self._row_count == self.rows:
                return
            sequence = self.slots[slot] = self.queued.popleft()
            sequence.slot = slot
            self.running[sequence] = None
            self._slot_counts[admitted] += 1
            self._row_count += opens_row

    def free_slot(self, sequence: DecodeSequence) -> None:
        self.slots[sequence.slot] = None
        del self.running[sequence]
        _decrement(self._slot_counts, sequence.admitted)
        self._row_count -= self._slot_counts[sequence.admitted] % self.cells == 0


Tasks = list[list[tuple[AdmittedPrompt, int]]]  # for each shard its (prompt, page index) pairs


class Shard:
    """Pool, lanes and prefill tasks of one shard of the mesh's row axes."""

    def __init__(self, shape: ShardShape):
        self.shape = shape
        self.pool = PagePool(shape.pages)
        self.lanes = [Lane(cells, rows, shape.slots) for cells, rows in shape.lanes]
        self.tasks: deque[tuple[AdmittedPrompt, int]] = deque()
        self.unfinished: dict[DecodeSequence, None] = {}  # in the order of admission
        self.reused_tokens = 0
        self._indices = list(range(shape.prompts - 1, -1, -1))
        self._needs: Counter[int] = Counter()  # pages of max_tokens -> number of sequences

    def cost(self, blocks: Sequence[bytes], request: SampleRequest) -> int:
        """Count the pages to prefill for a request, plus the shard's unfinished sequences."""
        num_shared = len(self._shared(blocks, request))
        return self.shape.pages_of(len(request.prompt)) - num_shared + len(self.unfinished)

    def admit(
        self, ticket: int, request: SampleRequest, tokens: np.ndarray, blocks: Sequence[bytes]
    ) -> bool:
        """Admit a request if there is room; return whether it was admitted.

        `tokens` are the prompt of the request, `blocks` the whole pages of the prompt.
        """
        shape = self.shape
        shared, total = self._shared(blocks, request), shape.pages_of(len(tokens))
        longest = shape.pages_of(request.options.max_tokens)
        # Shared idle pages count as needed: once they are held, nothing else can take them.
        needed_pages = total - len(shared) + self.pool.idle(shared)
        if not self._indices or needed_pages > self._spare(longest):
            return False
        self.pool.hold(shared)
        self.reused_tokens += len(shared) * shape.page_size
        unread = total - len(shared)
        pages = shared + [self.pool.take() for _ in range(unread)]
        for number in range(len(shared), len(blocks)):
            parent = pages[number - 1] if number else None
            self.pool.name(pages[number], parent, blocks[number])
        index = self._indices.pop()
        admitted = AdmittedPrompt(ticket, request, tokens, index, pages, unread, request.group)
        self.tasks.extend((admitted, number) for number in range(len(shared), total))
        sequences = [DecodeSequence(admitted, number) for number in range(request.group)]
        self.lanes[shape.lane_of(request.group)].queued.extend(sequences)
        self.unfinished |= dict.fromkeys(sequences)
        self._needs[longest] += request.group
        return True

    def take_tasks(self) -> list[tuple[AdmittedPrompt, int]]:
        """Remove and return the next prefill tasks, at most as many as a call holds."""
        count = min(self.shape.tasks, len(self.tasks))
        tasks = [self.tasks.popleft() for _ in range(count)]
        for admitted, _ in tasks:
            admitted.unread -= 1
        return tasks

    @property
    def needs_prefill(self) -> bool:
        """Whether a free slot cannot be filled because its next prompt is not prefilled."""
        return any(
            sequence.admitted.unread
            for lane in self.lanes
            for sequence in itertools.islice(lane.queued, lane.free)
        )

    def allocate_pages(self, lane: Lane, steps: int) -> dict[DecodeSequence, int]:
        """Give running sequences pages for their next `steps` tokens, in order of admission.

        Return the token count at which each sequence must stop. A sequence pauses at its current
        count.
        """
        limits, size, first = {}, self.shape.page_size, next(iter(self.unfinished), None)
        for sequence in lane.running:
            target_count = min(sequence.count + steps, sequence.max_tokens)
            pages = sequence.pages
            while len(pages) * size < target_count and (sequence is first or self._spare() > 0):
                pages.append(self.pool.take())
            limits[sequence] = min(len(pages) * size, sequence.max_tokens)
        return limits

    def finish(self, lane: Lane, sequence: DecodeSequence) -> bool:
        """Free a sequence's slot and pages; return whether it was the last of its request."""
        lane.free_slot(sequence)
        self.pool.release(sequence.pages)
        del self.unfinished[sequence]
        _decrement(self._needs, self.shape.pages_of(sequence.max_tokens))
        admitted = sequence.admitted
        admitted.unfinished -= 1
        if admitted.unfinished:
            return False
        self.pool.release(admitted.pages)
        self._indices.append(admitted.index)
        return True

    def _shared(self, blocks: Sequence[bytes], request: SampleRequest) -> list[int]:
        # Not the last token's page: its hidden state, from which answers start, must be computed.
        return self.pool.find(blocks[: (len(request.prompt) - 1) // self.shape.page_size])

    def _spare(self, longest: int = 0) -> int:
        """Count the pages that sequences other than the first admitted sequence may take.

        `longest` is the maximum answer of a request to be admitted, in pages.
        """
        # The reserve lets the first admitted sequence, and after it the next, grow to the longest
        # requested answer. So no deadlock is possible, and no sampled token is ever discarded.
        first = next(iter(self.unfinished), None)
        held = len(first.pages) if first else 0
        return self.pool.available - max(longest, *self._needs, 0) + held


def _decrement(counts: Counter, key: Any) -> None:
    """Decrement a count, and drop it at zero."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


class Scheduler:
    """Queue of requests, and the shards that they are admitted to."""

    def __init__(self, shape: ShardShape, shards: int):
        self.shape = shape
        self.shards = [Shard(shape) for _ in range(shards)]
        # Tickets, requests, and the tokens of their prompts, whole and in blocks of a page.
        self.queue: deque[tuple[int, SampleRequest, np.ndarray, list[bytes]]] = deque()
        self._queued = [0] * len(shape.lanes)  # requests in the queue for each lane

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
        blocks = [tokens[i : i + size].tobytes() for i in range(0, blocks_end, size)]
        self.queue.append((ticket, request, tokens, blocks))
        self._queued[self.shape.lane_of(request.group)] += 1

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
        ticket, request, tokens, blocks = self.queue[0]
        lane = self.shape.lane_of(request.group)
        wanting = [shard for shard in self.shards if wants(shard, lane)]
        for shard in sorted(wanting, key=lambda shard: shard.cost(blocks, request)):
            if shard.admit(ticket, request, tokens, blocks):
                self.queue.popleft()
                self._queued[lane] -= 1
                return True
        return False

    def dispatch(self, prefill: Callable[[Tasks], None], decode: Callable[[int], None]) -> None:
        """Call `prefill` with the tasks of each call, then `decode` with each lane in use."""
        # Prefill first: an idle slot costs a decode pass as much as a busy one.
        while (tasks := self.plan_prefill()) is not None:
            prefill(tasks)
            self.fill_slots()
        self.fill_slots()
        for lane in range(len(self.shape.lanes)):
            if any(shard.lanes[lane].running for shard in self.shards):
                decode(lane)

    def fill_slots(self) -> None:
        for shard in self.shards:
            for lane in shard.lanes:
                lane.fill_slots()

    def has_queued(self, lane: int) -> bool:
        """Return whether a request or sequence is queued for a slot of this lane."""
        return self._queued[lane] > 0 or any(shard.lanes[lane].queued for shard in self.shards)
