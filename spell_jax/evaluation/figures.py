"""Plots of a benchmark's breakdown, such as accuracy by step or by a needle's length and depth.

A plot has one panel per prompt limit. A breakdown by one field is a line with its 95 % intervals as
a band; one by a number and a name, such as step and task, has a line for each name. Any other by
two fields is a heat map with the first field on the x axis.
"""

from __future__ import annotations

import functools
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spell_jax.runtime.files import durable

METRIC = "pass@1"
_PANEL_SIZE = (5.0, 3.6)  # inches


def plot_breakdown(
    path: pathlib.Path, title: str, panels: Mapping[int, Sequence[Mapping[str, Any]]]
) -> None:
    """Write the plot as PNG; `panels` maps max_input to a list "by" of protocol.summarize."""
    width, height = _PANEL_SIZE
    figure = Figure(figsize=(width * len(panels), height), layout="constrained")
    for number, (limit, parts) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), number)
        prompts = f"prompts of at most {limit:,} tokens" if limit else "uncut prompts"
        axes.set_title(f"{title}, {prompts}", fontsize=9)
        axes.tick_params(labelsize=7)
        names = list(parts[0])
        across, *down = names[: names.index("questions")]
        axes.set_xlabel(across, fontsize=8)
        if not down:
            _plot_lines(axes, {"": parts}, across)
        # A number and a name, such as step and task: lines can be compared, cells of a map hardly.
        elif isinstance(parts[0][down[0]], str) and not isinstance(parts[0][across], str):
            by_name: dict[str, list[Mapping[str, Any]]] = {}
            for part in parts:
                by_name.setdefault(part[down[0]], []).append(part)
            _plot_lines(axes, by_name, across)
            axes.legend(fontsize=7)
        else:
            _plot_map(axes, parts, across, *down)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110)
    durable.write_file(path, picture.getvalue())


def plot_lengths(path: pathlib.Path, lengths: Mapping[str, Sequence[int]]) -> None:
    """Write a PNG of the share of prompts up to each length; `lengths` maps names to tokens."""
    figure = Figure(figsize=_PANEL_SIZE, layout="constrained")
    axes = figure.add_subplot()
    for name, tokens in lengths.items():
        shares = np.arange(1, len(tokens) + 1) / len(tokens)
        axes.step(sorted(tokens), shares, where="post", linewidth=1.2, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens", fontsize=8)
    axes.set_ylabel("share of prompts up to this length", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110)
    durable.write_file(path, picture.getvalue())


def _plot_lines(axes: Axes, lines: Mapping[str, Sequence[Mapping[str, Any]]], across: str) -> None:
    for name, parts in sorted(lines.items()):
        values = [part[across] for part in parts]
        mean, low, high = ([part[METRIC][n] for part in parts] for n in ("mean", "low", "high"))
        axes.plot(values, mean, marker=".", linewidth=1.2, label=name)
        axes.fill_between(values, low, high, alpha=0.25, linewidth=0)
    axes.set_ylabel(f"accuracy, {METRIC}", fontsize=8)
    # The whole range, so that plots of two policies compare at a glance.
    axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)
    # Difficulty is the quantity of the paper's Figure 4.
    one_minus = functools.partial(np.subtract, 1)
    right_axis = axes.secondary_yaxis("right", functions=(one_minus, one_minus))
    right_axis.set_ylabel(f"difficulty, 1 - {METRIC}", fontsize=8)
    right_axis.tick_params(labelsize=7)


def _plot_map(axes: Axes, parts: Sequence[Mapping[str, Any]], across: str, down: str) -> None:
    columns, rows = (list(dict.fromkeys(part[name] for part in parts)) for name in (across, down))
    cells = np.full((len(rows), len(columns)), np.nan)
    for part in parts:
        row, column, value = (
            rows.index(part[down]),
            columns.index(part[across]),
            part[METRIC]["mean"],
        )
        cells[row, column] = value
        axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=7)
    # Fixed colors for 0 and 1, so that the colors of two policies compare.
    image = axes.imshow(cells, cmap="RdYlBu", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(columns)), [_label(value) for value in columns])
    axes.set_yticks(range(len(rows)), [_label(value) for value in rows])
    axes.set_ylabel(down, fontsize=8)
    bar = axes.figure.colorbar(image, ax=axes)
    bar.set_label(f"accuracy, {METRIC}, percent in the cells", fontsize=8)
    bar.ax.tick_params(labelsize=7)


def _label(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
