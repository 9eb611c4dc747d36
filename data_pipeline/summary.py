"""Summary of a build for the console: what was read, skipped, kept and removed, and why."""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from data_pipeline.records import Count, place_name

# Skipped files, or rows, that the console names per reason. report.html names more.
NAMED = 3
# Stages that remove whole documents. The last one tells how many documents were kept.
_OF_DOCUMENTS = ("read", "dedup", "decontaminate")
_OF_PIECES = ("cut", "cluster", "tasks")
_ROW = re.compile(r"#\d{9}$")  # end of a row's place (records.Document)

StageCounts = Mapping[str, Sequence[Count]]  # by name of the stage, in the order of the stages


def kept_documents(counts: StageCounts) -> int:
    """Return the number of documents that filter, dedup and decontamination leave."""
    last_stage = [stage for stage in _OF_DOCUMENTS if stage in counts][-1:]
    return _total(counts, last_stage, "documents kept")


def skipped_files(counts: StageCounts) -> int:
    """Return the number of files that could not be read."""
    return _reasons(counts, ["read"], "files skipped: ").total()


def summary_lines(
    counts: StageCounts, skipped: Iterable[Mapping[str, Any]], clusters: Mapping[str, int]
) -> list[str]:
    """Return the lines about a finished build.

    Args:
      counts: counts of all stages.
      skipped: records of the table read/removed: files, row groups, rows and documents.
      clusters: task -> number of clusters.
    """
    names = _first_names(skipped)
    lines: list[str] = []
    for unit in ("files", "row groups", "rows"):
        reasons = _reasons(counts, ["read"], f"{unit} skipped: ")
        if unit == "files":
            read = _total(counts, ["read"], "files read")
            lines.append(f"files      {read:,} read, {reasons.total():,} skipped")
        elif reasons:
            lines.append(f"{unit:<10} {reasons.total():,} skipped")
        for reason, number in sorted(reasons.items()):
            first = names[unit == "rows", reason]
            unnamed = f" and {number - len(first):,} more" if number > len(first) else ""
            lines.append(f"           {number:,} {reason}: {', '.join(first)}{unnamed}")
    read = _total(counts, ["read"], "documents read")
    lines.append(f"documents  {read:,} read, {kept_documents(counts):,} kept")
    lines += _removals(counts, _OF_DOCUMENTS)
    pieces, clustered = (
        _total(counts, ["cut"], "pieces made"),
        _total(counts, ["tasks"], "documents"),
    )
    lines.append(f"pieces     {pieces:,} made, {clustered:,} in clusters")
    lines += _removals(counts, _OF_PIECES)
    numbers = ", ".join(f"{number:,} {task}" for task, number in clusters.items())
    return [*lines, f"clusters   {numbers}"]


def _removals(counts: StageCounts, stages: Sequence[str]) -> list[str]:
    removed = _reasons(counts, stages, "documents removed: ")
    return [f"           {number:,} {reason}" for reason, number in sorted(removed.items())]


def _total(counts: StageCounts, stages: Sequence[str], what: str) -> int:
    """Return the number of an event in these stages, summed over all sources."""
    return sum(
        count["number"]
        for stage in stages
        for count in counts.get(stage, ())
        if count["what"] == what
    )


def _reasons(counts: StageCounts, stages: Sequence[str], prefix: str) -> Counter[str]:
    """Return reason -> number of the events "PREFIX REASON" in these stages."""
    numbers: Counter[str] = Counter()
    for stage in stages:
        for count in counts.get(stage, ()):
            if count["what"].startswith(prefix):
                numbers[count["what"].removeprefix(prefix)] += count["number"]
    return numbers


def _first_names(skipped: Iterable[Mapping[str, Any]]) -> dict[tuple[bool, str], list[str]]:
    """Return (is a row, reason) -> the first NAMED names in alphabetical order."""
    # At most NAMED + 1 names per reason are in memory: a build may skip millions of rows.
    names: dict[tuple[bool, str], list[str]] = defaultdict(list)
    for record in skipped:
        first = names[bool(_ROW.search(record["place"])), record["reason"]]
        name = place_name(record)
        if name not in first:  # a file may have several bad row groups
            bisect.insort(first, name)
        del first[NAMED:]
    return names
