"""Tests of the division of layers into page groups."""

import dataclasses

import pytest

from spell_jax.policy.config import UNLIMITED
from spell_jax.sampler.page_groups import Kind, page_groups
from tests import tiny


def _groups(layers: int, window_layers) -> tuple[int, list[tuple[int, int]]]:
    """Return the layers of a group, and the window and groups of each kind."""
    windows = {"window": 512, "window_layers": tuple(window_layers)} if window_layers else {}
    groups = page_groups(dataclasses.replace(tiny.POLICY, layers=layers, **windows))
    assert groups.count == sum(kind.groups for kind in groups.kinds)
    places = list(zip(groups.group, groups.place, strict=True))
    assert len(set(places)) == layers and max(groups.place) < groups.size
    first = 0
    for kind in groups.kinds:
        numbers = [
            layer for layer in range(layers) if first <= groups.group[layer] < first + kind.groups
        ]
        assert [layer in window_layers for layer in numbers] == [kind.window == 512] * len(numbers)
        first += kind.groups
    return groups.size, [(kind.window, kind.groups) for kind in groups.kinds]


def test_layers_that_are_alike_are_one_group() -> None:
    assert _groups(28, []) == (28, [(UNLIMITED, 1)])
    assert _groups(28, range(28)) == (28, [(512, 1)])
    groups = page_groups(dataclasses.replace(tiny.POLICY, layers=3))
    assert groups.kinds == (Kind(),) and groups.place == (0, 1, 2)


@pytest.mark.parametrize(
    ("layers", "every", "size", "full", "windowed"),
    [
        (26, 6, 4, 1, 6),  # Gemma 3 1B: two unused places in a group with a window
        (34, 6, 5, 1, 6),  # 4B
        (48, 6, 8, 1, 5),  # 12B
        (62, 6, 11, 1, 5),  # 27B: one unused place in the group without a window
        (32, 4, 8, 1, 3),  # OLMo 3 7B
        (4, 2, 2, 1, 1),
        (4, 4, 1, 1, 3),
    ],
)
def test_groups_of_layers_with_and_without_a_window(
    layers: int, every: int, size: int, full: int, windowed: int
) -> None:
    window_layers = [layer for layer in range(layers) if (layer + 1) % every]
    assert _groups(layers, window_layers) == (size, [(UNLIMITED, full), (512, windowed)])
