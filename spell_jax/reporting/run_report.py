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
from spell_jax.reporting.plots import draw_others, draw_page
from spell_jax.reporting.tables import (
    before_after_table,
    read_evaluation,
    read_validation,
)
from spell_jax.runtime import entry
from spell_jax.runtime.files import paths
from spell_jax.runtime.log.metrics import METRICS_FILE, read_metrics

PLOTS_FOLDER = "plots"
_OTHER = "other"  # folder of metrics without a panel, in the folder of plots


def report_runs(workdirs: Sequence[epath.Path], x: str = "step") -> None:
    """Write and print the report of runs.

    WORKDIR/report.html has the evaluation, which is also printed, curves, and episodes to browse
    (page.py). WORKDIR/plots has each plot of the page as a picture, those of metrics without a
    panel in plots/other. The page of several runs is comparison.html in the first workdir, with its
    pictures in plots/comparison. The page's curves are plotted over `x`, one of page.X_AXES. Before
    anything is written: errors as in read_run, and ValueError if `x` has no values or a file or
    folder of the report cannot be written.
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
    for output in (first, first / PLOTS_FOLDER, folder, folder / _OTHER):
        paths.make_output_folder(output)
    entry.setup_done()
    for run in runs:
        if run.evaluation:
            print(f"{run.workdir}\n{before_after_table(*run.evaluation)}", end="\n\n")
    if table := paired.table(workdirs):
        print(table, end="\n\n")
    overview = write_page(runs, page, x=x)
    pictures = [*draw_page(overview, folder), *draw_others(overview, folder / _OTHER)]
    print(f"{len(pictures)} plots of the page in {folder}\n{page}")


def plot_run(workdir: str | epath.Path) -> list[epath.Path]:
    """Draw a run's panels and evaluation into WORKDIR/plots; return the pictures.

    Raises as read_run.
    """
    run = read_run(workdir)
    return draw_page(make_overview([run], [Episodes()]), run.workdir / PLOTS_FOLDER)


def read_run(workdir: str | epath.Path) -> RunData:
    """Read a run's metrics and evaluation.

    FileNotFoundError without metrics.jsonl; ValueError if it is empty or damaged, or if
    evaluation.json has another form than tables.py says.
    """
    workdir = epath.Path(workdir)
    records = read_metrics(workdir)
    if not records:
        raise ValueError(f"{workdir / METRICS_FILE}: no line yet; the run has not ended a step")
    return RunData(workdir, records, read_evaluation(workdir), read_validation(workdir))
