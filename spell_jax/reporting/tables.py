"""Tables of a run's evaluation: evaluation.json, read, compared and printed.

evaluation.json holds {"before": table, "after": table, "validation": numbers}, with
table = {section: {row: {column: [mean, low, high]}}}: means over questions with the ends of their
95 % intervals. "validation" has the numbers of the first validation, before training:
{metric: [mean, questions]}, with 0 questions where the metric is no share of right answers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from spell_jax.runtime.files.jsonl import read_json
from spell_jax.runtime.finite import LARGEST_FLOAT32, is_finite

EVALUATION_FILE = "evaluation.json"
VALIDATION = "validation"

Table = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]


def read_evaluation(workdir: str | epath.Path) -> tuple[Table, Table] | None:
    """Read the (before, after) tables of WORKDIR/evaluation.json; None until both exist.

    ValueError names the place where the form differs from the form in the module docstring.
    """
    path = epath.Path(workdir) / EVALUATION_FILE
    document = read_json(path) if path.exists() else {}
    # The run has not ended: it writes the table "after" last.
    if not {"before", "after"} <= set(document):
        return None
    before, after = (
        _parse_table(document[name], f"{path}: {name}", depth=3) for name in ("before", "after")
    )
    return before, after


def _parse_table(value: Any, place: str, depth: int) -> Any:
    """Check a table, or a part of it at this depth from its cells; return it."""
    if depth:
        if not isinstance(value, dict):
            raise ValueError(f"{place}: want an object, got {json.dumps(value)[:60]}")
        return {key: _parse_table(item, f"{place}/{key}", depth - 1) for key, item in value.items()}
    cell = list(value) if isinstance(value, list) else []
    is_cell = len(cell) in (2, 3) and all(is_finite(n, LARGEST_FLOAT32) for n in cell)
    # Runs of older versions have half the width of a normal interval.
    if is_cell and len(cell) == 2:
        cell = [cell[0], cell[0] - cell[1], cell[0] + cell[1]]
    if not is_cell or not cell[1] <= cell[0] <= cell[2]:
        raise ValueError(
            f"{place}: want [mean, low, high] with low <= mean <= high, got "
            f"{json.dumps(value)[:60]}"
        )
    return cell


def read_validation(workdir: str | epath.Path) -> dict[str, tuple[float, int]]:
    """Read {metric: (mean, questions)} of the validation before training; {} if there is none."""
    path = epath.Path(workdir) / EVALUATION_FILE
    cells = read_json(path).get(VALIDATION, {}) if path.exists() else {}
    is_right = isinstance(cells, dict) and all(
        isinstance(cell, list)
        and len(cell) == 2
        and is_finite(cell[0], LARGEST_FLOAT32)
        and type(cell[1]) is int
        and cell[1] >= 0
        for cell in cells.values()
    )
    if not is_right:
        raise ValueError(f"{path}: {VALIDATION}: want {{metric: [mean, questions]}}")
    return {metric: (mean, questions) for metric, (mean, questions) in cells.items()}


def compare_tables(
    groups: Sequence[Sequence[int]], runs: Sequence[tuple[Table, Table] | None]
) -> list[dict[str, Any]]:
    """Make the evaluation tables of groups of runs: {"title", "rows"}, one per section.

    `groups` are indices into `runs`, the (before, after) tables of each run. A row is {"name":
    [row, column], "cells"} with one pair [before, after] per group, each [mean, low, high, runs] or
    None. The ends of several runs are the lowest and the highest end of their intervals.
    """
    # Dicts as ordered sets: runs may lack rows, and the table has the rows of all runs in the order
    # of the first run with each row.
    sections: dict[str, dict[str, dict[str, None]]] = {}
    for table in (table for pair in runs if pair for table in pair):
        for section, rows in table.items():
            for row, columns in rows.items():
                sections.setdefault(section, {}).setdefault(row, {}).update(dict.fromkeys(columns))

    def cell(members: Sequence[int], when: int, section: str, row: str, column: str) -> Any:
        pairs = [pair for i in members if (pair := runs[i])]
        values = [pair[when].get(section, {}).get(row, {}).get(column) for pair in pairs]
        values = [value for value in values if value is not None]
        if not values:
            return None
        means = [mean for mean, *_ in values]
        # A few seeds are no sample for an interval: the ends hold what every seed measured.
        ends = min(low for _, low, _ in values), max(high for *_, high in values)
        return [*map(six_digits, (statistics.fmean(means), *ends)), len(values)]

    return [
        {
            "title": section,
            "rows": [
                {
                    "name": [row, column],
                    "cells": [
                        [cell(members, when, section, row, column) for when in (0, 1)]
                        for members in groups
                    ],
                }
                for row, columns in rows.items()
                for column in columns
            ],
        }
        for section, rows in sections.items()
    ]


def six_digits(value: float) -> float:
    # Finer than a pixel of any plot, in half the characters of a float64 on the page.
    return float(f"{value:.6g}")


def before_after_table(before: Table, after: Table) -> str:
    """Format two tables as aligned text, a cell per line; "-" for a cell that one side lacks.

    A cell is a mean with its 95 % interval, or the mean alone of values that are all equal.
    """
    sections = []
    for table in compare_tables([[0]], [(before, after)]):
        lines = [("", "", "before", "", "after", "")]
        for row in table["rows"]:
            old, new = row["cells"][0]
            texts = [_format_cell(cell) for cell in (old, new)]
            difference = f"{new[0] - old[0]:+.3f}" if old and new else ""
            lines.append((*row["name"], texts[0], "->", texts[1], difference))
        sections.append("\n".join([table["title"], *align(lines)]))
    return "\n\n".join(sections)


def _format_cell(cell: Sequence[float] | None) -> str:
    if cell is None:
        return "-"
    mean, low, high, _ = cell
    # Equal values say nothing about their spread, and a guess's expectation has none.
    return f"{mean:.3f}" + (f" ({low:.3f} to {high:.3f})" if low < high else "")


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as indented lines: two columns flush left, all further columns flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{text:<{w}}" for text, w in zip(row[:2], widths, strict=False)]
        cells += [f"{text:>{w}}" for text, w in zip(row[2:], widths[2:], strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
