"""Would a run start, and what would it do? Said before any accelerator is asked for.

    python -m launch.check --config=configs/NAME.py [--config.a.b=value ...] \
        [--topology=v5e-16] [--workdir=DIR]

1. Every section of the config goes through the functions that the trainer checks it with, each for
   itself: a mistake in one hides none in another.
2. What several sections make together is looked at where they are right: policy, tokenizer and the
   headers of its weights, the mesh over the topology's devices, sampler and rows on that mesh,
   memory (plan.py), algorithm and data, and what is in the workdir.
3. A topology is a slice of topologies.py, or cpu:N or gpu:N: N devices whose memory is not known.
   Without one the mesh is laid over the fewest devices that it takes.
4. A line a mistake says field, value and what would be right; the exit status is 1. If there is
   none, a table says what the run would do; then come remarks on what is allowed, but perhaps not
   meant; the exit status is 0.

What is computed for shapes is computed on this machine's CPU. Nothing is written.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from absl import app, flags
from etils import epath
from jax.sharding import AbstractMesh, AxisType
from ml_collections import config_flags

from configs import tiny
from launch import plan, topologies
from spell_jax import report
from spell_jax.algorithms import registry as registry
from spell_jax.algorithms.base import RolloutBudget
from spell_jax.data import built
from spell_jax.learner import loss, packing, update
from spell_jax.policy import int8, lora, safetensors, transformer, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import hashes, paths
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime import setup as start
from spell_jax.runtime.checkpoint import CHECKPOINTS_FOLDER
from spell_jax.runtime.config import Config, build, changes
from spell_jax.sampler import kv_cache
from spell_jax.sampler.engine import SamplerConfig
from spell_jax.trainer import build as catalogue
from spell_jax.trainer import state as runs

T = TypeVar("T")

# What a run's own functions raise over a config, over files, and where a library is missing.
_SAID = (ValueError, OSError, ImportError)
_MISTAKES = (*_SAID, TypeError, LookupError, AttributeError)
# Of a device whose memory is not known.
_ANY_MEMORY = sys.maxsize


# ---------------------------------------------------------------------------------------- Mistakes


class Attempts:
    """Calls a run's own functions and keeps what they say against the config.

    Attributes:
      mistakes: "field = value: must be ...", in the order of the calls.
    """

    def __init__(self, config: Config):
        self.mistakes: list[str] = []
        self._config = config

    def __call__(self, field: str, make: Callable[..., T], *given: Any) -> T | None:
        """make(*given); None where it raises, or where something given is None, for then the
        mistake was before. `field` is at fault where a message does not begin with one."""
        if any(value is None for value in given):
            return None
        try:
            return make(*given)
        except _MISTAKES as error:
            said = str(error) if isinstance(error, _SAID) else repr(error)
            line = self._with_field(field, said)
            if line not in self.mistakes:  # two functions may look at the same field
                self.mistakes.append(line)
            return None

    def _with_field(self, field: str, said: str) -> str:
        first = re.match(r"[a-z_]+\b(?=\.| = |:)", said)
        if first and (first[0] in self._config or first[0] in ("topology", "workdir")):
            return said
        return f"{_named(self._config, field)}: {said}"


def _named(config: Config, field: str) -> str:
    """A field by its dotted name with its value; a section without."""
    value = config
    for name in field.split("."):
        value = value.get(name, {})
    return field if hasattr(value, "items") else f"{field} = {value!r}"


@dataclasses.dataclass
class Checked:
    """What was found out about a config; None where a mistake was in the way.

    Attributes:
      config: as given.
      mistakes: what would keep the run from starting, or from learning; lines.
      remarks: what is allowed, but perhaps not meant; lines.
      topology: devices that the mesh was laid over.
      mesh: without devices.
      sampling, layout: sections of the config.
      policy: architecture, as the config changes it.
      plan: memory, with the largest micro-batches that the run has.
      workdir: None if none was given.
      step: of the checkpoint that the run would resume; None: it would begin.
    """

    config: Config
    mistakes: list[str]
    remarks: list[str] = dataclasses.field(default_factory=list)
    topology: topologies.Topology | None = None
    mesh: Any = None
    sampling: SamplerConfig | None = None
    layout: update.PackingConfig | None = None
    policy: PolicyConfig | None = None
    plan: plan.Plan | None = None
    workdir: epath.Path | None = None
    step: int | None = None


# ------------------------------------------------------------------------------- What is looked at


def check(config: Config, topology: str = "", workdir: str = "") -> Checked:
    """Looks at a run's config and folders; touches no accelerator.

    Args:
      config: as spell_jax.train takes it.
      topology: such as "v5e-16", "cpu:8" or "gpu:8"; "": the fewest devices that the mesh takes.
      workdir: the run's; "": there is none yet.
    """
    attempt = Attempts(config)
    found = Checked(config, attempt.mistakes)
    if "algorithm" not in config:
        attempt.mistakes.append(
            "algorithm: is missing; must be there in a config of spell_jax.train "
            "(spell_jax.sft checks a warm start's itself)"
        )
        return found
    found.workdir = attempt("workdir", _open_workdir, workdir or None)
    found.step = attempt("workdir", newest_step, found.workdir)
    attempt("steps", _check_resumed, config, found.workdir, found.step)
    before = len(attempt.mistakes)
    found.sampling = attempt("sampler", build, SamplerConfig, config.sampler, "sampler")
    found.layout = attempt("packing", build, update.PackingConfig, config.packing, "packing")
    attempt("loss", build, loss.LossConfig, config.loss, "loss")
    optimizer, steps = update.OptimizerConfig, {"total_steps": config.steps}
    attempt("optimizer", lambda: build(optimizer, config.optimizer, "optimizer", **steps))
    fields = [name for name, value in config.items() if not hasattr(value, "items")]
    # With the loss, which does not go with every staleness.
    run = attempt("steps", _check_alone, config, (*fields, "loss"))
    algorithm = attempt("algorithm", catalogue.check_algorithm, config.algorithm)
    tokenizer = _check_policy(found, attempt)
    for name in catalogue.model_sections(config):
        attempt(name, _check_alone, config, (name,))
        if name != "policy":
            _check_other(config, name, attempt)
    found.topology = attempt("mesh", find_topology, topology, config.mesh)
    found.mesh = attempt("mesh", _lay_out, config.mesh, found.topology)
    _check_rows(found, attempt)
    if len(attempt.mistakes) == before:
        found.plan = attempt("mesh", _plan, found)
        attempt("mesh", _check_memory, found.plan)
    kind = registry.ALGORITHMS.get(config.algorithm.name, registry.ALGORITHMS["spell"])
    data = attempt("data", lambda: catalogue.check_data(config.data, kind) or True)
    attempt("data.source", _make, config, found.sampling, tokenizer, run, algorithm, data)
    if data and built.is_built(config.data.source):  # whatever else is wrong
        attempt("data.source", built.Built, config.data.source)
    if not attempt.mistakes:
        found.remarks += _remarks(found)
    return found


def _check_alone(config: Config, names: Sequence[str]) -> bool:
    """catalogue.check of some fields, in a config that is right otherwise; it stops at the first
    mistake. True if there is none."""
    right = tiny.get_config()
    with right.unlocked():
        for name in names:
            right[name] = config[name]
    catalogue.check(right)
    return True


def _check_policy(found: Checked, attempt: Attempts) -> Any:
    """Policy and weights; the tokenizer."""
    config, sampling = found.config, found.sampling
    folder = attempt("policy.folder", catalogue.find_policy, config)
    read = attempt("policy.folder", catalogue.read_policy, config, folder)
    if read is None:
        return None
    policy, tokenizer = read
    found.policy = policy
    # As run.begin, which reads no weights otherwise.
    if (found.step is None and not config.init_from) or policy.lora:
        attempt("policy.folder", _check_weights, policy, folder)
    if sampling is not None:
        attempt("sampler", policy.check_length, sampling.longest)
        if sampling.weights_dtype == "int8":
            attempt("sampler", int8.check, policy)
    return tokenizer


def _check_other(config: Config, name: str, attempt: Attempts) -> None:
    """A model of its own that an algorithm has besides the policy."""
    folder = attempt(f"{name}.folder", catalogue.find_policy, config, name)
    read = attempt(f"{name}.folder", catalogue.read_policy, config, folder, name)
    if folder and read:
        attempt(f"{name}.folder", _check_weights, read[0], folder)
    fields = config[name].get("optimizer", {})
    optimizer, steps = update.OptimizerConfig, {"total_steps": config.steps}
    attempt(f"{name}.optimizer", lambda: build(optimizer, fields, f"{name}.optimizer", **steps))


def _check_weights(policy: PolicyConfig, folder: pathlib.Path) -> None:
    """Raises ValueError where headers have a tensor too few, too many or of a wrong shape; without
    weights the run begins with random ones."""
    if not safetensors.has_weights(folder):
        return
    weights.match(policy, *safetensors.scan(folder))


def _check_rows(found: Checked, attempt: Attempts) -> None:
    """What is split over devices, and whether rows hold what is played."""
    attempt("packing", _check_longest, found.layout, found.sampling)
    attempt("mesh", _check_heads, found.policy, found.mesh)
    attempt("mesh", _check_experts, found.policy, found.mesh)
    if found.mesh is None:
        return
    if found.layout is not None:
        attempt("packing", found.layout.check_splits, meshes.context_shards(found.mesh))
    if found.sampling is not None:
        attempt("sampler", found.sampling.shape, found.mesh)


def _make(config: Config, sampling: SamplerConfig, tokenizer: Any, *right: bool) -> None:
    """The algorithm with its data, of sections that are right each for itself."""
    catalogue.check(config)
    catalogue.make(config, tokenizer, sampling.max_prompt)


# ------------------------------------------------------------------------------ Devices and rows


def find_topology(name: str, mesh: Mapping[str, int]) -> topologies.Topology:
    """The slice of that name, or cpu:N or gpu:N; "": the fewest devices that a mesh takes.

    Raises:
      ValueError: there is none.
    """
    if not name:
        sizes = [size for size in mesh.values() if isinstance(size, int) and size > 0]
        return _devices("no topology given", math.prod(sizes))
    if named := re.fullmatch(r"(?:cpu|gpu):([1-9]\d*)", name):
        return _devices(name, int(named[1]))
    try:
        return topologies.find(name)
    except ValueError as error:
        raise ValueError(f"{error}, cpu:N, gpu:N") from error


def _devices(name: str, count: int) -> topologies.Topology:
    """So many devices of which no more is known."""
    return topologies.Topology(name, "", count, (count,), _ANY_MEMORY, "")


def _lay_out(shape: Mapping[str, int], topology: topologies.Topology) -> AbstractMesh:
    sizes = meshes.axis_sizes(dict(shape), topology.chips)
    return AbstractMesh(sizes, meshes.AXES, axis_types=(AxisType.Auto,) * len(sizes))


def _check_heads(policy: PolicyConfig, mesh: Any) -> None:
    count = mesh.shape[meshes.TENSOR]
    if count > 1 and kv_cache.head_split(mesh, policy.heads, policy.kv_heads)[0] is None:
        raise ValueError(
            f"mesh.tensor = {count}: must divide the policy's {policy.heads} heads, and divide or "
            f"be a multiple of its {policy.kv_heads} key heads; else each device attends with all"
        )


def _check_experts(policy: PolicyConfig, mesh: Any) -> None:
    count = mesh.shape[meshes.EXPERT]
    if count > 1 and not policy.experts:
        raise ValueError(
            f"mesh.expert = {count}: must be 1, the policy has no experts (mesh.fsdp splits rows "
            "as well, and weights too)"
        )
    if policy.experts % count:
        raise ValueError(
            f"mesh.expert = {count}: must divide the policy's {policy.experts} experts"
        )


def _check_longest(layout: update.PackingConfig, sampling: SamplerConfig) -> None:
    """Raises ValueError where packing would leave out the longest answer, alone behind its prompt;
    a group that is too long only with all of its answers is split."""
    prompt, largest = sampling.max_prompt, layout.buckets[-1]
    tokens = sampling.max_tokens
    _, refused = packing.split_groups([_group(prompt, tokens, 1, "responder")], largest)
    if refused:
        raise ValueError(
            f"packing.buckets: the largest, ({largest.length}, {largest.answers}), must be at "
            f"least ({prompt + tokens}, {tokens}), sampler.max_prompt + sampler.max_tokens and "
            "sampler.max_tokens; longer answers would be sampled, but not learned from"
        )


def _group(prompt: int, tokens: int, answers: int, role: str) -> packing.Group:
    """A group of so many answers, of which only the lengths matter."""
    return packing.Group(range(prompt), [range(tokens)] * answers, [0.0] * answers, role)


def longest_groups(config: Config, sampling: SamplerConfig) -> list[packing.Group]:
    """The most that an update can be made of: every prompt and answer as long as its cap."""
    groups = []
    for demand in _demands(config)[1]:
        is_verdict = demand.role == "verifier"
        tokens = sampling.max_verdict_tokens if is_verdict else sampling.max_tokens
        group = _group(sampling.max_prompt, tokens, demand.replies, demand.role)
        groups += [group] * demand.learned
    return groups


def _demands(config: Config) -> tuple[str, Sequence[RolloutBudget]]:
    """What the algorithm says of a step, and what it asks for."""
    kind = registry.ALGORITHMS[config.algorithm.name]
    fields = kind.read(registry.own_fields(config.algorithm))
    return kind.says(fields), kind.budgets(fields)


def rows_by_bucket(
    groups: Sequence[packing.Group], layout: update.PackingConfig
) -> Counter[packing.Bucket]:
    """Packed rows of each bucket."""
    if not layout.shared_prefix:
        groups = packing.separate_answers(groups)
    fitting, _ = packing.split_groups(groups, layout.buckets[-1])
    rows = packing.rows_of(fitting, layout.buckets)
    return Counter({bucket: len(some) for bucket, some in rows.items()})


# ------------------------------------------------------------------------------------------ Memory


def _plan(found: Checked) -> plan.Plan:
    """plan.py's, but of the run's own micro-batches: those of the bucket with the most tokens."""
    config, policy, layout, topology = found.config, found.policy, found.layout, found.topology
    assert policy and layout and topology
    budget, shards = layout.token_budget, meshes.row_shards(found.mesh)
    bucket = max(
        layout.buckets,
        key=lambda bucket: packing.row_count(bucket, budget, shards) * bucket.length,
    )
    return plan.Plan(config, policy, topology, config.sampler.max_prompt, bucket)


# What makes a part smaller, of the program that takes most.
_SMALLER = {
    "weights": ("mesh.fsdp", "more, or mesh.context or mesh.tensor"),
    "masters": ("mesh.fsdp", "more, or mesh.context, or policy.lora_rank above 0"),
    "optimizer": ("optimizer.offload", "True"),
    "gradients": ("mesh.fsdp", "more, or mesh.context, or policy.lora_rank above 0"),
    "activations": ("packing.token_budget", "less, or mesh.context more, or policy.remat more"),
    "KV cache": ("sampler.kv_cache_tokens", "less, or sampler.cache_dtype 'int8'"),
    "logits": ("mesh.tensor", "more, or mesh.context"),
}


def _check_memory(made: plan.Plan) -> None:
    if made.fits:
        return
    worst = max(made.needs, key=lambda need: need.total)
    part = max(worst.parts, key=lambda name: worst.parts[name])
    field, right = _SMALLER[part]
    raise ValueError(
        f"{_named(made.config, field)}: {worst.program} takes {worst.total / plan.GIB:.2f} GiB of "
        f"a chip, {worst.parts[part] / plan.GIB:.2f} of them {part}, but {made.topology.name} has "
        f"{made.topology.hbm / plan.GIB:.2f}; must be {right}, or a larger slice (python -m "
        "launch.plan tries such changes)"
    )


# ----------------------------------------------------------------------------------------- Workdir


def _open_workdir(workdir: str) -> epath.Path:
    """A local folder that files can be made in, now or once it is made; others are not tried."""
    path = epath.Path(workdir)
    if paths.is_remote(workdir):
        return path
    try:
        folder = epath.Path(workdir).absolute()
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            return path
    except OSError as error:
        raise ValueError(
            f"workdir = {workdir!r}: must be a folder that files can be made in ({error})"
        ) from error


def newest_step(workdir: epath.Path) -> int | None:
    """The last finished checkpoint's step, or None. A start also hashes its files, and takes the
    one before if they are damaged."""
    found = (workdir / CHECKPOINTS_FOLDER).glob(f"*/{hashes.FILE}")
    names = [path.parent.name for path in found]
    return max((int(name) for name in names if name.isdecimal()), default=None)


def _check_resumed(config: Config, workdir: epath.Path, step: int) -> None:
    """What run.begin refuses, as far as WORKDIR/config.json tells."""
    runs.check_resumed(config, step, _ran_with(workdir))


def _ran_with(workdir: epath.Path) -> dict[str, Any]:
    """The config that a workdir was last started with; empty where none is to be read: the run
    writes it anew."""
    try:
        return json.loads((workdir / start.CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return {}


# ------------------------------------------------------------------------------- What is printed


def _remarks(found: Checked) -> list[str]:
    config, sampling, lines = found.config, found.sampling, []
    assert sampling
    shape = sampling.shape(found.mesh)
    slots = shape.slots * meshes.row_shards(found.mesh)
    if slots != sampling.slots:
        lines.append(
            f"sampler.slots = {sampling.slots}: becomes {slots}, as many for each of "
            f"{found.mesh.size} devices"
        )
    group, (cells, _) = config.algorithm.group_size, shape.lanes[-1]
    field = f"sampler.samples_per_prompt_batch = {sampling.samples_per_prompt_batch}"
    if group > cells:
        lines.append(
            f"{field}: a prompt is read for {cells} answers at once; algorithm.group_size = "
            f"{group} would read it once for all"
        )
    if group < cells:
        lines.append(
            f"{field}: {cells - group} of {cells} places at a prompt stay empty; "
            f"algorithm.group_size = {group} would fill all"
        )
    if found.workdir is not None and found.step is not None:
        changed = changes(config, _ran_with(found.workdir))
        lines += [f"{change} when last started" for change in changed]
    return lines


def describe(found: Checked) -> str:
    """What a run without mistakes would do."""
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
    known = topology.hbm < _ANY_MEMORY
    memory = f"{topology.hbm / plan.GIB:.2f} GiB" if known else "memory that is not known"
    return [f"{topology.name}: devices {topology.chips}, each of {memory}; mesh {sizes or 1}"]


def _describe_step(found: Checked) -> list[str]:
    assert found.sampling
    said, budgets = _demands(found.config)
    lines = [f"{said}, at most, with prompts of up to {found.sampling.max_prompt:,} tokens"]
    for demand in budgets:
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
    is_generated = config.data.source in catalogue.GENERATED
    if is_generated or config.data.validation or config.algorithm.name == "reconstruction":
        names += ["best/"] * bool(config.validate_every)
        names += [report.EVALUATION_FILE] * config.evaluate
    return [f"{found.workdir or 'WORKDIR'}: {', '.join([*names, 'policy/', 'plots/'])}"]


def _describe_start(found: Checked) -> list[str]:
    config = found.config
    if found.workdir is not None and found.step is not None:
        folder = found.workdir / CHECKPOINTS_FOLDER
        return [f"resumes step {found.step} of {folder}, up to {config.steps}"]
    folder = catalogue.find_policy(config)
    if config.init_from:
        path, step = catalogue.find_checkpoint(config.init_from)
        source = f"the weights of {path}, {'its newest step' if step is None else f'step {step}'}"
    elif safetensors.has_weights(folder):
        source = f"the weights of {folder}"
    else:
        source = f"random weights, for {folder} holds none"
    return [f"begins with {source}, {config.steps} steps"]


def main(_) -> None:
    # Shapes need a key and a count or two: those go to the CPU, and no TPU is taken for them.
    jax.config.update("jax_platforms", "cpu")
    given = flags.FLAGS
    found = check(given.config, given.topology, given.workdir)
    if found.mistakes:
        print("\n".join(found.mistakes))
        sys.exit(1)
    print(describe(found))


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "The run's configuration.")
    flags.DEFINE_string("topology", "", "The devices: v5e-16, v5p-32, ..., cpu:N or gpu:N.")
    flags.DEFINE_string("workdir", "", "The run's folder, if there is one yet.")
    flags.mark_flag_as_required("config")
    app.run(main)
