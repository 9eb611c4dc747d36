"""Tests of questions whose answer a rule chooses (algorithm.questioner.answer_first)."""

from __future__ import annotations

import json
import re

from spell_jax.algorithms.spell.algorithm import Spell
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.data.clusters import Cluster, in_memory
from spell_jax.data.stream import TaskStream
from tests.algorithms.scripted import (
    QA,
    SMALL,
    ScriptedModels,
    make_config,
    make_context,
    roll_out,
    to_records,
)

DOCUMENTS = ("In 1957 they met in Rome.", "They came from Oslo in June 1960.", "nothing is here.")
SPANS = {"1957", "Rome", "Oslo", "June 1960"}


def obedient(role: str, prompt: str, sibling: int, model: str) -> str:
    if role == "questioner":
        (answer,) = re.findall(r"answer: (.+)$", prompt)
        return json.dumps({"question": f"What of {answer}?", "answer": answer})
    if role == "verifier":
        return "[[NO]]"
    right_answer = re.findall(r"What of (.+)\?$", prompt)[0]
    is_blind = prompt.startswith("Empty")
    return f"The answer is {'unknown' if is_blind or sibling % 2 else right_answer}"


def make(documents=DOCUMENTS, **options) -> Spell:
    fields = {
        "questioner__answer_first": True,
        "questioner__documents": (1,),
        "generation_batch": 40,
        "questioner__memory": 0,
    }
    context = make_context(
        clusters=lambda: in_memory([Cluster("c", documents)]),
        deal=lambda source: TaskStream(source, (QA,), (1.0,), seed=0),
    )
    return Spell(make_config(SpellConfig, **(SMALL | fields | options)), context)


def test_answer_is_a_name_or_number_of_the_shown_document() -> None:
    algorithm = make()
    episodes = roll_out(algorithm, ScriptedModels(obedient), 1)
    accepted_episodes = [e for e in episodes if e.status == "accepted"]
    assert {e.reference for e in accepted_episodes} == SPANS
    for e in accepted_episodes:
        assert e.span in DOCUMENTS[e.shown[0]] and e.questioner_prompt.endswith(f"answer: {e.span}")
    empty = [e for e in episodes if e.status != "accepted"]
    assert empty and {(e.status, e.reason) for e in empty} == {("too_small", "no_span")}
    prompts = [r["prompt"] for r in to_records(algorithm, episodes) if r["status"] == "accepted"]
    assert all(re.search(r"documents\[\d\]}\nask general answer: ", text) for text in prompts)


def test_questions_about_a_cluster_have_answers_of_their_own() -> None:
    algorithm = make(DOCUMENTS[:2], generation_batch=20, questioner__questions_per_cluster=20)
    episodes = roll_out(algorithm, ScriptedModels(obedient), 1)
    assert {e.span for e in episodes} == SPANS


def test_another_answer_is_bad_format() -> None:
    def stubborn(role: str, prompt: str, sibling: int, model: str) -> str:
        if role == "questioner":
            return json.dumps({"question": "Where?", "answer": "Lima"})
        return "The answer is Lima"

    episodes = roll_out(make(DOCUMENTS[:2]), ScriptedModels(stubborn), 1)
    assert {(e.status, e.reason, e.reward) for e in episodes} == {
        ("bad_format", "another_answer", -1.0)
    }


def test_round_trip_needs_the_answer_of_all_samples() -> None:
    """The reader always finds Rome and 1957, and finds Oslo in three of four samples."""

    def write(role: str, prompt: str, sibling: int, model: str) -> str:
        if model != "reference_reader":
            return obedient(role, prompt, sibling, model)
        right_answer = re.findall(r"What of (.+)\?$", prompt)[0]
        is_sure = right_answer in ("Rome", "1957") or sibling
        return f"The answer is {right_answer if is_sure else 'Lima'}"

    options = {"reader__source": "confirmed", "reader__unanimous": True}
    episodes = roll_out(make(DOCUMENTS[:2], **options), ScriptedModels(write), 1)
    by_status = {e.status: {o.span for o in episodes if o.status == e.status} for e in episodes}
    assert by_status == {"accepted": {"Rome", "1957"}, "ungrounded": {"Oslo", "June 1960"}}
