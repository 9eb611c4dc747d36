"""Configs of algorithms on a static set of questions, RLVR's among them."""

from __future__ import annotations

import dataclasses

from spell_jax.algorithms.spell.config import QuestionsConfig, VerifiedConfig
from spell_jax.runtime.config import check_least


@dataclasses.dataclass(frozen=True)
class StaticConfig(QuestionsConfig):
    """Fields of an algorithm that answers a static set of questions, given or written once.

    The sections `questioner` and `reader` count only if the set is written.

    Attributes:
      static_questions: number of proposals for the static set, which keeps questions that pass the
        filters. Unused with given questions.
      static_temperature: temperature of the samples from which the set is made (proposals, answers
        without documents, the frozen reader's answers).
    """

    static_questions: int = 960
    # SPELL's public script samples all roles at 0.7.
    static_temperature: float = 0.7

    def __post_init__(self):
        super().__post_init__()
        check_least(self, "algorithm.", static_questions=1, static_temperature=0)

    def budget_summary(self) -> str:
        return (
            f"{self.generation_batch} of {self.static_questions} questions, written once (or of "
            "those given); a step asks for"
        )


@dataclasses.dataclass(frozen=True)
class VerifiedStaticConfig(VerifiedConfig, StaticConfig):
    """Fields of an algorithm with a verifier on a static set of questions."""

    def budget_summary(self) -> str:
        return (
            f"up to {self.max_generations} rounds of {self.generation_batch} of "
            f"{self.static_questions} questions, written once (or of those given), until "
            f"{self.questions} have mixed rewards; a round asks for"
        )


@dataclasses.dataclass(frozen=True)
class RlvrConfig(VerifiedStaticConfig):
    """Fields of config.algorithm for RLVR."""

    name: str = "rlvr"
