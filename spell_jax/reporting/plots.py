"""Plots of the report page as PNG files, with the page's data, colors and smoothing.

A file is named by its plot's title up to a colon: "Solve rate: ..." is solve_rate.png. The page's
other metrics have their own names, such as train_grad_norm.png.
"""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spell_jax.reporting.panels import panels_by_prefix
from spell_jax.runtime.files import durable
from spell_jax.runtime.terminal import printable

MANY = 60  # steps, from which on curves and areas are smoothed; as in report.html
SIZE = (4.2, 2.8)  # inches
_DPI = 200  # for print; a plot of SIZE is 840 pixels wide
# Colors of report.html, so that a picture and the page show a curve alike.
_COLORS = (
    "#1f6fb4",
    "#d9730d",
    "#2e8b57",
    "#b23a6f",
    "#7a5bc0",
    "#8c6d1f",
    "#168a96",
    "#777f89",
    "#5a3a1a",
)
_INK = "#1c1f23"
_DASHES = ("-", "--", ":", "-.", (0, (1, 3)), (0, (10, 4)))
_NAME_CHARACTERS = 80  # file systems allow 255 bytes, with the number and suffix of a name
_LEGEND_INSIDE = 6  # labels; a longer legend hides a good part of the curves
_LABEL_CHARACTERS = 200  # names of folders and metrics have no limit of their own


class Plot(NamedTuple):
    title: str
    draw: Callable[[Axes], None]
    height: float = SIZE[1]


def draw_page(overview: Mapping[str, Any], folder: epath.Path) -> list[epath.Path]:
    """Draw all plots of a page (`page.write_page`) into a folder; return the files.

    The evaluation is plotted only for several groups of runs; draw_run does it for one.
    """
    groups, tables = overview["groups"], overview["evaluation"]
    x = overview["x"]
    plots = [_curves(panel, groups, x) for panel in overview["panels"]]
    if any(group["points"] or group["mapping"] for group in groups):
        draw = functools.partial(_draw_mapping, groups=groups)
        plots.append(Plot("Questioner's reward by mean reward", draw))
    if len(groups) > 1:
        plots += [_intervals(table, groups, "Evaluation, ") for table in tables]
    plots += [_curves(panel, groups, x) for panel in overview["others"]]
    folder.mkdir(parents=True, exist_ok=True)
    names = file_names([plot.title for plot in plots])
    pairs = zip(names, plots, strict=True)
    return [_save(folder / f"{name}.png", [plot], _DPI) for name, plot in pairs]


def draw_run(overview: Mapping[str, Any], folder: epath.Path) -> list[epath.Path]:
    """Draw one run: a picture per metric prefix, and evaluation.png if it has an evaluation."""
    groups, pictures = overview["groups"], {}
    prefixes = sorted(panels_by_prefix(overview["groups"][0]["series"]).items())
    names = file_names([prefix for prefix, _ in prefixes])
    for name, (_, panels) in zip(names, prefixes, strict=True):
        pictures[name] = [_curves(panel, groups, overview["x"]) for panel in panels]
    if overview["evaluation"]:
        pictures["evaluation"] = [_intervals(table, groups) for table in overview["evaluation"]]
    folder.mkdir(exist_ok=True)
    return [_save(folder / f"{name}.png", plots) for name, plots in pictures.items()]


def file_names(titles: Sequence[str]) -> list[str]:
    names: list[str] = []
    for title in titles:
        plain = title.partition(":")[0].lower().replace("'", "")
        name = re.sub(r"[^a-z0-9]+", "_", plain)[:_NAME_CHARACTERS].strip("_") or "plot"
        # Titles may differ only in characters that a file name lacks: the later ones get a number.
        same = sum(re.fullmatch(rf"{name}(_\d+)?", used_name) is not None for used_name in names)
        names.append(f"{name}_{same + 1}" if name in names else name)
    return names


def _curves(panel: Mapping[str, Any], groups: Sequence[Mapping], x: str) -> Plot:
    draw = functools.partial(_draw_curves, panel=panel, groups=groups, x=x)
    return Plot(panel["title"], draw)


def _intervals(table: Mapping[str, Any], groups: Sequence[Mapping], before: str = "") -> Plot:
    draw = functools.partial(_draw_table, table=table, groups=groups)
    height = max(SIZE[1], 0.8 + 0.2 * len(table["rows"]) * len(groups))
    return Plot(before + table["title"], draw, height)


def _save(path: epath.Path, plots: Sequence[Plot], dpi: int = 110) -> epath.Path:
    columns = min(3, len(plots))
    rows = math.ceil(len(plots) / columns)
    height = max(plot.height for plot in plots)
    # Figure, not pyplot: pyplot keeps every figure in a global list, and may look for a display.
    figure = Figure(figsize=(SIZE[0] * columns, height * rows), layout="constrained")
    for index, plot in enumerate(plots, 1):
        axes = figure.add_subplot(rows, columns, index)
        axes.set_title(_plain(plot.title), fontsize=9, wrap=True)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        plot.draw(axes)
    legend = figure.axes[0].get_legend()
    crop: dict[str, Any] = {}
    if len(plots) == 1 and legend and len(legend.get_texts()) > _LEGEND_INSIDE:
        # Inside the plot the legend would cover the curves. The picture gets wider, not the plot
        # smaller.
        legend.set_loc("upper left")
        legend.set_bbox_to_anchor((1, 1))
        legend.set_in_layout(False)
        crop = {"bbox_inches": "tight", "bbox_extra_artists": [legend]}
    # In memory first: the file is replaced whole, and a full disk leaves the old picture.
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, **crop)
    durable.write_file(path, picture.getvalue())
    return path


def _draw_curves(
    axes: Axes, panel: Mapping[str, Any], groups: Sequence[Mapping], x: str = "step"
) -> None:
    """Draw one curve per metric and group over `x`, the name of the axis.

    Stacked values of a single group become areas. Several groups are compared by the metric over
    all tasks, if there is one.
    """
    metrics, several = panel["metrics"], len(groups) > 1
    # A curve for each task and group could not be read.
    overall = several and any(metrics.get("all") in group["series"] for group in groups)
    if overall:
        metrics = {"all": metrics["all"]}
    labels = list(metrics)
    curves = [
        (g, m, group["series"][metric])
        for g, group in enumerate(groups)
        for m, metric in enumerate(metrics.values())
        if metric in group["series"]
    ]
    shift = 1 if "all" in metrics else 0
    if panel.get("stacked") and not several and len(curves) > 1:
        _stack(axes, [(labels[m], m, series) for _, m, series in curves])
    else:
        for g, m, (steps, mean, *band) in curves:
            metric_color = _INK if m < shift else _COLORS[(m - shift) % len(_COLORS)]
            color = _COLORS[g % len(_COLORS)] if several else metric_color
            name = f"{groups[g]['name']}: {labels[m]}" if several else labels[m]
            name = groups[g]["name"] if overall else name
            style = _DASHES[m % len(_DASHES)] if several else "-"
            is_long = len(steps) > MANY
            if band:
                low, high = map(smooth, band) if is_long else band
                axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
            # The values themselves stay visible below their moving average.
            elif is_long:
                axes.plot(steps, mean, color=color, alpha=0.3, linewidth=0.6)
            # A curve of one point has no line to see.
            marker = "." if len(steps) == 1 else ""
            axes.plot(
                steps,
                smooth(mean) if is_long else mean,
                color=color,
                linestyle=style,
                linewidth=1.3,
                marker=marker,
                label=_plain(name),
            )
        # Axes start at 0, so that a small change does not look like a large one.
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.set_xlabel(x, fontsize=7)
    if len(curves) > 1:
        axes.legend(fontsize=6)


def _stack(axes: Axes, curves: Sequence[tuple[str, int, Sequence]]) -> None:
    """Draw the curves of one group as stacked areas; missing values count as 0."""
    steps = sorted({step for _, _, (curve_steps, *_) in curves for step in curve_steps})
    heights = []
    for _, _, (curve_steps, mean, *_) in curves:
        values = dict(zip(curve_steps, mean, strict=True))
        height = [values.get(step, 0.0) for step in steps]
        heights.append(smooth(height) if len(steps) > MANY else height)
    colors = [_COLORS[m % len(_COLORS)] for _, m, _ in curves]
    labels = [_plain(label) for label, *_ in curves]
    axes.stackplot(steps, heights, labels=labels, colors=colors, alpha=0.75)
    axes.margins(0)


def smooth(values: Sequence[float]) -> list[float]:
    """Return the moving average with a sixtieth of the values on either side."""
    half = len(values) // 60
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _draw_mapping(axes: Axes, groups: Sequence[Mapping]) -> None:
    """Draw the questioner's reward over the mean answer reward; circle area counts questions."""
    max_count = max([1, *(count for group in groups for *_, count in group["points"])])
    for g, group in enumerate(groups):
        color = _COLORS[g % len(_COLORS)]
        name = group["mapping"]["name"] if group["mapping"] else "points only"
        label = f"{group['name']}: {name}" if len(groups) > 1 else name
        curve = group["mapping"]["curve"] if group["mapping"] else [[], []]
        xs, ys = zip(*curve, strict=True) if group["mapping"] else ((), ())
        axes.plot(xs, ys, color=color, linewidth=1.3, label=_plain(label))
        if group["points"]:
            means, rewards, counts = zip(*group["points"], strict=True)
            # Areas, as matplotlib takes them; 4 keeps a single question visible.
            sizes = [4 + 120 * count / max_count for count in counts]
            axes.scatter(means, rewards, sizes, color=color, alpha=0.45, linewidths=0)
    axes.set_xlabel("mean reward of the answers", fontsize=7)
    axes.legend(fontsize=6)


def _draw_table(axes: Axes, table: Mapping[str, Any], groups: Sequence[Mapping]) -> None:
    """Draw means with intervals, one line per row: before and after training, for each group."""
    rows = table["rows"]
    kinds = [(g, when) for g in range(len(groups)) for when in (0, 1)]
    for place, (g, when) in enumerate(kinds):
        cells = [(y, row["cells"][g][when]) for y, row in enumerate(rows)]
        points = [(y + (place + 1) / (len(kinds) + 1) - 0.5, *cell) for y, cell in cells if cell]
        if not points:
            continue
        heights, means, halves, _ = zip(*points, strict=True)
        name = f"{groups[g]['name']}: " if len(groups) > 1 else ""
        axes.errorbar(
            means,
            heights,
            xerr=halves,
            fmt="o" if when else "x",
            markersize=3,
            color=_COLORS[g % len(_COLORS)],
            label=_plain(name + ("before", "after")[when]),
        )
    names = [_plain(" ".join(row["name"])) for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=6)
    axes.set_ylim(len(rows) - 0.4, -0.6)  # first row at the top
    axes.legend(fontsize=6)


def _plain(text: str) -> str:
    """Escape "$" (math in matplotlib) and replace "_" (a leading one would hide a label).

    Control characters and surrogates, which a font does not have, become their escapes.
    """
    text = printable(text[:_LABEL_CHARACTERS])
    return text.replace("$", r"\$").lstrip("_").replace("_", " ")
