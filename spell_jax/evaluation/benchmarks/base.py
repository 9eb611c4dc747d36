"""Data types of a benchmark: questions with prompts and references, and the scoring of answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class BenchmarkItem:
    """One question."""

    id: str  # unique within the benchmark and the same in every run
    prompt: str  # user turn for the policy, without a chat template and not truncated
    question: str  # alone, as shown to a judge
    references: tuple[str, ...]  # correct answers, at least one
    # JSON-serializable data for scoring or tables (a needle's depth, a length).
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    judged: bool = True  # whether a judge may be asked, if the benchmark is judged


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A set of questions with one scoring rule."""

    name: str  # in --benchmarks, such as "longbench_v2"
    title: str  # heading of its table column
    items: tuple[BenchmarkItem, ...]
    # Any sample text -> its stated answer; any sample text -> rule score in [0, 1], in linear time.
    extract: Callable[[str, BenchmarkItem], str | None]
    score: Callable[[str, BenchmarkItem], float]
    judged: bool = False  # whether a judge may be asked about the answers
    # Any sample text -> words that a judge reads; None: the stated answer of `extract`.
    state: Callable[[str, BenchmarkItem], str | None] | None = None
    max_tokens: int = 4096  # default maximum answer length (paper Appendix E.2, F.2, F.3)
    by: tuple[str, ...] = ()  # one or two item fields; scores are also averaged for each value
