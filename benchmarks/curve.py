"""The figure of README.md: held-out accuracy over the updates of runs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Annotated, Any

from matplotlib.figure import Figure

from benchmarks.base import Benchmark
from spell_jax.runtime.metrics import read_metrics

FOLDER = "docs/measurements"


@dataclasses.dataclass
class Curve(Benchmark):
    """Held-out accuracy of a run by step, and a figure of all curves that were saved before.

    With --save=docs/measurements/curve_NAME.json the curve is kept, and is part of the figure of
    every later call. Without --workdir the figure has the kept curves alone.
    """

    workdir: Annotated[str, "folder of a run; none: only the curves kept in --folder"] = ""
    label: Annotated[str, "name of the curve"] = "run"
    metric: Annotated[str, "metric of metrics.jsonl that is plotted"] = "eval/responder"
    folder: Annotated[str, "folder of the kept curves, curve_*.json"] = FOLDER
    out: Annotated[str, "picture to write (.png or .svg)"] = "docs/images/held_out.png"

    def run(self) -> dict[str, Any]:
        curves = read_curves(pathlib.Path(self.folder))
        found: dict[str, Any] = {}
        if self.workdir:
            lines = [line for line in read_metrics(self.workdir) if self.metric in line]
            if not lines:
                raise ValueError(f"workdir = {self.workdir!r}: no step has {self.metric}")
            steps = [line["step"] for line in lines]
            found = {"steps": steps, "accuracy": [line[self.metric] for line in lines]}
            curves[self.label] = found
        plot(curves, pathlib.Path(self.out))
        return found


def read_curves(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The values of all curve_*.json of a folder, by label."""
    files = sorted(folder.glob("curve_*.json"))
    values = [json.loads(file.read_text(encoding="utf-8"))["values"] for file in files]
    return {one["label"]: one for one in values}


def plot(curves: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    """Writes a picture of curves with the fields steps, accuracy and, if known, half (interval)."""
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for label, curve in curves.items():
        (line,) = axes.plot(curve["steps"], curve["accuracy"], marker=".", label=label)
        if half := curve.get("half"):
            low, high = ([y + side * half for y in curve["accuracy"]] for side in (-1, 1))
            axes.fill_between(curve["steps"], low, high, color=line.get_color(), alpha=0.15)
    axes.set(xlabel="updates", ylabel="held-out accuracy", xlim=(0, None), ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
