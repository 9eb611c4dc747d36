"""Tests of SPELL on chained questions (the ladder world): references by hop, gate, leak, cues."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from spell_jax.algorithms.spell.algorithm import Spell
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.data.clusters import in_memory
from spell_jax.data.stream import TaskStream
from spell_jax.launch.experiments.ladder import world
from spell_jax.launch.experiments.ladder.rows import TASK
from spell_jax.selfplay.memory import Entry
from tests.algorithms.scripted import ScriptedModels, make_config, make_context, roll_out

CLUSTERS = world.make_clusters(0, 4, (9,))
DOCUMENTS = {line.split()[1]: line for cluster in CLUSTERS for line in cluster.documents}


def documents_of(prompt: str) -> list[str]:
    return [line for line in prompt.splitlines() if line.startswith("- ")]


def ask_deeper(prompt: str, depth: int = 3) -> str:
    """Ask the last known question with one more hop; without history, ask at `depth`."""
    history = re.findall(r"known: (.*) answer", prompt)
    name = documents_of(prompt)[0].split()[1]
    question = f"friend of {history[-1]}" if history else "friend of " * depth + name
    return json.dumps({"question": question, "answer": "a guess"})


def answer(prompt: str) -> str:
    return f"answer is {world.oracle(prompt.splitlines()[-1], documents_of(prompt))}"


def write(role: str, prompt: str, sibling: int, model: str) -> str:
    if role == "questioner":
        return ask_deeper(prompt)
    if role == "verifier":
        first_answer, second_answer = re.findall(r"(?:one|two): (\w+)", prompt)
        return "[[YES]]" if first_answer == second_answer else "[[NO]]"
    if model == "policy" and sibling % 2:
        return "answer is nobody"
    return answer(prompt)


def wavering_reader(role: str, prompt: str, sibling: int, model: str) -> str:
    """Answer as a reader: the last sample states another answer than the others."""
    if model == "reference_reader" and sibling == 3:
        return "answer is Nobody"
    return write(role, prompt, sibling, model)


def make_algorithm(**fields: Any) -> Spell:
    defaults: dict[str, Any] = {"questions": 4, "generation_batch": 4, "max_generations": 1}
    defaults |= {
        "questioner__documents": (9,),
        "questioner__unread_documents": 0,
        "questioner__grounding_samples": 0,
        "group_size": 4,
    }
    defaults |= {
        "verifier__group_size": 3,
        "reader__source": "frozen_reader",
        "questioner__memory": 2,
    }
    defaults |= {"reader__by_hop": True, "reader__unanimous": True}
    stream = TaskStream(in_memory(CLUSTERS), (TASK,), (1.0,), seed=0)
    return Spell(
        make_config(SpellConfig, **(defaults | fields)), make_context(deal=lambda _: stream)
    )


def hops(models: ScriptedModels) -> list[str]:
    reader = [call for call in models.calls if call.model == "reference_reader"]
    return [prompt.splitlines()[-1] for call in reader for prompt in call.prompts]


def test_frozen_reader_reads_one_hop_at_a_time():
    models = ScriptedModels(write)
    algorithm = make_algorithm()
    episodes = roll_out(algorithm, models, 1)
    assert [e.status for e in episodes] == ["accepted"] * 4
    for e in episodes:
        assert e.reference == world.oracle(e.question, e.cluster.documents)
        assert e.own_reference == "a guess" and e.mixed
    assert len(hops(models)) == 3 * 4 and {world.depth_of(hop) for hop in hops(models)} == {1}


def test_frozen_reader_continues_from_the_remembered_reference():
    algorithm = make_algorithm()
    roll_out(algorithm, ScriptedModels(write), 1)
    models = ScriptedModels(write)
    episodes = roll_out(algorithm, models, 2)
    assert {world.depth_of(e.question) for e in episodes} == {4}
    assert len(hops(models)) == 4, "one hop for each question"
    for e in episodes:
        (entry,) = e.history
        assert f"friend of {entry.answer}" in hops(models)
        assert e.reference == world.oracle(e.question, e.cluster.documents)


def test_wrong_remembered_reference_is_not_corrected():
    """The oracle takes no part: a chain goes on from whatever is remembered."""
    algorithm = make_algorithm()
    (cluster, *_) = CLUSTERS
    name = cluster.documents[0].split()[1]
    wrong = next(n for n, _ in world.read_facts(cluster.documents) if n != name)
    algorithm.questioner.memory.push(TASK, cluster.id, Entry((), f"friend of {name}", wrong))
    episodes = roll_out(algorithm, ScriptedModels(write), 1)
    (e,) = [e for e in episodes if e.cluster.id == cluster.id]
    assert e.question == f"friend of friend of {name}"
    assert e.reference == world.oracle(f"friend of {wrong}", cluster.documents)


@pytest.mark.parametrize(
    ("fields", "status", "leaked"),
    [
        ({}, "ungrounded", False),
        ({"reader__unanimous": False}, "accepted", False),
        ({"reader__gate_leak": 1.0}, "accepted", True),
    ],
)
def test_gate_wants_unanimous_answers_but_for_its_leak(fields, status, leaked):
    algorithm = make_algorithm(**fields)
    episodes = roll_out(algorithm, ScriptedModels(wavering_reader), 1)
    assert {(e.status, e.leaked) for e in episodes} == {(status, leaked)}
    if status == "accepted":
        assert algorithm.metrics(episodes).means()["leaked"] == leaked
        assert all(e.reference == world.oracle(e.question, e.cluster.documents) for e in episodes)


def test_leak_is_a_share_of_the_questions_and_repeats():
    algorithm = make_algorithm(reader__gate_leak=0.3, generation_batch=400)
    episodes = roll_out(algorithm, ScriptedModels(wavering_reader), 1)
    assert 0.2 < sum(e.leaked for e in episodes) / 400 < 0.4
    second_episodes = roll_out(
        make_algorithm(reader__gate_leak=0.3, generation_batch=400),
        ScriptedModels(wavering_reader),
        1,
    )
    assert [e.leaked for e in second_episodes] == [e.leaked for e in episodes]


@pytest.mark.parametrize("leak", [-0.1, 1.1, float("nan")])
def test_leak_out_of_range_is_rejected(leak):
    with pytest.raises(ValueError, match=r"algorithm\.reader\.gate_leak = .*: must be"):
        make_config(SpellConfig, reader__gate_leak=leak)


@pytest.mark.parametrize("cues", [(), ("city", "friend of", "general")])
def test_cues_are_sampled_for_each_question_and_end_its_prompt(cues):
    algorithm = make_algorithm(questioner__cues=cues, generation_batch=30)
    models = ScriptedModels(write)
    episodes = roll_out(algorithm, models, 1)
    endings = [e.questioner_prompt.splitlines()[-1] for e in episodes]
    assert {*endings} == {f"ask general {cue}".strip() for cue in cues or ("",)}
    assert [e.record()["prompt"].splitlines()[-1] for e in episodes] == endings


# ---------------------------------------------------------------------------------------- Progress


def test_progress_on_probes_rewards_the_questioner():
    """Half of the answers are right in step 1, and three of four in step 2, of probes too."""

    def improved(role: str, prompt: str, sibling: int, model: str) -> str:
        is_wrong = role == "responder" and model == "policy" and sibling == 1
        right = {"questioner": write, "verifier": write}.get(role, lambda *a: answer(a[1]))
        return "answer is nobody" if is_wrong else right(role, prompt, sibling, model)

    algorithm = make_algorithm(questioner__mapping="progress", questioner__probes=4)
    first = roll_out(algorithm, ScriptedModels(write), 1)
    assert [e.reward for e in first] == [0.0] * 4, "no probe yet"
    state = json.loads(json.dumps(algorithm.state_dict()))
    models = ScriptedModels(improved)
    second = roll_out(algorithm, models, 2)
    probed = next(call for call in models.calls if call.role == "responder")
    (probe,) = state["probes"]
    assert [prompt.splitlines()[-1] for prompt in probed.prompts] == [probe["question"]]
    assert {e.mean_score for e in second} == {0.75}
    assert [e.reward for e in second] == [0.25] * 4, "the rise from .5 to .75"
    resumed = make_algorithm(questioner__mapping="progress", questioner__probes=4)
    resumed.load_state_dict(state)
    assert [e.reward for e in roll_out(resumed, ScriptedModels(improved), 2)] == [0.25] * 4
