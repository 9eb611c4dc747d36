"""Who gets which pages and slots, and when: the sampler's plan between two calls of the device.

1. Requests wait in a queue. One is admitted where pages and slots are to be had: it shares the
   pages of its first blocks as far as they are known, and its other pages become tasks for prefill.
2. Once its prompt is read, its siblings take free slots, in the order in which they were admitted.
   A sibling's own tokens get pages as it grows.
3. Whoever was admitted first can always go on: others get pages only while the first has enough
   left for the longest answer that was asked for. A sibling without a page waits in its slot; when
   the first ends, all that it had is there for the next. So nothing has to be thrown away.
4. Everything follows from requests and from what was drawn, never from the clock: hosts of one run
   plan alike. Nothing here touches a device.
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
      block: C, tokens of a page.
      pages: of the pool.
      slots: siblings that are decoded at once, of a lane.
      prompts: prompts that are resident at once.
      lanes: (cells G of a row, rows M) of each compiled decode shape, ascending; a request goes to
        the first that has a cell for each of its siblings, or else to the last.
      tasks: pages of a prefill call.
    """

    block: int
    pages: int
    slots: int
    prompts: int
    lanes: tuple[tuple[int, int], ...]
    tasks: int

    def pages_of(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.block)

    def lane_of(self, group: int) -> int:
        """Number of the lane for requests with so many siblings."""
        fitting = (i for i, (cells, _) in enumerate(self.lanes) if group <= cells)
        return next(fitting, len(self.lanes) - 1)

    def fits(self, request: Request) -> bool:
        """Whether it could ever be answered: alone in the pool."""
        longest = self.pages_of(request.options.max_tokens)
        return self.pages_of(len(request.prompt)) + longest <= self.pages


@dataclasses.dataclass(eq=False)
class Resident:
    """A prompt that is, or will be, in the pool.

    Attributes:
      ticket: number of the request.
      request: itself.
      tokens: int32 [P], its prompt.
      index: its place among resident prompts.
      pages: of its blocks in order.
      unread: pages that are still to be read.
      unfinished: siblings.
    """

    ticket: int
    request: Request
    tokens: np.ndarray
    index: int
    pages: list[int]
    unread: int
    unfinished: int


@dataclasses.dataclass(eq=False)
class Sibling:
    """One answer that is being drawn.

    Attributes:
      resident: its prompt.
      number: among siblings.
      slot: its place in its lane, -1 while it waits.
      pages: of its own tokens.
      count: tokens drawn so far.
      fresh: its first call is yet to come.
    """

    resident: Resident
    number: int
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    count: int = 0
    fresh: bool = True

    @property
    def max_tokens(self) -> int:
        return self.resident.request.options.max_tokens


class Lane:
    """Slots of one compiled decode shape, and the siblings that wait for them."""

    def __init__(self, cells: int, rows: int, slots: int):
        self.cells, self.rows = cells, rows
        self.slots: list[Sibling | None] = [None] * slots
        self.waiting: deque[Sibling] = deque()
        self._seated: Counter[Resident] = Counter()

    @property
    def free(self) -> int:
        return self.slots.count(None)

    @property
    def hungry(self) -> bool:
        """Whether slots will stay free when all who wait are seated."""
        return self.free > len(self.waiting)

    def groups(self) -> list[tuple[Resident, list[int]]]:
        """The decode rows: slots of siblings of one prompt, at most `cells` each."""
        by_prompt: dict[Resident, list[int]] = {}
        for slot, sibling in enumerate(self.slots):
            if sibling is not None:
                by_prompt.setdefault(sibling.resident, []).append(slot)
        return [
            (resident, slots[i : i + self.cells])
            for resident, slots in by_prompt.items()
            for i in range(0, len(slots), self.cells)
        ]

    def seat(self) -> None:
        """Gives free slots to those who wait, in their order, until one cannot have one."""
        for slot, taken in enumerate(self.slots):
            if taken is not None:
                continue
            if not self.waiting or self.waiting[0].resident.unread:
                return
            resident = self.waiting[0].resident
            opens_row = self._seated[resident] % self.cells == 0
            if opens_row and self._rows() == self.rows:
                return
            sibling = self.slots[slot] = self.waiting.popleft()
            sibling.slot = slot
            self._seated[resident] += 1

    def leave(self, sibling: Sibling) -> None:
        self.slots[sibling.slot] = None
        self._seated[sibling.resident] -= 1
        if not self._seated[sibling.resident]:
            del self._seated[sibling.resident]

    def _rows(self) -> int:
        return sum(-(-count // self.cells) for count in self._seated.values())


class Shard:
    """The pool, the lanes and the prefill tasks of one part of the mesh's row axes."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.pool = Pool(shape.pages)
        self.lanes = [Lane(cells, rows, shape.slots) for cells, rows in shape.lanes]
        self.tasks: deque[tuple[Resident, int]] = deque()
        self.unfinished: dict[Sibling, None] = {}  # in the order of admission
        self.reused_tokens = 0
        self._indices = list(range(shape.prompts - 1, -1, -1))
        self._needs: Counter[int] = Counter()  # pages of the longest answer -> siblings

    def cost(self, blocks: Sequence[bytes], request: Request) -> int:
        """What admitting a request here would cost, to compare shards: pages and siblings before
        it."""
        known = len(self._shared(blocks, request))
        return self.shape.pages_of(len(request.prompt)) - known + len(self.unfinished)

    def admit(self, ticket: int, request: Request, blocks: Sequence[bytes]) -> bool:
        """Makes the request's prompt resident if there is room, and lets its siblings wait."""
        shape, prompt = self.shape, request.prompt
        shared, total = self._shared(blocks, request), shape.pages_of(len(prompt))
        longest = shape.pages_of(request.options.max_tokens)
        wanted = total - len(shared) + self.pool.idle(shared)
        if not self._indices or wanted > self._spare(longest):
            return False
        self.pool.hold(shared)
        self.reused_tokens += len(shared) * shape.block
        pages = shared + [self.pool.take() for _ in range(total - len(shared))]
        for number in range(len(shared), len(blocks)):
            parent = pages[number - 1] if number else None
            self.pool.name(pages[number], parent, blocks[number])
        unread = total - len(shared)
        index = self._indices.pop()
        tokens = np.asarray(prompt, np.int32)
        resident = Resident(ticket, request, tokens, index, pages, unread, request.group)
        self.tasks.extend((resident, number) for number in range(len(shared), total))
        siblings = [Sibling(resident, number) for number in range(request.group)]
        self.lanes[shape.lane_of(request.group)].waiting.extend(siblings)
        self.unfinished |= dict.fromkeys(siblings)
        self._needs[longest] += request.group
        return True

    def take_tasks(self) -> list[tuple[Resident, int]]:
        """The next pages to read, as many as a call takes."""
        count = min(self.shape.tasks, len(self.tasks))
        tasks = [self.tasks.popleft() for _ in range(count)]
        for resident, _ in tasks:
            resident.unread -= 1
        return tasks

    @property
    def must_read(self) -> bool:
        """Whether a slot waits for a prompt that is not read."""
        for lane in self.lanes:
            ahead = list(lane.waiting)[: lane.free]
            if any(sibling.resident.unread for sibling in ahead):
                return True
        return False

    def grow(self, lane: Lane, steps: int) -> dict[Sibling, int]:
        """Gives seated siblings pages for their next tokens, the first admitted first.

        Returns:
          For each the number of tokens at which it must stop; as many as it has: it has to wait.
        """
        limits = {}
        seated = set(filter(None, lane.slots))
        for position, sibling in enumerate(self.unfinished):
            if sibling not in seated:
                continue
            wanted = self.shape.pages_of(min(sibling.count + steps, sibling.max_tokens))
            while len(sibling.pages) < wanted and (position == 0 or self._spare() > 0):
                sibling.pages.append(self.pool.take())
            limits[sibling] = min(len(sibling.pages) * self.shape.block, sibling.max_tokens)
        return limits

    def finish(self, lane: Lane, sibling: Sibling) -> bool:
        """Takes back what a sibling had; whether it was the last of its request."""
        lane.leave(sibling)
        self.pool.release(sibling.pages)
        del self.unfinished[sibling]
        longest = self.shape.pages_of(sibling.max_tokens)
        self._needs[longest] -= 1
        if not self._needs[longest]:
            del self._needs[longest]
        resident = sibling.resident
        resident.unfinished -= 1
        if resident.unfinished:
            return False
        self.pool.release(resident.pages)
        self._indices.append(resident.index)
        return True

    def _shared(self, blocks: Sequence[bytes], request: Request) -> list[int]:
        """Known pages of its beginning. The last token is always read: its hidden state is what the
        answers begin from."""
        return self.pool.find(blocks[: (len(request.prompt) - 1) // self.shape.block])

    def _spare(self, longest: int = 0) -> int:
        """Pages that others than the first admitted sibling may take: it, and the next when it has
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
                f"not fit into {self.shape.pages} pages of {self.shape.block} tokens"
            )
        tokens, block = np.asarray(request.prompt, np.int32), self.shape.block
        whole = len(tokens) // block * block
        blocks = [tokens[i : i + block].tobytes() for i in range(0, whole, block)]
        self.queue.append((ticket, request, blocks))

    @property
    def unfinished(self) -> bool:
        return bool(self.queue) or any(shard.unfinished for shard in self.shards)

    def plan_prefill(self) -> list[list[tuple[Resident, int]]] | None:
        """Pages to read now, of each shard; None when no free slot waits for any."""
        while self._admit(lambda shard, lane: shard.lanes[lane].hungry):
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
