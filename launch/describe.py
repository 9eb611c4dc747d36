"""Description of a checked run: the result of launch/check.py as lines of text."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath

from launch import plan, topologies
from spell_jax import config as configs
from spell_jax.algorithms import registry
from spell_jax.algorithms.base import RolloutBudget
from spell_jax.data.config import GENERATED
from spell_jax.learner import packing
from spell_jax.policy import lora, safetensors, transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import find_folder
from spell_jax.reporting.tables import EVALUATION_FILE
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime import setup as start
from spell_jax.runtime.checkpoint import CHECKPOINTS_FOLDER
from spell_jax.runtime.config import Config
from spell_jax.sampler.config import SamplerConfig

# Stands for the memory of a device of unknown memory.
ANY_MEMORY = sys.maxsize


@dataclasses.dataclass
class Checked:
    """Results of checking a config. A field is None if a mistake prevented its computation.

    Attributes:
      config: the given config.
      mistakes: lines about errors that would stop the run from starting or from training.
      remarks: lines about settings that are allowed but may be unintended.
      topology: devices that the mesh was laid over.
      mesh: abstract mesh, without devices.
      sampling: the config's sampler section.
      layout: the config's packing section.
      policy: architecture, with the config's changes.
      plan: memory plan for the run's largest micro-batches.
      workdir: folder of the run; None if none was given.
      step: step of the checkpoint that the run would resume; None means a fresh start.
    """

    config: Config
    mistakes: list[str]
    remarks: list[str] = dataclasses.field(default_factory=list)
    topology: topologies.Topology | None = None
    mesh: Any = None
    sampling: SamplerConfig | None = None
    layout: packing.PackingConfig | None = None
    policy: PolicyConfig | None = None
    plan: plan.Plan | None = None
    workdir: epath.Path | None = None
    step: int | None = None


def describe(found: Checked) -> str:
    """Describe a run without mistakes, as lines of text."""
    rows = {
        "policy": _describe_policy(found),
        "devices": _describe_devices(found),
        "a step": _describe_step(found),
        "learned": _describe_update(found),
        "memory": _describe_memory(found),
        "writes": _describe_files(found),
        "start": _describe_start(found),
    }
    lines = []
    for name, said in rows.items():
        for number, line in enumerate(said):
            lines.append(f"{'' if number else name:9}{line}".rstrip())
    return "\n".join([*lines, *(f"remark   {line}" for line in found.remarks)])


def _describe_policy(found: Checked) -> list[str]:
    policy = found.policy
    assert policy
    shapes, _ = transformer.abstract_params(policy)
    trained, _ = lora.split(policy, shapes)
    whole, own = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (shapes, trained))
    adapters = f", of which {own:,} in adapters are trained" if policy.lora else ""
    return [f"{whole:,} parameters{adapters}, {policy.layers} layers"]


def _describe_devices(found: Checked) -> list[str]:
    topology, mesh = found.topology, found.mesh
    assert topology
    sizes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    known = topology.hbm < ANY_MEMORY
    memory = f"{topology.hbm / plan.GIB:.2f} GiB" if known else "memory that is not known"
    return [f"{topology.name}: devices {topology.chips}, each of {memory}; mesh {sizes or 1}"]


def _describe_step(found: Checked) -> list[str]:
    assert found.sampling
    summary, limits = budgets(found.config)
    lines = [f"{summary}, at most, with prompts of up to {found.sampling.max_prompt:,} tokens"]
    for demand in limits:
        count = demand.prompts * demand.replies
        of = f": {demand.prompts:,} prompts x {demand.replies}" if demand.replies > 1 else ""
        lines.append(f"  {count:7,} {demand.what}{of}")
    return lines


def _describe_update(found: Checked) -> list[str]:
    config, sampling, layout = found.config, found.sampling, found.layout
    assert sampling and layout
    groups, shards = longest_groups(config, sampling), meshes.row_shards(found.mesh)
    counts = packing.count_answers(groups)
    answers = " + ".join(f"{count:,} {role}" for role, count in counts.items())
    lines = [f"at most {answers} answers, in {len(groups):,} groups; if all were at their caps:"]
    found_rows = rows_by_bucket(groups, layout)
    for bucket in layout.buckets:
        held = packing.row_count(bucket, layout.token_budget, shards)
        rows = found_rows[bucket]
        lines.append(
            f"  {rows:7,} rows of {bucket.length:,} tokens ({bucket.answers:,} of answers): "
            f"{-(-rows // held)} micro-batches of {held}"
        )
    return lines


def _describe_memory(found: Checked) -> list[str]:
    made = found.plan
    assert made
    bucket = made.programs.bucket
    above = f"GiB a device, activations and logits are estimates; rows of {bucket.length:,} tokens"
    return [above, *plan.table(made).splitlines()]


def _describe_files(found: Checked) -> list[str]:
    config, names = found.config, [start.CONFIG_FILE, "metrics.jsonl", "tensorboard/"]
    names += ["episodes/"] * bool(config.episode_characters)
    names += [f"{CHECKPOINTS_FOLDER}/ (every {config.checkpoint_every} steps)"]
    is_generated = config.data.source in GENERATED
    if is_generated or config.data.validation or config.algorithm.name == "reconstruction":
        names += ["best/"] * bool(config.validate_every)
        names += [EVALUATION_FILE] * config.evaluate
    return [f"{found.workdir or 'WORKDIR'}: {', '.join([*names, 'policy/', 'plots/'])}"]


def _describe_start(found: Checked) -> list[str]:
    config = found.config
    if found.workdir is not None and found.step is not None:
        folder = found.workdir / CHECKPOINTS_FOLDER
        return [f"resumes step {found.step} of {folder}, up to {config.steps}"]
    folder = find_folder(config.policy)
    if config.init_from:
        path, step = configs.find_checkpoint(config.init_from)
        source = f"the weights of {path}, {'its newest step' if step is None else f'step {step}'}"
    elif safetensors.has_weights(folder):
        source = f"the weights of {folder}"
    else:
        source = f"random weights, for {folder} holds none"
    return [f"begins with {source}, {config.steps} steps"]


# ---------------------------------------------------------------------------------- Largest update


def dummy_group(prompt: int, tokens: int, answers: int, role: str) -> packing.TrainGroup:
    """A dummy group with the given prompt and answer lengths."""
    return packing.TrainGroup(range(prompt), [range(tokens)] * answers, [0.0] * answers, role)


def longest_groups(config: Config, sampling: SamplerConfig) -> list[packing.TrainGroup]:
    """Groups of the largest possible update, with every prompt and answer at its token cap."""
    groups = []
    for demand in budgets(config)[1]:
        is_verdict = demand.role == "verifier"
        tokens = sampling.max_verdict_tokens if is_verdict else sampling.max_tokens
        group = dummy_group(sampling.max_prompt, tokens, demand.replies, demand.role)
        groups += [group] * demand.trained
    return groups


def budgets(config: Config) -> tuple[str, Sequence[RolloutBudget]]:
    """The algorithm's description of a step, and its rollout budgets."""
    algorithm = registry.read_algorithm(config.algorithm)
    return algorithm.budget_summary(), algorithm.budgets()


def rows_by_bucket(
    groups: Sequence[packing.TrainGroup], layout: packing.PackingConfig
) -> Counter[packing.Bucket]:
    """Count the packed rows of each bucket."""
    if not layout.shared_prefix:
        groups = packing.separate_answers(groups)
    fitting, _ = packing.split_groups(groups, layout.buckets[-1])
    rows = packing.rows_of(fitting, layout.buckets)
    return Counter({bucket: len(some) for bucket, some in rows.items()})
