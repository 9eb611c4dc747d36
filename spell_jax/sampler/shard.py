"""Pages, decode slots and sequences of one shard of the mesh's row axes, between device calls.

1. A shard admits a request if it has room. The request shares the pages of its known prefix, and
   its other blocks become prefill tasks.
2. The first admitted sequence can always continue: others receive pages only while enough remain
   for the longest requested answer. A sequence without a page pauses in its slot, so nothing is
   evicted and recomputed.
3. Layers with a window have pages of their own (page_groups.py). A prompt takes them call by call
   and releases those that none of its later tokens can see; so does an answer. Pages are reserved
   for all prompts in prefill, so no prefill call waits for a page.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from spell_jax.policy.config import UNLIMITED
from spell_jax.sampler.page_groups import Kind
from spell_jax.sampler.page_pool import Bundle, Key, PagePool
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
      tasks: blocks of a prefill call. A block is C tokens, with a page in every page group.
      kinds: kinds of page groups. Pages of a kind with a window are released once they are out of
        reach.
    """

    page_size: int
    pages: int
    slots: int
    prompts: int
    lanes: tuple[tuple[int, int], ...]
    tasks: int
    kinds: tuple[Kind, ...] = (Kind(),)

    @property
    def groups(self) -> int:
        """Number of page groups."""
        return sum(kind.groups for kind in self.kinds)

    def slice_of(self, number: int) -> slice:
        """Return the page groups of a kind."""
        first = sum(kind.groups for kind in self.kinds[:number])
        return slice(first, first + self.kinds[number].groups)

    def pages_of(self, tokens: int) -> int:
        """Return the pages of `tokens` tokens in each page group."""
        return -(-tokens // self.page_size)

    def first_block(self, kind: Kind, position: int) -> int:
        """Return the first block that a token sees, by its position in its prompt or answer."""
        return max(0, position + 1 - kind.window) // self.page_size

    def carried(self, kind: Kind, tokens: int) -> int:
        """Return the most pages in a group that a prompt's next token sees, of `tokens` tokens."""
        # A window of one token still holds the page in which the prompt ends.
        return min(self.pages_of(tokens), self._spanned(max(1, kind.window - 1)))

    def answer_pages(self, max_tokens: int) -> int:
        """Return the most pages that an answer must hold at once to be continued to its end."""
        blocks = self.pages_of(max_tokens)
        return sum(kind.groups * min(blocks, self._spanned(kind.window)) for kind in self.kinds)

    def prompt_pages(self, tokens: int) -> int:
        """Return the most pages that a prompt alone in the pool holds at once."""
        blocks, pages = self.pages_of(tokens), 0
        for kind in self.kinds:
            carried = self.carried(kind, tokens)
            pages += kind.groups * (carried + min(self.tasks, blocks - carried))
        return pages

    def _spanned(self, tokens: int) -> int:
        """Return the most blocks in which `tokens` consecutive tokens may lie."""
        return (tokens + self.page_size - 2) // self.page_size + 1 if tokens else 0

    def lane_of(self, group: int) -> int:
        """Return the index of the lane for requests with `group` sequences."""
        fitting = (i for i, (cells, _) in enumerate(self.lanes) if group <= cells)
        return next(fitting, len(self.lanes) - 1)

    def fits(self, request: SampleRequest) -> bool:
        """Return whether the request fits into an otherwise empty pool."""
        longest = self.answer_pages(request.options.max_tokens)
        return self.prompt_pages(len(request.prompt)) + longest <= self.pages


@dataclasses.dataclass(eq=False)
class AdmittedPrompt:
    """An admitted prompt. Its blocks are in the pool or about to be prefilled."""

    ticket: int  # number of the request
    request: SampleRequest
    tokens: np.ndarray  # token ids of the prompt, int32 [P]
    digests: list[bytes]  # of its whole blocks (page_pool.block_digests)
    index: int  # row of the prompt in State.prompt_hidden, within its shard
    # Page of each block in each page group, int32 [groups, blocks]; 0 where it holds none.
    table: np.ndarray
    bundles: list[dict[int, Bundle]]  # for each kind, the bundles that it holds by block, in order
    reused_tokens: int  # number of leading tokens that the pool held when it was admitted
    unread: int  # number of blocks that no prefill call has read yet
    unfinished: int  # number of its sequences that still run or wait


@dataclasses.dataclass(eq=False)
class DecodeSequence:
    """One answer that is being sampled.

    Attributes:
      admitted: prompt of the answer.
      number: index of the sample in its request.
      table: page of each of its own blocks in each page group, int32 [groups, blocks]; 0 where it
        holds none.
      slot: slot in the lane; -1 while the sequence is queued.
      blocks: number of blocks that it has taken pages for.
      bundles: for each kind, the bundles that it holds by block, in order.
      held: number of pages that it holds.
      count: number of tokens sampled so far.
      max_tokens: number of tokens at which the answer is cut off.
    """

    admitted: AdmittedPrompt
    number: int
    table: np.ndarray
    slot: int = -1
    blocks: int = 0
    bundles: list[dict[int, Bundle]] = dataclasses.field(default_factory=list)
    held: int = 0
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


Tasks = list[list[tuple[AdmittedPrompt, int]]]  # for each shard its (prompt, block number) pairs


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
        self._needs: Counter[int] = Counter()  # answer_pages -> number of sequences
        self._full = [n for n, kind in enumerate(shape.kinds) if kind.window == UNLIMITED]
        self._windowed = [n for n, kind in enumerate(shape.kinds) if kind.window != UNLIMITED]
        # Of the prompts in prefill, by kind with a window: the pages that they carry from call to
        # call, and the further pages of their blocks, in each group.
        self._carried: Counter[int] = Counter()
        self._passing: Counter[int] = Counter()
        self._planned: Counter[bytes] = Counter()  # digests of the blocks in `tasks`
        # Bundles that a prompt took for blocks that an earlier prompt's tasks will write.
        self._promised: dict[Key, Bundle] = {}
        self._called: dict[AdmittedPrompt, None] = {}  # prompts of the last prefill call

    def cost(self, digests: Sequence[bytes], request: SampleRequest) -> int:
        """Count the blocks to prefill for a request, plus the shard's unfinished sequences."""
        num_shared = self._shared(digests, request)
        return self.shape.pages_of(len(request.prompt)) - num_shared + len(self.unfinished)

    def admit(
        self, ticket: int, request: SampleRequest, tokens: np.ndarray, digests: list[bytes]
    ) -> bool:
        """Admit a request if there is room; return whether it was admitted.

        `tokens` are the prompt of the request, `digests` name the prompt's whole blocks.
        """
        shape = self.shape
        shared, total = self._shared(digests, request), shape.pages_of(len(tokens))
        longest = shape.answer_pages(request.options.max_tokens)
        if not self._indices or self._pages_to_admit(digests, shared, len(tokens)) > self._spare(
            longest
        ):
            return False
        reused_tokens = shared * shape.page_size
        self.reused_tokens += reused_tokens
        admitted = AdmittedPrompt(
            ticket,
            request,
            tokens,
            digests,
            self._indices.pop(),
            np.zeros((shape.groups, total), np.int32),
            [{} for _ in shape.kinds],
            reused_tokens,
            total - shared,
            request.group,
        )
        self._hold_shared(admitted, shared)
        for n in self._full:
            for number in range(shared, total):
                self._take(admitted, n, number)
        for n in self._windowed:
            carried = shape.carried(shape.kinds[n], len(tokens))
            self._carried[n] += carried
            self._passing[n] += total - carried
        self.tasks.extend((admitted, number) for number in range(shared, total))
        self._planned.update(digests[shared:])
        blocks = shape.pages_of(request.options.max_tokens)
        for number in range(request.group):
            table, bundles = np.zeros((shape.groups, blocks), np.int32), [{} for _ in shape.kinds]
            sequence = DecodeSequence(admitted, number, table, bundles=bundles)
            self.lanes[shape.lane_of(request.group)].queued.append(sequence)
            self.unfinished[sequence] = None
        self._needs[longest] += request.group
        return True

    def take_tasks(self) -> list[tuple[AdmittedPrompt, int]]:
        """Remove and return the next prefill tasks, at most as many as a call holds."""
        count = min(self.shape.tasks, len(self.tasks))
        tasks = [self.tasks.popleft() for _ in range(count)]
        for admitted, number in tasks:
            admitted.unread -= 1
            if number < len(admitted.digests):
                _decrement(self._planned, admitted.digests[number])
            for n in self._windowed:
                self._take(admitted, n, number)
            self._called[admitted] = None
        return tasks

    def release_passed(self) -> None:
        """Release the pages that prompts of the last prefill call no longer see."""
        shape = self.shape
        for admitted in self._called:
            blocks = admitted.table.shape[1]
            read = blocks - admitted.unread
            next_token = min(read * shape.page_size, len(admitted.tokens))
            for n in self._windowed:
                self._release_before(admitted, n, next_token, firm=False)
                if not admitted.unread:  # what its answers see stays until they are finished
                    self.pool.settle(admitted.bundles[n].values())
                    carried = shape.carried(shape.kinds[n], len(admitted.tokens))
                    self._carried[n] -= carried
                    self._passing[n] -= blocks - carried
        self._called = {}

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
            for n in self._windowed:
                sequence.held -= self._release_before(sequence, n, sequence.count)
            target_count = min(sequence.count + steps, sequence.max_tokens)
            while sequence.blocks * size < target_count:
                # What is reserved for the first sequence has room for its next token at least.
                room = self._unreserved() if sequence is first else self._spare()
                if room < self.shape.groups:
                    break
                for n in range(len(self.shape.kinds)):
                    self._hold(sequence, n, sequence.blocks, self._new_bundle(n))
                sequence.blocks += 1
                sequence.held += self.shape.groups
            limits[sequence] = min(sequence.blocks * size, sequence.max_tokens)
        return limits

    def finish(self, lane: Lane, sequence: DecodeSequence) -> bool:
        """Free a sequence's slot and pages; return whether it was the last of its request."""
        lane.free_slot(sequence)
        return self._release(sequence)

    def drop(self, ticket: int) -> bool:
        """Free all slots and pages of a request between decode calls; return whether it did.

        A prompt that is being read is not dropped: other prompts may wait for its blocks.
        """
        sequences = [s for s in self.unfinished if s.admitted.ticket == ticket]
        if not sequences or sequences[0].admitted.unread:
            return False
        lane = self.lanes[self.shape.lane_of(sequences[0].admitted.request.group)]
        for sequence in sequences:
            if sequence in lane.running:
                lane.free_slot(sequence)
            else:
                lane.queued.remove(sequence)
            self._release(sequence)
        return True

    def _release(self, sequence: DecodeSequence) -> bool:
        """Free a sequence's pages; return whether it was the last of its request."""
        for held in sequence.bundles:
            self.pool.release([*held.values()])
        del self.unfinished[sequence]
        _decrement(self._needs, self.shape.answer_pages(sequence.max_tokens))
        admitted = sequence.admitted
        admitted.unfinished -= 1
        if admitted.unfinished:
            return False
        for held in admitted.bundles:
            self.pool.release([*held.values()])
        self._indices.append(admitted.index)
        return True

    def _shared(self, digests: Sequence[bytes], request: SampleRequest) -> int:
        """Count the leading blocks of a prompt that need not be read again."""
        # Not the last token's block: its hidden state, from which answers start, must be computed.
        shared = (len(request.prompt) - 1) // self.shape.page_size
        for n in self._full:
            bundles = (self.pool.find((n, digest)) for digest in digests[:shared])
            shared = sum(1 for _ in itertools.takewhile(lambda bundle: bundle is not None, bundles))
        before = -1
        while before != shared:
            before = shared
            for n in self._windowed:
                # Of these layers, the next token needs only the blocks that it sees.
                missing = (
                    number
                    for number in reversed(self._seen_blocks(n, shared))
                    if not self._exists((n, digests[number]))
                )
                shared = next(missing, shared)
        return shared

    def _seen_blocks(self, n: int, shared: int) -> range:
        """Return the blocks of a kind that the first token after `shared` blocks sees."""
        position = shared * self.shape.page_size
        return range(self.shape.first_block(self.shape.kinds[n], position), shared)

    def _exists(self, key: Key) -> bool:
        """Return whether a block is in the pool, or an earlier prompt will read it."""
        return self.pool.find(key) is not None or key[1] in self._planned

    def _pages_to_admit(self, digests: Sequence[bytes], shared: int, tokens: int) -> int:
        """Count the pages that a prompt of `tokens` tokens takes or reserves if it is admitted."""
        shape = self.shape
        total, pages = shape.pages_of(tokens), self._reserved(tokens) - self._reserved()
        for n in self._full:
            bundles = (self.pool.find((n, digest)) for digest in digests[:shared])
            # Shared idle pages count, too: once they are held, nothing else can take them.
            idle = self.pool.newly_firm([bundle for bundle in bundles if bundle is not None])
            pages += shape.kinds[n].groups * (total - shared) + idle
        return pages

    def _reserved(self, tokens: int = 0) -> int:
        """Count the pages that prompts in prefill may hold in layers with a window.

        `tokens` is the length of a prompt to be admitted.
        """
        shape, reserved = self.shape, 0
        for n in self._windowed:
            carried = shape.carried(shape.kinds[n], tokens)
            passing = self._passing[n] + shape.pages_of(tokens) - carried
            # Each prompt carries what its next token sees. Beyond that there are only the blocks of
            # one call.
            pages = self._carried[n] + carried + min(shape.tasks, passing)
            reserved += shape.kinds[n].groups * pages
        return reserved

    def _unreserved(self) -> int:
        """Count the pages that are neither in firm use nor reserved for prefill."""
        return self.pool.size - self.pool.firm_pages - self._reserved()

    def _spare(self, longest: int = 0) -> int:
        """Count the pages that sequences other than the first admitted sequence may take.

        `longest` is the maximum answer of a request to be admitted, in pages.
        """
        # The reserve lets the first admitted sequence, and after it the next, grow to the longest
        # requested answer. So no deadlock is possible, and no sampled token is ever discarded.
        first = next(iter(self.unfinished), None)
        held = first.held if first else 0
        # In layers with a window it may hold more than it needs, and then nothing is reserved.
        return self._unreserved() - max(longest - held, *(n - held for n in self._needs), 0)

    # -------------------------------------------------------------------------------------- Bundles

    def _hold_shared(self, admitted: AdmittedPrompt, shared: int) -> None:
        """Add a prompt to the users of the blocks that it shares with other prompts."""
        promised = []
        for n in range(len(self.shape.kinds)):
            is_firm = n in self._full
            for number in range(shared) if is_firm else self._seen_blocks(n, shared):
                bundle = self.pool.find((n, admitted.digests[number]))
                if bundle is None:
                    promised.append((n, number))
                    continue
                self.pool.hold([bundle], is_firm)
                self._hold(admitted, n, number, bundle)
        # After all others are held, because taking a bundle may evict one that nobody holds.
        for n, number in promised:
            bundle = self._take(admitted, n, number)
            self._promised[n, admitted.digests[number]] = bundle
        # In prompt order, in which blocks are released.
        admitted.bundles = [dict(sorted(held.items())) for held in admitted.bundles]

    def _take(self, admitted: AdmittedPrompt, n: int, number: int) -> Bundle:
        """Take a bundle for a prompt's block, or hold the bundle promised to a later prompt."""
        key = (n, admitted.digests[number]) if number < len(admitted.digests) else None
        is_firm = n in self._full
        bundle = self._promised.pop(key, None) if key else None
        if bundle is None:
            bundle = self._new_bundle(n, is_firm)
        else:
            self.pool.hold([bundle], is_firm)
        if key:
            self.pool.name(bundle, key)
        self._hold(admitted, n, number, bundle)
        return bundle

    def _new_bundle(self, n: int, is_firm: bool = True) -> Bundle:
        return self.pool.take(self.shape.kinds[n].groups, is_firm)

    def _hold(
        self, owner: AdmittedPrompt | DecodeSequence, n: int, number: int, bundle: Bundle
    ) -> None:
        owner.bundles[n][number] = bundle
        owner.table[self.shape.slice_of(n), number] = bundle

    def _release_before(
        self, owner: AdmittedPrompt | DecodeSequence, n: int, position: int, firm: bool = True
    ) -> int:
        """Release the blocks of a kind that no token from `position` on sees; count their pages."""
        held, begin = owner.bundles[n], self.shape.first_block(self.shape.kinds[n], position)
        passed = [*itertools.takewhile(lambda number: number < begin, held)]
        self.pool.release([held.pop(number) for number in passed], firm)
        owner.table[self.shape.slice_of(n), passed] = 0
        return len(passed) * self.shape.kinds[n].groups


def _decrement(counts: Counter, key: Any) -> None:
    """Decrement a count, and drop it at zero."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
