"""Tests of the update: the same step for any packing and any devices."""

import dataclasses
import functools
import logging
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spell_jax.learner import aggregation
from spell_jax.learner import update as updates
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.packing import Bucket, PackingConfig, TrainGroup
from spell_jax.learner.shapes import AUTO, row_count
from spell_jax.learner.update import TrainState
from spell_jax.policy import transformer
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.files.checkpoint import Checkpoints
from tests import tiny

BUCKETS = (Bucket(32, 24), Bucket(48, 32))
ON_POLICY = LossConfig()
PACKING = PackingConfig(BUCKETS[1:], token_budget=192)
# With this epsilon a step is a smooth function of the gradient, not nearly its sign.
SMOOTH = OptimizerConfig(learning_rate=0.01, epsilon=1e-3, weight_decay=0.1)
RELATIVE = 1e-5  # of a tensor's largest element, for values equal up to the order of sums


class Counted(Learner):
    """A learner that records each trace of its two jitted functions."""

    def __init__(self, *args, **kwargs):
        self.traces: list[str] = []
        accumulate, apply = updates.accumulate, updates.apply

        def traced_accumulate(spec, params, frozen, carry, batch, reference):
            self.traces.append(f"accumulate {batch.tokens.shape}")
            return accumulate(spec, params, frozen, carry, batch, reference)

        def traced_apply(spec, state, gradients, loss):
            self.traces.append("apply")
            return apply(spec, state, gradients, loss)

        patched = {"accumulate": traced_accumulate, "apply": traced_apply}
        with mock.patch.multiple(updates, **patched):
            super().__init__(*args, **kwargs)


@functools.cache
def _learner(
    packing_config: PackingConfig = PACKING,
    loss: LossConfig = ON_POLICY,
    mesh: tuple[tuple[str, int], ...] = (),
    policy=tiny.POLICY,
    compute_dtype: str = "float32",
) -> Counted:
    """Create a learner on one device, or on the eight devices of a mesh."""
    devices = None if mesh else jax.devices()[:1]
    return Counted(
        policy,
        SMOOTH,
        loss,
        packing_config,
        meshes.make_mesh(dict(mesh) or {"fsdp": 1}, devices),
        TEMPERATURE,
        compute_dtype,
    )


def _step(learner: Learner, groups: list[TrainGroup], reference=None) -> tuple[TrainState, dict]:
    """Return (new state, metrics) of one update from the tiny weights."""
    state = learner.init(tiny.weights(learner.policy))
    state, numbers = learner.update(state, groups, reference)
    return jax.device_get(state), numbers


def _moments(state: TrainState):
    """Return Adam's first moment: after one step it is the clipped gradient times 1 - b1."""
    return optax.tree.get(state.opt_state, "mu")


def _assert_close(tree, expected_tree, relative: float = RELATIVE) -> None:
    def compare(path, a, b):
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error < relative, f"{jax.tree_util.keystr(path)}: {error}"

    jax.tree_util.tree_map_with_path(compare, tree, expected_tree)


def _assert_same_step(step, expected_step, relative: float = RELATIVE) -> None:
    _assert_close(step[0].params, expected_step[0].params, relative)
    _assert_close(_moments(step[0]), _moments(expected_step[0]), relative)
    for name in ("loss", "gradient_norm", "entropy", "mean_logprob", "answer_tokens"):
        assert step[1][name] == pytest.approx(expected_step[1][name], rel=relative, abs=1e-6), name


GROUPS = tiny.groups(7, seed=1)
SMALL = [tiny.group([5, 6, 7], [[8, 9], [10]], [0.5, -1.5])]
TEMPERATURE = 0.7


def _rows(groups: list[TrainGroup]) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens, mask of answer tokens) [answers, 18]; a row is a prompt and one answer."""
    pairs = [(list(group.prompt), a) for group in groups for a in tiny.answers(group)]
    tokens = np.zeros((len(pairs), 18), np.int32)
    answers = np.zeros(tokens.shape, np.float32)
    for row, (prompt, answer) in enumerate(pairs):
        tokens[row, : len(prompt) + len(answer)] = prompt + answer
        answers[row, len(prompt) : len(prompt) + len(answer)] = 1
    return tokens, answers


@jax.jit
def _logprobs(params: transformer.Params, tokens: jax.Array) -> jax.Array:
    """Compute the logprob [rows, 18] of each token given earlier tokens; 0 for the first token."""
    logits = transformer.logits(tiny.POLICY, params, tokens)[:, :-1] / TEMPERATURE
    token_logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    return jnp.pad(token_logprobs[..., 0], ((0, 0), (1, 0)))


@jax.jit
@jax.grad
def _surrogate_gradient(params, tokens, weights):
    return -jnp.sum(_logprobs(params, tokens) * weights)


@functools.cache
def _expected_step() -> tuple[TrainState, dict]:
    return _step(_learner(), GROUPS)


# ------------------------------------------------------------------------------ One step, many ways


def test_loss_and_gradient_by_hand() -> None:
    """Without packing: every answer after its prompt in its own row, plain causal attention."""
    tokens, answers = _rows(GROUPS)
    every_advantage = [a for group in GROUPS for a in group.advantages]
    share = answers * np.array(every_advantage, np.float32)[:, None]
    gradient = jax.device_get(_surrogate_gradient(tiny.weights(), tokens, share / answers.sum()))
    state, numbers = _expected_step()
    norm = float(optax.tree.norm(gradient))
    assert numbers["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert numbers["answer_tokens"] == answers.sum()
    # On-policy the ratio is 1.
    assert numbers["loss"] == pytest.approx(-share.sum() / answers.sum(), rel=1e-5)
    clipped = jax.tree.map(lambda g: g * min(1.0, SMOOTH.clip_norm / norm), gradient)
    _assert_close(_moments(state), jax.tree.map(lambda g: g * (1 - SMOOTH.b1), clipped))

    def adam(weight, g):
        step = g / (np.abs(g) + SMOOTH.epsilon) + SMOOTH.weight_decay * weight
        return weight - SMOOTH.learning_rate * step

    _assert_close(state.params, jax.tree.map(adam, tiny.weights(), clipped))
    assert int(state.step) == 1


@pytest.mark.parametrize(
    "packing_config",
    [
        PackingConfig(BUCKETS[1:], 192, shared_prefix="none"),
        PackingConfig(BUCKETS, 192),
        PackingConfig((Bucket(160, 96),), 160),
        PackingConfig((Bucket(20, 8),), 40),  # most groups are split, many micro-batches
        PackingConfig(AUTO, 70),
    ],
    ids=["separate rows", "two buckets", "one wide row", "split groups", "chosen shapes"],
)
def test_step_is_invariant_to_packing(packing_config: PackingConfig) -> None:
    step = _step(_learner(packing_config), GROUPS)
    assert step[1]["refused_answers"] == 0
    _assert_same_step(step, _expected_step())


def test_shared_prefixes_save_tokens() -> None:
    group = tiny.group([3] * 20, [[5, 6]] * 4, [1.0, -1.0, 0.5, 0.0])
    separate = _learner(PackingConfig(BUCKETS[1:], 192, shared_prefix="none"))
    shared, separate = (
        learner.pack([group], learner.weigh([group]))[0] for learner in (_learner(), separate)
    )
    count = [sum(int((b.last_query >= 0).sum()) for b in batches) for batches in (shared, separate)]
    assert count == [20 + 8, 4 * 22]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        (("data", 2), ("fsdp", 2), ("tensor", 2)),
        (("fsdp", 8),),
        (("context", 8),),
        (("fsdp", 2), ("context", 2), ("tensor", 2)),
    ],
    ids=lambda mesh: " ".join(f"{axis}={size}" for axis, size in mesh),
)
def test_step_on_eight_devices_equals_one_device(mesh: tuple[tuple[str, int], ...]) -> None:
    learner = _learner(mesh=mesh)
    _assert_same_step(_step(learner, GROUPS), _expected_step())
    state = learner.init(jax.random.key(0))
    kernel = state.params["layers"]["mlp"]["up_kernel"]
    parts = dict(mesh).get("fsdp", 1) * dict(mesh).get("context", 1)
    assert kernel.addressable_shards[0].data.size * parts <= kernel.size
    assert len(kernel.sharding.device_set) == 8


def test_metrics_are_means_for_any_sum_of_weights() -> None:
    """With role_mean (Eq. 10) the weights of each role add up to 1."""
    groups = [dataclasses.replace(group, name="responder") for group in tiny.groups(4)]
    twice = [*groups, *(dataclasses.replace(group, name="verifier") for group in groups)]
    _, expected_numbers = _step(_learner(), groups)
    _, numbers = _step(_learner(loss=LossConfig(aggregation="role_mean")), twice)
    for name in ("mean_logprob", "entropy", "clip_share", "approx_kl"):
        assert numbers[name] == pytest.approx(expected_numbers[name], rel=1e-5, abs=1e-7), name


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["group", "none"])
def test_fill_is_the_share_of_slots_that_hold_a_token(shared: str) -> None:
    groups, layout = tiny.groups(5), dataclasses.replace(PACKING, shared_prefix=shared)
    _, numbers = _step(_learner(layout), groups)
    answers = sum(group.answer_tokens for group in groups)
    prompts = sum(len(g.prompt) * (1 if shared == "group" else len(g.samples)) for g in groups)
    batches, *_ = _learner(layout).pack(groups, aggregation.weigh(groups))
    slots = sum(batch.tokens.size for batch in batches)
    assert numbers["fill"] == pytest.approx((answers + prompts) / slots)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["block", "attention", "dots", "offload"])
@pytest.mark.parametrize("attention", ["dense", "chunked"])
def test_step_is_invariant_to_remat_and_attention_kernel(remat: str, attention: str) -> None:
    policy = dataclasses.replace(tiny.POLICY, remat=remat, attention=attention)
    _assert_same_step(_step(_learner(policy=policy), GROUPS), _expected_step())


@pytest.mark.slow
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("mesh", [(), (("fsdp", 4), ("context", 2))], ids=str)
def test_host_offload_does_not_change_the_step(mesh: tuple, weights: bool) -> None:
    optimizer = dataclasses.replace(SMOOTH, offload=True, offload_weights=weights)
    devices = None if mesh else jax.devices()[:1]
    placed = meshes.make_mesh(dict(mesh) or {"fsdp": 1}, devices)
    learner = Learner(tiny.POLICY, optimizer, ON_POLICY, PACKING, placed, TEMPERATURE)
    state = learner.init(tiny.weights())
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(_moments(state))}
    assert kinds == {"pinned_host"}
    state, numbers = learner.update(state, GROUPS)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(_moments(state))} == kinds
    masters = "pinned_host" if weights else "device"
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {masters}
    for params in (learner.cast(state.params), learner.export(state.params)[1]):
        assert {x.sharding.memory_kind for x in jax.tree.leaves(params)} == {"device"}
    _assert_same_step((jax.device_get(state), numbers), _expected_step())


@pytest.mark.slow
def test_offloaded_state_is_restored_from_a_checkpoint(tmp_path) -> None:
    mesh = meshes.make_mesh({"fsdp": 4, "context": 2})
    optimizer = dataclasses.replace(SMOOTH, offload=True, offload_weights=True)
    learner = Learner(tiny.POLICY, optimizer, ON_POLICY, PACKING, mesh, TEMPERATURE)
    state, _ = learner.update(learner.init(tiny.weights()), SMALL)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"policy": state}, {}, force=True)
    restored = checkpoints.restore(1, {"policy": learner.fns.abstract_state})[0]["policy"]
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves((_moments(restored), restored.params))}
    assert kinds == {"pinned_host"}
    learner.update(restored, SMALL)


@pytest.mark.slow
def test_bfloat16_step_is_close_and_keeps_float32_masters() -> None:
    state, numbers = _step(_learner(compute_dtype="bfloat16"), GROUPS)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}
    assert numbers["gradient_norm"] == pytest.approx(_expected_step()[1]["gradient_norm"], rel=0.05)
    assert numbers["mean_logprob"] == pytest.approx(_expected_step()[1]["mean_logprob"], rel=0.02)


# -------------------------------------------------------------------------------------- Empty steps


def test_buckets_that_the_context_axis_cannot_split_are_rejected() -> None:
    layout = PackingConfig((Bucket(32, 24), Bucket(48, 30)), 96)
    layout.check_splits(2)
    with pytest.raises(ValueError, match=r"\(48, 30\) must be multiples of mesh\.context = 4"):
        _learner(layout, mesh=(("context", 4), ("fsdp", 2)))


def test_empty_update_changes_nothing() -> None:
    learner = _learner()
    state = learner.init(tiny.weights())
    after, numbers = learner.update(state, [])
    assert after is state
    assert numbers == {"empty_update": 1.0, "refused_answers": 0.0}


def test_oversized_answers_are_counted_and_left_out() -> None:
    long = tiny.group([3] * 40, [[4] * 3, [4] * 20], [1.0, 1.0])
    state, numbers = _step(_learner(), [*GROUPS, long])
    assert numbers["refused_answers"] == 1 and int(state.step) == 1
    learner = _learner()
    before = learner.init(tiny.weights())
    after, numbers = learner.update(before, [tiny.group([3] * 60, [[4]], [1.0])])
    assert after is before
    assert numbers == {"empty_update": 1.0, "refused_answers": 1.0}


# ----------------------------------------------------------------------- Reference and old logprobs


def _difference(params) -> np.ndarray:
    """Return logprobs of SMALL's three answer tokens: under `params` minus under tiny weights."""
    tokens, answers = _rows(SMALL)
    change = _logprobs(params, tokens) - _logprobs(tiny.weights(), tokens)
    return np.asarray(change)[answers > 0]


@pytest.mark.slow
def test_kl_to_a_reference_and_entropy_bonus_enter_the_loss() -> None:
    learner = _learner(loss=LossConfig(kl_weight=0.3, entropy_weight=0.1))
    reference = tiny.weights(seed=1)
    _, numbers = _step(learner, SMALL, reference)
    difference = _difference(reference)
    kl = np.minimum(np.exp(difference) - difference - 1, 10).mean()
    assert kl > 0.05
    assert numbers["kl"] == pytest.approx(kl, rel=1e-4)
    _, plain = _step(_learner(), SMALL)
    assert numbers["entropy"] == pytest.approx(plain["entropy"], rel=1e-5)
    expected_loss = plain["loss"] + 0.3 * kl - 0.1 * plain["entropy"]
    assert numbers["loss"] == pytest.approx(expected_loss, rel=1e-4)
    # Both terms have a gradient; only entropy has one if the reference is the policy itself.
    _, same = _step(learner, SMALL, tiny.weights())
    assert same["kl"] == pytest.approx(0.0, abs=1e-6)
    norms = [numbers["gradient_norm"], same["gradient_norm"], plain["gradient_norm"]]
    assert min(abs(a - b) for a in norms for b in norms if a is not b) > 1e-4


def test_groups_without_the_samplers_cutoffs_are_rejected() -> None:
    learner = _learner(loss=LossConfig(support="sampled"))
    with pytest.raises(
        ValueError, match=r"loss\.support = 'sampled': needs logprobs, kept_log_masses"
    ):
        learner.update(learner.init(tiny.weights()), SMALL)


def test_replayed_experts_need_a_mixture() -> None:
    with pytest.raises(ValueError, match=r"loss\.routing = 'sampled': must be 'own', the policy"):
        _learner(loss=LossConfig(routing="sampled"))


def test_missing_or_unneeded_reference_weights_are_rejected() -> None:
    learner = _learner(loss=LossConfig(kl_weight=0.3, entropy_weight=0.1))
    with pytest.raises(ValueError, match=r"loss\.kl_weight = 0\.3: reference weights"):
        learner.update(learner.init(tiny.weights()), SMALL)
    with pytest.raises(ValueError, match=r"loss\.kl_weight = 0\.0: reference weights"):
        _learner().update(_learner().init(tiny.weights()), SMALL, tiny.weights())


@pytest.mark.slow
def test_rollout_logprobs_give_the_importance_ratio() -> None:
    learner = _learner(loss=LossConfig(old_logprobs="rollout"))
    tokens, answers = _rows(SMALL)
    current = np.asarray(_logprobs(tiny.weights(), tokens))[answers > 0]
    shift = np.array([0.1, -0.5, 0.15])

    def with_old(old: np.ndarray) -> list[TrainGroup]:
        return [SMALL[0].with_logprobs([old[:2], old[2:]])]

    _, numbers = _step(learner, with_old(current - shift))
    ratios, advantages = np.exp(shift), np.array([0.5, 0.5, -1.5])
    expected_loss = np.mean(
        np.maximum(-advantages * ratios, -advantages * np.clip(ratios, 0.8, 1.2))
    )
    assert numbers["loss"] == pytest.approx(expected_loss, rel=1e-4)
    assert numbers["sampler_difference"] == pytest.approx(np.abs(shift).mean(), rel=1e-3)
    assert numbers["approx_kl"] == pytest.approx(-shift.mean(), rel=1e-3)
    _assert_same_step(_step(learner, with_old(current)), _step(_learner(), SMALL), 1e-4)
    with pytest.raises(ValueError, match=r"loss\.old_logprobs = 'rollout'.*need the logprobs"):
        _step(learner, SMALL)


@pytest.mark.slow
def test_truncated_importance_weights_scale_loss_and_gradient() -> None:
    """The weight is a constant factor of each token's share and has no gradient."""
    learner = _learner(loss=LossConfig(tis_cap=1.5))
    tokens, answers = _rows(SMALL)
    current = np.asarray(_logprobs(tiny.weights(), tokens))[answers > 0]
    shift = np.array([0.1, -0.5, 0.9])
    old = current - shift
    groups = [SMALL[0].with_logprobs([old[:2], old[2:]])]
    state, numbers = _step(learner, groups)
    share = np.array([0.5, 0.5, -1.5]) * np.minimum(np.exp(shift), 1.5) / 3
    assert numbers["loss"] == pytest.approx(-share.sum(), rel=1e-4)
    assert numbers["sampler_difference"] == pytest.approx(np.abs(shift).mean(), rel=1e-3)
    weights = np.zeros_like(answers)
    weights[answers > 0] = share
    gradient = jax.device_get(_surrogate_gradient(tiny.weights(), tokens, weights))
    norm = float(optax.tree.norm(gradient))
    assert numbers["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    clipped = jax.tree.map(lambda g: g * min(1.0, SMOOTH.clip_norm / norm), gradient)
    _assert_close(_moments(state), jax.tree.map(lambda g: g * (1 - SMOOTH.b1), clipped))
    fresh = [SMALL[0].with_logprobs([current[:2], current[2:]])]
    _assert_same_step(_step(learner, fresh), _step(_learner(), SMALL), 1e-4)
    with pytest.raises(ValueError, match=r"loss\.tis_cap = 1\.5.*need the logprobs"):
        _step(learner, SMALL)


@pytest.mark.slow
def test_update_interleaved_with_other_work_is_bit_identical() -> None:
    learner = _learner(PackingConfig((Bucket(20, 8),), 40))
    update = learner.start(learner.init(tiny.weights()), GROUPS)
    for _ in range(3):
        update.advance()
        transformer.logits(tiny.POLICY, tiny.weights(), jnp.ones((1, 4), jnp.int32))
    state, (numbers,) = update.finish()
    expected_state, expected_numbers = _step(learner, GROUPS)
    assert numbers == expected_numbers and numbers["micro_batches"] > 3
    jax.tree.map(np.testing.assert_array_equal, state.params, expected_state.params)
    second_update = learner.start(learner.init(tiny.weights()), GROUPS)
    for _ in range(int(numbers["micro_batches"]) + 2):
        second_update.advance()
    state, _ = second_update.finish()
    jax.tree.map(np.testing.assert_array_equal, state.params, expected_state.params)


# ---------------------------------------------------------------------------- Compilation and state


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(), (("data", 2), ("fsdp", 2), ("tensor", 2))], ids=["1", "8"])
def test_update_is_traced_and_compiled_once_per_bucket(mesh: tuple) -> None:
    shared = _learner(mesh=mesh)
    learner = Counted(
        shared.policy, SMOOTH, ON_POLICY, PackingConfig(BUCKETS, 192), shared.mesh, TEMPERATURE
    )
    rows = [row_count(b, 192, meshes.row_shards(shared.mesh)) for b in BUCKETS]
    expected_traces = [f"accumulate ({n}, {b.length})" for n, b in zip(rows, BUCKETS, strict=True)]
    state = learner.init(tiny.weights())
    learner.compile(state)
    assert learner.traces == expected_traces
    programs = learner.fns.accumulate._cache_size()
    for count in (1, 7, 3, 12):
        state, numbers = learner.update(state, tiny.groups(count, seed=count))
        assert numbers["skipped_update"] == 0.0
    assert learner.traces == [*expected_traces, "apply"]
    assert learner.fns.accumulate._cache_size() == programs == len(BUCKETS)
    assert learner.fns.apply._cache_size() == 1


@pytest.mark.slow
def test_chosen_shapes_are_compiled_counted_and_logged_when_first_needed(caplog) -> None:
    layout, mesh = PackingConfig(AUTO, 192), _learner().mesh
    learner = Counted(tiny.POLICY, SMOOTH, ON_POLICY, layout, mesh, TEMPERATURE)
    state = learner.init(tiny.weights())
    caplog.set_level(logging.INFO, "spell_jax.learner.shapes")
    learner.compile(state)
    assert not learner.traces and not len(learner.programs) and not caplog.messages
    for count, new in ((7, True), (2, True), (7, False), (2, False)):
        before = len(caplog.messages)
        state, numbers = learner.update(state, tiny.groups(count, seed=count))
        lines = caplog.messages[before:]
        assert len(lines) == (numbers["shapes"] if new else 0) and numbers["skipped_update"] == 0
        pattern = r"packing: first accumulate of \d+ rows of \d+ tokens, \d+ of answers, took \d"
        assert all(re.match(pattern, line) for line in lines)
    traced = [line for line in learner.traces if line != "apply"]
    assert len(traced) == len(learner.programs) == len(caplog.messages)
    assert caplog.messages[-1].endswith(f"programs so far: {len(traced)}")
    shapes = [f"accumulate {(rows, length)}" for _, rows, length, _ in learner.programs.seen]
    assert sorted(traced) == sorted(shapes)


def test_chosen_shapes_do_not_depend_on_earlier_steps() -> None:
    """A resumed run packs a step as an uninterrupted one."""

    def shapes(learner: Learner, count: int) -> list[tuple]:
        groups = tiny.groups(count, seed=count)
        batches, _ = learner.pack(groups, learner.weigh(groups))
        return [(batch.tokens.shape, batch.target.shape) for batch in batches]

    mesh = (("fsdp", 2), ("context", 2), ("tensor", 2))
    learner = _learner(PackingConfig(AUTO, 256), mesh=mesh)
    uninterrupted = [shapes(learner, count) for count in (3, 30, 9, 1, 30)]
    resumed = _learner(PackingConfig(AUTO, 256), mesh=mesh)
    assert [shapes(resumed, count) for count in (9, 1, 30)] == uninterrupted[2:]
    assert len(set(map(str, uninterrupted))) == 4
    assert all(rows % 2 == length % 2 == 0 for step in uninterrupted for (rows, length), _ in step)


def test_state_matches_the_abstract_state_for_checkpoints() -> None:
    learner = _learner(mesh=(("data", 2), ("fsdp", 2), ("tensor", 2)))
    state = learner.init(tiny.weights())
    state, _ = learner.update(state, SMALL)

    def compare(expected, leaf):
        assert (expected.shape, expected.dtype) == (leaf.shape, leaf.dtype)
        assert expected.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)

    jax.tree.map(compare, learner.fns.abstract_state, state)


def test_host_weights_given_to_init_survive_an_update() -> None:
    learner = _learner()
    weights = jax.tree.map(np.copy, tiny.weights())
    learner.update(learner.init(weights), SMALL)
    jax.tree.map(np.testing.assert_array_equal, weights, tiny.weights())


def test_device_weights_given_to_init_are_donated() -> None:
    """Two copies of a large policy would not fit."""
    learner = _learner()
    weights = jax.device_put(tiny.weights(), learner.fns.param_shardings)
    state = learner.init(weights)
    jax.tree.map(np.testing.assert_array_equal, state.params, tiny.weights())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(weights))


def test_updates_move_logprobs_in_the_direction_of_advantages() -> None:
    learner = _learner()
    state = learner.init(tiny.weights())
    group = tiny.group([5, 6, 7], [[8, 9, 10], [11, 12]], [1.0, -1.0])
    for _ in range(8):
        state, _ = learner.update(state, [group])
    tokens, answers = _rows([group])
    before, after = (
        np.sum(_logprobs(params, tokens) * answers, axis=1)
        for params in (tiny.weights(), state.params)
    )
    assert after[0] > before[0] + 1.0 and after[1] < before[1] - 1.0


# ------------------------------------------------------------------------------------- Schedules


@pytest.mark.parametrize(
    ("schedule", "expected_rates"),
    [
        ("constant", {0: 0.0, 2: 0.5, 4: 1.0, 8: 1.0, 100: 1.0}),
        ("linear", {0: 0.0, 2: 0.5, 4: 1.0, 8: 0.6, 12: 0.2, 100: 0.2}),
        ("cosine", {0: 0.0, 2: 0.5, 4: 1.0, 8: 0.6, 12: 0.2, 100: 0.2, 6: 0.2 + 0.4 * 1.70711}),
    ],
)
def test_learning_rate_schedules(schedule: str, expected_rates: dict[int, float]) -> None:
    config = OptimizerConfig(
        learning_rate=2.0, schedule=schedule, warmup_steps=4, total_steps=12, final_fraction=0.2
    )
    rates = {step: float(config.rate()(step)) / 2.0 for step in expected_rates}
    assert rates == pytest.approx(expected_rates, abs=1e-5)


def test_rmsprop_takes_the_steps_of_torch() -> None:
    pytest.importorskip("torch", reason="the comparison needs torch (extra 'test')")
    import torch

    config = OptimizerConfig(
        name="rmsprop", learning_rate=0.1, b2=0.99, weight_decay=0.0, clip_norm=1e9
    )
    weight = torch.tensor([1.0, -2.0, 0.5], requires_grad=True)
    reference = torch.optim.RMSprop([weight], lr=config.learning_rate)
    optimizer, params = config.make(), jnp.array(weight.tolist())
    state = optimizer.init(params)
    for gradient in ([0.5, -1.0, 1e-6], [0.25, 2.0, 0.0], [-1.0, 1e-3, 3.0]):
        weight.grad = torch.tensor(gradient)
        reference.step()
        updates, state = optimizer.update(jnp.array(gradient), state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, weight.detach().numpy(), rtol=1e-5)


def test_unknown_optimizer_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.name = 'sgd': must be one of .*rmsprop"):
        OptimizerConfig(name="sgd")


def test_first_step_has_the_full_rate_without_warmup() -> None:
    assert float(OptimizerConfig(learning_rate=0.5).rate()(0)) == 0.5
    assert _expected_step()[1]["learning_rate"] == pytest.approx(SMOOTH.learning_rate)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"buckets": ()}, r"packing\.buckets = \(\): must be one or more"),
        ({"buckets": BUCKETS[::-1]}, r"packing\.buckets = .*lengths ascending"),
        ({"buckets": (Bucket(32, 24), Bucket(48, 8))}, "answers not falling"),
        ({"token_budget": 40}, r"packing\.token_budget = 40: must be at least .* 48"),
    ],
)
def test_invalid_packing_config_is_rejected(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackingConfig(**{"buckets": BUCKETS, "token_budget": 192} | fields)
