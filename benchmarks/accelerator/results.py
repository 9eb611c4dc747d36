"""The file of results of an accelerator measurement, its table, and its page of numbers.

A line of DIR/results.jsonl is one case: {"section", "case", "seconds", "machine"} and either
"numbers" or "error". A later line of the same case replaces an earlier one.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.accelerator.section import FAULT, Numbers
from spell_jax.runtime.files import jsonl

FILE = "results.jsonl"
_MOST_SHOWN = 8  # numbers of a case in the table
NOT_RUN = "not run: the minutes were over"
START = "start"  # stands for a section's cases before the section has listed them
# Fields in which two machines must agree, or their numbers may not stand beside each other.
_SAME = ("device", "devices", "tiny")


class Results:
    """Lines of a results file, by section and case.

    Attributes:
      fault: what ended the run before its time, or "".
    """

    def __init__(self, folder: pathlib.Path, fault: str = ""):
        """Read the file of a folder, if there is one; damaged lines are left out."""
        self.fault = fault
        self._path = folder / FILE
        self._lines: dict[tuple[str, str], dict[str, Any]] = {}
        if self._path.exists():
            for text in self._path.read_text(encoding="utf-8", errors="replace").split("\n"):
                if line := _parse(text):
                    self._keep(line)

    def _keep(self, line: dict[str, Any]) -> None:
        section = line["section"]
        if line["case"] != START:  # the section has started since
            self._lines.pop((section, START), None)
        self._lines[section, line["case"]] = line

    def add(self, line: dict[str, Any]) -> None:
        """Append a line and wait until it is on the disk."""
        self._keep(line)
        # On the disk before the next case begins, which may crash the machine.
        jsonl.append_records(self._path, [line])

    def other_machine(self, machine: Mapping[str, Any]) -> str:
        """Describe a machine of an earlier line that is not of this kind, or return ""."""
        for line in self._lines.values():
            earlier = line["machine"]
            if any(earlier[name] != machine[name] for name in _SAME if name in earlier):
                return f"{earlier['device']}{', --tiny' * earlier.get('tiny', False)}"
        return ""

    def numbers(self) -> dict[str, dict[str, Numbers]]:
        """Return the numbers by section and case, without cases that failed."""
        by_section: dict[str, dict[str, Numbers]] = {}
        for (section, case), line in self._lines.items():
            if "numbers" in line:
                by_section.setdefault(section, {})[case] = line["numbers"]
        return by_section

    def finished(self, section: str) -> list[str]:
        """List the cases of a section that have numbers without a fault."""
        cases = self.numbers().get(section, {})
        return [case for case, numbers in cases.items() if FAULT not in numbers]

    def failures(self, sections: Sequence[str]) -> list[str]:
        """List a line for each case of the sections that failed, has a fault, or was not run."""
        failures = [self.fault] if self.fault else []
        for section in sections:
            lines = [line for (of, _), line in self._lines.items() if of == section]
            if not lines:
                failures.append(f"{section}: not run")
            failures += [
                f"{section} {line['case']}: {reason}" for line in lines if (reason := _reason(line))
            ]
        return failures

    def table(self, sections: Sequence[str]) -> Iterator[str]:
        """Yield a line of text for each case, in the order of the sections."""
        for section in sections:
            for of_section, case in self._lines:
                if of_section == section:
                    yield self.row(section, case)

    def row(self, section: str, case: str) -> str:
        """Format a case as a line of the table."""
        line = self._lines[section, case]
        content = _short(line.get("numbers", {})) or _reason(line)
        return f"{section:14} {case:34} {line['seconds']:6.1f} s  {content}"

    def measurement(self, command: str) -> dict[str, Any]:
        """Make the content of a file of docs/measurements (docs/tools/measurements.py)."""
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


def _parse(text: str) -> dict[str, Any] | None:
    """Read a line of the file; None if it is damaged."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    kinds = {"section": str, "case": str, "seconds": int | float, "machine": dict}
    if not all(isinstance(line.get(name), kind) for name, kind in kinds.items()):
        return None
    is_result = isinstance(line.get("numbers"), dict) or isinstance(line.get("error"), str)
    # A line may be damaged, because the process was killed while it wrote.
    return line if is_result else None


def _reason(line: Mapping[str, Any]) -> str:
    """Return the text of a line's failure, or ""."""
    return line.get("error") or line.get("numbers", {}).get(FAULT, "")


def _short(numbers: Mapping[str, Any]) -> str:
    """Format the first numbers of a case, with four digits."""
    parts = [
        f"{name} {value:.4g}"
        for name, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    fault = f"  FAULT: {numbers[FAULT]}" if FAULT in numbers else ""
    return ", ".join(parts[:_MOST_SHOWN]) + fault


def _key(case: str) -> str:
    """Make a case's name a part of a number's name: letters, digits, `_` and `-`."""
    return "".join(letter if letter.isalnum() or letter in "_-" else "_" for letter in case)
