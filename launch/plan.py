"""Estimate a run's memory per chip without compiling, and suggest changes if it does not fit.

    python -m launch.plan --config=configs/paper.py:qwen2.5-7b-instruct --topology=v5e-16 \\
        --config.mesh.fsdp=4 --config.mesh.context=4 [--length=16384] [--policy=CONFIG.json] \\
        [--config.X=Y ...]
    python -m launch.plan --config=configs/one_gpu.py:qwen2.5-0.5b-instruct-24gb --topology=l4:1

memory_plan.py says what is exact and what is estimated. If everything fits, the largest batches
that fit are printed, else the changes that help. The exit status is 0 or 1.

With --time, the seconds of a step are printed instead, by phase (step_time.py), and compared with
other layouts of the devices (split_time.py).
"""

from __future__ import annotations

import sys
from typing import Any

import jax
from absl import flags

from spell_jax.launch import aot, dry_step, split_time, step_time, topologies
from spell_jax.launch.memory_plan import PARTS, MemoryPlan
from spell_jax.launch.topologies import GIB
from spell_jax.runtime import entry

# ----------------------------------------------------------------------------------------- Report


def table(plan: MemoryPlan) -> str:
    """Format one line per program, in GiB per chip."""
    lines = ["".join([f"{'':12}", *(f"{name:>13}" for name in PARTS), f"{'total':>10}"])]
    for need in plan.needs:
        cells = "".join(f"{need.parts[name] / GIB:13.2f}" for name in PARTS)
        ending = "" if need.total <= plan.topology.hbm else "  too much"
        lines.append(f"{need.program:12}{cells}{need.total / GIB:10.2f}{ending}")
    return "\n".join(lines)


def describe_plan(plan: MemoryPlan) -> str:
    """Format the whole report of a plan."""
    lines = [
        topologies.describe(plan.topology, plan.programs.meshes),
        f"prompts of {plan.length} tokens, {plan.programs.group} answers of "
        f"{plan.config.sampler.max_tokens}; GiB a chip, activations and logits are estimates",
        "",
        table(plan),
        "",
    ]
    if plan.topology.hbm == topologies.ANY_MEMORY:
        lines.append(f"How much memory {plan.topology.name} has is unknown; give --memory_gib=GIB.")
        return "\n".join(lines)
    if plan.fits:
        lines.append("All fits. The largest batches that do:")
        lines += [f"  --config.{name}={tokens}" for name, tokens in plan.largest().items()]
        return "\n".join(lines)
    lines.append("It does not fit. What would help, one change at a time (its largest total):")
    helpful = [*plan.helpful()]
    for flag, tried in helpful:
        fits = "fits" if tried.fits else ""
        lines.append(f"  {flag:60} {tried.worst.total / GIB:8.2f}  {fits}".rstrip())
    if helpful and not any(tried.fits for _, tried in helpful):
        flag, tried = plan.combined()
        result = "fits" if tried.fits else "is still too much"
        lines += [f"  together ({tried.worst.total / GIB:.2f}, {result}):", f"    {flag}"]
    return "\n".join(
        [*lines, f"  or {'a larger slice' if plan.topology.accelerator else 'more devices'}"]
    )


# Flags: fields of Workload.
_WORKLOAD = ("tokens", "verdict_tokens", "documents", "answered", "mixed")


def define_flags() -> None:
    """Define the flags of topologies.py and aot.py, --time and the assumptions about a step."""
    aot.define_flags()
    flags.DEFINE_boolean("time", False, "Print the seconds of a step instead.")
    flags.DEFINE_integer("tokens", 0, "Mean tokens of a reply; 0: a tenth of the cap.")
    flags.DEFINE_integer("verdict_tokens", 0, "Mean tokens of a verdict; 0: a 64th of the cap.")
    flags.DEFINE_integer("documents", 10, "Documents of the longest prompts.")
    flags.DEFINE_float("answered", 0.5, "Share of the written questions that pass the filters.")
    flags.DEFINE_float("mixed", 1.0, "Share of the questions with right and wrong answers.")


def main(_) -> None:
    jax.config.update("jax_platforms", "cpu")  # a few small arrays; no TPU is claimed for them
    flag_values = flags.FLAGS
    config, policy, topology, length = aot.read_flags()
    if flag_values.time:
        sizes: dict[str, Any] = {name: flag_values[name].value for name in _WORKLOAD}
        work = step_time.workload(config, length, **sizes)
        # Once a plan is built, a mistake of the user would end with a traceback.
        step_time.machine(topology)
        dry_step.check(config, work)
        plan = MemoryPlan(config, policy, topology, length)
        print(step_time.describe_step(plan.programs, topology, work))
        print("\nOther layouts of the same devices, in about a minute:", flush=True)
        print(split_time.describe(plan, work))
        print("Memory: " + ("all programs fit" if plan.fits else "too much (run without --time)"))
        return
    plan = MemoryPlan(config, policy, topology, length)
    print(describe_plan(plan))
    sys.exit(0 if plan.fits else 1)


if __name__ == "__main__":
    define_flags()
    entry.run_main(main)
