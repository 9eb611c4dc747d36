"""Tests of a run's own questions: selection, documents and scoring."""

from __future__ import annotations

import collections
import logging
from pathlib import Path

import pytest

from spell_jax.evaluation.benchmarks import own_questions
from spell_jax.evaluation.benchmarks import registry as benchmarks
from spell_jax.selfplay import prompts
from tests.evaluating import write_episodes


def record(cluster: str, number: int, task: str = "general_qa", **changes) -> dict:
    fields = {"task": task, "cluster": cluster, "status": "accepted", "question": f"Q{number}?"}
    return fields | {"reference": f"answer {number}", "shown": [0]} | changes


def test_accepted_questions_with_documents_become_items(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    texts = ["The sea is wide.", "The hill is high."]
    first = [
        record("a", 0, status="bad_format", documents=texts),
        record("a", 1),
        record("b", 2),
        record("a", 3, task="financial_math", reference="42"),
    ]
    damaged = [{"task": "poem"}, {"reference": ""}, {"question": None}, {"task": ["x"]}]
    damaged += [{"question": "Why\ud800?"}]
    second = [
        record("b", 4, task="multiple_choice", reference="B", documents=texts[:1]),
        record("a", 5),  # documents of another step do not count
        *(record("b", 6, **changes) for changes in damaged),
        record("c", 7, documents=[3]),
        {"status": "accepted"},
    ]
    benchmark = benchmarks.load("own_questions", write_episodes(tmp_path, {12: second, 7: first}))
    assert [item.id for item in benchmark.items] == ["7-1", "7-3", "12-0"]
    assert [item.fields["step"] for item in benchmark.items] == [7, 7, 12]
    assert benchmark.by == ("step", "task")
    words = prompts.load("full")
    for item, (task, documents, question) in zip(
        benchmark.items,
        [
            ("general_qa", texts, "Q1?"),
            ("financial_math", texts, "Q3?"),
            ("multiple_choice", texts[:1], "Q4?"),
        ],
        strict=True,
    ):
        assert item.prompt == words.responder(task, documents, question)
        assert item.question == question and item.fields["task"] == task
        assert item.judged == (task != "multiple_choice") and benchmark.judged
    left_out = "{'not accepted': 1, 'without documents': 3, 'damaged': 6}"
    assert f"3 questions; left out: {left_out}" in caplog.text


def test_prompts_use_the_prompt_set_of_the_run(tmp_path: Path):
    write_episodes(tmp_path, {1: [record("a", 0, documents=["x"])]})
    config = tmp_path / "config.json"
    config.write_text('{"algorithm": {"prompts": "compact"}}')
    (item,) = benchmarks.load("own_questions", tmp_path).items
    assert item.prompt == prompts.load("compact").responder("general_qa", ["x"], "Q0?")
    config.write_text('{"hidden_size": 3}')
    with pytest.raises(ValueError, match=r"config\.json: must be a run's, with algorithm\.prompts"):
        benchmarks.load("own_questions", tmp_path)
    config.write_text('{"algorithm": {"prompts": "nowhere"}}')
    with pytest.raises(FileNotFoundError, match="prompts = 'nowhere'"):
        benchmarks.load("own_questions", tmp_path)


def test_scoring_rule_is_that_of_the_task(tmp_path: Path):
    records = [
        record("a", 0, reference="the Red Sea", documents=["x"]),
        record("a", 1, task="financial_math", reference="42"),
        record("a", 2, task="multiple_choice", reference="B"),
    ]
    benchmark = benchmarks.load("own_questions", write_episodes(tmp_path, {1: records}))
    predictions = ("red sea, I think", "42.00", "B")
    replies = (
        "the answer is red sea, I think",
        "the answer is 42.00",
        "The correct answer is (B).",
    )
    for i, item in enumerate(benchmark.items):
        assert [benchmark.score(text, item) for text in replies] == [
            float(i == j) for j in range(3)
        ]
        assert benchmark.extract(replies[i], item) == predictions[i]


def test_answers_are_read_leniently(tmp_path: Path):
    records = [record("a", 0, task="financial_math", reference="-2790", documents=["x"])]
    (item,) = (
        benchmark := benchmarks.load("own_questions", write_episodes(tmp_path, {1: records}))
    ).items
    assert benchmark.extract("Answer: $(2,790)", item) == "-2790"
    assert benchmark.score("Answer: $(2,790)", item) == 1.0


def test_references_that_can_never_score_are_named_and_left_out(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    records = [
        record("a", 0, documents=["x"]),
        record("a", 1, reference="The The"),
        record("a", 2, task="financial_math", reference="a handful"),
        record("a", 3, task="multiple_choice", reference="E"),
    ]
    benchmark = benchmarks.load("own_questions", write_episodes(tmp_path, {7: records}))
    assert [item.id for item in benchmark.items] == ["7-0"]
    assert "'can never score': 3" in caplog.text
    for number, reference in enumerate(("The The", "a handful", "E"), 2):
        assert f"step 7, episode {number}: left out (reference = {reference!r}" in caplog.text


def test_questions_are_chosen_evenly_over_steps(tmp_path: Path, monkeypatch):
    steps = {
        step: [record("a", i, documents=["x"] if i == 0 else []) for i in range(10)]
        for step in range(1, 9)
    }
    write_episodes(tmp_path, steps)
    monkeypatch.setattr(own_questions, "PER_STEP", 5)
    benchmark = benchmarks.load("own_questions", tmp_path)
    assert [item.id for item in benchmark.items if item.fields["step"] == 3] == [
        f"3-{i}" for i in (1, 3, 5, 7, 9)
    ]
    assert len(benchmark.items) == 40
    subset = benchmarks.load("own_questions", tmp_path, 16)
    assert set(collections.Counter(i.fields["step"] for i in subset.items).values()) == {2}
    assert len(benchmarks.load("own_questions", tmp_path, 3).items) == 3
    assert len(benchmarks.load("own_questions", tmp_path, 99).items) == 40


def test_run_without_usable_questions_is_rejected(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"must have episodes/ of a run"):
        benchmarks.load("own_questions", tmp_path)
    with pytest.raises(ValueError, match=r"'without documents': 1.*config.episode_characters"):
        benchmarks.load("own_questions", write_episodes(tmp_path, {1: [record("a", 0)]}))
