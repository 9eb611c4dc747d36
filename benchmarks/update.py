"""Benchmark of one optimizer update, packed as trees and as a separate row for each answer."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import numpy as np

from benchmarks.base import PolicyBenchmark, best_seconds, make_learner, random_groups
from benchmarks.sides.contract import share_documents
from spell_jax.data.samples import Sample
from spell_jax.launch import aot
from spell_jax.learner import packing, statistics
from spell_jax.policy.config import LoraConfig, PolicyConfig


@dataclasses.dataclass
class UpdateBenchmark(PolicyBenchmark):
    """Seconds of one update on the same groups in both layouts, with the same token budget.

    K groups in a row have prompts that differ in their last tokens alone, so that they share a
    tree; with K = 1 a tree is [prompt | G answers]. Each layout has a bucket that fits it. Peak
    bytes are the compiler's for a micro-batch of one tree, weights and gradient included. "mfu" is
    the model's FLOP/s in the shared layout divided by the bfloat16 peak of all devices; null if the
    peak is not in statistics.PEAKS.
    """

    width: Annotated[int, "model width D"] = 128
    vocab: Annotated[int, "vocabulary V"] = 896
    prompt: Annotated[int, "prompt tokens P"] = 160
    response: Annotated[int, "tokens of an answer S"] = 20
    groups: Annotated[int, "prompts, a multiple of K"] = 32
    questions: Annotated[int, "prompts K about the same documents"] = 1
    question: Annotated[int, "last tokens of a prompt, in which the K prompts differ"] = 1
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
        if self.groups % self.questions:
            raise ValueError(f"groups = {self.groups}: must be a multiple of {self.questions}")
        answers, single = self.group * self.response, self.prompt + self.response
        tree = self.prompt - self.question + self.questions * (self.question + answers)
        shared = self._measure(policy, packing.Bucket(tree, self.questions * answers), "tree")
        repeated = self._measure(policy, packing.Bucket(single, self.response), "none")
        trees, per_second = self.groups // self.questions, shared["operations"] / shared["seconds"]
        return {
            "shared_s": shared["seconds"],
            "repeated_s": repeated["seconds"],
            "ratio": repeated["seconds"] / shared["seconds"],
            "token_ratio": self.groups * self.group * single / (trees * tree),
            "flop_ratio": repeated["operations"] / shared["operations"],
            "shared_peak_bytes": shared["peak_bytes"],
            "repeated_peak_bytes": repeated["peak_bytes"],
            "gradient_norm_difference": abs(1 - repeated["norm"] / shared["norm"]),
            "tokens_per_s": trees * tree / shared["seconds"],
            "model_flops_per_s": per_second,
            "mfu": statistics.utilization(per_second, jax.devices()),
        }

    def _random_groups(self) -> list[packing.TrainGroup]:
        rng = np.random.default_rng(0)
        tokens = rng.integers(self.vocab, size=(self.groups, self.prompt))
        prompts = share_documents(tokens, self.questions, self.question)
        # The first token of a question is its number, so that no two share it.
        prompts[:, -self.question] = np.arange(self.groups) % self.questions
        return random_groups(rng, prompts, self.vocab, self.group, self.response)

    def _measure(
        self, policy: PolicyConfig, bucket: packing.Bucket, shared_prefix: str
    ) -> dict[str, float]:
        """Measure one layout: best seconds of an update, its operations and gradient norm, and the
        peak bytes of one tree.
        """
        # The same groups in both layouts, so that "gradient_norm_difference" checks them.
        groups = self._random_groups()
        rows = self.questions * self.group if shared_prefix == "none" else 1  # of a tree
        tree_tokens = bucket.length * rows
        # Limit the budget to the data so that no row of a micro-batch is all padding.
        budget = min(self.budget, tree_tokens * len(groups) // self.questions)
        learner = make_learner(policy, bucket, budget, self.dtype, shared_prefix)
        state = learner.init(jax.random.key(0))
        # Peak memory is compared for the same prompts and answers, not for the same token budget.
        one_tree = make_learner(policy, bucket, tree_tokens, self.dtype, shared_prefix)
        one_tree.frozen = learner.frozen
        memory = aot.memory_of(one_tree.lower(state, bucket).compile())
        # A prompt and answers of one token compile the programs and cost nothing.
        first = groups[0]
        short = [Sample(sample.tokens[:1]) for sample in first.samples]
        compiling = dataclasses.replace(first, prompt=first.prompt[:1], samples=short)
        state, _ = learner.update(state, [compiling])
        norms, operations = [], 0.0

        def update() -> Any:
            nonlocal state, operations
            state, numbers = learner.update(state, groups)
            norms.append(numbers["gradient_norm"])
            operations = numbers["operations"]
            return state

        return {
            "seconds": best_seconds(update, self.repeats),
            "norm": norms[0],
            "operations": operations,
            # The compiler's own peak omits the temporaries of a CPU program.
            "peak_bytes": memory["arguments"]
            + memory["temporaries"]
            + memory["outputs"]
            - memory["aliased"],
        }
