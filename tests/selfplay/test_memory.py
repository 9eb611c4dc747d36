"""Tests of the question memory: order, duplicates, state."""

import json

import pytest

from spell_jax.selfplay.memory import Entry, QuestionMemory


def entry(question: str) -> Entry:
    return Entry((0, 2), question, "answer")


def filled(*questions: str, capacity: int = 3) -> QuestionMemory:
    memory = QuestionMemory(capacity)
    for question in questions:
        memory.push("general_qa", "c1", entry(question))
    return memory


def questions(memory: QuestionMemory, task: str = "general_qa", cluster: str = "c1") -> list[str]:
    return [memory_entry.question for memory_entry in memory.get(task, cluster)]


def test_oldest_question_is_evicted_first():
    memory = filled("one", "two", "three", "four")
    assert questions(memory) == ["two", "three", "four"]
    assert len(memory) == 3


def test_clusters_and_tasks_are_stored_separately():
    memory = filled("one")
    assert memory.push("general_qa", "c2", entry("one"))
    assert memory.push("financial_math", "c1", entry("one"))
    assert questions(memory, "financial_math") == ["one"]
    assert memory.get("multiple_choice", "c1") == ()


def test_duplicates_are_detected_by_normalized_text():
    memory = filled("What is the rate?")
    assert not memory.push("general_qa", "c1", entry("what is  a rate"))
    assert memory.push("general_qa", "c1", entry("?"))
    assert memory.push("general_qa", "c1", entry("!"))
    assert questions(memory) == ["What is the rate?", "?", "!"]


def test_evicted_question_can_be_stored_again():
    memory = filled("one", "two", capacity=1)
    assert memory.push("general_qa", "c1", entry("one"))
    assert questions(memory) == ["one"]


def test_capacity_zero_stores_nothing():
    assert len(filled("one", capacity=0)) == 0


def test_state_survives_a_json_round_trip():
    memory = filled("one", "two")
    memory.push("financial_math", "c1", entry("three"))
    state = json.loads(json.dumps(memory.state_dict()))
    restored = QuestionMemory(3)
    restored.load_state_dict(state)
    assert restored.get("general_qa", "c1") == memory.get("general_qa", "c1")
    assert restored.state_dict() == memory.state_dict()


@pytest.mark.parametrize(("capacity", "expected_questions"), [(1, ["two"]), (0, [])])
def test_smaller_memory_keeps_the_newest_questions(capacity, expected_questions):
    restored = QuestionMemory(capacity)
    restored.load_state_dict(filled("one", "two").state_dict())
    assert questions(restored) == expected_questions


@pytest.mark.parametrize("state", [{}, {"clusters": [{}]}, {"clusters": 3}])
def test_invalid_state_is_rejected_without_changes(state):
    memory = filled("one")
    with pytest.raises(ValueError, match="question memory"):
        memory.load_state_dict(state)
    assert questions(memory) == ["one"]


def test_invalid_capacity_is_rejected():
    with pytest.raises(ValueError, match=r"capacity = -1"):
        QuestionMemory(-1)
