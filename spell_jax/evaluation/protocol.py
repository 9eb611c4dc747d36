"""The paper's evaluation protocol (section 4.1, spec section 11) as pure functions.

Each question has n scores in [0, 1]. pass@1 is their mean, pass@k is `best_of`. A benchmark's score
is the mean over its questions, with a 95 % interval over questions. Table 1 gives the columns: the
three sets from LongBench share one. "Avg." is the mean of the columns; the mean of all benchmarks
is reported beside it.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from spell_jax.runtime import intervals
from spell_jax.runtime.intervals import Estimate

ATTEMPTS = (1, 2, 4, 8)  # k of pass@k, at most the number of samples

Columns = Mapping[str, Sequence[str]]  # title -> benchmarks that the column averages


def truncate(ids: np.ndarray, limit: int) -> np.ndarray:
    """Truncate token ids [P] in the middle to `limit`: keep the first limit // 2 and the last ones.

    Truncating to a limit and then to a smaller one equals truncating to the smaller one.
    """
    if len(ids) <= limit:
        return ids
    # Of an odd limit the extra token is at the end, as in the paper's code.
    return np.concatenate([ids[: limit // 2], ids[len(ids) - (limit - limit // 2) :]])


def best_of(scores: Sequence[float], k: int) -> float:
    """Return the best of k scores, averaged over all choices of k scores without replacement.

    If c of n scores are 1 and n - c are 0, this is Eq. 11: 1 - C(n - c, k) / C(n, k). Raises
    ValueError unless 1 <= k <= n.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"k = {k}: must be between 1 and the {n} scores of a question")
    # All choices are counted, so no sampling error is added. The paper's code samples with
    # replacement, which is biased: 0.65 instead of 1 for n = k = 8 and c = 1.
    # The i-th smallest score is the best of C(i, k - 1) choices: the other k - 1 are below it.
    ways = [math.comb(i, k - 1) for i in range(n)]
    return math.fsum(w * s for w, s in zip(ways, sorted(scores), strict=True)) / math.comb(n, k)


def estimate_best(scores: Sequence[Sequence[float]], k: int, name: str, seed: int) -> Estimate:
    """Estimate the mean best of k scores over the questions of a benchmark, at least one question.

    `scores` are of all answers, by question. The interval is Wilson's if every score is 0 or 1,
    else a bootstrap, in which the same seed and name resample the same questions.
    """
    if not scores:
        raise ValueError(f"{name}: has no questions")
    values = [best_of(question_scores, k) for question_scores in scores]
    # The same resampled questions for every policy: their intervals differ by their answers alone.
    is_share = all(map(intervals.is_binary, scores))
    return intervals.estimate(values, (seed, zlib.crc32(name.encode())), is_share)


def columns(names: Iterable[str], shared: Columns) -> dict[str, Sequence[str]]:
    """Map each column title or benchmark name to the names of its benchmarks.

    A shared column is used only if all its benchmarks are present, at the position of the first.
    """
    names = list(names)
    # A column over a part of its benchmarks would not compare with the paper's column.
    complete = {title: members for title, members in shared.items() if set(members) <= set(names)}
    title_of = {name: title for title, members in complete.items() for name in members}
    return {title_of.get(n, n): complete.get(title_of.get(n, ""), (n,)) for n in names}


def aggregate(
    scores: Mapping[str, Sequence[Sequence[float]]], shared: Columns, seed: int
) -> dict[str, Any]:
    """Compute the numbers of Table 1 for a policy at one prompt limit.

    `scores` maps at least one benchmark, then its questions, to n scores in [0, 1]. The result is
    JSON-serializable, with k at most n: {"benchmarks" | "columns": {name: {"pass@k": {"mean",
    "low", "high"}}}, "average" | "task_mean": {"pass@k": ...}}. A benchmark without questions has
    no numbers, {}; likewise its column and the two means, which would not compare.
    """
    # pass@k needs k scores of every question.
    samples = min(map(len, itertools.chain(*scores.values())), default=0)
    members_of = columns(scores, shared)
    numbers: dict[str, Any] = {
        "benchmarks": {name: {} for name in scores},
        "columns": {title: {} for title in members_of},
        "average": {},
        "task_mean": {},
    }
    for kind, k in _pass_at(samples).items():
        by_name = {
            name: estimate_best(benchmark_scores, k, name, seed)
            for name, benchmark_scores in scores.items()
            if benchmark_scores
        }
        by_column = {
            title: intervals.mean_of([by_name[name] for name in members])
            for title, members in members_of.items()
            if by_name.keys() >= set(members)
        }
        for part, estimates in (("benchmarks", by_name), ("columns", by_column)):
            for name, best_estimate in estimates.items():
                numbers[part][name][kind] = best_estimate._asdict()
        if len(by_name) == len(scores):
            numbers["average"][kind] = intervals.mean_of(by_column.values())._asdict()
            numbers["task_mean"][kind] = intervals.mean_of(by_name.values())._asdict()
    return numbers


def _pass_at(samples: int) -> dict[str, int]:
    return {f"pass@{k}": k for k in ATTEMPTS if k <= max(1, samples)}


def summarize(
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    limits: Sequence[int],
    samples: int,
    shared: Columns,
    seed: int,
    left_out: Collection[tuple[int, str, str]] = (),
) -> list[dict[str, Any]]:
    """Summarize each prompt limit: {"max_input"} | aggregate(), with counts for each benchmark.

    `rows` holds all samples (see answering); the G = `samples` samples of a question are adjacent.
    The output has the order of `names`. If the rows of a benchmark have "by", its summary
    also has "by": [{field: value, "questions", "pass@k": {"mean", "low", "high"}}], with one entry
    per combination of field values, sorted by these values. Where verdicts of a judge are missing,
    the summary has "unjudged": {column: number of answers}. `left_out` are questions without rows,
    (max_input, benchmark, id); "left_out" counts them, {column: number of questions}.
    """
    summaries = []
    for limit in limits:
        groups: dict[str, list[Sequence[Mapping[str, Any]]]] = {name: [] for name in names}
        limit_rows = [
            row for row in rows if row["max_input"] == limit and row["benchmark"] in groups
        ]
        for i in range(0, len(limit_rows), samples):
            groups[limit_rows[i]["benchmark"]].append(limit_rows[i : i + samples])
        scores = {
            name: [_finals(group) for group in samples_of] for name, samples_of in groups.items()
        }
        summary = aggregate(scores, shared, seed)
        counts = Counter(key[1] for key in left_out if key[0] == limit)
        for name, question_samples in groups.items():
            summary["benchmarks"][name] |= _counts(question_samples) | {"left_out": counts[name]}
            if parts := _parts(question_samples, samples, name, seed):
                summary["benchmarks"][name]["by"] = parts
        for kind, by_name in (
            ("unjudged", {name: summary["benchmarks"][name]["unjudged"] for name in groups}),
            ("left_out", counts),
        ):
            by_column = {
                title: number
                for title, members in columns(groups, shared).items()
                if (number := sum(by_name[name] for name in members))
            }
            if by_column:
                summary[kind] = by_column
        summaries.append({"max_input": limit} | summary)
    return summaries


def _finals(group: Sequence[Mapping[str, Any]]) -> list[float]:
    return [row["final"] for row in group]


def _parts(
    groups: Sequence[Sequence[Mapping[str, Any]]], samples: int, name: str, seed: int
) -> list[dict[str, Any]]:
    """Compute means over the questions with equal breakdown fields ("by")."""
    scores: dict[tuple[Any, ...], list[list[float]]] = {}
    for group in groups:
        if "by" in group[0]:
            scores.setdefault(tuple(group[0]["by"].items()), []).append(_finals(group))
    parts = []
    for fields, part_scores in sorted(
        scores.items(), key=lambda pair: [value for _, value in pair[0]]
    ):
        part = {**dict(fields), "questions": len(part_scores)}
        for kind, k in _pass_at(samples).items():
            part[kind] = estimate_best(part_scores, k, name, seed)._asdict()
        parts.append(part)
    return parts


def _counts(groups: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return counts of a benchmark, and means over its samples; without samples, means are None."""
    rows = [row for group in groups for row in group]

    def share(values: Iterable[float]) -> float | None:
        return sum(values) / len(rows) if rows else None

    verdicts = [row["judge"] for row in rows if row["judge"] is not None]
    return {
        "questions": len(groups),
        "rule": share(row["rule"] for row in rows),
        "judged": len(verdicts),
        "malformed": verdicts.count("malformed"),
        "unanswered": verdicts.count("unanswered"),
        "unjudged": sum(row.get("unjudged", False) for row in rows),
        "no_prediction": share(row["prediction"] is None for row in rows),
        "truncated": share(row["truncated"] for row in rows),
        "answers_truncated": share(not row["stopped"] for row in rows),
        "tokens_in": _mean_count(row["tokens_in"] for row in rows),
        "tokens_out": _mean_count(row["tokens_out"] for row in rows),
    }


def _mean_count(counts: Iterable[int | None]) -> float | None:
    """Return the mean of the known counts; None if there are none."""
    known_counts = [count for count in counts if count is not None]
    return sum(known_counts) / len(known_counts) if known_counts else None


def table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Format summaries as Markdown like Table 1: a table per pass@k, a row per limit and policy.

    A summary is {"policy", "titles": {benchmark: title}, "rows": [{"max_input"} | aggregate()]}.
    The first summary determines the columns; missing values are left empty. A star marks a mean
    over answers that lack the verdict of a judge, a dagger a mean without questions that lack a
    reply; notes below the table count them. A dagger alone stands for a mean of no questions.
    """
    first = summaries[0]
    titles, names = first["titles"], list(first["rows"][0]["columns"])
    shared = len(names) < len(titles)
    heads = ["Max input", "Model", *(titles.get(name, name) for name in names), "Avg."]
    heads += ["Mean of benchmarks"] * shared
    rows = [
        (row["max_input"], summary["policy"], row)
        for summary in summaries
        for row in summary["rows"]
    ]
    rows.sort(key=lambda row: row[0])  # stable: policies keep their order
    parts = []
    kinds = [kind for row in first["rows"] for column in row["columns"].values() for kind in column]
    for kind in dict.fromkeys(kinds):
        lines = [heads, ["---", "---", *["---:"] * (len(heads) - 2)]]
        for limit, policy, row in rows:
            cells = [_cell(row["columns"].get(n, {}).get(kind), _marks(row, n)) for n in names]
            cells += [_cell(row["average"].get(kind), _marks(row))]
            cells += [_cell(row["task_mean"].get(kind), _marks(row))] * shared
            lines.append([_limit(limit), policy, *cells])
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"## {kind}, percent (95 % interval)\n\n{body}\n")
    notes = [
        note.format(_describe(row[kind], things, titles), policy=policy, limit=_limit(limit))
        for kind, (_, things, note) in _NOTES.items()
        for limit, policy, row in rows
        if row.get(kind)
    ]
    return "\n".join([*parts, *notes])


# Counts by column -> (mark of the column's mean, what is counted, note below the table).
_NOTES = {
    "unjudged": (
        *("*", "answers"),
        "\\* {policy}, {limit}: no verdict of a judge on {}; the rule's scores stand.\n",
    ),
    "left_out": (
        *("\N{DAGGER}", "questions"),
        "\N{DAGGER} {policy}, {limit}: no reply to {}, which the means leave out.\n",
    ),
}


def _describe(counts: Mapping[str, int], things: str, titles: Mapping[str, str]) -> str:
    return ", ".join(f"{n} {things} of {titles.get(name, name)}" for name, n in counts.items())


def _marks(row: Mapping[str, Any], column: str = "") -> str:
    """Return the marks of a column's mean, or of a mean of all columns."""
    counts = {mark: row.get(kind, {}) for kind, (mark, *_) in _NOTES.items()}
    return "".join(mark for mark, by in counts.items() if (column in by if column else by))


def _cell(interval: Mapping[str, float] | None, marks: str) -> str:
    if interval is None:
        return marks
    mean, low, high = (100 * interval[name] for name in ("mean", "low", "high"))
    return f"{mean:.1f}{marks} ({low:.1f} to {high:.1f})"


def _limit(tokens: int) -> str:
    """Format a limit as in the paper: 16384 -> "16K", 100000 -> "100K"; 0 is "uncut"."""
    if not tokens:
        return "uncut"
    for unit in (1000, 1024):  # 1000 first: both divide 128000, which is 128K
        if tokens % unit == 0:
            return f"{tokens // unit}K"
    return str(tokens)
