"""Data types of a benchmark: questions with prompts and references, and the scoring of answers.

Each family of benchmarks has one file, which reads them from published files or generates them.
`spell_jax/evaluation/runner.py` samples answers, asks a judge where `judged` is set, and averages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
      id: identifier, unique within the benchmark and the same in every run.
      prompt: user turn for the policy, without a chat template and not truncated.
      question: question alone, as shown to a judge.
      references: correct answers, at least one.
      fields: further JSON-serializable data for scoring or tables (a needle's depth, a length).
      judged: whether a judge may be asked, if the benchmark is judged.
    """

    id: str
    prompt: str
    question: str
    references: tuple[str, ...]
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    judged: bool = True


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
