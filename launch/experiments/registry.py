"""The papers' tables and figures, from the files papers/*.toml.

A file has these keys, with the fields of the dataclasses below:

    title          name of the paper
    [values]       texts for {NAME} in runs and evaluations, which models and rows can change
    [models]       a PaperModel for each model
    [runs]         a RunTemplate for each training run, by the name of the run's folder
    [evaluations]  command lines, by the name of their output
    [columns]      a ColumnEntry for each column, by title
    [experiments]  an ExperimentEntry for each table and figure, PAPER-table-N or PAPER-figure-N

In runs, {model} and {repository} stand for the key and the repository of the row's model. In
command lines, {policy} stands for the flag of the row's policy, {inputs} and {folder} for the
folders of models and data, and of the row.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence

from spell_jax.launch.experiments import typed_toml
from spell_jax.launch.experiments.experiment import (
    STEPS,
    Column,
    EvaluationCommand,
    Experiment,
    FirstOf,
    Mean,
    MedianLength,
    MetricMean,
    NumberSource,
    PaperRun,
    Score,
    TableRow,
    VerdictShare,
)

FOLDER = pathlib.Path(__file__).with_name("papers")
FILES = ("spell.toml", "eapo.toml", "reconstruction.toml")
_STEPS = {"first": False, "last": True}
# Names that stand for other texts: in runs, in command lines, and names that printing replaces.
_RUN_NAMES, _COMMAND_NAMES, _PRINTED = ("model", "repository"), ("policy",), ("inputs", "folder")


@dataclasses.dataclass(frozen=True)
class PaperModel:
    """A model of a paper.

    Attributes:
      repository: name of its Hugging Face repository, without the owner.
      topology: smallest v5p slice that holds its runs, as launch.plan estimates.
      fields: config fields of its runs.
      values: texts for {NAME}.
      policy: flags that name a model at an endpoint to spell_jax.evaluate; "": --policy with the
        folder of its repository.
    """

    repository: str
    topology: str = "v5p-8"
    fields: dict[str, str | int | float | bool] = dataclasses.field(default_factory=dict)
    values: dict[str, str] = dataclasses.field(default_factory=dict)
    policy: str = ""


@dataclasses.dataclass(frozen=True)
class RunTemplate:
    """A training run, for any model.

    Attributes:
      like: run above it in the file; its config, inputs and fields hold unless they are changed.
      config: config file.
      inputs: paths below `inputs` of its models and data, by config field.
      fields: values of other config fields.
    """

    like: str = ""
    config: str = ""
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)
    fields: dict[str, str | int | float | bool] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ColumnEntry:
    """A column: a score, a metric, a verdict's share, a combination of columns, or a title alone.

    Attributes:
      title: title; "": the column's key.
      score: benchmark, column of several benchmarks, or "average", of `evaluation`.
      evaluation: name of the evaluation, of a score, a verdict or a length.
      max_input: prompt limit of the score.
      attempts: k of pass@k.
      metric: name in metrics.jsonl.
      steps: "first" or "last" steps, over which the metric is averaged.
      count: number of these steps; of validations a run has few.
      scale: factor of the metric, such as 100 for percent.
      length: benchmark, for the median length of its prompts (spell_jax.evaluate --lengths).
      verdict: verdict of a judgment, `evaluation` (spell_jax.evaluate --judgment).
      mean: columns above it in the file.
      first_of: columns above it in the file; the first with a number counts.
    """

    title: str = ""
    score: str = ""
    evaluation: str = ""
    max_input: int = 0
    attempts: int = 1
    metric: str = ""
    steps: str = "last"
    count: int = STEPS
    scale: float = 1.0
    length: str = ""
    verdict: str = ""
    mean: tuple[str, ...] = ()
    first_of: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RowEntry:
    """A row of a table, or a curve of a figure.

    Attributes:
      name: name, as in the paper.
      paper: the paper's numbers, one for each column; "-" is a number that its text does not have.
      model: model; "": the experiment's.
      run: run that trains the measured policy; "": the model before training.
      folder: folder of its results without a run; "": the model's repository.
      evaluations: evaluations that measure it; none: the experiment's.
      values: texts for {NAME}.
      reason: reason that it cannot be run here.
    """

    name: str
    paper: str = ""
    model: str = ""
    run: str = ""
    folder: str = ""
    evaluations: tuple[str, ...] = ()
    values: dict[str, str] = dataclasses.field(default_factory=dict)
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class ExperimentEntry:
    """A table or a figure.

    Attributes:
      subject: subject.
      paper: the paper's main numbers.
      tiny: numbers of the same comparison at tiny scale, with a link.
      note: departures, or the reason that there is no command.
      model: model of rows that name none.
      columns: keys of the columns.
      evaluations: evaluations of rows that name none.
      curves: metrics that the figure shows over the steps.
      rows: rows; none: there is no command.
    """

    subject: str
    paper: str = ""
    tiny: str = ""
    note: str = ""
    model: str = ""
    columns: tuple[str, ...] = ()
    evaluations: tuple[str, ...] = ()
    curves: tuple[str, ...] = ()
    rows: tuple[RowEntry, ...] = ()


@dataclasses.dataclass(frozen=True)
class PaperFile:
    """A file of papers/; the module's docstring explains the attributes."""

    title: str
    values: dict[str, str]
    models: dict[str, PaperModel]
    runs: dict[str, RunTemplate]
    evaluations: dict[str, str]
    columns: dict[str, ColumnEntry]
    experiments: dict[str, ExperimentEntry]


# ----------------------------------------------------------------------------------------- Reading


# Cached, because every table, test and page asks for all three files.
@functools.cache
def papers() -> Mapping[str, tuple[Experiment, ...]]:
    """Read the experiments of all papers, by the paper's title."""
    return dict(read_paper(FOLDER / name) for name in FILES)


def experiments() -> dict[str, Experiment]:
    """Return the experiments of all papers, by name."""
    return {experiment.name: experiment for group in papers().values() for experiment in group}


def find(name: str) -> Experiment:
    """Return the experiment of that name; the ValueError of an unknown one lists the known ones."""
    by_name = experiments()
    if name not in by_name:
        raise ValueError(f"experiment = {name!r}: must be one of {', '.join(by_name)}")
    return by_name[name]


def read_paper(path: pathlib.Path) -> tuple[str, tuple[Experiment, ...]]:
    """Read a file's title and experiments, tables first; ValueError with file, key and remedy."""
    file = typed_toml.read(PaperFile, path)
    try:
        return file.title, _PaperReader(file).experiments()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class _PaperReader:
    """The experiments of a file; what an entry names must be in the file."""

    def __init__(self, file: PaperFile) -> None:
        self._file = file
        _check_names(file.values, _PRINTED, "values")
        for key, model in file.models.items():
            place = typed_toml.join("models", key)
            self._check_values(model.values, place)
            _check_names({"policy": model.policy}, _PRINTED, place)
        names = (*_COMMAND_NAMES, *_PRINTED, *file.values)
        _check_names(file.evaluations, names, "evaluations")
        # In the file's order: a run may be like a run above it, and a mean may have columns above
        # it. So there are no cycles to look for.
        self._runs: dict[str, RunTemplate] = {}
        for key, template in file.runs.items():
            self._runs[key] = self._inherited_run(key, template)
        self._columns: dict[str, Column] = {}
        for key, entry in file.columns.items():
            source = self._source(entry, typed_toml.join("columns", key))
            self._columns[key] = Column(entry.title or key, source)

    def experiments(self) -> tuple[Experiment, ...]:
        """Make the experiments, tables before figures, by number."""
        entries = self._file.experiments
        return tuple(self._experiment(key, entries[key]) for key in sorted(entries, key=_order))

    def _check_values(self, values: Mapping[str, str], place: str) -> None:
        for key, value in values.items():
            if key not in self._file.values:
                remedy = f"must be one of [values]: {', '.join(self._file.values)}"
                raise typed_toml.error(typed_toml.join(f"{place}.values", key), value, remedy)
        _check_names(values, _PRINTED, f"{place}.values")

    def _inherited_run(self, key: str, run: RunTemplate) -> RunTemplate:
        """Fill in what a run takes from the run that it is like."""
        place = typed_toml.join("runs", key)
        names = (*_RUN_NAMES, *self._file.values)
        _check_names({"name": key, "config": run.config}, names, place)
        _check_names(run.inputs, names, f"{place}.inputs")
        if run.like:
            base = typed_toml.look_up(self._runs, run.like, f"{place}.like")
            inputs, fields = base.inputs | run.inputs, base.fields | run.fields
            run = RunTemplate("", run.config or base.config, inputs, fields)
        if not run.config:
            raise ValueError(f"{place}.config: is missing, and the run is like no other")
        return run

    def _source(self, entry: ColumnEntry, place: str) -> NumberSource | None:
        """Make what reads a column's number; None if nothing measures it."""
        kinds = (
            *(entry.score, entry.metric, entry.verdict, entry.length),
            *(entry.mean, entry.first_of),
        )
        if sum(map(bool, kinds)) > 1:
            raise ValueError(
                f"{place}: must have one of score, metric, verdict, length, mean and first_of"
            )
        if entry.mean:
            return Mean(self._column_sources(entry.mean, f"{place}.mean"))
        if entry.first_of:
            return FirstOf(self._column_sources(entry.first_of, f"{place}.first_of"))
        if entry.metric:
            is_last = typed_toml.look_up(_STEPS, entry.steps, f"{place}.steps")
            return MetricMean(entry.metric, is_last, entry.scale, entry.count)
        if entry.score or entry.verdict or entry.length:
            typed_toml.look_up(self._file.evaluations, entry.evaluation, f"{place}.evaluation")
        if entry.verdict:
            return VerdictShare(entry.evaluation, entry.verdict)
        if entry.length:
            return MedianLength(entry.evaluation, entry.length)
        if entry.score:
            return Score(entry.evaluation, entry.score, entry.max_input, entry.attempts)
        return None

    def _column_sources(self, keys: Sequence[str], place: str) -> tuple[NumberSource, ...]:
        columns = [typed_toml.look_up(self._columns, key, place) for key in keys]
        sources = tuple(column.source for column in columns if column.source)
        if len(sources) < len(columns):
            raise typed_toml.error(place, list(keys), "must be columns that are measured")
        return sources

    def _experiment(self, name: str, entry: ExperimentEntry) -> Experiment:
        place = typed_toml.join("experiments", name)
        columns = tuple(
            typed_toml.look_up(self._columns, key, f"{place}.columns") for key in entry.columns
        )
        rows = tuple(
            self._row(entry, row, f"{place}.rows[{number}]")
            for number, row in enumerate(entry.rows)
        )
        if not rows and not entry.note:
            raise ValueError(f"{place}: must have rows, or a note that says why it has none")
        subject, paper, tiny, note = (
            " ".join(text.split()) for text in (entry.subject, entry.paper, entry.tiny, entry.note)
        )
        return Experiment(name, subject, columns, rows, entry.curves, paper, tiny, note)

    def _row(self, experiment: ExperimentEntry, row: RowEntry, place: str) -> TableRow:
        paper = _numbers(row.paper, len(experiment.columns), f"{place}.paper")
        if row.reason:
            return TableRow(row.name, paper, reason=row.reason)
        name = row.model or experiment.model
        model = typed_toml.look_up(self._file.models, name, f"{place}.model")
        self._check_values(row.values, place)
        values = self._file.values | model.values | row.values
        values |= {"model": name, "repository": model.repository}
        run = self._run(row.run, model, values, f"{place}.run") if row.run else None
        published = model.policy or f"--policy={{inputs}}/models/{model.repository}"
        values["policy"] = "--workdir={folder}" if run else published
        commands = tuple(
            self._command(key, values, f"{place}.evaluations")
            for key in row.evaluations or experiment.evaluations
        )
        if not run and not commands:
            raise ValueError(f"{place}: must have a run, evaluations or a reason")
        return TableRow(row.name, paper, run, row.folder or model.repository, commands)

    def _run(self, key: str, model: PaperModel, values: Mapping[str, str], place: str) -> PaperRun:
        template = typed_toml.look_up(self._runs, key, place)
        inputs = {field: _fill(path, values) for field, path in template.inputs.items()}
        fields = {f: str(value) for f, value in (template.fields | model.fields).items()}
        config = _fill(template.config, values)
        return PaperRun(_fill(key, values), config, inputs, fields, model.topology)

    def _command(self, key: str, values: Mapping[str, str], place: str) -> EvaluationCommand:
        text = typed_toml.look_up(self._file.evaluations, key, place)
        match = re.fullmatch(r"\s*python -m ([\w.]+)(\s.*)?", _fill(text, values), re.DOTALL)
        if not match:
            raise typed_toml.error(f"evaluations.{key}", text, "must be python -m MODULE FLAGS")
        return EvaluationCommand(key, tuple((match[2] or "").split()), match[1])


def _order(name: str) -> tuple[bool, int]:
    match = re.fullmatch(r"[a-z]+-(table|figure)-(\d+)", name)
    if not match:
        raise ValueError(
            f"{typed_toml.join('experiments', name)}: must be PAPER-table-N or PAPER-figure-N"
        )
    return match[1] == "figure", int(match[2])


def _numbers(text: str, count: int, place: str) -> tuple[float | None, ...]:
    """Parse "45.8 - 63.1"; a dash is a number that the paper's text does not have."""
    words = text.split() or ["-"] * count
    if len(words) != count or not all(re.fullmatch(r"-|\d+(\.\d+)?", word) for word in words):
        raise typed_toml.error(place, text, f"must be {count} numbers or dashes, one for a column")
    return tuple(None if word == "-" else float(word) for word in words)


def _check_names(texts: Mapping[str, str], names: Sequence[str], place: str) -> None:
    """Check the {NAME}s of texts by key."""
    for key, text in texts.items():
        for match in re.finditer(r"\{(\w*)\}|[{}]", text):
            if match[1] not in names:
                known_names = ", ".join(f"{{{name}}}" for name in names)
                raise typed_toml.error(
                    typed_toml.join(place, key), text, f"{match[0]} must be one of {known_names}"
                )


def _fill(text: str, values: Mapping[str, str]) -> str:
    """Replace each {NAME} by its value; names that printing replaces stay."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), text)
