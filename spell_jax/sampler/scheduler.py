"""Who gets which pages and slots, and when: the sampler's plan between two calls of the device.

1. Requests wait in a queue. One is admitted where pages and slots are to be had: it shares the
   pages of its first blocks as far as they are known, and its other pages become tasks for prefill.
2. Once its prompt is read, its sequences take free slots, in the order in which they were admitted.
   A sequence's own tokens get pages as it grows.
3. Whoever was admitted first can always go on: others get pages only while the first has enough
   left for the longest answer that was asked for. A sequence without a page waits in its slot; when
   the first ends, all that it had is there for the next. So nothing has to be thrown away.
4. Everything follows from requests and from what was sampled, never from the clock: hosts of one
   run plan alike. Nothing here touches a device.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from spell_jax.sampler.page_pool import Pool
from spell_jax.sampler.requests import Request


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one part of the mesh's row axes, all of them fixed.

    Attributes:
      page_size: C, tokens of a page.
      pages: of the pool.
      slots: sequences that are decoded at once, of a lane.
      prompts: prompts that are prefilled at once.
      lanes: (cells G of a row, rows M) of each compiled decode shape, ascending; a request goes to
        the first that has a cell for each of its sequences, or else to the last.
      tasks: pages of a prefill call.
    """

    page_size: int
    pages: int
    slots: int
    prompts: int
    lanes: tuple[tuple[int, int], ...]
    tasks: int

    def pages_of(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.page_size)

    def lane_of(self, group: int) -> int:
        """Number of the lane for requests with so many sequences."""
        fitting = (i for i, (cells, _) in enumerate(self.lanes) if group <= cells)
        return next(fitting, len(self.lanes) - 1)

    def fits(self, request: Request) -> bool:
        """Whether it could ever be answered: alone in the pool."""
        longest = self.pages_of(request.options.max_tokens)
        return self.pages_of(len(request.prompt)) + longest <= self.pages


@dataclasses.dataclass(eq=False)
class PrefilledPrompt:
    """A prompt that is, or will be, in the pool.

    Attributes:
      ticket: number of the request.
      request: itself.
      tokens: int32 [P], its prompt.
      index: its place among prefilled prompts.
      pages: of its blocks in order.
      unread: pages that are still to be read.
      unfinished: sequences.
    """

    ticket: int
    request: Request
    tokens: np.ndarray
    index: int
    pages: list[int]
    unread: int
    unfinished: int


@dataclasses.dataclass(eq=False)
class DecodeSequence:
    """One answer that is being sampled.

    Attributes:
      prefilled: its prompt.
      number: among sequences.
      slot: its place in its lane, -1 while it waits.
      pages: of its own tokens.
      count: tokens sampled so far.
      fresh: its first call is yet to come.
    """

    prefilled: PrefilledPrompt
    number: int
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    count: int = 0
    fresh: bool = True

    @property
    def max_tokens(self) -> int:
        return self.prefilled.request.options.max_tokens


class Lane:
    """Slots of one compiled decode shape, and the sequences that wait for them."""

    def __init__(self, cells: int, rows: int, slots: int):
        self.cells, self.rows = cells, rows
        self.slots: list[DecodeSequence | None] = [None] * slots
        self.waiting: deque[DecodeSequence] = deque()
        self._seated: Counter[PrefilledPrompt] = Counter()

    @property
    def free(self) -> int:
        return self.slots.count(None)

    @property
    def has_free_slots(self) -> bool:
        """Whether slots will stay free when all who wait are seated."""
        return self.free > len(self.waiting)

    def groups(self) -> list[tuple[PrefilledPrompt, list[int]]]:
        """The decode rows: slots of sequences of one prompt, at most `cells` each."""
        by_prompt: dict[PrefilledPrompt, list[int]] = {}
        for slot, sequence in enumerate(self.slots):
            if sequence is not None:
                by_prompt.setdefault(sequence.prefilled, []).append(slot)
        return [
            (prefilled, slots[i : i + self.cells])
            for prefilled, slots in by_prompt.items()
            for i in range(0, len(slots), self.cells)
        ]

    def seat(self) -> None:
        """Gives free slots to those who wait, in their order, until one cannot have one."""
        for slot, taken in enumerate(self.slots):
            if taken is not None:
                continue
            if not self.waiting or self.waiting[0].prefilled.unread:
                return
            prefilled = self.waiting[0].prefilled
            opens_row = self._seated[prefilled] % self.cells == 0
            if opens_row and self._rows() == self.rows:
                return
            sequence = self.slots[slot] = self.waiting.popleft()
            sequence.slot = slot
            self._seated[prefilled] += 1

    def leave(self, sequence: DecodeSequence) -> None:
        self.slots[sequence.slot] = None
        self._seated[sequence.prefilled] -= 1
        if not self._seated[sequence.prefilled]:
            del self._seated[sequence.prefilled]

    def _rows(self) -> int:
        return sum(-(-count // self.cells) for count in self._seated.values())


class Shard:
    """The pool, the lanes and the prefill tasks of one part of the mesh's row axes."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.pool = Pool(shape.pages)
        self.lanes = [Lane(cells, rows, shape.slots) for cells, rows in shape.lanes]
        self.tasks: deque[tuple[PrefilledPrompt, int]] = deque()
        self.unfinished: dict[DecodeSequence, None] = {}  # in the order of admission
        self.reused_tokens = 0
        self._indices = list(range(shape.prompts - 1, -1, -1))
        self._needs: Counter[int] = Counter()  # pages of the longest answer -> sequences

    def cost(self, blocks: Sequence[bytes], request: Request) -> int:
        """What admitting a request here would cost, to compare shards: pages and sequences before
        it."""
        known = len(self._shared(blocks, request))
        return self.shape.pages_of(len(request.prompt)) - known + len(self.unfinished)

    def admit(self, ticket: int, request: Request, blocks: Sequence[bytes]) -> bool:
        """Makes the request's prompt prefilled if there is room, and lets its sequences wait."""
        shape, prompt = self.shape, request.prompt
        shared, total = self._shared(blocks, request), shape.pages_of(len(prompt))
        longest = shape.pages_of(request.options.max_tokens)
        wanted = total - len(shared) + self.pool.idle(shared)
        if not self._indices or wanted > self._spare(longest):
            return False
        self.pool.hold(shared)
        self.reused_tokens += len(shared) * shape.page_size
        pages = shared + [self.pool.take() for _ in range(total - len(shared))]
        for number in range(len(shared), len(blocks)):
            parent = pages[number - 1] if number else None
            self.pool.name(pages[number], parent, blocks[number])
        unread = total - len(shared)
        index = self._indices.pop()
        tokens = np.asarray(prompt, np.int32)
        prefilled = PrefilledPrompt(ticket, request, tokens, index, pages, unread, request.group)
        self.tasks.extend((prefilled, number) for number in range(len(shared), total))
        sequences = [DecodeSequence(prefilled, number) for number in range(request.group)]
        self.lanes[shape.lane_of(request.group)].waiting.extend(sequences)
        self.unfinished |= dict.fromkeys(sequences)
        self._needs[longest] += request.group
        return True

    def take_tasks(self) -> list[tuple[PrefilledPrompt, int]]:
        """The next pages to read, as many as a call takes."""
        count = min(self.shape.tasks, len(self.tasks))
        tasks = [self.tasks.popleft() for _ in range(count)]
        for prefilled, _ in tasks:
            prefilled.unread -= 1
        return tasks

    @property
    def must_read(self) -> bool:
        """Whether a slot waits for a prompt that is not read."""
        for lane in self.lanes:
            ahead = list(lane.waiting)[: lane.free]
            if any(sequence.prefilled.unread for sequence in ahead):
                return True
        return False

    def grow(self, lane: Lane, steps: int) -> dict[DecodeSequence, int]:
        """Gives seated sequences pages for their next tokens, the first admitted first.

        Returns:
          For each the number of tokens at which it must stop; as many as it has: it has to wait.
        """
        limits = {}
        seated = set(filter(None, lane.slots))
        for position, sequence in enumerate(self.unfinished):
            if sequence not in seated:
                continue
            wanted = self.shape.pages_of(min(sequence.count + steps, sequence.max_tokens))
            while len(sequence.pages) < wanted and (position == 0 or self._spare() > 0):
                sequence.pages.append(self.pool.take())
            limits[sequence] = min(len(sequence.pages) * self.shape.page_size, sequence.max_tokens)
        return limits

    def finish(self, lane: Lane, sequence: DecodeSequence) -> bool:
        """Takes back what a sequence had; whether it was the last of its request."""
        lane.leave(sequence)
        self.pool.release(sequence.pages)
        del self.unfinished[sequence]
        longest = self.shape.pages_of(sequence.max_tokens)
        self._needs[longest] -= 1
        if not self._needs[longest]:
            del self._needs[longest]
        prefilled = sequence.prefilled
        prefilled.unfinished -= 1
        if prefilled.unfinished:
            return False
        self.pool.release(prefilled.pages)
        self._indices.append(prefilled.index)
        return True

    def _shared(self, blocks: Sequence[bytes], request: Request) -> list[int]:
        """Known pages of its beginning. The last token is always read: its hidden state is what the
        answers begin from."""
        return self.pool.find(blocks[: (len(request.prompt) - 1) // self.shape.page_size])

    def _spare(self, longest: int = 0) -> int:
        """Pages that others than the first admitted sequence may take: it, and the next when it has
        ended, have enough for the longest answer (`longest`: of one that comes in too)."""
        first = next(iter(self.unfinished), None)
        held = len(first.pages) if first else 0
        return self.pool.available - max(longest, *self._needs, 0) + held


class Scheduler:
    """The queue of requests, and the shards that they are admitted to."""

    def __init__(self, shape: Shape, shards: int):
        self.shape = shape
        self.shards = [Shard(shape) for _ in range(shards)]
        self.queue: deque[tuple[int, Request, list[bytes]]] = deque()

    def submit(self, ticket: int, request: Request) -> None:
        """Puts a request at the end of the queue.

        Raises:
          ValueError: it could never be answered.
        """
        if not self.shape.fits(request):
            prompt, longest = len(request.prompt), request.options.max_tokens
            raise ValueError(
                f"request {ticket}: a prompt of {prompt} tokens and answers of up to {longest} do "
                f"not fit into {self.shape.pages} pages of {self.shape.page_size} tokens"
            )
        tokens, size = np.asarray(request.prompt, np.int32), self.shape.page_size
        whole = len(tokens) // size * size
        blocks = [tokens[i : i + size].tobytes() for i in range(0, whole, size)]
        self.queue.append((ticket, request, blocks))

    @property
    def unfinished(self) -> bool:
        return bool(self.queue) or any(shard.unfinished for shard in self.shards)

    def plan_prefill(self) -> list[list[tuple[PrefilledPrompt, int]]] | None:
        """Pages to read now, of each shard; None when no free slot waits for any."""
        while self._admit(lambda shard, lane: shard.lanes[lane].has_free_slots):
            pass
        if not any(shard.must_read for shard in self.shards):
            return None
        # What would be empty rows of the call takes the next prompts.
        while self._admit(lambda shard, _: len(shard.tasks) < self.shape.tasks):
            pass
        return [shard.take_tasks() for shard in self.shards]

    def _admit(self, wants) -> bool:
        """Admits the first of the queue to the shard that wants it at the least cost."""
        if not self.queue:
            return False
        ticket, request, blocks = self.queue[0]
        lane = self.shape.lane_of(request.group)
        wanting = [shard for shard in self.shards if wants(shard, lane)]
        for shard in sorted(wanting, key=lambda shard: shard.cost(blocks, request)):
            if shard.admit(ticket, request, blocks):
                self.queue.popleft()
                return True
        return False

    def seat(self) -> None:
        """Fills free slots."""
        for shard in self.shards:
            for lane in shard.lanes:
                lane.seat()

    def waiting(self, lane: int) -> bool:
        """Whether anybody waits for a slot of this lane."""
        queued = any(self.shape.lane_of(r.group) == lane for _, r, _ in self.queue)
        return queued or any(shard.lanes[lane].waiting for shard in self.shards)
