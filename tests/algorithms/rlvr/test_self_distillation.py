"""Tests of self-distillation from short to long contexts, and of SPELL with the same teacher."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from spell_jax.algorithms import registry
from spell_jax.algorithms.rlvr.algorithm import make_rlvr
from spell_jax.algorithms.rlvr.config import RlvrConfig
from spell_jax.algorithms.rlvr.self_distillation import (
    SelfDistillationConfig,
    make_self_distillation,
)
from spell_jax.data.questions import Question
from spell_jax.learner.loss_config import LossConfig
from tests import noise
from tests.algorithms.preference import runs
from tests.algorithms.scripted import (
    PROMPTS,
    QA,
    ROWS,
    Script,
    ScriptedModels,
    by_role,
    make_algorithm,
    make_context,
    make_small_config,
    roll_out,
    to_groups,
)

GIVEN = (
    Question(QA, ("first", "second fact", "third"), "Q?", "right", ("second",)),
    Question(QA, ("a", "b", "c"), "R?", "right", shown=(0, 2)),
)


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(tokens: Any) -> str:
    return bytes(int(token) for token in tokens).decode()


def make_distillation(
    kind: Any = make_self_distillation, config: Any = SelfDistillationConfig, **options
):
    fields: dict[str, Any] = {"generation_batch": len(GIVEN)} | options
    context = make_context(questions=lambda: GIVEN, teacher_prompt=encode)
    return kind(make_small_config(config, **fields), context)


def right_or_wrong(role: str, prompt: str, sibling: int, model: str) -> str:
    assert role == "responder" and model == "policy"
    return "The answer is right" if sibling % 2 else "The answer is wrong"


@pytest.mark.parametrize("text", ["The answer is right", "nothing to read"])
def test_every_answered_question_is_a_group_whose_teacher_reads_less(text: str) -> None:
    algorithm = make_distillation()
    episodes = roll_out(algorithm, ScriptedModels(lambda *_: text), 1)
    groups, annotations = algorithm.groups(episodes, (0, 1))
    assert len(groups) == len(GIVEN)
    for e, group, annotation in zip(episodes, groups, annotations, strict=True):
        assert group.advantages == [0.0] * 4 and annotation.used == {"responder": "used"}
        shown = [e.cluster.documents[i] for i in e.shown]
        short = PROMPTS.responder(e.task, shown, e.question)
        assert decode(group.reference_prompt) == short
        assert len(shown) < len(e.cluster.documents) and len(group.prompt) > len(short)


def test_questions_over_the_cap_have_no_group() -> None:
    algorithm = make_distillation()
    models = ScriptedModels(lambda *call: None if "first" in call[1] else "The answer is x")
    groups, annotations = algorithm.groups(roll_out(algorithm, models, 1), (0, 1))
    assert len(groups) == 1
    assert sorted(a.used["responder"] for a in annotations) == ["overlong", "used"]


def test_rlvr_gives_the_teachers_prompt_beside_its_own_advantages() -> None:
    algorithm = make_distillation(make_rlvr, RlvrConfig, responder__reward="rule")
    groups = to_groups(algorithm, roll_out(algorithm, ScriptedModels(right_or_wrong), 1))
    assert len(groups) == 2
    for group in groups:
        assert any(group.advantages) and group.reference_prompt is not None


def test_only_the_responder_of_spell_has_a_teacher() -> None:
    algorithm = make_algorithm(ROWS)
    algorithm.answering._teacher_prompt = encode
    groups = by_role(to_groups(algorithm, roll_out(algorithm, ScriptedModels(Script(ROWS)), 1)))
    assert groups["responder"] and groups["questioner"]
    assert all(group.reference_prompt is not None for group in groups["responder"])
    assert all(g.reference_prompt is None for g in groups["questioner"] + groups["verifier"])


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        ("self_distillation", 0.0, "must be above 0"),
        ("reconstruction", 1.0, "must be 0"),
        ("longpo", 1.0, "must be 0"),
    ],
)
def test_loss_and_algorithm_must_fit(name: str, weight: float, message: str) -> None:
    config = registry.ALGORITHMS[name].config()
    loss = LossConfig(distillation_weight=weight)
    conflict, *_ = registry.objective_conflicts(config, loss)
    assert conflict.startswith(f"loss.distillation_weight = {weight}: {message}")


@pytest.mark.slow
def test_two_steps_resume_to_the_bit(tmp_path: pathlib.Path) -> None:
    folder = noise.save_policy(tmp_path / "policy")
    fields = {"algorithm.name": "self_distillation", "algorithm.static_questions": 9}
    lines = runs.check_resumed(folder, tmp_path, **fields, **{"loss.distillation_weight": 1.0})
    for line in lines:
        assert line["train/empty_update"] == 0 and line["train/rows/responder"] > 2
        assert line["train/teacher_kl"] != 0 and line["train/gradient_norm"] > 0
