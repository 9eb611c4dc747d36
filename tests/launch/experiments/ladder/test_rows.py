"""Tests of the ladder world's demonstrations."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest

from spell_jax.launch.experiments.ladder import world
from spell_jax.launch.experiments.ladder.rows import TASK, LadderMixture, demonstrations
from spell_jax.selfplay import parsing, prompts, rules

PROMPTS = prompts.load("compact")


def take(count: int, seed: int = 0, start: int = 0, **shares):
    rows = demonstrations(PROMPTS, mixture=LadderMixture(**shares), seed=seed, start=start)
    return list(itertools.islice(rows, count))


def documents_of(prompt: str) -> list[str]:
    return [line for line in prompt.splitlines() if line.startswith("- ")]


def question_of(row) -> str:
    """Return a row's question: from the completion for the questioner, else from the prompt."""
    if row.role == "questioner":
        return parsing.parse_question(row.completion, TASK, lambda _: 1).question
    question = [line for line in row.prompt.splitlines() if world.depth_of(line)]
    return question[0]


@pytest.fixture(scope="module")
def rows():
    return take(1500)


def test_rows_depend_on_seed_and_number_only(rows):
    assert take(5, start=20) == rows[20:25]
    assert take(5, seed=1) != rows[:5]


def test_responder_and_questioner_state_the_oracles_answer(rows):
    for row in rows:
        if row.role == "verifier":
            continue
        text = row.completion
        if row.role == "questioner":
            text = parsing.parse_question(text, TASK, lambda _: 1).answer
        stated = rules.extract_answer(text, TASK) if row.role == "responder" else text.strip()
        assert stated == world.oracle(question_of(row), documents_of(row.prompt)), row


def test_depths_are_shallow_but_for_a_thin_tail(rows):
    depths = Counter(world.depth_of(question_of(row)) for row in rows)
    assert {1, 2, 3, 4} <= {*depths} <= {*range(1, 9)} and depths[3] > depths[5]
    assert 0.07 < sum(depths[depth] for depth in range(3, 9)) / depths.total() < 0.17
    shallow = Counter(world.depth_of(question_of(row)) for row in take(300, deeper=0.0))
    assert {*shallow} == {1, 2}
    deep = Counter(world.depth_of(question_of(row)) for row in take(300, deeper=1.0, deepest=4))
    assert {*deep} == {3, 4} and 1.5 < deep[3] / deep[4] < 2.7


def test_most_questions_continue_a_known_one_by_a_hop(rows):
    continued = []
    for row in rows:
        known_pairs = re.findall(r"known: (.*) answer: (.*)", row.prompt)
        for question, answer in known_pairs:
            assert world.oracle(question, documents_of(row.prompt)) == answer
        if known_pairs and (depth := world.depth_of(question_of(row))) > 1:
            last = known_pairs[-1][0]
            same = last.split(" of ")[1:] == question_of(row).split(" of ")[2:]
            continued.append(world.depth_of(last) == depth - 1 and same)
    assert 0.5 < sum(continued) / len(continued) < 0.75


def test_questions_begin_with_the_cue_or_continue_a_known_one_after_its_first_relation(rows):
    fronts, cue_questions = Counter(), 0
    for row in rows:
        if row.role == "questioner":
            cue = row.prompt.splitlines()[-1].split()[-4:]
            assert " ".join(cue) in world.CUES
            *relations, _ = question_of(row).split(" of ")
            fronts[cue[0]] += relations[0] == cue[0]
            follows = relations[:4] == cue[: len(relations)]
            assert follows or ("known:" in row.prompt and len(relations) > 1)
            cue_questions += follows
    questioners = sum(row.role == "questioner" for row in rows)
    assert fronts.total() == questioners and cue_questions > 0.7 * questioners
    assert {*fronts} == {*world.RELATIONS} and min(fronts.values()) > 0.25 * questioners


def test_responder_names_the_relation_and_copies_the_line_of_each_hop(rows):
    for row in rows:
        if row.role == "responder":
            facts = world.read_facts(documents_of(row.prompt))
            walk = re.findall(r"(\w+) (\w+) (\w+ \w+ \w+)", row.completion.split("</think>")[0])
            *links, name = question_of(row).split(" of ")
            assert [relation for relation, _, _ in walk] == links[::-1]
            for relation, person, values in walk:
                assert person == name
                assert values.split() == [facts[name, every] for every in world.RELATIONS]
                name = facts[name, relation]


def test_verdicts_tell_whether_answers_are_equal(rows):
    verdicts = Counter()
    for row in rows:
        if row.role == "verifier":
            first_answer, second_answer = re.findall(r"(?:one|two): (\w+)", row.prompt)
            assert row.completion == ("[[YES]]" if first_answer == second_answer else "[[NO]]")
            verdicts[row.completion] += 1
    assert min(verdicts.values()) > 0.4 * verdicts.total()
