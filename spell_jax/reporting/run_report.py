"""The report of one or several runs: pictures, printed tables and a page.

1. metrics.jsonl holds one line a step. The first part of a metric's name ("rollout", "train",
   "eval") selects its picture, WORKDIR/plots/rollout.png and so on; names without a prefix go into
   other.png.
2. In a picture, "train/grad_norm" has a panel of its own; "rollout/reward/questioner" and
   "rollout/reward/responder" are two lines in the panel "reward". A metric that the run has not
   measured has no panel.
3. evaluation.json, if the run has one (tables.py), becomes WORKDIR/plots/evaluation.png and a
   printed table.
4. WORKDIR/report.html shows all of this on one page, with episodes to browse (page.py), and each of
   its plots is a picture in WORKDIR/plots too (plots.py).
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spell_jax.reporting.page import COMPARISON, PAGE, RunData, write_page
from spell_jax.reporting.plots import draw_page
from spell_jax.reporting.tables import before_after_table, merged_keys, read_evaluation
from spell_jax.runtime import entry
from spell_jax.runtime.metrics import METRICS_FILE, read_metrics

PLOTS_FOLDER = "plots"

# Series name -> [(step, value), ...]
Panel = dict[str, list[tuple[int, float]]]

_NO_PREFIX = "other"
_PANEL_COLUMNS = 3
_PANEL_SIZE = (4.2, 2.8)  # inches


def report_runs(workdirs: Sequence[epath.Path]) -> None:
    """Plot and print the measurements of runs.

    The page of one run is WORKDIR/report.html. That of several is comparison.html in the first
    workdir, with its pictures in plots/comparison.

    Raises:
      FileNotFoundError, ValueError: see read_run; nothing is written then.
    """
    runs = [read_run(workdir) for workdir in workdirs]
    entry.setup_done()
    for run in runs:
        paths = draw_run(run)
        if run.evaluation:
            print(before_after_table(*run.evaluation), end="\n\n")
        print(*paths, sep="\n")
    first, is_one = runs[0].workdir, len(runs) == 1
    page = first / (PAGE if is_one else COMPARISON)
    overview = write_page(runs, page)
    folder = first / PLOTS_FOLDER if is_one else first / PLOTS_FOLDER / "comparison"
    print(f"{len(draw_page(overview, folder))} plots of the page in {folder}\n{page}")


def plot_run(workdir: str | epath.Path) -> list[epath.Path]:
    """Draws the run in `workdir`: read_run, then draw_run."""
    return draw_run(read_run(workdir))


def read_run(workdir: str | epath.Path) -> RunData:
    """Reads a run's metrics and evaluation.

    Raises:
      FileNotFoundError: if there is no metrics.jsonl.
      ValueError: if metrics.jsonl is empty or damaged, or evaluation.json has another form than
        tables.py says.
    """
    workdir = epath.Path(workdir)
    records = read_metrics(workdir)
    if not records:
        raise ValueError(f"{workdir / METRICS_FILE}: no line yet; the run has not ended a step")
    return RunData(workdir, records, read_evaluation(workdir))


def draw_run(run: RunData) -> list[epath.Path]:
    """Draws a run's metrics and evaluation.

    Returns:
      The PNG files in WORKDIR/plots: one per metric prefix, and evaluation.png if the run has an
      evaluation.
    """
    folder = run.workdir / PLOTS_FOLDER
    folder.mkdir(exist_ok=True)
    paths = []
    for prefix, panels in sorted(_panels(run.records).items()):
        paths.append(_draw(folder / f"{prefix}.png", panels, _draw_series))
    if run.evaluation is not None:
        before, after = run.evaluation
        sections = {
            section: (before.get(section, {}), after.get(section, {}))
            for section in merged_keys(before, after)
        }
        paths.append(_draw(folder / "evaluation.png", sections, _draw_section))
    return paths


def _panels(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Panel]]:
    """Groups metrics as prefix -> panel -> series -> points; null values are gaps."""
    prefixes: dict[str, dict[str, Panel]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        for name, value in record.items():
            if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            prefix, *middle, last = name.split("/") if "/" in name else (_NO_PREFIX, name)
            panel, series = ("/".join(middle), last) if middle else (last, last)
            prefixes[prefix][panel].setdefault(series, []).append((record["step"], value))
    return prefixes


def _draw(path: epath.Path, panels: Mapping[str, Any], draw_panel: Any) -> epath.Path:
    """Writes one picture of small panels, in the order of their names."""
    columns = min(_PANEL_COLUMNS, len(panels)) or 1
    rows = math.ceil(len(panels) / columns) or 1
    width, height = _PANEL_SIZE
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    for index, (title, content) in enumerate(sorted(panels.items()), 1):
        axes = figure.add_subplot(rows, columns, index)
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        draw_panel(axes, content)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110)
    path.write_bytes(picture.getvalue())
    return path


def _draw_series(axes: Axes, panel: Panel) -> None:
    for series, points in panel.items():
        steps, values = zip(*points, strict=True)
        axes.plot(
            steps, values, label=series, linewidth=1.2, marker="." if len(points) < 30 else ""
        )
    axes.set_xlabel("step", fontsize=7)
    if len(panel) > 1:
        axes.legend(fontsize=6)


def _draw_section(axes: Axes, tables: tuple[Mapping, Mapping]) -> None:
    """Draws means with their intervals, a line per cell, before above after."""
    labels = [
        (row, column)
        for row in merged_keys(*tables)
        for column in merged_keys(*(table.get(row, {}) for table in tables))
    ]
    for table, name, shift in zip(tables, ("before", "after"), (-0.15, 0.15), strict=True):
        found = [
            (height + shift, table[row][column])
            for height, (row, column) in enumerate(labels)
            if column in table.get(row, {})
        ]
        heights = [height for height, _ in found]
        means = [mean for _, (mean, _) in found]
        half_widths = [half_width for _, (_, half_width) in found]
        axes.errorbar(means, heights, xerr=half_widths, fmt="o", markersize=3, label=name)
    axes.set_yticks(range(len(labels)), [f"{row} {column}" for row, column in labels], fontsize=6)
    axes.set_ylim(len(labels) - 0.4, -0.6)  # the first label is at the top
    axes.legend(fontsize=6)
