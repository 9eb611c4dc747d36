"""Differences between two sets of answers to the same held-out questions, with paired intervals.

WORKDIR/held_out/before.jsonl and after.jsonl have a line for each answer of an evaluation
(algorithms/held_out.Evaluated). Two policies are compared question by question: the interval of
the mean difference is Newcombe's for scores of 0 and 1, else a bootstrap over the differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from spell_jax.reporting.tables import align
from spell_jax.runtime import intervals
from spell_jax.runtime.files.jsonl import read_records, write_records
from spell_jax.runtime.finite import LARGEST_FLOAT32, is_finite
from spell_jax.runtime.intervals import Estimate

FOLDER = "held_out"

Answers = Sequence[Mapping[str, Any]]


def write_answers(workdir: epath.Path, when: str, answers: Answers) -> None:
    """Write the answers of the evaluation `when`, "before" or "after"."""
    (workdir / FOLDER).mkdir(parents=True, exist_ok=True)
    write_records(workdir / FOLDER / f"{when}.jsonl", answers)


def read_answers(workdir: epath.Path, when: str) -> Answers:
    """Read the answers of the evaluation `when`; [] if the run has not written them."""
    path = workdir / FOLDER / f"{when}.jsonl"
    return read_records(path, _parse_answer)[0] if path.exists() else []


def _parse_answer(value: Any) -> Mapping[str, Any]:
    """Check a line of a file of answers; ValueError if it is not an answer."""
    is_answer = (
        isinstance(value, dict)
        and all(isinstance(value.get(name), str) for name in ("question", "reference", "answer"))
        and isinstance(value.get("documents"), int)
        and isinstance(value.get("scores"), dict)
        and all(is_finite(score, LARGEST_FLOAT32) for score in value["scores"].values())
    )
    if not is_answer:
        raise ValueError("must be an answer to a held-out question")
    return value


def difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Estimate the mean of second - first [N]."""
    # Paired: most questions are easy or hard for both policies, so differences vary less than
    # scores, and the interval is narrower than two separate intervals suggest.
    if intervals.is_binary(first) and intervals.is_binary(second):
        return intervals.paired_difference(first, second)
    gaps = [float(new - old) for old, new in zip(first, second, strict=True)]
    # A constant seed: the interval of two finished runs never changes.
    return intervals.resample(gaps, (0,))


def table(workdirs: Sequence[epath.Path]) -> str:
    """Format the paired differences of runs as aligned text; "" if there are none.

    Each run's answers after training are compared with its answers before, and with the answers of
    the first run after training, where both have the same questions. A line names each run without
    questions in common with the first run.
    """
    lines = [("", "", "first", "second", "difference", "95 % interval")]
    after = {workdir: read_answers(workdir, "after") for workdir in workdirs}
    for workdir in workdirs:
        name = workdir.name
        lines += _compare(f"{name}, before", read_answers(workdir, "before"), name, after[workdir])
    first, without = workdirs[0], []
    for second in workdirs[1:]:
        compared = _compare(first.name, after[first], second.name, after[second])
        lines += compared
        if not compared:
            without.append(f"{first.name} -> {second.name}: no held-out questions in common")
    table_lines = ["paired differences", *align(lines)] if len(lines) > 1 else []
    return "\n".join([*table_lines, *without])


def _compare(first_name: str, first: Answers, second_name: str, second: Answers) -> list[Any]:
    """Return the lines of a comparison; [] without answers or where the questions differ."""
    # Answers are compared by their place in the file, so the questions must be equal in the same
    # order.
    if not first or list(map(_question, first)) != list(map(_question, second)):
        return []
    # By number of documents, too: a gain on long contexts can hide a loss on short ones.
    lengths = sorted({answer["documents"] for answer in first})
    rows = {"all": range(len(first))}
    if len(lengths) > 1:
        rows |= {
            f"documents: {length}": [
                place for place, answer in enumerate(first) if answer["documents"] == length
            ]
            for length in lengths
        }
    lines = [(f"{first_name} -> {second_name}", "", "", "", "", "")]
    for row, places in rows.items():
        for measure in first[0]["scores"]:
            # An answer has only the measures that suit its question.
            pairs = [
                (first[place]["scores"][measure], second[place]["scores"][measure])
                for place in places
                if measure in first[place]["scores"]
            ]
            if pairs:
                old, new = np.mean(pairs, axis=0).tolist()
                gap = difference(*zip(*pairs, strict=True))
                # Equal differences of scores that are no shares say nothing about their spread.
                has_width = not math.isclose(gap.low, gap.high, abs_tol=1e-9)
                interval = f"{gap.low:+.3f} to {gap.high:+.3f}" if has_width else "-"
                lines.append(
                    (row, measure, f"{old:.3f}", f"{new:.3f}", f"{gap.mean:+.3f}", interval)
                )
    return lines


def _question(answer: Mapping[str, Any]) -> tuple[Any, ...]:
    return answer["question"], answer["documents"], answer["reference"]
