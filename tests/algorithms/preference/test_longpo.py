"""Tests of LongPO: which answers make a pair, and a resumed run."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from spell_jax.algorithms.preference.longpo import LongPoConfig, make_longpo
from spell_jax.algorithms.rlvr.static_algorithm import StaticAlgorithm
from spell_jax.data.questions import Question, read_questions
from tests import noise
from tests.algorithms.preference import runs
from tests.algorithms.scripted import (
    QA,
    ROWS,
    Deck,
    Script,
    ScriptedModels,
    make_context,
    make_small_config,
    roll_out,
    to_groups,
    to_records,
)

GIVEN = (
    Question(QA, ("first", "second fact", "third"), "Q?", "right", ("second",)),
    Question(QA, ("a", "b", "c"), "R?", "right", shown=(0, 2)),
)


def given_algorithm(questions=GIVEN, **options) -> StaticAlgorithm:
    fields: dict[str, Any] = {"generation_batch": len(questions)} | options
    return make_longpo(
        make_small_config(LongPoConfig, **fields), make_context(questions=lambda: tuple(questions))
    )


def by_context(role: str, prompt: str, sibling: int, model: str) -> str:
    """Answer right after the short context, wrong after all documents."""
    assert role == "responder" and sibling == 0
    is_long = ("first" in prompt) if "Q?" in prompt else ("\nb\n" in prompt or "- b" in prompt)
    return "The answer is wrong" if is_long else "The answer is right"


def text(tokens: Any) -> str:
    return bytes(int(token) for token in tokens).decode()


def test_answer_after_the_short_context_is_preferred_behind_the_long_prompt():
    algorithm = given_algorithm()
    episodes = roll_out(algorithm, ScriptedModels(by_context), 1)
    groups = to_groups(algorithm, episodes)
    assert len(groups) == 2
    for e, group in zip(episodes, groups, strict=True):
        assert group.advantages == [1.0, -1.0] and group.name == "responder"
        chosen_answer, rejected_answer = (text(sample.tokens) for sample in group.samples)
        assert all(sample.logprobs is None for sample in group.samples)  # of another prompt
        assert "right" in chosen_answer and "wrong" in rejected_answer
        every, short = text(group.prompt), text(group.reference_prompt)
        assert all(document in every for document in e.cluster.documents)
        shown = [document in short for document in e.cluster.documents]
        assert [n for n, is_shown in enumerate(shown) if is_shown] == list(e.shown)
    assert sorted(e.shown for e in episodes) == [(0, 2), (1,)]  # "shown", or where evidence is
    means = algorithm.metrics(episodes).means()
    assert (means["preference_pairs"], means["short_solve_rate"], means["solve_rate"]) == (1, 1, 0)
    for record in to_records(algorithm, episodes):
        assert record["scores"] == record["rule"] == [1.0, 0.0]
        assert record["advantages"]["responder"] == [1.0, -1.0]
        assert record["measures"]["documents_read"][1] == 3 and len(record["answers"]) == 2
        json.dumps(record)


@pytest.mark.parametrize(("rule", "score"), [("match", 1.0), ("exact", 0.0)])
def test_rule_of_the_config_scores_both_answers(rule, score):
    algorithm = given_algorithm(rule=rule)
    models = ScriptedModels(lambda *_: "The answer is right or wrong")
    for e in roll_out(algorithm, models, 1):
        assert (e.rule, e.short_rule) == ((score,), (score,))


def test_equal_answers_and_prompts_over_the_cap_make_no_pair():
    same = ScriptedModels(lambda *_: "The answer is right")
    algorithm = given_algorithm()
    episodes = roll_out(algorithm, same, 1)
    groups, annotations = algorithm.groups(episodes, (0, 1))
    assert groups == [] and {a.used["responder"] for a in annotations} == {"equal_answers"}
    over = ScriptedModels(lambda *call: None if "first" in call[1] else by_context(*call))
    algorithm = given_algorithm()
    episodes = roll_out(algorithm, over, 1)
    _, annotations = algorithm.groups(episodes, (0, 1))
    assert {a.used["responder"] for a in annotations} == {"overlong", "used"}
    assert algorithm.metrics(episodes).means()["reason/no_responder_reply"] == 0.5
    assert to_records(algorithm, [e for e in episodes if e.response is None])[0]["answers"] == []


def test_written_questions_have_the_questioners_documents_as_short_context():
    deck: Any = Deck(ROWS)
    count = len(ROWS)
    config = make_small_config(LongPoConfig, static_questions=count, generation_batch=count)
    algorithm = make_longpo(config, make_context(deal=lambda _: deck))
    models = ScriptedModels(Script(ROWS))
    episodes = roll_out(algorithm, models, 1)
    assert episodes and all(len(e.shown) == 2 for e in episodes)
    short, every = (call.prompts for call in models.calls[-2:])
    assert all(
        a.count("text") == 2 and b.count("text") == 3 for a, b in zip(short, every, strict=True)
    )


def test_questions_without_a_short_context_are_left_out(caplog):
    unknown = dataclasses.replace(GIVEN[0], evidence=("nowhere",))
    assert len(given_algorithm([*GIVEN, unknown]).questions) == 2
    assert "1 of 3 questions have no short context" in caplog.text
    with pytest.raises(ValueError, match=r"none of its 1 questions has a short context"):
        given_algorithm([unknown])


def test_shown_documents_of_a_question_are_read_and_checked(tmp_path):
    line = {"task": QA, "documents": ["a", "b"], "question": "Q?", "answer": "A"}
    lines = [line | {"shown": shown} for shown in ([1], [2], ["0"], [True], [])]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert [q.shown for q in read_questions(path, "data.questions")] == [(1,), ()]


@pytest.mark.slow
def test_two_steps_resume_to_the_bit(tmp_path: pathlib.Path) -> None:
    folder = noise.save_policy(tmp_path / "policy")
    preferences = runs.PREFERENCES | {"loss.beta": 0.1, "loss.nll_weight": 0.5}
    fields = {"algorithm.name": "longpo", "algorithm.static_questions": 9}
    lines = runs.check_resumed(folder, tmp_path, **fields, **preferences)
    for line in lines:
        assert line["train/empty_update"] == 0 and line["train/rows/responder"] > 2
        assert line["train/preference_loss"] > 0 and line["train/chosen_nll"] > 0
    assert lines[1]["train/chosen_reward"] != 0  # the policy has left its reference
