"""Benchmark of the shapes of micro-batches: how full they are, and how many a run needs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np

from benchmarks.base import BenchmarkCommand
from spell_jax.learner import packing
from spell_jax.learner.packing import TrainGroup
from spell_jax.learner.shapes import AUTO, Bucket

# Buckets of a config that lists them for prompts of up to 16K and answers of up to 4K tokens.
_LONG = (Bucket(8192, 4096), Bucket(24_576, 16_384), Bucket(51_200, 32_768))


class Mix(NamedTuple):
    """The groups of a kind of step, and buckets that a config lists for them."""

    make: Callable[[np.random.Generator], list[TrainGroup]]
    buckets: tuple[Bucket, ...]
    token_budget: int


class _Tokens:
    """Dummy token ids, the same for the same name and no other."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}

    def __call__(self, length: int, *name: Any) -> np.ndarray:
        return np.full(length, self._numbers.setdefault(name, len(self._numbers)), np.int32)


def _group(prompt: np.ndarray, lengths: np.ndarray, role: str = "responder") -> TrainGroup:
    answers = [np.zeros(length, np.int32) for length in lengths]
    return TrainGroup(prompt, answers, [0.0] * len(answers), role)


def _lengths(rng: np.random.Generator, mean: int, cap: int, count: int) -> np.ndarray:
    return rng.geometric(1 / mean, count).clip(max=cap)


def _demo(rng: np.random.Generator) -> list[TrainGroup]:
    """Make a step of configs/tiny.py, with the means and ranges of its first 12 steps."""
    tokens, questions = _Tokens(), int(rng.integers(10, 21))
    groups = []
    for item in range(questions):
        prompt = tokens(int(rng.integers(60, 111)), "documents", item)
        groups.append(_group(prompt, _lengths(rng, 20, 48, 8)))
    for item in range(2 * questions):
        groups.append(_group(tokens(19, "shown", item), _lengths(rng, 40, 48, 1), "questioner"))
    for item in range(int(rng.integers(1, 6))):
        groups.append(_group(tokens(12, "asked", item), np.full(8, 2), "verifier"))
    return groups


def _short(rng: np.random.Generator) -> list[TrainGroup]:
    """Make 8 prompts of 200 to 2,000 tokens, each with 4 answers of 1 to 256 tokens."""
    tokens = _Tokens()
    lengths = rng.integers(200, 2001, 8)
    return [_group(tokens(int(n), i), rng.integers(1, 257, 4), "") for i, n in enumerate(lengths)]


def _paper(rng: np.random.Generator, questions_per_cluster: int = 1) -> list[TrainGroup]:
    """Make a step of configs/paper.py: 128 questions about clusters of 8K to 16K tokens.

    The questioner reads half of the documents. Answers and questions have 409 tokens on average
    and at most 4,096. Verdicts have 64 tokens on average.
    """
    tokens, groups = _Tokens(), []
    sizes = rng.integers(8000, 16_257, 256 // questions_per_cluster)
    for item in range(256):
        cluster = item // questions_per_cluster
        shown = tokens(int(sizes[cluster]) // 2, "shown", cluster)
        groups.append(_group(shown, _lengths(rng, 409, 4096, 1), "questioner"))
        question = tokens(128, "question", item)
        if item < 128:
            documents = tokens(int(sizes[cluster]), "documents", cluster)
            prompt = np.concatenate([documents, question])
            groups.append(_group(prompt, _lengths(rng, 409, 4096, 8)))
            verdict = np.concatenate([tokens(400, "template"), question, tokens(409, "a", item)])
            groups.append(_group(verdict, _lengths(rng, 64, 4096, 8), "verifier"))
    return groups


MIXES = {
    "demo": Mix(_demo, (Bucket(320, 224),), 1600),
    "200_to_2000": Mix(_short, _LONG, 51_200),
    "paper_16k": Mix(_paper, _LONG, 51_200),
    "paper_16k_trees": Mix(lambda rng: _paper(rng, 4), _LONG, 51_200),
}


@dataclasses.dataclass
class Packing(BenchmarkCommand):
    """Simulated steps of four mixes, packed into listed buckets and into chosen shapes.

    Prints a line for each: `fill`, the share of row tokens that is no padding, over all steps, and
    of the worst step; the same of answer slots; micro-batches of a step; `shapes`, the number of
    different [rows, T, A] in all steps, each of which is a program; milliseconds to choose them.
    """

    steps: Annotated[int, "steps of each mix"] = 50
    shards: Annotated[int, "devices along the rows of a micro-batch"] = 1
    context: Annotated[int, "devices along the tokens of a row"] = 1
    seed: Annotated[int, "seed of the sizes"] = 0

    def run(self) -> list[dict[str, Any]]:
        lines = []
        for name, mix in MIXES.items():
            for buckets in (mix.buckets, AUTO):
                lines.append({"mix": name} | self._measure(mix, buckets))
        return lines

    def _measure(self, mix: Mix, buckets: tuple[Bucket, ...] | str) -> dict[str, Any]:
        layout = packing.PackingConfig(buckets, mix.token_budget)
        sizes = buckets, mix.token_budget, self.shards, self.context
        shapes, steps, seconds, batches = set(), [], 0.0, 0
        for step in range(self.steps):
            groups = mix.make(np.random.default_rng([self.seed, step]))
            fitting, _ = packing.split_groups(groups, layout.largest(self.context))
            start = time.perf_counter()
            laid_out = packing.lay_out(fitting, *sizes)
            seconds += time.perf_counter() - start
            batches += len(laid_out)
            shapes |= {(bucket, count) for bucket, count, _ in laid_out}
            trees = [tree.size for *_, rows in laid_out for row in rows for tree in row]
            steps.append(
                (
                    sum(size.tokens for size in trees),
                    sum(bucket.length * count for bucket, count, _ in laid_out),
                    sum(size.answers for size in trees),
                    sum(bucket.answers * count for bucket, count, _ in laid_out),
                )
            )
        tokens, slots, answers, answer_slots = np.transpose(steps)
        return {
            "buckets": AUTO if buckets == AUTO else [[b.length, b.answers] for b in mix.buckets],
            "token_budget": mix.token_budget,
            "fill": float(tokens.sum() / slots.sum()),
            "least_fill": float((tokens / slots).min()),
            "answer_fill": float(answers.sum() / answer_slots.sum()),
            "micro_batches": batches / self.steps,
            "shapes": len(shapes),
            "milliseconds": 1e3 * seconds / self.steps,
        }
