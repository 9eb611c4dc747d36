"""Tests of the held-out evaluation in the ladder world."""

from __future__ import annotations

from typing import Any

import pytest

from spell_jax.algorithms.held_out import HeldOut
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.data.config import DataConfig, TinyConfig, TinyEvaluationConfig
from spell_jax.launch.experiments.ladder import evaluation
from tests.algorithms.scripted import ScriptedModels, make_context
from tests.algorithms.spell.test_chained_questions import answer, write

SIZES = {"per_cell": 4, "documents": (5, 9), "quick_per_cell": 3, "quick_documents": (9,)}


def make_evaluation(**sizes: Any) -> HeldOut:
    data = DataConfig(tiny=TinyConfig(evaluation=TinyEvaluationConfig(**(SIZES | sizes))))
    return evaluation.held_out(SpellConfig(), make_context(), data)


def greedy(role: str, prompt: str, sibling: int, model: str) -> str:
    return answer(prompt) if role == "responder" else write(role, prompt, sibling, model)


def test_perfect_model_scores_one_at_every_depth():
    report = make_evaluation().full(ScriptedModels(greedy)).report
    accuracy = report["responder accuracy, by documents"]
    assert [*accuracy] == [*(f"depth {depth}" for depth in range(1, 9)), "all"]
    assert {cell[0] for row in accuracy.values() for cell in row.values()} == {1.0}
    assert report["verifier accuracy"][""]["all"][0] == 1.0
    questioner_rows = report["questioner"]
    assert questioner_rows["none known"]["depth"][0] == 3.0
    for depth in range(1, 9):
        row = questioner_rows[f"one known, of depth {depth}"]
        assert row["accepted"][0] == 1.0


def test_validation_has_accuracies_by_depth():
    def shallow(role: str, prompt: str, sibling: int, model: str) -> str:
        is_deep = role == "responder" and prompt.splitlines()[-1].count(" of ") > 2
        return "answer is Nobody" if is_deep else greedy(role, prompt, sibling, model)

    score, numbers = make_evaluation().quick(ScriptedModels(shallow))
    assert score == numbers["responder"] == 2 / 8
    assert numbers["depth/2"] == 1.0 and numbers["depth/3"] == 0.0
    assert numbers["verifier"] == 1.0


def test_verifier_is_right_where_its_vote_is():
    """A verdict in other words counts as the vote that it is; no verdict is wrong."""

    def wordy(role: str, prompt: str, sibling: int, model: str) -> str:
        text = greedy(role, prompt, sibling, model)
        if role != "verifier":
            return text
        return f"so {text}" if text == "[[YES]]" else "no"

    verdicts = make_evaluation().full(ScriptedModels(wordy)).report["verifier accuracy"]
    assert 0.0 < verdicts[""]["all"][0] < 1.0


def test_too_many_documents_are_rejected():
    with pytest.raises(ValueError, match=r"quick_documents = \(11,\): each must be 2 to 10"):
        make_evaluation(quick_documents=(11,))


def test_file_of_questions_is_rejected():
    with pytest.raises(ValueError, match=r"^data\.validation = 'x': must be '' in the ladder"):
        evaluation.held_out(SpellConfig(), make_context(), DataConfig(validation="x"))
