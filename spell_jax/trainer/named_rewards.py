"""The place of a reward that is no finite number: algorithm, step and question."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spell_jax.runtime.finite import is_finite
from spell_jax.trainer.build import Run

_SHOWN = 200  # characters of a question or of its scores in a message


@contextlib.contextmanager
def named_rewards(run: Run, step: int, episodes: Sequence[Any]) -> Iterator[None]:
    """Name algorithm, step and a question with an invalid score in a ValueError raised inside.

    NumPy arrays and lists as scores are TypeErrors of algorithms that put scores into a set.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        place = f"algorithm {run.config.algorithm.name}, step {step}"
        # The first question with a fault is named; the error itself may come from any code.
        for episode in episodes:
            if fault := _fault(episode.record()):
                place = f"{place}, {fault}"
                break
        raise ValueError(f"{place}: {error}") from error


def check_scores(records: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if a score of an episode's record is no finite number.

    Advantages do not show all of them: answers that all score NaN are no training group.
    """
    for record in records:
        for index, score in enumerate(_list(record, "scores")):
            if not is_finite(score):
                raise ValueError(f"scores[{index}] = {score!r:.80}: must be a finite number")


def _fault(record: Mapping[str, Any]) -> str:
    """Return the question of a record with a wrong number of scores or an invalid score, or ""."""
    # Records without scores pass: not every algorithm's records have the field.
    scores, answers = _list(record, "scores"), _list(record, "answers")
    if all(map(is_finite, scores)) and (not scores or len(scores) == len(answers)):
        return ""
    question = str(record.get("question"))[:_SHOWN]
    return f"question {question!r} with the scores {str([*scores])[:_SHOWN]}"


def _list(record: Mapping[str, Any], field: str) -> Sequence[Any]:
    """Return a list of a record; empty if the algorithm's records have none in this field."""
    return value if isinstance(value := record.get(field), list | tuple) else ()
