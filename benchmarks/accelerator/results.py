"""The file of results of an accelerator measurement, its table, and its page of numbers.

A line of DIR/results.jsonl is one case: {"section", "case", "seconds", "machine"} and either
"numbers" or "error". A later line of the same case replaces an earlier one.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.accelerator.section import FAULT, Numbers

FILE = "results.jsonl"
_MOST_SHOWN = 8  # numbers of a case in the table
NOT_RUN = "not run: the minutes were over"


class Results:
    """Lines of a results file, by section and case."""

    def __init__(self, folder: pathlib.Path):
        """Read the file of a folder, if there is one; a line cut off by a full disk is dropped."""
        self._path = folder / FILE
        self._lines: dict[tuple[str, str], dict[str, Any]] = {}
        if self._path.exists():
            for text in self._path.read_text(encoding="utf-8").split("\n"):
                try:
                    line = json.loads(text)
                except ValueError:
                    continue
                self._lines[line["section"], line["case"]] = line

    def add(self, line: dict[str, Any]) -> None:
        """Append a line and wait until it is on the disk."""
        self._lines[line["section"], line["case"]] = line
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def numbers(self) -> dict[str, dict[str, Numbers]]:
        """Numbers by section and case, without cases that failed."""
        by_section: dict[str, dict[str, Numbers]] = {}
        for (section, case), line in self._lines.items():
            if "numbers" in line:
                by_section.setdefault(section, {})[case] = line["numbers"]
        return by_section

    def finished(self, section: str) -> list[str]:
        """Cases of a section that have numbers without a fault."""
        cases = self.numbers().get(section, {})
        return [case for case, numbers in cases.items() if FAULT not in numbers]

    def failures(self, sections: Sequence[str]) -> list[str]:
        """One line for each case of the sections that failed, was not run, or has a fault."""
        return [
            f"{section} {case}: {reason}"
            for (section, case), line in self._lines.items()
            if section in sections and (reason := _reason(line))
        ]

    def table(self, sections: Sequence[str]) -> Iterator[str]:
        """One line of text for each case, in the order of the sections."""
        for section in sections:
            for of_section, case in self._lines:
                if of_section == section:
                    yield self.row(section, case)

    def row(self, section: str, case: str) -> str:
        """The table's line of a case."""
        line = self._lines[section, case]
        content = _short(line.get("numbers", {})) or _reason(line)
        return f"{section:14} {case:34} {line['seconds']:6.1f} s  {content}"

    def measurement(self, command: str) -> dict[str, Any]:
        """Content of a file of docs/measurements (launch/measurements.py)."""
        machines = [line["machine"] for line in self._lines.values() if line.get("machine")]
        machine: Mapping[str, Any] = machines[-1] if machines else {}
        # Runs in the same folder may be of several commits; a line says of which it is.
        commits = dict.fromkeys(machine["commit"] for machine in machines)
        values: dict[str, Any] = {
            section: {_key(case): numbers for case, numbers in cases.items()}
            for section, cases in self.numbers().items()
        }
        failed = {
            f"{section} {case}": _reason(line)
            for (section, case), line in self._lines.items()
            if _reason(line)
        }
        versions = ", ".join(
            f"{name} {machine[name]}" for name in ("python", "jax", "driver") if name in machine
        )
        return {
            "kind": "measured",
            "commit": ", ".join(commits),
            "machine": f"{machine.get('devices')} x {machine.get('device')}, {versions}",
            "command": command,
            "values": values | {"failed": failed},
        }


def _reason(line: Mapping[str, Any]) -> str:
    """Text of a line's failure, or ""."""
    return line.get("error") or line.get("numbers", {}).get(FAULT, "")


def _short(numbers: Mapping[str, Any]) -> str:
    """The first numbers of a case, with four digits."""
    parts = [
        f"{name} {value:.4g}"
        for name, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    fault = f"  FAULT: {numbers[FAULT]}" if FAULT in numbers else ""
    return ", ".join(parts[:_MOST_SHOWN]) + fault


def _key(case: str) -> str:
    """A case's name as a part of a number's name: letters, digits, `_` and `-`."""
    return "".join(letter if letter.isalnum() or letter in "_-" else "_" for letter in case)
