"""Tests of non-finite updates: skipped bit-exactly, counted across checkpoints, explained."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spell_jax.learner import aggregation, non_finite
from spell_jax.learner import update as updates
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.non_finite import MOST_ROWS, NonFinite, WeighedGroup
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.learner.packing import Bucket, PackingConfig
from spell_jax.learner.update import TrainState
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.files.checkpoint import Checkpoints
from tests import tiny

NAN, INF = float("nan"), float("inf")
GROUPS = tiny.groups(7, seed=1)
OTHERS = tiny.groups(5, seed=2)
PACKING = PackingConfig((Bucket(48, 32),), token_budget=96)
ON_POLICY = LossConfig()
OPTIMIZER = OptimizerConfig(learning_rate=0.01, weight_decay=0.1)
EIGHT = (("fsdp", 8),)
BAD = tiny.group([3, 4], [[5], [6, 7], [8]], [0.5, NAN, -0.5], "verifier")
BAD_ANSWER = BAD.select([1])


@functools.cache
def _learner(
    mesh: tuple[tuple[str, int], ...] = (),
    optimizer: OptimizerConfig = OPTIMIZER,
    loss: LossConfig = ON_POLICY,
    policy=tiny.POLICY,
    compute_dtype: str = "float32",
    layout: PackingConfig = PACKING,
) -> Learner:
    """Create a learner on one device, or on the eight devices of a mesh."""
    devices = None if mesh else jax.devices()[:1]
    placed = meshes.make_mesh(dict(mesh) or {"fsdp": 1}, devices)
    return Learner(policy, optimizer, loss, layout, placed, 0.7, compute_dtype)


def _begin(learner: Learner) -> TrainState:
    """Return a state after one update, with nonzero moments."""
    state = learner.init(tiny.weights(learner.policy))
    return learner.update(state, GROUPS)[0]


def _bits(state: TrainState) -> list[bytes]:
    """Return the bytes of weights, moments, the optimizer's counts and the step."""
    state_parts = state.params, state.opt_state, state.step
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(state_parts))]


def _answers(groups) -> list[tuple[list[int], list[int]]]:
    return [(list(group.prompt), answer) for group in groups for answer in tiny.answers(group)]


def _bad_answers(error: NonFinite) -> list[tuple[list[int], list[int]]]:
    return _answers(group for group, _ in error.rows)


# ---------------------------------------------------------------------------------- Skipped updates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "offload"),
    [
        ((), False),
        (EIGHT, False),
        ((("data", 2), ("fsdp", 2), ("tensor", 2)), False),
        ((("fsdp", 4), ("context", 2)), True),
    ],
    ids=["1", "fsdp", "data fsdp tensor", "fsdp context, moments on the host"],
)
def test_skipped_update_leaves_the_state_bit_identical(mesh: tuple, offload: bool) -> None:
    """One device has one bad row. The advantage 1e30 overflows only in the squares of the norm."""
    learner = _learner(mesh, dataclasses.replace(OPTIMIZER, offload=offload))
    state, expected_state = _begin(learner), _begin(learner)
    before = _bits(state)
    places = jax.tree.map(lambda x: x.sharding, state)
    for advantage in (NAN, INF, -INF, 1e30):
        bad = tiny.group([3, 4], [[5]], [advantage])
        state, numbers = learner.update(state, [*GROUPS, bad])
        assert numbers["skipped_update"] == numbers["skipped_in_a_row"] == 1.0
        assert numbers["micro_batches"] > (1 if not mesh else 0)
        assert _bits(state) == before and int(state.skipped) == 1
        assert jax.tree.map(lambda x: x.sharding, state) == places
        state = dataclasses.replace(state, skipped=jnp.zeros_like(state.skipped))
    for groups in (OTHERS, GROUPS):
        state, numbers = learner.update(state, groups)
        expected_state, expected_numbers = learner.update(expected_state, groups)
        assert numbers == expected_numbers and numbers["skipped_update"] == 0.0
    assert _bits(state) == _bits(expected_state) != before
    assert int(state.step) == 3 and learner.fns.apply._cache_size() == 1


@pytest.mark.slow
def test_nan_weight_on_one_device_skips_the_update_on_all() -> None:
    """The error names the bad tensor and lists a limited number of rows, as all are bad."""
    learner = _learner(EIGHT, dataclasses.replace(OPTIMIZER, max_skipped=2))
    state = _begin(learner)
    kernel = state.params["layers"]["mlp"]["up_kernel"]
    state.params["layers"]["mlp"]["up_kernel"] = kernel = kernel.at[0, -1, 0].set(NAN)
    damaged = [np.isnan(np.asarray(shard.data)).any() for shard in kernel.addressable_shards]
    assert sorted(damaged) == [False] * 7 + [True]
    before = _bits(state)
    state, numbers = learner.update(state, [*GROUPS, *OTHERS])
    assert numbers["skipped_update"] == 1.0 and math.isnan(numbers["loss"])
    assert _bits(state) == before
    with pytest.raises(NonFinite, match=r"not finite: policy/layers/mlp/up_kernel$") as error:
        learner.update(state, [*GROUPS, *OTHERS])
    assert error.value.tensors == ["policy/layers/mlp/up_kernel"]
    assert len(error.value.rows) == MOST_ROWS < len(_answers([*GROUPS, *OTHERS]))


@pytest.mark.slow
def test_non_finite_reference_weights_are_reported() -> None:
    learner = _learner(loss=LossConfig(kl_weight=0.3))
    state = learner.init(tiny.weights())
    before, reference = _bits(state), jax.tree.map(np.copy, tiny.weights(seed=1))
    reference["final_norm"]["scale"][0] = NAN
    for count in (1, 2):
        state, numbers = learner.update(state, GROUPS, reference)
        assert numbers["skipped_in_a_row"] == count and math.isnan(numbers["kl"])
    assert _bits(state) == before
    with pytest.raises(NonFinite, match=r"not finite: reference/final_norm/scale$"):
        learner.update(state, GROUPS, reference)


@pytest.mark.slow
def test_weight_that_overflows_bfloat16_is_reported() -> None:
    """3.4e38 rounds to infinity. It is in the embedding of one token; rows without it are good."""
    policy = dataclasses.replace(tiny.POLICY, tied_embeddings=False)
    optimizer = dataclasses.replace(OPTIMIZER, max_skipped=1)
    learner = _learner(optimizer=optimizer, policy=policy, compute_dtype="bfloat16")
    state = learner.init(tiny.weights(policy))
    state.params["embedding"] = state.params["embedding"].at[2].set(3.4e38)
    assert np.isfinite(state.params["embedding"]).all()
    state, numbers = learner.update(state, GROUPS)
    assert numbers["skipped_update"] == 0.0
    rows = [
        tiny.group([5, 2], [[9], [10]], [1.0, -1.0]),
        tiny.group([5, 6], [[2, 7], [11]], [0.5, -0.5]),
    ]
    with pytest.raises(NonFinite) as error:
        learner.update(state, [*GROUPS, *rows])
    # The last token of an answer is predicted, but predicts nothing.
    assert _bad_answers(error.value) == [([5, 2], [9]), ([5, 2], [10]), ([5, 6], [2, 7])]
    assert error.value.tensors == ["policy/embedding"]


@pytest.mark.slow
def test_update_with_zero_gradient_is_not_skipped() -> None:
    learner = _learner()
    groups = [dataclasses.replace(g, advantages=[0.0] * len(g.samples)) for g in GROUPS]
    state, numbers = learner.update(learner.init(tiny.weights()), groups)
    assert numbers["gradient_norm"] == 0.0 and numbers["skipped_update"] == 0.0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state)))
    assert int(state.step) == 1


# -------------------------------------------------------------------------------- Too many in a row


@pytest.mark.parametrize(
    "layout",
    [PACKING, pytest.param(PackingConfig("auto", 96), marks=pytest.mark.slow)],
    ids=["listed", "chosen"],
)
def test_third_skipped_update_in_a_row_raises(layout: PackingConfig, tmp_path) -> None:
    """A good update resets the count, an empty one does not change it, a checkpoint keeps it."""
    learner = _learner(layout=layout)
    bad, state = [*GROUPS, BAD], _begin(learner)
    counts = []
    for groups in (bad, bad, OTHERS, bad, [], bad):
        state, numbers = learner.update(state, groups)
        counts.append(numbers.get("skipped_in_a_row"))
    assert counts == [1, 2, 0, 1, None, 2] and int(state.step) == 2
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(6, {"policy": state}, {}, force=True)
    restored = checkpoints.restore(6, {"policy": learner.fns.abstract_state})[0]["policy"]
    checkpoints.close()
    programs = learner.fns.accumulate._cache_size()
    with pytest.raises(NonFinite, match=r"3 updates in a row \(optimizer.max_skipped\)") as error:
        learner.update(restored, bad)
    assert "the last by 1 of its rows" in str(error.value)
    assert error.value.skipped == 3 and error.value.tensors == []
    assert _bad_answers(error.value) == _answers([BAD_ANSWER])
    ((row, weights),) = error.value.rows
    assert math.isnan(row.advantages[0])
    total = sum(group.answer_tokens for group in bad)
    assert weights == [1 / total], "the share in the update, not alone"
    assert learner.fns.accumulate._cache_size() == programs, "the search compiles nothing"


@pytest.mark.slow
def test_failure_that_does_not_recur_reports_all_rows(monkeypatch) -> None:
    """A non-finite loss suffices, even with finite gradients."""
    apply = updates.apply
    monkeypatch.setattr(
        updates, "apply", lambda spec, s, gradients, loss: apply(spec, s, gradients, loss + NAN)
    )
    optimizer = dataclasses.replace(OPTIMIZER, max_skipped=1)
    learner = Learner(tiny.POLICY, optimizer, ON_POLICY, PACKING, _learner().mesh, 0.7)
    with pytest.raises(NonFinite, match="finite when it was run again") as error:
        learner.update(learner.init(tiny.weights()), GROUPS)
    assert _bad_answers(error.value) == _answers(GROUPS)


def test_max_skipped_below_one_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.max_skipped = 0: must be at least 1"):
        OptimizerConfig(max_skipped=0)


# ----------------------------------------------------------------------------------------- Bad rows


def _single(advantage: float) -> WeighedGroup:
    return tiny.group([1], [[2]], [advantage]), [1.0]


def _total(rows) -> float:
    return sum(sum(group.advantages) for group, _ in rows)


def test_one_bad_row_is_found_in_few_trials() -> None:
    tried: list[int] = []

    def is_finite(rows) -> bool:
        tried.append(len(rows))
        return math.isfinite(_total(rows))

    rows = [_single(float(i)) for i in range(64)]
    rows[45] = _single(INF)
    assert non_finite.find_rows(rows, is_finite) == [rows[45]]
    assert len(tried) == 1 + 2 * 6 and sum(tried) < 3 * 64
    assert non_finite.find_rows(rows[:45], is_finite) == []


def test_jointly_bad_rows_are_found_and_the_list_is_limited() -> None:
    def is_small(rows) -> bool:
        return _total(rows) < 10

    rows = [_single(x) for x in (1, 1, 6, 7, 0, 0, 0, 0)]
    assert non_finite.find_rows(rows, is_small) == rows[2:4]
    siblings = tiny.group([1], [[2], [3]], [6.0, 7.0]), [1.0, 1.0]
    assert non_finite.find_rows([siblings], is_small) == [siblings]
    infinite_rows = [_single(INF)] * 100
    assert len(non_finite.find_rows(infinite_rows, is_small)) == MOST_ROWS


def test_bad_rows_are_written_with_all_training_fields(tmp_path) -> None:
    old = [np.array([-0.5, -INF], np.float32), np.array([NAN], np.float32)]
    group = tiny.group([3, np.int64(4)], [[5, 6], [7]], [INF, 0.5], "verifier", old)
    groups = [group, BAD_ANSWER]
    error = NonFinite(3, list(zip(groups, aggregation.weigh(groups), strict=True)), [], True)
    decode = lambda ids: "\ud800" + "-".join(map(str, ids))  # noqa: E731
    path = non_finite.write_rows(error, tmp_path, 12, decode)
    assert path == tmp_path / "non_finite" / "12.jsonl"
    assert error.__notes__ == [f"3 rows: {path}"]

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    lines = path.read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert records[0] == {
        "role": "verifier",
        "prompt": "\ud8003-4",
        "answer": "\ud8005-6",
        "prompt_tokens": [3, 4],
        "answer_tokens": [5, 6],
        "advantage": "inf",
        "weight": 0.2,
        "old_logprobs": [-0.5, "-inf"],
    }
    assert (records[1]["advantage"], records[1]["old_logprobs"]) == (0.5, ["nan"])
    assert (records[2]["advantage"], records[2]["old_logprobs"]) == ("nan", None)
