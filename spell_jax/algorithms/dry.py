"""Texts that stand for models: launch.plan --time runs an algorithm without models.

Every algorithm has a function (AlgorithmSpec.write_replies) from its config and a DryCall to texts
that its parsers accept. Documents of a dry run state RIGHT, the answer to every question.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

RIGHT, WRONG = "4711", "1174"  # answers; neither contains the other
_LETTERS = str.maketrans("0123456789", "abcdefghij")


def in_letters(number: int) -> str:
    """Write a number in letters, so that no text states an answer by chance."""
    return str(number).translate(_LETTERS)


@dataclasses.dataclass(frozen=True)
class DryCall:
    """A prompt for the replies of one agent.

    Attributes:
      agent: role that replies, or the name of a model other than the policy.
      prompt: text of the prompt.
      count: number of replies.
      number: number of this agent's earlier prompts.
      passes: whether the reply shall pass the algorithm's filters.
      mixed: whether answers shall be partly right and partly wrong; otherwise all are right.
    """

    agent: str
    prompt: str
    count: int
    number: int = 0
    passes: bool = True
    mixed: bool = True

    @property
    def answers(self) -> list[str]:
        """An answer for each reply: right and wrong in turn, or all right."""
        first = self.number if self.count == 1 else 0
        return [(RIGHT, WRONG)[self.mixed * (first + i) % 2] for i in range(self.count)]


class DryReplies(NamedTuple):
    """Texts of the replies to a prompt."""

    texts: list[str]
    is_verdict: bool = False  # whether the replies are as short as verdicts
