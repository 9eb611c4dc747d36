"""Check a run's config and describe the run, before any accelerator is used.

    python -m launch.check --config=configs/NAME.py [--config.a.b=value ...] \
        [--topology=v5e-16] [--workdir=DIR]

1. Each section of the config is checked on its own by the trainer's functions, so that a mistake
   in one section does not hide a mistake in another.
2. Sections that are valid are then checked together: policy, tokenizer and weight headers, the mesh
   over the topology's devices, sampler and training rows on that mesh, memory (plan.py), algorithm
   and data, and the contents of the workdir.
3. A topology is a slice of topologies.py, or cpu:N or gpu:N for N devices of unknown memory. If
   none is given, the mesh is laid over the fewest devices that it can use.
4. Each mistake is printed as one line (field, value, remedy), and the exit status is 1.
5. Without mistakes, a table describes the run, remarks point out settings that are allowed but may
   be unintended, and the exit status is 0.

Shapes are computed on this machine's CPU. No file is written.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from absl import flags
from etils import epath
from jax.sharding import AbstractMesh, AxisType
from ml_collections import config_flags

from configs import tiny
from launch import plan, topologies
from launch.describe import (
    ANY_MEMORY,
    Checked,
    describe,
    dummy_group,
)
from spell_jax import config as configs
from spell_jax.algorithms import registry as registry
from spell_jax.algorithms.base import AlgorithmConfig
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.data import built
from spell_jax.data.config import DataConfig
from spell_jax.learner import loss, packing
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.policy import int8, safetensors, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import find_folder, read_model
from spell_jax.runtime import entry, hashes, paths
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime import setup as start
from spell_jax.runtime.checkpoint import CHECKPOINTS_FOLDER
from spell_jax.runtime.config import Config, build, changes
from spell_jax.sampler import kv_cache
from spell_jax.sampler.config import SamplerConfig
from spell_jax.trainer import state as runs
from spell_jax.trainer.build import make_algorithm, make_context

T = TypeVar("T")

# Exceptions whose messages are meant for users: invalid config, file errors, missing library. Any
# other exception of _MISTAKES is printed with its type.
_SAID = (ValueError, OSError, ImportError)
_MISTAKES = (*_SAID, TypeError, LookupError, AttributeError)


# ---------------------------------------------------------------------------------------- Mistakes


class Attempts:
    """Collector of the errors that the trainer's functions raise about a config.

    Attributes:
      mistakes: lines such as "field = value: must be ...", in the order of the calls.
    """

    def __init__(self, config: Config):
        self.mistakes: list[str] = []
        self._config = config

    def __call__(self, field: str, make: Callable[..., T], *given: Any) -> T | None:
        """Call make(*given) and record the error if it raises.

        Args:
          field: field to blame if the error message does not begin with one.
          make: function to call.
          *given: its arguments. A None argument means that an earlier step failed; `make` is then
            not called.

        Returns:
          The result, or None if the call failed or was skipped.
        """
        if any(value is None for value in given):
            return None
        try:
            return make(*given)
        except _MISTAKES as error:
            said = str(error) if isinstance(error, _SAID) else repr(error)
            line = self._with_field(field, said)
            if line not in self.mistakes:  # two functions may check the same field
                self.mistakes.append(line)
            return None

    def _with_field(self, field: str, said: str) -> str:
        first = re.match(r"[a-z_]+\b(?=\.| = |:|\[)", said)
        if first and (first[0] in self._config or first[0] in ("topology", "workdir")):
            return said
        return f"{_named(self._config, field)}: {said}"


def _named(config: Config, field: str) -> str:
    """Format a field as "dotted.name = value", and a section as its name alone."""
    value = config
    for name in field.split("."):
        value = value.get(name, {})
    return field if hasattr(value, "items") else f"{field} = {value!r}"


# ----------------------------------------------------------------------------------------- Checks


def check(config: Config, topology: str = "", workdir: str = "") -> Checked:
    """Check a run's config and folders without touching an accelerator.

    Args:
      config: config for spell_jax.train.
      topology: devices, such as "v5e-16", "cpu:8" or "gpu:8"; "" means the fewest devices that the
        mesh can use.
      workdir: folder of the run; "" means none yet.

    Returns:
      The mistakes, and everything that could be computed.
    """
    attempt = Attempts(config)
    found = Checked(config, attempt.mistakes)
    if "algorithm" not in config:
        attempt("algorithm", configs.read, config)
        return found
    found.workdir = attempt("workdir", _open_workdir, workdir or None)
    found.step = attempt("workdir", newest_step, found.workdir)
    attempt("steps", _check_resumed, config, found.workdir, found.step)
    before = len(attempt.mistakes)
    found.sampling = attempt("sampler", build, SamplerConfig, config.sampler, "sampler")
    found.layout = attempt("packing", build, packing.PackingConfig, config.packing, "packing")
    loss_config = attempt("loss", build, loss.LossConfig, config.loss, "loss")
    optimizer, steps = OptimizerConfig, {"total_steps": config.steps}
    attempt("optimizer", lambda: build(optimizer, config.optimizer, "optimizer", **steps))
    fields = [name for name, value in config.items() if not hasattr(value, "items")]
    # A valid loss goes along because not every loss allows every staleness.
    names = (*fields, "loss") if loss_config else fields
    run = attempt("steps", _check_alone, config, names)
    algorithm = attempt("algorithm", registry.read_algorithm, config.algorithm)
    tokenizer = _check_policy(found, attempt)
    for name in configs.model_sections(config):
        attempt(name, _check_alone, config, (name,))
        if name != "policy":
            _check_other(config, name, attempt)
    found.topology = attempt("mesh", find_topology, topology, config.mesh)
    found.mesh = attempt("mesh", _lay_out, config.mesh, found.topology)
    _check_rows(found, attempt)
    if len(attempt.mistakes) == before:
        found.plan = attempt("mesh", _plan, found)
        attempt("mesh", _check_memory, found.plan)
    data = attempt("data", _check_data, config.data, algorithm or SpellConfig())
    attempt(
        "data.source", _make, config, tokenizer, found.sampling, found.mesh, run, algorithm, data
    )
    if data and built.is_built(config.data.source):  # checked despite other mistakes
        attempt("data.source", built.Built, config.data.source)
    if not attempt.mistakes:
        found.remarks += _remarks(found)
    return found


def _check_data(section: Config, algorithm: AlgorithmConfig) -> bool:
    """Check the section `data` for an algorithm; return True.

    Raises:
      ValueError: if a field is invalid, or of a kind that the algorithm does not take.
    """
    data = build(DataConfig, section, "data")
    registry.check_inputs(algorithm, data)
    data.check()
    return True


def _check_alone(config: Config, names: Sequence[str]) -> bool:
    """Check only the named fields, by putting them into an otherwise valid config.

    This is needed because spell_jax.config.read stops at the first mistake.

    Returns:
      True.

    Raises:
      ValueError: if one of the fields is invalid.
    """
    right = tiny.get_config()
    with right.unlocked():
        for name in names:
            right[name] = config[name]
    configs.read(right)
    return True


def _check_policy(found: Checked, attempt: Attempts) -> Any:
    """Check the policy and the headers of its weights; return the tokenizer."""
    config, sampling = found.config, found.sampling
    folder = attempt("policy.folder", find_folder, config.policy)
    read = attempt("policy.folder", read_model, config.policy, folder)
    if read is None:
        return None
    policy, tokenizer = read
    found.policy = policy
    # Same condition as at a run's start in trainer/state.py, which otherwise reads no weights.
    if (found.step is None and not config.init_from) or policy.lora:
        attempt("policy.folder", _check_weights, policy, folder)
    if sampling is not None:
        attempt("sampler", policy.check_length, sampling.longest)
        if sampling.weights_dtype == "int8":
            attempt("sampler", int8.check, policy)
    return tokenizer


def _check_other(config: Config, name: str, attempt: Attempts) -> None:
    """Check a model other than the policy that has its own config section."""
    folder = attempt(f"{name}.folder", find_folder, config[name], name)
    read = attempt(f"{name}.folder", read_model, config[name], folder)
    if folder and read:
        attempt(f"{name}.folder", _check_weights, read[0], folder)
    fields = config[name].get("optimizer", {})
    optimizer, steps = OptimizerConfig, {"total_steps": config.steps}
    attempt(f"{name}.optimizer", lambda: build(optimizer, fields, f"{name}.optimizer", **steps))


def _check_weights(policy: PolicyConfig, folder: pathlib.Path) -> None:
    """Check tensor names and shapes in the weight headers.

    A folder without weights passes: the run then starts from random weights.

    Raises:
      ValueError: if a tensor is missing, unexpected or of the wrong shape.
    """
    if not safetensors.has_weights(folder):
        return
    weights.match(policy, *safetensors.scan(folder))


def _check_rows(found: Checked, attempt: Attempts) -> None:
    """Check that sizes split over the devices and that training rows hold the longest answer."""
    attempt("packing", _check_longest, found.layout, found.sampling)
    attempt("mesh", _check_heads, found.policy, found.mesh)
    attempt("mesh", _check_experts, found.policy, found.mesh)
    if found.mesh is None:
        return
    if found.layout is not None:
        attempt("packing", found.layout.check_splits, meshes.context_shards(found.mesh))
    if found.sampling is not None:
        attempt("sampler", found.sampling.shape, found.mesh)


def _make(config: Config, tokenizer: Any, *right: Any) -> None:
    """Build the algorithm and its data.

    `right` is unused: it lets Attempts skip the call if an earlier check failed.
    """
    read = configs.read(config)
    make_algorithm(read, make_context(read, tokenizer))


# ------------------------------------------------------------------------------ Devices and rows


def find_topology(name: str, mesh: Mapping[str, int]) -> topologies.Topology:
    """Find the devices of a name.

    Args:
      name: name of a slice in topologies.py, cpu:N or gpu:N; "" means the fewest devices that the
        mesh can use.
      mesh: axis name -> size of the config's mesh.

    Returns:
      The topology.

    Raises:
      ValueError: if the name is unknown.
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
    """A topology of `count` devices of unknown kind and memory."""
    return topologies.Topology(name, "", count, (count,), ANY_MEMORY, "")


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


def _check_longest(layout: packing.PackingConfig, sampling: SamplerConfig) -> None:
    """Check that the largest bucket holds the longest prompt followed by one longest answer.

    A group that is too long only with all its answers is no mistake: packing splits it.

    Raises:
      ValueError: if packing would leave the longest answer out.
    """
    prompt, largest = sampling.max_prompt, layout.buckets[-1]
    tokens = sampling.max_tokens
    _, refused = packing.split_groups([dummy_group(prompt, tokens, 1, "responder")], largest)
    if refused:
        raise ValueError(
            f"packing.buckets: the largest, ({largest.length}, {largest.answers}), must be at "
            f"least ({prompt + tokens}, {tokens}), sampler.max_prompt + sampler.max_tokens and "
            "sampler.max_tokens; longer answers would be sampled, but not learned from"
        )


# ------------------------------------------------------------------------------------------ Memory


def _plan(found: Checked) -> plan.Plan:
    """Plan memory (plan.py) for the run's own bucket with the most tokens per micro-batch."""
    config, policy, layout, topology = found.config, found.policy, found.layout, found.topology
    assert policy and layout and topology
    budget, shards = layout.token_budget, meshes.row_shards(found.mesh)
    bucket = max(
        layout.buckets,
        key=lambda bucket: packing.row_count(bucket, budget, shards) * bucket.length,
    )
    return plan.Plan(config, policy, topology, config.sampler.max_prompt, bucket)


# Part of memory (plan.PARTS) -> field whose change makes it smaller, and the right direction. Used
# for the largest part of the program that takes the most memory.
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
    """Check that a local workdir is writable, or can be created; a remote one is not tried.

    Raises:
      ValueError: if no file can be created there.
    """
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
    """Find the step of the last finished checkpoint, or None.

    Unlike a real start, this does not hash the files. A real start uses the previous checkpoint if
    the last one is damaged.
    """
    found = (workdir / CHECKPOINTS_FOLDER).glob(f"*/{hashes.FILE}")
    names = [path.parent.name for path in found]
    return max((int(name) for name in names if name.isdecimal()), default=None)


def _check_resumed(config: Config, workdir: epath.Path, step: int) -> None:
    """Check that the run can resume with this config, as far as WORKDIR/config.json tells.

    Raises:
      ValueError: if the checkpoint is past the config's last step, or has another seed.
    """
    runs.check_resumed(config, step, _ran_with(workdir))


def _ran_with(workdir: epath.Path) -> dict[str, Any]:
    """Read the config that the workdir was last started with.

    An unreadable file gives an empty dict: the run would write it anew.
    """
    try:
        return json.loads((workdir / start.CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return {}


# ---------------------------------------------------------------------------------------- Remarks


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
        changed = changes(configs.to_dict(configs.read(config)), _ran_with(found.workdir))
        lines += [f"{change} when last started" for change in changed]
    return lines


def main(_) -> None:
    # Computing shapes creates a few small arrays. They go to the CPU so that no TPU is claimed.
    jax.config.update("jax_platforms", "cpu")
    given = flags.FLAGS
    found = check(given.config, given.topology, given.workdir)
    if found.mistakes:
        print("\n".join(found.mistakes))
        sys.exit(1)
    entry.setup_done()
    print(describe(found))


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "The run's configuration.")
    flags.DEFINE_string("topology", "", "The devices: v5e-16, v5p-32, ..., cpu:N or gpu:N.")
    flags.DEFINE_string("workdir", "", "The run's folder, if there is one yet.")
    flags.mark_flag_as_required("config")
    entry.run_main(main)
