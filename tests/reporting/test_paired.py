"""Tests of paired differences between answers to the same held-out questions."""

from __future__ import annotations

import numpy as np
import pytest
from etils import epath

from spell_jax.reporting import paired


def answers(scores, documents=(4, 8)) -> list[dict]:
    return [
        {
            "question": f"Q{i}?",
            "documents": documents[i % 2],
            "reference": "x",
            "answer": "y",
            "scores": {"accuracy": 1.0, "exact match": float(score)},
        }
        for i, score in enumerate(scores)
    ]


def write(folder: epath.Path, before, after) -> epath.Path:
    paired.write_answers(folder, "before", answers(before))
    paired.write_answers(folder, "after", answers(after))
    return folder


def test_interval_is_of_the_differences() -> None:
    """Two policies that differ on few questions have a narrow interval, whatever their means."""
    rng = np.random.default_rng(0)
    first = rng.random(400) < 0.5
    second = first.copy()
    second[:20] = True
    gap = paired.difference(first.tolist(), second.tolist())
    mean = float(second.mean() - first.mean())
    assert gap.mean == pytest.approx(mean)
    deviation = float((second.astype(float) - first.astype(float)).std() / 20)
    assert gap.low == pytest.approx(mean - 1.96 * deviation, abs=0.004)
    assert gap.high == pytest.approx(mean + 1.96 * deviation, abs=0.004)
    assert gap.high - gap.low < 0.5 * 2 * 1.96 * first.std() / 20


def test_intervals_of_equal_differences_have_a_width_or_are_not_printed(tmp_path) -> None:
    folder = write(epath.Path(tmp_path) / "run", [0, 0, 0], [1, 1, 1])
    (row, *_) = [line for line in paired.table([folder]).splitlines() if "exact match" in line]
    assert row.endswith("+1.000  +0.206 to +1.000")
    folder = write(epath.Path(tmp_path) / "other", [0.25, 0.5, 0.75], [0.5, 0.75, 1])
    (row, *_) = [line for line in paired.table([folder]).splitlines() if "exact match" in line]
    assert row.split()[-2:] == ["+0.250", "-"]


def test_table_compares_before_with_after_and_runs_with_the_first(tmp_path) -> None:
    folder = epath.Path(tmp_path)
    start, end = [0, 1, 0, 1, 0, 1, 0, 1], [1, 1, 1, 1, 0, 1, 0, 1]
    first_run, second_run = write(folder / "one", start, end), write(folder / "other", start, start)
    lines = paired.table([first_run, second_run]).splitlines()
    titles = [line.split("  ")[1].strip() for line in lines if "->" in line]
    assert titles == ["one, before -> one", "other, before -> other", "one -> other"]
    rows = [line.split() for line in lines if "exact match" in line]
    assert [row[-6:-3] for row in rows[:3]] == [
        ["0.500", "0.750", "+0.250"],  # all
        ["0.000", "0.500", "+0.500"],  # 4 documents
        ["1.000", "1.000", "+0.000"],  # 8
    ]
    assert rows[6][-6:-3] == ["0.750", "0.500", "-0.250"]


def test_runs_with_other_questions_are_not_compared(tmp_path) -> None:
    folder = epath.Path(tmp_path)
    first_run = write(folder / "one", [0, 1], [1, 1])
    second_run = write(folder / "other", [0, 1, 1], [1, 1, 0])
    line = "one -> other: no held-out questions in common"
    assert paired.table([first_run, second_run]).endswith(f"\n{line}")
    assert paired.table([folder / "none"]) == ""
    assert paired.table([folder / "none", folder / "other"]).endswith(
        "\nnone -> other: no held-out questions in common"
    )
    assert paired.table([folder / "a", folder / "b"]) == ("a -> b: no held-out questions in common")


def test_damaged_lines_are_skipped_and_logged(tmp_path, caplog) -> None:
    folder = write(epath.Path(tmp_path), [0, 1], [1, 1])
    path = folder / paired.FOLDER / "after.jsonl"
    path.write_text(path.read_text() + '{"question": 3}\nno JSON\n')
    assert len(paired.read_answers(folder, "after")) == 2
    assert "after.jsonl:3" in caplog.text
