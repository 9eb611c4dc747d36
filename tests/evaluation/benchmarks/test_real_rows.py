"""Tests with real questions and answers, in the layouts of LongBench and DocMath-Eval.

The published files themselves are not among the sample data. LongBench's three sets were made from
the development sets that these rows come from, DocMath-Eval in part from TAT-QA.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spell_jax.evaluation.benchmarks.base import Benchmark
from spell_jax.evaluation.benchmarks.long_documents import DOCMATH_ROWS
from spell_jax.evaluation.benchmarks.registry import load


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")


def check(benchmark: Benchmark, rows: int, form: str) -> None:
    """Check that an answer is correct for its question, and for others only by chance."""
    items = benchmark.items
    assert len(items) == rows
    replies = [f"<think>{i.question}</think>" + form % i.references for i in items]
    scores = [benchmark.score(reply, item) for reply, item in zip(replies, items, strict=True)]
    assert scores == [1.0] * rows
    others = [
        benchmark.score(reply, other)
        for reply, item, other in zip(replies, items, items[1:], strict=False)
        if item.references != other.references
    ]
    assert sum(others) <= 0.02 * rows < len(others)


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
    """ConvFinQA's last questions with numbers or yes and no, then TAT-QA's with derivations."""
    rows = []
    for record in json.loads((folder / "convfinqa" / "convfinqa_dev.dev211.json").read_text()):
        paragraphs = [*record["text"].split("\n"), record["table"]]
        rows.append((record["questions"][-1], paragraphs, record["answer"]))
    for record in json.loads((folder / "tatqa" / "tatqa_dataset_dev.json").read_text("utf-8")):
        table = "\n".join(" | ".join(cells) for cells in record["table"]["table"])
        paragraphs = [table, *(paragraph["text"] for paragraph in record["paragraphs"])]
        for asked in record["questions"]:
            if asked["answer_type"] == "arithmetic":
                rows.append((asked["question"], paragraphs, asked["answer"]))
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
