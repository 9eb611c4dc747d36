"""Whole micro-batches and updates: MFU, tokens/s and memory, of trees and of repeated prompts.

1. Shapes of Qwen2.5-0.5B, 1.5B and 7B with random weights, bfloat16 compute, remat "block". Of 7B
   as many layers as launch.plan says fit. A tree is 16K tokens of documents with 4 questions and 8
   answers of 512 tokens to each.
2. "micro_batch_s" is forward and backward of one tree, "update_s" a whole update: packing, cast,
   one micro-batch and AdamW. Operations are the model's, without recomputation.
3. "peak_gib" is the largest memory that the device held, "planned_gib" the prediction of
   launch.plan for it.
4. The repeated layout has the same answers, each after its own copy of the prompt.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.accelerator import shapes, trace
from benchmarks.accelerator.section import Case, Numbers, Setting, seconds_of
from spell_jax.config import default_config
from spell_jax.data.samples import Sample
from spell_jax.launch import aot, memory_plan
from spell_jax.learner import packing
from spell_jax.learner.learner import Learner
from spell_jax.policy.config import PolicyConfig
from spell_jax.runtime import mesh as meshes

GIB = 2**30
# Of the device's memory that a plan may take. On an H200 launch.plan was within 4 %.
_PLANNED_SHARE = 0.9
_ASSUMED_GIB = 75  # of a device that does not tell its memory


@dataclasses.dataclass(frozen=True)
class UpdateSizes:
    """Tokens of a tree: K questions about the same documents, G answers to each."""

    prompt: int = 16_384
    question: int = 64
    questions: int = 4
    group: int = 8
    response: int = 512

    @property
    def tree(self) -> packing.Bucket:
        answers = self.questions * self.group * self.response
        length = self.prompt - self.question + self.questions * self.question + answers
        return packing.Bucket(length, answers)

    @property
    def row(self) -> packing.Bucket:
        """One prompt and one answer."""
        return packing.Bucket(self.prompt + self.response, self.response)


def cases(setting: Setting) -> Sequence[Case]:
    if setting.tiny:
        sizes = UpdateSizes(32, 4, 2, 2, 4)
        return [_case(setting, "tiny", shapes.TINY, sizes, layout) for layout in ("tree", "none")]
    models = {"0.5b": shapes.QWEN_05B, "1.5b": shapes.QWEN_15B, "7b": shapes.QWEN_7B}
    shared = [
        _case(setting, name, policy, UpdateSizes(), "tree") for name, policy in models.items()
    ]
    # Repeated rows of 7B would take a minute.
    repeated = [
        _case(setting, name, models[name], UpdateSizes(), "none") for name in ("0.5b", "1.5b")
    ]
    return [*shared, *repeated]


def _case(
    setting: Setting, name: str, policy: PolicyConfig, sizes: UpdateSizes, layout: str
) -> Case:
    """Make the case of a policy and a layout, a value of packing.shared_prefix."""
    policy = dataclasses.replace(policy, remat="block")
    # Cached, because preparation and measurement need the same programs.
    programs = functools.cache(functools.partial(_programs, policy, sizes, layout))
    return Case(
        f"{name}_{'shared' if layout == 'tree' else 'repeated'}",
        functools.partial(_measure, setting, name, programs, sizes, layout),
        limit=120,
        prepare=functools.partial(_compile, programs),
    )


def _programs(policy: PolicyConfig, sizes: UpdateSizes, layout: str) -> aot.RunPrograms:
    """Make the run's programs; if the policy does not fit, with as many layers as fit."""
    mesh = meshes.make_mesh(devices=jax.devices()[:1])
    bucket = sizes.tree if layout == "tree" else sizes.row
    config: Any = default_config("spell")
    config.algorithm.group_size = sizes.group
    config.policy.compute_dtype = "bfloat16"
    config.sampler.max_tokens = sizes.response
    budget = bucket.length * (1 if layout == "tree" else 2)
    config.packing.update(shared_prefix=layout, token_budget=budget)
    config.packing.buckets = ((bucket.length, bucket.answers),)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", _ASSUMED_GIB * GIB)
    # Fewer layers keep the shapes of all kernels, and so their speed.
    for layers in range(policy.layers, 0, -1):
        smaller = policy.with_layers(layers)
        programs = aot.RunPrograms(config, smaller, mesh, sizes.prompt, bucket)
        if _planned(programs) <= _PLANNED_SHARE * limit:
            return programs
    raise ValueError(f"not one layer fits into {limit / GIB:.0f} GiB, says launch.plan")


def _planned(programs: aot.RunPrograms) -> int:
    """Return the bytes that launch.plan predicts for the larger program of an update."""
    needs = [
        need for need in memory_plan.needs(programs) if need.program in ("accumulate", "apply")
    ]
    return max(need.total for need in needs)


def _compile(programs) -> None:
    """Compile the programs of an update into the cache on disk."""
    for program in programs().select("update"):
        program.lower().compile()


def _measure(setting: Setting, name: str, programs, sizes: UpdateSizes, layout: str) -> Numbers:
    learner, policy = programs().learner, programs().policy
    before = _peak_bytes()
    state = learner.init(jax.random.key(0))
    groups = _random_groups(policy, sizes)
    batches, refused = learner.pack(groups, learner.weigh(groups))
    assert not refused  # a refused answer would be work left out
    # Gradients accumulate over the calls; their values do not change the time.
    micro_batch_s, traced = _time_micro_batch(setting, learner, state, learner.place(batches[0]))
    update_s: list[float] = []
    updates: list[dict[str, float]] = []
    for _ in range(3 if layout == "tree" else 1):  # repeated rows have many micro-batches
        clock = time.perf_counter()
        state, numbers = learner.update(state, groups)
        jax.block_until_ready(state)
        update_s.append(time.perf_counter() - clock)
        updates.append(numbers)
    del state
    # The first update also loads programs; with repeated rows it is the only one.
    seconds, numbers = update_s[-1], updates[-1]
    micro_batch_tflops = numbers["operations"] / len(batches) / micro_batch_s / 1e12
    update_tflops = numbers["operations"] / seconds / 1e12
    peak = _peak_bytes()
    return {
        "layers": policy.layers,
        "micro_batch_s": micro_batch_s,
        "micro_batches": len(batches),
        "update_s": seconds,
        "tokens_per_s": numbers["trained_tokens"] / seconds,
        "tflops": update_tflops,
        "micro_batch_tflops": micro_batch_tflops,
        "micro_batch_mfu": setting.share(micro_batch_tflops, "bfloat16_tflops"),
        "mfu": setting.share(update_tflops, "bfloat16_tflops"),
        "answer_tokens_per_s": numbers["answer_tokens"] / seconds,
        # The device reports its peak since the process began, so a lower peak cannot be seen.
        "peak_gib": peak / GIB if peak > before else None,
        "planned_gib": _planned(programs()) / GIB,
        "gradient_norm": updates[0]["gradient_norm"],  # of the same weights in both layouts
        **_compared(setting, name, layout, seconds),
        **traced,
    }


def _time_micro_batch(
    setting: Setting, learner: Learner, state: Any, batch: packing.MicroBatch
) -> tuple[float, Numbers]:
    """Time forward plus backward of a micro-batch, and profile it."""
    with learner.on_mesh():
        params = learner.fns.cast(state.params)
        carry = learner.fns.empty_carry()

        def micro_batch() -> Any:
            nonlocal carry
            carry = learner.fns.accumulate(params, learner.frozen, carry, batch, None)
            return carry

        seconds = seconds_of(micro_batch, batches=3)["seconds"]
        return seconds, trace.profile(micro_batch, setting.out)


_UPDATE_SECONDS: dict[str, float] = {}  # of the shared layout, by shape


def _compared(setting: Setting, name: str, layout: str, seconds: float) -> Numbers:
    """Divide the seconds of the repeated layout by the seconds of the shared one."""
    if layout == "tree":
        _UPDATE_SECONDS[name] = seconds
        return {}
    earlier = setting.before.get("update", {}).get(f"{name}_shared", {})
    shared = _UPDATE_SECONDS.get(name) or earlier.get("update_s")
    return {"times_as_long_as_shared": seconds / shared if shared else None}


def _peak_bytes() -> int:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def _random_groups(policy: PolicyConfig, sizes: UpdateSizes) -> list[packing.TrainGroup]:
    """Make groups with the same documents; the questions differ from the first token on."""
    rng = np.random.default_rng(0)

    def tokens(*shape: int) -> np.ndarray:
        return rng.integers(policy.vocab_size, size=shape)

    documents, groups = tokens(sizes.prompt - sizes.question), []
    for number in range(sizes.questions):
        # A tree shares documents alone only if no two questions begin with equal tokens.
        question = np.concatenate([[number], tokens(sizes.question - 1)])
        samples = [Sample(answer) for answer in tokens(sizes.group, sizes.response)]
        rewards = list(rng.normal(size=sizes.group))
        prompt = np.concatenate([documents, question])
        groups.append(packing.TrainGroup(prompt, samples, rewards, "answers"))
    return groups
