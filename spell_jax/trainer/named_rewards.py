"""The place of a reward that is no finite number: algorithm, step and question."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from spell_jax.algorithms.base import Annotation
from spell_jax.runtime.finite import is_finite
from spell_jax.trainer.build import Run

_SHOWN = 200  # characters of a question in a message


@contextlib.contextmanager
def named_rewards(run: Run, step: int, episodes: Sequence[Any]) -> Iterator[None]:
    """Name algorithm, step and a question with an invalid score in a ValueError raised inside."""
    try:
        yield
    except ValueError as error:
        place = f"algorithm {run.config.algorithm.name}, step {step}"
        for episode in episodes:
            record = run.algorithm.record(episode, Annotation())
            scores = record.get("scores") or ()
            if not all(map(is_finite, scores)):
                question = str(record.get("question"))[:_SHOWN]
                place = f"{place}, question {question!r} with the scores {[*scores]}"
                break
        raise ValueError(f"{place}: {error}") from error
