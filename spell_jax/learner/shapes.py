"""Rows of trees, and the shapes of the micro-batches that hold them.

A shape [rows, T] with A answer tokens per row is a compiled program. With listed buckets, a row
goes to the smallest bucket that holds it, and every micro-batch of a bucket has the same number of
rows (`in_buckets`). With AUTO, the sizes of a step's trees decide (`choose`):

1. T is a rung of a ladder up to the token budget, A is a share of T.
2. For each T and A, trees go first-fit-decreasing into rows. Rows that a shorter rung holds may be
   cut to it. Rows are stacked into micro-batches of at most the token budget.
3. Of the candidates with less than MOST_PADDING, the fewest shapes win, then the longest T and its
   halves in full micro-batches, which other steps are likely to choose too, then the least padding.
   (50 steps of the demo's sizes, budget 6,400: 9 shapes, 95 % filled; by least padding 26, 98 %.)

The choice depends on nothing else, so that a resumed run and all hosts choose the same shapes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from spell_jax.learner.trees import GroupTree, TokenCounts

log = logging.getLogger(__name__)

AUTO = "auto"
MOST_PADDING = 0.15
# Lengths of an octave, as shares of its longest. Neighbors differ by less than 1 / (1 - .15), so
# that one row can hold any small step with less than MOST_PADDING.
_OCTAVE = (1.0, 0.87, 0.76, 0.66, 0.57)
_ANSWER_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
# Cost of an answer slot in slots of a row: the head's product (V D) over the products of the layers
# is .38 for Qwen2.5-0.5B and .08 for 7B.
_ANSWER_COST = 0.25


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The shape of a row: `length` tokens [T], of which at most `answers` [A] are answers."""

    length: int
    answers: int

    def __post_init__(self):
        if not 1 <= self.answers <= self.length:
            raise ValueError(
                f"packing.buckets: ({self.length}, {self.answers}) must be (length, answers) with "
                "1 <= answers <= length"
            )

    @property
    def size(self) -> TokenCounts:
        return TokenCounts(self.length, self.answers)


class MicroRows(NamedTuple):
    """A micro-batch before it is written: `count` rows of a bucket, of which `rows` hold trees."""

    bucket: Bucket
    count: int
    rows: list[list[GroupTree]]


class MicroBatchPrograms:
    """The programs of micro-batches, counted and logged when they are first called."""

    def __init__(self):
        self.seen: set[tuple[str, int, int, int]] = set()  # function, rows, T, A

    def __len__(self) -> int:
        return len(self.seen)

    @contextlib.contextmanager
    def counted(self, name: str, shape: tuple[int, int], answers: int) -> Iterator[None]:
        """Count and log the call of a function if it is the first with its shape."""
        program = name, *shape, answers
        if program in self.seen:
            yield
            return
        # jit compiles within the first call and then dispatches, so the call's time is compile
        # time.
        start = time.perf_counter()
        yield
        self.seen.add(program)
        log.info(
            "packing: first %s of %d rows of %d tokens, %d of answers, took %.1f s to compile; "
            "programs so far: %d",
            *(*program, time.perf_counter() - start, len(self)),
        )


def row_count(bucket: Bucket, token_budget: int, row_multiple: int = 1) -> int:
    """Count the rows of a micro-batch that spends the budget: the largest multiple of
    `row_multiple` that `token_budget` holds, and at least one multiple."""
    return max(1, token_budget // bucket.length // row_multiple) * row_multiple


def first_fit(trees: Sequence[GroupTree], room: TokenCounts) -> list[list[GroupTree]]:
    """Put trees into rows, first fit in order of falling length; ValueError if one does not fit."""
    rows: list[list[GroupTree]] = []
    # What is left of each row. All rows at once: 500 groups would be 100,000 comparisons.
    tokens, answers = (np.full(len(trees), n) for n in (room.tokens, room.answers))
    for tree in sorted(trees, key=lambda tree: (-tree.size.tokens, tree.members)):
        if not tree.size.fits(room):
            raise ValueError(
                f"a group of {tree.size.tokens} tokens, {tree.size.answers} of them of answers, "
                f"does not fit the largest bucket, ({room.tokens}, {room.answers})"
            )
        last = slice(0, len(rows) + 1)  # with an empty row, which always fits
        fits = (tokens[last] >= tree.size.tokens) & (answers[last] >= tree.size.answers)
        place = int(fits.argmax())
        if place == len(rows):
            rows.append([])
        rows[place].append(tree)
        tokens[place] -= tree.size.tokens
        answers[place] -= tree.size.answers
    return rows


def in_buckets(
    trees: Sequence[GroupTree], buckets: Sequence[Bucket], token_budget: int, row_multiple: int = 1
) -> list[MicroRows]:
    """Stack rows of the smallest bucket that holds them; buckets ascend in length."""
    by_bucket: dict[Bucket, list[list[GroupTree]]] = {bucket: [] for bucket in buckets}
    for row in first_fit(trees, buckets[-1].size):
        size = _total(row)
        by_bucket[next(bucket for bucket in buckets if size.fits(bucket.size))].append(row)
    # Every micro-batch of a bucket has all of its rows, some of padding: one program per bucket.
    counts = {bucket: row_count(bucket, token_budget, row_multiple) for bucket in buckets}
    return [
        MicroRows(bucket, counts[bucket], rows[start : start + counts[bucket]])
        for bucket, rows in by_bucket.items()
        for start in range(0, len(rows), counts[bucket])
    ]


# -------------------------------------------------------------------------------------- Ladders


def _unit(length: float, devices: int) -> int:
    # Blocks of attention are multiples of 128, which would be half of a row of 256; a TPU's tiles
    # have up to 16 tokens.
    return math.lcm(128 if length >= 2048 else 16, devices)


def round_up(length: float, devices: int = 1) -> int:
    """Round a length up to the ladder's unit and to equal shares of the context axis."""
    unit = _unit(length, devices)
    return math.ceil(length / unit) * unit


def longest_row(token_budget: int, devices: int = 1) -> int:
    """Return the longest row that AUTO makes: the budget, rounded down; 0 if nothing fits."""
    # A budget below one unit still has a row: rounded down to the devices alone.
    unit = _unit(token_budget, devices)
    return token_budget // unit * unit or token_budget // devices * devices


def lengths(token_budget: int, devices: int = 1) -> dict[int, bool]:
    """Return the rungs of T, descending, and whether each is the longest halved 0 or more times."""
    longest = longest_row(token_budget, devices)
    rungs: dict[int, bool] = {}
    for octave in range(longest.bit_length()):
        for share in _OCTAVE:
            # Rounding may give a length twice; its first place in the order counts.
            length = min(longest, round_up(longest * share / 2**octave, devices))
            rungs.setdefault(length, share == 1.0)
    return rungs


def answer_slots(length: int, devices: int = 1) -> list[int]:
    """Return the rungs of A for rows of a length, ascending up to all of its tokens."""
    # Quarters and halves instead of a fine ladder: each value of A is one more program to compile.
    unit = math.lcm(8, devices)
    rungs = (math.ceil(length * share / unit) * unit for share in _ANSWER_SHARES)
    return sorted({min(length, rung) for rung in rungs})


def bucket_for(length: int, answers: int, devices: int = 1) -> Bucket:
    """Return the row of a length with the least rung that holds the answer tokens."""
    return Bucket(length, next(a for a in answer_slots(length, devices) if a >= answers))


# --------------------------------------------------------------------------------------- Choice


class _Stack(NamedTuple):
    """Rows of one bucket, in micro-batches with these numbers of rows."""

    bucket: Bucket
    rows: list[list[GroupTree]]
    counts: tuple[int, ...]
    # 0: full micro-batches of a halved length, 1: micro-batches of fewer rows, 2: another length.
    rarity: int


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A choice of shapes: a stack for each length; `total_size` is the size of all trees."""

    stacks: tuple[_Stack, ...]
    total_size: TokenCounts

    @property
    def rank(self) -> tuple[float, ...]:
        """Return a key that is least for the best candidate."""
        padding = self._padding()
        # No candidate below the bound: the least padding wins, however rare its shapes are.
        if padding >= MOST_PADDING:
            return 1, padding
        shapes = {(stack.bucket, count) for stack in self.stacks for count in stack.counts}
        # Shapes come first: a compilation takes longer than the micro-batches that padding adds.
        return 0, len(shapes), sum(stack.rarity for stack in self.stacks), padding

    def _padding(self) -> float:
        """Return the share of padding in the tokens, or in tokens and answers, if that is more."""
        tokens = sum(stack.bucket.length * sum(stack.counts) for stack in self.stacks)
        answers = sum(stack.bucket.answers * sum(stack.counts) for stack in self.stacks)
        # Unused answer slots cost time in the head too, but less than a row's slots.
        cost = self.total_size.tokens + _ANSWER_COST * self.total_size.answers
        return 1 - min(self.total_size.tokens / tokens, cost / (tokens + _ANSWER_COST * answers))

    def micro_rows(self) -> Iterator[MicroRows]:
        for stack in self.stacks:
            rows = iter(stack.rows)
            for count in stack.counts:
                yield MicroRows(stack.bucket, count, list(itertools.islice(rows, count)))


def choose(
    trees: Sequence[GroupTree], token_budget: int, row_multiple: int = 1, devices: int = 1
) -> list[MicroRows]:
    """Choose rows and shapes for a step's trees; see the module's docstring.

    T and A are multiples of `devices`, rows of a micro-batch are a multiple of `row_multiple`.
    ValueError if a tree is longer than longest_row.
    """
    if not trees:
        return []
    candidates = _candidates(trees, token_budget, row_multiple, devices)
    return list(min(candidates, key=lambda candidate: candidate.rank).micro_rows())


def _candidates(
    trees: Sequence[GroupTree], token_budget: int, row_multiple: int, devices: int
) -> Iterator[_Candidate]:
    total_size = _total(trees)
    largest = TokenCounts(max(t.size.tokens for t in trees), max(t.size.answers for t in trees))
    rungs = lengths(token_budget, devices)
    # A row that no rung holds is tried in the longest, so that the error names its size.
    fitting = [length for length in rungs if length >= largest.tokens] or [max(rungs)]
    for length in fitting:
        # Answers of the fullest row; as many slots or more give the same rows.
        max_answers = length + 1
        for answers in reversed(answer_slots(length, devices)):
            if answers >= max_answers or largest.answers > answers != length:
                continue
            rows = first_fit(trees, TokenCounts(length, answers))
            sizes = [_total(row) for row in rows]
            max_answers = max(size.answers for size in sizes)
            # 0: all rows keep the length. At most two lengths: each is a shape to compile.
            for shorter in (0, *rungs):
                is_short = [size.tokens <= shorter for size in sizes]
                if shorter and (shorter >= length or all(is_short) or not any(is_short)):
                    continue
                parts = []
                for rung, is_in in ((length, False), (shorter, True)):
                    indices = [
                        i for i, is_row_short in enumerate(is_short) if is_row_short == is_in
                    ]
                    if indices:
                        bucket = bucket_for(rung, max(sizes[i].answers for i in indices), devices)
                        part = [rows[i] for i in indices]
                        parts.append(_stacks(part, bucket, rungs[rung], token_budget, row_multiple))
                yield from (_Candidate(stacks, total_size) for stacks in itertools.product(*parts))


def _stacks(
    rows: list[list[GroupTree]], bucket: Bucket, is_half: bool, token_budget: int, multiple: int
) -> list[_Stack]:
    """Return the ways to stack rows: full micro-batches, even ones, a smaller one at the end."""
    # Full micro-batches have the shape that other steps share. Even ones have one shape and the
    # least padding. A smaller last one costs a second shape and pads least of all.
    full = row_count(bucket, token_budget, multiple)
    batches, (full_batches, remainder) = -(-len(rows) // full), divmod(len(rows), full)
    even = -(-len(rows) // (batches * multiple)) * multiple
    counts = {(full,) * batches, (even,) * batches}
    if remainder:
        counts.add((full,) * full_batches + (-(-remainder // multiple) * multiple,))
    return [
        _Stack(bucket, rows, count, 2 - is_half * (1 + (count[-1] == full)))
        for count in sorted(counts)
    ]


def _total(trees: Sequence[GroupTree]) -> TokenCounts:
    return sum((tree.size for tree in trees), TokenCounts(0, 0))
