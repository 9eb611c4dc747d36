"""Tests of tiny-world demonstrations: correct, and dependent on seed and row number only."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from spell_jax.data import tiny_world as world
from spell_jax.question_sets import tiny_world_rows
from spell_jax.selfplay import parsing, prompts, rules

PROMPTS = prompts.load("compact")
COUNT = 1500


def take(mixture=None, seed: int = 0, start: int = 0, count: int = COUNT):
    mixture = mixture or tiny_world_rows.DemonstrationMixture()
    return list(
        itertools.islice(
            tiny_world_rows.world_demonstrations(PROMPTS, mixture, seed=seed, start=start), count
        )
    )


@pytest.fixture(scope="module")
def by_role() -> dict[str, list[tiny_world_rows.Row]]:
    rows_by_role: dict[str, list[tiny_world_rows.Row]] = {}
    for row in take():
        rows_by_role.setdefault(row.role, []).append(row)
    return rows_by_role


def documents_of(prompt: str) -> list[str]:
    return [line for line in prompt.splitlines() if line.startswith("- ")]


def thought_of(completion: str) -> list[str]:
    thought = completion.partition("<think>")[2].partition("</think>")[0].strip()
    return [fact.strip() for fact in thought.split(",")] if thought else []


def check_evidence(row: tiny_world_rows.Row) -> None:
    """Check a demonstration: lines are from the documents, sums are right, a choice is a letter.

    A questioner's thought opens with its question.
    """
    documents = documents_of(row.prompt)
    facts = thought_of(row.completion)
    if row.role == "questioner":
        assert f'{{"question":"{facts.pop(0)}"' in row.completion, row
    for fact in facts:
        if fact.endswith(")"):
            value, letter = fact.removesuffix(")").split("(")
            options = (f"({letter}) {value}\n", f'"{letter}":" {value}"')
            assert any(option in row.prompt + row.completion for option in options), row
        elif " is " in fact:
            x, word, y, _, result = fact.split()
            assert int(result) == world.add_up(int(x), word, int(y)), row
        else:
            assert f"- {fact}" in documents, row


def is_right(answer: str, truth: str | None, task: str) -> bool:
    if truth is None:
        return False
    if task == "general_qa":
        return world.canonical(answer) == truth
    return rules.same_answer(answer, truth, task)


def true_answer(question: str, task: str, documents: list[str]) -> str | None:
    ask = world.oracle_choice if task == "multiple_choice" else world.oracle
    return ask(question, documents)


def test_questions_are_accepted_with_correct_references(by_role):
    for row in by_role["questioner"]:
        parsed = parsing.parse_question(row.completion, row.task, lambda text: len(text.split()))
        assert parsed.status == "accepted", row
        truth = true_answer(parsed.question, row.task, documents_of(row.prompt))
        assert is_right(parsed.answer, truth, row.task), row
        check_evidence(row)


def test_requested_letter_is_the_letter_of_the_answer():
    choices = tiny_world_rows.DemonstrationMixture(
        recital=0, questioner=1, verifier=0, kinds=(0, 0, 0, 1)
    )
    letters = Counter()
    for row in take(choices, count=400):
        assert row.task == "multiple_choice"
        parsed = parsing.parse_question(row.completion, row.task, lambda _: 1)
        assert row.prompt.endswith(f"({parsed.answer})")
        letters[parsed.answer] += 1
    assert len(letters) == 4 and min(letters.values()) > 0.15 * letters.total()


def test_known_questions_are_rarely_repeated(by_role):
    history_rows = [row for row in by_role["questioner"] if "known: " in row.prompt]
    repeats = 0
    for row in history_rows:
        question = json.loads(row.completion.partition("</think>")[2])["question"]
        repeats += any(f": {question}{end}" in row.prompt for end in (" answer", "\n"))
    assert len(history_rows) > 40 and repeats <= 0.02 * len(history_rows)


def test_answers_are_correct(by_role):
    unknown = Counter()
    for row in by_role["responder"]:
        answer = rules.extract_answer(row.completion, row.task)
        assert answer or row.task != "general_qa", row
        truth = true_answer(row.prompt, row.task, documents_of(row.prompt))
        check_evidence(row)
        if row.completion.endswith("answer is " + tiny_world_rows.UNKNOWN):
            assert truth is None, row
            unknown[row.prompt.startswith(prompts.NO_DOCUMENTS), row.task] += 1
        else:
            assert answer is not None and is_right(answer, truth, row.task), row
    assert all(unknown[True, task] for task in world.TASK_OF_KIND.values())
    assert unknown[False, "general_qa"] and unknown[False, "financial_math"]
    assert not unknown[False, "multiple_choice"]


def test_rule_misses_some_correct_answers(by_role):
    """The verifier is useful only if the rule misses some correct answers."""
    scores = []
    for row in by_role["responder"]:
        truth = true_answer(row.prompt, row.task, documents_of(row.prompt))
        if truth is not None:
            scores.append(rules.score(row.completion, truth, row.task))
    assert 0.85 < np.mean(scores) < 1.0


def test_verdicts_are_correct_or_strict_about_wording(by_role):
    labels, strict = Counter(), []
    for row in by_role["verifier"]:
        question, first_line, second_line, ask = row.prompt.rsplit("\n", 3)
        assert ask == "same?" and world.question_kind(question) in world.KINDS
        first, second = first_line.removeprefix("one: "), second_line.removeprefix("two: ")
        same = world.canonical(first) == world.canonical(second)
        verdict = parsing.parse_verdict(row.completion)
        if same and first != second:
            strict.append(verdict == 0)
        else:
            assert verdict == int(same), row
        labels[same] += 1
    assert 0.4 < labels[True] / labels.total() < 0.6
    assert abs(np.mean(strict) - tiny_world_rows.DemonstrationMixture().strict) < 4 * np.sqrt(
        0.25 / len(strict)
    )


def test_verifier_rows_omit_the_aliases_of_held_out_cities():
    mixture = tiny_world_rows.DemonstrationMixture(
        recital=0, questioner=0, verifier=1, verifier_cities=5
    )
    city_names = {name for pair in world.CITIES[:5] for name in pair}
    aliases = set()
    for row in take(mixture, count=800):
        _, first_line, second_line, _ = row.prompt.rsplit("\n", 3)
        pair = [text.split(": ")[1].removesuffix(" town") for text in (first_line, second_line)]
        if (
            row.completion == "[[YES]]"
            and pair[0] != pair[1]
            and "Mr" not in first_line + second_line
        ):
            aliases |= {text for text in pair if not text.split()[0].isdigit()}
    assert aliases and aliases <= city_names


def test_verifier_pairs_are_labeled_by_kind():
    rng = np.random.default_rng(0)
    kinds = Counter()
    for _ in range(400):
        row, pair = tiny_world_rows.verifier_row(PROMPTS, rng, len(world.CITIES))
        assert (pair == "different") == (row.completion == "[[NO]]")
        kinds[pair] += 1
    assert set(kinds) == {"same", "different", "alias", "decorated"}


def test_recitals_match_their_documents(by_role):
    for row in by_role["reciter"]:
        thought = thought_of(row.completion)
        options = [fact for fact in thought if fact.endswith(")")]
        lines = [fact for fact in thought if " is " not in fact and fact not in options]
        assert sorted(f"- {line}" for line in lines) == sorted(documents_of(row.prompt))
        assert len(options) == tiny_world_rows.OPTIONS
        sums = [fact.split()[1] for fact in thought if " is " in fact]
        assert sums == list(2 * world.SUMS)
        check_evidence(row)


def test_row_depends_only_on_seed_and_number():
    rows = take(count=40)
    assert take(start=25, count=15) == rows[25:]
    assert take(count=40) == rows
    other_rows = take(seed=1, count=40)
    assert sum(a == b for a, b in zip(rows, other_rows, strict=True)) == 0
    assert len({row.prompt + row.completion for row in rows}) == 40


def test_rows_follow_the_shares_of_the_mixture(by_role):
    mixture = tiny_world_rows.DemonstrationMixture()
    expected_shares = {
        "reciter": mixture.recital,
        "questioner": mixture.questioner,
        "verifier": mixture.verifier,
        "responder": 1 - mixture.recital - mixture.questioner - mixture.verifier,
    }
    assert set(by_role) == set(expected_shares)
    for role, share in expected_shares.items():
        assert abs(len(by_role[role]) / COUNT - share) < 4 * np.sqrt(0.25 / COUNT), role
    tasks = Counter(row.task for row in by_role["responder"])
    for task, share in (("general_qa", 0.5), ("financial_math", 0.25), ("multiple_choice", 0.25)):
        assert abs(tasks[task] / tasks.total() - share) < 0.1
    for role, expected_counts in (
        ("questioner", mixture.questioner_documents),
        ("reciter", mixture.recital_documents),
    ):
        counts = Counter(len(documents_of(row.prompt)) for row in by_role[role])
        assert set(counts) == set(expected_counts)
    allowed = {0, *mixture.responder_documents, *mixture.two_hop_documents}
    counts = Counter(len(documents_of(row.prompt)) for row in by_role["responder"])
    assert set(counts) <= allowed and set(mixture.responder_documents) <= set(counts)
    far = sum(counts[n] for n in mixture.two_hop_documents if n not in mixture.responder_documents)
    assert 0 < far < 0.1 * counts.total()


def test_mixture_can_have_a_single_role():
    questioner_mixture = tiny_world_rows.DemonstrationMixture(recital=0, questioner=1, verifier=0)
    assert {row.role for row in take(questioner_mixture, count=30)} == {"questioner"}
    responder_mixture = tiny_world_rows.DemonstrationMixture(
        recital=0, questioner=0, verifier=0, kinds=(0, 0, 1, 0)
    )
    rows = take(responder_mixture, count=30)
    assert {(row.role, row.task) for row in rows} == {("responder", "financial_math")}
