"""How benchmarks are asked and averaged: the paper's protocol (section 4.1, spec section 11), pure.

1. A prompt longer than the limit loses its middle (`truncate`).
2. Each question has n scores in [0, 1]. pass@1 is their mean; pass@k the mean of the best of k of
   them, over all ways to choose k (`best_of`), which for scores of 0 and 1 is Eq. 11.
3. A benchmark's score is the mean over its questions, with a bootstrap interval over them.
4. Columns are those of Table 1, where the three sets from LongBench share one. "Avg." is the mean
   of the columns; the mean of all benchmarks is told beside it.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

DRAWS = 2000  # bootstrap samples: the ends of an interval are then known to about 3 % of its width
TAILS = (2.5, 97.5)  # percentiles between which the interval lies
ATTEMPTS = (1, 2, 4, 8)  # k of pass@k, as far as there are samples

Columns = Mapping[str, Sequence[str]]  # title -> the benchmarks whose mean it is


def truncate(ids: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` tokens of a prompt [P]: its first limit // 2 and its last ones.

    Cutting to a limit and then to a smaller one is cutting to the smaller one.

    Raises:
      ValueError: limit is below 1.
    """
    if limit < 1:
        raise ValueError(f"max_input = {limit}: must be at least 1")
    if len(ids) <= limit:
        return ids
    return np.concatenate([ids[: limit // 2], ids[len(ids) - (limit - limit // 2) :]])


def best_of(scores: Sequence[float], k: int) -> float:
    """The mean of the best of k scores over all choices of k of them, none twice.

    With c of n scores 1 and the others 0 that is Eq. 11: 1 - C(n - c, k) / C(n, k).

    Raises:
      ValueError: k is not between 1 and the number of scores.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"k = {k}: must be between 1 and the {n} scores of a question")
    # The i-th smallest is the best of as many choices as have their others among those before it.
    ways = [math.comb(i, k - 1) for i in range(n)]
    return math.fsum(w * s for w, s in zip(ways, sorted(scores), strict=True)) / math.comb(n, k)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over questions.

    Attributes:
      value: of the questions that there are.
      draws: of bootstrap samples of them [DRAWS].
    """

    value: float
    draws: np.ndarray

    def record(self) -> dict[str, float]:
        """The mean and its 95 % interval."""
        low, high = np.percentile(self.draws, TAILS).tolist()
        return {"mean": self.value, "low": low, "high": high}


def estimate(values: Sequence[float], name: str, seed: int) -> Estimate:
    """The mean of a value a question.

    The same questions are drawn for a benchmark of the same name and size in every run, so that
    intervals of two policies differ by their answers alone.

    Raises:
      ValueError: there are no values.
    """
    if not values:
        raise ValueError(f"{name}: has no questions")
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    draws = rng.integers(len(values), size=(DRAWS, len(values)))
    return Estimate(math.fsum(values) / len(values), np.asarray(values, float)[draws].mean(axis=1))


def mean(estimates: Iterable[Estimate]) -> Estimate:
    """The plain mean of independent estimates; at least one."""
    some = list(estimates)
    value = math.fsum(one.value for one in some) / len(some)
    return Estimate(value, np.mean([one.draws for one in some], axis=0))


def columns(names: Iterable[str], shared: Columns) -> dict[str, Sequence[str]]:
    """Title or name -> its benchmarks; those that share a column have it where the first of them
    stood, if all of them are there."""
    there = list(names)
    whole = {title: some for title, some in shared.items() if set(some) <= set(there)}
    title_of = {name: title for title, some in whole.items() for name in some}
    return {title_of.get(name, name): whole.get(title_of.get(name, ""), (name,)) for name in there}


def aggregate(
    scores: Mapping[str, Sequence[Sequence[float]]], shared: Columns, seed: int
) -> dict[str, Any]:
    """What Table 1 says of a policy at one limit.

    Args:
      scores: benchmark -> question -> n scores in [0, 1].
      shared: columns that several benchmarks have together.
      seed: of bootstrap samples.

    Returns:
      {"benchmarks" | "columns": {name: {"pass@k": {"mean", "low", "high"}}},
      "average" | "task_mean": {"pass@k": ...}}, JSON-able; k only up to n.

    Raises:
      ValueError: a benchmark has no questions, or there is none.
    """
    if not scores:
        raise ValueError("benchmarks = (): must name one at least")
    samples = min((len(one) for some in scores.values() for one in some), default=0)
    made: dict[str, Any] = {"benchmarks": {}, "columns": {}, "average": {}, "task_mean": {}}
    for k, kind in kinds(samples):
        by_name = {
            name: estimate([best_of(one, k) for one in some], name, seed)
            for name, some in scores.items()
        }
        by_column = {
            title: mean(by_name[name] for name in members)
            for title, members in columns(scores, shared).items()
        }
        for part, found in (("benchmarks", by_name), ("columns", by_column)):
            for name, one in found.items():
                made[part].setdefault(name, {})[kind] = one.record()
        made["average"][kind] = mean(by_column.values()).record()
        made["task_mean"][kind] = mean(by_name.values()).record()
    return made


def summarize(
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    limits: Sequence[int],
    samples: int,
    shared: Columns,
    seed: int,
) -> list[dict[str, Any]]:
    """What is told of each limit: {"max_input"} | aggregate(), with counts for each benchmark.

    Args:
      rows: all samples (see answering), those of a question one after the other. Where they have
        "by", the benchmark also has "by": [{field: value, "questions", "pass@k": {"mean", "low",
        "high"}}], of the questions that are alike in these fields, by their values.
      names: of benchmarks, in their order.
      limits: of prompts, in tokens.
      samples: of a question.
      shared, seed: see aggregate.
    """
    made = []
    for limit in limits:
        by_name = {
            name: [r for r in rows if (r["max_input"], r["benchmark"]) == (limit, name)]
            for name in names
        }
        scores = {
            name: [[row["final"] for row in group] for group in _batches(some, samples)]
            for name, some in by_name.items()
        }
        found = aggregate(scores, shared, seed)
        for name, some in by_name.items():
            found["benchmarks"][name] |= _counts(some, samples)
            if parts := _parts(some, samples, name, seed):
                found["benchmarks"][name]["by"] = parts
        made.append({"max_input": limit} | found)
    return made


def _parts(
    rows: Sequence[Mapping[str, Any]], samples: int, name: str, seed: int
) -> list[dict[str, Any]]:
    """Means over the questions that are alike in the fields by which they are told apart."""
    scores: dict[tuple[Any, ...], list[list[float]]] = {}
    for group in _batches(rows, samples):
        if "by" in group[0]:
            values = tuple(group[0]["by"].items())
            scores.setdefault(values, []).append([row["final"] for row in group])
    return [
        {**dict(values), "questions": len(some)}
        | {
            kind: estimate([best_of(one, k) for one in some], name, seed).record()
            for k, kind in kinds(samples)
        }
        for values, some in sorted(scores.items(), key=lambda pair: [v for _, v in pair[0]])
    ]


def kinds(samples: int) -> list[tuple[int, str]]:
    """(k, its name) of each pass@k that so many samples allow."""
    return [(k, f"pass@{k}") for k in ATTEMPTS if k <= max(1, samples)]


def _batches(rows: Sequence[T], size: int) -> list[Sequence[T]]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _counts(rows: Sequence[Mapping[str, Any]], samples: int) -> dict[str, Any]:
    """What else is told of a benchmark: counts, and means over its samples."""

    def share(values: Iterable[float]) -> float:
        return sum(values) / len(rows)

    verdicts = [row["judge"] for row in rows if row["judge"] is not None]
    return {
        "questions": len(rows) // samples,
        "rule": share(row["rule"] for row in rows),
        "judged": len(verdicts),
        "malformed": verdicts.count("malformed"),
        "unanswered": verdicts.count("unanswered"),
        "no_prediction": share(row["prediction"] is None for row in rows),
        "truncated": share(row["truncated"] for row in rows),
        "answers_truncated": share(not row["stopped"] for row in rows),
        "tokens_in": share(row["tokens_in"] for row in rows),
        "tokens_out": share(row["tokens_out"] for row in rows),
    }


def table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Markdown like Table 1, one table for each pass@k: a row for each limit and policy.

    Args:
      summaries: {"policy", "titles": {benchmark: title}, "rows": [{"max_input"} | aggregate()]}.
        Columns are those of the first one; what another one lacks is left empty.
    """
    first = summaries[0]
    titles, names = first["titles"], list(first["rows"][0]["columns"])
    shared = len(names) < len(titles)
    heads = ["Max input", "Model", *(titles.get(name, name) for name in names), "Avg."]
    heads += ["Mean of benchmarks"] * shared
    rows = [(row["max_input"], one["policy"], row) for one in summaries for row in one["rows"]]
    rows.sort(key=lambda some: some[0])  # stable: policies stay in their order
    parts = []
    for kind in first["rows"][0]["average"]:
        lines = [heads, ["---", "---", *["---:"] * (len(heads) - 2)]]
        for limit, policy, row in rows:
            cells = [*(row["columns"].get(name, {}) for name in names), row["average"]]
            cells += [row["task_mean"]] * shared
            lines.append([_limit(limit), policy, *(_cell(cell.get(kind)) for cell in cells)])
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"## {kind}, percent (95 % interval)\n\n{body}\n")
    return "\n".join(parts)


def _cell(found: Mapping[str, float] | None) -> str:
    if found is None:
        return ""
    mean, low, high = (100 * found[name] for name in ("mean", "low", "high"))
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"


def _limit(tokens: int) -> str:
    """16384 -> "16K", 100000 -> "100K", as the paper has them; other numbers stay."""
    for unit in (1000, 1024):  # 128000, which both divide, is 128K
        if tokens % unit == 0:
            return f"{tokens // unit}K"
    return str(tokens)
