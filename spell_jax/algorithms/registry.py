"""Registry of algorithms: config, constructor, held-out evaluation and inputs of each, by name.

A module or config file of the user's adds an algorithm with `register`, as
docs/howto/add_algorithm.md shows. An algorithm of this package is an entry of ALGORITHMS. Sampler,
learner and trainer do not depend on any algorithm.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spell_jax.algorithms.base import Algorithm, AlgorithmContext
from spell_jax.algorithms.config import AlgorithmConfig
from spell_jax.algorithms.dry import DryCall, DryReplies
from spell_jax.algorithms.eapo import dry as eapo_dry
from spell_jax.algorithms.eapo.algorithm import Eapo
from spell_jax.algorithms.eapo.config import EapoConfig
from spell_jax.algorithms.eapo.evaluation import held_out_evidence
from spell_jax.algorithms.held_out import Evaluation, MakeEvaluation
from spell_jax.algorithms.preference.longpo import LongPoConfig, make_longpo
from spell_jax.algorithms.preference.solopo import SoLoPoConfig, make_solopo
from spell_jax.algorithms.reconstruction import dry as reconstruction_dry
from spell_jax.algorithms.reconstruction.algorithm import Reconstruction, ReconstructionConfig
from spell_jax.algorithms.reconstruction.evaluation import held_out_puzzles
from spell_jax.algorithms.rlvr.algorithm import make_rlvr
from spell_jax.algorithms.rlvr.config import RlvrConfig
from spell_jax.algorithms.rlvr.qwenlong import QwenLongConfig, make_qwenlong
from spell_jax.algorithms.rlvr.self_distillation import (
    SelfDistillationConfig,
    make_self_distillation,
)
from spell_jax.algorithms.spell import dry as spell_dry
from spell_jax.algorithms.spell.algorithm import Spell
from spell_jax.algorithms.spell.config import QuestionsConfig, SpellConfig
from spell_jax.algorithms.spell.evaluation import RoleExams, evaluate_questions, evaluate_tiny_world
from spell_jax.data.config import DataConfig, is_generated
from spell_jax.data.questions import Question
from spell_jax.learner.loss_config import LossConfig
from spell_jax.runtime import hooks
from spell_jax.runtime.config import build, check_choice, flat
from spell_jax.selfplay.given_questions import read_scorable

INPUTS = ("clusters", "questions")
TEACHERS = ("may", "must", "never")


@dataclasses.dataclass(frozen=True)
class AlgorithmSpec:
    """An entry of the registry.

    Attributes:
      config: dataclass of config.algorithm; the default of its `name` is the algorithm's name.
      make: constructor of the algorithm, from its config and the context.
      evaluate: function that makes the held-out evaluation (held_out.py), unless
        config.algorithm.evaluation names one; by default there is none.
      inputs: kinds of data that the algorithm takes: "clusters" (of data.source), "questions" (of
        data.questions), or both.
      has_pairs: whether groups are preference pairs, for loss.objective = "dpo".
      teacher: whether a teacher that reads a shorter prompt "may", "must" or "never" can score the
        answers (loss.distillation_weight).
      write_replies: function from the config and a prompt to what the models write in a dry run
        (dry.py); None: launch.plan --time cannot run the algorithm.
      example: a config file of the algorithm, with its argument.
    """

    config: type[AlgorithmConfig]
    make: Callable[[Any, AlgorithmContext], Algorithm]
    evaluate: MakeEvaluation = lambda *_: None
    inputs: tuple[str, ...] = ("clusters",)
    has_pairs: bool = False
    teacher: str = "never"
    write_replies: Callable[[Any, DryCall], DryReplies] | None = None
    example: str = ""


def register(spec: AlgorithmSpec) -> None:
    """Add an algorithm to the registry, under the default of its config's field `name`.

    A file that is loaded again replaces its own entry. ValueError if another algorithm has the
    name, or a part of the entry is wrong.
    """
    name, config = _find_name(spec), spec.config
    # A config file is a module that every command, and every sweep, loads anew: its classes are
    # others each time, with the same names in the same file.
    file = getattr(sys.modules.get(config.__module__), "__file__", None)
    origin = (file, config.__module__, config.__qualname__)
    if name in ALGORITHMS and _origins.get(name) != origin:
        raise ValueError(
            f"{config.__name__}.name = {name!r}: must be another name, because "
            f"{ALGORITHMS[name].config.__module__}.{ALGORITHMS[name].config.__qualname__} has it"
        )
    ALGORITHMS[name], _origins[name] = spec, origin


def _find_name(spec: AlgorithmSpec) -> str:
    """Return the name of an algorithm; ValueError if a part of its entry is wrong."""
    config, has_defaults = spec.config, "must be a dataclass with a default for every field"
    if not (isinstance(config, type) and issubclass(config, AlgorithmConfig)):
        raise ValueError(f"AlgorithmSpec.config = {config!r}: must inherit AlgorithmConfig")
    try:
        name = config().name
    except TypeError as error:
        raise ValueError(f"{config.__name__}: {error}; {has_defaults}") from error
    if not name:
        raise ValueError(f"{config.__name__}.name = '': must be a name; {has_defaults}")
    if not {*spec.inputs} <= {*INPUTS} or not spec.inputs:
        raise ValueError(f"AlgorithmSpec.inputs = {spec.inputs!r}: must be some of {INPUTS}")
    check_choice(spec, "AlgorithmSpec.", teacher=TEACHERS)
    return name


def read_algorithm(section: Mapping[str, Any], needs_judge: bool = True) -> AlgorithmConfig:
    """Build the dataclass of the config's section `algorithm`; ValueError names a bad field.

    Without `needs_judge`, a judge of algorithm.rule may be missing.
    """
    name = section.get("name", "")
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm.name = {name!r}: must be one of {tuple(ALGORITHMS)}")
    _check_fields(name, section)
    algorithm = build(ALGORITHMS[name].config, section, "algorithm")
    if needs_judge:
        algorithm.check_judge()
    find_evaluation(algorithm)
    algorithm.load_reward()
    return algorithm


def _check_fields(name: str, section: Mapping[str, Any]) -> None:
    """Raise ValueError if the section has the fields of another algorithm than `name`."""
    present = {field for field, _ in flat(section)}
    if present <= _field_names(ALGORITHMS[name].config()):
        return
    fields = {algorithm: _field_names(spec.config()) for algorithm, spec in ALGORITHMS.items()}
    # Algorithms may have the same fields, or more than another one has: the fewest fields fit best.
    owners = [algorithm for algorithm in ALGORITHMS if present <= fields[algorithm]]
    if owners:
        fewest = min(len(fields[algorithm]) for algorithm in owners)
        choices = [repr(owner) for owner in owners if len(fields[owner]) == fewest]
        raise ValueError(
            f"algorithm.name = {name!r}: must be {' or '.join(choices)}, whose fields the config "
            f"has; take another config for {name!r}, such as "
            f"{ALGORITHMS[name].example or 'your own'}"
        )


def _field_names(config: AlgorithmConfig) -> set[str]:
    return {field for field, _ in flat(dataclasses.asdict(config))}


def find_evaluation(config: AlgorithmConfig) -> MakeEvaluation:
    """Return the function that makes the held-out evaluation: the config's, or the algorithm's.

    ValueError if the config's is not importable.
    """
    if config.evaluation:
        return hooks.load("algorithm.evaluation", config.evaluation)
    return ALGORITHMS[config.name].evaluate


def make_algorithm(config: AlgorithmConfig, context: AlgorithmContext) -> Algorithm:
    """Make the algorithm of a config; ValueError if its class lacks a part of the interface."""
    algorithm = ALGORITHMS[config.name].make(config, context)
    names = [name for name in vars(Algorithm) if not name.startswith("_")]
    # A run would find some of them missing only when it resumes.
    if missing := [name for name in names if not hasattr(algorithm, name)]:
        raise ValueError(
            f"algorithm.name = {config.name!r}: {type(algorithm).__name__} must have "
            f"{', '.join(missing)} (algorithms/base.py)"
        )
    return algorithm


def check_inputs(config: AlgorithmConfig, data: DataConfig) -> None:
    """Raise ValueError if the algorithm does not take the kind of data in the config."""
    inputs = ALGORITHMS[config.name].inputs
    if data.questions and "questions" not in inputs:
        raise ValueError(f"data.questions = {data.questions!r}: must be '', for this algorithm")
    if not data.questions and "clusters" not in inputs:
        raise ValueError("data.questions = '': must be a .jsonl of questions, for this algorithm")


def objective_conflicts(config: AlgorithmConfig, loss: LossConfig) -> Iterator[str]:
    """Yield where loss and algorithm disagree on preference pairs or a teacher."""
    has_pairs, teacher = ALGORITHMS[config.name].has_pairs, ALGORITHMS[config.name].teacher
    # Above 0, the algorithm must allow a teacher; at 0, it must not require a teacher.
    if teacher == ("never" if loss.distillation_weight else "must"):
        requirement = "must be 0" if teacher == "never" else "must be above 0"
        yield (
            f"loss.distillation_weight = {loss.distillation_weight}: {requirement} for "
            f"algorithm.name = {config.name!r}"
        )
    if has_pairs != loss.is_paired:
        requirement = "must be 'dpo'" if has_pairs else "must not be 'dpo'"
        yield (
            f"loss.objective = {loss.objective!r}: {requirement} for algorithm.name = "
            f"{config.name!r}"
        )


def _evaluate_spell(
    config: QuestionsConfig, context: AlgorithmContext, data: DataConfig
) -> Evaluation | None:
    exams = RoleExams(config, context)
    # The tiny world has an oracle, which also judges questions that a model wrote. With given
    # questions the held-out questions are given too, in data.validation.
    if data.source == "tiny" and not data.questions:
        return evaluate_tiny_world(exams, data.tiny.evaluation)
    questions = _read_validation(config, data)
    tasks = () if data.questions else data.tasks
    return evaluate_questions(exams, questions, tasks) if questions else None


def _evaluate_reconstruction(
    config: ReconstructionConfig, context: AlgorithmContext, data: DataConfig
) -> Evaluation | None:
    # A generated source makes held-out clusters of its own, without a share of the training data.
    has_documents = data.held_out > 0 or is_generated(data.source)
    return held_out_puzzles(config, context) if has_documents else None


def _evaluate_eapo(
    config: EapoConfig, context: AlgorithmContext, data: DataConfig
) -> Evaluation | None:
    questions = _read_validation(config, data)
    return held_out_evidence(context.prompts, questions, config.extract) if questions else None


def _read_validation(config: AlgorithmConfig, data: DataConfig) -> tuple[Question, ...]:
    path = data.validation
    return read_scorable(path, "data.validation", config.extract, config.rule) if path else ()


def _on_static_questions(config: type[AlgorithmConfig], make: Any, **fields: Any) -> AlgorithmSpec:
    """Make the entry of an algorithm that answers given questions, or questions written once."""
    return AlgorithmSpec(
        config,
        make,
        _evaluate_spell,
        ("clusters", "questions"),
        write_replies=spell_dry.write_replies,
        example=f"configs/tiny.py:{config().name}",
        **fields,
    )


ALGORITHMS: dict[str, AlgorithmSpec] = {
    "spell": AlgorithmSpec(
        SpellConfig,
        Spell,
        _evaluate_spell,
        teacher="may",
        write_replies=spell_dry.write_replies,
        example="configs/tiny.py",
    ),
    "rlvr": _on_static_questions(RlvrConfig, make_rlvr, teacher="may"),
    "qwenlong_l1": _on_static_questions(QwenLongConfig, make_qwenlong, teacher="may"),
    "self_distillation": _on_static_questions(
        SelfDistillationConfig, make_self_distillation, teacher="must"
    ),
    "longpo": _on_static_questions(LongPoConfig, make_longpo, has_pairs=True),
    "solopo": _on_static_questions(SoLoPoConfig, make_solopo, has_pairs=True),
    "reconstruction": AlgorithmSpec(
        ReconstructionConfig,
        Reconstruction,
        _evaluate_reconstruction,
        write_replies=reconstruction_dry.write_replies,
        example="configs/tiny_reconstruction.py",
    ),
    "eapo": AlgorithmSpec(
        EapoConfig,
        Eapo,
        _evaluate_eapo,
        ("questions",),
        write_replies=eapo_dry.write_replies,
        example="configs/tiny_eapo.py",
    ),
}
# Name of an algorithm that `register` has added -> file, module and class of its config.
_origins: dict[str, tuple[str | None, str, str]] = {}
