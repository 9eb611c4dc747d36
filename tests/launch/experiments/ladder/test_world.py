"""Tests of the ladder world: its rings, its grammar, its oracle."""

from __future__ import annotations

import numpy as np
import pytest

from spell_jax.launch.experiments.ladder import world

DOCUMENTS = ("- Arvo Oslo Bela Cato", "- Bela Paris Cato Arvo", "- Cato Rome Arvo Bela")


def documents(seed: int, count: int = 9) -> tuple[str, ...]:
    return world.make_documents(np.random.default_rng(seed), count)


@pytest.mark.parametrize("count", [2, 9, world.MOST_DOCUMENTS])
@pytest.mark.parametrize("relation", world.PEOPLE)
def test_people_are_a_ring_and_share_no_city(count, relation):
    facts = world.read_facts(documents(0, count))
    names = {name for name, _ in facts}
    assert len(names) == len({facts[name, "city"] for name in names}) == count
    start = name = min(names)
    met = []
    for _ in range(count):
        name = facts[name, relation]
        met.append(name)
    assert name == start and {*met} == names


@pytest.mark.parametrize("count", [1, world.MOST_DOCUMENTS + 1])
def test_document_count_out_of_range_is_rejected(count):
    with pytest.raises(ValueError, match=rf"documents = {count}: must be 2 to 10"):
        documents(0, count)


def test_clusters_are_a_function_of_the_seed():
    first = world.make_clusters(0, 4, (5, 9))
    assert [len(cluster.documents) for cluster in first] == [5, 9, 5, 9]
    assert first == world.make_clusters(0, 6, (5, 9))[:4]
    other_clusters = world.make_clusters(1, 4, (5, 9))
    assert not {c.id for c in first} & {c.id for c in other_clusters}
    assert not {c.documents for c in first} & {c.documents for c in other_clusters}


@pytest.mark.parametrize(
    ("question", "answer", "depth"),
    [
        ("city of Arvo", "Oslo", 1),
        ("friend of Arvo", "Bela", 1),
        ("general of friend of Arvo", "Arvo", 2),
        ("city of friend of general of Arvo", "Oslo", 3),
        ("city of Dina", None, 1),
        ("friend of city of Arvo", None, 0),
        ("Arvo", None, 0),
        ("friend of", None, 0),
        ("who is friend of Arvo", None, 0),
        ("friend of Arvo?", None, 0),
    ],
)
def test_oracle_walks_the_chain(question, answer, depth):
    assert world.oracle(question, DOCUMENTS) == answer
    assert world.depth_of(question) == depth


def test_evidence_has_one_line_for_each_hop():
    walked = world.walk("city of general of friend of Arvo", DOCUMENTS)
    assert walked is not None
    assert walked.evidence == (
        "friend Arvo Oslo Bela Cato",
        "general Bela Paris Cato Arvo",
        "city Arvo Oslo Bela Cato",
    )
    assert walked.answer == "Oslo"


@pytest.mark.parametrize("depth", range(1, 9))
def test_sampled_questions_have_the_depth_and_an_answer(depth):
    rng, texts = np.random.default_rng(depth), documents(depth)
    for _ in range(20):
        question = world.sample_question(rng, texts, depth)
        assert world.depth_of(question.text) == len(question.evidence) == depth
        assert world.oracle(question.text, texts) == question.answer


def test_cue_begins_with_the_fixed_relations_and_the_rest_is_random():
    rng = np.random.default_rng(0)
    question = "city of friend of general of friend of friend of Arvo"
    assert {world.sample_cue(rng, question, 5) for _ in range(20)} == {"city friend general friend"}
    cues = {world.sample_cue(rng, question, 1) for _ in range(200)}
    assert cues == {cue for cue in world.CUES if cue.startswith("city ")} and len(cues) == 8


def test_question_continues_its_shorter_one():
    rng, texts = np.random.default_rng(0), documents(0)
    fronts = set()
    for _ in range(60):
        question = world.sample_question(rng, texts, 4).text
        shorter = world.shorten(rng, question, texts).text
        assert world.depth_of(shorter) == 3
        assert shorter.split(" of ")[1:] == question.split(" of ")[2:]
        fronts.add(shorter.split()[0] == "city" or question.endswith(shorter))
    assert fronts == {True}
