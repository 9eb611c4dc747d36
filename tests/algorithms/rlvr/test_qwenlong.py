"""Tests of make_qwenlong-L1: phases, retrospection by difficulty, and a resumed run."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from typing import Any

import pytest

from spell_jax.algorithms.rlvr.qwenlong import QwenLongConfig, make_qwenlong
from spell_jax.algorithms.rlvr.static_algorithm import StaticAlgorithm
from spell_jax.data.clusters import PAPER_TASKS
from spell_jax.data.questions import Question
from spell_jax.data.stream import TaskStream
from spell_jax.runtime.files.jsonl import write_records
from tests import noise
from tests.algorithms.preference import runs
from tests.algorithms.scripted import (
    MATH,
    QA,
    ROWS,
    SMALL,
    Deck,
    Script,
    ScriptedModels,
    make_config,
    make_context,
    roll_out,
)

# Inputs of 4 (questions 0 to 5), 9 (6 to 11) and 30 tokens (12), with the question's one.
WORDS = [3] * 6 + [8] * 6 + [29]
GIVEN = tuple(Question(QA, ("w " * n,), f"Q{i:02d}", "right") for i, n in enumerate(WORDS))


def new_algorithm(questions=GIVEN, steps: int = 4, **options) -> StaticAlgorithm:
    fields: dict[str, Any] = SMALL | {"generation_batch": 4, "phase_tokens": (5, 10)} | options
    config = make_config(QwenLongConfig, **fields)
    return make_qwenlong(config, make_context(questions=lambda: tuple(questions), steps=steps))


def write(role: str, prompt: str, sibling: int, model: str) -> str:
    """Solve question 0 in no answer, question 1 in one answer of four, the others always."""
    if role == "verifier":
        return "[[NO]]"
    number = int(prompt.split("Q")[1][:2])
    right = {0: 0, 1: 1}.get(number, 4)
    return f"The answer is {'right' if sibling < right else 'wrong'}"


def numbers(episodes) -> list[int]:
    return [int(e.question[1:]) for e in episodes]


def test_phases_have_longer_inputs_and_hard_questions_of_the_phase_before(caplog):
    algorithm, models = new_algorithm(retrospective_share=0.5), ScriptedModels(write)
    steps = [roll_out(algorithm, models, step) for step in range(1, 5)]
    question_numbers = [numbers(episodes) for episodes in steps]
    assert (
        all(n < 6 for step in question_numbers[:2] for n in step)
        and len({*question_numbers[0]}) == 4
    )
    for step in question_numbers[2:]:
        assert [n < 6 for n in step] == [True, True, False, False] and len({*step}) == 4
    assert 12 not in {n for step in question_numbers for n in step}
    assert "1 questions are longer than all phases" in caplog.text
    first, last = (algorithm.metrics(steps[i]).means() for i in (0, -1))
    assert (first["phase"], first["retrospective"]) == (1, 0)
    assert (last["phase"], last["retrospective"]) == (2, 0.5)


def test_retrospection_samples_by_the_inverse_of_the_mean_reward():
    algorithm, models = new_algorithm(retrospective_share=0.25, steps=1000), ScriptedModels(write)
    for step in (1, 2, 3):
        roll_out(algorithm, models, step)
    counts: collections.Counter[int] = collections.Counter()
    for step in range(501, 901):
        counts.update(n for n in numbers(roll_out(algorithm, models, step)) if n < 6)
    assert counts.total() == 400
    # Difficulties 4 (never solved: G), 4 (one of four) and 1 for each of the other four.
    assert abs(counts[0] - 400 * 4 / 12) < 50 and abs(counts[1] - 400 * 4 / 12) < 50
    assert all(abs(counts[n] - 400 / 12) < 25 for n in range(2, 6))


def test_rewards_are_the_maximum_of_rule_and_verdict_and_only_answers_are_trained_on():
    algorithm, models = new_algorithm(generation_batch=6), ScriptedModels(write)
    episodes = roll_out(algorithm, models, 1)
    assert {"responder", "verifier"} == {call.role for call in models.calls}
    assert all(e.scores == e.rule for e in episodes)  # every verdict is no
    yes = ScriptedModels(lambda *call: "[[YES]]" if call[0] == "verifier" else write(*call))
    assert all(e.scores == (1.0,) * 4 for e in roll_out(new_algorithm(), yes, 1))
    groups, _ = algorithm.groups(episodes, (0, 1))
    assert {group.name for group in groups} == {"responder"}


def test_phases_without_a_question_are_left_out():
    algorithm = new_algorithm(GIVEN[6:12], steps=2)
    episodes = roll_out(algorithm, ScriptedModels(write), 1)
    assert len(episodes) == 4 and algorithm.metrics(episodes).means()["phase"] == 1
    with pytest.raises(ValueError, match=r"algorithm\.phase_tokens = \(5, 10\): must not be below"):
        new_algorithm(GIVEN[12:])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"phase_tokens": ()}, r"algorithm\.phase_tokens = \(\): must be one or more"),
        ({"phase_tokens": (9, 9)}, r"algorithm\.phase_tokens = \(9, 9\)"),
        ({"retrospective_share": 1.0}, r"algorithm\.retrospective_share = 1\.0: must be from 0"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        make_config(QwenLongConfig, **fields)


def test_state_is_that_of_the_uninterrupted_algorithm():
    def numbers_by_step(algorithm, steps):
        return [numbers(roll_out(algorithm, ScriptedModels(write), step)) for step in steps]

    options: dict[str, Any] = {"retrospective_share": 0.5, "generation_batch": 3}
    uninterrupted_numbers = numbers_by_step(new_algorithm(**options), (1, 2, 3, 4))
    first, second = new_algorithm(**options), new_algorithm(**options)
    numbers_by_step(first, (1, 2))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert numbers_by_step(second, (3, 4)) == uninterrupted_numbers[2:]


def test_written_questions_are_divided_into_phases_and_restored():
    def new() -> StaticAlgorithm:
        deck: Any = Deck(ROWS)
        count = len(ROWS)
        fields: dict[str, Any] = SMALL | {"generation_batch": count, "phase_tokens": (8, 9)}
        config = make_config(
            QwenLongConfig, static_questions=count, retrospective_share=0.0, **fields
        )

        def deal(source: Any) -> Any:  # the questions of a phase, or the clusters to write about
            return TaskStream(source, PAPER_TASKS, (1.0,) * 3, seed=0) if source.tasks else deck

        return make_qwenlong(config, make_context(deal=deal, steps=2))

    # Three documents of two words, and a question of two words, of three, or with four options.
    algorithm, models = new(), ScriptedModels(Script(ROWS))
    first = roll_out(algorithm, models, 1)
    assert {e.task for e in first} == {QA} and all(len(e.shown) == 2 for e in first)
    resumed = new()
    resumed.load_state_dict(json.loads(json.dumps(algorithm.state_dict())))
    second = roll_out(algorithm, models, 2)
    assert {e.task for e in second} == {MATH}
    assert [e.question for e in roll_out(resumed, models, 2)] == [e.question for e in second]


@pytest.mark.slow
def test_two_steps_resume_to_the_bit(tmp_path: pathlib.Path) -> None:
    folder, questions = noise.save_policy(tmp_path / "policy"), tmp_path / "questions.jsonl"
    short = [Question(QA, ("a",), f"Q{i}?", str(i % 2)) for i in range(6)]
    long = [dataclasses.replace(q, documents=("a", "b " * 20)) for q in short]
    write_records(questions, map(dataclasses.asdict, [*short, *long]))
    fields = {
        "algorithm.name": "qwenlong_l1",
        "algorithm.phase_tokens": (12, 100),
        "algorithm.retrospective_share": 0.5,
        "algorithm.generation_batch": 6,
        "data.questions": str(questions),
    }
    lines = runs.check_resumed(folder, tmp_path, **fields)
    assert [line["rollout/phase"] for line in lines] == [1, 2]
    assert [line["rollout/retrospective"] for line in lines] == [0, 0.5]
    assert all(line["train/rows/responder"] > 0 for line in lines)
