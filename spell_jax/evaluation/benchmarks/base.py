"""Data types of a benchmark: questions with prompts and references, and the scoring of answers.

Each family of benchmarks has one file, which reads them from published files or generates them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Item:
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
    """A set of questions with one scoring rule.

    Attributes:
      name: name in --benchmarks, such as "longbench_v2".
      title: heading of its table column.
      items: questions in order.
      extract: (sample text, item) -> stated answer, or None; accepts any text.
      score: (sample text, item) -> rule score in [0, 1]; accepts any text, in linear time.
      judged: whether a judge is asked about answers with a rule score below 1.
      max_tokens: default maximum answer length in tokens (paper Appendix E.2, F.2, F.3: 4096).
      by: one or two item fields; scores are also averaged separately for each of their values.
    """

    name: str
    title: str
    items: tuple[Item, ...]
    extract: Callable[[str, Item], str | None]
    score: Callable[[str, Item], float]
    judged: bool = False
    max_tokens: int = 4096
    by: tuple[str, ...] = ()
