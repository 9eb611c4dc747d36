"""Tests of the teacher that reads a shorter prompt (loss.distillation_weight)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from spell_jax.learner import old_logprobs, packing
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.packing import Bucket, PackingConfig, TrainGroup
from spell_jax.runtime import mesh as meshes
from tests import tiny
from tests.learner.test_recompute import SMOOTH, TEMPERATURE, assert_close, logprobs, moments

WEIGHT = 0.5
DISTILLED = LossConfig(distillation_weight=WEIGHT)
LAYOUT = PackingConfig((Bucket(48, 32),), 192)


def make_learner(loss: LossConfig, mesh: dict[str, int] | None = None) -> Learner:
    placed = meshes.make_mesh(mesh or {"fsdp": 1}, None if mesh else jax.devices()[:1])
    return Learner(tiny.POLICY, SMOOTH, loss, LAYOUT, placed, TEMPERATURE)


def taught_groups(advantages: float = 1.0) -> list[TrainGroup]:
    """Return groups. All but the first have a teacher's prompt: the second half of their own."""
    sampled = tiny.groups(5, seed=3)
    policy_logprobs = logprobs(tiny.weights(), sampled)
    return [
        dataclasses.replace(
            group,
            advantages=[advantages * a for a in group.advantages],
            reference_prompt=None if number == 0 else group.prompt[len(group.prompt) // 2 :],
        ).with_logprobs(rows)
        for number, (group, rows) in enumerate(zip(sampled, policy_logprobs, strict=True))
    ]


def teacher_weights() -> Any:
    """Change the policy's weights a little, so that the teacher differs everywhere."""

    def change(x: Any) -> Any:
        return x + 0.01 * np.cos(np.arange(x.size)).reshape(x.shape)

    return jax.tree.map(change, tiny.weights())


def with_gaps_by_hand(groups: list[TrainGroup]) -> list[TrainGroup]:
    teacher = teacher_weights()
    groups_with_gaps = []
    for group in groups:
        gaps = None
        if group.reference_prompt is not None:
            read = dataclasses.replace(group, prompt=group.reference_prompt, reference_prompt=None)
            (scored,) = logprobs(teacher, [read])
            pairs = zip(scored, tiny.logprobs(group), strict=True)
            gaps = [WEIGHT * (after - before) for after, before in pairs]
        groups_with_gaps.append(
            dataclasses.replace(group, token_advantages=gaps, reference_prompt=None)
        )
    return groups_with_gaps


@pytest.mark.parametrize(
    ("mesh", "advantages"),
    [
        (None, 1.0),
        (None, 0.0),
        pytest.param({"fsdp": 2, "context": 2, "tensor": 2}, 1.0, marks=pytest.mark.slow),
    ],
)
def test_update_adds_the_teachers_gap_to_each_tokens_advantage(mesh, advantages) -> None:
    groups = taught_groups(advantages)
    distilled_learner, plain = make_learner(DISTILLED, mesh), make_learner(LossConfig())
    state, numbers = distilled_learner.update(
        distilled_learner.init(tiny.weights()), groups, teacher_weights()
    )
    by_hand = with_gaps_by_hand(groups)
    expected_state, _ = plain.update(plain.init(tiny.weights()), by_hand)
    assert_close(moments(state), moments(expected_state), 2e-4)
    gaps = [gap / WEIGHT for group in by_hand for gap in group.token_advantages or []]
    assert numbers["teacher_kl"] == pytest.approx(-np.concatenate(gaps).mean(), rel=1e-3)


def test_policy_that_is_its_teacher_does_not_move() -> None:
    groups = [dataclasses.replace(g, reference_prompt=g.prompt) for g in taught_groups(0.0)]
    learner = make_learner(DISTILLED)
    _, numbers = learner.update(learner.init(tiny.weights()), groups, tiny.weights())
    assert numbers["gradient_norm"] < 1e-5 and abs(numbers["teacher_kl"]) < 1e-5


def test_updates_close_the_gap_to_the_teacher() -> None:
    """On fixed tokens, the update descends the mean of half the squared gap."""
    learner = make_learner(LossConfig(distillation_weight=1.0))
    state, groups, squares = learner.init(tiny.weights()), taught_groups(0.0)[1:], []
    for _ in range(3):
        groups = learner.recompute(state, groups)
        scored = learner.score_reference(teacher_weights(), groups)
        distilled = old_logprobs.with_teacher(groups, scored, 1.0)
        gaps = [gap for group in distilled for gap in group.token_advantages or []]
        squares.append(float(np.mean(np.concatenate(gaps) ** 2)))
        state, _ = learner.update(state, groups, teacher_weights())
    assert squares[0] > squares[1] > squares[2]


def test_gaps_are_clipped_and_zero_where_no_row_fits() -> None:
    plain = tiny.group([1], [[2, 3], [4]], [0.0, 0.0], logprobs=[np.zeros(2), np.zeros(1)])
    group = dataclasses.replace(plain, reference_prompt=[1])
    scored = group.with_logprobs([np.array([-9.0, 1.0]), np.array([np.nan])])
    untaught, taught_group = old_logprobs.with_teacher([plain, group], [scored], 2.0)
    assert untaught == plain
    rows = taught_group.token_advantages
    assert [row.tolist() for row in rows or []] == [[-10.0, 2.0], [0.0]]


def test_teacher_reads_a_shorter_prompt_without_the_samplers_experts() -> None:
    experts, prompt_experts = np.zeros((1, 1, 1), np.int8), np.zeros((2, 1, 1), np.int8)
    group = tiny.change_samples(
        tiny.group([1, 2], [[3]], [1.0], reference_prompt=[2]),
        experts=[experts],
        prompt_experts=[prompt_experts],
    )
    (read,) = old_logprobs.as_reference_reads([group])
    assert read.prompt == [2] and tiny.answers(read) == [[3]]
    assert read.samples[0].experts is None and read.samples[0].prompt_experts is None


def test_token_advantages_follow_their_answers() -> None:
    """Splits and packing keep the advantage of each token with its token."""
    gaps = [np.arange(3, dtype=np.float32), np.full(2, 7, np.float32)]
    group = tiny.group([1, 2], [[3, 4, 5], [6, 7]], [10.0, 20.0], token_advantages=gaps)
    (batch,) = tiny.pack(packing.separate_answers([group]), Bucket(16, 8))
    advantage_by_token = {
        int(t): float(a) for t, a in zip(batch.target[0], batch.advantage[0], strict=True)
    }
    assert advantage_by_token == {3: 10.0, 4: 11.0, 5: 12.0, 6: 27.0, 7: 27.0, 0: 0.0}


def test_errors_name_what_is_missing() -> None:
    groups = [group.with_logprobs([None] * len(group.samples)) for group in taught_groups()]
    learner = make_learner(DISTILLED)
    with pytest.raises(ValueError, match=r"loss\.distillation_weight = 0\.5: need the logprobs"):
        learner.update(learner.init(tiny.weights()), groups, tiny.weights())
    with pytest.raises(ValueError, match=r"reference weights must be given"):
        learner.update(learner.init(tiny.weights()), taught_groups())
    with pytest.raises(ValueError, match=r"loss\.distillation_weight = 1\.0: must be 0 for"):
        fields = {"old_logprobs": "reference", "aggregation": "sequence_mean"}
        LossConfig(objective="dpo", distillation_weight=1.0, **fields)
