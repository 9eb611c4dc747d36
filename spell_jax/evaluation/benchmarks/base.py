"""What a benchmark is: questions with their prompts and references, and how an answer is scored.

One file a family of benchmarks makes them from a folder of published files, or generates them;
`spell_jax/evaluate.py` samples answers, asks a judge where `judged` says so, and averages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
      id: unique within its benchmark, the same in every run.
      prompt: what the policy is asked, the user's turn, before any chat template and uncut.
      question: the question alone, as a judge is shown it.
      references: right answers, at least one.
      fields: what else its score or the tables need (a needle's depth, a length), JSON-able.
      judged: whether a judge may be asked, where its benchmark is judged.
    """

    id: str
    prompt: str
    question: str
    references: tuple[str, ...]
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    judged: bool = True


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Questions that are scored alike.

    Attributes:
      name: as in --benchmarks, such as "longbench_v2".
      title: heading of its column.
      items: the questions, in the order of their files.
      extract: (text of a sample, item) -> the answer in it, None where there is none; total.
      score: (text of a sample, item) -> rule score in [0, 1]; total, and linear in the text.
      judged: whether a judge is asked about answers whose rule score is below 1.
      max_tokens: of an answer, where the caller does not say.
      by: one or two of the items' fields; items that are alike in them are also averaged apart.
    """

    name: str
    title: str
    items: tuple[Item, ...]
    extract: Callable[[str, Item], str | None]
    score: Callable[[str, Item], float]
    judged: bool
    max_tokens: int
    by: tuple[str, ...] = ()
