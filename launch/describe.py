"""Description of a checked run: the result of launch/check.py as lines of text."""

from __future__ import annotations

import dataclasses
import pathlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from launch import plan, topologies
from spell_jax.algorithms.config import AlgorithmConfig
from spell_jax.config import RunConfig, find_checkpoint
from spell_jax.data.samples import Sample
from spell_jax.learner import packing, shapes
from spell_jax.policy import lora, products, transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.formats import safetensors
from spell_jax.reporting.tables import EVALUATION_FILE
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import Config
from spell_jax.runtime.files.paths import CHECKPOINTS_FOLDER, CONFIG_FILE
from spell_jax.sampler.config import SamplerConfig


@dataclasses.dataclass
class Checked:
    """Results of checking a config. A field is None if a mistake prevented its computation."""

    config: Config
    mistakes: list[str]  # errors that would stop the run from starting or from training
    run: RunConfig | None = None  # with stand-ins for wrong fields
    wrong: Collection[str] = ()  # sections of `run` with a mistake
    remarks: list[str] = dataclasses.field(default_factory=list)  # allowed, maybe unintended
    missing: list[str] = dataclasses.field(default_factory=list)  # fields to fill in before the run
    topology: topologies.Topology | None = None
    mesh: Any = None
    folder: pathlib.Path | None = None  # of the policy
    policy: PolicyConfig | None = None  # with the config's changes
    plan: plan.MemoryPlan | None = None  # for the largest micro-batches
    is_evaluated: bool = False  # whether a held-out evaluation was made
    workdir: epath.Path | None = None
    step: int | None = None  # of the checkpoint to resume; None means a fresh start

    def section(self, name: str) -> Any:
        """Return a section of the config, or None if it has a mistake."""
        return None if name in self.wrong else getattr(self.run, name)

    @property
    def context(self) -> int:
        """Shards of a row's tokens; 1 without a mesh."""
        return 1 if self.mesh is None else meshes.context_shards(self.mesh)


def describe(checked: Checked) -> str:
    """Describe a run whose check found no mistakes, as lines of text."""
    run = checked.run
    assert run and checked.policy and checked.topology and checked.plan
    above = "GiB a device, activations and logits are estimates; rows of "
    above += f"{checked.plan.programs.bucket.length:,} tokens"
    rows = {
        "policy": [_describe_policy(checked.policy)],
        "devices": [topologies.describe(checked.topology, checked.mesh)],
        "dtype": _describe_dtype(checked),
        "a step": _describe_step(run),
        "trained": _describe_update(checked, run),
        "memory": [above, *plan.table(checked.plan).splitlines()],
        "writes": [_describe_files(checked)],
        "start": [_describe_start(checked)],
        "remark": checked.remarks,
        "missing": checked.missing,
    }
    return "\n".join(
        f"{'' if number and name not in ('remark', 'missing') else name:9}{line}".rstrip()
        for name, lines in rows.items()
        for number, line in enumerate(lines)
    )


def _describe_policy(policy: PolicyConfig) -> str:
    shapes, _ = transformer.abstract_params(policy)
    trained, _ = lora.split(policy, shapes)
    count, trained_count = (
        sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (shapes, trained)
    )
    adapters = f", of which {trained_count:,} in adapters are trained" if policy.lora else ""
    return f"{count:,} parameters{adapters}, {policy.layers} layers"


def _describe_dtype(checked: Checked) -> Iterator[str]:
    """Yield the dtype in which a run on this machine's CPU computes matrix products."""
    assert checked.topology
    is_here = checked.topology.hbm == topologies.ANY_MEMORY and "gpu" not in checked.topology.name
    if not is_here or jax.default_backend() != "cpu":
        return
    compute_dtype, names = checked.config.policy.compute_dtype, products.bfloat16_instructions()
    if not names:
        suffix = "; this CPU has no fast products of bfloat16"
        yield ("float32" if compute_dtype == "auto" else compute_dtype) + suffix
    elif compute_dtype == "float32":
        yield f"float32; with policy.compute_dtype=auto, bfloat16, faster here ({', '.join(names)})"
    else:
        yield f"bfloat16, which this CPU multiplies faster than float32 ({', '.join(names)})"


def _describe_step(run: RunConfig) -> Iterator[str]:
    longest = f"with prompts of up to {run.sampler.max_prompt:,} tokens"
    yield f"{run.algorithm.budget_summary()}, at most, {longest}"
    for budget in run.algorithm.budgets():
        count = budget.prompts * budget.replies
        of = f": {budget.prompts:,} prompts x {budget.replies}" if budget.replies > 1 else ""
        yield f"  {count:7,} {budget.what}{of}"


def _describe_update(checked: Checked, run: RunConfig) -> Iterator[str]:
    groups = longest_groups(run.algorithm, run.sampler)
    counts = packing.count_answers(groups)
    answers = " + ".join(f"{count:,} {name}" for name, count in counts.items())
    yield f"at most {answers} answers, in {len(groups):,} groups; if all were at their caps:"
    laid_out = lay_out(groups, run.packing, meshes.row_shards(checked.mesh), checked.context)
    batches = Counter((bucket, count) for bucket, count, _ in laid_out)
    for (bucket, count), number in sorted(batches.items(), key=lambda item: item[0][0].length):
        rows = sum(len(rows) for *shape, rows in laid_out if shape == [bucket, count])
        yield (
            f"  {rows:7,} rows of {bucket.length:,} tokens ({bucket.answers:,} of answers):"
            f" {number} micro-batches of {count}"
        )


def _describe_files(checked: Checked) -> str:
    config, names = checked.config, [CONFIG_FILE, "metrics.jsonl", "tensorboard/"]
    names += ["episodes/"] * bool(config.episode_characters)
    names += [f"{CHECKPOINTS_FOLDER}/ (every {config.checkpoint_every} steps)"]
    # Without the policy's tokenizer, the evaluation could not be made.
    if checked.is_evaluated or config.data.validation:
        names += ["best/"] * bool(config.validate_every)
        names += [EVALUATION_FILE] * config.evaluate
    return f"{checked.workdir or 'WORKDIR'}: {', '.join([*names, 'policy/', 'plots/'])}"


def _describe_start(checked: Checked) -> str:
    config, workdir = checked.config, checked.workdir
    if workdir is not None and checked.step is not None:
        folder = workdir / CHECKPOINTS_FOLDER
        return f"resumes step {checked.step} of {folder}, up to {config.steps}"
    folder = checked.folder or config.policy.folder
    if config.init_from:
        path, step = find_checkpoint(config.init_from)
        source = f"the weights of {path}, {'its newest step' if step is None else f'step {step}'}"
    elif checked.folder is None or safetensors.has_weights(checked.folder):
        source = f"the weights of {folder}"
    else:
        source = f"random weights, because {folder} has none"
    return f"from {source}, {config.steps} steps"


def dummy_group(prompt: int, tokens: int, answers: int, name: str) -> packing.TrainGroup:
    """Make a dummy group with the given prompt and answer lengths."""
    samples = [Sample(np.zeros(tokens, np.int32))] * answers
    return packing.TrainGroup(range(prompt), samples, [0.0] * answers, name)


def longest_groups(algorithm: AlgorithmConfig, sampling: SamplerConfig) -> list[packing.TrainGroup]:
    """Make the groups of the largest update: every prompt and every answer has its token cap."""
    groups = []
    for budget in algorithm.budgets():
        tokens = budget.max_tokens or sampling.max_tokens
        group = dummy_group(sampling.max_prompt, tokens, budget.replies, budget.role)
        groups += [group] * budget.trained
    return groups


def lay_out(
    groups: Sequence[packing.TrainGroup],
    layout: packing.PackingConfig,
    row_multiple: int = 1,
    context: int = 1,
) -> list[shapes.MicroRows]:
    """Put groups into micro-batches as the learner does, if no two groups share a prefix."""
    if layout.shared_prefix == "none":
        groups = packing.separate_answers(groups)
    parts, _ = packing.split_groups(groups, layout.largest(context))
    sizes = layout.buckets, layout.token_budget, row_multiple, context
    return packing.lay_out([part.group for part in parts], *sizes, with_trees=False)
