"""Plots of the report page as PNG files for a paper, with the page's data, colors and smoothing.

A file is named by its plot's title up to a colon: "Form of answers: verbatim" is
form_of_answers.png. The page's other metrics have their own names, such as train_grad_norm.png.
A plot is as wide as a column of a paper, with letters of 7 and 8 points.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spell_jax.runtime.files import durable
from spell_jax.runtime.terminal import printable

MANY = 60  # steps, from which on curves and areas are smoothed; as in report.html
FEW = 12  # points of a curve that are marked; as in report.html
SIZE = (3.4, 2.4)  # inches; a column of a paper with two columns is 3.25 to 3.5 wide
_DPI = 300
_LABEL_POINTS, _SMALL_POINTS = 8, 7  # sizes of letters
# Okabe and Ito's colors, which color-blind readers tell apart, and gray; as in report.html. Their
# black is the curve of all tasks, their yellow too light for a line on white.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777F89")
_BEFORE, _AFTER = "#E69F00", "#0072B2"
_INK = "#1c1f23"
_DASHES = ("-", "--", ":", "-.", (0, (1, 3)), (0, (10, 4)))
_NAME_CHARACTERS = 80  # file systems allow 255 bytes, with the number and suffix of a name
_LEGEND_INSIDE = 4  # labels; a longer legend hides a good part of the curves
_LABEL_CHARACTERS = 200  # names of folders and metrics have no limit of their own


class Plot(NamedTuple):
    title: str
    draw: Callable[[Axes], None]
    size: tuple[float, float] = SIZE


def draw_page(overview: Mapping[str, Any], folder: epath.Path) -> list[epath.Path]:
    """Draw the plots of a page (`page.write_page`) into a folder; return the files.

    These are the evaluation and the panels, without the page's other metrics.
    """
    groups = overview["groups"]
    plots = [_intervals(table, groups) for table in overview["evaluation"]]
    plots += [_curves(panel, groups, overview["x"]) for panel in overview["panels"]]
    if any(group["points"] or group["mapping"] for group in groups):
        draw = functools.partial(_draw_mapping, groups=groups)
        plots.append(Plot("Questioner's reward by mean reward", draw))
    return _save_all(folder, plots)


def draw_others(overview: Mapping[str, Any], folder: epath.Path) -> list[epath.Path]:
    """Draw the page's metrics without a panel of their own into a folder; return the files."""
    groups, x = overview["groups"], overview["x"]
    return _save_all(folder, [_curves(panel, groups, x) for panel in overview["others"]])


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


def _intervals(table: Mapping[str, Any], groups: Sequence[Mapping]) -> Plot:
    draw = functools.partial(_draw_table, table=table, groups=groups)
    # Long names of rows need room beside the plot, and each row two lines per group.
    longest = max((len(_row_name(row)) for row in table["rows"]), default=0)
    height = 0.9 + 0.13 * len(table["rows"]) * (1 + len(groups))
    size = (SIZE[0] + 0.05 * max(0, longest - 16), max(1.6, height))
    return Plot(f"Evaluation, {table['title']}", draw, size)


def _row_name(row: Mapping[str, Any]) -> str:
    return _plain(" ".join(filter(None, row["name"])))


def _save_all(folder: epath.Path, plots: Sequence[Plot]) -> list[epath.Path]:
    folder.mkdir(parents=True, exist_ok=True)
    names = file_names([plot.title for plot in plots])
    return [_save(folder / f"{name}.png", plot) for name, plot in zip(names, plots, strict=True)]


def _save(path: epath.Path, plot: Plot) -> epath.Path:
    # Figure, not pyplot: pyplot keeps every figure in a global list, and may look for a display.
    figure = Figure(figsize=plot.size, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(_plain(plot.title), fontsize=_LABEL_POINTS, wrap=True)
    axes.tick_params(labelsize=_SMALL_POINTS)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.set_axisbelow(True)
    plot.draw(axes)
    # In memory first: the file is replaced whole, and a full disk leaves the old picture.
    picture = io.BytesIO()
    legend = axes.get_legend()
    crop: dict[str, Any] = {}
    if legend and not legend.get_in_layout():
        # The legend is beside the plot: the picture gets wider, not the plot smaller.
        crop = {"bbox_inches": "tight", "bbox_extra_artists": [legend], "pad_inches": 0.03}
    figure.savefig(picture, dpi=_DPI, **crop)
    durable.write_file(path, picture.getvalue())
    return path


def _add_legend(axes: Axes) -> None:
    count = len(axes.get_legend_handles_labels()[0])
    if not count:
        return
    options: dict[str, Any] = {"fontsize": _SMALL_POINTS, "handlelength": 1.5}
    if count <= _LEGEND_INSIDE:
        axes.legend(framealpha=0.7, borderpad=0.3, labelspacing=0.3, **options)
        return
    # Inside the plot the legend would cover the curves.
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, **options)
    legend.set_in_layout(False)


def _draw_curves(
    axes: Axes, panel: Mapping[str, Any], groups: Sequence[Mapping], x: str = "step"
) -> None:
    """Draw one curve per metric and group over `x`, the name of the axis.

    Stacked values of a single group become areas. Several groups are compared by the metric over
    all tasks, if there is one.
    """
    metrics, several = panel["metrics"], len(groups) > 1
    # A curve for each task and group could not be read.
    if several:
        measured = {
            label: metric
            for label, metric in metrics.items()
            if any(metric in group["series"] for group in groups)
        }
        metrics = {"all": measured["all"]} if "all" in measured else measured
    overall = several and len(metrics) == 1
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
        for g, m, series in curves:
            # A task has the same color in all plots, whether all tasks are one of the curves.
            metric_color = _INK if m < shift else _COLORS[(m - shift) % len(_COLORS)]
            color = _COLORS[g % len(_COLORS)] if several else metric_color
            name = f"{groups[g]['name']}: {labels[m]}" if several else labels[m]
            name = groups[g]["name"] if overall else name
            # Colors recur after seven curves: dashes tell these apart.
            place = m if several else max(0, m - shift) // len(_COLORS)
            _draw_curve(axes, series, _plain(name), color, _DASHES[place % len(_DASHES)])
        # Axes start at 0, so that a small change does not look like a large one.
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.set_xlabel({"step": "training step"}.get(x, x), fontsize=_LABEL_POINTS)
    axes.set_ylabel(_plain(panel["unit"]), fontsize=_LABEL_POINTS)
    if len(curves) > 1:
        _add_legend(axes)


def _draw_curve(axes: Axes, series: Sequence, label: str, color: str, style: Any) -> None:
    steps, mean, *band = series
    is_long = len(steps) > MANY
    if band:
        low, high = map(smooth, band) if is_long else band
        axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    # The values themselves stay visible below their moving average.
    elif is_long:
        axes.plot(steps, mean, color=color, alpha=0.3, linewidth=0.6)
    axes.plot(
        steps,
        smooth(mean) if is_long else mean,
        color=color,
        linestyle=style,
        linewidth=1.3,
        # A few points are measurements far apart, and a single one has no line to see.
        marker="o" if len(steps) <= FEW else "",
        markersize=2.5,
        label=label,
    )


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
    areas = axes.stackplot(steps, heights, labels=labels, colors=colors, alpha=0.75)
    for area, (_, m, _) in zip(areas, curves, strict=True):
        # Colors recur after seven areas: stripes tell these apart.
        area.set_hatch("///" if m >= len(_COLORS) else "")
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
        name = group["mapping"]["name"] if group["mapping"] else "questions"
        label = f"{group['name']}: {name}" if len(groups) > 1 else name
        if group["mapping"]:
            xs, ys = zip(*group["mapping"]["curve"], strict=True)
            axes.plot(xs, ys, color=color, linewidth=1.3, label=_plain(label))
        if group["points"]:
            means, rewards, counts = zip(*group["points"], strict=True)
            # Areas, as matplotlib takes them; 4 keeps a single question visible.
            sizes = [4 + 120 * count / max_count for count in counts]
            circles = "" if group["mapping"] else _plain(label)
            axes.scatter(
                means, rewards, sizes, color=color, alpha=0.45, linewidths=0, label=circles or None
            )
    axes.set_xlabel("mean reward of the answers", fontsize=_LABEL_POINTS)
    axes.set_ylabel("questioner's reward", fontsize=_LABEL_POINTS)
    _add_legend(axes)


def _draw_table(axes: Axes, table: Mapping[str, Any], groups: Sequence[Mapping]) -> None:
    """Draw means with intervals, one line per row: before and after training, for each group."""
    rows, several = table["rows"], len(groups) > 1
    kinds = [(g, when) for g in range(len(groups)) for when in (0, 1)]
    for place, (g, when) in enumerate(kinds):
        cells = [(y, row["cells"][g][when]) for y, row in enumerate(rows)]
        points = [(y + (place + 1) / (len(kinds) + 1) - 0.5, *cell) for y, cell in cells if cell]
        if not points:
            continue
        heights, means, lows, highs, _ = zip(*points, strict=True)
        name = f"{groups[g]['name']}: " if several else ""
        # Several groups have a color each, and hollow circles before training.
        color = _COLORS[g % len(_COLORS)] if several else (_BEFORE, _AFTER)[when]
        axes.errorbar(
            means,
            heights,
            xerr=[_differences(means, lows), _differences(highs, means)],
            fmt="o",
            markersize=3,
            markerfacecolor="white" if several and not when else color,
            elinewidth=1,
            color=color,
            label=_plain(name + ("before", "after")[when]),
        )
    axes.set_yticks(range(len(rows)), list(map(_row_name, rows)), fontsize=_SMALL_POINTS)
    axes.set_ylim(len(rows) - 0.4, -0.6)  # first row at the top
    axes.set_xlabel("mean over questions, with 95 % intervals", fontsize=_LABEL_POINTS)
    # Beside the plot: intervals may be anywhere in it.
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1, 1),
        handlelength=1.5,
        fontsize=_SMALL_POINTS,
        frameon=False,
    ).set_in_layout(False)


def _differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    # Mean and end are rounded separately, so their difference may be just below 0.
    return [max(0.0, a - b) for a, b in zip(left, right, strict=True)]


def _plain(text: str) -> str:
    """Escape "$" (math in matplotlib) and replace "_" (a leading one would hide a label).

    Control characters and surrogates, which a font does not have, become their escapes.
    """
    text = printable(text[:_LABEL_CHARACTERS])
    return text.replace("$", r"\$").lstrip("_").replace("_", " ")
