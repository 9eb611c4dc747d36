"""Tables of a run's evaluation: evaluation.json, read, compared and printed.

evaluation.json holds {"before": table, "after": table}, with
table = {section: {row: {column: [mean, half_width]}}}. A half-width is half the 95 % interval, in
the metric's own unit.
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

Table = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]


def read_evaluation(workdir: str | epath.Path) -> tuple[Table, Table] | None:
    """Read the (before, after) tables of WORKDIR/evaluation.json; None until both exist.

    ValueError names the place where the form differs from the form in the module docstring.
    """
    path = epath.Path(workdir) / EVALUATION_FILE
    if not path.exists():
        return None
    document = read_json(path)
    # The run has not ended: it writes the table "after" last.
    if not {"before", "after"} <= set(document):
        return None
    for name in ("before", "after"):
        _check_table(document[name], f"{path}: {name}", depth=3)
    return document["before"], document["after"]


def _check_table(value: Any, place: str, depth: int) -> None:
    if depth:
        if not isinstance(value, dict):
            raise ValueError(f"{place}: want an object, got {json.dumps(value)[:60]}")
        for key, item in value.items():
            _check_table(item, f"{place}/{key}", depth - 1)
    elif not (
        isinstance(value, list)
        and len(value) == 2
        and all(is_finite(number, LARGEST_FLOAT32) for number in value)
        and value[1] >= 0
    ):
        raise ValueError(f"{place}: want [mean, half_width >= 0], got {json.dumps(value)[:60]}")


def compare_tables(
    groups: Sequence[Sequence[int]], runs: Sequence[tuple[Table, Table] | None]
) -> list[dict[str, Any]]:
    """Make the evaluation tables of groups of runs: {"title", "rows"}, one per section.

    `groups` are indices into `runs`, the (before, after) tables of each run. A row is {"name":
    [row, column], "cells"} with one pair [before, after] per group, each [mean, half_width, runs]
    or None. The half-width of several runs is half the range of their means.
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
        means = [mean for mean, _ in values]
        # A few seeds are no sample for a normal interval: the range says no more than what was
        # measured.
        half = values[0][1] if len(values) == 1 else (max(means) - min(means)) / 2
        return [six_digits(statistics.fmean(means)), six_digits(half), len(values)]

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
    """Format two tables as aligned text, a cell per line; "-" for a cell that one side lacks."""
    sections = []
    for table in compare_tables([[0]], [(before, after)]):
        lines = [("", "", "before", "", "after", "")]
        for row in table["rows"]:
            old, new = row["cells"][0]
            texts = [
                "-" if cell is None else f"{cell[0]:.3f} ± {cell[1]:.3f}" for cell in (old, new)
            ]
            difference = f"{new[0] - old[0]:+.3f}" if old and new else ""
            lines.append((*row["name"], texts[0], "->", texts[1], difference))
        sections.append("\n".join([table["title"], *align(lines)]))
    return "\n\n".join(sections)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as indented lines: two columns flush left, all further columns flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{text:<{w}}" for text, w in zip(row[:2], widths, strict=False)]
        cells += [f"{text:>{w}}" for text, w in zip(row[2:], widths[2:], strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
