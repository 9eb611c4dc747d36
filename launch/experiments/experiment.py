"""Experiments of the papers: rows to train and evaluate, columns, the paper's numbers.

1. An experiment is a table or a figure. Its rows are trained policies (`PaperRun`), other policies
   that are only evaluated, or rows that cannot be run here, with the reason.
2. All files are below two folders: models and data below `inputs`, and a folder for each row, the
   workdir of its run, below the experiment's workdir. A run of several experiments has the same
   folder in all, so it is trained once.
3. A column reads its number from the files in a row's folder; None if they are missing.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

from etils import epath

from spell_jax.evaluation import judgments, lengths
from spell_jax.evaluation.runner import SUMMARY
from spell_jax.runtime.files.jsonl import MALFORMED, read_json
from spell_jax.runtime.finite import is_finite
from spell_jax.runtime.log.metrics import METRICS_FILE, read_metrics

MODELS, DATA, BENCHMARKS = "models", "data", "benchmarks"  # folders below `inputs`
STEPS = 10  # first or last steps of a run that a curve's number averages by default


class PaperRun(NamedTuple):
    """A training run.

    Attributes:
      name: name of its workdir.
      config: config file.
      inputs: paths below `inputs` of its models and data, by config field.
      fields: values of other config fields, as texts; $NAME is an environment variable.
      topology: smallest v5p slice that holds it, as launch.plan estimates.
    """

    name: str
    config: str
    inputs: Mapping[str, str]
    fields: Mapping[str, str] = {}
    topology: str = "v5p-8"

    def flags(self, workdir: str, inputs: str) -> list[str]:
        """Return the flags of `python -m spell_jax.train`, for a folder in `workdir`."""
        paths = {field: join(inputs, path) for field, path in self.inputs.items()}
        changes = [f"--config.{field}={value}" for field, value in {**paths, **self.fields}.items()]
        return [f"--config={self.config}", f"--workdir={join(workdir, self.name)}", *changes]

    def with_variables(self, override_fields: Collection[str] = ()) -> PaperRun:
        """Return the run with the values of its environment variables.

        A field of `override_fields` keeps its text. ValueError if a variable has no value.
        """
        values = {
            field: value.removeprefix("$")
            for field, value in self.fields.items()
            if value.startswith("$") and field not in override_fields
        }
        for field, variable in values.items():
            if not os.environ.get(variable):
                raise ValueError(
                    f"{field} = '${variable}': must have a value, for {self.name}; export "
                    f"{variable}=http://HOST/v1, or give --config.{field}"
                )
        filled_fields = {field: os.environ[variable] for field, variable in values.items()}
        return self._replace(fields={**self.fields, **filled_fields})


class EvaluationCommand(NamedTuple):
    """A command that measures a row.

    Attributes:
      name: name of its output, in the row's folder.
      flags: flags; {inputs} and {folder} stand for the folders of models and data, and of the row.
      module: module that runs.
    """

    name: str
    flags: tuple[str, ...]
    module: str = "spell_jax.evaluate"


class TableRow(NamedTuple):
    """A row of a table, or a curve of a figure.

    Attributes:
      name: name, as in the paper.
      paper: the paper's number for each column; None: not in its text.
      run: run that trains the measured policy; None: no training.
      folder: name of the row's folder, if there is no run.
      evaluations: commands that measure it.
      reason: reason that it cannot be run here.
    """

    name: str
    paper: tuple[float | None, ...]
    run: PaperRun | None = None
    folder: str = ""
    evaluations: tuple[EvaluationCommand, ...] = ()
    reason: str = ""

    @property
    def place(self) -> str:
        return self.run.name if self.run else self.folder


class MeasuredNumber(NamedTuple):
    """A number, and what its evaluation lacks.

    Attributes:
      value: number, as the paper prints it.
      unjudged: answers without the verdict of a judge.
      left_out: questions without a reply, which the number leaves out.
    """

    value: float
    unjudged: int = 0
    left_out: int = 0


class NumberSource(Protocol):
    """A number in the files of a row's folder."""

    def read(self, folder: epath.Path) -> MeasuredNumber | None: ...


class Column(NamedTuple):
    """A column of a table; without a source nothing measures it yet."""

    title: str
    source: NumberSource | None = None


class Experiment(NamedTuple):
    """A table or a figure.

    Attributes:
      name: PAPER-table-N or PAPER-figure-N.
      title: subject.
      columns: columns.
      rows: rows; none: the experiment has no command.
      curves: metrics that the figure shows over the steps.
      paper: the paper's main numbers.
      tiny: numbers of the same comparison at tiny scale, with a link.
      note: departures, or the reason that there is no command.
    """

    name: str
    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[TableRow, ...] = ()
    curves: tuple[str, ...] = ()
    paper: str = ""
    tiny: str = ""
    note: str = ""

    @property
    def runs(self) -> list[PaperRun]:
        """Runs of all rows, each once."""
        # Rows that measure one policy in several ways share its run.
        return list({row.run.name: row.run for row in self.rows if row.run}.values())


def join(folder: str, path: str) -> str:
    return f"{folder.rstrip('/')}/{path}"


# ----------------------------------------------------------------------------------------- Sources


class Score(NamedTuple):
    """A score in percent of spell_jax.evaluate: of a benchmark, a column of several, or "average".

    Attributes:
      evaluation: name of the evaluation.
      name: name in its summary.
      max_input: prompt limit.
      attempts: k of pass@k.
    """

    evaluation: str
    name: str
    max_input: int
    attempts: int = 1

    def read(self, folder: epath.Path) -> MeasuredNumber | None:
        path = folder / self.evaluation / SUMMARY
        if not path.exists():
            return None
        summary = read_json(path)
        try:
            rows = [row for row in summary["rows"] if row["max_input"] == self.max_input]
            if not rows:
                return None
            row = rows[0]
            scores = {"average": row["average"], **row["columns"], **row["benchmarks"]}
            value = scores.get(self.name, {}).get(f"pass@{self.attempts}")
            if value is None:
                return None
            missing = (self._count(row, kind) for kind in ("unjudged", "left_out"))
            return MeasuredNumber(float(100 * value["mean"]), *missing)
        except MALFORMED as error:
            raise ValueError(f"{path}: not a summary of an evaluation ({error!r})") from error

    def _count(self, row: Mapping[str, Any], kind: str) -> int:
        """Return the number of answers or questions that the score lacks, `kind` of the summary."""
        # A benchmark of a shared column counts its own; columns count for all their benchmarks.
        if self.name in row["benchmarks"]:
            return row["benchmarks"][self.name].get(kind, 0)
        by_column = row.get(kind, {})
        return sum(by_column.values()) if self.name == "average" else by_column.get(self.name, 0)


class Mean(NamedTuple):
    """The mean of several numbers, None if a number is missing."""

    sources: tuple[NumberSource, ...]

    def read(self, folder: epath.Path) -> MeasuredNumber | None:
        # A mean of fewer benchmarks would not compare with the paper's mean.
        numbers = [source.read(folder) for source in self.sources]
        present_numbers = [number for number in numbers if number is not None]
        if len(present_numbers) < len(numbers):
            return None
        values, unjudged, left_out = zip(*present_numbers, strict=True)
        return MeasuredNumber(statistics.fmean(values), sum(unjudged), sum(left_out))


class MetricMean(NamedTuple):
    """The mean of a run's metric over the first or last steps that have it.

    Attributes:
      metric: name in metrics.jsonl.
      is_last: whether the last steps count, else the first.
      scale: factor, such as 100 for percent.
      count: number of steps.
    """

    metric: str
    is_last: bool = True
    scale: float = 1.0
    count: int = STEPS

    def read(self, folder: epath.Path) -> MeasuredNumber | None:
        if not (folder / METRICS_FILE).exists():
            return None
        metrics: list[Any] = [record.get(self.metric) for record in read_metrics(folder)]
        # Steps without the metric, such as steps between two validations, do not count.
        values = [value for value in metrics if is_finite(value)]
        window = values[-self.count :] if self.is_last else values[: self.count]
        return MeasuredNumber(self.scale * statistics.fmean(window)) if window else None


class VerdictShare(NamedTuple):
    """The share in percent of a verdict in an output of spell_jax.evaluate --judgment.

    Attributes:
      evaluation: name of the evaluation.
      verdict: name of the verdict, as in judgments.VERDICTS.
    """

    evaluation: str
    verdict: str

    def read(self, folder: epath.Path) -> MeasuredNumber | None:
        path = folder / self.evaluation / judgments.RESULT
        if not path.exists():
            return None
        result = read_json(path)
        try:
            share = result["shares"].get(self.verdict)
            missing = int(result["malformed"] + result["unanswered"])
            return None if share is None else MeasuredNumber(float(100 * share), missing)
        except MALFORMED as error:
            raise ValueError(f"{path}: not the result of a judgment ({error!r})") from error


class MedianLength(NamedTuple):
    """The median length in tokens of a benchmark's prompts (spell_jax.evaluate --lengths)."""

    evaluation: str
    benchmark: str

    def read(self, folder: epath.Path) -> MeasuredNumber | None:
        path = folder / self.evaluation / lengths.RESULT
        if not path.exists():
            return None
        try:
            return MeasuredNumber(float(read_json(path)[self.benchmark]["median"]))
        except MALFORMED as error:
            raise ValueError(f"{path}: not lengths of prompts ({error!r})") from error


class FirstOf(NamedTuple):
    """The first of several numbers that a row has."""

    sources: tuple[NumberSource, ...]

    def read(self, folder: epath.Path) -> MeasuredNumber | None:
        numbers = (source.read(folder) for source in self.sources)
        return next((number for number in numbers if number is not None), None)
