"""The figure of README.md: held-out accuracy over the updates of runs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Annotated, Any

from matplotlib.figure import Figure

from benchmarks.base import BenchmarkCommand
from spell_jax.runtime.log.metrics import read_metrics

FOLDER = "docs/measurements"
METRICS = ("eval/responder", "eval/all")  # of generated worlds, and of given questions


@dataclasses.dataclass
class CurveBenchmark(BenchmarkCommand):
    """Held-out accuracy of a run by step, and a figure with all curves that were saved before.

    --workdir=RUN draws the run's curve beside the kept ones. With --save=FILE, a new file
    docs/measurements/curve_NAME.json, the curve is kept for every later call. A run on given
    questions has its evaluations before the first and after the last update, too, and the 95 %
    interval as a band.
    """

    workdir: Annotated[str, "folder of a run; none: only the curves kept in --folder"] = ""
    label: Annotated[str, "name of the curve; none: the folder's name"] = ""
    metric: Annotated[str, "metric of metrics.jsonl; none: the held-out accuracy"] = ""
    folder: Annotated[str, "folder of the kept curves, curve_*.json"] = FOLDER
    out: Annotated[str, "picture to write (.png or .svg)"] = "docs/images/held_out.png"

    def run(self) -> dict[str, Any]:
        curves = read_curves(pathlib.Path(self.folder))
        curve: dict[str, Any] = {}
        if self.workdir:
            self.label = self.label or pathlib.Path(self.workdir).name
            curve = read_curve(pathlib.Path(self.workdir), self.metric)
            curves[self.label] = curve
        plot(curves, pathlib.Path(self.out))
        return curve


def read_curve(workdir: pathlib.Path, metric: str = "") -> dict[str, Any]:
    """Return steps and accuracies of a run; if it was evaluated, also the interval's half width."""
    lines, half = list(read_metrics(workdir)), None
    # A run has one of the two metrics. The last name stands in the error if it has neither.
    metric_names = [metric] if metric else METRICS
    name = next(
        (name for name in metric_names if any(name in line for line in lines)), metric_names[-1]
    )
    points = {line["step"]: line[name] for line in lines if name in line}
    file = workdir / "evaluation.json"
    # Validations during a run write metrics; the evaluations before and after write this file.
    if name == "eval/all" and file.exists():
        reports = json.loads(file.read_text(encoding="utf-8"))
        last = lines[-1]["step"] if lines else 0
        for step, moment in ((0, "before"), (last, "after")):
            if moment in reports:
                points[step], low, high = next(iter(reports[moment].values()))["all"][""]
                half = (high - low) / 2
    if not points:
        raise ValueError(f"workdir = {str(workdir)!r}: no step has {' or '.join(metric_names)}")
    steps, accuracy = zip(*sorted(points.items()), strict=True)
    return {"steps": steps, "accuracy": accuracy, "half": half}


def read_curves(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Read the values of all curve_*.json of a folder, by label."""
    files = sorted(folder.glob("curve_*.json"))
    values = [json.loads(file.read_text(encoding="utf-8"))["values"] for file in files]
    return {curve["label"]: curve for curve in values}


def plot(curves: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    """Plot curves with the fields steps, accuracy and, if known, half (interval) to a file."""
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for label, curve in curves.items():
        (line,) = axes.plot(curve["steps"], curve["accuracy"], marker=".", label=label)
        if half := curve.get("half"):
            low, high = ([y + side * half for y in curve["accuracy"]] for side in (-1, 1))
            axes.fill_between(curve["steps"], low, high, color=line.get_color(), alpha=0.15)
    # Accuracy from 0 to 1: an axis cut to the data would make small gains look large.
    axes.set(xlabel="updates", ylabel="held-out accuracy", xlim=(0, None), ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
