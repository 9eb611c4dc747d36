"""Tests that memory does not grow and nothing compiles after the first of hundreds of updates."""

from __future__ import annotations

import json

import pytest

from benchmarks import soak
from benchmarks.__main__ import run
from tests import noise

STEPS = soak.SETTLED + 2 * soak.WINDOW


def line(step: int, resident: float, programs: int) -> dict[str, float]:
    process = {"process/resident_mib": resident, "process/programs": programs}
    return {"step": step, "train/empty_update": step % 2, "time/step_seconds": 18.0} | process


def test_soak_measures_compare_settled_memory() -> None:
    """Measure growth after the first steps, without peaks, and the step of the last compilation."""
    lines = [
        line(step, 500 + 300 * (step % 3 > 0), 7 + (step > 60)) for step in range(1, STEPS + 1)
    ]
    lines[10]["process/resident_mib"] = 100
    lines[-2]["process/resident_mib"] = 530
    for late in lines[-50:]:
        late["process/resident_mib"] += 25
    measures = soak.measures(lines)
    assert measures.pop("growth") == pytest.approx(0.05)
    assert measures == {
        "updates": 150,
        "empty": 75,
        "resident_mib": 500,
        "last_mib": 525,
        "most_mib": 825,
        "programs": 8,
        "last_built": 61,
        "hours": pytest.approx(0.75),
    }


def test_soak_with_too_few_steps_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"steps = 149: must be at least 150"):
        run(["soak", "--steps=149"])


@pytest.mark.long
def test_soak_of_500_updates_neither_grows_nor_recompiles(tmp_path, monkeypatch) -> None:
    """The demo's config with few questions on one device, so that it takes minutes."""
    noise.use_one_device(monkeypatch)
    options = ["soak", "--steps=500", "--proposals=3", f"--workdir={tmp_path}"]
    measures = run(options)
    print(json.dumps(measures))
    assert measures["updates"] == 500
    assert measures["growth"] < 0.05
    assert measures["last_built"] <= soak.SETTLED
