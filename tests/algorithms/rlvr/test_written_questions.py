"""Tests of the written set: questions are answered as they were written, also after a resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from spell_jax.algorithms import registry
from spell_jax.algorithms.base import Algorithm, AlgorithmContext
from spell_jax.algorithms.spell.episode import SpellEpisode
from spell_jax.algorithms.spell.questioner import QuestionWriter
from spell_jax.data.clusters import CLOZE, Cluster, in_memory
from spell_jax.data.stream import TaskStream
from tests.algorithms.scripted import (
    CHOICE,
    QA,
    ScriptedModels,
    make_context,
    make_small_config,
    roll_out,
    to_groups,
)

BUILT = "The first stage was built by Boeing in 1969."
CLUSTERS = (
    Cluster("a", (f"A rocket flew. {BUILT}", "Boeing made airplanes.", "Rain fell."), (CLOZE,)),
    Cluster("b", ("The mayor sings.", "She lives in Lima.", "Snow fell."), (QA,)),
    Cluster("c", ("The king sleeps.", "He owns a boat.", "Hail fell."), (CHOICE,)),
)
OPTIONS = {"A": "a boat", "B": "a car", "C": "a cow", "D": "a cup"}
FIELDS = ("task", "documents", "shown", "question", "reference", "own_reference", "hidden")
NAMES = ("rlvr", "qwenlong_l1", "longpo", "solopo", "self_distillation")


def write(role: str, prompt: str, sibling: int, model: str) -> str:
    """Write one question about each cluster; the frozen reader corrects the one about Lima."""
    if role == "questioner":
        if "Boeing" in prompt:
            return json.dumps({"sentence": BUILT, "answer": "Boeing"})
        if "Lima" in prompt:
            return json.dumps({"question": "Where does the singer live?", "answer": "Oslo"})
        return json.dumps({"question": "What has he?", "options": OPTIONS, "answer": "A"})
    if role == "verifier":
        return "[[NO]]"
    answers = {"____": "Boeing", "singer": "Lima", "What has he": "A"}
    (answer,) = (text for word, text in answers.items() if word in prompt)
    # No document is read for the first filter, and answers of a group differ.
    is_known = model != "policy" or (sibling % 2 and "fell" in prompt)
    return f"The answer is {answer if is_known else 'D'}"


def make_context_of_clusters() -> AlgorithmContext:
    return make_context(
        clusters=lambda: in_memory(CLUSTERS),
        deal=lambda source: TaskStream(source, (QA, CHOICE, CLOZE), (1.0,) * 3, seed=0),
        teacher_prompt=lambda text: list(text.encode()),
    )


def make(name: str) -> tuple[Any, Algorithm]:
    options = {"generation_batch": 3, "static_questions": 3, "reader__source": "frozen_reader"}
    options |= {"questioner__documents": (3,), "questioner__unread_documents": 0}
    config = make_small_config(registry.ALGORITHMS[name].config, **options)
    return config, registry.ALGORITHMS[name].make(config, make_context_of_clusters())


def facts(episodes: Sequence[SpellEpisode]) -> list[tuple]:
    """Return what a question is, of each episode, sorted by task."""
    return sorted(tuple(getattr(e, field) for field in FIELDS) for e in episodes)


@pytest.mark.parametrize("name", NAMES)
def test_questions_are_answered_as_written_also_after_a_resume(name: str) -> None:
    config, algorithm = make(name)
    questioner = QuestionWriter(config, make_context_of_clusters())
    started = questioner.start_episodes(np.random.default_rng((0, 1)))
    written = facts(questioner.write_all(ScriptedModels(write), started))
    assert [fact[-3:] for fact in written] == [
        ("Boeing", "Boeing", BUILT),
        ("Lima", "Oslo", ""),
        ("A", "A", ""),
    ]
    episodes = roll_out(algorithm, ScriptedModels(write), 1)
    _, resumed = make(name)
    resumed.load_state_dict(json.loads(json.dumps(algorithm.state_dict())))
    ask = ScriptedModels(write)
    resumed_episodes = roll_out(resumed, ask, 2)
    assert facts(episodes) == facts(resumed_episodes) == written
    groups = to_groups(resumed, resumed_episodes, 2)
    prompts = [prompt for call in ask.calls for prompt in call.prompts]
    prompts += [bytes(g.reference_prompt).decode() for g in groups if g.reference_prompt]
    assert any("A rocket flew." in prompt for prompt in prompts)
    assert not any(BUILT in prompt for prompt in prompts)
