"""Tests of structured answers, scores of evidence, rewards and quotes."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from spell_jax.data.clusters import PAPER_TASKS
from spell_jax.selfplay import evidence, prompts, rules
from spell_jax.selfplay.evidence import (
    SECTIONS,
    StructuredAnswer,
    parse_answer,
    parse_best_choice,
    parse_scores,
)

GOOD = StructuredAnswer("Which city?", "- Arvo lives in Oslo.\n- b", "He lives there.", "Oslo")
TEXT = evidence.write_answer(GOOD)
TAGS = tuple(f"<{slash}{name}>" for name in SECTIONS for slash in ("", "/"))


# ----------------------------------------------------------------------------------------- Sections


def test_written_answer_is_parsed_back():
    assert parse_answer(TEXT) == GOOD
    spaced = "\n ".join(["", *(f"<{n}>\n {c}\n</{n}>" for n, c in vars(GOOD).items()), ""])
    assert parse_answer(spaced) == GOOD
    assert parse_answer(f"<think>{TEXT} or so</think>\n{TEXT}") == GOOD


@pytest.mark.parametrize("tag", TAGS)
def test_each_tag_must_occur_exactly_once(tag):
    assert parse_answer(TEXT.replace(tag, "")) is None
    assert parse_answer(TEXT.replace(tag, tag + tag)) is None
    assert parse_answer(TEXT.replace(tag, tag.upper())) is None
    for place in range(len(TEXT) + 1):
        assert parse_answer(TEXT[:place] + tag + TEXT[place:]) is None


def test_sections_must_be_in_order():
    parts = [f"<{name}>{content}</{name}>" for name, content in vars(GOOD).items()]
    read = [
        "".join(order) for order in itertools.permutations(parts) if parse_answer("".join(order))
    ]
    assert read == [TEXT]
    assert (
        parse_answer("<analysis>a<evidence>b</analysis>c</evidence>" + "".join(parts[2:])) is None
    )


@pytest.mark.parametrize("name", SECTIONS)
def test_empty_section_gives_none(name):
    content = vars(GOOD)[name]
    for empty in ("", " ", "\n\t"):
        assert parse_answer(TEXT.replace(f">{content}<", f">{empty}<")) is None


def test_text_outside_the_sections_gives_none():
    assert parse_answer("Sure. " + TEXT) is None
    assert parse_answer(TEXT + " Done.") is None
    assert parse_answer(TEXT.replace("</evidence>", "</evidence> and")) is None


def test_unfinished_answer_gives_none():
    for end in range(len(TEXT)):
        assert parse_answer(TEXT[:end]) is None
    assert parse_answer("<think>" + TEXT) is None
    assert parse_answer("") is None


def test_parse_sections_reads_exactly_the_first_sections():
    start = TEXT[: TEXT.index("<reasoning>")]
    assert evidence.parse_sections(start, 2) == (GOOD.analysis, GOOD.evidence)
    assert evidence.parse_sections(start + "x", 2) is None
    assert evidence.parse_sections(TEXT, 2) is None


@pytest.mark.parametrize(
    ("task", "section", "prediction"),
    [
        ("general_qa", "Oslo", "Oslo"),
        ("general_qa", "Oslo.\nIt is so.", "Oslo"),
        ("general_qa", "The answer is Oslo", "Oslo"),
        ("financial_math", "1,250", "1250"),
        ("financial_math", r"\boxed{1250}", "1250"),
        ("financial_math", "$12.50", "$12.50"),
        ("financial_math", "3 of them, so answer is 12", "12"),
        ("financial_math", "unknown", None),
        ("multiple_choice", "B", "B"),
        ("multiple_choice", "(B) Oslo", "B"),
        ("multiple_choice", "The correct answer is (C)", "C"),
        ("multiple_choice", "Bergen", None),
    ],
)
def test_answer_section_may_omit_the_answer_phrase(task, section, prediction):
    assert rules.extract_answer(evidence.with_answer_phrase(section, task), task) == prediction


def test_full_prompts_ask_for_the_parsed_format():
    full = prompts.load("full")
    prompt = full.evidence(["d"], "q?")
    form = prompt[prompt.index("<analysis>") :]
    assert parse_answer(form) is not None
    assert all(prompt.count(tag) == 1 for tag in TAGS)
    for text in (full.evidence_scores("q?", ["a", "b"]), full.reasoning_scores("q?", "e", "ab")):
        assert text.index("[1]\na") < text.index("[2]\nb")
        form = text[text.rindex("{") :]
        reply = form.replace("[...]", "[4, 2]").replace('"best_choice": ...', '"best_choice": 0')
        assert list(json.loads(reply)) == ["reason", "scores", "best_choice"]
        assert (parse_scores(reply, 2), parse_best_choice(reply, 2)) == ((4, 2), 0)
    assert "There are 3 sets" in full.evidence_scores("q?", ["a", "b", "c"])


@pytest.mark.parametrize(
    ("choice", "expected_index"),
    [("0", 0), ("2", 2), ("3", None), ("-1", None), ("true", None), ('"1"', None), ("null", None)],
)
def test_best_choice_is_an_index_from_0(choice, expected_index):
    reason = r"Set [1] \"quotes\" {braces}, and [2] \n is {\"scores\": [1]}."
    reply = f'{{"reason": "{reason}", "scores": [3, 2, 5], "best_choice": {choice}}}'
    for text in (reply, f"<think>so</think>{reply}", f"```json\n{reply}\n```"):
        assert parse_scores(text, 3) == (3, 2, 5)
        assert parse_best_choice(text, 3) == expected_index
    assert parse_best_choice("1 3\n2 2\n3 5", 3) is None
    assert parse_best_choice(f"<think>{reply}", 3) is None


def test_judges_of_evidence_and_reasoning_have_the_papers_scales():
    """EAPO, Appendix E: evidence is scored from 1 to 5, reasoning from 1 to 4."""
    templates = prompts.load("full").texts
    for name, highest in (("evidence_scores", 5), ("reasoning_scores", 4)):
        text = templates[f"{name}.txt"]
        assert re.findall(r"^(\d): ", text, re.MULTILINE) == list("54321"[-highest:])
        assert f"from 1 to {highest} for each" in text
    assert parse_scores("1 4\n2 1", 2, highest=4) == (4, 1)
    assert parse_scores("1 5\n2 1", 2, highest=4) is None


# ------------------------------------------------------------------------------- Scores and rewards


@pytest.mark.parametrize(
    "text",
    [
        "1 4\n2 2\n3 5",
        " 1 4 2  2\n3 5 \n",
        "<think>1 1</think>1 4\n2 2\n3 5",
        '{"scores": [4, 2, 5]}',
        'All differ.\n```json\n{"reason": "x", "scores": [4, 2, 5],}\n```',
        '```json\n{"scores": [1, 1, 1]}\n```\nNo:\n```json\n{"scores": [4, 2, 5]}\n```',
    ],
)
def test_valid_scores_are_parsed(text):
    assert parse_scores(text, 3) == (4, 2, 5)
    places = evidence.find_scores(text, (4, 2, 5))
    assert "".join(text[place] for place in places) == "425"
    assert min(places) >= text.rindex("4")  # drafts and thoughts come before


def test_scores_with_an_escaped_key_are_not_located():
    text = r'{"\u0073cores": [4, 2]}'
    assert parse_scores(text, 2) == (4, 2) and evidence.find_scores(text, (4, 2)) == ()
    assert evidence.find_scores('{"scores": [4, 2]}', (4, 3)) == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4 2 5",
        "1 4\n2 2",
        "1 4\n2 2\n3 5\n4 1",
        "1 4\n3 2\n2 5",
        "0 4\n1 2\n2 5",
        "1 4\n2 2\n3 6",
        "1 4\n2 0\n3 5",
        "1 4\n2 2\n3 55",
        "1 4\n2 2\n3 5 good",
        "Scores: 1 4\n2 2\n3 5",
        "1 42 23 5",
        "1\n4 2\n2 3\n5",
        "1 ٤\n2 2\n3 5",
        "<think>1 4\n2 2\n3 5",
        '{"scores": [4, 2]}',
        '{"scores": [4, 2, 5.0]}',
        '{"scores": [4, 2, true]}',
        '{"scores": [4, 2, "5"]}',
        '{"scores": [4, 2, 6]}',
        '{"scores": "425"}',
        '{"scores": {"0": 4, "1": 2, "2": 5}}',
        '{"score": [4, 2, 5]}',
        "[4, 2, 5]",
        '```json\n{"a":' + "[" * 100_000 + "```",
    ],
)
def test_malformed_scores_give_none(text):
    assert parse_scores(text, 3) is None


def test_both_score_formats_parse_all_vectors_in_range():
    for size in (1, 2, 3):
        for scores in itertools.product(range(7), repeat=size):
            expected_scores = scores if set(scores) <= {1, 2, 3, 4, 5} else None
            labeled = "\n".join(f"{i} {score}" for i, score in enumerate(scores, 1))
            assert parse_scores(labeled, size) == expected_scores
            assert parse_scores(json.dumps({"scores": scores}), size) == expected_scores


def test_scores_are_normalized_to_the_unit_interval():
    assert evidence.normalize_scores((5, 1, 3), 3) == [1.0, 0.0, 0.5]
    assert evidence.normalize_scores((2, 3, 2), 3) == [0.0, 1.0, 0.0]
    assert evidence.normalize_scores((4, 4), 2) == [0.5, 0.5]
    assert evidence.normalize_scores(None, 3) == [0.5] * 3
    assert evidence.normalize_scores((4,), 1) == [0.5]
    assert evidence.normalize_scores(None, 0) == evidence.normalize_scores((), 0) == []


def test_total_reward_is_weighted_and_zero_for_bad_format():
    assert evidence.total_reward(True, 1.0, 1.0) == pytest.approx(1.0)
    assert evidence.total_reward(True, 0.5, 0.0) == pytest.approx(0.25)
    assert evidence.total_reward(True, 0.0, 1.0) == pytest.approx(0.7)
    assert evidence.total_reward(False, 1.0, 1.0) == 0.0
    assert evidence.total_reward(True, 1.0, 1.0, evidence.Weights(1, 2, 4)) == 7


# ------------------------------------------------------------------------------------------- Quotes


@pytest.mark.parametrize(
    ("section", "quotes"),
    [
        ("a b\n c  d ", ["a b", "c d"]),
        ("- a\n* b\n• c\n1. d\n12) e", ["a", "b", "c", "d", "e"]),
        ('"a b"\n“c”\n- "d"', ["a b", "c", "d"]),
        ("a ... b … c", ["a", "b", "c"]),
        ("-a\n- - a\n1.5 m", ["-a", "- a", "1.5 m"]),
        ("...\n\n-", ["-"]),
    ],
)
def test_quotes_are_lines_without_bullets_and_quotation_marks(section, quotes):
    assert evidence.find_quotes(section) == quotes


def test_number_of_quotes_is_limited():
    limit = evidence.MOST_QUOTES
    quotes = evidence.find_quotes("\n".join(f"q{i}" for i in range(limit + 10)))
    assert len(quotes) == limit + 1 and quotes[-1].split() == [f"q{limit + i}" for i in range(10)]
    assert len(evidence.find_quotes("a..." * 3 * limit)) == limit + 1
    assert len(evidence.find_quotes("a\n" * limit)) == limit
    quotes_over_limit = evidence.find_quotes("a\n" * (limit + 1) + "- b")
    assert quotes_over_limit[-1] == "a - b"  # the rest is one text, unchanged


def test_verbatim_share_is_weighted_by_characters():
    documents = evidence.searchable(["Arvo lives\n in  Oslo.", "Bela does not."])
    share = evidence.verbatim_share
    assert share("- Arvo lives in Oslo.", documents) == 1.0
    assert share("Arvo lives\nin Rome", documents) == pytest.approx(10 / 17)
    assert share("Arvo ... Oslo.\n123456789", documents) == 0.5
    assert share("Oslo. Bela", documents) == 0.0  # in no single document
    assert share("...", documents) == 0.0
    assert share("anything", "") == 0.0


def test_precision_and_recall_of_quoted_sentences():
    measure, sentences = evidence.precision_and_recall, ("Arvo lives in Oslo.", "Oslo has rain.")
    assert measure("- Arvo lives  in Oslo.\n- Oslo has rain.", sentences) == (1.0, 1.0)
    assert measure("Arvo lives in Oslo.", sentences) == (1.0, 0.5)
    assert measure("Oslo has rain.\n12345678901234", sentences) == (0.5, 0.5)
    assert measure("Oslo has rain.\nOslo has rain.", sentences) == (0.5, 0.5)
    assert measure("So: Oslo has rain.", sentences) == (pytest.approx(14 / 18), 0.5)
    assert measure("lives in Oslo", sentences) == (1.0, 0.5)  # more than half of the sentence
    assert measure("in Oslo", sentences) == (0.0, 0.0)
    assert measure("Bela", sentences) == (0.0, 0.0)
    assert measure("Bela", ()) == measure("...", sentences) == (0.0, 0.0)
    assert measure("Oslo has rain.", ("Oslo has rain.",) * 2) == (1.0, 1.0)


def test_compact_evidence_prompts_are_exact():
    compact = prompts.load("compact")
    assert compact.evidence(["d1", "d2"], "q?") == "d1\nd2\nq?\nquote"
    assert compact.evidence_scores("q?", ["a\nb", "c"]) == "1\nq?\na\nb\n2\nq?\nc\nq?\nscores"
    assert compact.reasoning_scores("q?", "e", ["a"]) == "q?\ne\n1\nq?\na\nscores"
    hostile = "{question} {choices} {number}"
    assert compact.evidence_scores(hostile, [hostile]).count("{choices}") == 3


@pytest.mark.parametrize("task", PAPER_TASKS)
def test_echoed_template_states_no_answer(task):
    answer_text = evidence.with_answer_phrase("(insert answer here)", task)
    assert rules.extract_answer(answer_text, task) is None
