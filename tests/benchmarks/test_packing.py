"""Tests that the simulated mixes are full with chosen shapes, in few programs."""

import pytest

from benchmarks.__main__ import lines
from benchmarks.packing import MIXES


def _by_mix(*flags: str) -> dict[tuple[str, bool], dict]:
    mix_lines = lines(["packing", *flags])
    assert len(mix_lines) == 2 * len(MIXES)
    return {(line["mix"], line["buckets"] == "auto"): line for line in mix_lines}


@pytest.mark.slow
def test_chosen_shapes_fill_each_mix_in_few_programs() -> None:
    lines_by_mix = _by_mix("--steps=6")
    for name in MIXES:
        listed_line, chosen_line = lines_by_mix[name, False], lines_by_mix[name, True]
        assert chosen_line["fill"] > 0.9 and chosen_line["least_fill"] > 0.85, name
        assert chosen_line["answer_fill"] > listed_line["answer_fill"]
        if name.startswith("paper"):
            assert chosen_line["shapes"] <= listed_line["shapes"] == 3
    assert (
        lines_by_mix["200_to_2000", False]["fill"] < 0.3
        and lines_by_mix["200_to_2000", True]["shapes"] <= 6
    )


@pytest.mark.slow
def test_chosen_shapes_on_many_devices_are_no_emptier_than_listed_buckets() -> None:
    lines_by_mix = _by_mix("--steps=3", "--shards=8", "--context=4")
    for name in MIXES:
        assert lines_by_mix[name, True]["fill"] > lines_by_mix[name, False]["fill"], name
