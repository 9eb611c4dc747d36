"""Tests of held-out puzzles: prompts, scores, and reproducible results."""

from __future__ import annotations

import math

import pytest

from spell_jax.algorithms.held_out import HeldOut, Share
from spell_jax.algorithms.reconstruction.evaluation import held_out_puzzles
from spell_jax.algorithms.registry import ALGORITHMS
from spell_jax.data.config import DataConfig
from spell_jax.data.tiny_stories import make_stories
from spell_jax.runtime import intervals
from tests.algorithms.posing import config, context, guessing, perfect, silent
from tests.algorithms.scripted import ScriptedModels

HELD_OUT = make_stories(9, 5, (9, 11))
SECTION = "reconstruction, by number of options"


def make(held_out=HELD_OUT, cap: int = 10_000, **options) -> HeldOut:
    sizes = {"evaluation_puzzles": 12, "validation_puzzles": 7} | options
    rising = config(options=(4, 2), option_weights=(1, 1), **sizes)
    return held_out_puzzles(rising, context(held_out=held_out, cap=cap))


@pytest.mark.parametrize(
    ("source", "share", "expected"),
    [("tiny_stories", 0.0, True), ("books", 0.0, False), ("books", 0.1, True)],
)
def test_evaluation_needs_held_out_documents(source, share, expected):
    data = DataConfig(source=source, held_out=share)
    evaluation = ALGORITHMS["reconstruction"].evaluate(config(), context(held_out=HELD_OUT), data)
    assert (evaluation is not None) == expected


def test_perfect_policy_scores_one():
    evaluation, ask = make(), ScriptedModels(perfect)
    score, numbers = evaluation.quick(ask)
    (call,) = ask.calls
    assert (call.role, call.temperature, call.group) == ("responder", 0.0, 1)
    assert len(call.prompts) == len({*call.prompts}) == 14
    assert score == 1.0 and set(numbers.values()) == {1.0}
    assert set(numbers) == {
        f"{name}{suffix}"
        for name in ("permutation", "dense_reward", "sparse_reward")
        for suffix in ("", "/2", "/4")
    }


def test_policy_without_answers_scores_zero():
    for write in (silent, lambda *_: None):  # None: over the cap
        score, numbers = make().quick(ScriptedModels(write))
        assert score == 0 and set(numbers.values()) == {0.0}
        shares = {name for name, number in numbers.items() if isinstance(number, Share)}
        assert shares == {name for name in numbers if not name.startswith("dense")}


def test_validation_score_is_the_mean_dense_reward():
    score, numbers = make().quick(ScriptedModels(guessing))
    assert score == numbers["dense_reward"] < numbers["permutation"] == 1
    assert score == pytest.approx((numbers["dense_reward/2"] + numbers["dense_reward/4"]) / 2)


def test_report_shows_chance_level_next_to_rewards():
    report = make(evaluation_puzzles=200).full(ScriptedModels(guessing)).report
    rows = report[SECTION]
    assert list(rows) == [
        "permutation",
        "dense reward",
        "sparse reward",
        "dense reward of a guess",
        "sparse reward of a guess",
    ]
    assert all(set(columns) == {"2", "4", "all"} for columns in rows.values())
    assert rows["permutation"]["all"] == intervals.wilson(1.0, 400)
    guesses = {"2": 0.5, "4": 0.25, "all": 0.375}
    assert rows["dense reward of a guess"] == {k: (mean,) * 3 for k, mean in guesses.items()}
    sparse = (0.5 + 1 / math.factorial(4)) / 2
    assert rows["sparse reward of a guess"]["all"] == pytest.approx((sparse,) * 3)
    for k in ("2", "4"):
        mean, low, high = rows["dense reward"][k]
        assert 0 < high - low < 0.2 and abs(mean - guesses[k]) < high - low
    share = rows["sparse reward"]["2"]
    assert share == intervals.wilson(share.mean, 200)


def test_every_evaluation_uses_the_same_puzzles():
    first, second = ScriptedModels(perfect), ScriptedModels(silent)
    evaluation = make()
    evaluation.full(first)
    evaluation.full(second)
    make().full(second)
    assert first.calls[0] == second.calls[0] == second.calls[1]
    quick = ScriptedModels(perfect)
    evaluation.quick(quick)
    assert {*quick.calls[0].prompts} < {*first.calls[0].prompts}


def test_puzzles_of_each_number_of_options_have_documents_of_their_own():
    evaluation = make(make_stories(9, 24, (9, 11)))
    models = ScriptedModels(perfect)
    evaluation.full(models)
    prompts = models.calls[0].prompts
    assert len(prompts) == 24
    stories = {cluster.documents[0] for cluster in make_stories(9, 24, (9, 11))}
    assert len(stories) == 24
    # An option is a line of its story.
    read = {story for text in prompts for story in stories if _shared_lines(text, story) > 3}
    assert read == stories


def _shared_lines(prompt: str, story: str) -> int:
    return sum(line in prompt for line in story.splitlines() if line)


def test_documents_without_a_puzzle_are_skipped():
    short = make_stories(3, 2, (3,))  # enough for 2 options, not for 4
    ask = ScriptedModels(perfect)
    report = make([*HELD_OUT, *short]).full(ask).report
    assert len(ask.calls[0].prompts) == 24
    report = make(short).full(ask).report
    assert set(report[SECTION]["dense reward"]) == {"2", "all"}
    assert report[SECTION]["dense reward of a guess"] == {
        "2": (0.5,) * 3,
        "all": (0.5,) * 3,
    }


@pytest.mark.parametrize("held_out", [(), make_stories(3, 2, (1,))])
def test_held_out_documents_without_any_puzzle_are_rejected(held_out):
    with pytest.raises(ValueError, match="held-out documents: none gives a puzzle"):
        make(held_out).quick(ScriptedModels(perfect))


@pytest.mark.parametrize("field", ["evaluation_puzzles", "validation_puzzles"])
def test_evaluation_sizes_must_be_positive(field):
    with pytest.raises(ValueError, match=rf"algorithm\.{field} = 0: must be at least 1"):
        make(**{field: 0})
