"""The printed forms of the papers' tables and figures: commands, numbers, overviews."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from etils import epath

from spell_jax.launch.experiments import registry
from spell_jax.launch.experiments.experiment import (
    BENCHMARKS,
    DATA,
    MODELS,
    Experiment,
    MeasuredNumber,
    TableRow,
    join,
)

# Mark of a number -> note below the table.
_NOTES = {
    "*": "\\* answers without a judge's verdict: the evaluation's folder says how many",
    "\N{DAGGER}": "\N{DAGGER} questions without a reply, left out: the folder lists them",
}
# Benchmarks of a family are read from one folder, so the overview lists the folder once.
_FAMILIES = ("helmet", "mrcr", "needle", "ruler")


def commands(experiment: Experiment, workdir: str, inputs: str) -> list[str]:
    """Return the command lines that train and measure all rows, each once."""
    lines = [_line("spell_jax.train", *run.flags(workdir, inputs)) for run in experiment.runs]
    for row in experiment.rows:
        places = {"inputs": inputs, "folder": join(workdir, row.place)}
        for evaluation in row.evaluations:
            lines.append(
                _line(evaluation.module, *(flag.format(**places) for flag in evaluation.flags))
            )
    if experiment.curves:
        folders = ",".join(join(workdir, run.name) for run in experiment.runs)
        lines.append(_line("spell_jax.report", f"--workdir={folders}"))
    # Several rows may evaluate the same policy with the same command.
    return list(dict.fromkeys(lines))


def unset_variables(lines: Sequence[str]) -> list[str]:
    """Return the environment variables in command lines that have no value, each once."""
    variables = dict.fromkeys(name for line in lines for name in re.findall(r"\$([A-Z_]+)", line))
    return [name for name in variables if not os.environ.get(name)]


def _line(module: str, *flags: str) -> str:
    quoted = [flag if re.fullmatch(r"[\w./:=,$+-]+", flag) else f'"{flag}"' for flag in flags]
    return " ".join(["python -m", module, *quoted])


def table(experiment: Experiment, workdir: str) -> str:
    """Format the rows as Markdown; a cell has the paper's number and the row's measured number.

    A star marks a number over answers that lack the verdict of a judge, a dagger a number without
    questions that lack a reply.
    """
    lines = [["paper / here", *(column.title for column in experiment.columns)]]
    lines.append(["---", *["---:"] * len(experiment.columns)])
    marks: set[str] = set()
    for row in experiment.rows:
        folder = epath.Path(workdir) / row.place
        here = [
            column.source.read(folder) if column.source and not row.reason else None
            for column in experiment.columns
        ]
        cells = [_cell(*pair) for pair in zip(row.paper, here, strict=True)]
        lines.append([f"{row.name} ({row.reason})" if row.reason else row.name, *cells])
        marks.update(mark for number in here if number for mark in _marks(number))
    notes = [note for mark, note in _NOTES.items() if mark in marks]
    return "\n\n".join(["\n".join(_markdown(line) for line in lines), *notes])


def _marks(number: MeasuredNumber) -> str:
    return "*" * bool(number.unjudged) + "\N{DAGGER}" * bool(number.left_out)


def _cell(paper: float | None, here: MeasuredNumber | None) -> str:
    text = "" if here is None else f"{here.value:.4g}{_marks(here)}"
    return f"{'' if paper is None else paper} / {text}".strip()


def _markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ---------------------------------------------------------------------------------------- Overview


def needs(row: TableRow, kind: str) -> Iterator[str]:
    """Yield the names in folder `kind` of `inputs` that the commands of a row read."""
    paths = list(row.run.inputs.values()) if row.run else []
    for evaluation in row.evaluations:
        flags = {
            name: value for name, _, value in (flag.partition("=") for flag in evaluation.flags)
        }
        if kind == BENCHMARKS and flags.get("--data", "").startswith("{inputs}"):
            folder = flags["--data"].removeprefix(f"{{inputs}}/{BENCHMARKS}").lstrip("/")
            yield from [folder] if folder else map(_family, flags["--benchmarks"].split(","))
        paths += [value.removeprefix("{inputs}/") for value in flags.values()]
    yield from (path.partition("/")[2] for path in paths if path.startswith(f"{kind}/"))


def _family(benchmark: str) -> str:
    """Return the family of a benchmark, or the benchmark's name if it has no family."""
    family = benchmark.partition("_")[0]
    return family if family in _FAMILIES else benchmark


def overview(experiments: Sequence[Experiment]) -> str:
    """Format two tables of a paper's experiments: the numbers, and the runs with their files."""
    numbers = [
        (
            f"`{experiment.name}`",
            experiment.title,
            experiment.paper,
            experiment.tiny,
            experiment.note,
        )
        for experiment in experiments
    ]
    runs = []
    for experiment in experiments:
        kinds = (MODELS, DATA, BENCHMARKS)
        files = [
            dict.fromkeys(n for row in experiment.rows for n in needs(row, kind)) for kind in kinds
        ]
        # All slices are v5p, so the number after "v5p-" orders them.
        slices = sorted({run.topology for run in experiment.runs}, key=lambda name: int(name[4:]))
        chips = " to ".join(dict.fromkeys((slices[0], slices[-1]))) if slices else ""
        if any(files):
            names = (", ".join(kind_files) for kind_files in files)
            runs.append((f"`{experiment.name}`", str(len(experiment.runs) or ""), chips, *names))
    return "\n\n".join(
        [
            _table(("name", "subject", "paper", "tiny scale", "notes"), numbers),
            _table(("name", "runs", "chips", "models", "data", "benchmarks"), runs),
        ]
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_markdown(cells) for cells in (heads, ["---"] * len(heads), *rows)]
    return "\n".join(re.sub(" +", " ", line) for line in lines)


def overviews() -> str:
    """Format the overviews of all papers, as the documentation's site has them."""
    parts = [
        f"## {paper}\n\n{overview(experiments)}" for paper, experiments in registry.papers().items()
    ]
    return "\n\n".join(parts)
