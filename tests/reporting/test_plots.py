"""Tests of the page's plots as pictures: one per plot, with the page's content."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from etils import epath
from matplotlib import image
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from spell_jax.reporting import plots
from spell_jax.reporting.page import write_page
from spell_jax.reporting.plots import draw_others, draw_page, file_names, smooth
from tests.reporting.synthetic_runs import measured, write_run

STEPS = list(range(1, 101))


def overview(tmp_path, *runs) -> dict:
    return write_page([measured(run) for run in runs], epath.Path(tmp_path / "page.html"))


def axes_of(draw, *arguments) -> Axes:
    axes = Figure().add_subplot()
    draw(axes, *arguments)
    return axes


def curves_of(axes: Axes) -> dict[str, list[float]]:
    return {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in axes.get_lines()}


def bands_of(axes: Axes) -> list[list[float]]:
    """Return [left, lowest, right, highest] of each filled area."""
    areas = [c for c in axes.collections if isinstance(c, PolyCollection)]
    return [c.get_datalim(axes.transData).extents.tolist() for c in areas]


def group(name: str, **series) -> dict:
    return {"name": name, "series": series, "mapping": None, "points": []}


@pytest.mark.slow
def test_every_plot_of_the_page_is_saved_as_png(tmp_path):
    run = write_run(tmp_path / "run", steps=3, episodes=4)
    page_overview = overview(tmp_path, run)
    paths = draw_page(page_overview, epath.Path(tmp_path / "plots"))
    names = [path.name for path in paths]
    assert sorted(names) == sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert names == [
        "evaluation_responder_by_documents.png",
        "solve_rate.png",
        "groups_of_answers.png",
        "what_became_of_questions.png",
        "task_mix.png",
        "verifiers_majority_against_the_rule.png",
        "entropy_of_the_policy.png",
        "answer_length.png",
        "questioners_reward.png",
        "seconds_a_step_by_phase.png",
        "tokens_sampled_in_a_step.png",
        "questioners_reward_by_mean_reward.png",
    ]
    other_paths = draw_others(page_overview, epath.Path(tmp_path / "plots" / "other"))
    assert [path.name for path in other_paths] == [
        "rollout_accepted.png",
        "rollout_bad_format.png",
        "rollout_mixed.png",
        "time_step_seconds.png",
        "train_loss.png",
    ]
    for path in paths + other_paths:
        picture = path.read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 5000


@pytest.mark.slow
def test_compared_runs_have_bands_over_seeds(tmp_path):
    runs = [
        write_run(tmp_path / str(n), 3, 4, n % 2, questioner={"sigma": n // 2 + 1})
        for n in range(4)
    ]
    page_overview = overview(tmp_path, *runs)
    names = [path.name for path in draw_page(page_overview, epath.Path(tmp_path / "plots"))]
    assert "evaluation_responder_by_documents.png" in names
    panel = page_overview["panels"][0]
    axes = axes_of(plots._draw_curves, panel, page_overview["groups"])
    first_group, second_group = page_overview["groups"]
    # A comparison plots the solve rate of all tasks, not a rate for each task.
    expected_curves = {
        g["name"]: g["series"]["rollout/solve_rate"][1] for g in (first_group, second_group)
    }
    assert curves_of(axes) == expected_curves
    low, high = first_group["series"]["rollout/solve_rate"][2:]
    assert bands_of(axes)[0] == pytest.approx([1, min(low), 3, max(high)])
    alone = axes_of(plots._draw_curves, panel, [first_group])
    assert list(curves_of(alone)) == ["all", "general qa", "financial math", "multiple choice"]


def test_parts_of_a_sum_are_stacked():
    panel = {"metrics": {"a": "x", "b": "y"}, "unit": "u", "stacked": True}
    ones, low, high = [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [9.0, 9.0, 9.0]
    seeds = group("g", x=[[1, 2, 3], ones, low, high], y=[[1, 3], [2.0, 4.0]])
    tops = [extents[3] for extents in bands_of(axes_of(plots._draw_curves, panel, [seeds]))]
    assert tops == [1.0, 5.0]
    axes = axes_of(plots._draw_curves, panel, [seeds, group("h", x=[[1], [7.0]])])
    assert curves_of(axes) == {"g: a": [1.0, 1.0, 1.0], "g: b": [2.0, 4.0], "h: a": [7.0]}
    axes = axes_of(plots._draw_curves, panel | {"stacked": False}, [group("g", x=[[1], [7.0]])])
    assert curves_of(axes) == {"a": [7.0]} and axes.get_ylim()[0] == 0


def test_curves_of_many_steps_are_smoothed():
    values = [float(step % 2) for step in STEPS]
    assert smooth(values[:59]) == values[:59]
    assert smooth(values)[:3] == [0.5, 2 / 3, 1 / 3] and len(smooth(values)) == 100
    panel = {"metrics": {"a": "x"}, "unit": "u", "stacked": False}
    lines = axes_of(plots._draw_curves, panel, [group("g", x=[STEPS, values])]).get_lines()
    assert [list(line.get_ydata()) for line in lines] == [values, smooth(values)]
    stacked_panel = {"metrics": {"a": "x", "b": "y"}, "unit": "u", "stacked": True}
    stacked = group("g", x=[STEPS, values], y=[STEPS, values])
    tops = [
        extents[3] for extents in bands_of(axes_of(plots._draw_curves, stacked_panel, [stacked]))
    ]
    assert tops == pytest.approx([2 / 3, 4 / 3])
    band = group("g", x=[STEPS, values, values, values])
    axes = axes_of(plots._draw_curves, panel, [band])
    assert len(axes.get_lines()) == 1
    assert bands_of(axes)[0][1::2] == pytest.approx([1 / 3, 2 / 3])


def test_mapping_plot_has_curve_and_points():
    mapping = {"name": "azr", "curve": [[0.0, 0.0], [1.0, 0.5]]}
    groups = [group("g") | {"mapping": mapping, "points": [[0.5, 0.25, 3], [1.0, 0.5, 12]]}]
    axes = axes_of(plots._draw_mapping, [*groups, group("h")])
    assert curves_of(axes) == {"g: azr": [0.0, 0.5]}
    (points,) = axes.collections
    assert points.get_offsets().tolist() == [[0.5, 0.25], [1.0, 0.5]]
    assert points.get_sizes().tolist() == [34, 124]


def test_legend_with_many_labels_is_beside_the_plot(tmp_path):
    widths, frames = [], []
    for count in (4, 5):
        names = [str(n) for n in range(count)]
        panel = {"metrics": dict.fromkeys(names, "x"), "unit": "u", "stacked": False}
        draw = functools.partial(
            plots._draw_curves, panel=panel, groups=[group("g", x=[[1], [1.0]])]
        )
        path = plots._save(epath.Path(tmp_path / f"{count}.png"), plots.Plot("title", draw))
        pixels = image.imread(path)
        widths.append(pixels.shape[1])
        is_black = pixels[..., :3].sum(axis=2) < 0.3
        sides = np.flatnonzero(is_black.mean(axis=0) > 0.7)  # of the plot's frame
        frames.append(sides[-1] - sides[0])
    assert widths[1] > widths[0]
    assert abs(frames[1] - frames[0]) <= 1  # the crop may shift a side by a pixel


def test_before_and_after_have_two_colors_and_their_own_ends():
    rows = [{"name": ["all", ""], "cells": [[[0.0, 0.0, 0.2, 1], [0.5, 0.3, 0.8, 1]]]}]
    axes = axes_of(plots._draw_table, {"rows": rows}, [group("g")])
    handles, labels = axes.get_legend_handles_labels()
    assert labels == ["before", "after"]
    lines = [segment for c in axes.collections for segment in c.get_segments()]
    assert [line[:, 0].tolist() for line in lines] == [[0.0, 0.2], [0.3, 0.8]]
    assert len({handle.lines[0].get_color() for handle in handles}) == 2
    compared_rows = [{"name": ["all", ""], "cells": rows[0]["cells"] * 2}]
    axes = axes_of(plots._draw_table, {"rows": compared_rows}, [group("g"), group("h")])
    handles, labels = axes.get_legend_handles_labels()
    faces = [handle.lines[0].get_markerfacecolor() for handle in handles]
    assert labels == ["g: before", "g: after", "h: before", "h: after"]
    assert faces[0] == faces[2] == "white" and faces[1] != faces[3]


def test_axes_have_units_and_colors_that_recur_have_dashes():
    names = [str(n) for n in range(len(plots._COLORS) + 1)]
    panel = {"metrics": {n: n for n in names}, "unit": "share of answers", "stacked": False}
    series = {name: [[1, 2], [1.0, 1.0]] for name in names}
    axes = axes_of(plots._draw_curves, panel, [group("g", **series)])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("training step", "share of answers")
    first, *_, last = axes.get_lines()
    assert first.get_color() == last.get_color() and first.get_linestyle() != last.get_linestyle()


def test_file_names_are_valid_and_distinct():
    titles = ["Solve rate: a", "solve/rate", "../../x", "\u2028$`", "", "a" * 300, "solve_rate_2"]
    assert file_names(titles) == [
        "solve_rate", "solve_rate_2", "x", "plot", "plot_2", "a" * 80, "solve_rate_2_2"
    ]  # fmt: skip


def test_labels_are_not_parsed_as_math(tmp_path):
    hostile = "$\\frac{$_{"
    panel = {"metrics": {hostile: "x", "_b": "x"}, "unit": "u", "stacked": False}
    draw = functools.partial(plots._draw_curves, panel=panel, groups=[group("g", x=[[1], [1.0]])])
    path = plots._save(epath.Path(tmp_path / "a.png"), plots.Plot(hostile, draw))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(curves_of(axes_of(draw))) == ["\\$\\frac{\\$ {", "b"]
