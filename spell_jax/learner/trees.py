"""Trees of prompts: prompts that begin alike share one copy of their first tokens.

1. Prompts are sorted by their tokens. In this order no earlier prompt shares a longer prefix with a
   prompt than the prompt directly before it. So a tree is a run of the order, depth first.
2. Neighbors share their common prefix if it has at least half of the shorter prompt's tokens. Less,
   such as the first words of a template, would only tie prompts to the same row.
3. A tree that is too large for a row is cut where neighbors share the fewest tokens.

Tree Training (arXiv 2511.00413) packs the turns of agents like this.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """Room of a row, or need of a group: `tokens` counts all tokens, `answers` answer tokens."""

    tokens: int
    answers: int

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.tokens + other.tokens, self.answers + other.answers)

    def fits(self, room: TokenCounts) -> bool:
        return self.tokens <= room.tokens and self.answers <= room.answers


@dataclasses.dataclass(frozen=True)
class GroupTree:
    """Groups of one row, depth first.

    Attributes:
      members: indices of the groups.
      shared: prompt tokens that each group shares with the group before it; 0 for the first.
      size: what the tree needs in a row.
    """

    members: tuple[int, ...]
    shared: tuple[int, ...]
    size: TokenCounts


def single(sizes: Sequence[TokenCounts]) -> list[GroupTree]:
    """Make a tree of each group, without shared tokens."""
    return [GroupTree((index,), (0,), size) for index, size in enumerate(sizes)]


def grow(
    prompts: Sequence[np.ndarray | None], sizes: Sequence[TokenCounts], room: TokenCounts
) -> list[GroupTree]:
    """Grow trees of groups with these prompts, token ids int [P]; None shares nothing.

    `sizes` are the sizes of the groups alone, `room` is the size of a row. A group larger than a
    row is a tree by itself. The order of the groups matters only where prompts are equal.
    """
    # Big-endian bytes sort as the numbers do, and compare faster than lists of Python integers.
    # The index breaks ties, so that equal prompts keep their order.
    keys = [b"" if ids is None else ids.astype(">u4").tobytes() for ids in prompts]
    order = sorted(range(len(prompts)), key=lambda i: (keys[i], i))
    shared = [0, *(common(prompts[a], prompts[b]) for a, b in itertools.pairwise(order))]
    trees, pending_trees = [], [_tree(order, shared[: len(order)], sizes)] if order else []
    while pending_trees:
        # A stack, filled in reverse: trees come out in the order of their prompts.
        tree = pending_trees.pop()
        # A 0 inside says that neighbors share nothing, so they need not stay in one row.
        is_one = 0 not in tree.shared[1:] and tree.size.fits(room)
        if is_one or len(tree.members) == 1:
            trees.append(tree)
        else:
            pending_trees += reversed(_cut(tree, sizes))
    return trees


def common(first: np.ndarray | None, second: np.ndarray | None) -> int:
    """Return the length of two prompts' shared prefix; 0 if under half of the shorter prompt."""
    if first is None or second is None:
        return 0
    size = min(len(first), len(second))
    # A short common prefix saves little, but ties both prompts to one row, which packs worse.
    differ = np.flatnonzero(first[:size] != second[:size])
    length = int(differ[0]) if len(differ) else size
    return length if 2 * length >= size else 0


def _tree(members: Sequence[int], shared: Sequence[int], sizes: Sequence[TokenCounts]) -> GroupTree:
    # Sizes count each prompt whole: subtract the tokens that a group shares with its neighbor.
    total = sum((sizes[index] for index in members), TokenCounts(-sum(shared[1:]), 0))
    return GroupTree(tuple(members), (0, *shared[1:]), total)


def _cut(tree: GroupTree, sizes: Sequence[TokenCounts]) -> list[GroupTree]:
    """Cut a tree in two where the fewest tokens are shared; of equals, nearest to the middle."""
    # Tokens shared at the cut are written twice afterwards, so the cut costs exactly these tokens.
    places = range(1, len(tree.members))
    at = min(places, key=lambda i: (tree.shared[i], abs(2 * i - len(tree.members)), i))
    halves = (slice(0, at), slice(at, None))
    return [_tree(tree.members[half], tree.shared[half], sizes) for half in halves]
