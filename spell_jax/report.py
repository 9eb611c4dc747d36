"""What a run did, as a page, pictures and a table: python -m spell_jax.report --workdir=DIR

1. metrics.jsonl holds one line a step; the first part of a metric's name ("play", "train", "eval")
   says which picture it belongs to, DIR/plots/play.png and so on.
2. In a picture, "train/grad_norm" has a panel of its own; "rollout/reward/questioner" and
   "rollout/reward/responder" are two lines in the panel "reward". What a run has not measured is
   not drawn; names without a prefix are drawn in other.png.
3. evaluation.json, if the run has one, holds {"before": table, "after": table} with
   table = {section: {row: {column: [mean, half_width]}}}; it is drawn in DIR/plots/evaluation.png
   and printed.
4. DIR/report.html has all of this on one page, with episodes to browse (report_page.py), and each
   of its plots is a picture in DIR/plots (report_plots.py). Of several runs, --workdir=A,B,C, the
   page is A/comparison.html, and its pictures are in A/plots/comparison.
"""

import argparse
import io
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spell_jax.reporting.page import COMPARISON, PAGE, Measured, write_page
from spell_jax.reporting.plots import draw_page
from spell_jax.runtime import paths as folders
from spell_jax.runtime.metrics import METRICS_FILE, read_metrics

EVALUATION_FILE = "evaluation.json"
PLOTS_FOLDER = "plots"

# A mean and half the width of its 95 % interval, both in the metric's own unit.
Cell = Sequence[float]
Table = Mapping[str, Mapping[str, Mapping[str, Cell]]]
# Series name -> [(step, value), ...]
Panel = dict[str, list[tuple[int, float]]]

_NO_PREFIX = "other"
_PANEL_COLUMNS = 3
_PANEL_SIZE = (4.2, 2.8)  # inches


def plot_run(workdir: str | epath.Path) -> list[epath.Path]:
    """Draws what the run in `workdir` measured.

    Returns:
      The PNG files in WORKDIR/plots: one a metric prefix, and evaluation.png if there is an
      evaluation.json.

    Raises:
      FileNotFoundError: there is no metrics.jsonl.
      ValueError: it has no line or a damaged one, or evaluation.json is not of the form above.
    """
    workdir = epath.Path(workdir)
    records = read_metrics(workdir)
    if not records:
        raise ValueError(f"{workdir / METRICS_FILE}: no line yet; the run has not ended a step")
    evaluation = read_evaluation(workdir)
    folder = workdir / PLOTS_FOLDER
    folder.mkdir(exist_ok=True)
    paths = []
    for prefix, panels in sorted(_panels(records).items()):
        paths.append(_draw(folder / f"{prefix}.png", panels, _draw_series))
    if evaluation is not None:
        before, after = evaluation
        sections = {
            section: (before.get(section, {}), after.get(section, {}))
            for section in _merged_keys(before, after)
        }
        paths.append(_draw(folder / "evaluation.png", sections, _draw_section))
    return paths


def read_evaluation(workdir: str | epath.Path) -> tuple[Table, Table] | None:
    """The (before, after) tables of WORKDIR/evaluation.json, or None where one is not there yet.

    Raises:
      ValueError: the file is not of the form that this module's docstring gives; names the place.
    """
    path = epath.Path(workdir) / EVALUATION_FILE
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f'{path}: want an object with "before" and "after"')
    if not {"before", "after"} <= set(document):
        return None
    tables = []
    for name in ("before", "after"):
        _check_table(document[name], f"{path}: {name}", depth=3)
        tables.append(document[name])
    return tables[0], tables[1]


def before_after_table(before: Table, after: Table) -> str:
    """Two tables {section: {row: {column: (mean, half_width)}}} as aligned text.

    A line a cell: `before -> after  difference`, in the order in which the names first appear.
    A cell that one side lacks shows as "-", without a difference.
    """
    lines: list[str] = []
    for section in _merged_keys(before, after):
        old_rows, new_rows = before.get(section, {}), after.get(section, {})
        cells = [
            (row, column, old_rows.get(row, {}).get(column), new_rows.get(row, {}).get(column))
            for row in _merged_keys(old_rows, new_rows)
            for column in _merged_keys(old_rows.get(row, {}), new_rows.get(row, {}))
        ]
        texts = [
            (row, column, _cell_text(old), "->", _cell_text(new), _difference_text(old, new))
            for row, column, old, new in cells
        ]
        if lines:
            lines.append("")
        lines.append(section)
        lines += [f"  {line}" for line in _aligned([("", "", "before", "", "after", ""), *texts])]
    return "\n".join(lines)


def _panels(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Panel]]:
    """Prefix -> panel -> series -> points; null values are gaps."""
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
    """One picture of small panels, in the order of their names."""
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
    """Means with their intervals, a line a cell: before above after."""
    labels = [
        (row, column)
        for row in _merged_keys(*tables)
        for column in _merged_keys(*(table.get(row, {}) for table in tables))
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
    axes.set_ylim(len(labels) - 0.4, -0.6)  # from top to bottom
    axes.legend(fontsize=6)


def _check_table(value: Any, place: str, depth: int) -> None:
    if depth:
        if not isinstance(value, dict):
            raise ValueError(f"{place}: want an object, got {json.dumps(value)[:60]}")
        for key, item in value.items():
            _check_table(item, f"{place}/{key}", depth - 1)
    elif not (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(number, int | float) for number in value)
    ):
        raise ValueError(f"{place}: want [mean, half_width], got {json.dumps(value)[:60]}")


def _merged_keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*first, *second]))


def _cell_text(cell: Cell | None) -> str:
    return "-" if cell is None else f"{cell[0]:.3f} ± {cell[1]:.3f}"


def _difference_text(old: Cell | None, new: Cell | None) -> str:
    return "" if old is None or new is None else f"{new[0] - old[0]:+.3f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width: names (the first two) to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if index < 2 else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def main() -> None:
    """Draws and prints the runs of --workdir; one that cannot be shown ends with exit status 1."""
    parser = argparse.ArgumentParser(description="Draws and prints what runs measured.")
    parser.add_argument("--workdir", required=True, help="folder of the run, or A,B,... to compare")
    try:
        workdirs = map(folders.open_folder, parser.parse_args().workdir.split(","))
        runs = []
        for workdir in workdirs:
            paths = plot_run(workdir)
            runs.append(Measured(workdir, read_metrics(workdir), read_evaluation(workdir)))
            if evaluation := runs[-1].evaluation:
                print(before_after_table(*evaluation), end="\n\n")
            print(*paths, sep="\n")
        first, is_one = runs[0].workdir, len(runs) == 1
        page = first / (PAGE if is_one else COMPARISON)
        overview = write_page(runs, page)
        folder = first / PLOTS_FOLDER if is_one else first / PLOTS_FOLDER / "comparison"
        print(f"{len(draw_page(overview, folder))} plots of the page in {folder}\n{page}")
    except (FileNotFoundError, ImportError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
