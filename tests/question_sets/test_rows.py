"""Tests of rows from questions with known answers: each is right by the algorithm's parsers."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from spell_jax.data.clusters import LETTERS, PAPER_TASKS, count_words
from spell_jax.data.questions import Question
from spell_jax.question_sets import rows as rows_module
from spell_jax.question_sets.rows import Row, RowConfig, make_item, make_rows
from spell_jax.runtime.files.jsonl import write_records
from spell_jax.selfplay import prompts
from spell_jax.selfplay.evidence import named_document
from spell_jax.selfplay.parsing import parse_question, parse_verdict
from spell_jax.selfplay.rules import score

COMPACT = prompts.load("compact")
CITIES = ("Oslo", "Lima", "Rome", "Cairo", "Quito", "Delhi")
DOCUMENTS = tuple(f"The mayor of {city} is Dr. {city[::-1].title()}." for city in CITIES)
TEXTS = [
    Question(
        "general_qa",
        (DOCUMENTS[(i + 1) % 6], DOCUMENTS[i], DOCUMENTS[(i + 2) % 6]),
        f"Who is the mayor of {city}?",
        f"Dr. {city[::-1].title()}",
        answers=(f"Dr. {city[::-1].title()}", city[::-1].title()),
        wrong=tuple(
            f"Dr. {other_city[::-1].title()}" for other_city in CITIES if other_city != city
        ),
    )
    for i, city in enumerate(CITIES)
]
SALES = "Sales were 1,250 in 2019 and 1,100 in 2018."
NUMBERS = [Question("financial_math", (SALES, "Costs were 77."), "Growth of sales?", "150")]


def rows_of(rows: list[Row], role: str) -> list[Row]:
    return [row for row in rows if row.role == role]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    config = RowConfig(rows=300, documents_read=3, documents_shown=3)
    return make_rows(TEXTS + NUMBERS, config, COMPACT)[0]


def test_roles_and_tasks_have_their_shares(rows):
    counts = Counter((row.role, row.task) for row in rows)
    assert all(counts["questioner", task] == 40 for task in PAPER_TASKS)
    assert all(counts["responder", task] == 35 for task in PAPER_TASKS)
    assert all(counts["verifier", task] == 25 for task in PAPER_TASKS)


def test_questioner_rows_pass_the_parser_and_show_the_evidence(rows):
    letters = Counter()
    for row in rows_of(rows, "questioner"):
        parsed = parse_question(row.completion, row.task, count_words)
        assert parsed.status == "accepted"
        if row.task == "multiple_choice":
            letters[parsed.answer] += 1
            assert row.prompt.endswith(f"({parsed.answer})")  # the letter that the prompt asks for
            asked_option = parsed.options[LETTERS.index(parsed.answer)]
            assert asked_option in row.prompt
        elif row.task == "general_qa":
            assert parsed.answer in row.prompt
    assert set(letters) == set(LETTERS)


def test_history_shows_other_questions_with_their_documents():
    config = RowConfig(rows=60, roles=(1, 0, 0), history_share=1.0, tasks=("general_qa",))
    for row in make_rows(TEXTS, config, COMPACT)[0]:
        known_lines = [line for line in row.prompt.split("\n") if line.startswith("known: ")]
        assert 1 <= len(known_lines) <= 2
        asked_question = json.loads(row.completion)["question"]
        for line in known_lines:
            assert asked_question not in line
            question = next(q for q in TEXTS if q.question in line)
            assert rows_module._own_first(question)[0] in row.prompt


def test_responder_rows_are_right_and_read_few_documents(rows):
    counts = Counter()
    for row in rows_of(rows, "responder"):
        question = next(q for q in TEXTS + NUMBERS if q.question in row.prompt)
        if row.task == "multiple_choice":
            letter = row.completion[-2]
            assert f"({letter}) {question.answer}" in row.prompt
        else:
            assert score(row.completion, question.answer, row.task) == 1.0
        shown = [text for text in question.documents if text in row.prompt]
        assert rows_module._own_first(question)[0] in shown
        counts[len(shown)] += row.task == "general_qa"
    assert set(counts) == {1, 2, 3}


def test_numbered_rows_name_the_own_document():
    config = RowConfig(
        rows=40, roles=(0, 1, 0), tasks=("general_qa",), documents_read=3, numbered=True
    )
    named = Counter()
    for row in make_rows(TEXTS, config, COMPACT)[0]:
        question = next(q for q in TEXTS if q.question in row.prompt)
        index = named_document(row.completion)
        lines = row.prompt.split("\n")
        assert lines[index] == f"[{index + 1}] {rows_module._own_first(question)[0]}"
        assert score(row.completion, question.answer, row.task) == 1.0
        named[index] += 1
    assert set(named) == {0, 1, 2}


def test_gaps_give_responder_rows():
    gap = Question("cloze", DOCUMENTS[:3], "The mayor of ____ sings.", "Lima", shown=(1,))
    config = RowConfig(rows=8, roles=(0, 1, 0), tasks=("cloze",), documents_read=1)
    for row in make_rows([gap], config, COMPACT)[0]:
        assert row.prompt == COMPACT.responder("cloze", [DOCUMENTS[1]], gap.question)
        assert score(row.completion, "Lima", row.task) == 1.0


def test_questioner_rows_of_gaps_quote_a_sentence_that_self_play_accepts():
    sentence = "The mayor of Lima met Amil in 1990."
    documents = (DOCUMENTS[0], f"It rained. {sentence}", DOCUMENTS[1])
    gap = Question("cloze", documents, "____ sings.", "Amil", evidence=(sentence,), shown=(1, 2))
    alone = dataclasses.replace(gap, documents=documents[:2], shown=(1,))
    config = RowConfig(
        rows=20, roles=(1, 0, 0), tasks=("cloze",), documents_shown=2, history_share=0
    )
    for row in make_rows([gap, alone], config, COMPACT)[0]:
        assert json.loads(row.completion) == {"sentence": sentence, "answer": "Amil"}
        assert documents[1] in row.prompt and row.prompt.endswith("ask cloze")
    with pytest.raises(ValueError, match="no question gives a row of the questioner for cloze"):
        make_rows([alone], config, COMPACT)


def test_verdicts_are_right(rows):
    verdicts = Counter()
    for row in rows_of(rows, "verifier"):
        *_, first_line, second_line, _ = row.prompt.split("\n")
        answer, reference = first_line.removeprefix("one: "), second_line.removeprefix("two: ")
        verdict = parse_verdict(row.completion)
        verdicts[row.task, verdict] += 1
        if row.task == "general_qa":
            question = next(q for q in TEXTS if q.question in row.prompt)
            assert (answer in question.right) == (verdict == 1) and reference == question.answer
        elif row.task == "financial_math":
            assert reference == "150"
            assert (float(answer.replace("the number ", "").replace(",", "")) == 150) == verdict
        else:
            assert (answer.strip("()") == reference) == (verdict == 1)
    assert len(verdicts) == 6 and min(verdicts.values()) >= 5


def test_questions_that_do_not_suit_a_task_give_no_item():
    assert make_item(TEXTS[0], "financial_math", "A") is None
    assert make_item(NUMBERS[0], "multiple_choice", "A") is None
    three_choice_question = Question("general_qa", ("x",), "?", "a", wrong=("b", "c"))
    assert make_item(three_choice_question, "multiple_choice", "A") is None
    item = make_item(TEXTS[1], "multiple_choice", "C")
    assert item is not None and item.answer == "C"
    assert "(C) Dr. Amil" in item.question


def test_text_question_with_a_number_as_answer_also_asks_for_a_number():
    question = Question("general_qa", (SALES,), "Sales in 2019?", "1,250", wrong=("1,100",))
    item = make_item(question, "financial_math", "A")
    assert item is not None and item.record == {"question": "Sales in 2019?", "answer": "1250"}
    assert "1,250" in item.right and item.wrong == ("2019", "1,100", "2018")
    for answer in ("February 7, 2016", "zero", "1,25"):
        other_question = dataclasses.replace(question, answer=answer)
        assert make_item(other_question, "financial_math", "A") is None


def test_computed_answers_are_left_out_and_counted():
    stated = Question("financial_math", (SALES,), "Sales in 2019?", "1250")
    settings = {"rows": 8, "tasks": ("financial_math",), "roles": (1, 1, 0)}
    config = RowConfig(**settings, computed=False)
    rows, counts = make_rows([stated, *NUMBERS], config, COMPACT)
    assert len(rows) == 8 and all("1250" in row.completion for row in rows)
    assert counts["financial_math: computed answer"] >= 1
    rows, counts = make_rows([stated, *NUMBERS], RowConfig(**settings), COMPACT)
    assert any("150" in row.completion for row in rows) and not counts


def test_task_without_a_question_is_an_error():
    config = RowConfig(rows=9)
    with pytest.raises(ValueError, match="no question gives a row of the questioner for general"):
        make_rows(NUMBERS, config, COMPACT)


def test_unusable_references_are_counted():
    long = Question("general_qa", ("x",), "What?", "word " * 41)
    config = RowConfig(rows=2, roles=(1, 0, 0), tasks=("general_qa",))
    rows, counts = make_rows([long, TEXTS[0]], config, COMPACT)
    assert len(rows) == 2 and counts["questioner: long_answer"] >= 1


def test_rows_depend_only_on_the_seed():
    def make(seed: int) -> list[Row]:
        return make_rows(TEXTS + NUMBERS, RowConfig(rows=30, seed=seed), COMPACT)[0]

    assert make(0) == make(0) != make(1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", 0),
        ("tasks", ()),
        ("tasks", ("poetry",)),
        ("roles", (0, 0, 0)),
        ("roles", (1, -1, 0)),
        ("history_share", 1.5),
        ("documents_read", 0),
    ],
)
def test_bad_value_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        RowConfig(**{field: value})


@pytest.mark.slow
def test_command_writes_the_rows(tmp_path: Path):
    questions, out = tmp_path / "questions.jsonl", tmp_path / "rows.jsonl"
    write_records(questions, [vars(question) for question in TEXTS + NUMBERS])
    flags = [f"--questions={questions}", f"--out={out}", "--rows=12"]
    command = [sys.executable, "-m", "spell_jax.question_sets.rows", *flags]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout.splitlines()[-1])["rows"] == 12
    assert len(out.read_text().splitlines()) == 12


def test_thoughts_quote_the_evidence_of_all_needed_documents():
    documents = ("Costs were 12.", "It rained.", "Sales were 1,250.")
    evidence = ("Sales were 1,250.", "Costs were 12.")
    text = "Sales minus costs?"
    question = Question("financial_math", documents, text, "1238", evidence, shown=(0, 2))
    config = RowConfig(
        rows=30, tasks=("financial_math",), thoughts=True, documents_read=3, history_share=0
    )
    for row in make_rows([question], config, COMPACT)[0]:
        if row.role == "verifier":
            continue
        assert documents[0] in row.prompt and documents[2] in row.prompt
        thought, _, answer = row.completion.partition("</think>")
        assert thought == f"<think> {' '.join(evidence)}"
        record = '{"question":"Sales minus costs?","answer":" 1238"}'
        assert answer == (record if row.role == "questioner" else "answer is 1238")


def test_a_fourth_share_gives_rows_that_recite_documents():
    config = RowConfig(rows=20, roles=(0, 0, 0, 1), tasks=("general_qa",), documents_read=3)
    counts = Counter()
    for row in make_rows(TEXTS, config, COMPACT)[0]:
        *shown, last = row.prompt.split("\n")
        assert row.role == "reciter" and last == "recite"
        assert sorted(row.completion.split("\n")) == sorted(shown)
        counts[len(shown)] += 1
    assert {*counts} == {1, 2, 3}
