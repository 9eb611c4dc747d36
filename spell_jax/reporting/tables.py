"""Tables of a run's evaluation: evaluation.json, read and printed.

evaluation.json holds {"before": table, "after": table}, with
table = {section: {row: {column: [mean, half_width]}}}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

EVALUATION_FILE = "evaluation.json"

# Mean and half the width of its 95 % interval, both in the metric's own unit.
Cell = Sequence[float]
Table = Mapping[str, Mapping[str, Mapping[str, Cell]]]


def read_evaluation(workdir: str | epath.Path) -> tuple[Table, Table] | None:
    """Reads the (before, after) tables of WORKDIR/evaluation.json; None until both exist.

    Raises:
      ValueError: if the file has another form than the module docstring says; names the place.
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
    """Formats two tables as aligned text.

    Each cell is a line `before -> after  difference`, in the order in which the names first appear.
    A cell that one side lacks is shown as "-", without a difference.
    """
    lines: list[str] = []
    for section in merged_keys(before, after):
        old_rows, new_rows = before.get(section, {}), after.get(section, {})
        cells = [
            (row, column, old_rows.get(row, {}).get(column), new_rows.get(row, {}).get(column))
            for row in merged_keys(old_rows, new_rows)
            for column in merged_keys(old_rows.get(row, {}), new_rows.get(row, {}))
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


def merged_keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Returns the keys of both mappings, each once, those of `first` first."""
    return list(dict.fromkeys([*first, *second]))


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


def _cell_text(cell: Cell | None) -> str:
    return "-" if cell is None else f"{cell[0]:.3f} ± {cell[1]:.3f}"


def _difference_text(old: Cell | None, new: Cell | None) -> str:
    return "" if old is None or new is None else f"{new[0] - old[0]:+.3f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pads columns to equal width: the first two flush left, numbers flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if index < 2 else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
