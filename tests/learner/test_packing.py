"""Tests of packing: every answer token exactly once, after its own prompt, for any shapes."""

import dataclasses
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spell_jax.attention.masks import visible
from spell_jax.data.samples import Sample
from spell_jax.learner import old_logprobs, packing
from spell_jax.learner.aggregation import weigh
from spell_jax.learner.packing import Bucket, MicroBatch, PackingConfig, TrainGroup
from spell_jax.learner.shapes import AUTO
from tests import tiny


def _pack(groups: list[TrainGroup], buckets: list[Bucket], budget: int, multiple: int = 1):
    parts, refused = packing.split_groups(groups, buckets[-1])
    return packing.pack(parts, weigh(groups), buckets, budget, multiple), refused


def _written(batches: list[MicroBatch]) -> Counter:
    """Count all weighted tokens, as (visible tokens, target, advantage, weight, old logprob).

    Visible tokens are the tokens that the predicting position attends to.
    """
    token_counts: Counter = Counter()
    for batch in batches:
        index, last_query = jnp.asarray(batch.index), jnp.asarray(batch.last_query)
        is_visible = np.asarray(visible([index], [index, last_query]))
        for row, slot in np.argwhere(batch.weight):
            source = batch.source[row, slot]
            context = np.flatnonzero(is_visible[row, source])
            context = context[np.argsort(batch.index[row, context])]
            np.testing.assert_array_equal(batch.positions[row, context], np.arange(len(context)))
            numbers = (batch.advantage, batch.weight, batch.old_logprob)
            token_counts[
                tuple(batch.tokens[row, context].tolist()),
                int(batch.target[row, slot]),
                *(float(x[row, slot]) for x in numbers),
            ] += 1
    return token_counts


def _expected_token_counts(groups: list[TrainGroup]) -> Counter:
    token_counts: Counter = Counter()
    for group, weights in zip(groups, weigh(groups), strict=True):
        for i, answer in enumerate(tiny.answers(group)):
            for at, token in enumerate(answer):
                context = (*map(int, group.prompt), *answer[:at])
                numbers = (group.advantages[i], weights[i], tiny.logprobs(group)[i][at])
                token_counts[context, token, *(float(np.float32(x)) for x in numbers)] += 1
    return token_counts


def _experts(tokens) -> np.ndarray:
    """Return expert records of two layers with one expert each, computed from the tokens."""
    return np.stack([np.asarray(tokens) % 7, np.asarray(tokens) % 5], axis=-1)[..., None]


@pytest.mark.parametrize("devices", [1, 2])
def test_experts_follow_their_tokens(devices: int) -> None:
    """Into rows, through splits of groups and through the layout of the context axis."""
    groups = [
        tiny.change_samples(
            group,
            experts=[_experts(answer) for answer in tiny.answers(group)],
            prompt_experts=[_experts(group.prompt)] * len(group.samples),
        )
        for group in tiny.groups(6)
    ]
    weights, buckets = weigh(groups), [Bucket(24, 12)]
    parts, _ = packing.split_groups(groups, buckets[0])
    assert len(parts) > len(groups)
    nothing = np.full((2, 1), -1, np.int8)
    for batch in packing.pack(parts, weights, buckets, 48, 1, devices, no_experts=nothing):
        assert batch.experts.dtype == np.int8
        real = batch.last_query >= 0
        np.testing.assert_array_equal(batch.experts[real], _experts(batch.tokens[real]))
        assert (batch.experts[~real] == -1).all()
    assert packing.pack(parts, weights, buckets, 48)[0].experts is None  # not asked for


def test_tokens_that_prompts_share_have_the_experts_of_the_first_prompt() -> None:
    prompts = [11, 12, 13, 14], [11, 12, 15, 16]
    groups = [
        tiny.change_samples(
            tiny.group(prompt, [[21]], [1.0]),
            experts=[_experts([21])],
            prompt_experts=[_experts(prompt) + number],
        )
        for number, prompt in enumerate(prompts)
    ]
    parts, _ = packing.split_groups(groups, Bucket(8, 8))
    nothing = np.full((2, 1), -1, np.int8)
    (batch,) = packing.pack(parts, weigh(groups), [Bucket(8, 8)], 8, no_experts=nothing)
    (row,) = batch.tokens.tolist()
    assert sorted(row) == [11, 12, 13, 14, 15, 16, 21, 21]  # a tree: 11 and 12 stand once
    first, second = _experts(prompts[0]), _experts(prompts[1]) + 1
    for token, expected in zip([11, 12, 13, 14], first, strict=True):
        np.testing.assert_array_equal(batch.experts[0, row.index(token)], expected)
    for token, expected in zip([15, 16], second[2:], strict=True):
        np.testing.assert_array_equal(batch.experts[0, row.index(token)], expected)


def test_aligned_copy_of_an_answer_has_no_weight_and_no_advantage() -> None:
    copy = tiny.group([12], [[21, 22]], [0.0])
    group = dataclasses.replace(tiny.group([11], [[21, 22], [31]], [1.0, -1.0]), aligned=copy)
    parts, _ = packing.split_groups([group], Bucket(8, 8))
    (batch,) = packing.pack(parts, [[0.5, 0.25]], [Bucket(8, 8)], 8)
    np.testing.assert_array_equal(batch.target[0, :5], [21, 22, 31, 21, 22])
    np.testing.assert_array_equal(batch.weight[0, :5], [0.5, 0.5, 0.25, 0, 0])
    np.testing.assert_array_equal(batch.advantage[0, :5], [1, 1, -1, 0, 0])
    np.testing.assert_array_equal(batch.answer_id[0, :5], [0, 0, 1, -1, -1])


def test_layout_of_a_packed_row() -> None:
    group = tiny.group([11, 12], [[21, 22], [31]], [0.5, -1.0], logprobs=[[-1, -2], [-3]])
    (batch,), refused = _pack([group], [Bucket(6, 4)], 6)
    assert not refused
    np.testing.assert_array_equal(batch.tokens, [[11, 12, 21, 22, 31, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 2, 0]])
    np.testing.assert_array_equal(batch.last_query, [[4, 4, 3, 3, 4, -1]])
    np.testing.assert_array_equal(batch.source, [[1, 2, 1, 0]])
    np.testing.assert_array_equal(batch.target, [[21, 22, 31, 0]])
    np.testing.assert_array_equal(batch.advantage, [[0.5, 0.5, -1.0, 0]])
    np.testing.assert_allclose(batch.weight, [[1 / 3, 1 / 3, 1 / 3, 0]], rtol=1e-6)
    np.testing.assert_array_equal(batch.old_logprob, [[-1, -2, -3, 0]])
    np.testing.assert_array_equal(batch.answer, [[0, 0, 1, -1]])


def test_groups_in_one_row_do_not_attend_to_each_other() -> None:
    groups = [tiny.group([1, 2], [[3]], [1.0]), tiny.group([4], [[5]], [2.0])]
    (batch,), _ = _pack(groups, [Bucket(8, 4)], 8)
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 4, 5, 0, 0, 0]])
    np.testing.assert_array_equal(batch.last_query, [[2, 2, 2, 4, 4, -1, -1, -1]])
    np.testing.assert_array_equal(batch.source, [[1, 3, 0, 0]])
    np.testing.assert_array_equal(batch.answer, [[0, 1, -1, -1]])


def test_first_fit_decreasing_is_deterministic_and_fills_rows() -> None:
    sizes = [3, 9, 5, 7, 4, 4]  # 9 | 7+3 | 5+4 | 4 in rows of 10
    groups = [tiny.group([i] * (size - 1), [[50 + i]], [1.0]) for i, size in enumerate(sizes)]
    (batch,), _ = _pack(groups, [Bucket(10, 10)], 40)
    rows = [[int(t) - 50 for t in row if t >= 50] for row in batch.target]
    assert rows == [[1], [3, 0], [2, 4], [5]]
    (second_batch,), _ = _pack(groups, [Bucket(10, 10)], 40)
    for field in dataclasses.fields(MicroBatch):
        np.testing.assert_array_equal(getattr(batch, field.name), getattr(second_batch, field.name))


def test_rows_take_the_smallest_bucket_that_holds_them() -> None:
    groups = [tiny.group([1] * 2, [[2]], [1.0])]
    assert _pack(groups, [Bucket(4, 2), Bucket(16, 8)], 16)[0][0].tokens.shape == (4, 4)
    many_answers = [tiny.group([1], [[2], [3], [4]], [1.0] * 3)]  # 4 tokens, but 3 of answers
    assert _pack(many_answers, [Bucket(4, 2), Bucket(16, 8)], 16)[0][0].tokens.shape == (1, 16)


def test_micro_batch_rows_fit_the_budget_and_a_device_multiple() -> None:
    groups = [tiny.group([1] * 6, [[2] * 2], [1.0]) for _ in range(7)]
    batches, _ = _pack(groups, [Bucket(8, 4)], 24)
    assert [batch.tokens.shape for batch in batches] == [(3, 8)] * 3
    batches, _ = _pack(groups, [Bucket(8, 4)], 24, multiple=2)
    assert [batch.tokens.shape for batch in batches] == [(2, 8)] * 4
    batches, _ = _pack(groups, [Bucket(8, 4)], 24, multiple=4)
    assert [batch.tokens.shape for batch in batches] == [(4, 8)] * 2  # never fewer than devices


def test_long_groups_are_split_by_answers_and_repeat_their_prompt() -> None:
    group = tiny.group([1, 2, 3], [[10], [11, 12], [13, 14], [15]], [1.0, 2.0, 3.0, 4.0])
    parts, refused = packing.split_groups([group], Bucket(6, 3))
    assert not refused
    assert [part.group.prompt for part in parts] == [[1, 2, 3]] * 2
    answers = [tiny.answers(part.group) for part in parts]
    assert answers == [[[10], [11, 12]], [[13, 14], [15]]]
    assert [part.group.advantages for part in parts] == [[1.0, 2.0], [3.0, 4.0]]
    assert [part.answers for part in parts] == [[0, 1], [2, 3]]
    batches = packing.pack(parts, [[0.5, 0.25, 2.0, 4.0]], [Bucket(6, 3)], 6)
    assert [batch.weight[0].tolist() for batch in batches] == [[0.5, 0.25, 0.25], [2.0, 2.0, 4.0]]


def test_oversized_answers_are_left_out_and_their_siblings_kept() -> None:
    group = tiny.group([1, 2], [[3], [4] * 5, [5, 5]], [1.0, 2.0, 3.0])
    ((part, numbers),), refused = packing.split_groups([group], Bucket(6, 6))
    assert refused == [1] and numbers == [0, 2]
    assert tiny.answers(part) == [[3], [5, 5]] and part.advantages == [1.0, 3.0]
    # Weights are assigned before packing: oversized answers lose their share, others keep theirs.
    (batch,), _ = _pack([group], [Bucket(6, 6)], 6)
    assert batch.weight[0].tolist() == [1 / 8] * 3 + [0.0] * 3


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(0, 8),
    lengths=st.lists(st.integers(18, 60), min_size=1, max_size=3, unique=True),
    budget=st.integers(1, 200),
    multiple=st.integers(1, 3),
    devices=st.integers(1, 4),
    shared=st.sampled_from(packing.SHARED_PREFIXES),
    vocabulary=st.sampled_from([1, 2, 64]),  # with few words, prompts begin alike
    listed=st.booleans(),
)
def test_every_answer_token_is_packed_exactly_once(
    seed, count, lengths, budget, multiple, devices, shared, vocabulary, listed
) -> None:
    groups = [  # an answer and its prompt have at most 18 tokens
        dataclasses.replace(group, prompt=np.asarray(group.prompt) % vocabulary)
        for group in tiny.groups(count, seed)
    ]
    lengths = sorted({-(-length // devices) * devices for length in lengths})
    buckets = [Bucket(length, max(6, length // 2)) for length in lengths]
    laid_out = packing.separate_answers(groups) if shared == "none" else groups
    if not listed:
        budget += 16 * devices + 18  # at least 18 tokens after it is rounded down to 16 * devices
        buckets = AUTO
    largest = buckets[-1] if listed else PackingConfig(AUTO, budget).largest(devices)
    parts, refused = packing.split_groups(laid_out, largest)
    sizes = buckets, budget, multiple, devices
    batches = packing.pack(parts, weigh(groups), *sizes, shared == "tree")
    assert not refused
    assert _written(batches) == _expected_token_counts(groups)
    assert all(len(batch.tokens) % multiple == 0 for batch in batches)
    total = sum(float(batch.weight.sum(dtype=np.float64)) for batch in batches)
    assert total == pytest.approx(1.0 if groups else 0.0, abs=1e-6)


GROUPS = [
    tiny.group([1], [[1] * 2, [1] * 4], [1.0, 1.0], "responder"),
    tiny.group([1], [[1] * 3], [1.0], "responder"),
    tiny.group([1], [[1] * 1, [1] * 6], [1.0, 1.0], "verifier"),
]


@given(count=st.integers(0, 20), parts=st.integers(1, 9))
def test_minibatches_are_balanced_and_keep_all_groups_in_order(count: int, parts: int) -> None:
    groups = [tiny.group([1], [[2]], [float(i)]) for i in range(count)]
    minibatches = packing.in_parts(groups, parts)
    assert len(minibatches) == min(count, parts) and all(minibatches)
    numbers = [[group.advantages[0] for group in part] for part in minibatches]
    assert sorted(n for part in numbers for n in part) == list(range(count))
    assert all(part == sorted(part) for part in numbers)
    sizes = [len(part) for part in minibatches]
    assert not sizes or max(sizes) - min(sizes) <= 1
    if parts == 1 and count:
        assert minibatches == [groups]


def test_minibatches_keep_the_proportions_of_roles() -> None:
    groups = [tiny.group([1], [[2]], [1.0], role) for role in "aaaaaabbbb"]
    assert [[g.name for g in part] for part in packing.in_parts(groups, 2)] == [list("aaabb")] * 2
    with pytest.raises(ValueError, match="count = 0: must be at least 1"):
        packing.in_parts(groups, 0)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(0, 8),
    length=st.sampled_from([18, 24, 48]),
    answers=st.integers(3, 12),
    devices=st.integers(1, 3),
    shared=st.sampled_from(packing.SHARED_PREFIXES),
)
def test_answer_ids_are_unique_and_logprobs_return_to_groups(
    seed, count, length, answers, devices, shared
) -> None:
    """Number the answers of rows, and return values of tokens to their groups.

    The tokens of an answer have one number in their row, which no other answer has. Values return
    to the groups for any split. The values of an answer that does not fit are NaN.
    """
    length = -(-length // devices) * devices
    groups = tiny.groups(count, seed)
    laid_out = packing.separate_answers(groups) if shared == "none" else groups
    parts, refused = packing.split_groups(laid_out, Bucket(length, answers))
    sizes = [Bucket(length, answers)], 3 * length, 1, devices
    batches = packing.pack(parts, weigh(groups), *sizes, shared == "tree")
    for batch in batches:
        np.testing.assert_array_equal(batch.answer >= 0, batch.weight > 0)
        np.testing.assert_array_equal(batch.answer >= 0, batch.answer_id >= 0)
        for row, answer_ids in zip(batch.answer, batch.answer_id, strict=True):
            real = row >= 0
            pairs = set(zip(row[real].tolist(), answer_ids[real].tolist(), strict=True))
            assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
            assert {a for a, _ in pairs} == set(range(len(pairs)))
    scored_groups = old_logprobs.with_logprobs(
        groups, batches, [-np.float32(b.target) for b in batches]
    )
    assert len(scored_groups) == len(groups)
    numbers = iter(range(10_000))
    for group, scored_group in zip(groups, scored_groups, strict=True):
        assert scored_group.advantages == group.advantages and scored_group.name == group.name
        for answer, old in zip(tiny.answers(group), tiny.logprobs(scored_group), strict=True):
            is_refused = next(numbers) in refused
            expected_logprobs = np.full(len(answer), np.nan) if is_refused else -np.float32(answer)
            np.testing.assert_array_equal(old, expected_logprobs)


def test_answers_are_counted_by_role() -> None:
    assert packing.count_answers([]) == {}
    counts = packing.count_answers(GROUPS)
    assert sum(counts.values()) == sum(len(group.samples) for group in GROUPS)
    for role, count in counts.items():
        assert count == sum(len(group.samples) for group in GROUPS if group.name == role)


def test_invalid_packing_arguments_are_rejected() -> None:
    parts, _ = packing.split_groups(GROUPS, Bucket(16, 16))
    with pytest.raises(ValueError, match="does not fit the largest bucket"):
        packing.pack(parts, weigh(GROUPS), [Bucket(6, 6)], 16)
    with pytest.raises(ValueError, match="1 <= answers <= length"):
        Bucket(4, 5)


SAMPLE, EMPTY = Sample(np.array([2, 3])), Sample(np.zeros(0, np.int32))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "group.prompt: is empty"),
        ({"samples": []}, "group.samples: must be one or more"),
        (
            {"samples": [SAMPLE, EMPTY]},
            "group.samples: .* at least 1 token",
        ),
        ({"advantages": [1.0]}, "group.advantages: 1 of them, but 2 samples"),
        ({"reference_prompt": []}, "group.reference_prompt: of 0 tokens, must have from 1 to 1"),
        ({"reference_prompt": [1, 2]}, "group.reference_prompt: of 2 tokens"),
        ({"token_advantages": [[1, 2]]}, r"group.token_advantages: of \[2\] tokens, .* \[2, 2\]"),
        # numpy would add one number to both tokens.
        ({"token_advantages": [[1], [1, 2]]}, r"group.token_advantages: of \[1, 2\] tokens"),
        (
            {"samples": [SAMPLE, dataclasses.replace(SAMPLE, prompt_experts=np.zeros((2, 1, 1)))]},
            "group.samples: prompt_experts of 2 tokens, but the prompt has 1",
        ),
        (
            {"aligned": TrainGroup([1], [SAMPLE] * 2, [0.0] * 2, "a")},
            "group.aligned: must have the",
        ),
        ({"aligned": TrainGroup([1], [SAMPLE], [1.0], "a")}, "group.aligned: must .* advantage 0"),
        ({"aligned": tiny.group([1], [[2, 4]], [0.0])}, "group.aligned: must have the first sam"),
    ],
)
def test_inconsistent_train_group_is_rejected(fields: dict, message: str) -> None:
    valid_fields = {"prompt": [1], "samples": [SAMPLE] * 2, "advantages": [1.0, -1.0], "name": "a"}
    TrainGroup(**valid_fields)
    with pytest.raises(ValueError, match=message):
        TrainGroup(**valid_fields | fields)


def test_aligned_copy_stays_with_the_first_answer() -> None:
    group = tiny.group([1], [[2], [3]], [1.0, -1.0], aligned=tiny.group([4], [[2]], [0.0]))
    assert [part.aligned for part in packing.separate_answers([group])] == [group.aligned, None]
