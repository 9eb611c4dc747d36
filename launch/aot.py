"""Compile a run's programs for a TPU slice or GPU that is absent; report memory and collectives.

    python -m launch.aot --config=configs/paper.py:qwen2.5-7b-instruct --topology=v5e-16 \\
        --config.mesh.fsdp=4 --config.mesh.context=4 [--length=16384] [--phase=all] \\
        [--policy=CONFIG.json] [--layers=2] [--config.X=Y ...]
    python -m launch.aot --program=examples/jitted_step.py --topology=v5e-16

1. The architecture comes from a Hugging Face config.json, which ships for the paper's models. No
   weights are read and no array is allocated: every argument is a shape with a sharding.
2. The trainer's own Learner and Sampler are built on the config's meshes over the slice's devices.
   Their jitted functions are lowered for P = --length prompt tokens and
   G = config.algorithm.group_size answers of S = config.sampler.max_tokens tokens each. A training
   row has P + G S tokens.
3. The phases are "prefill", "decode", "logprob" (the learner's forward pass alone) and "update"
   (two programs, "accumulate" and "apply"). Each program is compiled, on any CPU, and described by
   one line of JSON, with bytes per chip. It fits if it compiles and its peak plus "resident" is at
   most the chip's memory. "resident" is what the trainer holds besides the program's arguments,
   such as float32 master weights and optimizer state during sampling, or copies of the policy.
4. Collectives are counted once per occurrence in the program, with the bytes of their results on
   one chip. Those "in_loops" (the scan over layers, the tokens of an answer) run every iteration.
5. A model with its own config section, such as reward_model, is left out.
6. --program compiles a program of yours instead: a Python file whose function
   `abstract_program(mesh)` returns a jitted function and the shapes of its arguments. The mesh has
   all chips on the axis fsdp.

All programs are tried. The exit status is 0 if all fit, else 1. Nothing here measures speed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import pathlib
import re
import runpy
import sys
import time
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
from absl import app, flags
from ml_collections import config_flags

from spell_jax.algorithms import registry
from spell_jax.config import RunMeshConfig
from spell_jax.launch import topologies
from spell_jax.learner import packing, shapes, update
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.policy import int8, lora, transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import (
    find_folder,
    is_available,
    known_shape,
    missing_folder_hint,
    shape_policy,
)
from spell_jax.runtime import entry
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import Config, build
from spell_jax.runtime.files import paths, remote
from spell_jax.sampler import batching
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.scheduler import Scheduler

log = logging.getLogger("launch.aot")  # __name__ is __main__ when this is the entry

# Program -> phase.
PROGRAMS = {name: name for name in ("prefill", "decode", "logprob")}
PROGRAMS |= {"accumulate": "update", "apply": "update"}
PHASES = tuple(dict.fromkeys(PROGRAMS.values()))
_ERROR_CHARACTERS = 400  # kept of an error: a compiler's message starts with the memory figures


# --------------------------------------------------------------------------------------- Programs


@dataclasses.dataclass(frozen=True)
class Program:
    """One jitted function with its abstract arguments."""

    name: str  # one of PROGRAMS, or a file's
    tokens: tuple[int, ...]  # shape [rows, tokens] of the token array that the program reads
    resident: int  # bytes per chip that the trainer holds during it, besides `arguments`
    function: Any
    arguments: tuple[Any, ...]  # positional ones, trees of jax.ShapeDtypeStruct
    mesh: jax.sharding.Mesh
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # static keyword arguments
    rules: meshes.Rules = meshes.RULES  # logical axis rules that the trainer sets around the call

    def trace(self) -> jax.stages.Traced:
        """Trace the function; the mesh may be abstract."""
        is_abstract = isinstance(self.mesh, jax.sharding.AbstractMesh)
        use_mesh: Any = jax.sharding.use_abstract_mesh if is_abstract else jax.set_mesh
        with use_mesh(self.mesh), nn.logical_axis_rules(self.rules):
            return self.function.trace(*self.arguments, **self.options)

    def lower(self, platforms: tuple[str, ...] | None = None) -> jax.stages.Lowered:
        """Lower for the mesh's devices, or for other platforms (for example "tpu" from a CPU)."""
        traced = self.trace()
        with jax.set_mesh(self.mesh):
            return traced.lower(lowering_platforms=platforms)


def read_policy(config: Config, path: str = "", layers: int = 0) -> PolicyConfig:
    """Read the policy's architecture, without tokenizer and weights, and apply config.policy.

    `path`, a config.json, is by default in config.policy.folder, and for the paper's models not
    needed. `layers` above 0 replaces L.
    """
    folder = config.policy.folder
    is_known = known_shape(folder) is not None  # by its name, without a request
    if not path and paths.is_remote(folder) and not is_known:
        path = f"{folder}/config.json"
    if path or (is_available(folder) and not paths.is_remote(folder)):
        file = remote.fetch(path) if path else find_folder(folder) / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"policy = {str(file)!r}: must be a Hugging Face config.json")
        policy = PolicyConfig.from_hf(file)
    else:
        policy = known_shape(folder)
        if policy is None:
            raise FileNotFoundError(
                f"policy.folder = {folder!r}: no such folder; name a Hugging Face config.json by "
                f"--policy, no weights are needed{missing_folder_hint(folder)}"
            )
    policy = shape_policy(config.policy, policy).with_layers(layers or policy.layers)
    # Without the tokenizer, some row of the embedding counts as padding, as in most public models:
    # which ids a run masks changes constants of the programs, not their memory.
    padding = ((policy.vocab_size - 1, policy.vocab_size),)
    return dataclasses.replace(policy, unused_ids=padding)


class RunPrograms:
    """The jitted programs of a run, with abstract sharded arguments instead of arrays.

    `mesh` may be abstract; `length` is P, at least 1. Training rows have the shape of `bucket`, by
    default one prompt of P tokens with its answers. `rollout_mesh` is the mesh of
    prefill and decode with mesh.rollout_devices; without, they run on `mesh`.
    """

    def __init__(
        self,
        config: Config,
        policy: PolicyConfig,
        mesh: jax.sharding.Mesh,
        length: int,
        bucket: packing.Bucket | None = None,
        rollout_mesh: jax.sharding.Mesh | None = None,
    ):
        """Check the config's sections and build Learner and Sampler."""
        if length < 1:
            raise ValueError(f"length = {length}: must be 1 or more prompt tokens")
        sampling = build(SamplerConfig, config.sampler, "sampler")
        layout = build(packing.PackingConfig, config.packing, "packing")
        optimizer = build(OptimizerConfig, config.optimizer, "optimizer", total_steps=config.steps)
        self.config, self.policy, self.mesh = config, policy, mesh
        self.meshes = topologies.Meshes(mesh, rollout_mesh)
        self.algorithm = registry.read_algorithm(config.algorithm, needs_judge=False)
        self.group = config.algorithm.get("group_size", 2)  # LongPO has pairs
        policy.check_length(length + sampling.max_tokens)
        # Without a shared prefix, each answer has a row of its own.
        answers = sampling.max_tokens * (1 if layout.shared_prefix == "none" else self.group)
        self.bucket = bucket or packing.Bucket(length + answers, answers)
        budget = max(layout.token_budget, self.bucket.length)  # a micro-batch has a row at least
        self.learner = Learner(
            policy,
            optimizer,
            build(LossConfig, config.loss, "loss"),
            dataclasses.replace(layout, buckets=(self.bucket,), token_budget=budget),
            mesh,
            sampling.temperature,
            config.policy.compute_dtype,
            self.algorithm.group_names,
        )
        # Any stop token will do: its id does not change the program.
        self.sampler = Sampler(
            policy,
            dataclasses.replace(sampling, max_prompt=length),
            (0,),
            self.meshes.sampling,
            record_experts=self.learner.loss.routing == "sampled",
            has_dropout=self.algorithm.has_dropout,
        )
        self.lane = self.sampler.shape.lane_of(self.group)
        shapes, axes = transformer.abstract_params(policy)
        dtype = self.learner.compute_dtype.name
        params = jax.eval_shape(functools.partial(int8.cast, dtype=dtype), shapes)
        self.rollout_params, training_params = (
            meshes.with_sharding(params, meshes.shardings(m, axes, shapes))
            for m in (self.meshes.sampling, mesh)
        )
        self.trained, self.frozen = lora.split(policy, training_params)
        self.state = self.learner.fns.abstract_state

    def select(self, phase: str) -> list[Program]:
        """Return the programs of one of PHASES, or of "all"."""
        return [self.program(name) for name in PROGRAMS if phase in ("all", PROGRAMS[name])]

    def program(self, name: str) -> Program:
        """Return one of PROGRAMS."""
        return getattr(self, f"_{name}")()

    def _prefill(self) -> Program:
        sampler = self.sampler
        # The scheduler's own batch of no prompts has the shapes and dtypes of every prefill call.
        scheduler = Scheduler(sampler.shape, sampler.shards)
        prompts: list[Any] = [[]] * sampler.shards
        batch = batching.prompt_pages(scheduler, prompts, sampler.config.max_prompt)
        return self._sampling("prefill", batch.tokens.shape, sampler.prefill, batch)

    def _decode(self) -> Program:
        sampler = self.sampler
        limits = [{} for _ in range(sampler.shards)]
        scheduler = Scheduler(sampler.shape, sampler.shards)
        batch = batching.slots(scheduler, self.lane, limits, 1, sampler.config, sampler.has_dropout)
        program = self._sampling("decode", (len(batch.count), 1), sampler.decode, batch)
        return dataclasses.replace(program, options={"lane": self.lane}, rules=meshes.DECODE_RULES)

    def _sampling(self, name: str, tokens: tuple[int, ...], function, batch) -> Program:
        """Make a sampler program; its arguments are weights, sampler state and call arrays."""
        state = self.sampler_state
        params, resident = self.sampler.abstract_params(self.rollout_params), self._beside_sampling
        if params is not self.rollout_params:  # the full-precision kernels stay resident as well
            resident += bytes_per_chip(int8.kernels(self.rollout_params))
        batch = batching.pack(batch, self.sampler.shards)
        rows = meshes.with_sharding(batch.rows, meshes.by_rows(self.meshes.sampling))
        batch = dataclasses.replace(batch, rows=rows)
        return Program(
            name, tokens, resident, function, (params, state, batch), self.meshes.sampling
        )

    def _logprob(self) -> Program:
        # Recomputed old logprobs and logprobs of a reference model come from this program.
        def score(params, frozen, batch):
            return update.score(self.learner.spec, lora.join(params, frozen), batch)

        batch = self._batch()
        arguments, shape = (self.trained, self.frozen, batch), batch.tokens.shape
        resident = self._state_and_copies
        return Program("logprob", shape, resident, jax.jit(score), arguments, self.mesh)

    def _accumulate(self) -> Program:
        learner, batch = self.learner, self._batch()
        # Only the KL penalty runs the reference inside the update. Preferences and distillation
        # score it before the first micro-batch.
        reference = self.trained if learner.loss.kl_weight else None
        arguments = (self.trained, self.frozen, self.carry(), batch, reference)
        shape, function = batch.tokens.shape, learner.fns.accumulate
        resident = self._state_and_copies
        if self.is_interleaved:
            sampled, _ = lora.split(self.policy, self.rollout_params)
            resident += bytes_per_chip((sampled, self.sampler_state))
        return Program("accumulate", shape, resident, function, arguments, self.mesh)

    def _apply(self) -> Program:
        gradients, sums = self.carry()
        # The state is an argument here. Compute-dtype weights are dropped, and cast anew after it.
        resident = self._copies + bytes_per_chip(self.frozen)
        arguments = (self.state, gradients, sums["loss"])
        return Program("apply", (), resident, self.learner.fns.apply, arguments, self.mesh)

    def _batch(self) -> packing.MicroBatch:
        budget, shards = self.learner.packing.token_budget, meshes.row_shards(self.mesh)
        rows = shapes.row_count(self.bucket, budget, shards)
        batch = packing.empty_micro_batch(self.bucket, rows, self.learner.no_experts)
        return _uniform(batch, meshes.by_rows_and_time(self.mesh))

    def carry(self) -> Any:
        """Return the abstract accumulated gradients and sums, with shardings."""
        gradients, sums = jax.eval_shape(self.learner.fns.empty_carry)
        gradients = meshes.with_sharding(gradients, self.learner.fns.param_shardings)
        return gradients, _uniform(sums, meshes.replicated(self.mesh))

    @property
    def sampler_state(self) -> Any:
        """The sampler's abstract pages and slots, with shardings."""
        state = jax.eval_shape(lambda: self.sampler.init_state(self.learner.compute_dtype))
        return meshes.with_sharding(state, self.sampler.shardings)

    @property
    def _copies(self) -> int:
        """Bytes per chip of the float32 copies of the policy (frozen reader, KL reference).

        The compute-dtype policy is among a program's arguments (SharedParams, trainer/state.py).
        """
        copies = self.learner.loss.needs_reference + len(self.algorithm.frozen_copies)
        return copies * bytes_per_chip(self.state.params)

    @property
    def _state_and_copies(self) -> int:
        return bytes_per_chip(self.state) + self._copies

    @property
    def is_interleaved(self) -> bool:
        """Whether a rollout runs between the micro-batches of an update, on the same chips."""
        return bool(self.config.staleness) and not self.meshes.are_split

    @property
    def _beside_sampling(self) -> int:
        """Bytes per sampling chip that the trainer holds besides arguments of prefill and decode.

        On chips of their own: weights in the compute dtype, older ones and frozen copies
        (SplitParams, trainer/split_params.py).
        """
        if self.meshes.are_split:
            trained, _ = lora.split(self.policy, self.rollout_params)
            copies = len(self.algorithm.frozen_copies) + self._older_copies
            return (self._older_sets + copies) * bytes_per_chip(trained)
        resident = self._state_and_copies
        if self.is_interleaved:
            reference = self.trained if self.learner.loss.kl_weight else None
            resident += bytes_per_chip((self.carry(), self.trained, reference))
        return resident

    @property
    def _older_sets(self) -> int:
        """Most sets of older weights on the sampling chips: one for each update that they lack."""
        return 0 if self.config.mesh.transfer == "in_place" else self.config.staleness

    @property
    def _older_copies(self) -> int:
        """Most frozen copies on the sampling chips that are renewed, but still in use."""
        names, steps = self.algorithm.frozen_copies, range(1, self.config.steps + 1)
        renewed = [sum(n in names for n in self.algorithm.renewed_copies(step)) for step in steps]
        return max(sum(renewed[i : i + self._older_sets]) for i in range(len(renewed)))


def _uniform(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    return meshes.with_sharding(tree, jax.tree.map(lambda _: sharding, tree))


def bytes_per_chip(tree: Any) -> int:
    """Count the bytes of sharded shapes in one device's memory; host-offloaded leaves count 0."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind in (None, "device")
    )


# ------------------------------------------------------------------------------------ Collectives

# JAX has no interface that lists the collectives of a compiled program, so its HLO text is parsed.
_KINDS = "all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|"
_KINDS += "ragged-all-to-all|reduce-scatter"
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) .*\{\n")
_COLLECTIVE = re.compile(rf" = (.+?) ({_KINDS})(-start)?\(")
_CALLEE = re.compile(r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.\-]+)")
_LOOP = re.compile(r"(?:body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# Layouts such as {1,0:T(8,128)} and comments hold brackets and commas that are no part of a type.
_LAYOUT_OR_COMMENT = re.compile(r"\{[^{}\n]*\}|/\*.*?\*/")
_ROOT_TYPE = re.compile(r"^  ROOT \S+ = ([^(]*)", re.MULTILINE)
_SHAPE = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,<=]*)\]")


def collectives(text: str) -> dict[str, dict[str, int]]:
    """Count the collectives in a compiled program's HLO text: kind -> numbers.

    An asynchronous collective counts once. A fusion of an all-reduce and a slice counts as a
    reduce-scatter with the bytes of the slice; an all-reduce before a separate slice runs, and
    counts, as an all-reduce.

    The numbers are "count", "bytes" (of the results on one device) and "in_loops" (the part of the
    count inside a loop or in a computation that a loop calls).
    """
    parts = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    computations = {header[1]: part for part in parts if (header := _COMPUTATION.match(part))}
    looped = _called(computations, _LOOP.findall(text))
    totals: dict[str, dict[str, int]] = {}
    for name, part in computations.items():
        # A TPU program names an asynchronous collective again in every fusion that runs meanwhile.
        # It counts where it starts.
        ongoing = name.startswith("async_collective_fusion") or "AsyncCollectiveDone" in part
        if ongoing and "AsyncCollectiveStart" not in part:
            continue
        plain = _LAYOUT_OR_COMMENT.sub("", part)
        for result, kind, start in _COLLECTIVE.findall(plain):
            if start and kind != "all-reduce":  # its result is a tuple (operands, results, ...)
                result = split_outside_brackets(result[1:-1])[1]
            # XLA for TPUs writes a reduce-scatter as a fusion of this name.
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind, result = "reduce-scatter", _ROOT_TYPE.findall(plain)[0]
            total = totals.setdefault(kind, {"count": 0, "bytes": 0, "in_loops": 0})
            total["count"] += 1
            total["bytes"] += _type_bytes(result)
            total["in_loops"] += name in looped
    return dict(sorted(totals.items()))


def _called(computations: dict[str, str], names: Sequence[str]) -> set[str]:
    """Return these computations and all that they call, directly or indirectly."""
    called, todo = set(names), list(names)
    while todo:
        part = computations.get(todo.pop(), "")
        callees = set(_CALLEE.findall(part))
        for branches in _BRANCHES.findall(part):
            callees |= {branch.strip(" %") for branch in branches.split(",")}
        todo += callees - called
        called |= callees
    return called


def split_outside_brackets(text: str) -> list[str]:
    """Split a text such as "a, (b, c), d" at the commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _type_bytes(type_text: str) -> int:
    """Count the bytes of all arrays in an HLO type such as (bf16[2,8], f32[])."""
    total = 0
    for name, bits, dims in _SHAPE.findall(type_text):
        # "<=" marks a dynamic dimension by its bound; a pred takes a byte.
        sizes = [int(size.strip("<=")) for size in dims.split(",") if size]
        total += math.prod(sizes) * (8 if name == "pred" else int(bits)) // 8
    return total


# ----------------------------------------------------------------------------------------- Report


def measure_program(program: Program, hbm: int) -> dict[str, Any]:
    """Compile a program for chips of `hbm` usable bytes; return a JSON-able line, or its error."""
    phase = PROGRAMS.get(program.name, "program")
    line: dict[str, Any] = {"phase": phase, "program": program.name}
    line |= {"tokens": program.tokens, "resident": program.resident, "hbm": hbm, "fits": False}
    clock = time.monotonic()
    try:
        lowered = program.lower()
        line["lower_seconds"] = round(time.monotonic() - clock, 1)
        clock = time.monotonic()
        compiled = lowered.compile()
    except Exception as error:  # compilers raise many types; the other programs must be tried
        if not isinstance(error, jax.errors.JaxRuntimeError):
            log.exception("%s", program.name)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return line | {"error": text[:_ERROR_CHARACTERS]}
    line["compile_seconds"] = round(time.monotonic() - clock, 1)
    line["bytes"] = memory_of(compiled)
    # The compiler knows only the program's own arguments, so what compiles may still not fit.
    line["fits"] = line["bytes"]["peak"] + program.resident <= hbm
    return line | {"collectives": collectives(compiled.as_text() or "")}


def memory_of(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Return the bytes on one chip by use; "peak" is the maximum at any time, with arguments."""
    stats: Any = compiled.memory_analysis()
    parts = {
        "arguments": stats.argument_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
    }
    # Both overestimate: the compiler's peak includes fast on-chip memory, and the sum includes
    # buffers that are never live together. Take the smaller one.
    total = sum(parts.values()) - 2 * parts["aliased"]
    return parts | {"peak": min(getattr(stats, "peak_memory_in_bytes", 0) or total, total)}


def report_programs(programs: list[Program], hbm: int, where: dict[str, Any]) -> bool:
    """Print a JSON line per program, with its mesh and `where`; return whether all fit."""
    fits = []
    for program in programs:
        line = measure_program(program, hbm)
        print(json.dumps(where | {"mesh": dict(program.mesh.shape)} | line), flush=True)
        fits.append(line["fits"])
    return all(fits)


def read_mesh(config: Config) -> RunMeshConfig:
    """Read the config's section of meshes; ValueError for a mistake in it."""
    return build(RunMeshConfig, config.mesh, "mesh")


def read_program(path: str, mesh: jax.sharding.Mesh) -> Program:
    """Run a Python file and return the program of its `abstract_program(mesh)`.

    FileNotFoundError without the file, ValueError if the file or its function fails.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"program = {path!r}: must be a Python file")
    try:
        names = runpy.run_path(path, run_name=file.stem)
        if "abstract_program" not in names:
            raise ValueError("must define abstract_program(mesh)")
        function, arguments = names["abstract_program"](mesh)
    except (Exception, SystemExit) as error:  # of the user's code; --debug shows its traceback
        reason = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"program = {path!r}: {reason}") from error
    return Program(file.stem, (), 0, function, arguments, mesh)


def define_flags(*, config: bool = True) -> None:
    """Define the flags that read_flags reads; --topology is required, with `config` also --config.

    Without `config`, as in `aot` itself, devices have a known memory, and no flag gives it.
    """
    topologies.define_flags(required=True, memory=config)
    config_flags.DEFINE_config_file("config", None, "File, or name, of the run's config.")
    flags.DEFINE_integer("length", None, "Prompt tokens P (default: config.sampler.max_prompt).")
    flags.DEFINE_string("policy", "", "Hugging Face config.json (default: that of policy.folder).")
    flags.DEFINE_integer("layers", 0, "Number of layers, for quick trials.", lower_bound=0)
    if config:
        flags.mark_flag_as_required("config")


def read_topology() -> topologies.Topology:
    """Read the devices that --topology, and --memory_gib where it is defined, name."""
    values = flags.FLAGS.flag_values_dict()
    return topologies.find(values["topology"], values.get("memory_gib", 0.0))


def read_flags() -> tuple[Config, PolicyConfig, topologies.Topology, int]:
    """Read config, architecture, devices and prompt tokens P from flags."""
    flag_values = flags.FLAGS
    policy = read_policy(flag_values.config, flag_values.policy, flag_values.layers)
    length = (
        flag_values.config.sampler.max_prompt if flag_values.length is None else flag_values.length
    )
    return flag_values.config, policy, read_topology(), length


def check_flags(flag_values: flags.FlagValues) -> None:
    """Raise UsageError if not one of --config and --program is given, or a flag has no effect."""
    if bool(flag_values.config) == bool(flag_values.program):
        raise app.UsageError("one of --config and --program must be given")
    for name in ("phase", "policy", "layers", "length"):
        if flag_values.program and flag_values[name].present:
            raise app.UsageError(f"--{name}: has no effect with --program, must not be given")


def main(_) -> None:
    check_flags(flags.FLAGS)
    # These programs are large, and a later run would not hit them in the cache.
    jax.config.update("jax_enable_compilation_cache", False)
    if flags.FLAGS.program:
        topology = read_topology()
        mesh = meshes.make_mesh(None, topologies.devices(topology))
        programs = [read_program(flags.FLAGS.program, mesh)]
        where = {"topology": topology.name}
    else:
        config, policy, topology, length = read_flags()
        mesh, rollout_mesh = topologies.make_meshes(topology, read_mesh(config))
        run = RunPrograms(config, policy, mesh, length, rollout_mesh=rollout_mesh)
        programs = run.select(flags.FLAGS.phase)
        where = {"topology": topology.name, "layers": policy.layers}
    entry.setup_done()
    sys.exit(0 if report_programs(programs, topology.hbm, where) else 1)


if __name__ == "__main__":
    define_flags(config=False)
    flags.DEFINE_enum("phase", "all", ("all", *PHASES), "Programs to compile.")
    flags.DEFINE_string("program", "", "File with abstract_program(mesh), instead of --config.")
    entry.run_main(main)
