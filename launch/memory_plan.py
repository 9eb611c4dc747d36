"""Estimate the memory per chip of a run's programs without compiling, and changes that lower it.

1. The programs are aot.py's, built on abstract meshes, so libtpu is not needed.
2. A program's arguments and the memory resident besides them are exact: bytes of sharded shapes.
3. Its temporaries are estimated from shapes. The factors were fitted to the compiler's results in
   docs/long_context.md, and every program's peak is within 25 % of its result.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from spell_jax.launch import aot, topologies
from spell_jax.learner import packing, shapes
from spell_jax.policy import moe
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import entry
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.config import Config
from spell_jax.trainer import transfer

SAMPLING = ("prefill", "decode")  # programs of the sampling chips
PARTS = ("weights", "masters", "optimizer", "gradients", "activations", "KV cache", "logits")
_MOST_ROWS = 4096  # bound of the search for the largest batch


class Need(NamedTuple):
    """Bytes on one chip while a program runs."""

    program: str  # name, as in aot.py
    parts: dict[str, int]  # bytes of each of PARTS
    resident: int  # bytes among them that are neither arguments nor temporaries of the program

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class _Temporaries:
    """Estimated bytes of temporaries, per chip, of a program that reads [rows, tokens].

    Sizes are those on this chip; only `row_tokens` spans all context shards.
    """

    def __init__(self, programs: aot.RunPrograms, program: aot.Program):
        c, mesh = programs.policy, program.mesh
        rows, self.row_tokens = program.tokens
        self.policy, self.itemsize = c, programs.learner.compute_dtype.itemsize
        self.context = meshes.context_shards(mesh)
        self.rows = rows // meshes.row_shards(mesh)
        self.tokens = self.rows * self.row_tokens // self.context
        tensor, self.expert_shards = mesh.shape[meshes.TENSOR], mesh.shape[meshes.EXPERT]
        # What does not divide over `tensor` is repeated on each of its chips.
        self.heads, kv_heads, self.feed_forward, self.vocab = (
            size // tensor if size % tensor == 0 else size
            for size in (c.heads, c.kv_heads, c.feed_forward, c.vocab_size)
        )
        self.query_width, self.key_width = self.heads * c.head_size, kv_heads * c.head_size
        shards = mesh.shape["fsdp"] * self.context
        # XLA splits a product, to overlap its gather, if each weight shard is a multiple of 16
        # wide, that is, whole registers.
        self.overlapped = c.width % shards == 0 and c.width // shards % 16 == 0

    def per_token(self, count: float) -> int:
        """Count the bytes of `count` numbers for each token on the chip."""
        return int(self.tokens * count * self.itemsize)

    def layer(self) -> int:
        """Count the bytes of a layer's all-gathered weights, without experts."""
        numbers = 2 * (self.query_width + self.key_width)
        numbers += 3 * self.feed_forward * (not self.policy.experts)
        return self.policy.width * numbers * self.itemsize

    def experts(self) -> int:
        """Count the bytes of a layer's all-gathered experts that one chip multiplies with."""
        c = self.policy
        return 3 * c.experts // self.expert_shards * c.width * self.feed_forward * self.itemsize

    def pairs(self, numbers: int) -> int:
        """Count the bytes of `numbers` numbers for each (token, expert) pair in a chunk."""
        tokens = min(moe.CHUNK, self.tokens * self.expert_shards)
        return tokens * self.policy.experts_per_token * numbers * self.itemsize

    def keys(self) -> int:
        """Count bytes of K and V on a chip at once: a whole row, or two shards."""
        # A ring holds the present shard and receives the next one. With windows, a round of keys of
        # all devices is at most one shard.
        in_shards = self.policy.ring or self.policy.window
        share = 2 / self.context if in_shards and self.context > 1 else 1
        rows = self.rows if self.context > 1 else 1
        return int(rows * self.row_tokens * share) * 2 * self.key_width * self.itemsize

    def prefill(self) -> int:
        """Estimate a prefill's peak: queries of all context shards, float32 attention outputs."""
        return self.rows * self.row_tokens * self.query_width * (2 * self.itemsize + 4)

    def saved(self) -> int:
        """Count the bytes of the activations that all layers save for the backward pass."""
        width, queries = self.policy.width, self.query_width
        # Results of q, k, v, o, down, gate and up.
        products = queries + 2 * self.key_width + 2 * width + 2 * self.feed_forward
        by_remat = {
            "offload": 0.0,  # a layer's input goes to the host's memory
            "block": width,
            # Also attention's result, and its float32 log-sum-exp of each head.
            "attention": width + queries + self.heads * 4 / self.itemsize,
            "dots": width + products,
            "none": 2 * width + 2 * queries + 2 * products + 2 * self.feed_forward,
        }
        return self.policy.layers * self.per_token(by_remat[self.policy.remat])

    def forward(self) -> int:
        """Estimate the peak temporaries of a layer's forward pass."""
        # Fitted: about a third of a layer's gathered weights is in memory at once.
        attention = self.keys() + self.per_token(3 * self.query_width) + self.layer() // 3
        if self.policy.experts:
            return max(attention, self.experts() + self.pairs(2 * self.policy.width) + self.layer())
        width = (3 if self.overlapped else 1) * self.feed_forward
        return max(attention, self.per_token(width) + self.layer() // 3)

    def backward(self) -> int:
        """Estimate a layer's peak temporaries in backward, with the recomputed forward pass."""
        width, queries = self.policy.width, self.query_width
        kept_bytes = self.per_token(2 * queries + 4 * width)
        # Keys, keys after RoPE, and gradients in the compute dtype and (to be summed) in float32.
        keys = 3 * self.keys() + 8 * self.keys() // self.itemsize
        attention = kept_bytes + keys + self.per_token(6 * queries)
        if self.policy.experts:
            sums = self.experts() * 4 // self.itemsize
            pairs = self.pairs(5 * width + 3 * self.feed_forward)
            return max(attention, kept_bytes + self.experts() + sums + pairs + self.layer())
        gradient = width * self.feed_forward * 4  # float32, of one matrix before its reduce-scatter
        feed_forward = self.per_token(5 * self.feed_forward) + self.layer() + gradient
        return max(attention, kept_bytes + feed_forward)

    def head(self, answers: int) -> int:
        """Estimate the LM head's peak: answer states, a slice of logits and weights, gradients."""
        device_answers = self.rows * answers // self.context
        # lm_head.py computes slices of at most 2^26 float32 logits, and at least 128 table rows.
        slices = 3 * min(2**26, max(device_answers * self.vocab, 128 * device_answers)) * 4
        return (
            slices + (self.rows * answers + 3 * device_answers) * self.policy.width * self.itemsize
        )


def _temporaries(programs: aot.RunPrograms, program: aot.Program) -> dict[str, int]:
    """Estimate the bytes of a program's temporaries, by PARTS."""
    if program.name == "apply":
        # The optimizer's two moments of each weight are copied from the host and back.
        offloaded = programs.config.optimizer.offload
        return {"optimizer": 4 * aot.bytes_per_chip(programs.state.params) if offloaded else 0}
    sizes = _Temporaries(programs, program)
    if program.name == "decode":
        # Devices along fsdp compute their rows together: logits as partial sums and as sums.
        sharing = program.mesh.shape["data"] * program.mesh.shape[meshes.EXPERT]
        sampled = program.tokens[0] * (1 + programs.sampler.config.speculative_tokens)
        return {"logits": 2 * sampled // sharing * sizes.vocab * 4}
    if program.name == "prefill":
        return {"activations": sizes.prefill()}
    head = sizes.head(programs.bucket.answers)
    if program.name == "logprob":
        return {"activations": sizes.forward(), "logits": max(0, head // 2 - sizes.forward())}
    # The gradient of one micro-batch, before it is added to the accumulated one.
    gradients, backward = aot.bytes_per_chip(programs.trained), sizes.backward()
    parts = {"gradients": gradients, "activations": sizes.saved() + backward}
    return parts | {"logits": max(0, head - gradients - backward)}


def _state_bytes(programs: aot.RunPrograms) -> Counter[str]:
    """Compute the exact bytes of the training state, by PARTS."""
    count, state = aot.bytes_per_chip, programs.state
    optimizer = count((state.opt_state, state.step, state.skipped))
    return Counter({"masters": count(state.params), "optimizer": optimizer})


def arguments_and_resident(programs: aot.RunPrograms, program: aot.Program) -> Counter[str]:
    """Compute the exact bytes of a program's arguments and of resident memory, by PARTS."""
    count, arguments = aot.bytes_per_chip, program.arguments
    is_sampling = program.name in SAMPLING
    # The state is an argument of `apply`, and resident during every other program of its chips.
    parts = Counter() if is_sampling and programs.meshes.are_split else _state_bytes(programs)
    if program.name == "apply":
        _, gradients, loss = map(count, arguments)
        return parts + Counter(gradients=gradients, activations=loss, weights=program.resident)
    if programs.is_interleaved and is_sampling:
        parts["gradients"] += count(programs.carry())
    if programs.is_interleaved and program.name == "accumulate":
        parts["KV cache"] += count(programs.sampler_state)
    parts["weights"] += program.resident - parts.total()
    if program.name == "accumulate":
        parts["gradients"] += count(arguments[2])
        parts["activations"] += count(arguments[3])
        parts["weights"] += count((arguments[:2], arguments[4]))
    elif program.name == "logprob":
        parts["weights"] += count(arguments)
    else:
        params, sampler_state, _ = arguments
        cache = count(sampler_state.pages)
        parts["weights"] += count(params)
        parts["KV cache"] += cache
        parts["activations"] += count(arguments[1:]) - cache
    return parts


def _transfer(programs: aot.RunPrograms) -> Need:
    """Compute the memory of training chips during a copy of weights to the sampling chips."""
    count, parts = aot.bytes_per_chip, _state_bytes(programs)
    resident = programs.program("logprob").resident + count(programs.frozen)
    # The cast weights, and in place those of the update too, which has begun (trainer/loop.py).
    is_in_place = programs.config.mesh.transfer == "in_place"
    parts["weights"] = resident - parts.total() + (1 + is_in_place) * count(programs.trained)
    parts["gradients"] = is_in_place * count(programs.carry())
    # A piece, and the parts that are cut from it.
    parts["activations"] = 2 * transfer.largest_piece(programs.trained)
    return Need("transfer", {name: parts[name] for name in PARTS}, resident)


def needs(programs: aot.RunPrograms) -> list[Need]:
    """Compute the memory that each program needs, in the order of aot.PROGRAMS.

    With mesh.rollout_devices, the copies of weights count as a last program, "transfer".
    """
    program_needs = []
    for program in programs.select("all"):
        exact = arguments_and_resident(programs, program)
        estimated = Counter(_temporaries(programs, program))
        parts = {name: exact[name] + estimated[name] for name in PARTS}
        program_needs.append(Need(program.name, parts, program.resident))
    return program_needs + [_transfer(programs)] * programs.meshes.are_split


# ------------------------------------------------------------------------------------------- Plan


class MemoryPlan:
    """Memory plan of a run on a slice: needs, largest batches that fit, and changes that help.

    The arguments equal aot.RunPrograms's, with the slice for the meshes. Raises ValueError if a
    field is invalid or a mesh does not match the slice.
    """

    def __init__(
        self,
        config: Config,
        policy: PolicyConfig,
        topology: topologies.Topology,
        length: int,
        bucket: packing.Bucket | None = None,
    ):
        """Build the run's programs on abstract meshes over the slice."""
        self.config, self.policy, self.topology = config, policy, topology
        self.length, self.bucket = length, bucket
        mesh, rollout_mesh = topologies.abstract_meshes(topology, aot.read_mesh(config))
        self.programs = aot.RunPrograms(config, policy, mesh, length, bucket, rollout_mesh)
        entry.setup_done()
        self.needs = needs(self.programs)
        self.worst = max(self.needs, key=lambda need: need.total)

    @property
    def fits(self) -> bool:
        return self.worst.total <= self.topology.hbm

    def changed(self, fields: Mapping[str, Any]) -> MemoryPlan:
        """Return the plan with other values of config fields, given by dotted name."""
        config: Any = copy.deepcopy(self.config)  # keeps each field's type
        with config.unlocked():
            config.update_from_flattened_dict(fields)
        section, lora = config.policy, self.policy.lora
        if lora is not None:
            lora = dataclasses.replace(lora, base_dtype=section.base_dtype)
        policy = dataclasses.replace(self.policy, remat=section.remat, ring=section.ring, lora=lora)
        return MemoryPlan(config, policy, self.topology, self.length, self.bucket)

    def largest(self) -> dict[str, int]:
        """Find the largest values that fit of the batch-bounding fields: dotted name -> tokens."""
        bucket = self.programs.bucket
        training, sampling = self._row_shards
        planned: dict[str, Any] = {
            "packing.token_budget": max(self.config.packing.token_budget, bucket.length)
        }
        if self.config.packing.buckets != shapes.AUTO:
            # Only the planned bucket: the config's other buckets may be larger than the budget.
            planned["packing.buckets"] = ((bucket.length, bucket.answers),)
        largest_tokens = {}
        for field, tokens, names, shards in (
            ("sampler.kv_cache_tokens", self._cached, SAMPLING, sampling),
            ("packing.token_budget", bucket.length, ("accumulate",), training),
        ):

            def is_too_much(rows: int, field=field, tokens=tokens, names=names) -> bool:
                tried = self.changed(planned | {field: rows * tokens}).needs
                return any(n.total > self.topology.hbm for n in tried if n.program in names)

            # More rows take more memory. Doubled first, since plans of many rows take long.
            bound = shards
            while bound <= _MOST_ROWS and not is_too_much(bound):
                bound *= 2
            counts = range(shards, min(bound, _MOST_ROWS + 1), shards)
            fitting = bisect.bisect(counts, False, lo=len(counts) // 2, key=is_too_much)
            largest_tokens[field] = fitting * shards * tokens
        return largest_tokens

    @property
    def _row_shards(self) -> tuple[int, int]:
        """Shards of rows: (of the training mesh, of the sampling mesh)."""
        run_meshes = self.programs.meshes
        return meshes.row_shards(run_meshes.training), meshes.row_shards(run_meshes.sampling)

    @property
    def _cached(self) -> int:
        """KV cache tokens of one prompt with its G answers, in whole pages.

        Layers with a window hold only what is in reach.
        """
        shape, sampler = self.programs.sampler.shape, self.programs.sampler.config
        answers = self.programs.group * shape.answer_pages(sampler.max_tokens)
        pages = shape.prompt_pages(self.length) + answers
        return -(-pages // shape.groups) * shape.page_size

    def helpful(self) -> Iterator[tuple[str, MemoryPlan]]:
        """Yield (flags, plan) of single changes that lower the largest program's memory."""
        for fields in self._options():
            tried = self._improved(fields)
            if tried is not None:
                yield _as_flags(fields), tried

    def combined(self) -> tuple[str, MemoryPlan]:
        """Return (flags, plan) of changes made together, until all fits or none helps any more."""
        plan, changes = self, {}
        # Twice: a change of one program helps only once no other program needs more memory.
        for fields in 2 * [*self._options()]:
            if plan.fits:
                break
            tried = plan._improved(fields)
            if tried is not None:
                plan, changes = tried, changes | fields
        return _as_flags(changes), plan

    def _improved(self, fields: dict[str, Any]) -> MemoryPlan | None:
        """Return the plan with changed fields; None if it needs no less memory or cannot be."""
        try:
            tried = self.changed(fields)
        except ValueError:  # rows or buckets do not divide over the changed mesh
            return None
        return tried if tried.worst.total < self.worst.total else None

    def _options(self) -> Iterator[dict[str, Any]]:
        c = self.config
        training, sampling = self._row_shards
        rows = training * self.programs.bucket.length
        if c.packing.buckets != shapes.AUTO:
            rows = max(rows, c.packing.buckets[-1][0])
        if c.packing.token_budget >= rows + training:
            yield {"packing.token_budget": rows}
        if c.sampler.kv_cache_tokens >= sampling * (self._cached + 1):
            yield {"sampler.kv_cache_tokens": sampling * self._cached}
        for remat in ("block", "offload"):
            if c.policy.remat not in (remat, "offload"):
                yield {"policy.remat": remat}
        if self.policy.lora and not self.policy.has_int8_base and not self.policy.experts:
            yield {"policy.base_dtype": "int8"}
        if not c.optimizer.offload:
            yield {"optimizer.offload": True}
        if self.programs.meshes.training.shape["context"] > 1 and not (
            c.policy.ring or self.policy.window
        ):
            yield {"policy.ring": True}
        for field, mesh in self.programs.meshes.by_field().items():
            yield from _moves(field, mesh.shape)
        if self.programs.meshes.are_split:
            yield from self._splits()

    def _splits(self) -> Iterator[dict[str, Any]]:
        """Yield changes that move chips between the meshes, or hold fewer sets of weights."""
        c = self.config
        for rollout_devices in {c.mesh.rollout_devices // 2, 2 * c.mesh.rollout_devices} - {0}:
            yield {"mesh.rollout_devices": rollout_devices}
        if c.staleness > 1:
            yield {"staleness": c.staleness - 1}
        if c.mesh.transfer == "overlapped":
            yield {"mesh.transfer": "in_place", "staleness": 1}


def _as_flags(fields: Mapping[str, Any]) -> str:
    return " ".join(f"--config.{name}={value}" for name, value in fields.items())


def _moves(field: str, sizes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield changes of a mesh that move chips to `context`, which splits a single row."""
    for axis in ("data", "fsdp", "expert"):
        for factor in (2**i for i in range(1, sizes[axis].bit_length())):
            if sizes[axis] % factor == 0:
                context = sizes["context"] * factor
                yield {f"{field}.{axis}": sizes[axis] // factor, f"{field}.context": context}
