"""Plots of a benchmark's breakdown, such as accuracy by step or by a needle's length and depth.

A plot has one panel per prompt limit. A breakdown by one field is a line with its 95 % intervals as
a band. A breakdown by two fields is a heat map: the first field on the x axis, the second on the y
axis.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

KIND = "pass@1"
_PANEL_SIZE = (5.0, 3.6)  # inches


def draw(path: pathlib.Path, title: str, panels: Mapping[int, Sequence[Mapping[str, Any]]]) -> None:
    """Write the plot of a benchmark as a PNG file.

    Args:
      path: file to write.
      title: title of the benchmark.
      panels: max_input -> the "by" list of protocol.summarize, with one or two fields.
    """
    width, height = _PANEL_SIZE
    figure = Figure(figsize=(width * len(panels), height), layout="constrained")
    for place, (limit, parts) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), place)
        axes.set_title(f"{title}, prompts of at most {limit:,} tokens", fontsize=9)
        axes.tick_params(labelsize=7)
        fields = fields_of(parts)
        if len(fields) == 1:
            _draw_line(axes, parts, *fields)
        else:
            _draw_map(axes, parts, *fields)
    figure.savefig(path, dpi=110)


def fields_of(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the breakdown fields: the keys before "questions"."""
    names = list(parts[0])
    return names[: names.index("questions")]


def _draw_line(axes: Axes, parts: Sequence[Mapping[str, Any]], field: str) -> None:
    places = [part[field] for part in parts]
    mean, low, high = ([part[KIND][name] for part in parts] for name in ("mean", "low", "high"))
    axes.plot(places, mean, marker=".", linewidth=1.2)
    axes.fill_between(places, low, high, alpha=0.25, linewidth=0)
    axes.set_xlabel(field, fontsize=8)
    axes.set_ylabel(f"accuracy, {KIND}", fontsize=8)
    axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)
    # Difficulty is the quantity of the paper's Figure 4.
    other = axes.secondary_yaxis("right", functions=(_one_minus, _one_minus))
    other.set_ylabel(f"difficulty, 1 - {KIND}", fontsize=8)
    other.tick_params(labelsize=7)


def _draw_map(axes: Axes, parts: Sequence[Mapping[str, Any]], across: str, down: str) -> None:
    columns, rows = (list(dict.fromkeys(p[field] for p in parts)) for field in (across, down))
    cells = [[float("nan")] * len(columns) for _ in rows]
    for part in parts:
        row, column, value = rows.index(part[down]), columns.index(part[across]), part[KIND]["mean"]
        cells[row][column] = value
        axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=7)
    image = axes.imshow(cells, cmap="RdYlBu", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(columns)), [_label(value) for value in columns])
    axes.set_yticks(range(len(rows)), [_label(value) for value in rows])
    axes.set_xlabel(across, fontsize=8)
    axes.set_ylabel(down, fontsize=8)
    bar = axes.figure.colorbar(image, ax=axes)
    bar.set_label(f"accuracy, {KIND}, percent in the cells", fontsize=8)
    bar.ax.tick_params(labelsize=7)


def _one_minus(values: Any) -> Any:
    return 1 - values


def _label(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
