"""What a run needs of each chip, before anything is compiled; and what to change if it is too much.

    python -m launch.plan --config=configs/qwen2_5_7b_instruct.py --topology=v5e-64 \
        --length=131072 --policy=CONFIG.json [--config.X=Y ...]

1. The programs are those of aot.py, built on a mesh without devices: libtpu is not needed.
2. What goes into a program, and what is held beside it, is exact: the bytes of placed shapes.
3. What a program makes for itself is estimated from shapes (`_made`). The factors were fitted to
   what the compiler said of the rows in docs/long_context.md; tests/launch/test_plan.py holds every
   program's peak against theirs, within 25 %.
4. If all fits, the largest batches that still do are printed; if not, the changes that help.
5. The exit status is 0 if all fits, else 1.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from absl import app, flags
from jax.sharding import AbstractMesh, AxisType

from launch import aot, topologies
from spell_jax.learner import packing
from spell_jax.policy import moe
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import Config

GIB = 2**30
PARTS = ("weights", "masters", "optimizer", "gradients", "activations", "KV cache", "logits")
_MOST_ROWS = 4096  # where the search for the largest batch ends


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes on one chip while a program runs.

    Attributes:
      program: its name, as in aot.py.
      parts: by PARTS.
      resident: how many of them are neither arguments nor made by the program.
    """

    program: str
    parts: dict[str, int]
    resident: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class _Sizes:
    """Bytes on one chip of what a program makes that reads [rows, tokens]; `n` is how many of
    these tokens are the chip's own."""

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
        # Products with weights whose parts are whole registers are split, to overlap the gathers.
        self.overlapped = c.width % shards == 0 and c.width // shards % 16 == 0

    def per_token(self, count: float) -> int:
        """So many numbers for each of the chip's tokens."""
        return int(self.n * count * self.number)

    @property
    def layer(self) -> int:
        """A layer's weights, gathered, experts apart."""
        c = self.policy
        attention = c.width * c.head_size * 2 * (self.heads + self.kv_heads)
        return (attention + 3 * c.width * self.wide * (not c.experts)) * self.number

    @property
    def experts(self) -> int:
        """The experts of a layer that a chip multiplies with, gathered."""
        c = self.policy
        return 3 * c.experts // self.group * c.width * self.wide * self.number

    def pairs(self, numbers: int) -> int:
        """So many numbers for each pair of a token and an expert in a chunk."""
        tokens = min(moe.CHUNK, self.n * self.group)
        return tokens * self.policy.experts_per_token * numbers * self.number

    @property
    def keys(self) -> int:
        """Keys and values that a chip meets at once: of the row, or of two shards of a ring."""
        c = self.policy
        share = 2 / self.context if c.ring and self.context > 1 else 1
        rows = self.rows if self.context > 1 else 1
        return int(rows * self.row * share) * 2 * self.kv_heads * c.head_size * self.number

    def reading(self) -> int:
        """What a prefill call has at once: queries of all devices of `context`, and what they
        found, in float32."""
        heads = self.heads * self.policy.head_size
        return self.rows * self.row * heads * (2 * self.number + 4)

    def saved(self) -> int:
        """What the backward pass keeps of all layers."""
        c, heads = self.policy, self.heads * self.policy.head_size
        products = heads + 2 * self.kv_heads * c.head_size + 2 * c.width + 2 * self.wide
        by_remat = {
            "offload": 0.0,
            "page_size": c.width,
            "attention": c.width + heads + self.heads * 4 / self.number,
            "dots": c.width + products,
            "none": 2 * c.width + 2 * heads + 2 * products + 2 * self.wide,
        }
        return c.layers * self.per_token(by_remat[c.remat])

    def forward(self) -> int:
        """The most that the forward pass of a layer has at once."""
        c, heads = self.policy, self.heads * self.policy.head_size
        attention = self.keys + self.per_token(3 * heads) + self.layer // 3
        if c.experts:
            return max(attention, self.experts + self.pairs(2 * c.width) + self.layer)
        wide = (3 if self.overlapped else 1) * self.wide
        return max(attention, self.per_token(wide) + self.layer // 3)

    def backward(self) -> int:
        """The same of the backward pass, which has computed the layer again."""
        c, heads = self.policy, self.heads * self.policy.head_size
        kept = self.per_token(2 * heads + 4 * c.width)
        # Keys, turned keys, their gradients in the compute dtype and, to be summed, in float32.
        attention = kept + 3 * self.keys + 8 * self.keys // self.number + self.per_token(6 * heads)
        if c.experts:
            totals = self.experts * 4 // self.number
            rows = self.pairs(5 * c.width + 3 * self.wide)
            return max(attention, kept + self.experts + totals + rows + self.layer)
        widest = c.width * self.wide * 4
        return max(attention, kept + self.per_token(5 * self.wide) + self.layer + widest)

    def head(self, answers: int) -> int:
        """Picked states, a slice of the vocabulary's logits and of its weights, both ways."""
        own = self.rows * answers // self.context
        slices = 3 * min(2**26, max(own * self.vocab, 128 * own)) * 4
        return slices + (self.rows * answers + 3 * own) * self.policy.width * self.number


def _made(programs: aot.Programs, program: aot.Program) -> dict[str, int]:
    """What a program makes for itself, by PARTS; an estimate."""
    if program.name == "apply":
        # Two moments of each weight come from the host, and go back.
        offloaded = programs.config.optimizer.offload
        return {"optimizer": 4 * aot.bytes_per_chip(programs.state.params) if offloaded else 0}
    sizes = _Sizes(programs, program.tokens)
    if program.name == "decode":
        # Of all slots whose rows the devices of `fsdp` compute together: partial sums, and sums.
        sharing = programs.mesh.shape["data"] * programs.mesh.shape[meshes.EXPERT]
        sampled = program.tokens[0] * (1 + programs.sampler.config.speculative_tokens)
        return {"logits": 2 * sampled // sharing * sizes.vocab * 4}
    if program.name == "prefill":
        return {"activations": sizes.reading()}
    head = sizes.head(programs.bucket.answers)
    if program.name == "logprob":
        return {"activations": sizes.forward(), "logits": max(0, head // 2 - sizes.forward())}
    # The gradient of a micro-batch, before it is added to the others.
    gradients = aot.bytes_per_chip(programs.trained)
    layers = gradients + sizes.backward()
    made = {"gradients": gradients, "activations": sizes.saved() + sizes.backward()}
    return made | {"logits": max(0, head - layers)}


def _given(programs: aot.Programs, program: aot.Program) -> dict[str, int]:
    """What a program is given and what is held beside it, by PARTS; exact."""
    count, state = aot.bytes_per_chip, programs.state
    counts = state.step, state.skipped
    masters, optimizer = count(state.params), count((state.optimizer, counts))
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
    """What each program needs, in the order of aot.PHASES."""
    found = []
    for program in programs.of("all"):
        given, made = _given(programs, program), _made(programs, program)
        parts = {name: given.get(name, 0) + made.get(name, 0) for name in PARTS}
        found.append(Need(program.name, parts, program.resident))
    return found


# ------------------------------------------------------------------------- What could be changed


class Plan:
    """A run on a slice: what it needs, what would still fit, what would help."""

    def __init__(
        self,
        config: Config,
        policy: PolicyConfig,
        topology: topologies.Topology,
        length: int,
        bucket: packing.Bucket | None = None,
    ):
        """Args: see aot.Programs, which raises ValueError; so does a mesh that cannot be laid
        out."""
        self.config, self.policy, self.topology, self.length = config, policy, topology, length
        self.bucket = bucket
        sizes = meshes.axis_sizes(config.mesh, topology.chips)
        types = (AxisType.Auto,) * len(sizes)
        mesh: Any = AbstractMesh(sizes, meshes.AXES, axis_types=types)
        self.programs = aot.Programs(config, policy, mesh, length, bucket)
        self.needs = needs(self.programs)

    @property
    def fits(self) -> bool:
        return all(need.total <= self.topology.hbm for need in self.needs)

    def changed(self, **fields: Any) -> Plan:
        """The plan with fields of the config changed, by dotted names (two underscores here)."""
        config: Any = self.config.copy_and_resolve_references()
        with config.unlocked():
            config.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
        section = config.policy
        policy = dataclasses.replace(self.policy, remat=section.remat, ring=section.ring)
        return Plan(config, policy, self.topology, self.length, self.bucket)

    def largest(self) -> dict[str, int]:
        """The most rows that fit, by the field of the config that bounds them."""
        bucket, shards = self.programs.bucket, meshes.row_shards(self.programs.mesh)
        found = {}
        for field, tokens, names in (
            ("sampler__cache_tokens", self._cached, ("prefill", "decode")),
            ("packing__token_budget", bucket.length, ("accumulate",)),
        ):
            rows = 0
            while rows + shards <= _MOST_ROWS:
                fields: dict[str, Any] = {field: (rows + shards) * tokens}
                # The bucket that is asked about, whatever others the config has.
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
        """Tokens in the pool of a prompt with its answers, in whole pages."""
        shape, sampler = self.programs.sampler.shape, self.programs.sampler.config
        answers = self.programs.group * shape.pages_of(sampler.longest_answer)
        return (shape.pages_of(self.length) + answers) * shape.page_size

    def helpful(self) -> Iterator[tuple[str, Plan]]:
        """Changes, one at a time, that lower what the hungriest program needs."""
        worst = max(need.total for need in self.needs)
        for flag, fields in self._options():
            try:
                tried = self.changed(**fields)
            except ValueError:  # a mesh that the rows or buckets cannot be dealt out over
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
        if c.policy.remat not in ("page_size", "offload"):
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


# ------------------------------------------------------------------------------- What is printed


def table(plan: Plan) -> str:
    """A line a program, in GiB a chip."""
    lines = ["".join([f"{'':12}", *(f"{name:>13}" for name in PARTS), f"{'total':>10}"])]
    for need in plan.needs:
        cells = [f"{need.parts[name] / GIB:13.2f}" for name in PARTS]
        ending = "" if need.total <= plan.topology.hbm else "  too much"
        lines.append("".join([f"{need.program:12}", *cells, f"{need.total / GIB:10.2f}", ending]))
    return "\n".join(lines)


def describe(plan: Plan) -> str:
    """All that is printed about a plan."""
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
    app.run(main)
