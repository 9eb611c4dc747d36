"""Benchmark of the step-time model: predicted and measured seconds of small shapes on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.base import (
    BenchmarkCommand,
    SamplerBenchmark,
    best_seconds,
    make_learner,
    random_groups,
    random_params,
)
from spell_jax.launch.step_time import Machine, Shares, tree_pairs
from spell_jax.launch.topologies import Peaks
from spell_jax.launch.work import ProgramCounts, Work
from spell_jax.learner import packing, trees
from spell_jax.sampler import batching
from spell_jax.sampler.requests import Options, SampleRequest
from spell_jax.sampler.scheduler import Scheduler

_GEMM_ROWS = 512  # of the product that measures the peak, as wide as the shape's MLP
# Bytes of the copied array that measures the memory; more than a CPU's caches hold.
_COPIED = 2**28
_GROUP = 4  # answers to a prompt


class ProgramShape(NamedTuple):
    """A program and its sizes."""

    phase: str  # "prefill", "decode" or "update"
    width: int
    layers: int
    prompt: int  # tokens of each prompt
    prompts: int
    answer: int = 1  # tokens of each of the prompts' answers


# A shape of each phase, by which the model is calibrated. The share of the peak depends on the CPU:
# prefill reached .87 of 75 GFLOP/s on one machine, .5 of 450 GFLOP/s on another.
CALIBRATION = {
    "prefill": ProgramShape("prefill", 384, 3, 1024, 2),
    "decode": ProgramShape("decode", 640, 3, 1024, 8, 32),
    "update": ProgramShape("update", 384, 3, 1024, 1, 64),
}
# Two widths and lengths of each phase; attention takes from a tenth to a half of the operations.
# Decoding is 512 wide or more: narrower passes consist of small operations, which nothing counts.
SHAPES = (
    ProgramShape("prefill", 256, 4, 1024, 2),
    ProgramShape("prefill", 512, 3, 2048, 1),
    ProgramShape("decode", 512, 3, 1024, 8, 32),
    ProgramShape("decode", 768, 3, 1024, 8, 32),
    ProgramShape("update", 256, 4, 1024, 1, 64),
    ProgramShape("update", 512, 3, 1536, 1, 128),
)


class Measurement(NamedTuple):
    """A shape's policy, the machine's peaks for it, its work, and the seconds of the work."""

    bench: SamplerBenchmark
    peaks: Peaks
    work: Work
    seconds: float

    @property
    def gemm_share(self) -> float:
        return (self.work.products + self.work.attention) / self.seconds / self.peaks.operations


@dataclasses.dataclass
class PlanBenchmark(BenchmarkCommand):
    """Seconds of six programs, predicted by launch/step_time.py from machine peaks, and measured.

    "shapes" has the numbers of each program. "gemm_flops_per_s" is the rate of a float32 product of
    512 rows as wide as the shape's MLP, "copy_bytes_per_s" the rate of an update of 256 MiB in
    place. "gemm_share" is the rate of all measured operations over "gemm_flops_per_s". "share" is
    the gemm_share of another shape of the same phase, measured before; all operations are predicted
    to reach it. "ratio" is predicted over measured seconds.
    """

    policy: Annotated[str, "config.json whose sizes, except layers, replace the shapes' width"] = ""
    repeats: Annotated[int, "timed calls, the fastest counts"] = 5
    vocab: Annotated[int, "vocabulary V"] = 4096

    def run(self) -> dict[str, Any]:
        shares = {phase: self._measure(shape).gemm_share for phase, shape in CALIBRATION.items()}
        return {"shapes": [self._compare(shape, shares[shape.phase]) for shape in SHAPES]}

    def _compare(self, shape: ProgramShape, share: float) -> dict[str, Any]:
        bench, peaks, work, measured_s = measurement = self._measure(shape)
        # One measured share for all operations; one device has no links.
        shares = Shares(*[share] * 4, memory=1.0, link=1.0, experts=1.0, hop_s=0.0)
        predicted = Machine(peaks, shares).seconds(shape.phase, work)
        return {
            **shape._replace(width=bench.width)._asdict(),
            "gemm_flops_per_s": peaks.operations,
            "copy_bytes_per_s": peaks.memory,
            "operations": work.products + work.attention,
            "attention_operations": work.attention,
            "gemm_share": measurement.gemm_share,
            "share": share,
            "bound": predicted.bound,
            "predicted_s": predicted.total,
            "measured_s": measured_s,
            "ratio": predicted.total / measured_s,
        }

    def _measure(self, shape: ProgramShape) -> Measurement:
        sizes: dict[str, Any] = {"width": shape.width, "layers": shape.layers, "vocab": self.vocab}
        prefill = shape.prompts * shape.prompt
        bench = SamplerBenchmark(self.policy, **sizes, group=_GROUP, prefill=prefill)
        peaks = self._peaks(bench)
        counts = bench.program_counts(shape.prompt)
        count = {"prefill": _prefill, "decode": _decode, "update": _update}[shape.phase]
        work, call = count(bench, shape, counts)
        call()  # compiles
        return Measurement(bench, peaks, work, best_seconds(call, self.repeats))

    def _peaks(self, bench: SamplerBenchmark) -> Peaks:
        width, wide = bench.model.width, bench.model.feed_forward
        a, b = jnp.ones((_GEMM_ROWS, width)), jnp.ones((width, wide))
        # By shape: the rate of a product depends on its width.
        product, add = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1, donate_argnums=0)
        large = jnp.zeros(_COPIED // 4)

        def copy() -> jax.Array:
            nonlocal large
            large = add(large)  # in place: new memory would be mapped page by page
            return large

        jax.block_until_ready((product(a, b), copy()))  # compiles
        operations = 2 * _GEMM_ROWS * width * wide
        seconds = best_seconds(lambda: product(a, b), 4 * self.repeats)
        copied = best_seconds(copy, 4 * self.repeats)
        return Peaks(operations / seconds, 2 * _COPIED / copied, 1.0)


# ----------------------------------------------------------------------------------------- Phases

Counted = tuple[Work, Callable[[], Any]]  # what the call does, and the call


class _Sampling:
    """A sampler's scheduler and state with one batch of prompts."""

    def __init__(self, bench: SamplerBenchmark, shape: ProgramShape):
        answers = shape.prompts * _GROUP
        sizes = {"samples_per_prompt_batch": _GROUP, "decode_tokens": shape.answer}
        self.sampler = bench.make_sampler(shape.prompt, shape.answer, answers, **sizes)
        self.params = random_params(bench.model, bench.dtype)
        self.state = self.sampler.init_state(np.dtype(bench.dtype))
        self.scheduler = Scheduler(self.sampler.shape, self.sampler.shards)
        rng, options = np.random.default_rng(0), Options(top_p=0.95, max_tokens=shape.answer)
        for number in range(shape.prompts):
            tokens = rng.integers(bench.vocab, size=shape.prompt)
            request = SampleRequest(tokens.tolist(), _GROUP, np.zeros(2, np.uint32), options)
            self.scheduler.submit(number, request)

    def place(self, batch: Any) -> Any:
        return batching.place(self.sampler.mesh, batch)

    def prefill(self) -> Callable[[], Any]:
        """Return a function that prefills all prompts in one call."""
        tasks = self.scheduler.plan_prefill()
        assert tasks is not None and self.scheduler.plan_prefill() is None
        longest = self.sampler.config.max_prompt
        batch = self.place(batching.prompt_pages(self.scheduler, tasks, longest))
        self.scheduler.fill_slots()

        def call() -> Any:
            with jax.set_mesh(self.sampler.mesh):
                self.state, _ = self.sampler.prefill(self.params, self.state, batch)
            return self.state

        return call

    def decode(self, steps: int) -> Callable[[], Any]:
        """Return a function that samples `steps` tokens in every slot."""
        jax.block_until_ready(self.prefill()())
        scheduler, lane = self.scheduler, self.sampler.shape.lane_of(_GROUP)
        limits = [shard.allocate_pages(shard.lanes[lane], steps) for shard in scheduler.shards]
        # More idle slots than there are: the call must not end early to refill them.
        enough = sum(map(len, limits)) + 1
        batch = self.place(batching.slots(scheduler, lane, limits, enough, self.sampler.config))

        def call() -> Any:
            with jax.set_mesh(self.sampler.mesh):
                self.state, sampled = self.sampler.decode(self.params, self.state, batch, lane=lane)
            return sampled

        return call


def _prefill(bench: SamplerBenchmark, shape: ProgramShape, counts: ProgramCounts) -> Counted:
    page, tokens = bench.page_size, shape.prompts * shape.prompt
    pages = range(0, shape.prompt, page)
    pairs = shape.prompts * shape.prompt * (shape.prompt + 1) / 2
    keys = shape.prompts * sum(start + page for start in pages)
    return counts.prefill(tokens, pairs, keys), _Sampling(bench, shape).prefill()


def _decode(bench: SamplerBenchmark, shape: ProgramShape, counts: ProgramCounts) -> Counted:
    answers, answer_pairs = shape.prompts * _GROUP, shape.answer * (shape.answer + 1) / 2
    pairs = answers * (shape.answer * shape.prompt + answer_pairs)
    keys = shape.prompts * shape.answer * shape.prompt + answers * answer_pairs
    work = counts.decode_pass(answers).times(shape.answer) + counts.decode_keys(pairs, keys)
    return work, _Sampling(bench, shape).decode(shape.answer)


def _update(bench: SamplerBenchmark, shape: ProgramShape, counts: ProgramCounts) -> Counted:
    answers = _GROUP * shape.answer
    bucket = packing.Bucket(shape.prompt + answers, answers)
    learner = make_learner(bench.model, bucket, shape.prompts * bucket.length, bench.dtype)
    rng, state = np.random.default_rng(0), learner.init(jax.random.key(0))
    prompts = rng.integers(bench.vocab, size=(shape.prompts, shape.prompt))
    groups = random_groups(rng, prompts, bench.vocab, _GROUP, shape.answer)
    sizes = [group.size for group in groups]
    pairs = sum(tree_pairs(bench.model, groups, tree) for tree in trees.single(sizes))
    rows = shape.prompts
    work = counts.micro_batch(rows * bucket.length, rows * bucket.answers, pairs)

    def call() -> Any:
        nonlocal state
        state, _ = learner.update(state, groups)
        return state

    return work + counts.apply() + counts.cast(), call
