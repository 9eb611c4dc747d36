"""The algorithms by name: what each reads from a config, how it is made and how it is evaluated.

A new algorithm is a file in algorithms/ and an entry here; docs/algorithms.md makes one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from spell_jax.algorithms.base import Algorithm, AlgorithmContext, RolloutBudget
from spell_jax.algorithms.eapo.algorithm import Eapo
from spell_jax.algorithms.eapo.config import EapoConfig
from spell_jax.algorithms.eapo.evaluation import EvidenceEvaluation
from spell_jax.algorithms.held_out import Evaluation, HeldOutQuestions
from spell_jax.algorithms.reconstruction.algorithm import Reconstruction, ReconstructionConfig
from spell_jax.algorithms.reconstruction.evaluation import PuzzleEvaluation
from spell_jax.algorithms.rlvr import Rlvr, RlvrConfig
from spell_jax.algorithms.spell.algorithm import Spell
from spell_jax.algorithms.spell.config import SpellConfig
from spell_jax.algorithms.spell.evaluation import TinyEvaluation
from spell_jax.data.questions import as_clusters, read_questions
from spell_jax.runtime.config import Config, build

# Fields of config.algorithm that are not the algorithm's own: they say which it is, and what it is
# given.
COMMON = ("name", "prompts", "judge_url", "judge_model")


@dataclasses.dataclass(frozen=True)
class AlgorithmSpec:
    """An algorithm as a config names it.

    Attributes:
      read: config.algorithm without COMMON -> the algorithm's fields; raises ValueError.
      make: fields, context -> the algorithm.
      evaluate: fields, context, config.data -> its held-out evaluation, or None where the data
        has nothing held out. What is large is read when it is first asked.
      budgets: fields -> what a step asks for (launch.check tells it before a run).
      says: fields -> words before that.
      plays: what it may be given, of "clusters" (data.source) and "questions" (data.questions).
    """

    read: Callable[[Config], Any]
    make: Callable[[Any, AlgorithmContext], Algorithm]
    evaluate: Callable[[Any, AlgorithmContext, Config], Evaluation | None] = lambda *_: None
    budgets: Callable[[Any], Sequence[RolloutBudget]] = lambda fields: ()
    says: Callable[[Any], str] = lambda fields: "a step asks for"
    plays: tuple[str, ...] = ("clusters",)


def reader_of(fields: type) -> Callable[[Config], Any]:
    """Reads config.algorithm as a dataclass."""
    return lambda section: build(fields, section, "algorithm")


def own_fields(algorithm: Config) -> dict[str, Any]:
    """config.algorithm without the fields that all algorithms have."""
    return {name: value for name, value in algorithm.items() if name not in COMMON}


# --------------------------------------------------------------------------------- SPELL and RLVR


@dataclasses.dataclass(frozen=True)
class _SpellFields:
    """Of SPELL, and of RLVR, which plays SPELL's second half."""

    spell: SpellConfig
    rlvr: RlvrConfig


def _read_spell(fields: Config) -> _SpellFields:
    fields = dict(fields)
    rlvr = RlvrConfig(fields.pop("static_questions", RlvrConfig.static_questions))
    return _SpellFields(build(SpellConfig, fields, "algorithm"), rlvr)


def _make_spell(fields: _SpellFields, context: AlgorithmContext) -> Spell:
    return Spell(fields.spell, context)


def _make_rlvr(fields: _SpellFields, context: AlgorithmContext) -> Rlvr:
    questions = context.questions()
    if not questions:
        return Rlvr(fields.rlvr, Spell(fields.spell, context))
    source, given = as_clusters(questions)
    context = dataclasses.replace(context, clusters=lambda: source)
    return Rlvr(fields.rlvr, Spell(fields.spell, context), given)


def _evaluate_spell(
    fields: _SpellFields, context: AlgorithmContext, data: Config
) -> Evaluation | None:
    if data.source == "tiny" and not data.questions:
        return build(
            TinyEvaluation,
            data.tiny.evaluation,
            "data.tiny.evaluation",
            prompts=context.prompts,
            algorithm=fields.spell,
            count_tokens=context.count_tokens,
        )
    if data.validation:
        questions = read_questions(data.validation, "data.validation")
        return HeldOutQuestions(context.prompts, questions)
    return None


def _say_rounds(fields: _SpellFields) -> str:
    c = fields.spell
    return (
        f"up to {c.max_generations} rounds of {c.generation_batch} proposals, until {c.questions} "
        "questions have mixed rewards; a round asks for"
    )


def _say_static(fields: _SpellFields) -> str:
    batch, static = fields.spell.generation_batch, fields.rlvr.static_questions
    return f"{batch} of {static} questions, written once (or of those given); a step asks for"


# ----------------------------------------------------------------------------- The other algorithms


def _evaluate_reconstruction(
    fields: ReconstructionConfig, context: AlgorithmContext, data: Config
) -> Evaluation | None:
    return PuzzleEvaluation(fields, context) if data.held_out else None


def _evaluate_eapo(
    fields: EapoConfig, context: AlgorithmContext, data: Config
) -> Evaluation | None:
    if not data.validation:
        return None
    questions = read_questions(data.validation, "data.validation")
    return EvidenceEvaluation(context.prompts, questions)


ALGORITHMS: dict[str, AlgorithmSpec] = {
    "spell": AlgorithmSpec(
        _read_spell,
        _make_spell,
        _evaluate_spell,
        budgets=lambda fields: fields.spell.budgets(),
        says=_say_rounds,
    ),
    "rlvr": AlgorithmSpec(
        _read_spell,
        _make_rlvr,
        _evaluate_spell,
        budgets=lambda fields: fields.spell.budgets(writes=False),
        says=_say_static,
        plays=("clusters", "questions"),
    ),
    "reconstruction": AlgorithmSpec(
        reader_of(ReconstructionConfig),
        Reconstruction,
        _evaluate_reconstruction,
        budgets=ReconstructionConfig.budgets,
    ),
    "eapo": AlgorithmSpec(
        reader_of(EapoConfig),
        Eapo,
        _evaluate_eapo,
        budgets=EapoConfig.budgets,
        plays=("questions",),
    ),
}
