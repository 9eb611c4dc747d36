"""Tests of tiny-world rows and questions with evidence: correct but for the configured slips."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter

import numpy as np
import pytest

from spell_jax.data import questions as files
from spell_jax.data import tiny_world as world
from spell_jax.policy import tokenizer
from spell_jax.question_sets import evidence_rows
from spell_jax.question_sets.evidence_rows import EvidenceMixture, policy_rows, reward_rows
from spell_jax.question_sets.tuning_rows import read_rows
from spell_jax.selfplay import evidence, prompts, rules

PROMPTS = prompts.load("compact")
TINY = world.__file__.rpartition("/")[0] + "/tiny_policy"
COUNT = 800


def documents_of(prompt: str) -> tuple[str, ...]:
    return tuple(line for line in prompt.split("\n") if line.startswith("- "))


def test_questions_are_answered_by_their_evidence():
    questions = evidence_rows.make_questions(7, 200, (4, 8))
    assert questions == evidence_rows.make_questions(7, 300, (4, 8))[:200]
    assert questions != evidence_rows.make_questions(8, 200, (4, 8))
    assert [len(q.documents) for q in questions[:4]] == [4, 8, 4, 8]
    kinds = Counter(world.question_kind(q.question) for q in questions)
    assert 70 < kinds["two_hop"] < 130 and kinds.total() == kinds["two_hop"] + kinds["lookup"]
    for q in questions:
        assert len(q.evidence) == (2 if world.question_kind(q.question) == "two_hop" else 1)
        truth = world.oracle(q.question, q.documents)
        assert truth == world.oracle(q.question, q.evidence) == world.canonical(q.answer)
        precision_and_recall = evidence.precision_and_recall("\n".join(q.evidence), q.evidence)
        assert precision_and_recall == (1.0, 1.0)
        documents = evidence.searchable(q.documents)
        assert evidence.verbatim_share("\n".join(q.evidence), documents) == 1.0


def test_policy_rows_are_well_formed_with_the_configured_slips():
    mixture, counts = EvidenceMixture(), Counter()
    for row in policy_rows(PROMPTS, mixture, 0, COUNT):
        documents = documents_of(row.prompt)
        assert len(documents) in mixture.documents
        answer = evidence.parse_answer(row.completion)
        assert answer is not None
        assert evidence.verbatim_share(answer.evidence, evidence.searchable(documents)) == 1.0
        truth = world.oracle(answer.analysis, documents)
        right = world.canonical(answer.answer) == truth
        lines = evidence.find_quotes(answer.evidence)
        by_evidence = world.oracle(answer.analysis, lines)
        two_hop = "of friend" in row.prompt
        hasty = two_hop and len(lines) == 1 and lines[0].split()[0] == answer.analysis.split()[-1]
        superfluous = by_evidence is not None and len(lines) > 1 + two_hop
        counts["two_hop"] += two_hop
        counts["hasty"] += hasty
        counts["slip"] += superfluous or (by_evidence is None and not hasty)
        counts["unsupported"] += by_evidence is None
        counts["lucky"] += by_evidence is None and right
        assert right or by_evidence is None
        about = answer.reasoning.split()[2]
        assert right or about == lines[-1].split()[0]
        assert answer.reasoning.endswith(f" is {answer.answer}")
        assert rules.score(
            evidence.with_answer_phrase(answer.answer, row.task), truth or "", row.task
        ) or (not right or world.canonical(answer.answer) != answer.answer.lower())
    assert 0.6 < counts["hasty"] / counts["two_hop"] < 0.75  # some slips look the same
    assert 0.15 < counts["slip"] / (COUNT - counts["hasty"]) < 0.25
    # Some wrong lines state the same value.
    assert 0.87 < counts["lucky"] / counts["unsupported"] < 0.97


def test_policy_rows_without_slips_are_correct():
    for row in policy_rows(PROMPTS, EvidenceMixture(slips=0.0, hasty=0.0), 1, 100):
        answer = evidence.parse_answer(row.completion)
        assert answer is not None
        lines = evidence.find_quotes(answer.evidence)
        assert world.oracle(answer.analysis, lines) == world.canonical(answer.answer)


def by_hand(question: str, lines: list[str]) -> int:
    """Compute the correct score of lines from the question's words only.

    No slip lacks the first line and has the second.
    """
    name, needed_lines = question.split()[-1], []
    for line in lines:
        if line.split()[0] == name and line not in needed_lines:
            needed_lines.append(line)
            if " of friend of " in question and len(needed_lines) == 1:
                name = line.split()[-1]
    hops = 1 + (" of friend of " in question)
    base = {0: 1, 1: 3 if hops == 2 else 5, 2: 5}[len(needed_lines)]
    superfluous = bool(needed_lines) and len(set(lines)) > len(needed_lines)
    return base - superfluous


def sets_of(prompt: str) -> list[list[str]]:
    """Return the lines of each set."""
    *prompt_lines, question, last = prompt.splitlines()
    assert last == "scores"
    parts = "\n".join(prompt_lines).split(f"\n{question}\n")
    heads = [parts[0], *(part.splitlines()[-1] for part in parts[1:-1])]
    assert heads == [str(i) for i in range(1, len(parts))]
    bodies = [part.splitlines() for part in parts[1:]]
    lines = [body[:-1] for body in bodies[:-1]] + bodies[-1:]
    return [[line.removeprefix("- ") for line in set_lines] for set_lines in lines]


def test_reward_reasoning_compares_the_names_of_every_line():
    kinds = Counter()
    for row in reward_rows(PROMPTS, EvidenceMixture(noise=0.0), 0, COUNT):
        name, sets = row.prompt.split()[-2], sets_of(row.prompt)
        thought, _, score_text = row.completion.removeprefix("<think>").partition("</think>")
        scores = evidence.parse_scores(score_text, len(sets))
        assert scores == evidence.parse_scores(row.completion, len(sets)) and scores
        for line, lines, score in zip(thought.split("\n"), sets, scores, strict=True):
            pairs = re.findall(r" (-|\w+) (\w+)\[\[(YES|NO)\]\]", line)
            assert [line_name for _, line_name, _ in pairs] == [
                quoted.split()[0] for quoted in lines
            ]
            assert all((a == b) == (verdict == "YES") for a, b, verdict in pairs)
            assert pairs[0][0] == name
            hops = 1 + (" of friend of " in row.prompt)
            for (_, _, verdict), quoted, (sought_name, _, _) in zip(
                pairs, lines, pairs[1:], strict=False
            ):
                name, hops = (quoted.split()[-1], hops - 1) if verdict == "YES" else (name, hops)
                assert sought_name == (name if hops else "-")
            name = row.prompt.split()[-2]
            yes = sum(verdict == "YES" for _, _, verdict in pairs)
            kinds[yes, len(pairs), score] += 1
            assert (score == 1) == (yes == 0)
    assert len(kinds) > 6


def test_reward_scores_are_correct_up_to_noise():
    exact, off, sizes = 0, Counter(), Counter()
    for row in reward_rows(PROMPTS, EvidenceMixture(), 0, COUNT):
        sets = sets_of(row.prompt)
        question = row.prompt.splitlines()[-2]
        scores = evidence.parse_scores(row.completion, len(sets))
        assert scores is not None
        sizes[len(sets)] += 1
        for lines, score in zip(sets, scores, strict=True):
            expected_score = by_hand(question, lines)
            off[abs(score - expected_score)] += 1
            exact += score == expected_score
    assert set(sizes) == {1, 2, 3, 4}
    assert set(off) <= {0, 1} and 0.9 < exact / off.total() < 1.0


def test_true_score_of_evidence_lines():
    question = evidence_rows.make_questions(0, 1, (5,), two_hop=1.0)[0]
    first, second = question.evidence
    other_line, another_line = [
        d[2:] for d in question.documents if d[2:] not in question.evidence
    ][:2]
    for lines, score in (
        ([first, second], 5),
        ([second, first, first], 5),
        ([first, second, other_line], 4),
        ([first], 3),
        ([second], 3),
        ([first, other_line], 2),
        ([other_line], 1),
        ([other_line, another_line], 1),
    ):
        assert evidence_rows.true_score(lines, question) == score
    single = evidence_rows.make_questions(0, 1, (5,), two_hop=0.0)[0]
    assert evidence_rows.true_score(single.evidence, single) == 5


def test_slips_with_two_documents_keep_only_the_first_line():
    question = evidence_rows.make_questions(0, 1, (2,), two_hop=1.0)[0]
    rng = np.random.default_rng(0)
    for slips, hasty in ((1.0, 0.0), (0.0, 1.0)):
        samples = [evidence_rows.sample_evidence(rng, question, slips, hasty) for _ in range(20)]
        assert set(map(tuple, samples)) == {question.evidence[:1]}


@pytest.mark.parametrize("make", [policy_rows, reward_rows])
def test_row_depends_only_on_seed_and_number(make):
    rows = list(make(PROMPTS, EvidenceMixture(), 3, 20))
    assert rows[:10] == list(make(PROMPTS, EvidenceMixture(), 3, 10))
    assert rows != list(make(PROMPTS, EvidenceMixture(), 4, 20))


def test_policy_and_reward_rows_use_different_questions():
    policy = [row.prompt.split("\n")[-2] for row in policy_rows(PROMPTS, EvidenceMixture(), 0, 50)]
    reward = [row.prompt.split("\n")[-2] for row in reward_rows(PROMPTS, EvidenceMixture(), 0, 50)]
    assert sum(a == b for a, b in zip(policy, reward, strict=True)) < 10


def test_rows_fit_the_tiny_policys_token_limits():
    words = tokenizer.load(TINY)
    for row in itertools.chain(
        policy_rows(PROMPTS, EvidenceMixture(), 0, 300),
        reward_rows(PROMPTS, EvidenceMixture(), 0, 300),
    ):
        assert len(words.chat(row.prompt)) <= 192 and words.count(row.completion) < 96
        assert words.decode(words.encode(row.completion)) == row.completion


def test_written_files_are_read_by_their_consumers(tmp_path):
    sizes = ["--rows=5", "--questions=6", "--held_out=4", "--documents", "4"]
    evidence_rows.main([f"--out={tmp_path}", *sizes])
    for name, make_rows in (("policy", policy_rows), ("reward", reward_rows)):
        rows, skipped = read_rows(tmp_path / f"{name}.jsonl")
        assert rows == list(make_rows(PROMPTS, EvidenceMixture(), 0, 5)) and not skipped
    held_out = files.read_questions(tmp_path / "held_out.jsonl", "data.validation")
    assert held_out == evidence_rows.make_questions(evidence_rows.HELD_OUT_SEED, 4, (4,))
    train = files.read_questions(tmp_path / "train.jsonl", "data.questions")
    assert train == evidence_rows.make_questions(0, 6, (4,))
    assert dataclasses.asdict(train[0])["evidence"]
