"""Measured numbers of the documentation: held in docs/measurements, copied into the pages.

    python -m docs.tools.measurements [--check]

A file NAME.json has the fields kind ("measured", "compiled only" or "estimated"), commit, machine,
command and values. `python -m benchmarks NAME --save=FILE` writes one. The file pages.toml lists
texts with such numbers, for README.md, pages of docs/, the papers' tables and the notebooks of
studies (launch/experiments). In `takes {demo.minutes} minutes`, the name in braces stands for the
value `minutes` of demo.json. The page must contain each text once; line breaks do not count. This
command writes the values into the pages, with as many decimals as a page has there; with --check it
changes nothing, prints the numbers that differ, and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from spell_jax.launch.experiments import typed_toml
from spell_jax.runtime.finite import is_finite

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "measurements"
KINDS = ("measured", "compiled only", "estimated")
_FIELDS = {"kind", "commit", "machine", "command", "values"}
_NUMBER = r"([+-]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+))"
_NAME = re.compile(r"\{([\w-]+(?:\.[\w-]+)+)\}")


def read(folder: pathlib.Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Read a folder's files by name; ValueError if a file lacks a field or has another kind."""
    measurements = {}
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}, must be JSON") from error
        if not isinstance(content, dict) or set(content) != _FIELDS or content["kind"] not in KINDS:
            raise ValueError(f"{path}: must have the fields {sorted(_FIELDS)}, kind of {KINDS}")
        measurements[path.stem] = content
    return measurements


def pages() -> list[pathlib.Path]:
    """List README.md, the pages of the documentation and the notebooks of studies."""
    notebooks = sorted((ROOT / "launch" / "experiments").glob("*/*.md"))
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *notebooks]


def read_templates(folder: pathlib.Path = FOLDER) -> dict[str, tuple[str, ...]]:
    """Read pages.toml: {path of a page below the root: texts with names in braces}.

    Raises ValueError if it is no TOML, or has other values than arrays of texts.
    """
    return typed_toml.read(dict[str, tuple[str, ...]], folder / "pages.toml")


def refresh(
    page: str, templates: Iterable[str], measurements: Mapping[str, Mapping[str, Any]]
) -> str:
    """Replace the numbers of a page by measured numbers.

    Args:
      page: text of the page.
      templates: texts that the page contains once each, with names of values in braces for numbers.
      measurements: content of the measurement files, by name.

    Returns:
      The page. Numbers keep their decimals, sign and leading zero.

    Raises:
      ValueError: a text has no name, is not in the page, or more than once; or a name has no value.
    """
    numbers: dict[tuple[int, int], str] = {}
    errors = []
    for template in templates:
        if not _NAME.search(template):
            errors.append(f"{template!r} has no number, must have a {{FILE.KEY}}")
            continue
        matches = list(pattern(template).finditer(page))
        if len(matches) != 1:
            errors.append(f"{template!r} is {len(matches)} times in the page, must be once")
            continue
        for group, name in enumerate(_NAME.findall(template), start=1):
            old = matches[0][group]
            numbers[matches[0].span(group)] = _format(_value(name, measurements), old)
    if errors:
        raise ValueError("\n".join([*errors, "Adapt the page or docs/measurements/pages.toml."]))
    for (start, end), number in sorted(numbers.items(), reverse=True):
        page = page[:start] + number + page[end:]
    return page


def pattern(template: str) -> re.Pattern:
    """Compile a text with names in braces: names match a number, spaces any white space."""
    words = []
    for word in template.split():
        literals = _NAME.split(word)[::2]
        words.append(_NUMBER.join(map(re.escape, literals)))
    return re.compile(r"\s+".join(words))


def names(templates: Iterable[str]) -> Iterator[str]:
    """Yield the names of values in texts."""
    for template in templates:
        yield from _NAME.findall(template)


def _value(name: str, measurements: Mapping[str, Mapping[str, Any]]) -> float:
    file, *keys = name.split(".")
    value: Any = measurements.get(file, {}).get("values", {})
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not is_finite(value):
        raise ValueError(f"{name}: no such number in docs/measurements/{file}.json")
    return value


def _format(value: float, like: str) -> str:
    """Format a number like the text `like`: the same decimals, plus sign and leading zero."""
    decimals = len(like.partition(".")[2])
    text = f"{value:{'+' if like.startswith('+') else ''},.{decimals}f}"
    return re.sub(r"^([+-]?)0\.", r"\1.", text) if re.match(r"[+-]?\.", like) else text


def refresh_pages(root: pathlib.Path, *, is_check: bool) -> bool:
    """Write the measured numbers into the pages below `root`, and print every difference.

    Mistakes in files and pages are printed, too. `is_check` writes nothing.

    Returns:
      Whether there was no mistake, and with `is_check` no difference.
    """
    folder = root / "docs" / "measurements"
    try:
        measurements, templates = read(folder), read_templates(folder)
    except (OSError, ValueError) as error:
        print(error)
        return False
    is_right = True
    for name, page_templates in templates.items():
        path = root / name
        try:
            old = path.read_text(encoding="utf-8")
            new = refresh(old, page_templates, measurements)
        except (OSError, ValueError) as error:
            print(f"{name}: {error}")
            is_right = False
            continue
        for before, after in zip(old.splitlines(), new.splitlines(), strict=True):
            if before != after:
                is_right = is_right and not is_check
                print(f"{name}: {before!r} -> {after!r}")
        if not is_check and old != new:
            path.write_text(new, encoding="utf-8")
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m docs.tools.measurements",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="change nothing, print differences")
    return int(not refresh_pages(ROOT, is_check=parser.parse_args().check))


if __name__ == "__main__":
    sys.exit(main())
