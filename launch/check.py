"""Check a run's config and describe the run, before any accelerator is used.

    python -m launch.check --config=configs/NAME.py [--config.a.b=value ...] \\
        [--topology=v5e-16] [--workdir=DIR]

1. `config.collect_mistakes` reads the config. Weights, memory and data are checked for sections
   without a mistake.
2. A topology is a name of topologies.py: a slice, GPUs such as h100:8, gpu:N or cpu:N. If none is
   given, the mesh is laid over the fewest devices that it can use.
3. Each mistake is printed as one line (field, value, remedy), and the exit status is 2. Without
   mistakes, a table describes the run, and remarks point out settings that are allowed but may be
   unintended. The exit status is 1 if documents are not named yet, or one of the paper's models is
   not on this machine (its shape ships with the package), else 0.

Shapes are computed on this machine's CPU. No file is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from absl import flags
from etils import epath
from ml_collections import config_flags

from spell_jax.algorithms.config import AlgorithmConfig
from spell_jax.config import (
    RunConfig,
    check_resumed,
    collect_mistakes,
    find_checkpoint,
    keep_dtypes,
    to_dict,
)
from spell_jax.data import built
from spell_jax.data.config import origin
from spell_jax.data.samples import Sample
from spell_jax.launch import device_checks, plan, topologies
from spell_jax.launch.memory_plan import MemoryPlan
from spell_jax.learner import packing, shapes
from spell_jax.learner.loss_config import LossConfig
from spell_jax.policy import int8, lora, products, transformer, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.formats import safetensors
from spell_jax.policy.model import (
    ModelConfig,
    find_folder,
    is_available,
    known_shape,
    missing_folder_hint,
    read_model,
    shape_policy,
)
from spell_jax.reporting.tables import EVALUATION_FILE
from spell_jax.runtime import entry, setup
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import Config, changes
from spell_jax.runtime.files import hashes, paths
from spell_jax.runtime.files.paths import CHECKPOINTS_FOLDER, CONFIG_FILE, RUN_FILE
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.page_groups import page_groups
from spell_jax.selfplay.given_questions import read_scorable
from spell_jax.trainer import commits
from spell_jax.trainer.build import make_algorithm, make_context

T = TypeVar("T")

# Exceptions whose messages are meant for users: invalid config, file errors, missing library. Any
# other exception of _MISTAKES is printed with its type.
_USER_ERRORS = (ValueError, OSError, ImportError)
_FLAGS = ("topology", "memory_gib", "workdir")  # may be wrong too, beside the config's fields
_MISTAKES = (*_USER_ERRORS, TypeError, LookupError, AttributeError)


@dataclasses.dataclass
class Checked:
    """Results of checking a config. A field is None if a mistake prevented its computation."""

    config: Config
    run: RunConfig | None = None  # with stand-ins for wrong fields
    wrong: Collection[str] = ()  # sections of `run` with a mistake
    mistakes: list[str] = dataclasses.field(default_factory=list)  # would stop or fail the run
    remarks: list[str] = dataclasses.field(default_factory=list)  # allowed, maybe unintended
    missing: list[str] = dataclasses.field(default_factory=list)  # fields to fill in before the run
    topology: topologies.Topology | None = None
    meshes: topologies.Meshes | None = None
    folder: pathlib.Path | None = None  # of the policy
    policy: PolicyConfig | None = None  # with the config's changes
    plan: MemoryPlan | None = None  # for the largest micro-batches
    is_evaluated: bool = False  # whether a held-out evaluation was made
    workdir: epath.Path | None = None
    step: int | None = None  # of the checkpoint to resume; None means a fresh start

    def section(self, name: str) -> Any:
        """Return a section of the config, or None if it has a mistake."""
        return None if name in self.wrong else getattr(self.run, name)

    @property
    def context(self) -> int:
        """Shards of a training row's tokens; 1 without a mesh."""
        return 1 if self.meshes is None else meshes.context_shards(self.meshes.training)

    @property
    def row_shards(self) -> int:
        """Shards of the rows of a training batch."""
        assert self.meshes
        return meshes.row_shards(self.meshes.training)

    def attempt(
        self, field: str, make: Callable[..., T], *arguments: Any, **options: Any
    ) -> T | None:
        """Return make(*arguments, **options), or None if it raises or an argument is None.

        The error is a mistake, one of `field` if its message does not begin with a field.
        """
        if any(value is None for value in arguments):
            return None
        try:
            return make(*arguments, **options)
        except _MISTAKES as error:
            text = str(error) if isinstance(error, _USER_ERRORS) else repr(error)
        first = re.match(r"[a-z_]+\b(?=\.| = |:|\[)", text)
        if not first or first[0] not in (*self.config, *_FLAGS):
            text = f"{device_checks.with_value(self.config, field)}: {text}"
        if text not in self.mistakes:  # two functions may check the same field
            self.mistakes.append(text)
        return None


# ----------------------------------------------------------------------------------------- Checks


def check(
    config: Config, topology: str = "", workdir: str = "", memory_gib: float = 0.0
) -> Checked:
    """Check a run's config and folders without touching an accelerator.

    `topology` and `memory_gib` name the devices (topologies.find); "" means the fewest that the
    mesh can use. `workdir` "" means none yet.
    """
    run, mistakes = collect_mistakes(config)
    wrong = {field.partition(".")[0] for field in mistakes}
    checked = Checked(config, run, wrong)
    if run is None:
        checked.mistakes += mistakes.values()
        return checked
    attempt = checked.attempt
    checked.workdir = attempt("workdir", _open_workdir, workdir or None)
    checked.step = attempt("workdir", newest_step, checked.workdir)
    if checked.workdir and checked.step is not None:
        saved = setup.saved_config(checked.workdir)
        attempt("steps", check_resumed, config, checked.step, saved)
    before = len(checked.mistakes)
    checked.mistakes += [line for line in mistakes.values() if not line.startswith("data.")]
    tokenizer = _check_policy(checked, run.policy)
    attempt("loss", LossConfig.check_policy, checked.section("loss"), checked.policy)
    for name, model in run.models.items():
        folder = _find_here(checked, name)
        shape_and_tokenizer = attempt(f"{name}.folder", read_model, model, folder)
        if shape_and_tokenizer:
            attempt(f"{name}.folder", _check_weights, model.folder, folder)
    check_devices(checked, topology, memory_gib)
    if len(checked.mistakes) == before:
        checked.plan = attempt("mesh", plan_memory, checked, run)
        attempt("mesh", device_checks.check_memory, checked.plan)
    for line in mistakes.values():
        if line.startswith("data."):
            is_missing = line.startswith(("data.source = '': ", "data.questions = '': "))
            (checked.missing if is_missing else checked.mistakes).append(line)
    _check_data(checked, run, tokenizer)
    if not checked.mistakes:
        checked.remarks += _remarks(checked, run)
    return checked


def _check_data(checked: Checked, run: RunConfig, tokenizer: Any) -> None:
    """Read prompts and data as a run's start does; what it would log becomes remarks."""
    attempt = checked.attempt
    attempt("algorithm.prompts", run.algorithm.load_prompts)
    data, algorithm = checked.section("data"), checked.section("algorithm")
    with _logged_warnings() as skipped:
        if data and algorithm:
            if data.questions:
                attempt("data.questions", algorithm.read_questions, data.questions)
            if path := data.validation:
                field = "data.validation"
                attempt(field, read_scorable, path, field, algorithm.extract, algorithm.rule)
        if None not in (tokenizer, checked.section("sampler"), data, algorithm):
            context = attempt("data.source", make_context, run, tokenizer)
            parts = attempt("data.source", make_algorithm, run, context)
            checked.is_evaluated = parts is not None and parts[1] is not None
    checked.remarks += dict.fromkeys(skipped)
    if data and attempt("data.source", built.is_built, origin(data)):  # despite other mistakes
        attempt("data.source", built.BuiltClusters, origin(data))


@contextlib.contextmanager
def _logged_warnings() -> Iterator[list[str]]:
    """Collect the warnings that the package logs, such as skipped lines, and do not show them."""
    lines: list[str] = []
    handler, package = logging.Handler(logging.WARNING), logging.getLogger("spell_jax")
    handler.emit = lambda record: lines.append(record.getMessage())
    propagates, package.propagate = package.propagate, False
    package.addHandler(handler)
    try:
        yield lines
    finally:
        package.removeHandler(handler)
        package.propagate = propagates


def _check_policy(checked: Checked, model: ModelConfig) -> Any:
    """Check the policy and the headers of its weights; return the tokenizer."""
    folder, tokenizer, attempt = _find_here(checked, "policy"), None, checked.attempt
    checked.folder = folder
    if folder is None:
        policy = attempt("policy.folder", shape_policy, model, known_shape(model.folder))
    else:
        policy, tokenizer = attempt("policy.folder", read_model, model, folder) or (None, None)
    if policy is None or "policy" in checked.wrong:
        return None
    checked.policy = policy
    # Same condition as at a run's start in trainer/state.py, which otherwise reads no weights.
    if folder and ((checked.step is None and not checked.config.init_from) or policy.lora):
        attempt("policy.folder", _check_weights, model.folder, folder)
    if sampling := checked.section("sampler"):
        attempt("sampler", policy.check_length, sampling.longest)
        if sampling.weights_dtype == "int8":
            attempt("sampler", int8.check_quantizable, policy, "sampler.weights_dtype")
    # Base models lack a chat template: a mistake of the folder, not of the data that fill it.
    has_chat = attempt("policy.folder", tokenizer.chat, "text") if tokenizer else None
    return tokenizer if has_chat else None


def _find_here(checked: Checked, name: str) -> pathlib.Path | None:
    """Find a model's folder; one of the paper's models may be missing on this machine."""
    field, section = f"{name}.folder", checked.config[name]
    folder = section.get("folder") if hasattr(section, "items") else None
    if not isinstance(folder, str):  # a mistake that config.read has named
        return None
    if is_available(folder) or not known_shape(folder):
        return checked.attempt(field, find_folder, folder, field, with_weights=False)
    checked.missing.append(
        f"{field} = {folder!r}: not on this machine, so that its weights and tokenizer are not "
        f"checked; must be a copy of {pathlib.PurePath(folder).name}'s Hugging Face folder"
        f"{missing_folder_hint(folder)}"
    )
    return None


def _check_weights(source: str, folder: pathlib.Path) -> None:
    """Check tensor names and shapes in the headers of weights, if the folder has weights.

    `source` is the folder as the config names it: the weights of a URL are not fetched.
    """
    if not paths.is_remote(source) and safetensors.has_weights(folder):
        weights.check_headers(folder)


# ------------------------------------------------------------------------------ Devices and memory


def check_devices(checked: Checked, name: str, memory_gib: float = 0.0) -> None:
    """Check that sizes split over the devices and that training rows hold the longest answer."""
    layout, sampling, mesh = map(checked.section, ("packing", "sampler", "mesh"))
    attempt = checked.attempt
    devices = name, memory_gib, checked.config.mesh
    checked.topology = attempt("mesh", device_checks.find_topology, *devices)
    checked.meshes = attempt("mesh", topologies.abstract_meshes, checked.topology, mesh)
    loss = checked.section("loss")
    attempt("packing", _check_longest, layout, sampling, loss, checked.context)
    if checked.meshes is not None:
        for field, mesh in checked.meshes.by_field().items():
            attempt("mesh", device_checks.check_heads, checked.policy, mesh, field)
            attempt("mesh", device_checks.check_experts, checked.policy, mesh, field)
        if layout is not None:
            attempt("packing", layout.check_splits, checked.context)
        if sampling is not None:
            attempt("sampler", sampling.shape, checked.meshes.sampling)


def _check_longest(
    layout: packing.PackingConfig, sampling: SamplerConfig, loss: LossConfig, context: int
) -> None:
    """Check that the largest row holds the longest prompt with a longest answer, or with a pair."""
    prompt, count = sampling.max_prompt, 1 + loss.is_paired
    group = dummy_group(prompt, sampling.max_tokens, count, "longest")
    _, refused = packing.fit_rows([group], layout, context, loss.is_paired)
    answers = f"{'2 x ' * loss.is_paired}sampler.max_tokens"
    total, tokens = group.tokens, group.answer_tokens
    problem = "longer answers would be sampled, but not trained on"
    if refused and layout.listed:
        largest = layout.largest(context)
        raise ValueError(
            f"packing.buckets: the largest, ({largest.length}, {largest.answers}), must be at "
            f"least ({total}, {tokens}), sampler.max_prompt + {answers} and {answers}; {problem}"
        )
    if refused:
        raise ValueError(
            f"packing.token_budget = {layout.token_budget}: must be at least "
            f"{shapes.round_up(total, context)}, sampler.max_prompt + {answers} ({total}) rounded "
            f"up; {problem}"
        )


def plan_memory(checked: Checked, run: RunConfig) -> MemoryPlan:
    """Plan memory (memory_plan.py) for the largest micro-batch that the run may have."""
    config, layout = checked.config, run.packing
    assert checked.policy and checked.topology
    budget, shards = layout.token_budget, checked.row_shards
    bucket = layout.largest(checked.context)
    if layout.listed:
        tokens = {b: shapes.row_count(b, budget, shards) * b.length for b in layout.listed}
        bucket = max(layout.listed, key=tokens.__getitem__)
    else:
        answers = sum(group.answer_tokens for group in longest_groups(run.algorithm, run.sampler))
        # Without budgets the number of answers is unknown: they may fill the row.
        answers = min(answers or bucket.length, bucket.length)
        bucket = shapes.bucket_for(bucket.length, answers, checked.context)
    length = config.sampler.max_prompt
    return MemoryPlan(config, checked.policy, checked.topology, length, bucket)


# ----------------------------------------------------------------------------------------- Workdir


def _open_workdir(workdir: str) -> epath.Path:
    """Check that a local workdir is writable, or can be created; a remote one is not tried."""
    path = epath.Path(workdir)
    if paths.is_remote(workdir):
        return path
    try:
        folder = pathlib.Path(path).absolute()
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            return path
    except OSError as error:
        raise ValueError(f"workdir = {workdir!r}: must be a writable folder ({error})") from error


def newest_step(workdir: epath.Path) -> int | None:
    """Find the step of the last finished checkpoint, or None.

    Hashes no files. A real start does, and uses the previous checkpoint if this one is damaged.
    """
    hash_files = (workdir / CHECKPOINTS_FOLDER).glob(f"*/{hashes.FILE}")
    names = [path.parent.name for path in hash_files]
    return max((int(name) for name in names if name.isdecimal()), default=None)


# ---------------------------------------------------------------------------------------- Remarks


def _remarks(checked: Checked, run: RunConfig) -> list[str]:
    config, sampling, lines = checked.config, run.sampler, []
    kinds = () if checked.policy is None else (page_groups(checked.policy).kinds,)
    assert checked.meshes
    mesh = checked.meshes.sampling
    shape = sampling.shape(mesh, *kinds)
    slots = shape.slots * meshes.row_shards(mesh)
    if slots != sampling.slots:
        lines.append(
            f"sampler.slots = {sampling.slots}: becomes {slots}, the same number on each of "
            f"{mesh.size} devices"
        )
    if checked.policy is not None:
        lines += device_checks.replicated_weights(checked.policy, checked.meshes)
    slots, _ = shape.lanes[-1]
    group = config.algorithm.get("group_size", slots)  # LongPO has one answer after a prompt
    field = f"sampler.samples_per_prompt_batch = {sampling.samples_per_prompt_batch}"
    change = f"algorithm.group_size = {group} would"
    if group > slots:
        read = f"a prompt is read once for every {slots} answers"
        lines.append(f"{field}: {read}; {change} read it once for all")
    if group < slots:
        empty = f"{slots - group} of {slots} slots of a prompt stay empty"
        lines.append(f"{field}: {empty}; {change} fill all")
    if checked.workdir and checked.step is not None:
        before = setup.saved_config(checked.workdir)
        kept_config = commits.keep(keep_dtypes(run, before), before)
        changed = changes(to_dict(kept_config), before)
        lines += [f"{change} when last started" for change in changed]
    return lines


# ------------------------------------------------------------------------------------ Description


def describe(checked: Checked) -> str:
    """Describe a run without mistakes, as lines of text."""
    run = checked.run
    assert run and checked.policy and checked.topology and checked.plan and checked.meshes
    above = "GiB a device, activations and logits are estimates; rows of "
    above += f"{checked.plan.programs.bucket.length:,} tokens"
    rows = {
        "policy": [_describe_policy(checked.policy)],
        "devices": [topologies.describe(checked.topology, checked.meshes)],
        "dtype": _describe_dtype(checked),
        "a step": _describe_step(run),
        "reward": _describe_reward(run),
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
    # Of the base without adapters, because the scales of int8 weights are no parameters.
    base, _ = transformer.abstract_params(dataclasses.replace(policy, lora=None))
    trained, adapters = {}, ""
    if policy.lora:
        trained, _ = lora.split(policy, transformer.abstract_params(policy)[0])
        count = sum(leaf.size for leaf in jax.tree.leaves(trained))
        adapters = f", of which {count:,} in adapters are trained"
        adapters += " over an int8 base" if policy.has_int8_base else ""
    count = sum(leaf.size for leaf in jax.tree.leaves((base, trained)))
    return f"{count:,} parameters{adapters}, {policy.layers} layers"


def _describe_dtype(checked: Checked) -> Iterator[str]:
    """Yield the dtype in which a run on this machine's CPU computes matrix products."""
    assert checked.topology
    is_here = checked.topology.kind in ("cpu", device_checks.NO_TOPOLOGY)
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
    budgets = run.algorithm.budgets()
    if not budgets:  # an algorithm of the user's may have none
        name = type(run.algorithm).__name__
        yield f"an unknown number of samples, because {name} has no budgets, {longest}"
        return
    yield f"{run.algorithm.budget_summary()}, at most, {longest}"
    for budget in budgets:
        count = budget.prompts * budget.replies
        of = f": {budget.prompts:,} prompts x {budget.replies}" if budget.replies > 1 else ""
        yield f"  {count:7,} {budget.what}{of}"


def _describe_reward(run: RunConfig) -> Iterator[str]:
    if own_reward := run.algorithm.load_reward():
        yield f"{own_reward} rewards the answers"


def _describe_update(checked: Checked, run: RunConfig) -> Iterator[str]:
    groups = longest_groups(run.algorithm, run.sampler)
    if not groups:
        yield "an unknown number of groups"
        return
    counts = packing.count_answers(groups)
    answers = " + ".join(f"{count:,} {name}" for name, count in counts.items())
    yield f"at most {answers} answers, in {len(groups):,} groups; if all were at their caps:"
    shards, is_paired = checked.row_shards, run.loss.is_paired
    laid_out = lay_out(groups, run.packing, shards, checked.context, is_paired)
    batches = Counter((bucket, count) for bucket, count, _ in laid_out)
    for (bucket, count), number in sorted(batches.items(), key=lambda item: item[0][0].length):
        rows = sum(len(rows) for *shape, rows in laid_out if shape == [bucket, count])
        yield (
            f"  {rows:7,} rows of {bucket.length:,} tokens ({bucket.answers:,} of answers):"
            f" {number} micro-batches of {count}"
        )


def _describe_files(checked: Checked) -> str:
    config, names = checked.config, [CONFIG_FILE, RUN_FILE, "metrics.jsonl", "tensorboard/"]
    names += ["episodes/"] * bool(config.episode_characters)
    names += [f"{CHECKPOINTS_FOLDER}/ (every {config.checkpoint_every} steps)"]
    # Without the policy's tokenizer, the evaluation could not be made.
    if checked.is_evaluated or config.data.validation:
        names += ["best/"] * bool(config.validate_every)
        names += [EVALUATION_FILE] * (config.evaluate or bool(config.validate_every))
    return f"{checked.workdir or 'WORKDIR'}: {', '.join([*names, 'policy/', 'plots/'])}"


def _describe_start(checked: Checked) -> str:
    config, workdir = checked.config, checked.workdir
    if workdir is not None and checked.step is not None:
        folder = workdir / CHECKPOINTS_FOLDER
        return f"resumes step {checked.step} of {folder}, up to {config.steps}"
    is_url = paths.is_remote(config.policy.folder)
    folder = config.policy.folder if is_url else checked.folder or config.policy.folder
    if config.init_from:
        path, step = find_checkpoint(config.init_from)
        source = f"the weights of {path}, {'its newest step' if step is None else f'step {step}'}"
    elif checked.folder is None or is_url or safetensors.has_weights(checked.folder):
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
    is_paired: bool = False,
) -> list[shapes.MicroRows]:
    """Put groups into micro-batches as the learner does, if no two groups share a prefix."""
    parts, _ = packing.fit_rows(groups, layout, context, is_paired)
    sizes = layout.buckets, layout.token_budget, row_multiple, context
    return packing.lay_out([part.group for part in parts], *sizes, with_trees=False)


def main(_) -> None:
    # Computing shapes creates a few small arrays. They go to the CPU so that no TPU is claimed.
    jax.config.update("jax_platforms", "cpu")
    flag_values = flags.FLAGS
    devices = flag_values.topology or "", flag_values.workdir, flag_values.memory_gib
    checked = check(flag_values.config, *devices)
    if checked.mistakes:
        print("\n".join([*checked.mistakes, *checked.missing, *checked.remarks]))
        sys.exit(entry.EXIT_CODE)
    entry.setup_done()
    print(describe(checked))
    sys.exit(1 if checked.missing else 0)


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "File, or name, of the run's config.")
    topologies.define_flags()
    flags.DEFINE_string("workdir", "", "Folder of the run, if there is one yet.")
    flags.mark_flag_as_required("config")
    entry.run_main(main)
