"""Measured numbers of the documentation: held in docs/measurements, copied into the pages.

    python -m launch.measurements [--check]

A file NAME.json has the fields kind ("measured", "compiled only" or "estimated"), commit, machine,
command and values. `python -m benchmarks NAME --save=FILE` writes one. In README.md, docs/*.md,
the papers' tables (launch/experiments/papers) and studies' notebooks (launch/experiments/notebooks)
a number that a comment follows, such as `.68<!--demo.after.12-->`, is the value `after.12` of
demo.json. This command writes the values into these files, with as many decimals as a file has
there; with --check it changes nothing, prints the numbers that differ, and exits with 1 if there
are any.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "measurements"
KINDS = ("measured", "compiled only", "estimated")
_FIELDS = {"kind", "commit", "machine", "command", "values"}
_NUMBER = re.compile(r"(?P<number>[+-]?(?:\d[\d,]*\.?\d*|\.\d+))(?P<mark><!--(?P<name>[\w.-]+)-->)")


def read(folder: pathlib.Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Read a folder's files by name; ValueError if a file lacks a field or has another kind."""
    measurements = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if set(content) != _FIELDS or content["kind"] not in KINDS:
            raise ValueError(f"{path}: must have the fields {sorted(_FIELDS)}, kind of {KINDS}")
        measurements[path.stem] = content
    return measurements


def pages() -> list[pathlib.Path]:
    """List README.md, the pages of the documentation and the notebooks of studies."""
    notebooks = sorted((ROOT / "launch" / "experiments").glob("notebooks/*.md"))
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *notebooks]


def marked_files() -> list[pathlib.Path]:
    """List the files with marked numbers: the pages, and the papers' tables."""
    return [*pages(), *sorted((ROOT / "launch" / "experiments" / "papers").glob("*.toml"))]


def refresh(text: str, measurements: Mapping[str, Mapping[str, Any]]) -> str:
    """Replace all marked numbers of a page by measured numbers; ValueError for an unknown name."""

    def write(match: re.Match) -> str:
        return _format(_value(match["name"], measurements), match["number"]) + match["mark"]

    return _NUMBER.sub(write, text)


def names(text: str) -> Iterator[str]:
    """Yield the names in the comments of a page."""
    return (match["name"] for match in _NUMBER.finditer(text))


def unmarked(text: str) -> str:
    """Remove the comments after the numbers of a text."""
    return _NUMBER.sub(lambda match: match["number"], text)


def _value(name: str, measurements: Mapping[str, Mapping[str, Any]]) -> float:
    file, *keys = name.split(".")
    value: Any = measurements.get(file, {}).get("values", {})
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(value, int | float):
        raise ValueError(f"<!--{name}-->: no such number in docs/measurements/{file}.json")
    return value


def _format(value: float, like: str) -> str:
    """Format a number like the text `like`: the same decimals, plus sign and leading zero."""
    decimals = len(like.partition(".")[2])
    text = f"{value:{'+' if like.startswith('+') else ''},.{decimals}f}"
    return re.sub(r"^([+-]?)0\.", r"\1.", text) if re.match(r"[+-]?\.", like) else text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, print differences")
    check = parser.parse_args().check
    measurements, differ = read(), 0
    for path in marked_files():
        old = path.read_text(encoding="utf-8")
        new = refresh(old, measurements)
        for before, after in zip(old.splitlines(), new.splitlines(), strict=True):
            if before != after:
                differ += 1
                print(f"{path.relative_to(ROOT)}: {before!r} -> {after!r}")
        if not check and old != new:
            path.write_text(new, encoding="utf-8")
    return int(check and differ > 0)


if __name__ == "__main__":
    sys.exit(main())
