"""Tests of how full micro-batches are, and how many shapes a run needs, on simulated steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from spell_jax.data.samples import Sample
from spell_jax.learner import packing
from spell_jax.learner.packing import TrainGroup
from spell_jax.learner.shapes import AUTO, Bucket
from tests.paths import ROOT

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


def _group(prompt: np.ndarray, lengths: np.ndarray, name: str = "responder") -> TrainGroup:
    samples = [Sample(np.zeros(length, np.int32)) for length in lengths]
    return TrainGroup(prompt, samples, [0.0] * len(samples), name)


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


@functools.cache
def measure(
    name: str, auto: bool, steps: int, shards: int = 1, context: int = 1
) -> dict[str, float]:
    """Measure how full the micro-batches of simulated steps are.

    Args:
      name: key of MIXES.
      auto: whether the groups choose the shapes; else the mix's buckets are the shapes.
      steps: number of steps.
      shards: devices along the rows of a micro-batch.
      context: devices along the tokens of a row.

    Returns:
      "fill", the share of row tokens that is no padding, over all steps; "least_fill", of the worst
      step; "answers", the share of answer slots that is no padding; "shapes", the number of
      different [rows, T, A] in all steps, each of which is a program.
    """
    mix = MIXES[name]
    buckets = AUTO if auto else mix.buckets
    longest = packing.PackingConfig(buckets, mix.token_budget).largest(context)
    shapes, counts = set(), []
    for step in range(steps):
        parts, _ = packing.split_groups(mix.make(np.random.default_rng([0, step])), longest)
        groups = [part.group for part in parts]
        micro_batches = packing.lay_out(groups, buckets, mix.token_budget, shards, context)
        shapes |= {(bucket, rows) for bucket, rows, _ in micro_batches}
        trees = [tree.size for *_, rows in micro_batches for row in rows for tree in row]
        counts.append(
            (
                sum(size.tokens for size in trees),
                sum(bucket.length * rows for bucket, rows, _ in micro_batches),
                sum(size.answers for size in trees),
                sum(bucket.answers * rows for bucket, rows, _ in micro_batches),
            )
        )
    tokens, slots, answers, answer_slots = np.transpose(counts)
    return {
        "fill": float(tokens.sum() / slots.sum()),
        "least_fill": float((tokens / slots).min()),
        "answers": float(answers.sum() / answer_slots.sum()),
        "shapes": len(shapes),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name.startswith("paper") else ())
        for name in MIXES
    ],
)
def test_chosen_shapes_fill_each_mix_in_few_programs(name: str) -> None:
    listed, auto = (measure(name, auto, steps=50) for auto in (False, True))
    assert auto["fill"] > 0.9 and auto["least_fill"] > 0.85
    assert auto["answers"] > listed["answers"]
    if name.startswith("paper"):
        assert auto["shapes"] <= listed["shapes"] == 3


@pytest.mark.long
def test_table_of_the_page_has_the_simulated_numbers() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    _, _, table = page.partition("| mix | fill, listed |")
    rows = [line.strip("| ").split(" | ")[1:] for line in table.splitlines()[2 : 2 + len(MIXES)]]
    assert [[float(cell) for cell in row] for row in rows] == [
        [
            round(measure(name, auto, steps=50)[number], 3)
            for number in ("fill", "answers", "shapes")
            for auto in (False, True)
        ]
        for name in MIXES
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXES)
def test_chosen_shapes_on_many_devices_are_no_emptier_than_listed_buckets(name: str) -> None:
    listed, auto = (measure(name, auto, steps=3, shards=8, context=4) for auto in (False, True))
    assert auto["fill"] > listed["fill"]
