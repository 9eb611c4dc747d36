"""Tests of long questions made from short ones: length, counts, and answerability."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spell_jax.algorithms.eapo import evidence_tree
from spell_jax.data.clusters import count_words
from spell_jax.data.questions import read_questions
from spell_jax.evaluation import generation
from spell_jax.policy.model import TINY_POLICY
from spell_jax.question_sets import padded
from spell_jax.question_sets.padded import Builder, LongConfig, build
from spell_jax.question_sets.published import LAYOUTS
from spell_jax.selfplay import prompts, rules
from tests.policy import hf_folders
from tests.question_sets import published_rows as rows

CONFIG = LongConfig(60, 120, seed=1)


def write(path: Path, records: list[Any]) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make(folder: Path, layout: str, records: list[Any], config: LongConfig = CONFIG, end="jsonl"):
    path = write(folder / f"{layout}.{end}", records)
    summary = build([str(path)], layout, folder / "out.jsonl", config, count_words)
    assert json.loads((folder / "out.jsonl.summary.json").read_text()) == summary
    return read_questions(folder / "out.jsonl", "out"), summary


def multi_hop(layout: str = "musique", count: int = 30) -> list[dict[str, Any]]:
    return [getattr(rows, layout)(number) for number in range(count)]


def answer_from(evidence: tuple[str, ...]) -> str:
    """Reply as a reader that sees only the evidence of a made-up row."""
    return f"The answer is {evidence[-1].partition(' is ')[2]}"


def test_padded_question_is_answerable_from_its_evidence(tmp_path):
    questions, _ = make(tmp_path, "musique", multi_hop())
    assert len(questions) == 30
    for number, question in enumerate(questions):
        row = rows.musique(number)
        assert (question.question, question.answer) == (row["question"], row["answer"])
        reply = answer_from(question.evidence)
        assert rules.score(reply, question.answer, question.task) == 1.0
        other_questions = [q for q in questions if q is not question]
        assert all(rules.score(reply, q.answer, q.task) == 0.0 for q in other_questions)
        for quote in question.evidence:
            assert sum(quote in text for text in question.documents) == 1


def test_own_paragraphs_are_shuffled_with_distractors_up_to_target(tmp_path):
    questions, summary = make(tmp_path, "musique", multi_hop())
    lengths = [sum(map(count_words, q.documents)) for q in questions]
    assert all(60 <= length <= 120 for length in lengths) and len({*lengths}) > 10
    assert summary["tokens"] == {
        "min": min(lengths),
        "mean": round(statistics.fmean(lengths), 1),
        "max": max(lengths),
    }
    places = []
    for number, question in enumerate(questions):
        own_paragraphs = [
            f"{p['title']}\n{p['paragraph_text']}" for p in rows.musique(number)["paragraphs"]
        ]
        assert {*own_paragraphs} <= {*question.documents}
        assert len({*question.documents}) == len(question.documents)
        places += [
            question.documents.index(text) / len(question.documents) for text in own_paragraphs
        ]
    assert 0.35 < statistics.fmean(places) < 0.6  # not all at the beginning
    distractor_count = sum(len(q.documents) - 4 for q in questions)
    assert summary["distractors"] == distractor_count > 100


def test_rows_without_padding_are_lines_of_the_evidence_tree(tmp_path):
    config = LongConfig(0, 120, seed=1)
    questions, summary = make(tmp_path, "musique", multi_hop(count=3), config)
    assert summary["distractors"] == 0 and summary["written"] == {"general_qa": 3}
    prompt_set = prompts.load("compact")
    read = functools.partial(evidence_tree.make_prompt, needs_evidence=True)
    lines, texts = generation.read_requests(tmp_path / "out.jsonl", prompt_set, read)
    for number, (line, text, question) in enumerate(zip(lines, texts, questions, strict=True)):
        row = rows.musique(number)
        own_paragraphs = [f"{p['title']}\n{p['paragraph_text']}" for p in row["paragraphs"]]
        assert sorted(line["documents"]) == sorted(own_paragraphs)
        supporting = [p["paragraph_text"] for p in row["paragraphs"] if p["is_supporting"]]
        assert line["evidence"] == supporting
        assert line["answers"] == [row["answer"], f"CR{number}"] == [*question.answers]
        assert text == prompt_set.evidence(line["documents"], row["question"])


def test_summary_accounts_for_every_row(tmp_path, caplog):
    good = multi_hop(count=10)
    bad = [{}, rows.musique(50, answer=3), 7]
    useless = [rows.musique(60, answerable=False), rows.musique(61, answer="the")]
    questions, summary = make(tmp_path, "musique", [*good[:5], *bad, *useless, *good[5:]])
    assert len(questions) == 10
    assert summary["rows"] == 15 and summary["bad_rows"] == 3 and summary["questions"] == 12
    assert summary["left_out"] == {"rule cannot score the answer": 1, "unanswerable": 1}
    assert summary["written"] == {"general_qa": 10}
    assert summary["pool"] == {"documents": 31, "repeated": 9}
    lines = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    assert [line.partition("musique.jsonl:")[2].split(":")[0] for line in lines] == ["6", "7", "8"]
    written = sum(summary["written"].values()) + sum(summary["left_out"].values())
    assert written == summary["questions"]


def test_json_list_rows_are_counted_like_jsonl_rows(tmp_path, caplog):
    input_rows = [rows.tatqa(1), {}, rows.tatqa(2)]
    questions, summary = make(tmp_path, "tatqa", input_rows, LongConfig(40, 80), "json")
    assert (summary["rows"], summary["bad_rows"], summary["questions"]) == (3, 1, 12)
    assert "tatqa.json, row 1: skipped (table: missing)" in caplog.text
    assert summary["left_out"] == {"answer is multi-span": 2}
    assert summary["written"] == {"financial_math": 6, "general_qa": 4}
    by_question = {q.question: q for q in questions}
    change = by_question["Report 00000002: What is the change in Others? State it in millions."]
    assert len(change.documents) == 2 and change.evidence[1] == "Others | 44.1 | 56.7"
    reply = "44.1 less 56.7 is -12.6: the answer is -12.6 million"
    assert rules.score(reply, change.answer, change.task) == 1.0


def test_distractors_containing_the_answer_are_left_out(tmp_path):
    """Whole words count: a part of a word or "yes" does not exclude a paragraph."""
    held = rows.musique(0)
    spoilers = ("of castle0   ROCK, too", "of CR0.", "of ancient castle0 rocks", "of CR01")
    input_rows = [held]
    for number, text in enumerate(spoilers, 1):
        spoiler = rows.musique(number)["paragraphs"]
        spoiler[1] |= {"paragraph_text": f"It is told {text}"}
        input_rows.append(rows.musique(number, paragraphs=spoiler))
    everything = LongConfig(10, 10_000)
    builder = Builder(LongConfig(10_000, 10_000), count_words)
    builder.read_rows(write(tmp_path / "rows.jsonl", input_rows), "musique")
    assert list(builder.questions()) == []
    assert builder.left_out == {"too few distractors": 5}
    assert builder.counts["with_answer"] == 2
    builder.config = dataclasses.replace(everything, min_tokens=1)
    first = next(q for q in builder.questions() if q.answer == "Castle0 Rock")
    told_texts = [text for text in first.documents if "told" in text]
    assert all("rocks" in text or "CR01" in text for text in told_texts)


def test_pool_holds_each_text_once():
    pool = padded.DocumentPool(count_words)
    assert [pool.add(text) for text in ("a b", "c", "A  b", "a b\n", "a-b")] == [0, 1, 0, 0, 2]
    assert pool.texts == ["a b", "c", "a-b"] and pool.tokens == [2, 1, 1] and pool.repeated == 2
    assert pool.contains(0, ["b"]) and not pool.contains(0, []) and not pool.contains(2, ["b"])


def test_too_long_and_too_short_questions_are_counted_separately(tmp_path):
    long_row = rows.musique(0)
    long_row["paragraphs"][1]["paragraph_text"] = "far too long " * 100
    _, summary = make(tmp_path, "musique", [long_row, *multi_hop(count=20)[1:]])
    assert summary["left_out"] == {"longer than max_tokens": 1}
    questions, summary = make(tmp_path, "musique", multi_hop(count=3), LongConfig(30, 200))
    lengths = [sum(map(count_words, q.documents)) for q in questions]
    assert summary["short_of_target"] == sum(length == max(lengths) for length in lengths) > 0
    _, summary = make(tmp_path, "musique", multi_hop(), LongConfig(60, 60))
    assert summary["written"] and summary["short_of_target"] == 0  # all have the requested length
    with pytest.raises(ValueError, match=r"no question was made; .*'too few distractors': 3"):
        make(tmp_path, "musique", multi_hop(count=3), LongConfig(300, 400))


def test_unquoted_evidence_is_dropped_and_counted(tmp_path):
    input_rows = [rows.convfinqa(i) for i in range(1, 9)]
    input_rows[0] |= {"golden_text": "never said .", "golden_table": ""}
    input_rows[1] |= {"golden_text": "never said ."}
    input_rows[2] |= {"golden_text": "", "golden_table": ""}
    questions, summary = make(tmp_path, "convfinqa", input_rows, LongConfig(60, 120))
    assert summary["unquoted_evidence"] == 2 and summary["without_evidence"] == 2
    assert [len(q.evidence) for q in questions] == [0, 2, 0, 2, 2, 2, 2, 2]
    for question in questions:
        name = question.question.removeprefix("Report ").partition(",")[0]
        assert sum(text.startswith(f"Report {name}\n") for text in question.documents) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_seed_gives_the_same_file(tmp_path, layout):
    input_rows = [getattr(rows, layout)(number) for number in range(1, 13)]
    file_contents = []
    for seed in (0, 0, 1):
        make(tmp_path, layout, input_rows, LongConfig(100, 150, seed))
        file_contents.append((tmp_path / "out.jsonl").read_bytes())
    assert file_contents[0] == file_contents[1] != file_contents[2]


def test_unusable_row_does_not_change_other_questions(tmp_path):
    """An unusable row changes nothing if its paragraphs are already in the pool."""
    input_rows = multi_hop(count=10)
    first, _ = make(tmp_path, "musique", input_rows)
    second, _ = make(tmp_path, "musique", [*input_rows, rows.musique(3, answerable=False)])
    assert first == second


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"min_tokens": -1}, "min_tokens = -1: must be at least 0"),
        ({"max_tokens": 0, "min_tokens": 0}, "max_tokens = 0: must be at least 1"),
        ({"max_tokens": 5, "min_tokens": 6}, "max_tokens = 5: must be at least 6"),
        ({"seed": -1}, "seed = -1: must be at least 0"),
    ],
)
def test_error_names_invalid_setting(changes, message):
    with pytest.raises(ValueError, match=message):
        LongConfig(**changes)


def test_missing_and_malformed_files_raise(tmp_path):
    for pattern in ("none*.jsonl", ""):
        with pytest.raises(FileNotFoundError, match="rows = "):
            build([str(tmp_path / pattern)], "musique", tmp_path / "o", CONFIG, count_words)
    for content, message in (("[{}", "damaged"), ("{}", "no question was made")):
        path = tmp_path / "rows.json"
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            build([str(path)], "tatqa", tmp_path / "o", CONFIG, count_words)


@pytest.mark.slow
def test_command_line_writes_questions_and_summary(tmp_path):
    for part in range(2):
        write(tmp_path / f"part{part}.jsonl", multi_hop(count=30)[part::2])
    command = [sys.executable, "-m", "spell_jax.question_sets.padded", "--layout=musique"]
    command += [f"--rows={tmp_path}/part*.jsonl,{tmp_path}/part0.jsonl", "--min_tokens=200"]
    command += [f"--tokenizer={TINY_POLICY}", f"--out={tmp_path}/out.jsonl", "--max_tokens=400"]
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert process.returncode == 0, process.stderr
    summary = json.loads(process.stdout)
    assert summary["rows"] == sum(summary["written"].values()) == 30  # no file is read twice
    assert len(read_questions(tmp_path / "out.jsonl", "out")) == 30
    command[-1] = "--max_tokens=3"
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert process.returncode and "max_tokens = 3: must be at least 200" in process.stderr


REAL = {
    "musique": ("multihop/musique_dev.dev100.jsonl", {"general_qa": 100}, {}),
    "hotpotqa": ("multihop/[2h]*_dev.dev100.jsonl", {"general_qa": 200}, {}),
    "tatqa": (
        "tatqa/tatqa_dataset_dev.json",
        {"financial_math": 750, "general_qa": 701},
        {"answer is multi-span": 217},
    ),
    "convfinqa": (
        "convfinqa/convfinqa_dev.dev211.json",
        {"financial_math": 208, "general_qa": 3},
        {},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("layout", REAL)
def test_real_rows_give_questions_as_long_as_in_the_paper(tmp_path, spell_data, layout):
    """Questions have the paper's lengths in tokens of Qwen2.5.

    Counts of single documents add up to the tokens of a prompt, up to 0.1 %.
    """
    pattern, written, left_out = REAL[layout]
    tokenizer = hf_folders.load(hf_folders.real(spell_data, "qwen2.5"))
    config = LongConfig(seed=3)
    out = tmp_path / "out.jsonl"
    summary = build([str(spell_data / pattern)], layout, out, config, tokenizer.count)
    assert summary["written"] == written and summary["left_out"] == left_out
    assert summary["bad_rows"] == summary["unquoted_evidence"] == 0
    assert summary["without_evidence"] == (layout == "convfinqa")
    assert summary["tokens"]["min"] >= 32_768 and summary["tokens"]["max"] <= 131_072
    assert 60_000 < summary["tokens"]["mean"] < 100_000
    questions = read_questions(out, "out")
    assert Counter(q.task for q in questions) == written
    for question in questions:
        reply = f"I read that the answer is {question.answer}"
        assert rules.score(reply, question.answer, question.task) == 1.0
        assert all(any(quote in d for d in question.documents) for quote in question.evidence)
    text = "\n".join(questions[0].documents) + "\n"
    counted = sum(tokenizer.count(document + "\n") for document in questions[0].documents)
    assert tokenizer.count(text) == pytest.approx(counted, rel=1e-3)
    named = [q for q in questions if q.task == "general_qa" and q.answer.lower() not in "yes no"]
    held = [rules.is_correct("\n".join(q.evidence), q.answer, q.task) for q in named]
    assert sum(held) >= 0.9 * len(held)  # the evidence contains the answer
