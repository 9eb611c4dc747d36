"""Compile a run's programs for a TPU slice without having one; report memory and collectives.

    python -m launch.aot --config=configs/paper.py:qwen2.5-7b-instruct --topology=v5e-16 \
        [--length=16384] [--phase=all] --policy=CONFIG.json [--layers=2] [--config.X=Y ...]

1. The policy's architecture comes from a Hugging Face config.json. No weights are read and no
   array is allocated: every argument is a shape with a sharding.
2. The trainer's own Learner and Sampler are built on the config's mesh over the slice's devices
   (topologies.py). Their jitted functions are lowered for P = --length prompt tokens and
   G = config.algorithm.group_size answers of S = config.sampler.max_tokens tokens each. A training
   row has P + G S tokens.
3. The phases are "prefill", "decode", "logprob" (the learner's forward pass alone) and "update"
   (two programs, "accumulate" and "apply").
4. Each program is compiled, on any CPU, and described by one line of JSON, with bytes per chip.
   "resident" is memory that the trainer holds besides the program's arguments, such as float32
   master weights and optimizer state during sampling. A program fits if it compiles and its peak
   plus "resident" is at most the chip's memory.
5. Collectives are counted once per occurrence in the program, with the bytes of their results on
   one chip. Those "in_loops" (the scan over layers, the tokens of an answer) run every iteration.
6. Copies of the policy (frozen reader, KL reference) count as resident. A model with its own config
   section, such as reward_model, is not counted and its programs are not compiled.

All programs are tried. The exit status is 0 if all fit, else 1. Programs are only compiled, so
nothing here measures speed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from absl import flags
from ml_collections import config_flags

from launch import topologies
from spell_jax.learner import loss, packing, update
from spell_jax.learner.learner import Learner
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.policy import int8, lora, transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.model import find_folder, shape_policy
from spell_jax.runtime import entry
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import Config, build
from spell_jax.sampler import batching
from spell_jax.sampler.config import SamplerConfig
from spell_jax.sampler.engine import Sampler
from spell_jax.sampler.scheduler import Scheduler

log = logging.getLogger("launch.aot")  # __name__ is __main__ when this is the entry

PHASES = ("prefill", "decode", "logprob", "update")
_SAID = 400  # characters kept of an error: the start of a compiler's message has the memory figures


# --------------------------------------------------------------------------------------- Programs


@dataclasses.dataclass(frozen=True)
class Program:
    """One jitted function with its abstract arguments.

    Attributes:
      phase: phase name, one of PHASES.
      name: program name: the phase, or "accumulate" or "apply".
      tokens: shape [rows, tokens] of the token array that the program reads.
      resident: bytes per chip that the trainer holds meanwhile, not counting `arguments`.
      function: jitted function.
      arguments: positional arguments, trees of jax.ShapeDtypeStruct.
      options: static keyword arguments.
      mesh: mesh that the program runs on.
      rules: logical axis rules that the trainer sets around the call.
    """

    phase: str
    name: str
    tokens: tuple[int, ...]
    resident: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    mesh: jax.sharding.Mesh
    rules: meshes.Rules = meshes.RULES

    def trace(self) -> Any:
        """Trace the function under the trainer's mesh and axis rules (a jax.stages.Traced)."""
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(self.rules):
            return self.function.trace(*self.arguments, **self.options)

    def lower(self, platforms: tuple[str, ...] | None = None) -> jax.stages.Lowered:
        """Lower for the mesh's devices, or for other platforms (for example "tpu" from a CPU)."""
        traced = self.trace()
        with jax.set_mesh(self.mesh):
            return traced.lower(lowering_platforms=platforms)


def read_policy(config: Config, path: str = "", layers: int = 0) -> PolicyConfig:
    """Read the policy's architecture, without tokenizer and weights, and apply config.policy.

    Args:
      config: config of the run.
      path: path of a Hugging Face config.json; "" means the one in config.policy.folder.
      layers: number of layers L that replaces the policy's own; 0 keeps it.

    Returns:
      The architecture.

    Raises:
      ValueError: if a field of the file, or `layers`, is invalid.
      FileNotFoundError: if the folder or the file does not exist.
    """
    section = config.policy
    if not path and section.folder != "tiny" and not pathlib.Path(section.folder).is_dir():
        raise FileNotFoundError(
            f"policy.folder = {section.folder!r}: is no folder here; name a Hugging Face "
            "config.json by --policy, no weights are needed"
        )
    file = pathlib.Path(path) if path else find_folder(config.policy) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"policy = {str(file)!r}: must be a Hugging Face config.json")
    policy = PolicyConfig.from_hf(file)
    if layers < 0:
        raise ValueError(f"layers = {layers}: must be 1 or more, or 0 for the policy's own")
    policy = shape_policy(section, policy)
    return dataclasses.replace(policy, layers=layers or policy.layers)


class Programs:
    """The jitted programs of a run, with abstract sharded arguments instead of arrays."""

    def __init__(
        self,
        config: Config,
        policy: PolicyConfig,
        mesh: jax.sharding.Mesh,
        length: int,
        bucket: packing.Bucket | None = None,
    ):
        """Check the config's sections and build Learner and Sampler.

        Args:
          config: config of the run.
          policy: architecture of the policy.
          mesh: mesh over the slice's devices; may be abstract.
          length: prompt tokens P, at least 1.
          bucket: shape of the training rows; None means one prompt of P tokens with its answers.

        Raises:
          ValueError: if a field is invalid; the message has its name, its value and the remedy.
        """
        if length < 1:
            raise ValueError(f"length = {length}: must be 1 or more prompt tokens")
        sampling = build(SamplerConfig, config.sampler, "sampler")
        layout = build(packing.PackingConfig, config.packing, "packing")
        optimizer = build(OptimizerConfig, config.optimizer, "optimizer", total_steps=config.steps)
        self.config, self.policy, self.mesh = config, policy, mesh
        self.group = config.algorithm.group_size
        policy.check_length(length + sampling.max_tokens)
        answers = sampling.max_tokens * (self.group if layout.shared_prefix else 1)
        self.bucket = bucket or packing.Bucket(length + answers, answers)
        budget = max(layout.token_budget, self.bucket.length)
        self.learner = Learner(
            policy,
            optimizer,
            build(loss.LossConfig, config.loss, "loss"),
            dataclasses.replace(layout, buckets=(self.bucket,), token_budget=budget),
            mesh,
            sampling.temperature,
            config.policy.compute_dtype,
        )
        # Any stop token will do: which one it is does not change the program.
        self.sampler = Sampler(policy, dataclasses.replace(sampling, max_prompt=length), (0,), mesh)
        self.lane = self.sampler.shape.lane_of(self.group)
        shapes, axes = transformer.abstract_params(policy)
        whole = meshes.with_sharding(
            shapes, meshes.shardings(mesh, axes, shapes), self.learner.compute_dtype
        )
        self.played = whole
        self.trained, self.frozen = lora.split(policy, whole)
        self.state = self.learner.fns.abstract_state

    def of(self, phase: str) -> list[Program]:
        """Return the programs of one phase.

        Args:
          phase: one of PHASES, or "all".

        Raises:
          ValueError: if the phase is unknown.
        """
        if phase != "all" and phase not in PHASES:
            raise ValueError(f"phase = {phase!r}: must be 'all' or one of {PHASES}")
        wanted = PHASES if phase == "all" else (phase,)
        return [program for name in wanted for program in getattr(self, f"_{name}")()]

    def _prefill(self) -> list[Program]:
        sampler, shards = self.sampler, self.sampler.shards
        scheduler = Scheduler(sampler.shape, shards)
        batch = batching.prompt_pages(scheduler, [[]] * shards, sampler.config.max_prompt)
        return [self._sampling("prefill", batch.tokens.shape, sampler.prefill, batch)]

    def _decode(self) -> list[Program]:
        sampler, shards = self.sampler, self.sampler.shards
        limits = [{} for _ in range(shards)]
        scheduler = Scheduler(sampler.shape, shards)
        batch = batching.slots(scheduler, self.lane, limits, 1, sampler.config)
        made = self._sampling("decode", (len(batch.count), 1), sampler.decode, batch)
        return [dataclasses.replace(made, options={"lane": self.lane}, rules=meshes.DECODE_RULES)]

    def _sampling(self, name: str, tokens: tuple[int, ...], function, batch) -> Program:
        """A sampler program; its arguments are weights, sampler state and the call's arrays."""
        state = jax.eval_shape(lambda: self.sampler.init_state(self.learner.compute_dtype))
        state = meshes.with_sharding(state, self.sampler.shardings)
        played = self.sampler.abstract_params(self.played)
        arguments = (
            played,
            state,
            meshes.with_sharding(batch, batching.shardings(self.mesh, batch)),
        )
        held = self._others() + bytes_per_chip(self.state)
        if played is not self.played:  # the full-precision kernels stay resident as well
            held += bytes_per_chip(int8.kernels(self.played))
        return self._program(name, name, tokens, function, arguments, held)

    def _logprob(self) -> list[Program]:
        learner, batch = self.learner, self._batch()

        def score(params, frozen, batch):
            return update.score(learner.spec, lora.join(params, frozen), batch)

        arguments, function = (self.trained, self.frozen, batch), jax.jit(score)
        shape, held = batch.tokens.shape, self._others() + bytes_per_chip(self.state)
        return [self._program("logprob", "logprob", shape, function, arguments, held)]

    def _update(self) -> list[Program]:
        learner, batch, held = self.learner, self._batch(), self._others()
        reference = self.played if learner.loss.kl_weight else None
        gradients, sums = jax.eval_shape(learner.fns.empty_carry)
        gradients = meshes.with_sharding(gradients, learner.fns.param_shardings)
        weights = (self.trained, self.frozen)
        sums = self._replicated(sums)
        arguments = (*weights, (gradients, sums), batch, reference)
        shape, function = batch.tokens.shape, learner.fns.accumulate
        state = bytes_per_chip(self.state)
        first = self._program("update", "accumulate", shape, function, arguments, held + state)
        held += bytes_per_chip(self.frozen)
        given = (self.state, gradients, sums["loss"])
        second = self._program("update", "apply", (), learner.fns.apply, given, held)
        return [first, second]

    def _program(self, phase, name, tokens, function, arguments, held) -> Program:
        return Program(phase, name, tokens, held, function, arguments, {}, self.mesh)

    # -------------------------------------------------------------------------- Arguments

    def _batch(self) -> packing.MicroBatch:
        budget, shards = self.learner.packing.token_budget, meshes.row_shards(self.mesh)
        rows = packing.row_count(self.bucket, budget, shards)
        where = meshes.by_rows_and_time(self.mesh)
        batch = packing.empty_micro_batch(self.bucket, rows)
        return meshes.with_sharding(batch, jax.tree.map(lambda _: where, batch))

    def _replicated(self, tree: Any) -> Any:
        return meshes.with_sharding(
            tree, jax.tree.map(lambda _: meshes.replicated(self.mesh), tree)
        )

    # ------------------------------------------------------------------- Resident memory

    def _others(self) -> int:
        """Bytes per chip of the float32 copies of the policy (frozen reader, KL reference).

        Only the model that answers exists in the compute dtype, and it is among a program's
        arguments (RolloutParams in trainer/state.py).
        """
        has_frozen_reader = self.config.algorithm.get("reference_source") == "frozen_reader"
        others = bool(self.learner.loss.kl_weight) + has_frozen_reader
        return others * bytes_per_chip(self.state.params)


def bytes_per_chip(tree: Any) -> int:
    """Bytes of a tree of sharded shapes in one device's memory; host-offloaded leaves count 0."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind in (None, "device")
    )


# ------------------------------------------------------------------------------------ Collectives

_KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(rf" = (.+?) ({'|'.join(_KINDS)})(-start)?\(")
_CALLEE = re.compile(r"(calls|to_apply|body|condition|\w+_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LAYOUT_OR_COMMENT = re.compile(r"\{[^{}]*\}|/\*.*?\*/")
_SHAPE = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,<=]*)\]")
# TPU fusions that overlap with a running collective. Their text names the collective again.
_ONGOING = ("async_collective_fusion", "AsyncCollectiveDone")


@dataclasses.dataclass
class _Computation:
    """One computation of an HLO text.

    Attributes:
      name: name of the computation.
      collectives: (kind, bytes of the result on one device) of each collective in it.
      callees: names of computations that it calls, loops apart.
      loops: names of the bodies and conditions of its while loops.
      result: bytes of its root on one device.
      starts: whether an asynchronous collective starts in it.
      goes_on: whether a collective that started elsewhere is named in it.
    """

    name: str
    collectives: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    callees: set[str] = dataclasses.field(default_factory=set)
    loops: set[str] = dataclasses.field(default_factory=set)
    result: int = 0
    starts: bool = False
    goes_on: bool = False


def collectives(text: str) -> dict[str, dict[str, int]]:
    """Count the collectives in a compiled program's HLO text, by kind.

    1. An asynchronous collective counts once, where it starts. A TPU program names it again in
       every fusion that runs meanwhile.
    2. A TPU program may express a reduce-scatter as a fusion, named all-reduce-scatter, of an
       all-reduce and a slice. It counts as a reduce-scatter with the bytes of the slice. An
       all-reduce followed by a separate slice runs, and counts, as an all-reduce.

    Args:
      text: HLO text of the compiled program.

    Returns:
      Kind -> "count", "bytes" (of the results on one device) and "in_loops" (the part of the count
      inside a loop or in a computation that a loop calls).
    """
    computations = _read(text)
    looped = _called(computations, set().union(*(c.loops for c in computations.values())))
    totals: dict[str, dict[str, int]] = {}
    for computation in computations.values():
        if computation.goes_on and not computation.starts:
            continue
        for kind, size in computation.collectives:
            if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
                kind, size = "reduce-scatter", computation.result
            total = totals.setdefault(kind, {"count": 0, "bytes": 0, "in_loops": 0})
            total["count"] += 1
            total["bytes"] += size
            total["in_loops"] += computation.name in looped
    return dict(sorted(totals.items()))


def _read(text: str) -> dict[str, _Computation]:
    """Parse an HLO text into its computations, by name."""
    current = _Computation("")
    computations = {current.name: current}
    for line in text.splitlines():
        if not line.startswith(" ") and (header := _COMPUTATION.fullmatch(line)):
            current = _Computation(header[1], goes_on=header[1].startswith(_ONGOING))
            computations[current.name] = current
            continue
        for how, callee in _CALLEE.findall(line):
            (current.loops if how in ("body", "condition") else current.callees).add(callee)
        for names in _BRANCHES.findall(line):
            current.callees |= {name.strip(" %") for name in names.split(",")}
        current.starts |= "AsyncCollectiveStart" in line
        current.goes_on |= "AsyncCollectiveDone" in line
        plain = _LAYOUT_OR_COMMENT.sub("", line)
        if match := _COLLECTIVE.search(plain):
            kind, starts = match[2], bool(match[3])
            current.collectives.append((kind, _result_bytes(match[1], kind, starts)))
        if line.startswith("  ROOT "):
            current.result = _type_bytes(plain.split(" = ", 1)[1].split("(", 1)[0])
    return computations


def _called(computations: dict[str, _Computation], names: set[str]) -> set[str]:
    """Return these computations and all that they call, directly or indirectly."""
    called, todo = set(names), list(names)
    while todo:
        one = computations.get(todo.pop())
        new = (one.callees | one.loops) - called if one else set()
        called |= new
        todo += new
    return called


def _result_bytes(type_text: str, kind: str, starts: bool) -> int:
    """Bytes of a collective's result.

    An asynchronous start, all-reduce apart, returns a tuple (operands, results, ...).
    """
    if not starts or kind == "all-reduce":
        return _type_bytes(type_text)
    return _type_bytes(_parts(type_text)[1])


def _parts(tuple_text: str) -> list[str]:
    """Split a tuple such as "(a, (b, c), d)" into its top-level elements."""
    parts, depth = [""], 0
    for letter in tuple_text[1:-1]:
        depth += {"(": 1, ")": -1, "[": 1, "]": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _type_bytes(type_text: str) -> int:
    """Total bytes of the arrays in an HLO type such as (bf16[2,8], f32[])."""
    total = 0
    for name, bits, dims in _SHAPE.findall(type_text):
        sizes = [int(size.strip("<=")) for size in dims.split(",") if size]
        total += math.prod(sizes) * (8 if name == "pred" else int(bits)) // 8
    return total


# ----------------------------------------------------------------------------------------- Report


def describe(program: Program, hbm: int) -> dict[str, Any]:
    """Compile a program and describe it.

    Args:
      program: program to compile.
      hbm: bytes of a chip's memory that programs may use.

    Returns:
      A JSON-able line: phase, shapes, seconds, "fits", bytes per chip and collectives; or the
      compiler's error.
    """
    line: dict[str, Any] = {"phase": program.phase, "program": program.name}
    line |= {"tokens": program.tokens, "fits": False}
    clock = time.monotonic()
    try:
        lowered = program.lower()
        line["lower_seconds"] = round(time.monotonic() - clock, 1)
        clock = time.monotonic()
        compiled = lowered.compile()
    except Exception as error:  # compilers raise many types; the other programs must be tried
        if not isinstance(error, jax.errors.JaxRuntimeError):
            log.exception("%s", program.name)
        line["compile_seconds"] = round(time.monotonic() - clock, 1)
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return line | {"resident": program.resident, "hbm": hbm, "error": said[:_SAID]}
    line["compile_seconds"] = round(time.monotonic() - clock, 1)
    memory = memory_of(compiled)
    line["fits"] = memory["peak"] + program.resident <= hbm
    line |= {"bytes": memory, "resident": program.resident, "hbm": hbm}
    return line | {"collectives": collectives(compiled.as_text() or "")}


def memory_of(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes on one chip by use; "peak" is the maximum at any time, arguments included."""
    stats: Any = compiled.memory_analysis()
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    temporaries, aliased = stats.temp_size_in_bytes, stats.alias_size_in_bytes
    total = arguments + temporaries + outputs - aliased
    # Both overestimate: the compiler's peak includes fast on-chip memory, and the sum includes
    # buffers that are never live together. Take the smaller one.
    peak = min(getattr(stats, "peak_memory_in_bytes", 0) or total, total)
    return {
        "arguments": arguments,
        "temporaries": temporaries,
        "outputs": outputs,
        "aliased": aliased,
        "peak": peak,
    }


def report(programs: list[Program], hbm: int, where: dict[str, Any]) -> bool:
    """Print one JSON line per program and return whether all programs fit.

    Args:
      programs: programs to compile.
      hbm: bytes of a chip's memory that programs may use.
      where: fields added to each line.
    """
    fit = True
    for program in programs:
        line = describe(program, hbm)
        print(json.dumps(where | line), flush=True)
        fit &= line["fits"]
    return fit


def make_mesh(config: Config, topology: topologies.Topology) -> jax.sharding.Mesh:
    """Make the config's mesh over the slice's devices, as the trainer would on that slice.

    Raises:
      ValueError: if the mesh axes do not map onto the slice's physical axes.
    """
    devices = topologies.devices(topology)
    try:
        return meshes.make_mesh(config.mesh, devices)
    except NotImplementedError as error:  # raised by jax.make_mesh
        raise ValueError(
            f"mesh = {dict(config.mesh)}: each axis must be a product of physical ones of "
            f"{topology.name}, which are {topology.shape}"
        ) from error


def prompt_length(config: Config, given: int | None) -> int:
    """Prompt tokens P: `given`, or the sampler's cap if it is None."""
    return config.sampler.max_prompt if given is None else given


def define_flags() -> None:
    """Define the flags for a run on a slice.

    Each entry point calls this, so that one process can import several of them.
    """
    config_flags.DEFINE_config_file("config", None, "The run's configuration.")
    flags.DEFINE_string("topology", None, "The slice, such as v5e-16; topologies.py lists them.")
    flags.DEFINE_integer("length", None, "Prompt tokens P; by default the sampler's cap.")
    flags.DEFINE_string("policy", "", "A Hugging Face config.json; by default the folder's.")
    flags.DEFINE_integer("layers", 0, "Another number of layers, for quick trials.", lower_bound=0)
    flags.mark_flags_as_required(["config", "topology"])


def main(_) -> None:
    given = flags.FLAGS
    topology = topologies.find(given.topology)
    policy = read_policy(given.config, given.policy, given.layers)
    # These programs are large, and a later run would not hit them in the cache.
    jax.config.update("jax_enable_compilation_cache", False)
    mesh = make_mesh(given.config, topology)
    length = prompt_length(given.config, given.length)
    programs = Programs(given.config, policy, mesh, length)
    where = {"topology": topology.name, "mesh": dict(mesh.shape), "layers": policy.layers}
    entry.setup_done()
    sys.exit(0 if report(programs.of(given.phase), topology.hbm, where) else 1)


if __name__ == "__main__":
    define_flags()
    flags.DEFINE_enum("phase", "all", ("all", *PHASES), "What is compiled.")
    entry.run_main(main)
