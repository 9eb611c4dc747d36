"""Tests of the messages about rewards that are no numbers and about functions that fail."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spell_jax.trainer.rollouts import check_scores, named_rewards


def make_run() -> Any:
    return SimpleNamespace(config=SimpleNamespace(algorithm=SimpleNamespace(name="own")))


def episode(question: str, *scores: Any) -> Any:
    record = {"question": question, "scores": scores, "answers": ["a", "b"]}
    return SimpleNamespace(scores=scores, record=lambda: record)


RIGHT = episode("right?", np.float32(0.5), True)


@pytest.mark.parametrize(
    "scores", [(math.nan, math.nan), (None, None), ("1", "1"), (1.0, [1.0]), (0.5, np.ones(1))]
)
def test_scores_that_no_group_shows_are_refused(scores):
    records = [{"scores": RIGHT.scores}, {}, {"scores": scores}]
    with pytest.raises(ValueError, match=r"^scores\[[01]\] = .*: must be a finite number$"):
        check_scores(records)


def test_scores_of_numpy_are_numbers():
    check_scores([{"scores": [np.float32(1), np.float64(0.5), np.int64(3), np.True_, True, 2]}])
    check_scores([{"scores": 0.5}, {"scores": None}])  # an algorithm's own field of this name


@pytest.mark.parametrize("scores", [(1.0, None), (1.0, [2.0]), (1.0,), (1.0, 0.0, 0.0)])
@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_question_with_invalid_or_missing_scores_is_named(scores, error):
    episodes = [RIGHT, episode("wrong?", *scores)]
    with (
        pytest.raises(ValueError, match=r"^algorithm own, step 3, question 'wrong\?' .*: no set$"),
        named_rewards(make_run(), 3, episodes),
    ):
        raise error("no set")
