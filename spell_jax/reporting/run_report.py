"""The report of one or several runs: pictures per metric prefix, printed tables and a page."""

from __future__ import annotations

from collections.abc import Sequence

from etils import epath

from spell_jax.reporting import paired
from spell_jax.reporting.episodes import Episodes
from spell_jax.reporting.page import (
    COMPARISON,
    PAGE,
    RunData,
    check_axis,
    make_overview,
    write_page,
)
from spell_jax.reporting.plots import draw_page, draw_run
from spell_jax.reporting.tables import before_after_table, read_evaluation
from spell_jax.runtime import entry
from spell_jax.runtime.files import paths
from spell_jax.runtime.log.metrics import METRICS_FILE, read_metrics

PLOTS_FOLDER = "plots"


def report_runs(workdirs: Sequence[epath.Path], x: str = "step") -> None:
    """Write and print the report of runs.

    WORKDIR/plots gets a picture per metric prefix ("rollout", "train", "eval") and a picture of the
    evaluation, which is also printed. WORKDIR/report.html shows the same with episodes to browse
    (page.py), and plots/ has each plot of the page as a picture. The page of several runs is
    comparison.html in the first workdir, with its pictures in plots/comparison. The page's curves
    are plotted over `x`, one of page.X_AXES. Before anything is written: errors as in read_run, and
    ValueError if `x` has no values or a file or folder of the report cannot be written.
    """
    # Everything is read and checked first. A mistake must not leave half a report, nor appear only
    # after the plots of the first runs.
    runs = [read_run(workdir) for workdir in workdirs]
    for run in runs:
        check_axis(run, x)
    first, is_one = runs[0].workdir, len(runs) == 1
    page = first / (PAGE if is_one else COMPARISON)
    folder = first / PLOTS_FOLDER if is_one else first / PLOTS_FOLDER / "comparison"
    paths.require(page, "a file")
    for output in (first, *(run.workdir / PLOTS_FOLDER for run in runs), folder):
        paths.make_output_folder(output)
    entry.setup_done()
    for run in runs:
        pictures = _draw_run(run)
        if run.evaluation:
            print(before_after_table(*run.evaluation), end="\n\n")
        print(*pictures, sep="\n")
    if table := paired.table(workdirs):
        print(table, end="\n\n")
    overview = write_page(runs, page, x=x)
    print(f"{len(draw_page(overview, folder))} plots of the page in {folder}\n{page}")


def plot_run(workdir: str | epath.Path) -> list[epath.Path]:
    """Draw a run's metrics and evaluation; return the pictures. Raises as read_run."""
    return _draw_run(read_run(workdir))


def _draw_run(run: RunData) -> list[epath.Path]:
    return draw_run(make_overview([run], [Episodes()]), run.workdir / PLOTS_FOLDER)


def read_run(workdir: str | epath.Path) -> RunData:
    """Read a run's metrics and evaluation.

    FileNotFoundError without metrics.jsonl; ValueError if it is empty or damaged, or if
    evaluation.json has another form than tables.py says.
    """
    workdir = epath.Path(workdir)
    records = read_metrics(workdir)
    if not records:
        raise ValueError(f"{workdir / METRICS_FILE}: no line yet; the run has not ended a step")
    return RunData(workdir, records, read_evaluation(workdir))
