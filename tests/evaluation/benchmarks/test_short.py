"""Tests of short benchmarks, from small folders in published layouts, and of math equality."""

from __future__ import annotations

import json
import pathlib
import queue
import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spell_jax.evaluation import math_equal
from spell_jax.evaluation.benchmarks.base import BenchmarkItem
from spell_jax.evaluation.benchmarks.registry import load
from spell_jax.evaluation.benchmarks.short import extract_letter, extract_math

ITEM = BenchmarkItem("0", "", "", ("1",), {"options": 10})


def write(path: pathlib.Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=50)
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, rows, files, question, answer, value, reference",
    [
        (
            *("aime24", 30, ["data/train-00000-of-00001.parquet"]),
            *("problem", "answer", "033", "033"),
        ),
        ("aime24", 30, ["aime_2024_problems.parquet"], "Problem", "Answer", 204, "204"),
        ("aime25", 30, ["test.jsonl"], "problem", "answer", "70", "70"),
        (
            *("aime25", 30, ["aime2025-I.jsonl", "aime2025-II.jsonl"]),
            *("question", "answer", "70", "70"),
        ),
        ("amc23", 40, ["test-00000-of-00001.parquet"], "question", "answer", "27.0", "27.0"),
        ("amc23", 40, ["test.jsonl"], "question", "answer", 27.0, "27"),
        ("math500", 500, ["test.jsonl"], "problem", "answer", "\\frac{1}{2}", "\\frac{1}{2}"),
        ("amc23", 40, ["test.jsonl"], "question", "answer", 2.5, "2.5"),
        ("gsm8k", 1319, ["test.jsonl"], "question", "answer", "#### 9.\n#### 1,018", "1,018"),
        (
            *("gsm8k", 1319, ["grade_school_math/data/test.jsonl"]),
            *("question", "answer", "So 9.\n#### 1,018", "1,018"),
        ),
        ("math500", 500, ["default/test/0000.parquet"], "problem", "answer", "7", "7"),
        (
            *("gsm8k", 1319, ["main/test-00000-of-00001.parquet"]),
            *("question", "answer", "So 9.\n#### 1,018", "1,018"),
        ),
    ],
)
def test_math_benchmarks_load_their_published_layouts(
    tmp_path, name, rows, files, question, answer, value, reference
):
    each = rows // len(files)
    for file in files:
        file_rows = [{question: f"{file} {i}?", answer: value, "level": 3} for i in range(each)]
        write(tmp_path / file, file_rows)
    benchmark = load(name, tmp_path)
    last = benchmark.items[-1]
    assert len(benchmark.items) == rows and not benchmark.judged
    assert last.references == (reference,) and last.question == f"{files[-1]} {each - 1}?"
    assert last.prompt.startswith(last.question) and "\\boxed{}" in last.prompt
    assert last.fields == {"level": 3} and last.id == str(rows - 1)
    assert benchmark.score(f"So \\boxed{{{reference}}}.", last) == 1.0
    assert benchmark.score("So \\boxed{1}.", last) == 0.0
    write(tmp_path / files[-1], [{question: "?", answer: value}] * (each + 1))
    with pytest.raises(ValueError, match=rf"{rows + 1} rows, but {rows} are published"):
        load(name, tmp_path)
    assert len(load(name, tmp_path, limit=4).items) == 4


def test_incomplete_set_of_files_is_rejected(tmp_path):
    write(tmp_path / "aime2025-I.jsonl", [{"question": "?", "answer": "1"}] * 15)
    with pytest.raises(FileNotFoundError, match=r"aime2025-I is there, aime2025-II is"):
        load("aime25", tmp_path)


@pytest.mark.parametrize(
    "name, row, message",
    [
        ("gsm8k", {"question": "?", "answer": "18"}, "a solution that ends with"),
        ("gsm8k", {"question": "?", "answer": "#### "}, "an answer that is not empty"),
        ("math500", {"text": "?", "answer": "18"}, r"no field 'problem' \(a text\)"),
        ("math500", {"problem": "?", "answer": ["18"]}, "a number or LaTeX"),
        ("math500", {"problem": "?", "answer": float("nan")}, "a finite number"),
    ],
)
def test_malformed_math_rows_are_rejected(tmp_path, name, row, message):
    write(tmp_path / "test.jsonl", [row])
    with pytest.raises(ValueError, match=message) as caught:
        load(name, tmp_path, 1)
    assert "test.jsonl, row 0" in str(caught.value)


def test_error_names_damaged_parquet_file(tmp_path):
    (tmp_path / "test-00000-of-00001.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(ValueError, match=r"test-00000-of-00001.parquet, row 0"):
        load("amc23", tmp_path)


@pytest.mark.parametrize(
    "text, expected_answer",
    [
        (r"First \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"<think>\boxed{1}</think>The answer is 5.", "5"),
        (r"<think>\boxed{1}", None),
        (r"\boxed{1", None),
        (r"\boxed{ }", None),
        ("The final answer is: 12", "12"),
        ("Nothing", None),
        ("", None),
    ],
)
def test_extract_math_finds_the_final_answer(text, expected_answer):
    assert extract_math(text, ITEM) == expected_answer


@pytest.mark.parametrize(
    "prediction, reference, same",
    [
        ("1,018", "1018", True),
        ("033", "33", True),
        ("27.0", "27", True),
        ("-5", "5", False),
        (r"\dfrac{1}{2}", r"\frac12", True),
        ("0.5", r"\frac{1}{2}", True),
        (r"\frac{2}{4}", "0.5", True),
        (r"x = 3", "3", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)", True),
        ("(3, 4)", "(4, 3)", False),
        ("(1, 2)", "1 < x < 2", True),
        ("1 < x < 2", "(1, 2)", False),  # may be read as a pair
        (r"\{1, 2\}", r"\{2,1\}", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        (r"x^2+2x+1", r"(x+1)^2", True),
        (r"\text{Evelyn}", r"\text{Evelyn}", True),
        (r"90^\circ", "90", True),
        (r"\$18", "18", True),
        ("52_7", "52_8", False),  # of base 7 and 8
        ("52_{8}", "52_8", True),
        ("52_{7}", "52_8", False),
        ("52", "52_8", True),
        ("", "", False),
        ("}{", "1", False),
        ("1" * 2000, "1" * 2000, False),
        ("nan", "nan", True),  # equal texts
    ],
)
def test_math_equality(prediction, reference, same):
    assert math_equal.equal(prediction, reference) is same


def test_whole_numbers_are_compared_without_a_worker(monkeypatch):
    monkeypatch.setattr(math_equal, "_ask", None)
    assert math_equal.equal("20,260", "020260.00") and not math_equal.equal("2026", "-2026")


def test_model_text_is_never_executed(tmp_path):
    mark = tmp_path / "mark"
    code = f"__import__('pathlib').Path('{mark}').touch()"
    for text in (code, f"1+{code}", rf"\text{{{code}}}", f"${code}$", "exit()", "1}$ 2*3"):
        math_equal.equal(text, "7")
    assert not mark.exists()
    # SymPy's parser of plain expressions calls eval, so it is not used.
    source = pathlib.Path(math_equal.__file__).read_text()
    assert "targets = [LatexExtractionConfig()]" in source


@pytest.mark.slow
def test_slow_comparison_times_out_as_unequal(monkeypatch, caplog):
    """SymPy would need days for a sum of 10^9 terms; other comparisons go on meanwhile."""
    monkeypatch.setattr(math_equal, "SECONDS", 1.0)
    assert math_equal.equal(r"\frac{7}{14}", "0.5")
    threads = threading.active_count()
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(math_equal.equal, r"\sum_{k=1}^{10^{9}} \sin(k^2)", "0.25")
        texts = [rf"\frac{{{n}}}{{{2 * n}}}" for n in range(1, 40)]
        assert list(pool.map(math_equal.equal, texts, ["0.5"] * len(texts))) == [True] * 39
        assert slow.result() is False
    assert "because the worker died" in caplog.text
    assert threading.active_count() == threads
    assert math_equal.equal(r"\frac{9}{18}", "0.5")  # by another worker


def test_dead_worker_is_replaced():
    assert math_equal.equal(r"\frac{5}{100}", "0.05")
    ended = 0
    while not math_equal._idle.empty():
        worker = math_equal._idle.get()
        worker.process.kill()
        worker.process.wait()
        ended += 1
    assert 1 <= ended <= math_equal.WORKERS
    math_equal._idle.put(worker)
    assert math_equal.equal(r"\frac{6}{100}", "0.06")
    assert math_equal._idle.qsize() == 1
    new = math_equal._idle.get()
    limits = resource.prlimit(new.process.pid, resource.RLIMIT_AS)
    math_equal._idle.put(new)
    assert limits == (math_equal.MEMORY, math_equal.MEMORY)


def test_worker_that_cannot_start_raises(monkeypatch):
    monkeypatch.setattr(math_equal, "_idle", queue.SimpleQueue())
    monkeypatch.setattr(math_equal, "MODULE", "no.such.module")
    with pytest.raises(RuntimeError, match=r"-m no.such.module ended; run it to see why"):
        math_equal.equal(r"\frac{7}{100}", "0.07")


def test_missing_math_library_raises_import_error(tmp_path, monkeypatch):
    monkeypatch.setattr(math_equal.importlib.util, "find_spec", lambda name: None)
    write(tmp_path / "test.jsonl", [{"problem": "?", "answer": "18"}])
    with pytest.raises(ImportError, match=r"pip install 'spell_jax\[eval\]'"):
        load("math500", tmp_path, 1)


def choice_row(number: int = 0, **changes) -> dict:
    return {
        "question_id": number,
        "question": "Which?",
        "options": ["one", "two", "three"],
        "answer": "C",
        "answer_index": 2,
        "cot_content": "",
        "category": "law",
        "src": "x",
    } | changes


@pytest.mark.slow
def test_mmlu_pro_prompt_and_scores(tmp_path):
    path = tmp_path / "data" / "test-00000-of-00001.parquet"
    write(path, [choice_row(i) for i in range(12_032)])
    benchmark = load("mmlu_pro", tmp_path)
    item = benchmark.items[70]
    assert len(benchmark.items) == 12_032 and not benchmark.judged
    assert (item.id, item.references, item.fields["category"]) == ("70", ("C",), "law")
    assert "Which?\nChoices:\n(A) one\n(B) two\n(C) three\n" in item.prompt
    assert benchmark.score("The correct answer is (C).", item) == 1.0
    assert benchmark.score("The correct answer is (B).", item) == 0.0
    assert benchmark.extract("The correct answer is (D).", item) is None  # there is no such option
    write(path, [choice_row(i) for i in range(12_031)])
    with pytest.raises(ValueError, match=r"12031 rows, but 12032 are published"):
        load("mmlu_pro", tmp_path)
    write(path, [choice_row(7), choice_row(7)])
    with pytest.raises(ValueError, match=r"mmlu_pro: two rows have the id '7'"):
        load("mmlu_pro", tmp_path, 2)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"answer": "D"}, "answer = 'D'; it must be one of A, B, C"),
        ({"answer": "AB"}, "answer = 'AB'; it must be one of A, B, C"),
        ({"options": list("abcdefghijk")}, "a list of at most 10 texts"),
        ({"question_id": "x"}, "question_id = 'x'; it must be a number"),
    ],
)
def test_malformed_choice_rows_are_rejected(tmp_path, change, message):
    write(tmp_path / "data" / "test-00000-of-00001.parquet", [choice_row(**change)])
    with pytest.raises(ValueError, match=message):
        load("mmlu_pro", tmp_path, 1)


@pytest.mark.parametrize(
    "text, letter",
    [
        ("The correct answer is (J).", "J"),
        ("the answer is: **E**", "E"),
        (r"so \boxed{\text{(F)}}", "F"),
        ("The answer is B. No: the correct answer is (G).", "G"),
        ("The answer is A. The answer is (H).", "H"),
        ("The answer is (A). No: the answer is (B).", "B"),
        ("The correct answer is Apple", None),
        ("The answer is I\u0301", None),
        ("<think>The answer is (A)</think>nothing", None),
        ("", None),
    ],
)
def test_extract_letter_finds_the_final_answer(text, letter):
    assert extract_letter(text, ITEM) == letter


@pytest.mark.parametrize("text", ["{" * 200_000, r"\boxed{" * 30_000, "answer is " * 30_000])
def test_extraction_takes_linear_time_on_hostile_text(text):
    """Time is not measured, because superlinear code would take minutes."""
    extract_letter(text, ITEM)
    extract_math(text, ITEM)
