"""Tests of the task cloze in self-play: a gap in a sentence that only the questioner reads."""

from __future__ import annotations

import json

import pytest

from spell_jax.algorithms.spell.algorithm import Spell
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.episode import SpellEpisode
from spell_jax.data.clusters import CLOZE, Cluster, in_memory
from spell_jax.data.stream import TaskStream
from tests.algorithms.scripted import (
    PROMPTS,
    ScriptedModels,
    make_context,
    make_small_config,
    roll_out,
    to_groups,
    to_records,
)

BUILT = "The first stage was built by Boeing in 1969."
DOCUMENTS = (
    f"The Saturn V rocket went to the Moon. {BUILT}",
    "Boeing made airplanes. It has a seat in Chicago.",
    "The rain fell.",
)
GAP = "The first stage was built by ____ in 1969."


class Writer:
    """Models of which the questioner proposes a sentence and a span."""

    def __init__(self, sentence: str = BUILT, answer: str = "Boeing"):
        self.proposal = json.dumps({"sentence": sentence, "answer": answer})

    def __call__(self, role: str, prompt: str, sibling: int, model: str) -> str:
        if role == "questioner":
            return self.proposal
        if role == "verifier":
            return "[[NO]]"
        return "The answer is " + ("Boeing" if sibling % 2 and "Moon" in prompt else "NASA")


def make(kind=Spell, config=SpellConfig, **options):
    context = make_context(
        clusters=lambda: in_memory([Cluster("c", DOCUMENTS)]),
        deal=lambda source: TaskStream(source, (CLOZE,), (1.0,), seed=0),
        teacher_prompt=options.pop("teacher_prompt", None),
    )
    fields = {"generation_batch": 2, "questioner__documents": (3,)}
    fields |= {"questioner__unread_documents": 0} | options
    return kind(make_small_config(config, **fields), context)


def test_sentence_is_hidden_from_all_but_the_questioner() -> None:
    algorithm, ask = make(), ScriptedModels(Writer())
    episodes: list[SpellEpisode] = roll_out(algorithm, ask, 1)
    assert [e.status for e in episodes] == ["accepted"] * 2
    assert {(e.question, e.reference, e.hidden) for e in episodes} == {(GAP, "Boeing", BUILT)}
    prompts = {role: [p for c in ask.calls if c.role == role for p in c.prompts] for role in
               ("questioner", "responder", "verifier")}  # fmt: skip
    assert all(BUILT in prompt for prompt in prompts["questioner"])
    remaining = ("The Saturn V rocket went to the Moon.", *DOCUMENTS[1:])
    assert PROMPTS.responder(CLOZE, remaining, GAP) in prompts["responder"]
    assert not any(BUILT in p for p in (*prompts["responder"], *prompts["verifier"]))
    assert [e.rule for e in episodes] == [(0.0, 1.0, 0.0, 1.0)] * 2
    (record, _) = to_records(algorithm, episodes)
    assert record["hidden"] == BUILT and record["question"] == GAP


def test_teacher_does_not_read_the_sentence_either() -> None:
    algorithm = make(teacher_prompt=lambda text: list(text.encode()), questioner__train=False)
    groups = to_groups(algorithm, roll_out(algorithm, ScriptedModels(Writer()), 1))
    teacher = [bytes(g.reference_prompt).decode() for g in groups if g.name == "responder"]
    assert teacher and not any(BUILT in text for text in teacher)
    assert all("Boeing made airplanes" in text for text in teacher)


@pytest.mark.parametrize(
    ("writer", "reason"),
    [
        (Writer(BUILT.replace("first", "second")), "not_a_sentence"),
        (Writer(BUILT, "NASA"), "not_in_sentence"),
        (Writer(BUILT, "1969"), "not_elsewhere"),
    ],
)
def test_proposals_that_the_search_refuses_are_punished(writer: Writer, reason: str) -> None:
    algorithm = make()
    episodes = roll_out(algorithm, ScriptedModels(writer), 1)
    assert {(e.status, e.reason, e.reward) for e in episodes} == {("bad_format", reason, -1.0)}
    assert algorithm.metrics(episodes).means()[f"reason/{reason}"] == 1.0
