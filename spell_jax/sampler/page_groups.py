"""Groups of layers that share page numbers, so that layers with a window can give pages back.

1. A page holds C tokens of the S layers of one group. All layers of a group have the same window,
   so a page is out of reach of all of its layers at once.
2. A policy whose layers are alike has one group of all layers. Otherwise S is smaller, and the last
   group of each kind may have unused places, which still take memory.
3. Unused places in groups without a window count four times in the choice of S. These groups hold
   whole prompts, groups with a window only the last tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from spell_jax.policy.config import UNLIMITED, PolicyConfig

MOST_GROUPS = 8  # page tables, and the host's work for them, grow with the number of groups
_FULL_PLACE = 4  # weight of an unused place in a group without a window


@dataclasses.dataclass(frozen=True)
class Kind:
    """Groups of layers with the same window.

    Attributes:
      window: tokens that a query sees, itself included; UNLIMITED without a window.
      groups: number of groups.
    """

    window: int = UNLIMITED
    groups: int = 1


@dataclasses.dataclass(frozen=True)
class PageGroups:
    """Division of a policy's layers into groups.

    Attributes:
      size: layers of a group, S.
      kinds: kinds of groups; groups are numbered in this order.
      group: group of each layer.
      place: place of each layer in its group.
    """

    size: int
    kinds: tuple[Kind, ...]
    group: tuple[int, ...]
    place: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of groups."""
        return count_groups(self.kinds)


def count_groups(kinds: Iterable[Kind]) -> int:
    """Return the number of groups of some kinds."""
    return sum(kind.groups for kind in kinds)


@functools.cache
def page_groups(policy: PolicyConfig) -> PageGroups:
    """Divide the layers of a policy into groups, at most MOST_GROUPS."""
    # Layers without a window first: group 0 holds all pages of a prompt if there are any.
    layers = {window: [] for window in sorted(set(policy.layer_windows), reverse=True)}
    for layer, window in enumerate(policy.layer_windows):
        layers[window].append(layer)

    def groups_of(window: int, size: int) -> int:
        return -(-len(layers[window]) // size)

    def unused(size: int) -> int:
        return sum(
            (groups_of(window, size) * size - len(numbers))
            * (_FULL_PLACE if window == UNLIMITED else 1)
            for window, numbers in layers.items()
        )

    sizes = [
        size
        for size in range(max(map(len, layers.values())), 0, -1)
        if sum(groups_of(window, size) for window in layers) <= MOST_GROUPS
    ]
    size = min(sizes, key=unused)  # the largest of equally good sizes
    kinds = tuple(Kind(window, groups_of(window, size)) for window in layers)
    group, place = [0] * policy.layers, [0] * policy.layers
    first = 0
    for kind in kinds:
        for index, layer in enumerate(layers[kind.window]):
            group[layer], place[layer] = first + index // size, index % size
        first += kind.groups
    return PageGroups(size, kinds, tuple(group), tuple(place))
