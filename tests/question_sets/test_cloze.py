"""Tests of cloze questions about clusters: sets that share documents, and references that hold."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections import Counter

import pytest

from spell_jax.data.clusters import Cluster
from spell_jax.data.questions import read_questions
from spell_jax.question_sets import cloze
from spell_jax.question_sets.cloze import ClozeConfig, make_sets

CITIES = ("Oslo", "Lima", "Rome", "Cairo", "Quito", "Delhi")
CLUSTER = Cluster(
    "cities",
    tuple(
        f"The old bridges of {a} lead to the harbor of {b}. Boats from {a} and {c} sail at night. "
        f"Many bridges and boats of {b} are old."
        for a, b, c in zip(CITIES, CITIES[1:] + CITIES[:1], CITIES[2:] + CITIES[:2], strict=True)
    ),
    ("general_qa",),
)


def sets_of(config: ClozeConfig, cluster: Cluster = CLUSTER):
    counts: Counter[str] = Counter()
    return list(make_sets(cluster, config, counts)), counts


def test_a_set_shares_documents_without_its_own_sentences() -> None:
    sets, counts = sets_of(ClozeConfig(per_set=2, sets=3))
    assert len(sets) == 3 and counts["written"] == 6
    answers = [q.answer.lower() for questions in sets for q in questions]
    assert len(set(answers)) == len(answers)  # each answer once
    for questions in sets:
        (documents,) = {q.documents for q in questions}
        for q in questions:
            sentence = q.question.removeprefix("Fill the gap: ").replace("____", q.answer)
            assert sentence in " ".join(CLUSTER.documents)
            assert sentence not in " ".join(documents)
            assert q.evidence and q.shown
            for evidence in q.evidence:
                assert q.answer in evidence
                assert any(evidence in documents[number] for number in q.shown)


def test_sets_that_are_not_full_are_left_out() -> None:
    assert sets_of(ClozeConfig(per_set=50))[0] == []
    assert sets_of(ClozeConfig(), Cluster("empty", ("a b c.",), ("general_qa",)))[0] == []


def test_questions_depend_on_the_seed_and_the_cluster_alone() -> None:
    config = ClozeConfig(per_set=2, sets=2)
    assert sets_of(config) == sets_of(config)
    assert sets_of(config) != sets_of(ClozeConfig(per_set=2, sets=2, seed=1))


def test_a_set_of_wh_questions_shares_whole_documents_and_has_different_answers() -> None:
    documents = tuple(
        f"The old wooden bridges of {city} were built in {1800 + number} by a small guild."
        for number, city in enumerate(CITIES)
    )
    cluster = Cluster("bridges", documents, ("general_qa",))
    sets, counts = sets_of(ClozeConfig(form="question", per_set=4, sets=3), cluster)
    assert [len(questions) for questions in sets] == [4, 4, 4] and counts["written"] == 12
    assert len({q.question for questions in sets for q in questions}) == 12
    for questions in sets:
        assert len({q.answer for q in questions}) == 4
        for q in questions:
            assert q.task == "general_qa" and q.documents == documents
            (number,) = q.shown
            assert q.answer in documents[number] and q.answer not in q.question
    assert sets_of(ClozeConfig(form="question", per_set=50), cluster)[0] == []


def test_a_second_question_with_an_answer_waits_for_the_next_set() -> None:
    documents = (
        "The old wooden bridges of Oslo were built by a small guild. "
        "The long straight roads to Oslo were built by hand.",
        "The large new harbor of Lima was never used at all. "
        "The high stone towers near Lima were sold last winter.",
    )
    for seed in range(8):  # orders of the four questions
        config = ClozeConfig(form="question", per_set=2, sets=2, seed=seed)
        sets, counts = sets_of(config, Cluster("two", documents, ("general_qa",)))
        assert counts["written"] == 4
        assert all({q.answer for q in questions} == {"Oslo", "Lima"} for questions in sets)


@pytest.mark.slow
def test_command_writes_questions_that_training_reads(tmp_path: pathlib.Path) -> None:
    clusters, out = tmp_path / "clusters.jsonl", tmp_path / "questions.jsonl"
    clusters.write_text(json.dumps({"id": "cities", "documents": list(CLUSTER.documents)}))
    command = [sys.executable, "-m", cloze.__name__, f"--clusters={clusters}"]
    process = subprocess.run(
        [*command, f"--out={out}", "--per_set=2", "--sets=2"], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout.splitlines()[-1]) == {"written": 4, "clusters": 1}
    assert len(read_questions(out, "data.questions")) == 4
