"""Tests of figures of a benchmark's breakdown: each value is plotted at its fields."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from spell_jax.evaluation import figures


def part(mean: float, **fields) -> dict:
    return {
        **fields,
        "questions": 1,
        "pass@1": {"mean": mean, "low": mean - 0.1, "high": mean + 0.2},
        "pass@2": {"mean": 1.0, "low": 1.0, "high": 1.0},
    }


@pytest.fixture
def saved(monkeypatch) -> list[Figure]:
    """Record the figures that are saved."""
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: saved.append(self))
    return saved


def test_breakdown_by_two_fields_is_a_heat_map(saved, tmp_path):
    parts = [part(0.1, length=10, depth=0.0), part(0.2, length=2000, depth=0.0)]
    parts += [part(0.3, length=2000, depth=0.5)]
    figures.plot_breakdown(tmp_path / "a.png", "needle", {16: parts, 1024: parts[:1]})
    first, second = [axes for axes in saved[0].axes if axes.images]
    assert np.array_equal(first.images[0].get_array().filled(-1), [[0.1, 0.2], [-1, 0.3]])
    assert first.images[0].get_clim() == (0, 1)
    assert [text.get_text() for text in first.get_xticklabels()] == ["10", "2,000"]
    assert [text.get_text() for text in first.get_yticklabels()] == ["0.0", "0.5"]
    assert (first.get_xlabel(), first.get_ylabel()) == ("length", "depth")
    cell_texts = {(text.get_position(), text.get_text()) for text in first.texts}
    assert cell_texts == {((0, 0), "10"), ((1, 0), "20"), ((1, 1), "30")}
    assert first.get_title() == "needle, prompts of at most 16 tokens"
    assert second.get_title() == "needle, prompts of at most 1,024 tokens"


def test_breakdown_by_a_number_and_a_name_has_a_line_per_name(saved, tmp_path):
    parts = [part(0.2, step=3, task="b"), part(0.4, step=9, task="a"), part(0.5, step=9, task="b")]
    figures.plot_breakdown(tmp_path / "a.png", "own questions", {16: parts})
    (axes,) = saved[0].axes
    line_points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert line_points == {"a": [[9, 0.4]], "b": [[3, 0.2], [9, 0.5]]}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert len(axes.collections) == 2 and axes.get_xlabel() == "step"
    (difficulty_axis,) = axes.child_axes
    assert difficulty_axis.get_ylabel() == "difficulty, 1 - pass@1"


def test_breakdown_by_two_names_is_a_heat_map(saved, tmp_path):
    parts = [part(0.2, difficulty="easy", length="long")]
    figures.plot_breakdown(tmp_path / "a.png", "LB-V2", {16: parts})
    assert saved[0].axes[0].images and not saved[0].axes[0].lines


def test_breakdown_by_one_field_is_a_line_with_a_band(saved, tmp_path):
    parts = [part(0.2, step=3), part(0.5, step=9)]
    figures.plot_breakdown(tmp_path / "a.png", "own questions", {16: parts})
    (axes,) = saved[0].axes
    assert axes.lines[0].get_xydata().tolist() == [[3, 0.2], [9, 0.5]]
    (band,) = axes.collections
    corners = {tuple(np.round(corner, 6).tolist()) for corner in band.get_paths()[0].vertices}
    assert {(3, 0.1), (3, 0.4), (9, 0.4), (9, 0.7)} <= corners
    assert axes.get_ylabel() == "accuracy, pass@1" and axes.get_xlabel() == "step"
    (difficulty_axis,) = axes.child_axes
    assert difficulty_axis.get_ylabel() == "difficulty, 1 - pass@1"
