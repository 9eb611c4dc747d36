"""Estimate a run's memory per chip without compiling, and suggest changes if it does not fit.

    python -m launch.plan --config=configs/paper.py:qwen2.5-7b-instruct --topology=v5e-64 \
        --length=131072 --policy=CONFIG.json [--config.X=Y ...]

1. The programs are those of aot.py, built on an abstract mesh, so libtpu is not needed.
2. A program's arguments and the memory resident besides them are exact: bytes of sharded shapes.
3. A program's temporaries are estimated from shapes (`_made`). The factors were fitted to compiler
   results for the rows in docs/long_context.md. tests/launch/test_plan.py checks that every
   program's peak is within 25 % of them.
4. If everything fits, the largest batches that fit are printed, else the changes that help.
5. The exit status is 0 if everything fits, else 1.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from absl import flags
from jax.sharding import AbstractMesh, AxisType

from launch import aot, topologies
from spell_jax.learner import packing
from spell_jax.policy import moe
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import entry
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import Config

GIB = 2**30
PARTS = ("weights", "masters", "optimizer", "gradients", "activations", "KV cache", "logits")
_MOST_ROWS = 4096  # bound of the search for the largest batch


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes on one chip while a program runs.

    Attributes:
      program: name of the program, as in aot.py.
      parts: bytes of each of PARTS.
      resident: bytes among them that are neither arguments nor temporaries of the program.
    """

    program: str
    parts: dict[str, int]
    resident: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class _Sizes:
    """Estimated sizes of the temporaries of a program that reads [rows, tokens], per chip.

    Sizes are in bytes if not stated otherwise.

    Attributes:
      number: bytes of a number in the compute dtype.
      policy: architecture of the policy.
      context: number of shards along the mesh's context axis.
      rows: rows B on this chip.
      row: tokens T of a row, over all context shards.
      n: tokens on this chip.
      group: size of the mesh's expert axis.
      heads: query heads N on this chip.
      kv_heads: key/value heads K on this chip.
      wide: feed-forward width F on this chip.
      vocab: vocabulary entries V on this chip.
      overlapped: whether the compiler splits products with weights to overlap their all-gathers.
    """

    def __init__(self, programs: aot.Programs, tokens: tuple[int, ...]):
        c, mesh = programs.policy, programs.mesh
        rows, self.row = tokens
        self.number = programs.learner.compute_dtype.itemsize
        self.policy: PolicyConfig = c
        self.context = meshes.context_shards(mesh)
        self.rows = rows // meshes.row_shards(mesh)
        self.n = self.rows * self.row // self.context
        tensor, self.group = mesh.shape[meshes.TENSOR], mesh.shape[meshes.EXPERT]
        self.heads, self.kv_heads, self.wide, self.vocab = (
            size // tensor if size % tensor == 0 else size
            for size in (c.heads, c.kv_heads, c.feed_forward, c.vocab_size)
        )
        shards = mesh.shape["fsdp"] * self.context
        # A product is split if each weight shard is a multiple of 16 wide, that is whole registers.
        self.overlapped = c.width % shards == 0 and c.width // shards % 16 == 0

    def per_token(self, count: float) -> int:
        """Bytes of `count` numbers for each token on the chip."""
        return int(self.n * count * self.number)

    @property
    def layer(self) -> int:
        """Bytes of a layer's all-gathered weights, without experts."""
        c = self.policy
        attention = c.width * c.head_size * 2 * (self.heads + self.kv_heads)
        return (attention + 3 * c.width * self.wide * (not c.experts)) * self.number

    @property
    def experts(self) -> int:
        """Bytes of the all-gathered experts of a layer that one chip multiplies with."""
        c = self.policy
        return 3 * c.experts // self.group * c.width * self.wide * self.number

    def pairs(self, numbers: int) -> int:
        """Bytes of `numbers` numbers for each (token, expert) pair in a chunk."""
        tokens = min(moe.CHUNK, self.n * self.group)
        return tokens * self.policy.experts_per_token * numbers * self.number

    @property
    def keys(self) -> int:
        """Bytes of the keys and values on a chip at once: a whole row, or two shards of a ring."""
        c = self.policy
        share = 2 / self.context if c.ring and self.context > 1 else 1
        rows = self.rows if self.context > 1 else 1
        return int(rows * self.row * share) * 2 * self.kv_heads * c.head_size * self.number

    def reading(self) -> int:
        """Peak of a prefill call: queries of all context shards and float32 attention outputs."""
        heads = self.heads * self.policy.head_size
        return self.rows * self.row * heads * (2 * self.number + 4)

    def saved(self) -> int:
        """Bytes of the activations that all layers save for the backward pass."""
        c, heads = self.policy, self.heads * self.policy.head_size
        products = heads + 2 * self.kv_heads * c.head_size + 2 * c.width + 2 * self.wide
        by_remat = {
            "offload": 0.0,
            "block": c.width,
            "attention": c.width + heads + self.heads * 4 / self.number,
            "dots": c.width + products,
            "none": 2 * c.width + 2 * heads + 2 * products + 2 * self.wide,
        }
        return c.layers * self.per_token(by_remat[c.remat])

    def forward(self) -> int:
        """Peak temporaries of a layer's forward pass."""
        c, heads = self.policy, self.heads * self.policy.head_size
        attention = self.keys + self.per_token(3 * heads) + self.layer // 3
        if c.experts:
            return max(attention, self.experts + self.pairs(2 * c.width) + self.layer)
        wide = (3 if self.overlapped else 1) * self.wide
        return max(attention, self.per_token(wide) + self.layer // 3)

    def backward(self) -> int:
        """Peak temporaries of a layer's backward pass, including the recomputed forward pass."""
        c, heads = self.policy, self.heads * self.policy.head_size
        kept = self.per_token(2 * heads + 4 * c.width)
        # Keys, keys after RoPE, and gradients in the compute dtype and (to be summed) in float32.
        attention = kept + 3 * self.keys + 8 * self.keys // self.number + self.per_token(6 * heads)
        if c.experts:
            totals = self.experts * 4 // self.number
            rows = self.pairs(5 * c.width + 3 * self.wide)
            return max(attention, kept + self.experts + totals + rows + self.layer)
        widest = c.width * self.wide * 4
        return max(attention, kept + self.per_token(5 * self.wide) + self.layer + widest)

    def head(self, answers: int) -> int:
        """Peak of the LM head: answer states, one slice of logits and weights, and gradients."""
        own = self.rows * answers // self.context
        slices = 3 * min(2**26, max(own * self.vocab, 128 * own)) * 4
        return slices + (self.rows * answers + 3 * own) * self.policy.width * self.number


def _made(programs: aot.Programs, program: aot.Program) -> dict[str, int]:
    """Estimate the bytes of a program's temporaries, by PARTS."""
    if program.name == "apply":
        # The optimizer's two moments of each weight are copied from the host and back.
        offloaded = programs.config.optimizer.offload
        return {"optimizer": 4 * aot.bytes_per_chip(programs.state.params) if offloaded else 0}
    sizes = _Sizes(programs, program.tokens)
    if program.name == "decode":
        # Devices along fsdp compute their rows together: logits as partial sums and as sums.
        sharing = programs.mesh.shape["data"] * programs.mesh.shape[meshes.EXPERT]
        sampled = program.tokens[0] * (1 + programs.sampler.config.speculative_tokens)
        return {"logits": 2 * sampled // sharing * sizes.vocab * 4}
    if program.name == "prefill":
        return {"activations": sizes.reading()}
    head = sizes.head(programs.bucket.answers)
    if program.name == "logprob":
        return {"activations": sizes.forward(), "logits": max(0, head // 2 - sizes.forward())}
    # The gradient of one micro-batch, before it is added to the accumulated one.
    gradients = aot.bytes_per_chip(programs.trained)
    layers = gradients + sizes.backward()
    made = {"gradients": gradients, "activations": sizes.saved() + sizes.backward()}
    return made | {"logits": max(0, head - layers)}


def _given(programs: aot.Programs, program: aot.Program) -> dict[str, int]:
    """Compute the exact bytes of a program's arguments and of resident memory, by PARTS."""
    count, state = aot.bytes_per_chip, programs.state
    counts = state.step, state.skipped
    masters, optimizer = count(state.params), count((state.opt_state, counts))
    arguments = count(program.arguments)
    parts = {"masters": masters, "optimizer": optimizer}
    if program.name == "apply":
        _, gradients, loss = map(count, program.arguments)
        parts |= {"gradients": gradients, "activations": loss}
        return parts | {"weights": program.resident}
    parts["weights"] = program.resident - masters - optimizer
    if program.name == "accumulate":
        parts["gradients"] = count(program.arguments[2])
        parts["weights"] += count((program.arguments[:2], program.arguments[4]))
        return parts | {"activations": count(program.arguments[3])}
    if program.name in ("prefill", "decode"):
        cache = count(program.arguments[1].pages)
        parts["weights"] += count(program.arguments[0])
        rest = arguments - cache - count(program.arguments[0])
        return parts | {"KV cache": cache, "activations": rest}
    parts["weights"] += arguments
    return parts


def needs(programs: aot.Programs) -> list[Need]:
    """Memory that each program needs, in the order of aot.PHASES."""
    found = []
    for program in programs.of("all"):
        given, made = _given(programs, program), _made(programs, program)
        parts = {name: given.get(name, 0) + made.get(name, 0) for name in PARTS}
        found.append(Need(program.name, parts, program.resident))
    return found


# ------------------------------------------------------------------------------------------- Plan


class Plan:
    """Memory plan of a run on a slice: needs, largest batches that fit, and changes that help."""

    def __init__(
        self,
        config: Config,
        policy: PolicyConfig,
        topology: topologies.Topology,
        length: int,
        bucket: packing.Bucket | None = None,
    ):
        """Build the run's programs on an abstract mesh over the slice.

        Args:
          config: config of the run.
          policy: architecture of the policy.
          topology: slice that the run uses.
          length: prompt tokens P.
          bucket: shape of the training rows; see aot.Programs.

        Raises:
          ValueError: if a field is invalid (see aot.Programs) or the mesh does not match the slice.
        """
        self.config, self.policy, self.topology, self.length = config, policy, topology, length
        self.bucket = bucket
        sizes = meshes.axis_sizes(config.mesh, topology.chips)
        types = (AxisType.Auto,) * len(sizes)
        mesh: Any = AbstractMesh(sizes, meshes.AXES, axis_types=types)
        self.programs = aot.Programs(config, policy, mesh, length, bucket)
        entry.setup_done()
        self.needs = needs(self.programs)

    @property
    def fits(self) -> bool:
        return all(need.total <= self.topology.hbm for need in self.needs)

    def changed(self, **fields: Any) -> Plan:
        """Return the plan with config fields changed: `a__b=value` changes config.a.b."""
        config: Any = self.config.copy_and_resolve_references()
        with config.unlocked():
            config.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
        section = config.policy
        policy = dataclasses.replace(self.policy, remat=section.remat, ring=section.ring)
        return Plan(config, policy, self.topology, self.length, self.bucket)

    def largest(self) -> dict[str, int]:
        """Largest values that fit of the fields that bound the batch: dotted name -> tokens."""
        bucket, shards = self.programs.bucket, meshes.row_shards(self.programs.mesh)
        found = {}
        for field, tokens, names in (
            ("sampler__kv_cache_tokens", self._cached, ("prefill", "decode")),
            ("packing__token_budget", bucket.length, ("accumulate",)),
        ):
            rows = 0
            while rows + shards <= _MOST_ROWS:
                fields: dict[str, Any] = {field: (rows + shards) * tokens}
                # Only the planned bucket: the config's other buckets may be larger than the budget.
                fields["packing__buckets"] = ((bucket.length, bucket.answers),)
                tried = self.changed(**fields)
                wanted = [need for need in tried.needs if need.program in names]
                if any(need.total > self.topology.hbm for need in wanted):
                    break
                rows += shards
            found[field.replace("__", ".")] = rows * tokens
        return found

    @property
    def _cached(self) -> int:
        """KV cache tokens of one prompt with its G answers, in whole pages."""
        shape, sampler = self.programs.sampler.shape, self.programs.sampler.config
        answers = self.programs.group * shape.pages_of(sampler.longest_answer)
        return (shape.pages_of(self.length) + answers) * shape.page_size

    def helpful(self) -> Iterator[tuple[str, Plan]]:
        """Yield (flags, plan) of single changes that lower the largest program's memory."""
        worst = max(need.total for need in self.needs)
        for flag, fields in self._options():
            try:
                tried = self.changed(**fields)
            except ValueError:  # rows or buckets do not divide over the changed mesh
                continue
            if max(need.total for need in tried.needs) < worst:
                yield flag, tried

    def _options(self) -> Iterator[tuple[str, dict[str, Any]]]:
        c, sizes = self.config, dict(self.programs.mesh.shape)
        bucket, shards = self.programs.bucket, meshes.row_shards(self.programs.mesh)
        longest = max(shards * bucket.length, c.packing.buckets[-1][0])
        least = {"packing.token_budget": longest, "sampler.kv_cache_tokens": shards * self._cached}
        for name, tokens in least.items():
            section, field = name.split(".")
            if c[section][field] >= tokens + shards:
                yield f"--config.{name}={tokens}", {f"{section}__{field}": tokens}
        if c.policy.remat not in ("block", "offload"):
            yield "--config.policy.remat=block", {"policy__remat": "block"}
        if c.policy.remat != "offload":
            yield "--config.policy.remat=offload", {"policy__remat": "offload"}
        if not c.optimizer.offload:
            yield "--config.optimizer.offload=True", {"optimizer__offload": True}
        if sizes["context"] > 1 and not c.policy.ring:
            yield "--config.policy.ring=True", {"policy__ring": True}
        for axis in ("data", "fsdp", "expert"):
            for factor in (2**i for i in range(1, sizes[axis].bit_length())):
                if sizes[axis] % factor == 0:
                    less, more = sizes[axis] // factor, sizes["context"] * factor
                    flag = f"--config.mesh.{axis}={less} --config.mesh.context={more}"
                    yield flag, {f"mesh__{axis}": less, "mesh__context": more}


# ----------------------------------------------------------------------------------------- Report


def table(plan: Plan) -> str:
    """Format one line per program, in GiB per chip."""
    lines = ["".join([f"{'':12}", *(f"{name:>13}" for name in PARTS), f"{'total':>10}"])]
    for need in plan.needs:
        cells = [f"{need.parts[name] / GIB:13.2f}" for name in PARTS]
        ending = "" if need.total <= plan.topology.hbm else "  too much"
        lines.append("".join([f"{need.program:12}", *cells, f"{need.total / GIB:10.2f}", ending]))
    return "\n".join(lines)


def describe(plan: Plan) -> str:
    """Format the whole report of a plan."""
    mesh = " ".join(f"{k}={v}" for k, v in plan.programs.mesh.shape.items() if v > 1)
    hbm = plan.topology.hbm / GIB
    lines = [
        f"{plan.topology.name}: {plan.topology.chips} chips, {hbm:.2f} GiB each; mesh {mesh or 1}",
        f"prompts of {plan.length} tokens, {plan.programs.group} answers of "
        f"{plan.config.sampler.max_tokens}; GiB a chip, activations and logits are estimates",
        "",
        table(plan),
        "",
    ]
    if plan.fits:
        lines.append("All fits. The largest batches that do:")
        lines += [f"  --config.{name}={tokens}" for name, tokens in plan.largest().items()]
        return "\n".join(lines)
    lines.append("It does not fit. What would help, one change at a time (its largest total):")
    for flag, tried in plan.helpful():
        worst = max(need.total for need in tried.needs)
        lines.append(f"  {flag:60} {worst / GIB:8.2f}  {'fits' if tried.fits else ''}".rstrip())
    lines.append("  or a larger slice")
    return "\n".join(lines)


def main(_) -> None:
    given = flags.FLAGS
    topology = topologies.find(given.topology)
    policy = aot.read_policy(given.config, given.policy, given.layers)
    plan = Plan(given.config, policy, topology, aot.prompt_length(given.config, given.length))
    print(describe(plan))
    sys.exit(0 if plan.fits else 1)


if __name__ == "__main__":
    aot.define_flags()
    entry.run_main(main)
