"""Functions that tests name in configs as "tests.hook_module:NAME"."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from spell_jax.algorithms.held_out import Evaluated
from spell_jax.data.clusters import Cluster
from spell_jax.question_sets.rows import Row

NUMBER = 3  # no function


class ConstantEvaluation:
    """An evaluation that asks nothing: its score is the number of clusters in the config."""

    def __init__(self, score: float):
        self.score = score

    def full(self, ask: Any) -> Evaluated:
        return Evaluated({})

    def quick(self, ask: Any) -> tuple[float, dict[str, float]]:
        return self.score, {}


def clusters(seed: int, count: int, documents: Sequence[int], prefix: str) -> list[Cluster]:
    return [Cluster(f"{prefix}-{seed}-{index}", ("text",) * documents[0]) for index in range(count)]


def rows(prompts: Any, *, seed: int, start: int) -> Iterator[Row]:
    return (Row("prompt", f"{seed} {index}", "row", "") for index in range(start, start + 3))


def evaluation(config: Any, context: Any, data: Any) -> ConstantEvaluation:
    return ConstantEvaluation(data.tiny.clusters)


def refuses(*arguments: Any, **keywords: Any) -> Any:
    raise ValueError("no texts; must mount the disk")


def breaks(*arguments: Any, **keywords: Any) -> Any:
    raise KeyError("a bug")


def leaves(*arguments: Any, **keywords: Any) -> Any:
    sys.exit(0)
