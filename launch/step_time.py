"""Estimate the seconds of a step on a slice, phase by phase (launch.plan --time).

    seconds = max(products / (peak * share), bytes / (bandwidth * share)),

and the same for the links between chips, which prefill and update hide and decoding does not.
1. dry_step.py runs the config's algorithm without models: what the sampler reads and samples, and
   the groups that the update packs, by the learner's own packing.
2. work.py counts a program's operations and bytes on shapes; topologies.PEAKS has the peaks.
3. The shares of the peaks are the constants below; each says where it was measured, or that it is
   assumed. Nothing of this code was run on a TPU.

The host's work between calls and programs' start times are not counted.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from spell_jax.launch import aot, topologies
from spell_jax.launch.dry_step import DryStep, Workload, run_step
from spell_jax.launch.topologies import Peaks
from spell_jax.launch.work import ProgramCounts, Work
from spell_jax.learner import packing, trees
from spell_jax.learner.loss_config import LossConfig
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import Config, build
from spell_jax.sampler.dry import AgentCounts

# ------------------------------------------------------------------------------------ Efficiencies


@dataclasses.dataclass(frozen=True)
class Shares:
    """Shares of a chip's peaks that programs reach.

    Attributes:
      prefill: of the peak operations, in prefill calls.
      update: of the peak operations, in forward and backward passes of training.
      decode: of the peak operations, in products with few rows.
      attention: of the peak operations, in attention kernels of all phases.
      memory: of the memory bandwidth.
      link: of the bandwidth of a chip's links.
      experts: factor of the first three for a mixture of experts.
      hop_s: seconds of one hop of a collective that nothing hides.
    """

    prefill: float
    update: float
    decode: float
    attention: float
    memory: float
    link: float
    experts: float
    hop_s: float


# Prefill of Llama 3 8B by a tuned paged kernel takes at best .73 of a TPU7x's peak, decoding .86 of
# its memory bandwidth (Ragged Paged Attention, arXiv 2604.15464, abstract); prefill of PaLM 540B
# .76 of TPU v4's peak (Pope et al., arXiv 2211.05102, abstract). Ours are not tuned: assumed .6.
_PREFILL, _MEMORY = 0.6, 0.7
# Products with a few hundred rows use a part of the matrix units: assumed. Such passes are bounded
# by bytes.
_DECODE = 0.4
# Our attention kernels have never run on a TPU: assumed. JAX's own one reached 4 % of a v5e with
# its default blocks, before any tuning (github.com/jax-ml/jax/issues/24633).
_ATTENTION = 0.3
# A collective uses the links along its own mesh axis, and slices below a whole pod have no
# wraparound links: assumed.
_LINK = 0.5
# One microsecond a hop (How To Scale Your Model, part 3, jax-ml.github.io/scaling-book/sharding).
_HOP_S = 1e-6
# Mixtral 8x7B against Llama 2 70B, both in MaxText: 52.56 and 65.4 % of v5p, 35.23 and 43.8 % of
# v6e (maxtext.readthedocs.io, "Optimized models tiering").
_EXPERTS = 0.8


def _tpu(update: float) -> Shares:
    return Shares(_PREFILL, update, _DECODE, _ATTENTION, _MEMORY, _LINK, _EXPERTS, _HOP_S)


# Training MFU of MaxText: 64B on 256 v5e 59.9 % (MaxText/configs/v5e); Llama 2 70B on 512 v5p
# 65.4 %, Llama 3.1 8B on 256 v6e 45.5 % ("Optimized models tiering"). MFU does not count what is
# recomputed; here it is counted, so these shares are low.
SHARES = {
    "v4": _tpu(0.6),  # assumed, as v5e
    "v5e": _tpu(0.599),
    "v5p": _tpu(0.654),
    "v6e": _tpu(0.455),
    # Megatron-LM trains a trillion parameters with 52 % of the peak of 3,072 A100 (Narayanan et
    # al., arXiv 2104.04473, abstract). The other shares are assumed.
    "a100-80": Shares(0.5, 0.52, _DECODE, _ATTENTION, _MEMORY, 0.65, _EXPERTS, 2e-6),
}
SHARES |= dict.fromkeys(("a100-40", "l4", "rtx3090", "rtx4090"), SHARES["a100-80"])  # assumed
# Measured on an H200 (launch/experiments/notebooks/h200.md): prefill of 1.5B, the update of 7B with
# remat "block", and the mean of attention forward and backward, over 989 TFLOP/s. The other shares
# are assumed.
SHARES |= dict.fromkeys(
    ("h100", "h200"), Shares(0.41, 0.53, _DECODE, 0.37, _MEMORY, 0.65, _EXPERTS, 2e-6)
)


# ----------------------------------------------------------------------------------------- Seconds


class Machine(NamedTuple):
    """Peaks of a chip, and the shares that programs reach."""

    peaks: Peaks
    shares: Shares

    def seconds(self, kind: str, work: Work, has_experts: bool = False) -> Seconds:
        """Estimate seconds of `work` in a phase of a kind: "prefill", "decode" or "update"."""
        shares, peaks = self.shares, self.peaks
        share = getattr(shares, kind) * (shares.experts if has_experts else 1)
        compute = work.products / share + work.attention / shares.attention
        link = work.link / (peaks.link * shares.link) if work.link else 0.0
        return Seconds(
            compute / peaks.operations,
            work.memory / (peaks.memory * shares.memory),
            link + work.hops * shares.hop_s,
            is_hidden=kind != "decode",
        )


class Seconds(NamedTuple):
    """Seconds that a phase's operations, memory and links need."""

    compute: float
    memory: float
    link: float
    # Whether links work meanwhile: gathers of weights do. In decoding, each product waits for the
    # sum of the product before.
    is_hidden: bool = True

    @property
    def total(self) -> float:
        chip = max(self.compute, self.memory)  # memory and matrix units work at the same time
        return max(chip, self.link) if self.is_hidden else chip + self.link

    @property
    def bound(self) -> str:
        names = {"compute": self.compute, "memory": self.memory, "links": self.link}
        return max(names, key=names.__getitem__)


class Phase(NamedTuple):
    """A row of the table."""

    name: str
    calls: float  # calls of its program, or decode passes
    seconds: Seconds


class StepPhases(NamedTuple):
    """Phases of a step in the order of the table, by the mesh that runs them."""

    rollout: list[Phase]
    update: list[Phase]

    @property
    def rollout_s(self) -> float:
        return sum(phase.seconds.total for phase in self.rollout)

    @property
    def update_s(self) -> float:
        return sum(phase.seconds.total for phase in self.update)


# -------------------------------------------------------------------------------------------- Step


def verdict_cap(config: Config) -> int:
    """Return the most tokens of a verdict."""
    return config.algorithm.get("verifier", {}).get("max_tokens", 0) or config.sampler.max_tokens


def workload(
    config: Config, prompt: int, tokens: int = 0, verdict_tokens: int = 0, **fields: Any
) -> Workload:
    """Make the workload of a step with prompts of `prompt` tokens and replies of mean lengths.

    Where `tokens` or `verdict_tokens` is 0, the mean is assumed: a tenth of the cap, a 64th of the
    cap for verdicts. At the paper's cap of 4,096 these are 409 and 64 tokens.
    """
    tokens = tokens or max(1, config.sampler.max_tokens // 10)
    verdict_tokens = verdict_tokens or max(1, verdict_cap(config) // 64)
    return Workload(prompt, tokens, verdict_tokens, **fields)


def count_programs(programs: aot.RunPrograms, topology: topologies.Topology) -> ProgramCounts:
    """Return the counts of a run's programs on a slice or node."""
    return ProgramCounts(programs, bool(topology.accelerator), len(topology.shape))


def phases(
    counts: ProgramCounts, topology: topologies.Topology, work: Workload, seed: int = 0
) -> StepPhases:
    """Estimate the phases of a step on a slice or node; `seed` is of the replies' lengths."""
    programs = counts.programs
    step, chip = run_step(programs.config, programs.sampler, work, seed), machine(topology)
    has_experts = bool(programs.policy.experts)

    def phase(name: str, kind: str, calls: float, total: Work) -> Phase:
        return Phase(name, calls, chip.seconds(kind, total, has_experts))

    return StepPhases(
        [phase(*row) for row in _rollout_rows(counts.sampling, step)],
        [phase(*row) for row in _update_rows(counts, step)],
    )


# Name, kind, calls and work of a phase.
_Row = tuple[str, str, float, Work]


def _rollout_rows(counts: ProgramCounts, step: DryStep) -> Iterator[_Row]:
    sampler = counts.programs.sampler
    call_tokens = sampler.shards * sampler.shape.tasks * sampler.shape.page_size
    slots = sampler.shards * sampler.shape.slots
    for name, agent_counts in step.counts_by_agent.items():
        prefill = prefill_work(counts, agent_counts, call_tokens)
        yield f"{name}: prefill", "prefill", agent_counts.calls, prefill
        decode = decode_work(counts, agent_counts, slots)
        yield f"{name}: decode", "decode", agent_counts.passes, decode


def _update_rows(counts: ProgramCounts, step: DryStep) -> Iterator[_Row]:
    programs = counts.programs
    batches = micro_batches(programs, step.groups)
    loss = build(LossConfig, programs.config.loss, "loss")
    forward, update = (
        sum((f(*batch).times(n) for batch, n in batches.items()), Work())
        for f in (counts.forward, counts.micro_batch)
    )
    calls = sum(batches.values())
    if loss.old_logprobs == "recompute":
        yield "old logprobs", "update", calls, forward
    if loss.needs_reference:
        yield "reference logprobs", "update", calls, forward
    yield "update", "update", calls, update
    # One cast for the rollout, and one for each mini-batch, which has new weights.
    steps = programs.config.minibatches
    weights = counts.apply().times(steps) + counts.cast().times(1 + steps)
    yield "optimizer, cast", "update", steps, weights


def prefill_work(counts: ProgramCounts, agent_counts: AgentCounts, call_tokens: int) -> Work:
    """Count the work of an agent's share of prefill calls, each of `call_tokens` tokens."""
    if not agent_counts.calls:
        return Work()
    pairs, keys = (
        agent_counts.prompt_pairs / agent_counts.calls,
        agent_counts.prompt_keys / agent_counts.calls,
    )
    return counts.prefill(call_tokens, pairs, keys).times(agent_counts.calls)


def decode_work(counts: ProgramCounts, agent_counts: AgentCounts, slots: int) -> Work:
    """Count the work of an agent's share of decode passes over all slots."""
    return counts.decode_pass(slots).times(agent_counts.passes) + counts.decode_keys(
        agent_counts.pairs, agent_counts.keys
    )


def micro_batches(
    programs: aot.RunPrograms, groups: Sequence[packing.TrainGroup]
) -> Counter[tuple[int, int, float]]:
    """Count micro-batches of the step's update: (tokens, answer slots, mean pairs) -> number.

    Groups are packed as the learner packs, into the config's rows; if a group has an answer that no
    row can hold, into the plan's own rows.
    """
    layout = build(packing.PackingConfig, programs.config.packing, "packing")
    mesh, devices = programs.mesh, meshes.context_shards(programs.mesh)
    is_paired = programs.learner.loss.is_paired
    parts, refused = packing.fit_rows(groups, layout, devices, is_paired)
    if refused:  # the config's rows are for other lengths
        layout = programs.learner.packing
        parts, _ = packing.fit_rows(groups, layout, devices, is_paired)
    fitting = [part.group for part in parts]
    sizes = layout.buckets, layout.token_budget, meshes.row_shards(mesh), devices
    pairs: dict[tuple[int, int], list[float]] = {}
    for bucket, count, rows in packing.lay_out(fitting, *sizes, layout.shared_prefix == "tree"):
        batch = pairs.setdefault((bucket.length * count, bucket.answers * count), [])
        trees_of_rows = [tree for row in rows for tree in row]
        batch.append(sum(tree_pairs(programs.policy, fitting, tree) for tree in trees_of_rows))
    return Counter(
        {
            (*size, sum(batch_pairs) / len(batch_pairs)): len(batch_pairs)
            for size, batch_pairs in pairs.items()
        }
    )


def tree_pairs(
    policy: PolicyConfig, groups: list[packing.TrainGroup], tree: trees.GroupTree
) -> float:
    """Count the pairs of a token and a key that it attends to, as a mean over the layers."""
    pairs = 0.0
    for index, shared in zip(tree.members, tree.shared, strict=True):
        for group in groups[index].segments:
            prompt = len(group.prompt)
            pairs += policy.mean_pairs(shared, prompt - shared)
            lengths = [len(sample.tokens) for sample in group.samples]
            pairs += sum(policy.mean_pairs(prompt, length) for length in lengths)
    return pairs


# ------------------------------------------------------------------------------------------ Report


def machine(topology: topologies.Topology) -> Machine:
    """Return the peaks and shares of a chip; ValueError as topologies.peaks."""
    return Machine(topologies.peaks(topology), SHARES[topology.kind])


def format_phases(step: StepPhases, is_split: bool) -> str:
    """Format one line per phase, and the whole step, or with `is_split` the parts of each mesh."""
    names = ("seconds", "share", "bound by", "compute", "memory", "links", "calls")
    lines = [f"{'':24}" + "".join(f"{name:>10}" for name in names)]
    parts = {"whole step": step.rollout + step.update}
    if is_split:
        parts = {"whole rollout": step.rollout, "whole update": step.update}
    for total, part in parts.items():
        total_seconds = sum(phase.seconds.total for phase in part)
        lines += [_format_phase(phase, total_seconds) for phase in part]
        lines.append(f"{total:24}{total_seconds:10.2f}{1:10.1%}")
    return "\n".join(lines)


def _format_phase(phase: Phase, total_seconds: float) -> str:
    name, calls, seconds = phase
    parts = "".join(f"{part:10.2f}" for part in seconds[:3])
    cells = f"{seconds.total:10.2f}{seconds.total / total_seconds:10.1%}{seconds.bound:>10}"
    return f"{name:24}{cells}{parts}{calls:10,.0f}"


def describe_step(programs: aot.RunPrograms, topology: topologies.Topology, work: Workload) -> str:
    """Format the table, the step in which all answers have their caps, and the assumptions."""
    cap, cap_of_verdicts = programs.config.sampler.max_tokens, verdict_cap(programs.config)
    longest = {"tokens": cap, "verdict_tokens": cap_of_verdicts}
    counts = count_programs(programs, topology)  # traces each program once for both steps
    capped = phases(counts, topology, dataclasses.replace(work, **longest))
    is_split = programs.meshes.are_split
    capped_seconds = f"{capped.rollout_s + capped.update_s:.0f} s"
    if is_split:
        capped_seconds = f"rollout {capped.rollout_s:.0f} s, update {capped.update_s:.0f} s"
    assumptions = ", ".join(f"--{name}={value}" for name, value in dataclasses.asdict(work).items())
    lines = [
        topologies.describe(topology, programs.meshes),
        "",
        format_phases(phases(counts, topology, work), is_split),
        "",
        f"If every answer had {cap} tokens and every verdict "
        f"{cap_of_verdicts}, their caps: {capped_seconds}",
        f"Assumed: {assumptions.replace('--prompt', '--length')}",
        f"Assumed shares of the peaks: {machine(topology).shares}",
        "Not counted: the host between calls, offloading, checkpoints, an external judge. A model "
        "with weights of its own counts as if it had the policy's shape.",
    ]
    return "\n".join(lines)
