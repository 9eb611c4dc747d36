"""Tests of SoLoPO: which answers make a pair, what is aligned, and a resumed run."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from spell_jax.algorithms.preference.solopo import SoLoPoConfig, make_solopo
from spell_jax.algorithms.rlvr.static_algorithm import StaticAlgorithm
from spell_jax.config import read
from spell_jax.configs import solopo
from spell_jax.data.questions import Question
from tests import noise
from tests.algorithms.preference import runs
from tests.algorithms.preference.test_longpo import text
from tests.algorithms.scripted import (
    QA,
    ScriptedModels,
    make_context,
    make_small_config,
    roll_out,
    to_groups,
    to_records,
)

DOCUMENTS = ("first", "second fact", "third")
GIVEN = tuple(Question(QA, DOCUMENTS, f"{name}?", "right", shown=(1,)) for name in "ABC")


def given_algorithm(questions=GIVEN, **options) -> StaticAlgorithm:
    fields: dict[str, Any] = {"generation_batch": len(questions)} | options
    return make_solopo(
        make_small_config(SoLoPoConfig, **fields), make_context(questions=lambda: tuple(questions))
    )


def write(role: str, prompt: str, sibling: int, model: str) -> str:
    """Answer after the short context: A is right from the third answer on, B always, C never."""
    assert role == "responder"
    if "first" in prompt:
        return "The answer is far"
    is_right = {"A": sibling >= 2, "B": True, "C": False}
    answer_is_right = next(right for name, right in is_right.items() if f"{name}?" in prompt)
    return f"The answer is {'right' if answer_is_right else 'wrong'} {sibling}"


def test_first_right_and_first_wrong_answer_after_the_short_context_are_the_pair():
    algorithm, models = given_algorithm(), ScriptedModels(write)
    episodes = roll_out(algorithm, models, 1)
    assert [(c.group, len(c.prompts)) for c in models.calls] == [(4, 3), (1, 3)]
    (group,) = to_groups(algorithm, episodes)
    assert group.advantages == [1.0, -1.0] and group.reference_prompt is None
    answers = [text(sample.tokens) for sample in group.samples]
    assert answers == ["The answer is right 2", "The answer is wrong 0"]
    short, long = text(group.prompt), text(group.aligned.prompt)
    assert "second fact" in short and "first" not in short
    assert all(document in long for document in DOCUMENTS)
    assert group.aligned.samples == group.samples[:1] and group.aligned.advantages == [0.0]
    records = {r["question"]: r for r in to_records(algorithm, episodes)}
    assert records["A?"]["advantages"]["responder"] == [-1.0, 0.0, 1.0, 0.0, 0.0]
    assert (
        records["A?"]["scores"] == [0.0, 0.0, 1.0, 1.0, 0.0] and len(records["A?"]["answers"]) == 5
    )
    assert {records[q]["used"]["responder"] for q in ("B?", "C?")} == {"equal_rewards"}
    json.dumps(records)
    means = algorithm.metrics(episodes).means()
    assert means["preference_pairs"] == pytest.approx(1 / 3)
    assert (means["short_solve_rate"], means["solve_rate"]) == (0.5, 0)


def test_prompts_over_the_cap_make_no_pair():
    for word in ("first", "second"):
        over = ScriptedModels(lambda *call, word=word: None if word in call[1] else write(*call))
        algorithm = given_algorithm()
        groups, annotations = algorithm.groups(roll_out(algorithm, over, 1), (0, 1))
        assert groups == [] and {a.used["responder"] for a in annotations} == {"overlong"}


def test_config_trains_on_short_contexts_and_aligns_rewards():
    config = read(noise.with_fields(solopo.get_config(), {"data.source": "tiny"}))
    assert (config.loss.objective, config.loss.align_weight) == ("dpo", 1.0)
    _, long = config.algorithm.budgets()
    assert (long.prompts, long.replies) == (config.algorithm.generation_batch, 1)


@pytest.mark.slow
def test_two_steps_resume_to_the_bit(tmp_path: pathlib.Path) -> None:
    folder = noise.save_policy(tmp_path / "policy")
    preferences = runs.PREFERENCES | {"loss.beta": 0.1, "loss.align_weight": 0.5}
    fields = {"algorithm.name": "solopo", "algorithm.static_questions": 9}
    sizes = {"packing.buckets": ((320, 36),), "packing.token_budget": 640}
    lines = runs.check_resumed(folder, tmp_path, **fields, **preferences, **sizes)
    for line in lines:
        # At least one pair. How many there are depends on rounding, which tests/tiny.py changes.
        assert line["train/empty_update"] == 0 and line["train/rows/responder"] >= 2
        assert line["train/refused_answers"] == 0
    assert lines[0]["train/alignment"] == pytest.approx(0, abs=1e-4)  # policy = reference
    assert lines[1]["train/alignment"] > 1e-4
