"""The games by name: what each reads from a config, how it is made and how it is evaluated.

A new game is a file in games/ and an entry here; docs/games.md makes one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from spell_jax.algorithms.base import Demand, Game, Materials
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

# Fields of config.game that are not the game's own: they say which it is, and what it is given.
COMMON = ("name", "prompts", "judge_url", "judge_model")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A game as a config names it.

    Attributes:
      read: config.game without COMMON -> the game's fields; raises ValueError.
      make: fields, materials -> the game.
      evaluate: fields, materials, config.data -> its held-out evaluation, or None where the data
        has nothing held out. What is large is read when it is first asked.
      demands: fields -> what a step asks for (launch.check tells it before a run).
      says: fields -> words before that.
      plays: what it may be given, of "clusters" (data.source) and "questions" (data.questions).
    """

    read: Callable[[Config], Any]
    make: Callable[[Any, Materials], Game]
    evaluate: Callable[[Any, Materials, Config], Evaluation | None] = lambda *_: None
    demands: Callable[[Any], Sequence[Demand]] = lambda fields: ()
    says: Callable[[Any], str] = lambda fields: "a step asks for"
    plays: tuple[str, ...] = ("clusters",)


def reader_of(fields: type) -> Callable[[Config], Any]:
    """Reads config.game as a dataclass."""
    return lambda section: build(fields, section, "game")


def own_fields(game: Config) -> dict[str, Any]:
    """config.game without the fields that all games have."""
    return {name: value for name, value in game.items() if name not in COMMON}


# --------------------------------------------------------------------------------- SPELL and RLVR


@dataclasses.dataclass(frozen=True)
class _SpellFields:
    """Of SPELL, and of RLVR, which plays SPELL's second half."""

    spell: SpellConfig
    rlvr: RlvrConfig


def _read_spell(fields: Config) -> _SpellFields:
    fields = dict(fields)
    rlvr = RlvrConfig(fields.pop("static_questions", RlvrConfig.static_questions))
    return _SpellFields(build(SpellConfig, fields, "game"), rlvr)


def _make_spell(fields: _SpellFields, materials: Materials) -> Spell:
    return Spell(fields.spell, materials)


def _make_rlvr(fields: _SpellFields, materials: Materials) -> Rlvr:
    questions = materials.questions()
    if not questions:
        return Rlvr(fields.rlvr, Spell(fields.spell, materials))
    source, given = as_clusters(questions)
    materials = dataclasses.replace(materials, clusters=lambda: source)
    return Rlvr(fields.rlvr, Spell(fields.spell, materials), given)


def _evaluate_spell(fields: _SpellFields, materials: Materials, data: Config) -> Evaluation | None:
    if data.source == "tiny" and not data.questions:
        return build(
            TinyEvaluation,
            data.tiny.evaluation,
            "data.tiny.evaluation",
            prompts=materials.prompts,
            game=fields.spell,
            count_tokens=materials.count_tokens,
        )
    if data.validation:
        questions = read_questions(data.validation, "data.validation")
        return HeldOutQuestions(materials.prompts, questions)
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


# ------------------------------------------------------------------------------- The other games


def _evaluate_reconstruction(
    fields: ReconstructionConfig, materials: Materials, data: Config
) -> Evaluation | None:
    return PuzzleEvaluation(fields, materials) if data.held_out else None


def _evaluate_eapo(fields: EapoConfig, materials: Materials, data: Config) -> Evaluation | None:
    if not data.validation:
        return None
    questions = read_questions(data.validation, "data.validation")
    return EvidenceEvaluation(materials.prompts, questions)


GAMES: dict[str, Kind] = {
    "spell": Kind(
        _read_spell,
        _make_spell,
        _evaluate_spell,
        demands=lambda fields: fields.spell.demands(),
        says=_say_rounds,
    ),
    "rlvr": Kind(
        _read_spell,
        _make_rlvr,
        _evaluate_spell,
        demands=lambda fields: fields.spell.demands(writes=False),
        says=_say_static,
        plays=("clusters", "questions"),
    ),
    "reconstruction": Kind(
        reader_of(ReconstructionConfig),
        Reconstruction,
        _evaluate_reconstruction,
        demands=ReconstructionConfig.demands,
    ),
    "eapo": Kind(
        reader_of(EapoConfig),
        Eapo,
        _evaluate_eapo,
        demands=EapoConfig.demands,
        plays=("questions",),
    ),
}
