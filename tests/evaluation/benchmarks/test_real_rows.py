"""Tests with published files, and with real rows in the layouts of LongBench and DocMath-Eval.

The published files of LongBench and DocMath-Eval are not among the sample data. LongBench's three
sets were made from the development sets that these rows come from, DocMath-Eval in part from
TAT-QA.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spell_jax.evaluation.benchmarks import helmet_labels, published, short
from spell_jax.evaluation.benchmarks.base import Benchmark, BenchmarkItem
from spell_jax.evaluation.benchmarks.long_documents import DOCMATH_ROWS
from spell_jax.evaluation.benchmarks.registry import load
from spell_jax.evaluation.generated.sources import read_questions

STATED = re.compile(r"#### (.*)")  # the answer of a solution of GSM8K


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")


def check(benchmark: Benchmark, rows: int, form: str) -> None:
    """Check that a reply is correct for its question, and for the next one only by chance."""
    items = benchmark.items
    assert len(items) == rows
    replies = [f"<think>{i.question}</think>" + form % i.references for i in items]
    scores = [benchmark.score(reply, item) for reply, item in zip(replies, items, strict=True)]
    assert scores == [1.0] * rows
    other_scores = [
        benchmark.score(reply, other_item)
        for reply, item, other_item in zip(replies, items, items[1:], strict=False)
        if item.references != other_item.references
    ]
    assert sum(other_scores) <= 0.02 * rows < len(other_scores)


@pytest.mark.parametrize(
    "task, file",
    [
        ("hotpotqa", "hotpotqa_dev.dev100.jsonl"),
        ("2wikimqa", "2wikimultihop_dev.dev100.jsonl"),
        ("musique", "musique_dev.dev100.jsonl"),
    ],
)
def test_reference_answers_of_real_multi_hop_questions_score_1(
    tmp_path: Path, spell_data: Path, task: str, file: str
) -> None:
    lines = (spell_data / "multihop" / file).read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]

    def passages(record: dict[str, Any]) -> list[str]:
        if "paragraphs" in record:
            return [f"{p['title']}\n{p['paragraph_text']}" for p in record["paragraphs"]]
        return [f"{title}\n{''.join(sentences)}" for title, sentences in record["context"]]

    def row(record: dict[str, Any]) -> dict[str, Any]:
        texts = (f"Passage {i}:\n{text}" for i, text in enumerate(passages(record), 1))
        return {
            "_id": record.get("_id") or record["id"],
            "input": record["question"],
            "context": "\n\n".join(texts),
            "answers": [record["answer"], *record.get("answer_aliases", [])],
        }

    write_lines(tmp_path / f"{task}.jsonl", [row(record) for record in records])
    benchmark = load(task, tmp_path, limit=100)
    check(benchmark, 100, "The correct answer is %s.")
    for item, record in zip(benchmark.items, records, strict=True):
        assert item.question == record["question"] and item.references == (record["answer"],)
        before, _, after = item.prompt.partition(row(record)["context"])
        assert before and item.question in after


def financial_rows(folder: Path) -> list[dict]:
    """Read ConvFinQA's last questions (numbers, yes or no), then TAT-QA's with derivations."""
    rows = []
    for record in json.loads((folder / "convfinqa" / "convfinqa_dev.dev211.json").read_text()):
        paragraphs = [*record["text"].split("\n"), record["table"]]
        rows.append((record["questions"][-1], paragraphs, record["answer"]))
    for record in json.loads((folder / "tatqa" / "tatqa_dataset_dev.json").read_text("utf-8")):
        table = "\n".join(" | ".join(cells) for cells in record["table"]["table"])
        paragraphs = [table, *(paragraph["text"] for paragraph in record["paragraphs"])]
        for question_record in record["questions"]:
            if question_record["answer_type"] == "arithmetic":
                rows.append((question_record["question"], paragraphs, question_record["answer"]))
    return [
        {
            "question_id": f"compshort-testmini-{number}",
            "question": question,
            "paragraphs": paragraphs,
            "ground_truth": truth,
        }
        for number, (question, paragraphs, truth) in enumerate(rows)
    ]


def test_reference_answers_of_real_financial_questions_score_1(
    tmp_path: Path, spell_data: Path
) -> None:
    rows, first = financial_rows(spell_data), 0
    assert len(rows) == 211 + 718
    for split, count in DOCMATH_ROWS.items():
        text = json.dumps(rows[first : first + count], ensure_ascii=False)
        (tmp_path / f"{split}.json").write_text(text, "utf-8")
        first += count
    check(load("docmath", tmp_path), 800, r"So it is \boxed{%s}.")


def solutions(data: str) -> dict[str, list[tuple[str, BenchmarkItem]]]:
    """Load published solutions of GSM8K and MATH-500 as replies, each with its question.

    `data` has the folders gsm8k and math500. A solution of GSM8K ends with "#### NUMBER", which a
    reply states as a box; solutions of MATH-500 have a box.
    """
    replies_by_set = {}
    for name, column in (("gsm8k", "answer"), ("math500", "solution")):
        items = load(name, f"{data}/{name}").items
        kind = short.MATH_SETS[name]
        rows = published.read_rows(f"{data}/{name}", kind.layouts, kind.rows, None)
        texts = [STATED.sub(r"\\boxed{\1}", row.text(column)) for row in rows]
        replies_by_set[name] = list(zip(texts, items, strict=True))
    return replies_by_set


def changed_solutions(
    pairs: Sequence[tuple[str, BenchmarkItem]], count: int, seed: int
) -> list[tuple[str, BenchmarkItem]]:
    """Choose `count` solutions and change their answers: a digit, or another question's answer."""
    rng = random.Random(seed)
    changed_replies = []
    for _, item in rng.sample(pairs, count):
        right = item.references[0]
        wrong = right
        digits = [at for at, letter in enumerate(right) if letter in string.digits]
        while wrong == right:
            if digits:
                at = rng.choice(digits)
                wrong = right[:at] + rng.choice(string.digits) + right[at + 1 :]
            else:
                wrong = rng.choice(pairs)[1].references[0]
        changed_replies.append((rf"It is \boxed{{{wrong}}}.", item))
    return changed_replies


@pytest.mark.slow
def test_all_published_solutions_of_mathematical_sets_score_1(spell_data: Path) -> None:
    sets = solutions(str(spell_data / "published"))
    assert {name: len(pairs) for name, pairs in sets.items()} == {"gsm8k": 1319, "math500": 500}
    pairs = [pair for solution_pairs in sets.values() for pair in solution_pairs]
    assert [item.id for reply, item in pairs if short.score_math(reply, item) != 1.0] == []
    for solution_pairs in (pairs, sets["math500"]):
        changed = changed_solutions(solution_pairs, 200, seed=0)
        assert len(changed) == 200
        assert [reply for reply, item in changed if short.score_math(reply, item) != 0.0] == []


@pytest.mark.parametrize(
    ("name", "form", "items"),
    [
        ("helmet_banking77", "label: %s", 500),
        ("helmet_clinic150", "label: %s", 500),
        ("gsm8k", r"\boxed{%s}", 1319),
        ("math500", r"\boxed{%s}", 500),
    ],
)
@pytest.mark.slow
def test_gold_answers_of_whole_published_files_score_1(
    spell_data: Path, name: str, form: str, items: int
) -> None:
    benchmark = load(name, spell_data / "published" / name)
    assert len(benchmark.items) == items
    assert [i.id for i in benchmark.items if benchmark.score(form % i.references, i) != 1.0] == []


def test_gold_letters_of_mmlu_pro_score_1(spell_data: Path, tmp_path: Path) -> None:
    """The validation rows, under the name of the test file: its 12,032 rows are not at hand."""
    shutil.copy(
        spell_data / "published/mmlu_pro/data/validation-00000-of-00001.parquet",
        tmp_path / "test-00000-of-00001.parquet",
    )
    items = (benchmark := load("mmlu_pro", tmp_path, 70)).items
    rng = random.Random(0)
    for item in items:
        (letter,) = item.references
        wrong_letter = rng.choice([option for option in short.OPTIONS if option != letter])
        assert benchmark.score(f"The correct answer is ({letter}).", item) == 1.0
        assert benchmark.score(f"The correct answer is ({wrong_letter}).", item) == 0.0


def test_annotations_of_real_nlu_rows_are_removed_as_by_their_authors(spell_data: Path) -> None:
    path = spell_data / "published" / "nlu_parts" / "nlu_testsets.csv"
    rows = list(published.rows_of(path, delimiter=";"))
    assert len(rows) == 5045
    for row in rows:
        text = helmet_labels.without_annotations(row.text("answer_annotation"))
        assert text == row.text("answer_from_anno")


def test_all_questions_of_squad_are_read(spell_data: Path) -> None:
    rows = read_questions(spell_data / "published" / "squad11")
    assert len(rows) == 5696  # of the first 24 articles of dev-v1.1.json
    for row in rows:
        assert all(reference in row.documents[0] for reference in row.right)
