"""Rows of supervised tuning: a prompt with its completion, and endless streams of seeded rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np


@dataclasses.dataclass(frozen=True)
class Row:
    """One demonstration: prompt ("": a plain text), completion, role and task."""

    prompt: str
    completion: str
    role: str
    task: str


def seeded_rows(
    make_row: Callable[[np.random.Generator], Row], seed: int, start: int = 0, *stream: int
) -> Iterator[Row]:
    """Yield rows start, start + 1, ...; row i depends on (seed, i, *stream) alone."""
    for index in itertools.count(start):
        # A generator for each row: a resumed run starts at any row without making the earlier ones.
        yield make_row(np.random.default_rng([seed, index, *stream]))
