"""Benchmark of one optimizer update, packed as [prompt | G answers] and as G separate rows."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import numpy as np

from benchmarks.base import PolicyBenchmark, best_seconds, make_learner
from launch import aot
from spell_jax.learner import packing, statistics
from spell_jax.policy.config import LoraConfig, PolicyConfig


@dataclasses.dataclass
class Update(PolicyBenchmark):
    """Times one update on the same groups in both layouts, with the same token budget.

    Each layout has a bucket that fits it. Peak bytes are the compiler's for a micro-batch of one
    group, weights and gradient included. "mfu" is the model's FLOP/s in the shared layout divided
    by the bfloat16 peak of all devices; null if the peak is not in statistics.PEAKS.
    """

    width: Annotated[int, "model width D"] = 128
    vocab: Annotated[int, "vocabulary V"] = 896
    prompt: Annotated[int, "prompt tokens P"] = 160
    response: Annotated[int, "tokens of an answer S"] = 20
    groups: Annotated[int, "prompts"] = 32
    lora: Annotated[int, "rank of adapters, which alone are trained; 0: all weights are"] = 0
    budget: Annotated[int, "tokens of a micro-batch"] = 8192
    repeats: Annotated[int, "timed updates"] = 3
    remat: Annotated[str, "what the backward pass recomputes"] = "none"
    attention: Annotated[str, "attention kernel"] = "auto"

    def run(self) -> dict[str, Any]:
        policy = dataclasses.replace(
            self.model,
            remat=self.remat,
            attention=self.attention,
            lora=LoraConfig(self.lora) if self.lora else None,
        )
        answers, single = self.group * self.response, self.prompt + self.response
        shared = self._measure(policy, packing.Bucket(self.prompt + answers, answers), "group")
        repeated = self._measure(policy, packing.Bucket(single, self.response), "none")
        operations = statistics.group_operations(policy, self.prompt, [self.response] * self.group)
        alone = self.group * statistics.group_operations(policy, self.prompt, [self.response])
        per_second = operations * self.groups / shared["seconds"]
        return {
            "shared_s": shared["seconds"],
            "repeated_s": repeated["seconds"],
            "ratio": repeated["seconds"] / shared["seconds"],
            "token_ratio": self.group * single / (self.prompt + answers),
            "flop_ratio": alone / operations,
            "shared_peak_bytes": shared["peak_bytes"],
            "repeated_peak_bytes": repeated["peak_bytes"],
            "gradient_norm_difference": abs(1 - repeated["norm"] / shared["norm"]),
            "tokens_per_s": self.groups * (self.prompt + answers) / shared["seconds"],
            "model_flops_per_s": per_second,
            "mfu": statistics.utilization(per_second, jax.devices()),
        }

    def _random_groups(self) -> list[packing.TrainGroup]:
        rng = np.random.default_rng(0)
        return [
            packing.TrainGroup(
                rng.integers(self.vocab, size=self.prompt),
                list(rng.integers(self.vocab, size=(self.group, self.response))),
                list(rng.normal(size=self.group)),
            )
            for _ in range(self.groups)
        ]

    def _measure(
        self, policy: PolicyConfig, bucket: packing.Bucket, shared_prefix: str
    ) -> dict[str, float]:
        """Measure one layout: best seconds of an update, gradient norm, peak bytes of one group."""
        groups = self._random_groups()
        group_tokens = bucket.length * (self.group if shared_prefix == "none" else 1)
        # Limit the budget to the data so that no row of a micro-batch is all padding.
        budget = min(self.budget, group_tokens * len(groups))
        learner = make_learner(policy, bucket, budget, self.dtype, shared_prefix)
        state = learner.init(jax.random.key(0))
        one_group = make_learner(policy, bucket, group_tokens, self.dtype, shared_prefix)
        one_group.frozen = learner.frozen
        memory = aot.memory_of(one_group.lower(state, bucket).compile())
        first = groups[0]
        short = [answer[:1] for answer in first.answers]
        compiling = dataclasses.replace(first, prompt=first.prompt[:1], answers=short)
        state, _ = learner.update(state, [compiling])
        norms = []

        def update() -> Any:
            nonlocal state
            state, numbers = learner.update(state, groups)
            norms.append(numbers["gradient_norm"])
            return state

        return {
            "seconds": best_seconds(update, self.repeats),
            "norm": norms[0],
            # The compiler's own peak omits the temporaries of a CPU program.
            "peak_bytes": memory["arguments"]
            + memory["temporaries"]
            + memory["outputs"]
            - memory["aliased"],
        }
