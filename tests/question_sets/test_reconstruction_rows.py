"""Tests of format rows of document reconstruction: the form is right, the order is not taught."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from spell_jax.data.clusters import count_words
from spell_jax.question_sets.reconstruction_rows import ReconstructionRowConfig, make_rows
from spell_jax.selfplay import prompts, puzzles

COMPACT = prompts.load("compact")
TEXTS = [
    "\n\n".join(f"In chapter {i} of book {book} nothing at all happens." for i in range(9))
    for book in range(5)
]
CONFIG = ReconstructionRowConfig(rows=120, prompt_words=120, min_paragraph=20)


def test_answers_are_permutations_in_random_order():
    rows, counts = make_rows(TEXTS, CONFIG, COMPACT)
    orders = Counter()
    for number, row in enumerate(rows):
        options = CONFIG.options[number % 2]
        order = puzzles.parse_order(row.completion, options)
        assert order.is_permutation and f"({puzzles.LABELS[options - 1]})" in row.prompt
        assert puzzles.gap_marker(options) in row.prompt and count_words(row.prompt) <= 120
        orders[order.letters if options == 3 else "four"] += 1
    assert len(orders) == 6 + 1 and not counts  # all orders of three letters
    assert make_rows(TEXTS, CONFIG, COMPACT)[0] == rows


def test_texts_without_puzzles_are_counted_or_an_error():
    rows, counts = make_rows([*TEXTS, "One line."], CONFIG, COMPACT)
    assert len(rows) == 120 and counts["few_paragraphs"] > 5
    with pytest.raises(ValueError, match=r"no text gives a puzzle of 3 options: .*few_paragraphs"):
        make_rows(["One line."], CONFIG, COMPACT)
    with pytest.raises(ValueError, match=r"options = .*each must be 2 to 8"):
        ReconstructionRowConfig(options=(1,))
    with pytest.raises(ValueError, match="max_paragraph = 9"):
        ReconstructionRowConfig(min_paragraph=10, max_paragraph=9)


@pytest.mark.slow
def test_command_reads_a_folder(tmp_path: Path):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    command = [sys.executable, "-m", "spell_jax.question_sets.reconstruction_rows"]
    flags = [f"--source={tmp_path}", f"--out={tmp_path / 'rows.jsonl'}", "--rows=6"]
    process = subprocess.run(
        [*command, *flags, "--min_paragraph=20"], capture_output=True, text=True, check=True
    )
    assert json.loads(process.stdout)["rows"] == 6
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert all(row["task"] == "reconstruction" for row in rows) and len(rows) == 6
