"""Tests of what may differ between the layers of a policy: windows and position embeddings."""

from __future__ import annotations

import dataclasses

import pytest

from spell_jax.policy.config import UNLIMITED
from spell_jax.policy.rope import RopeConfig
from tests import tiny

LOCAL = RopeConfig(1e3)
MIXED = dataclasses.replace(
    tiny.POLICY, layers=4, window=6, window_layers=(0, 2), window_rope=LOCAL, unrotated_layers=(3,)
)


def test_layers_have_their_windows_and_ropes() -> None:
    assert MIXED.layer_windows == (6, UNLIMITED, 6, UNLIMITED)
    assert MIXED.layer_ropes == (LOCAL, MIXED.rope, LOCAL, None)
    assert MIXED.ropes == (LOCAL, MIXED.rope, None)
    assert dataclasses.replace(MIXED, window_rope=None).ropes == (MIXED.rope, None)
    assert tiny.POLICY.ropes == (tiny.POLICY.rope,)


def test_first_layers_keep_what_they_have() -> None:
    assert MIXED.with_layers(3).layer_ropes == MIXED.layer_ropes[:3]
    assert MIXED.with_layers(4) == MIXED
    full = dataclasses.replace(MIXED, window_layers=(2,), unrotated_layers=()).with_layers(2)
    assert full == dataclasses.replace(tiny.POLICY, layers=2)


@pytest.mark.parametrize("before", [0, 3, 5, 6, 20])
@pytest.mark.parametrize("tokens", [0, 1, 4, 9])
def test_mean_pairs_are_those_of_the_mask(before: int, tokens: int) -> None:
    def pairs(window: int) -> int:
        positions = range(before, before + tokens)
        return sum(q - window < k <= q for q in positions for k in range(before + tokens))

    full, windowed = pairs(UNLIMITED), pairs(6)
    assert MIXED.mean_pairs(before, tokens) == (2 * full + 2 * windowed) / 4
    assert tiny.POLICY.mean_pairs(before, tokens) == full


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0}, r"policy\.window = 0: must be 1 to 1073741823 if"),
        ({"window": 2**30}, r"policy\.window = 1073741824: must be 1 to"),
        ({"window_layers": (), "window_rope": None}, r"policy\.window = 6: must be .*, else 0"),
        ({"window_layers": (2, 0)}, r"policy\.window_layers = \(2, 0\): must be ascending"),
        ({"window_layers": (0, 0)}, r"policy\.window_layers = \(0, 0\): must be ascending"),
        ({"window_layers": (4,)}, r"policy\.window_layers = \(4,\): .* below policy\.layers = 4"),
        ({"unrotated_layers": (-1,)}, r"policy\.unrotated_layers = \(-1,\): must be"),
        ({"ring": True}, r"policy\.ring = True: must be False in a policy with windows"),
        ({"window": 0, "window_layers": ()}, r"policy\.window_rope: must be None without"),
        ({"score_scale": 0.0}, r"policy\.score_scale = 0\.0: must be above 0"),
        ({"joint_qk_norm": True}, r"policy\.joint_qk_norm = True: needs policy\.qk_norm"),
        ({"norms": "around"}, r"policy\.norms = 'around': must be one of"),
        ({"activation": "relu"}, r"policy\.activation = 'relu': must be one of"),
    ],
)
def test_contradicting_fields_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MIXED, **fields)
