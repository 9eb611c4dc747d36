"""Tests that the simulated mixes are full with chosen shapes, in few programs."""

import pytest

from benchmarks.__main__ import lines
from benchmarks.packing import MIXES


def _by_mix(*flags: str) -> dict[tuple[str, bool], dict]:
    found = lines(["packing", *flags])
    assert len(found) == 2 * len(MIXES)
    return {(line["mix"], line["buckets"] == "auto"): line for line in found}


@pytest.mark.slow
def test_chosen_shapes_fill_each_mix_in_few_programs() -> None:
    found = _by_mix("--steps=6")
    for name in MIXES:
        listed, chosen = found[name, False], found[name, True]
        assert chosen["fill"] > 0.9 and chosen["least_fill"] > 0.85, name
        assert chosen["answer_fill"] > listed["answer_fill"]
        if name.startswith("paper"):
            assert chosen["shapes"] <= listed["shapes"] == 3
    assert found["200_to_2000", False]["fill"] < 0.3 and found["200_to_2000", True]["shapes"] <= 6


@pytest.mark.slow
def test_chosen_shapes_on_many_devices_are_no_emptier_than_listed_buckets() -> None:
    found = _by_mix("--steps=3", "--shards=8", "--context=4")
    for name in MIXES:
        assert found[name, True]["fill"] > found[name, False]["fill"], name
