"""Tests of the preference loss (DPO): values by hand, and pairs that share one prompt."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.learner import aggregation, packing, update
from spell_jax.learner import loss as losses
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.packing import Bucket, PackingConfig, TrainGroup
from spell_jax.policy import transformer
from spell_jax.runtime import mesh as meshes
from tests import tiny

DPO = LossConfig(
    objective="dpo",
    old_logprobs="reference",
    aggregation="sequence_mean",
    beta=0.3,
    preference_weight=0.7,
    nll_weight=0.2,
)
TEMPERATURE = 0.7
RANDOM = np.random.default_rng(5)


def ids(count: int) -> np.ndarray:
    return RANDOM.integers(3, tiny.POLICY.vocab_size, size=count)


def pair(prompt: int, chosen_length: int, rejected_length: int, reference: int) -> TrainGroup:
    answers = [ids(chosen_length), ids(rejected_length)]
    return tiny.group(ids(prompt), answers, [1.0, -1.0], reference_prompt=ids(reference))


ALIGNED = dataclasses.replace(DPO, align_weight=0.6)


def aligned(group: TrainGroup, prompt: int) -> TrainGroup:
    """Return the group with its chosen answer also after another prompt of `prompt` tokens."""
    aligned_group = TrainGroup(ids(prompt), group.samples[:1], [0.0], group.name)
    return dataclasses.replace(group, aligned=aligned_group)


PAIRS = [pair(12, 5, 3, 4), pair(7, 2, 6, 7), pair(3, 1, 1, 2)]
WITH_ALIGNED = [aligned(group, size) for group, size in zip(PAIRS, (14, 9, 5), strict=True)]


@functools.cache
def learner(length: int = 48, answers: int = 32, loss: LossConfig = DPO) -> Learner:
    mesh = meshes.make_mesh({"fsdp": 1}, jax.devices()[:1])
    layout = PackingConfig((Bucket(length, answers),), 2 * length)
    smooth = OptimizerConfig(learning_rate=0.05, epsilon=0.1)
    return Learner(tiny.POLICY, smooth, loss, layout, mesh, TEMPERATURE)


@jax.jit
def every_logprob(params: transformer.Params, tokens: jax.Array) -> jax.Array:
    logits = transformer.logits(tiny.POLICY, params, tokens)[:, :-1] / TEMPERATURE
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]


def sums_of(params: transformer.Params, rows: Sequence[tuple[Any, Any]]) -> jax.Array:
    """Sum the logprobs of each answer [rows], one row (prompt, answer) each: no packing."""
    tokens = np.zeros((len(rows), 24), np.int32)
    is_answer = np.zeros((len(rows), 24), bool)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[row, :end] = [*prompt, *answer]
        is_answer[row, len(prompt) : end] = True
    return jnp.sum(every_logprob(params, tokens) * is_answer[:, 1:], axis=1)


def separate_loss(params: transformer.Params, reference: transformer.Params) -> jax.Array:
    """Compute the loss of PAIRS from single rows; the reference reads `reference_prompt`."""
    policy_rows = [(g.prompt, a) for g in PAIRS for a in tiny.answers(g)]
    reference_rows = [(g.reference_prompt, a) for g in PAIRS for a in tiny.answers(g)]
    policy = sums_of(params, policy_rows).reshape(-1, 2)
    ratio = policy - sums_of(reference, reference_rows).reshape(-1, 2)
    preference = -jax.nn.log_sigmoid(DPO.beta * (ratio[:, 0] - ratio[:, 1]))
    nll = -policy[:, 0] / np.array([len(g.samples[0].tokens) for g in PAIRS])
    return jnp.mean(DPO.preference_weight * preference + DPO.nll_weight * nll)


def alignment(params: transformer.Params, reference: transformer.Params) -> jax.Array:
    """Compute the mean distance of the chosen answers' rewards after WITH_ALIGNED's two prompts."""
    long = [g.aligned.prompt for g in WITH_ALIGNED]
    short, read = [g.prompt for g in PAIRS], [g.reference_prompt for g in PAIRS]
    rewards = []
    for of_policy, of_reference in ((long, long), (short, read)):
        policy_rows, reference_rows = (
            [(prompt, g.samples[0].tokens) for prompt, g in zip(prompts, PAIRS, strict=True)]
            for prompts in (of_policy, of_reference)
        )
        rewards.append(
            DPO.beta * (sums_of(params, policy_rows) - sums_of(reference, reference_rows))
        )
    return jnp.mean(jnp.abs(rewards[0] - rewards[1]))


def packed_loss(
    params: transformer.Params, learner: Learner, groups: list[TrainGroup]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    batches, *_ = learner.pack(groups, learner.weigh(groups))
    batches = [jax.tree.map(jnp.asarray, batch) for batch in batches]
    parts = [update.micro_batch_loss(learner.spec, params, {}, batch, None) for batch in batches]
    total = jax.tree.map(lambda *values: sum(values), *(sums for _, sums in parts))
    return jnp.stack([value for value, _ in parts]).sum(), total


@pytest.mark.slow
@pytest.mark.parametrize("align_weight", [0.0, 0.6])
def test_pairs_in_packed_rows_have_the_gradient_of_separate_rows(align_weight):
    reference = jax.tree.map(jnp.asarray, tiny.weights(seed=1))
    params = jax.tree.map(jnp.asarray, tiny.weights())
    pair_learner = learner(loss=ALIGNED) if align_weight else learner()
    scored = pair_learner.score_reference(reference, WITH_ALIGNED if align_weight else PAIRS)

    def separate(params: transformer.Params, reference: transformer.Params) -> jax.Array:
        distance = alignment(params, reference)
        return separate_loss(params, reference) + align_weight * distance

    expected_loss, gradient = jax.jit(jax.value_and_grad(separate))(params, reference)
    of_packed = functools.partial(packed_loss, learner=pair_learner, groups=scored)
    (loss, _), packed = jax.jit(jax.value_and_grad(of_packed, has_aux=True))(params)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient))
    assert largest > 0.01
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest), packed, gradient
    )


def test_reference_reads_its_own_prompt():
    reference = jax.tree.map(jnp.asarray, tiny.weights(seed=1))
    scored = learner().score_reference(reference, PAIRS)
    rows = [(g.reference_prompt, a) for g in PAIRS for a in tiny.answers(g)]
    logprob_sums = [x.sum() for g in scored for x in tiny.logprobs(g)]
    np.testing.assert_allclose(logprob_sums, sums_of(reference, rows), rtol=1e-4)
    assert [g.prompt is p.prompt for g, p in zip(scored, PAIRS, strict=True)] == [True] * 3
    plain_pairs = [dataclasses.replace(g, reference_prompt=None) for g in PAIRS]
    scored_plain_pairs = learner().score_reference(reference, plain_pairs)
    rows = [(g.prompt, a) for g in PAIRS for a in tiny.answers(g)]
    logprob_sums = [x.sum() for g in scored_plain_pairs for x in tiny.logprobs(g)]
    np.testing.assert_allclose(logprob_sums, sums_of(reference, rows), rtol=1e-4)


def test_update_raises_the_margin_of_the_pairs():
    pair_learner = learner()
    state, reference = pair_learner.init(tiny.weights()), pair_learner.init(tiny.weights()).params
    plain_pairs = [dataclasses.replace(g, reference_prompt=None) for g in PAIRS]
    state, first = pair_learner.update(state, plain_pairs, reference)
    assert first["preference_loss"] == pytest.approx(np.log(2), rel=1e-5)  # policy = reference
    assert first["chosen_reward"] == pytest.approx(0, abs=1e-4)
    expected_loss = 0.7 * first["preference_loss"] + 0.2 * first["chosen_nll"]
    assert first["loss"] == pytest.approx(expected_loss, rel=1e-5)
    _, second = pair_learner.update(state, plain_pairs, reference)
    assert second["preference_loss"] < first["preference_loss"]
    assert second["chosen_reward"] > second["rejected_reward"]
    assert second["preference_accuracy"] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="reference weights must be given"):
        pair_learner.update(state, plain_pairs)


def test_preference_loss_and_its_sums_by_hand():
    now, before = [[-1.0, -2.0], [-0.5]], [[-1.5, -2.5], [-0.25]]
    second_now, second_before = [[-3.0], [-1.0, -1.0]], [[-2.0], [-2.0, -1.5]]
    groups = [
        tiny.group([1], [[2] * len(a) for a in answers], [1.0, -1.0], logprobs=list(old))
        for answers, old in (
            (now, map(np.array, before)),
            (second_now, map(np.array, second_before)),
        )
    ]
    (batch,) = jax.tree.map(jnp.asarray, tiny.pack(groups, Bucket(16, 8), "sequence_mean"))
    assert batch.group[0].tolist() == [0, 0, 0, 1, 1, 1, -1, -1]
    # Log-ratios: 1.0 and -.25 in the first pair; -1.0 and 1.5 in the second.
    logprobs = jnp.array([[-1.0, -2.0, -0.5, -3.0, -1.0, -1.0, 0.0, 0.0]])
    value, sums = losses.batch_loss(logprobs, jnp.zeros_like(logprobs), batch, DPO)
    margins = 0.3 * np.array([1.25, -2.5])
    preference_loss = np.mean(np.log1p(np.exp(-margins)))
    assert float(sums["preference_loss"]) == pytest.approx(preference_loss, rel=1e-6)
    assert float(sums["preference_accuracy"]) == pytest.approx(0.5)
    assert float(sums["chosen_nll"]) == pytest.approx((1.5 + 3.0) / 2)
    assert float(sums["chosen_reward"]) == pytest.approx(0.3 * (1.0 - 1.0) / 2, abs=1e-6)
    assert float(sums["rejected_reward"]) == pytest.approx(0.3 * (-0.25 + 1.5) / 2)
    assert float(value) == pytest.approx(0.7 * preference_loss + 0.2 * 2.25)
    assert {*DPO.sums} == {*sums}


def test_a_batch_that_would_broadcast_is_refused() -> None:
    groups = [pair(4, 2, 3, 4)]
    (batch,) = jax.tree.map(jnp.asarray, tiny.pack(groups, Bucket(16, 8), "sequence_mean"))
    logprobs = jnp.zeros_like(batch.weight)
    narrow = dataclasses.replace(batch, weight=batch.weight[:, :1])
    with pytest.raises(AssertionError, match="shape"):
        losses.batch_loss(logprobs, logprobs, narrow, DPO)


def test_a_pair_is_refused_whole_and_never_split():
    fits, too_long = pair(6, 4, 4, 3), pair(6, 4, 5, 3)
    wide_pair = pair(2, 5, 5, 2)
    parts, refused = packing.whole_groups([too_long, fits, wide_pair], Bucket(14, 9))
    assert [(part.group, list(part.answers)) for part in parts] == [(fits, [2, 3])]
    assert refused == [0, 1, 4, 5]
    split, none = packing.split_groups([too_long], Bucket(14, 9))
    assert len(split) == 2 and not none  # as other losses do
    groups = [too_long, fits]
    (batch,), count = learner(14, 9).pack(groups, aggregation.weigh(groups))
    assert count == 2 and set(batch.answer_id[0].tolist()) == {2, 3, -1}


def test_distance_of_the_chosen_answers_rewards_by_hand():
    group = tiny.group(
        [1, 1],
        [[2, 2], [3]],
        [1.0, -1.0],
        logprobs=[np.array([-1.5, -2.5]), np.array([-0.25])],
        aligned=tiny.group([1, 1, 1], [[2, 2]], [0.0], logprobs=[np.array([-1.0, -1.0])]),
    )
    assert (group.tokens, group.answer_tokens) == (10, 5)
    (batch,) = jax.tree.map(jnp.asarray, tiny.pack([group], Bucket(12, 6), "sequence_mean"))
    assert batch.group[0].tolist() == [0] * 5 + [-1]
    assert batch.answer[0].tolist() == [0, 0, 1, 2, 2, -1]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 3, 4, 0, 0]
    assert batch.last_query[0].tolist() == [4, 4, 3, 3, 4, 9, 9, 9, 9, 9, -1, -1]
    logprobs = jnp.array([[-1.0, -2.0, -0.5, -3.0, -1.5, 0.0]])
    value, sums = losses.batch_loss(logprobs, jnp.zeros_like(logprobs), batch, ALIGNED)
    plain, _ = losses.batch_loss(logprobs, jnp.zeros_like(logprobs), batch, DPO)
    # Log-ratios of the chosen answer: 1.0 after its prompt, -2.5 after the other.
    assert float(sums["alignment"]) == pytest.approx(0.3 * 3.5)
    assert float(value - plain) == pytest.approx(0.6 * 0.3 * 3.5)
    assert {*ALIGNED.sums} == {*sums}
    assert float(sums["weight"]) == pytest.approx(1) and float(sums["tokens"]) == 3


def test_alignment_needs_aligned_groups():
    aligned_learner = learner(loss=ALIGNED)
    state = aligned_learner.init(tiny.weights())
    with pytest.raises(ValueError, match=r"loss\.align_weight = 0\.6: needs an aligned group in"):
        aligned_learner.update(state, PAIRS, state.params)


def test_reference_prompt_is_not_longer_than_the_prompt():
    with pytest.raises(ValueError, match=r"group\.reference_prompt: of 4 tokens, must have from 1"):
        tiny.group([1, 2, 3], [[4], [5]], [1.0, -1.0], reference_prompt=[1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"group\.reference_prompt: of 0 tokens"):
        tiny.group([1, 2, 3], [[4], [5]], [1.0, -1.0], reference_prompt=[])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"old_logprobs": "on_policy"}, r"old_logprobs = 'on_policy': must be 'reference' if"),
        ({"objective": "clip", "nll_weight": 0.0}, r"it is 'clip'"),
        (
            {"objective": "clip", "old_logprobs": "on_policy"},
            r"loss\.nll_weight = 0\.2: must be 0 for loss\.objective = 'clip'",
        ),
        (
            {"objective": "clip", "old_logprobs": "rollout", "nll_weight": 0.0, "align_weight": 1},
            r"loss\.align_weight = 1: must be 0 for loss\.objective = 'clip'",
        ),
        ({"kl_weight": 0.1}, r"loss\.kl_weight = 0\.1: must be 0 for loss\.objective = 'dpo'"),
        ({"aggregation": "token_mean"}, r"aggregation = 'token_mean': must be 'sequence_mean'"),
        ({"beta": -1.0}, r"loss\.beta = -1\.0: must be at least 0"),
        ({"preference_weight": -1.0}, r"loss\.preference_weight = -1\.0: must be at least 0"),
    ],
)
def test_fields_that_do_not_fit_preferences_are_rejected(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DPO, **fields)
