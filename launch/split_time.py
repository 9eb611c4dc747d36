"""Compare devices of their own for rollouts with shared devices, in seconds of a step (--time).

1. Layouts: shared devices; half, a quarter or three quarters of each host's devices for sampling;
   and the config's own split. The axes of each mesh are the config's as far as they divide its
   devices, and the rest is on `fsdp`, or on `data` where it does not divide the weights' width.
2. step_time.py estimates rollout and update of a few dry steps, with other lengths of replies.
3. Many steps with these seconds in random order go through the loop of the trainer
   (trainer/loop.py, trainer/split_rollouts.py), with its staleness and checkpoints (`play`).

Weights are assumed to travel over the links between chips: every training chip receives what it
lacks of all weights, then every sampling chip its part, one after the other. Shared chips run one
program at a time, so with staleness 1 they gain only pauses of the host, which are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from spell_jax.launch import aot, step_time, topologies
from spell_jax.launch.dry_step import Workload
from spell_jax.launch.memory_plan import MemoryPlan
from spell_jax.launch.topologies import GIB
from spell_jax.policy import lora
from spell_jax.runtime import mesh as meshes

DRY_STEPS = 3  # of each layout; the totals of steps differ by a few percent
_PLAYED_STEPS = 60 * DRY_STEPS
_RATIOS = ((1, 1), (3, 1), (1, 3))  # training to sampling devices of each host


class Step(NamedTuple):
    """Seconds of a step's rollout and update."""

    rollout_s: float
    update_s: float


class Pace(NamedTuple):
    """Mean seconds of a step, and the shares of the time in which meshes neither sample nor train.

    Shared devices have no idle shares.
    """

    step_s: float
    sampling_idle: float = 0.0
    training_idle: float = 0.0


class Layout(NamedTuple):
    """Devices that train and devices that sample."""

    name: str
    fields: dict[str, Any]  # of the config, by dotted name
    staleness: tuple[int, ...]  # values to compare


class Comparison(NamedTuple):
    """A layout's estimate with one staleness."""

    name: str
    plan: MemoryPlan
    flags: str
    mean: Step
    transfer_s: float
    pace: Pace


# ------------------------------------------------------------------------------------------- Loop


def play(
    steps: Sequence[Step],
    transfer_s: float,
    staleness: int,
    checkpoint_every: int,
    is_in_place: bool = False,
) -> Pace:
    """Play the trainer's loop on split devices; arguments as in the config."""
    clock = sampled_until = 0.0  # of the thread that trains, and of the thread that samples
    ends: list[float] = []  # of the rollouts that are queued so far

    def queue(last: int) -> None:
        """Queue the rollouts up to step `last`; in place, copy weights first."""
        nonlocal clock, sampled_until
        if len(ends) < last and is_in_place:
            clock += transfer_s
        for step in steps[len(ends) : last]:
            sampled_until = max(sampled_until, clock) + step.rollout_s
            ends.append(sampled_until)

    for number, step in enumerate(steps, 1):
        queue(number)
        clock = max(clock, ends[number - 1])
        next_checkpoint = -(-number // checkpoint_every) * checkpoint_every
        queue(min(number + staleness, next_checkpoint, len(steps)))
        clock += step.update_s + (0.0 if is_in_place else transfer_s)
    idle = (1 - sum(seconds) / clock for seconds in zip(*steps, strict=True))
    return Pace(clock / len(steps), *idle)


def transfer_seconds(programs: aot.RunPrograms, topology: topologies.Topology) -> float:
    """Estimate the seconds of a copy of the trained weights to the sampling mesh; 0 without one."""
    if not programs.meshes.are_split:
        return 0.0
    chip, run_meshes = step_time.machine(topology), programs.meshes
    sampled, _ = lora.split(programs.policy, programs.rollout_params)
    leaves = jax.tree.leaves(programs.trained)
    gathered = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    gathered -= aot.bytes_per_chip(programs.trained)
    received = aot.bytes_per_chip(sampled)
    sent = received * run_meshes.sampling.size / run_meshes.training.size
    return (gathered + max(received, sent)) / (chip.peaks.link * chip.shares.link)


# ---------------------------------------------------------------------------------------- Layouts


def layouts(base: MemoryPlan) -> Iterator[Layout]:
    """Yield the layouts to compare; ValueError if devices of the topology cannot be split."""
    config, topology, sizes = base.config, base.topology, base.programs.mesh.shape
    width, config_devices = base.policy.width, config.mesh.rollout_devices
    host_chips = topology.chips // topology.hosts
    shared = _axes("mesh", sizes, topology.chips, width) if config_devices else {}
    # With several mini-batches, shared devices cannot sample during an update.
    values = (0,) if config.minibatches > 1 else (0, 1)
    yield Layout("shared", shared | {"mesh.rollout_devices": 0}, values)
    if config_devices:
        name = f"config's {host_chips - config_devices}:{config_devices}"
        yield Layout(name, {}, (config.staleness,))
    for trainers, samplers in _RATIOS:
        rollout_devices, remainder = divmod(samplers * host_chips, trainers + samplers)
        if remainder or rollout_devices == config_devices:
            continue
        topologies.check_split(topology, rollout_devices)
        sampling = topology.hosts * rollout_devices
        axes = _axes("mesh", sizes, topology.chips - sampling, width)
        axes |= _axes("mesh.rollout", sizes, sampling, width)
        fields = {"mesh.rollout_devices": rollout_devices, "mesh.transfer": "overlapped"}
        yield Layout(f"split {trainers}:{samplers}", fields | axes, (1, 2))


def _axes(field: str, sizes: Mapping[str, int], chips: int, width: int) -> dict[str, int]:
    """Divide chips over the axes of a mesh section.

    Each axis has as much of its size in `sizes` as divides the chips. The rest is on `fsdp` as far
    as the width of the weights divides, else on `data`.
    """
    axes, left = {}, chips
    for axis in (meshes.EXPERT, meshes.TENSOR, meshes.CONTEXT, "data"):
        axes[axis] = math.gcd(sizes[axis], left)
        left //= axes[axis]
    context = axes[meshes.CONTEXT]
    divisors = [n for n in range(1, left + 1) if left % n == 0]
    fsdp = max(n for n in divisors if n == 1 or width % (n * context) == 0)
    axes |= {"fsdp": fsdp, "data": axes["data"] * left // fsdp}
    return {f"{field}.{axis}": axes[axis] for axis in meshes.AXES}


def compare(base: MemoryPlan, work: Workload, layout: Layout) -> Iterator[Comparison]:
    """Estimate a layout with each staleness; ValueError if the run cannot have the layout."""
    topology, config = base.topology, base.config
    fields = layout.fields
    tried = {value: base.changed(fields | {"staleness": value}) for value in layout.staleness}
    programs = tried[layout.staleness[0]].programs
    counts = step_time.count_programs(programs, topology)
    dry = [step_time.phases(counts, topology, work, seed) for seed in range(DRY_STEPS)]
    seconds = [Step(step.rollout_s, step.update_s) for step in dry]
    mean = Step(*(sum(parts) / len(parts) for parts in zip(*seconds, strict=True)))
    order = np.random.default_rng(0).permutation(_PLAYED_STEPS) % len(seconds)
    transfer_s = transfer_seconds(programs, topology)
    for staleness, memory in tried.items():
        pace = Pace(sum(mean))
        if programs.meshes.are_split:
            is_in_place = memory.config.mesh.transfer == "in_place"
            played = [seconds[number] for number in order]
            pace = play(played, transfer_s, staleness, config.checkpoint_every, is_in_place)
        changes = fields | {"staleness": staleness}
        flags = " ".join(f"--config.{name}={value}" for name, value in changes.items())
        name = f"{layout.name}, staleness {staleness}"
        yield Comparison(name, memory, flags, mean, transfer_s, pace)


# ----------------------------------------------------------------------------------------- Report


def describe(base: MemoryPlan, work: Workload) -> str:
    """Format a line per layout and staleness, and the fastest that fits into memory."""
    names = ("rollout", "update", "transfer", "step", "sampling", "training")
    lines = [f"{f'Seconds (means of {DRY_STEPS} steps), idle shares':40}"]
    lines[0] += "".join(f"{name:>10}" for name in names) + "  memory"
    rows: list[Comparison] = []
    try:
        for layout in layouts(base):
            try:
                compared = list(compare(base, work, layout))
            except ValueError as error:
                lines.append(f"{layout.name}: {error}")
                continue
            rows += compared
            lines += map(_format, compared)
    except ValueError as error:
        lines.append(str(error))
    if fitting := [row for row in rows if row.plan.fits]:
        best = min(fitting, key=lambda row: row.pace.step_s)
        shared_s = min((row.pace.step_s for row in rows if _is_shared(row)), default=math.nan)
        gain = "" if _is_shared(best) else f", {shared_s / best.pace.step_s:.2f} times as fast as "
        lines.append(f"Best: {best.name}{gain}{'shared devices' if gain else ''}: {best.flags}")
    return "\n".join(lines)


def _is_shared(row: Comparison) -> bool:
    return not row.plan.programs.meshes.are_split


def _format(row: Comparison) -> str:
    memory, worst = "fits", row.plan.worst
    if not row.plan.fits:
        hbm = row.plan.topology.hbm
        memory = f"{worst.program} takes {worst.total / GIB:.1f} GiB of {hbm / GIB:.1f}"
    seconds = (row.mean.rollout_s, row.mean.update_s, row.transfer_s, row.pace.step_s)
    cells = "".join(f"{value:10.1f}" for value in seconds)
    if _is_shared(row):
        cells += f"{'':20}"
    else:
        cells += f"{row.pace.sampling_idle:10.0%}{row.pace.training_idle:10.0%}"
    return f"{row.name:40}{cells}  {memory}"
