"""Tests of launch/split_time.py: the trainer's loop on two meshes, layouts, and the comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from spell_jax.configs import paper
from spell_jax.launch import split_time, step_time, topologies
from spell_jax.launch.memory_plan import MemoryPlan
from spell_jax.launch.split_time import Step, play
from spell_jax.launch.step_time import Phase, Seconds, StepPhases
from spell_jax.runtime import mesh as meshes
from tests import noise
from tests.launch.test_experiments import SHAPES
from tests.launch.test_step_time import SMALL, traced_once  # noqa: F401  # a fixture

SPLIT = {"mesh.rollout_devices": 2, "staleness": 1}


def make_plan(topology: str, length: int = 2048, **fields: Any) -> MemoryPlan:
    """Plan Qwen2.5-7B with small batches."""
    config = paper.get_config("qwen2.5-7b-instruct")
    noise.with_fields(config, SMALL | fields)
    policy = dataclasses.replace(SHAPES["7B"], remat=config.policy.remat)
    return MemoryPlan(config, policy, topologies.find(topology), length)


# ------------------------------------------------------------------------------------------- Loop


def recursion(steps: Sequence[Step], transfer_s: float, staleness: int, every: int) -> float:
    """Return the mean seconds of a step, by when each rollout and update can start."""
    rollout_end, copied = 0.0, [0.0]
    for number, (rollout_s, update_s) in enumerate(steps, 1):
        newest_checkpoint = (number - 1) // every * every
        weights = max(number - 1 - staleness, newest_checkpoint)
        rollout_end = max(rollout_end, copied[weights]) + rollout_s
        copied.append(max(copied[-1], rollout_end) + update_s + transfer_s)
    return copied[-1] / len(steps)


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 7, 1000])
def test_loop_equals_the_recursion_of_its_starts(staleness: int, every: int) -> None:
    steps = [Step(*seconds) for seconds in np.random.default_rng(0).uniform(1, 9, (50, 2))]
    pace = play(steps, 0.5, staleness, every)
    assert pace.step_s == pytest.approx(recursion(steps, 0.5, staleness, every), rel=1e-9)
    sampled, trained = (sum(seconds) for seconds in zip(*steps, strict=True))
    assert pace.sampling_idle == pytest.approx(1 - sampled / pace.step_s / 50)
    assert pace.training_idle == pytest.approx(1 - trained / pace.step_s / 50)


def test_constant_steps_take_the_longer_part() -> None:
    never = 10**6
    for staleness in (1, 2):
        pace = play([Step(4.0, 10.0)] * 1000, 1.0, staleness, never)
        assert pace.step_s == pytest.approx(11, rel=0.01)
        assert pace.sampling_idle == pytest.approx(7 / 11, rel=0.01)
    assert play([Step(10.0, 4.0)] * 1000, 1.0, 1, never).step_s == pytest.approx(10, rel=0.01)
    # In place, neither mesh works during a copy.
    pace = play([Step(10.0, 4.0)] * 1000, 1.0, 1, never, is_in_place=True)
    assert pace.step_s == pytest.approx(11, rel=0.01)
    assert pace.training_idle == pytest.approx(7 / 11, rel=0.01)


def test_no_rollout_runs_ahead_of_a_checkpoint() -> None:
    for is_in_place in (False, True):
        pace = play([Step(4.0, 10.0)] * 10, 1.0, 3, 1, is_in_place)
        assert pace.step_s == pytest.approx(15)


def test_staleness_2_evens_out_long_rollouts() -> None:
    steps = [Step(15.0, 10.0), Step(5.0, 10.0)] * 100
    paces = [play(steps, 0.0, staleness, 10**6).step_s for staleness in (1, 2)]
    assert paces[0] == pytest.approx(12.5, rel=0.02) and paces[1] == pytest.approx(10, rel=0.02)


# ---------------------------------------------------------------------------------------- Layouts


def sizes(layout: split_time.Layout, field: str) -> dict[str, int]:
    """Return the axes of a mesh section that have several devices."""
    axes = {axis: layout.fields[f"{field}.{axis}"] for axis in meshes.AXES}
    return {axis: size for axis, size in axes.items() if size > 1}


def test_freed_devices_are_on_fsdp_or_data() -> None:
    shared, even, quarter, three_quarters = split_time.layouts(
        make_plan("v5p-32", **{"mesh.tensor": 4})
    )
    assert (shared.name, shared.staleness) == ("shared", (0, 1))
    assert (even.name, even.staleness, quarter.name) == ("split 1:1", (1, 2), "split 3:1")
    assert even.fields["mesh.rollout_devices"] == 2 and quarter.fields["mesh.rollout_devices"] == 1
    assert sizes(even, "mesh") == sizes(even, "mesh.rollout") == {"fsdp": 2, "tensor": 4}
    # Three does not divide the width, 3584.
    assert sizes(quarter, "mesh") == {"data": 3, "tensor": 4}
    assert sizes(quarter, "mesh.rollout") == {"tensor": 4}
    assert three_quarters.name == "split 1:3" and three_quarters.fields["mesh.rollout_devices"] == 3
    assert sizes(three_quarters, "mesh") == {"tensor": 4}
    assert sizes(three_quarters, "mesh.rollout") == {"data": 3, "tensor": 4}


def test_axes_shrink_where_they_do_not_divide_the_devices() -> None:
    *_, quarter, _ = split_time.layouts(make_plan("a100-80:8", **{"mesh.tensor": 4}))
    assert sizes(quarter, "mesh") == {"data": 3, "tensor": 2}
    assert sizes(quarter, "mesh.rollout") == {"tensor": 2}


def test_split_of_the_config_has_a_layout_of_its_own() -> None:
    base = make_plan("a100-80:8", **SPLIT, **{"mesh.tensor": 2, "mesh.fsdp": 1, "mesh.data": 3})
    shared, two_of_eight, even, three_quarters = split_time.layouts(base)
    assert (
        sizes(shared, "mesh") == {"fsdp": 4, "tensor": 2}
        and not shared.fields["mesh.rollout_devices"]
    )
    assert (two_of_eight.name, two_of_eight.fields, two_of_eight.staleness) == (
        "config's 6:2",
        {},
        (1,),
    )
    assert (even.name, three_quarters.name) == ("split 1:1", "split 1:3")


def test_slices_without_parts_have_the_shared_layout_alone() -> None:
    layouts = split_time.layouts(make_plan("v5e-16", **{"minibatches": 2}))
    assert next(layouts).staleness == (0,)
    with pytest.raises(ValueError, match=r"mesh.rollout_devices = 2: must be 0 on 4 hosts of TPU"):
        next(layouts)
    assert len([*split_time.layouts(make_plan("l4:1"))]) == 1  # one GPU


def test_transfer_takes_the_gather_and_the_copies() -> None:
    programs = make_plan("v5p-32", **SPLIT, **{"mesh.rollout.tensor": 4}).programs
    topology = topologies.find("v5p-32")
    weights = 2 * 7_615_616_512
    link = topologies.peaks(topology).link * step_time.machine(topology).shares.link
    # Norms, a 10,000th, are on every chip.
    seconds = (weights * 7 / 8 + weights / 8) / link
    assert split_time.transfer_seconds(programs, topology) == pytest.approx(seconds, rel=1e-3)
    # One training chip sends to three sampling chips of its host.
    fields = {"mesh.rollout_devices": 3, "mesh.rollout.data": 3, "mesh.rollout.fsdp": 4}
    programs = make_plan("v5p-32", **SPLIT | fields).programs
    seconds = (weights * 3 / 4 + 3 * weights / 4) / link
    assert split_time.transfer_seconds(programs, topology) == pytest.approx(seconds, rel=1e-3)
    shared = make_plan("v5p-32").programs
    assert split_time.transfer_seconds(shared, topology) == 0.0


# ----------------------------------------------------------------------------------------- Report


def scripted_phases(counts: Any, *_: Any) -> StepPhases:
    """Make a rollout that scales badly, and an update that scales with the training chips."""
    rollout_s, update_s = 40 + 80 / counts.sampling.mesh.size, 960 / counts.mesh.size
    rollout = Phase("responder: decode", 1, Seconds(rollout_s, 0.0, 0.0))
    return StepPhases([rollout], [Phase("update", 1, Seconds(update_s, 0.0, 0.0))])


def read(text: str) -> tuple[dict[str, list[str]], str]:
    """Return the cells of each row by its name, and the last line."""
    head, *rows, best = text.splitlines()
    names = ["rollout", "update", "transfer", "step", "sampling", "training", "memory"]
    assert head.split()[-len(names) :] == names
    return {row[:40].strip(): row[40:].split(maxsplit=6) for row in rows}, best


def test_comparison_prints_a_row_per_layout_and_the_fastest(monkeypatch: Any) -> None:
    monkeypatch.setattr(step_time, "phases", scripted_phases)
    fields = {"mesh.tensor": 4, "sampler.kv_cache_tokens": 2**20, "checkpoint_every": 10**6}
    base = make_plan("v5p-32", **fields)
    work = step_time.workload(base.config, 2048)
    rows, best = read(split_time.describe(base, work))
    for staleness in (0, 1):
        cells = rows[f"shared, staleness {staleness}"]
        assert cells == ["45.0", "60.0", "0.0", "105.0", "fits"]
    # On half of the chips, a rollout takes 50 s and an update 120 s, both at once.
    rollout, update, _, step, *idle, memory = rows["split 1:1, staleness 1"]
    assert (rollout, update, memory) == ("50.0", "120.0", "fits")
    assert 120 < float(step) < 121 and idle == ["58%", "0%"]
    rollout, update, _, step, *_ = rows["split 3:1, staleness 2"]
    assert (rollout, update) == ("60.0", "80.0") and 80 < float(step) < 81
    assert list(rows)[2:] == [
        f"split {ratio}, staleness {k}" for ratio in ("1:1", "3:1", "1:3") for k in (1, 2)
    ]
    assert best.startswith("Best: split 3:1, staleness 1, 1.31 times as fast as shared devices: ")
    assert "--config.mesh.rollout_devices=1" in best and "--config.mesh.rollout.tensor=4" in best
    base.topology = base.topology._replace(hbm=2**30)
    text = split_time.describe(base, work)
    assert text.count(" GiB of 1.0") == 8 and "Best" not in text


def test_layout_that_the_run_cannot_have_is_a_line_of_its_own(monkeypatch: Any) -> None:
    monkeypatch.setattr(step_time, "phases", scripted_phases)
    fields = {"mesh.tensor": 4, "sampler.kv_cache_tokens": 2**20}
    text = split_time.describe(
        base := make_plan("v6e-8", **fields), step_time.workload(base.config, 8)
    )
    assert "\nmesh.rollout_devices = 2: must be 4 on a host of 8 TPU v6 lite; libtpu" in text
    assert "split 1:1, staleness 2" in text and "Best: " in text


@pytest.mark.slow
def test_rollout_and_update_take_longer_on_fewer_devices(monkeypatch: Any) -> None:
    monkeypatch.setattr(split_time, "DRY_STEPS", 1)
    base = make_plan("a100-80:8", **{"mesh.tensor": 4, "sampler.kv_cache_tokens": 2**20})
    rows, _ = read(split_time.describe(base, step_time.workload(base.config, 2048)))
    shared, half, quarter = (
        [float(cell) for cell in rows[f"{name}, staleness 1"][:4]]
        for name in ("shared", "split 1:1", "split 3:1")
    )
    assert shared[0] < half[0] < quarter[0] and shared[1] < quarter[1] < half[1]
    assert half[3] >= max(half[:2]) and quarter[3] >= max(quarter[:2])
