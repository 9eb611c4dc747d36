"""Tests of the scheduler of pages and slots, on the host only; random numbers replace sampling."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from spell_jax.policy.config import UNLIMITED
from spell_jax.sampler.page_groups import Kind
from spell_jax.sampler.page_pool import block_digests
from spell_jax.sampler.requests import Options, SampleRequest
from spell_jax.sampler.scheduler import Scheduler
from spell_jax.sampler.shard import AdmittedPrompt, DecodeSequence, Lane, Shard, ShardShape

SHAPE = ShardShape(page_size=4, pages=20, slots=6, prompts=8, lanes=((1, 6), (3, 3)), tasks=4)
# A group without a window and two with a window of six tokens; all groups with a window.
MIXED = Kind(UNLIMITED, 1), Kind(6, 2)
WINDOWED = (Kind(6, 2),)


def _request(prompt: int | Sequence[int], group: int = 1, max_tokens: int = 8) -> SampleRequest:
    """Make a request; `prompt` is the prompt's tokens, or the length n of a prompt 0, 1, 2, ..."""
    tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    return SampleRequest(tokens, group, np.zeros(2, np.uint32), Options(max_tokens=max_tokens))


def _scheduler(*requests: SampleRequest, shards: int = 1, **sizes) -> Scheduler:
    scheduler = Scheduler(dataclasses.replace(SHAPE, **sizes), shards)
    for ticket, request in enumerate(requests):
        scheduler.submit(ticket, request)
    return scheduler


def _distinct_prompt(number: int, length: int = 4) -> list[int]:
    """Make a prompt that shares no prefix with the prompts of other numbers."""
    return [100 * number + i for i in range(length)]


def _fill(scheduler: Scheduler) -> list[list[list[tuple[int, int]]]]:
    """Prefill prompts and fill slots until no free slot waits for a page.

    Returns the plans, as tickets of requests and numbers of pages.
    """
    plans = []
    while (plan := scheduler.plan_prefill()) is not None:
        plans.append(
            [
                [(admitted.ticket, number) for admitted, number in shard_tasks]
                for shard_tasks in plan
            ]
        )
        scheduler.fill_slots()
    scheduler.fill_slots()
    return plans


def _slots_of(lane: Lane) -> list[tuple[int, int] | None]:
    """Return the ticket and sequence number in each slot."""
    return [sequence and (sequence.admitted.ticket, sequence.number) for sequence in lane.slots]


def _sibling(shard: Shard, ticket: int, number: int = 0) -> DecodeSequence:
    (sequence,) = (s for s in shard.unfinished if (s.admitted.ticket, s.number) == (ticket, number))
    return sequence


def _pages(shard: Shard, ticket: int) -> list[int]:
    """Return the pages of a prompt in the first page group."""
    return _sibling(shard, ticket).admitted.table[0].tolist()


def _finish(shard: Shard, ticket: int, number: int = 0) -> bool:
    sequence = _sibling(shard, ticket, number)
    return shard.finish(shard.lanes[shard.shape.lane_of(sequence.admitted.request.group)], sequence)


# ------------------------------------------------------------------------------------------- Sizes


def test_request_uses_first_lane_with_enough_cells_or_the_last() -> None:
    shape = dataclasses.replace(SHAPE, lanes=((1, 6), (3, 2), (8, 1)))
    assert [shape.lane_of(group) for group in (1, 2, 3, 4, 8, 9, 99)] == [0, 1, 1, 2, 2, 2, 2]


def test_token_counts_are_rounded_up_to_whole_pages() -> None:
    assert [SHAPE.pages_of(tokens) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    "prompt, max_tokens, fits",
    [(16, 16, True), (17, 16, False), (16, 17, False), (13, 13, True), (1, 28, True)],
)
def test_request_fits_if_prompt_and_one_answer_fit_the_pool(
    prompt: int, max_tokens: int, fits: bool
) -> None:
    """A page holds tokens of either a prompt or one answer."""
    shape = dataclasses.replace(SHAPE, pages=8)
    assert shape.fits(_request(prompt, 99, max_tokens)) == fits


def test_request_that_never_fits_is_rejected_with_its_sizes() -> None:
    scheduler = _scheduler(pages=8)
    message = (
        "request 5: a prompt of 17 tokens and answers of up to 16 do not fit into 8 pages of 4"
    )
    with pytest.raises(ValueError, match=message):
        scheduler.submit(5, _request(17, 1, 16))
    assert not scheduler.unfinished
    scheduler.submit(6, _request(16, 1, 16))
    assert scheduler.unfinished
    assert _fill(scheduler) == [[[(6, number) for number in range(4)]]]


# --------------------------------------------------------------------------------------- Admission


def test_admitted_prompts_share_prefix_pages() -> None:
    scheduler = _scheduler(
        _request(10), _request([*range(8), 50, 51, 52]), _request([9, *range(8)])
    )
    (shard,) = scheduler.shards
    assert _fill(scheduler) == [[[(0, 0), (0, 1), (0, 2), (1, 2)]], [[(2, 0), (2, 1), (2, 2)]]]
    first, second, third = (_pages(shard, ticket) for ticket in range(3))
    assert second[:2] == first[:2]
    assert len({*first, *second, *third}) == 7
    assert shard.pool.available == SHAPE.pages - 7
    assert shard.reused_tokens == 8
    assert _finish(shard, 0)
    assert shard.pool.available == SHAPE.pages - 6
    _finish(shard, 1)
    _finish(shard, 2)
    assert shard.pool.available == SHAPE.pages


@pytest.mark.parametrize("length, reused", [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_page_of_the_last_prompt_token_is_always_prefilled(length: int, reused: int) -> None:
    """Also if the same prompt is already in the pool."""
    scheduler = _scheduler(_request(length), _request(length), tasks=1)
    (shard,) = scheduler.shards
    plans = [task for ((task,),) in _fill(scheduler)]
    last = SHAPE.pages_of(length) - 1
    expected_tasks = [(0, number) for number in range(last + 1)]
    assert plans == expected_tasks + [(1, number) for number in range(reused, last + 1)]
    assert shard.reused_tokens == reused * SHAPE.page_size
    assert _pages(shard, 0)[-1] != _pages(shard, 1)[-1]


def test_pages_of_finished_requests_are_reused() -> None:
    scheduler = _scheduler(_request(12))
    (shard,) = scheduler.shards
    _fill(scheduler)
    pages = _pages(shard, 0)
    assert _finish(shard, 0)
    scheduler.submit(1, _request(12))
    assert _fill(scheduler) == [[[(1, 2)]]]
    assert _pages(shard, 1)[:2] == pages[:2]
    assert shard.reused_tokens == 8


def test_shared_idle_pages_count_as_taken() -> None:
    """Three of the pool's seven pages are idle; once shared, they are no longer available."""
    scheduler = _scheduler(_request(13), pages=7)
    (shard,) = scheduler.shards
    _fill(scheduler)
    _finish(shard, 0)
    scheduler.submit(1, _request(_distinct_prompt(1), max_tokens=12))
    scheduler.submit(2, _request(13, max_tokens=12))
    assert _fill(scheduler) == [[[(1, 0)]]]
    assert scheduler.has_queued(0), "1 + 4 pages of prompts, and 3 of an answer, are more than 7"
    _finish(shard, 1)
    assert _fill(scheduler) == [[[(2, 3)]]]


def test_pages_for_the_longest_requested_answer_are_reserved() -> None:
    """Room is needed for the longest answer of admitted and of new requests alike."""
    for longest in ((32, 4), (4, 32)):
        requests = [_request(_distinct_prompt(i), max_tokens=n) for i, n in enumerate(longest)]
        scheduler = _scheduler(*requests, pages=9)
        assert _fill(scheduler) == [[[(0, 0)]]]
        assert len(scheduler.queue) == 1
        _finish(scheduler.shards[0], 0)
        assert _fill(scheduler) == [[[(1, 0)]]]
        scheduler = _scheduler(*requests, pages=10)
        assert _fill(scheduler) == [[[(0, 0), (1, 0)]]]


def test_reserved_pages_shrink_when_the_longest_answer_ends() -> None:
    long, *short = (
        _request(_distinct_prompt(0), max_tokens=32),
        *(_request(_distinct_prompt(i)) for i in (1, 2, 3)),
    )
    scheduler = _scheduler(long, *short, pages=10)
    _fill(scheduler)
    assert len(scheduler.queue) == 2
    _finish(scheduler.shards[0], 0)
    _fill(scheduler)
    assert not scheduler.queue


def test_number_of_resident_prompts_is_limited() -> None:
    scheduler = _scheduler(*(_request(_distinct_prompt(i)) for i in range(5)), prompts=2)
    (shard,) = scheduler.shards
    _fill(scheduler)
    assert [s.admitted.ticket for s in shard.unfinished] == [0, 1]
    assert {s.admitted.index for s in shard.unfinished} == {0, 1}
    _finish(shard, 0)
    _fill(scheduler)
    assert [s.admitted.ticket for s in shard.unfinished] == [1, 2]
    assert {s.admitted.index for s in shard.unfinished} == {0, 1}


def test_requests_are_admitted_in_order_of_submission() -> None:
    """A small request does not overtake a large one that waits for pages."""
    large = _request(_distinct_prompt(1, 40), max_tokens=8)
    scheduler = _scheduler(
        _request(_distinct_prompt(0, 40)), large, _request(_distinct_prompt(2)), pages=20
    )
    _fill(scheduler)
    assert [ticket for ticket, *_ in scheduler.queue] == [1, 2]


def test_admission_is_limited_to_free_slots_and_prefill_rows() -> None:
    requests = [_request(_distinct_prompt(i, 8)) for i in range(6)]
    for tasks, admitted in ((1, 2), (4, 2), (5, 3), (8, 4)):
        scheduler = _scheduler(*requests, slots=2, tasks=tasks)
        plan = scheduler.plan_prefill()
        assert plan is not None and len(plan[0]) == min(tasks, 2 * admitted)
        assert len(requests) - len(scheduler.queue) == admitted, tasks


def test_no_prefill_is_planned_without_a_free_slot() -> None:
    scheduler = _scheduler(_request(4, 2), _request(_distinct_prompt(1), 2), slots=2, tasks=1)
    assert _fill(scheduler) == [[[(0, 0)]]]
    assert scheduler.plan_prefill() is None
    assert scheduler.has_queued(1) and not scheduler.has_queued(0)
    _finish(scheduler.shards[0], 0, 1)
    assert _fill(scheduler) == [[[(1, 0)]]]
    assert scheduler.has_queued(1), "its second sequence"
    _finish(scheduler.shards[0], 0, 0)
    _fill(scheduler)
    assert not scheduler.has_queued(1)


def test_request_goes_to_the_shard_with_its_prefix_or_less_work() -> None:
    begin = _distinct_prompt(1, 12)
    scheduler = _scheduler(
        _request(_distinct_prompt(0, 12)),
        _request(begin, 2),  # 0 has one sequence
        _request([*begin, 7]),  # 0 has fewer sequences, but not these pages
        _request(_distinct_prompt(3), 2),
        shards=2,
    )
    _fill(scheduler)
    tickets = [{s.admitted.ticket for s in shard.unfinished} for shard in scheduler.shards]
    assert tickets == [{0, 3}, {1, 2}]
    assert [shard.reused_tokens for shard in scheduler.shards] == [0, 12]


def test_request_goes_to_another_shard_if_the_cheapest_is_full() -> None:
    begin = _distinct_prompt(0, 16)
    requests = _request([*begin, 1, 2, 3]), _request([*begin, 7], max_tokens=12)
    for pages, tickets in ((9, [[0, 1], []]), (8, [[0], [1]])):
        scheduler = _scheduler(*requests, shards=2, pages=pages, tasks=8)
        _fill(scheduler)
        shard_tickets = [
            [s.admitted.ticket for s in shard.unfinished] for shard in scheduler.shards
        ]
        assert shard_tickets == tickets


# ------------------------------------------------------------------------------------------ Prefill


def test_page_is_prefilled_after_shared_pages_of_other_requests() -> None:
    """The second prompt shares pages that are not prefilled yet when it is admitted."""
    scheduler = _scheduler(_request(12), _request([*range(11), 50]), tasks=2)
    plan = scheduler.plan_prefill()
    assert plan is not None and [number for _, number in plan[0]] == [0, 1]
    scheduler.fill_slots()
    assert not any(_slots_of(scheduler.shards[0].lanes[0])), "no prompt is read to its end"
    scheduler.submit(2, _request([*range(8), 60]))
    assert _fill(scheduler) == [[[(0, 2), (1, 2)]], [[(2, 2)]]]
    assert _slots_of(scheduler.shards[0].lanes[0])[:3] == [(0, 0), (1, 0), (2, 0)]


def test_no_sequence_takes_a_slot_before_its_prompt_is_prefilled() -> None:
    scheduler = _scheduler(_request(12, 2), _request(_distinct_prompt(1), 2), tasks=1)
    (shard,), seats = scheduler.shards, []
    while scheduler.plan_prefill() is not None:
        scheduler.fill_slots()
        seats.append(len(shard.lanes[1].slots) - shard.lanes[1].free)
    assert seats == [0, 0, 2, 4]


def test_prompts_without_free_slots_are_prefilled_only_in_padding_rows() -> None:
    requests = [_request(_distinct_prompt(i, length)) for i, length in enumerate((8, 8, 12))]
    scheduler = _scheduler(*requests, slots=2, tasks=3)
    first, second = [(0, 0), (0, 1), (1, 0)], [(1, 1), (2, 0), (2, 1)]
    assert _fill(scheduler) == [[first], [second]]
    assert _fill(scheduler) == []
    _finish(scheduler.shards[0], 0)
    assert _fill(scheduler) == [[[(2, 2)]]]
    assert _slots_of(scheduler.shards[0].lanes[0]) == [(2, 0), (1, 0)]


def test_full_lane_does_not_block_prefill_for_the_other_lane() -> None:
    single_request, group_request = _request(4), _request(_distinct_prompt(1), 3)
    scheduler = _scheduler(
        single_request, _request(_distinct_prompt(2)), group_request, slots=1, tasks=1
    )
    assert _fill(scheduler) == [[[(0, 0)]]]
    scheduler = _scheduler(
        single_request, group_request, _request(_distinct_prompt(2)), slots=1, tasks=1
    )
    assert _fill(scheduler) == [[[(0, 0)]], [[(1, 0)]]]
    assert [_slots_of(lane) for lane in scheduler.shards[0].lanes] == [[(0, 0)], [(1, 0)]]


# ------------------------------------------------------------------------------------------- Slots


def test_siblings_take_slots_in_order_of_admission() -> None:
    scheduler = _scheduler(
        _request(4, 3), _request(_distinct_prompt(1), 2), _request(_distinct_prompt(2), 3)
    )
    lane = scheduler.shards[0].lanes[1]
    _fill(scheduler)
    assert _slots_of(lane) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    _finish(scheduler.shards[0], 1, 0)
    _fill(scheduler)
    assert _slots_of(lane) == [(0, 0), (0, 1), (0, 2), (2, 1), (1, 1), (2, 0)]
    assert [(sequence.slot, sequence.number) for sequence in lane.queued] == [(-1, 2)]
    for slot, sequence in enumerate(lane.slots):
        assert sequence is not None and sequence.slot == slot


def test_decode_rows_hold_one_prompt_and_do_not_exceed_the_lane() -> None:
    lanes = ((1, 6), (3, 2))
    requests = [_request(_distinct_prompt(i), group) for i, group in enumerate((4, 2, 3))]
    scheduler = _scheduler(*requests, lanes=lanes)
    (shard,) = scheduler.shards
    lane = shard.lanes[1]

    def rows() -> list[tuple[int, list[int]]]:
        return [(admitted.ticket, slots) for admitted, slots in lane.groups()]

    _fill(scheduler)
    assert rows() == [(0, [0, 1, 2]), (0, [3])]
    assert _slots_of(lane)[4:] == [None, None], "free slots, but no row for the next prompt"
    _finish(shard, 0, 1)
    _fill(scheduler)
    assert rows() == [(0, [0, 2, 3]), (1, [1, 4])]
    _finish(shard, 1, 0)
    _fill(scheduler)
    assert rows() == [(0, [0, 2, 3]), (1, [4])]
    _finish(shard, 1, 1)
    _fill(scheduler)
    assert rows() == [(0, [0, 2, 3]), (2, [1, 4, 5])]


def test_straggler_does_not_hold_its_siblings_slots() -> None:
    requests = [_request(_distinct_prompt(i), 3) for i in range(4)]
    scheduler = _scheduler(*requests)
    (shard,) = scheduler.shards
    lane = shard.lanes[1]
    _fill(scheduler)
    assert lane.free == 0
    assert [_finish(shard, 0, number) for number in (0, 2)] == [False, False]
    assert lane.free == 2
    _fill(scheduler)
    assert _slots_of(lane) == [(2, 0), (0, 1), (2, 1), (1, 0), (1, 1), (1, 2)]
    assert _finish(shard, 0, 1)
    _fill(scheduler)
    assert _slots_of(lane)[1] == (2, 2)


def test_prompt_pages_are_released_with_the_last_sibling() -> None:
    scheduler = _scheduler(_request(12, 3))
    (shard,) = scheduler.shards
    _fill(scheduler)
    shard.allocate_pages(shard.lanes[1], 4)
    for number, available in ((1, 15), (2, 16)):
        assert not _finish(shard, 0, number)
        assert shard.pool.available == available
    assert _finish(shard, 0, 0)
    assert shard.pool.available == SHAPE.pages
    assert not scheduler.unfinished


# ------------------------------------------------------------------------------------ Answer pages


def test_pages_are_allocated_for_next_tokens_up_to_max_tokens() -> None:
    scheduler = _scheduler(_request(4, 1, 10))
    (shard,) = scheduler.shards
    _fill(scheduler)
    sequence = _sibling(shard, 0)
    for count, pages, limit in ((0, 1, 4), (1, 1, 4), (2, 2, 8), (6, 3, 10), (9, 3, 10)):
        sequence.count = count
        assert shard.allocate_pages(shard.lanes[0], 3) == {sequence: limit}
        assert sequence.blocks == pages
    assert shard.allocate_pages(shard.lanes[1], 3) == {}


def test_first_admitted_sequence_continues_when_pages_run_out() -> None:
    """The pool has one page per prompt, pages for the longest answer, and one more."""
    requests = [_request(_distinct_prompt(i), max_tokens=16) for i in range(3)]
    scheduler = _scheduler(*requests, pages=3 + 4 + 1)
    (shard,) = scheduler.shards
    lane = shard.lanes[0]
    _fill(scheduler)
    first, second, third = sequences = [_sibling(shard, ticket) for ticket in range(3)]
    expected_limits = [(4, 4, 0), (8, 4, 0), (12, 4, 0), (16, 4, 0), (16, 4, 0)]
    for limits in expected_limits:
        assert tuple(shard.allocate_pages(lane, 4).values()) == limits
        for sequence, limit in zip(sequences, limits, strict=True):
            sequence.count = limit
    assert shard.pool.available == 0
    _finish(shard, 0)
    for limits in ((8, 4), (12, 8), (16, 8), (16, 8)):  # the first prompt is a page longer
        assert tuple(shard.allocate_pages(lane, 4).values()) == limits
        second.count, third.count = limits
    assert first.blocks == second.blocks == 4
    _finish(shard, 1)
    assert shard.allocate_pages(lane, 4) == {third: 12}


def test_other_lane_leaves_pages_for_the_first_admitted_sequence() -> None:
    requests = (
        _request(4, 2, 16),
        _request(_distinct_prompt(1), 1, 16),
        _request(_distinct_prompt(2), 1, 16),
    )
    scheduler = _scheduler(*requests, pages=3 + 4 + 1)
    (shard,) = scheduler.shards
    _fill(scheduler)
    single_lane, group_lane = shard.lanes
    for _ in range(2):
        assert [*shard.allocate_pages(single_lane, 8).values()] == [4, 0]
    assert [*shard.allocate_pages(group_lane, 16).values()] == [16, 0]


def test_refilled_slot_does_not_overtake_earlier_sequences() -> None:
    """The last admitted sequence gets the freed slot, which has the lowest number."""
    requests = [_request(_distinct_prompt(i), max_tokens=4 if i == 0 else 16) for i in range(4)]
    scheduler = _scheduler(*requests, slots=3, pages=9)
    (shard,) = scheduler.shards
    lane = shard.lanes[0]
    _fill(scheduler)
    _finish(shard, 0)
    _fill(scheduler)
    assert _slots_of(lane) == [(3, 0), (1, 0), (2, 0)]
    limits = shard.allocate_pages(lane, 8)
    assert {s.admitted.ticket: limit for s, limit in limits.items()} == {1: 8, 2: 8, 3: 0}


# ----------------------------------------------------------------------------------------- Windows


def _used(shard: Shard) -> int:
    return shard.pool.size - shard.pool.available


@pytest.mark.parametrize(("kinds", "full_pages"), [(WINDOWED, 0), (MIXED, 100)])
def test_long_prompt_holds_only_the_window_between_calls(kinds, full_pages: int) -> None:
    """A call of four blocks adds four to the two that its first token sees, of 100 blocks."""
    scheduler = _scheduler(_request(400), pages=full_pages + 2 * (2 + 4) + 6, kinds=kinds)
    (shard,), calls = scheduler.shards, 0
    while scheduler.plan_prefill() is not None:
        assert _used(shard) <= full_pages + 2 * (2 + 4)
        scheduler.fill_slots()
        assert _used(shard) <= full_pages + 2 * 2
        calls += 1
    assert calls == 25
    pages = _sibling(shard, 0).admitted.table[-2:]
    # Token 400 sees tokens 395 to 399, in blocks 98 and 99.
    assert np.all(pages[:, 98:] > 0) and not np.any(pages[:, :98])
    _finish(shard, 0)
    assert _used(shard) == 0


def test_answer_holds_only_the_pages_of_its_window() -> None:
    scheduler = _scheduler(_request(1, 1, 200), pages=20, kinds=WINDOWED)
    (shard,) = scheduler.shards
    _fill(scheduler)
    sequence = _sibling(shard, 0)
    for count in range(0, 200, 3):
        sequence.count = count
        limits = shard.allocate_pages(shard.lanes[0], 3)
        assert limits[sequence] >= min(count + 3, 200)
        held = np.flatnonzero(sequence.table[0])
        # Token `count` sees its last five tokens. Tokens up to count + 2 are about to be written.
        assert held.tolist() == [*range(max(0, count - 5) // 4, (min(count + 3, 200) + 3) // 4)]
        assert sequence.held == 2 * len(held)


def test_prefix_is_shared_if_what_the_next_token_sees_is_in_the_pool() -> None:
    scheduler = _scheduler(_request(18), pages=60, kinds=MIXED)
    (shard,) = scheduler.shards
    _fill(scheduler)
    first = _sibling(shard, 0).admitted.table.copy()
    _finish(shard, 0)
    scheduler.submit(1, _request([*range(16), 50, 51]))
    assert _fill(scheduler) == [[[(1, 4)]]]
    table = _sibling(shard, 1).admitted.table
    assert table[0, :4].tolist() == first[0, :4].tolist()
    # Token 18 sees tokens from 13 on, in blocks 3 and 4.
    assert table[1:, 3].tolist() == first[1:, 3].tolist() and not np.any(table[1:, :3])
    _finish(shard, 1)
    shard.pool.release([shard.pool.take(shard.pool.available)])  # evicts everything
    scheduler.submit(2, _request(18))
    assert _fill(scheduler) == [[[(2, 0), (2, 1), (2, 2), (2, 3)]], [[(2, 4)]]]


def test_prefix_is_not_shared_without_the_pages_of_its_window() -> None:
    scheduler = _scheduler(_request(18), pages=60, kinds=MIXED)
    (shard,) = scheduler.shards
    _fill(scheduler)
    _finish(shard, 0)
    key = 1, _digests(range(12))[-1]
    window_page, full_page = shard.pool.find(key), shard.pool.find((0, key[1]))
    assert window_page and full_page
    del shard.pool._known[key], shard.pool._key[window_page]
    scheduler.submit(1, _request(18))
    # Tokens from 12 to 17 see block 2, and token 8 sees block 0 and 1.
    assert _fill(scheduler) == [[[(1, 2), (1, 3), (1, 4)]]]


def _digests(tokens: range) -> list[bytes]:
    array = np.array(tokens, np.int32)
    return block_digests(array[i : i + 4].tobytes() for i in range(0, len(array), 4))


@pytest.mark.parametrize("kinds", [MIXED, WINDOWED])
def test_prefix_of_a_prompt_in_prefill_is_shared(kinds) -> None:
    """The second prompt takes the pages that it will see; the first prompt's task writes them."""
    scheduler = _scheduler(_request(40), _request([*range(22), 50]), pages=60, tasks=4, kinds=kinds)
    (shard,) = scheduler.shards
    assert scheduler.plan_prefill() is not None
    first, second = (_sibling(shard, ticket).admitted.table for ticket in range(2))
    assert shard.reused_tokens == 20
    pages = second[-2:, 3:5].copy()  # token 20 sees tokens from 15 on
    assert np.all(pages > 0) and not np.any(first[-2:, 4:])
    scheduler.fill_slots()
    assert scheduler.plan_prefill() is not None
    assert np.array_equal(first[-2:, 4], pages[:, 1])
    scheduler.fill_slots()
    assert _fill(scheduler) == [[[(0, 8), (0, 9), (1, 5)]]]
    _finish(shard, 0)
    _finish(shard, 1)
    assert _used(shard) == 0


def test_shared_pages_are_released_in_prompt_order() -> None:
    """The third prompt sees block 3, which the second will read, and block 4, still in the pool."""
    scheduler = _scheduler(_request(40), pages=40, tasks=2, kinds=(Kind(6, 1),))
    (shard,) = scheduler.shards
    _fill(scheduler)
    _finish(shard, 0)
    free = len(shard.pool._free)
    shard.pool.release([shard.pool.take(free + 3)])  # evicts three blocks, among them block 3
    assert [shard.pool.find((0, d)) is None for d in _digests(range(20))] == [1, 1, 0, 1, 0]
    scheduler.submit(1, _request([*range(16), 50]))
    scheduler.submit(2, _request([*range(20), 60, 61]))
    _fill(scheduler)
    assert shard.reused_tokens == 20
    # Token 22 sees tokens from 17 on, in blocks 4 and 5.
    assert np.flatnonzero(_sibling(shard, 2).admitted.table[0]).tolist() == [4, 5]
    _finish(shard, 1)
    _finish(shard, 2)
    assert _used(shard) == 0


# -------------------------------------------------------------------------------------- Simulation


def _first_block(kind: Kind, position: int) -> int:
    """Return the block of the first of the last `window` tokens up to a position."""
    # Not by ShardShape.first_block, which decides what is released.
    return max(0, position - (kind.window - 1)) // SHAPE.page_size


class _Decoder:
    """A sampler without a device: it plans like session.py, and samples only counts of tokens."""

    def __init__(self, scheduler: Scheduler, seed: int, steps: int):
        self.scheduler, self.steps = scheduler, steps
        self.rng = np.random.default_rng(seed)
        self.lengths: dict[DecodeSequence, int] = {}
        self.finished: list[int] = []
        self.history: list = []
        self.waited = 0  # turns of sequences without a page
        # For each shard: page -> kind and prompt tokens up to its end, for prefilled pages, or
        # sequence and block, for pages of answers.
        self.page_contents: list[dict[int, tuple]] = [{} for _ in scheduler.shards]

    def run(self, requests: Sequence[SampleRequest]) -> None:
        """Answer all requests: submit half of the requests first, then one per finished request."""
        next_ticket = 0
        for _ in range(10_000):
            for request in requests[next_ticket : len(requests) // 2 + len(self.finished)]:
                self.scheduler.submit(next_ticket, request)
                next_ticket += 1
            if not self.scheduler.unfinished:
                return
            progress = self._prefill()
            sampled = self._decode()
            assert progress + sampled, "a turn without progress"
        raise AssertionError("it does not come to an end")

    def _prefill(self) -> int:
        pages = 0
        while (plan := self.scheduler.plan_prefill()) is not None:
            assert any(plan) and max(map(len, plan)) <= self.scheduler.shape.tasks
            for number, tasks in enumerate(plan):
                self._read(number, tasks)
            pages += sum(map(len, plan))
            self.scheduler.fill_slots()
            self._check()
        self.scheduler.fill_slots()
        self._check()
        return pages

    def _read(self, number: int, tasks: list[tuple[AdmittedPrompt, int]]) -> None:
        """Run a prefill call: write all of its pages, then let each page read all earlier pages."""
        page_contents, block = self.page_contents[number], self.scheduler.shape.page_size
        self.history.append([(number, r.ticket, r.table[:, i].tolist(), i) for r, i in tasks])
        for admitted, i in tasks:
            content = tuple(admitted.request.prompt[: (i + 1) * block])
            for n in range(len(self.scheduler.shape.kinds)):
                for page in self._pages(admitted, n, i):
                    page_contents[page] = n, content
        for admitted, i in tasks:
            self._check_read(number, admitted, i * block, i + 1)

    def _pages(self, owner: AdmittedPrompt | DecodeSequence, n: int, block: int) -> list[int]:
        pages = owner.table[self.scheduler.shape.slice_of(n), block].tolist()
        assert len({*pages, 0}) == self.scheduler.shape.kinds[n].groups + 1
        return pages

    def _check_read(self, number: int, admitted: AdmittedPrompt, position: int, end: int) -> None:
        """Check the blocks before `end` that a token at a position sees."""
        prompt, shape = admitted.request.prompt, self.scheduler.shape
        for n, kind in enumerate(shape.kinds):
            for i in range(_first_block(kind, position), end):
                content = n, tuple(prompt[: (i + 1) * shape.page_size])
                for page in self._pages(admitted, n, i):
                    assert self.page_contents[number].get(page) == content

    def _decode(self) -> int:
        limits = []
        for lane in range(len(self.scheduler.shape.lanes)):
            for number, shard in enumerate(self.scheduler.shards):
                lane_limits = shard.allocate_pages(shard.lanes[lane], self.steps)
                assert set(lane_limits) == set(filter(None, shard.lanes[lane].slots))
                limits.append((number, lane, lane_limits))
        self._check()
        for shard in self.scheduler.shards:
            for first in list(shard.unfinished)[:1]:
                (limit,) = (
                    lane_limits[first] for *_, lane_limits in limits if first in lane_limits
                )
                tokens = 1 if shard._windowed else self.steps
                assert limit >= min(first.count + tokens, first.max_tokens)
        return sum(self._sample(*entry) for entry in limits)

    def _sample(self, number: int, lane: int, limits: dict[DecodeSequence, int]) -> int:
        shard, sampled = self.scheduler.shards[number], 0
        for sequence, limit in limits.items():
            self.history.append((number, sequence.admitted.ticket, sequence.number, limit))
            assert sequence.count <= limit <= sequence.max_tokens
            assert limit <= sequence.blocks * self.scheduler.shape.page_size
            self._write_own(number, sequence)
            longest = int(self.rng.integers(1, sequence.max_tokens, endpoint=True))
            length = self.lengths.setdefault(sequence, longest)
            max_new = min(limit - sequence.count, self.steps)
            self.waited += not max_new
            new = min(int(self.rng.integers(min(max_new, 1), max_new, endpoint=True)), length)
            new = min(new, length - sequence.count)
            sequence.count += new
            sampled += new
            if sequence.count == length and shard.finish(shard.lanes[lane], sequence):
                self.finished.append(sequence.admitted.ticket)
        return sampled

    def _write_own(self, number: int, sequence: DecodeSequence) -> None:
        """Check the sequence's own blocks that its next token sees, and write the later ones."""
        shape, contents = self.scheduler.shape, self.page_contents[number]
        for n, kind in enumerate(shape.kinds):
            for block in range(_first_block(kind, sequence.count), sequence.blocks):
                for page in self._pages(sequence, n, block):
                    if block * shape.page_size < sequence.count:
                        assert contents[page] == (sequence, block)
                    contents[page] = sequence, block

    def _check(self) -> None:
        """Check the invariants."""
        shape = self.scheduler.shape
        for number, shard in enumerate(self.scheduler.shards):
            residents = {sequence.admitted: None for sequence in shard.unfinished}
            of_prompts = {page for r in residents for page in r.table.ravel().tolist()} - {0}
            of_answers = [
                page
                for sequence in shard.unfinished
                for page in sequence.table.ravel().tolist()
                if page
            ]
            for owner in (*residents, *shard.unfinished):
                held = [page for by_block in owner.bundles for b in by_block.values() for page in b]
                assert sorted(held) == sorted(owner.table[owner.table > 0].tolist())
            assert len({*of_prompts, *of_answers}) == len(of_prompts) + len(of_answers)
            used_pages = len(of_prompts) + len(of_answers)
            assert used_pages <= shape.pages and {*of_prompts, *of_answers} <= {
                *range(1, shape.pages + 1)
            }
            assert shard.pool.available == shape.pages - used_pages
            assert len({r.index for r in residents}) == len(residents) <= shape.prompts
            assert all(0 <= r.index < shape.prompts for r in residents)
            for first in list(shard.unfinished)[:1]:
                longest = max(shape.answer_pages(s.max_tokens) for s in shard.unfinished)
                assert shard._unreserved() + first.held >= longest
                assert first.held == np.count_nonzero(first.table)
            passing = used_pages - shard.pool.firm_pages
            assert 0 <= passing <= shard._reserved()
            for lane in shard.lanes:
                rows = lane.groups()
                assert len(rows) == lane._row_count <= lane.rows
                assert set(lane.running) == set(filter(None, lane.slots))
                assert all(len(slots) <= lane.cells for _, slots in rows)
                slots = sorted(slot for _, row in rows for slot in row)
                assert slots == [i for i, sequence in enumerate(lane.slots) if sequence]
                for admitted, row in rows:
                    assert {s.admitted for s in lane.slots if s and s.slot in row} == {admitted}
                    self._check_read(
                        number, admitted, len(admitted.tokens), admitted.table.shape[1]
                    )


def _random_requests(
    rng: np.random.Generator, count: int, shape: ShardShape
) -> list[SampleRequest]:
    """Make requests with common prefixes; some prompts are equal, the longest fill the pool."""
    stems = [rng.integers(3, size=40).tolist() for _ in range(3)]
    fitting_requests = []
    while len(fitting_requests) < count:
        stem = stems[rng.integers(3)][: rng.integers(1, 17)]
        tail = rng.integers(3, size=rng.integers(0, 9)).tolist()
        request = _request(stem + tail, int(rng.integers(1, 8)), int(rng.integers(1, 25)))
        if shape.fits(request):
            fitting_requests.append(request)
    return fitting_requests


def _simulate(shape: ShardShape, shards: int, seed: int, steps: int, count: int = 40) -> _Decoder:
    scheduler = Scheduler(shape, shards)
    requests = _random_requests(np.random.default_rng(seed), count, shape)
    decoder = _Decoder(scheduler, seed, steps)
    decoder.run(requests)
    assert sorted(decoder.finished) == list(range(count))
    assert sum(request.group for request in requests) == len(decoder.lengths)
    assert all(sequence.count == length for sequence, length in decoder.lengths.items())
    for shard in scheduler.shards:
        assert shard.pool.available == shape.pages and not shard.pool.firm_pages
        assert not shard._reserved() and not shard._promised and not shard._planned
        assert not shard._needs and not shard.unfinished and not shard.tasks
        assert sorted(shard._indices) == list(range(shape.prompts))
        assert not any(any(lane.slots) or lane.queued or lane._slot_counts for lane in shard.lanes)
        assert not any(lane.running or lane._row_count for lane in shard.lanes)
    assert not any(map(scheduler.has_queued, range(len(shape.lanes))))
    assert not scheduler.unfinished and scheduler.plan_prefill() is None
    return decoder


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("steps", [1, 3, 16])
@pytest.mark.parametrize("pages", [12, 16, 400])
def test_all_requests_finish_with_any_pool_size(pages: int, steps: int, shards: int) -> None:
    shape, reused, waited = dataclasses.replace(SHAPE, pages=pages), 0, 0
    for seed in range(3):
        decoder = _simulate(shape, shards, seed, steps)
        reused += sum(shard.reused_tokens for shard in decoder.scheduler.shards)
        waited += decoder.waited
    assert reused > 0
    assert (waited > 0) == (pages < 20), "the case should have sequences that wait for pages"


@pytest.mark.parametrize(
    "sizes",
    [
        {"slots": 1},
        {"slots": 2, "lanes": ((1, 1), (2, 1))},
        {"prompts": 1},
        {"tasks": 1, "slots": 12},
        {"tasks": 30},
        {"lanes": ((3, 4),)},
        {"lanes": ((1, 6), (2, 2), (4, 1))},
    ],
    ids=str,
)
def test_all_requests_finish_with_any_shape(sizes: dict) -> None:
    shape = dataclasses.replace(SHAPE, pages=14, **sizes)
    for shards in (1, 2):
        _simulate(shape, shards, seed=7, steps=3)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("steps", [1, 3, 16])
@pytest.mark.parametrize(
    ("kinds", "pages"),
    [(MIXED, 44), (MIXED, 52), (MIXED, 1200), (WINDOWED, 32), (WINDOWED, 40), (WINDOWED, 800)],
)
def test_all_requests_finish_with_windows(kinds, pages: int, steps: int, shards: int) -> None:
    """A token never sees a page that was released, or that another prompt or answer overwrote."""
    shape, reused, waited = dataclasses.replace(SHAPE, pages=pages, kinds=kinds), 0, 0
    for seed in range(2):
        decoder = _simulate(shape, shards, seed, steps, count=20)
        reused += sum(shard.reused_tokens for shard in decoder.scheduler.shards)
        waited += decoder.waited
    assert reused > 0
    assert (waited > 0) == (pages < 100), "the case should have sequences that wait for pages"


@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 13])
def test_all_requests_finish_with_any_window(window: int, tasks: int) -> None:
    for kinds in ((Kind(window, 1),), (Kind(UNLIMITED, 1), Kind(window, 1), Kind(window + 3, 1))):
        shape = dataclasses.replace(SHAPE, pages=40, tasks=tasks, kinds=kinds)
        _simulate(shape, 1, seed=7, steps=3, count=12)


@pytest.mark.parametrize(("window", "pages"), [(1, 18), (3, 22), (7, 26)])
def test_all_requests_finish_with_pages_for_one_request(window: int, pages: int) -> None:
    """Each page that a prompt keeps for its answers is reserved, also the page in which it ends."""
    for kinds, size in (((Kind(window, 2),), pages), ((Kind(UNLIMITED, 1), Kind(window, 2)), 34)):
        shape = dataclasses.replace(SHAPE, pages=size, tasks=2, kinds=kinds)
        for seed in range(3):
            _simulate(shape, 1, seed, steps=3, count=20)


def test_equal_requests_and_samples_give_equal_plans() -> None:
    for shards, kinds in ((1, SHAPE.kinds), (2, SHAPE.kinds), (1, MIXED)):
        shape = dataclasses.replace(SHAPE, pages=14 if kinds == SHAPE.kinds else 52, kinds=kinds)
        first, second = (_simulate(shape, shards, seed=5, steps=3) for _ in range(2))
        assert len(first.history) > 100
        assert first.history == second.history
        assert first.finished == second.finished
        assert first.history != _simulate(shape, shards, seed=6, steps=3).history
