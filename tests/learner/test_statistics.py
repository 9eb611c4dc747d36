"""Tests of the statistics of an update against values by hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spell_jax.learner import packing, statistics, update
from spell_jax.learner.learner import Learner
from spell_jax.learner.loss_config import LossConfig
from spell_jax.learner.optimizer import OptimizerConfig
from spell_jax.policy.config import LoraConfig, PolicyConfig
from tests import tiny


def device(kind: str) -> Any:
    return SimpleNamespace(device_kind=kind)


def test_advantages_are_reported_by_role():
    groups = [
        tiny.group([1], [[2], [3]], [1.0, -2.0], "responder"),
        tiny.group([1], [[2]], [-0.5], "questioner"),
        tiny.group([1], [[2]], [4.0], "responder"),
    ]
    assert statistics.advantages(groups) == {
        "advantage/responder": (3.0, 3),
        "advantage_size/responder": (7.0, 3),
        "advantage/questioner": (-0.5, 1),
        "advantage_size/questioner": (0.5, 1),
    }
    assert statistics.advantages([]) == {}


def group_operations(policy: PolicyConfig, prompt: int, answers: list[int]) -> float:
    """Count the operations of the micro-batch of one group."""
    group = tiny.group([3] * prompt, [[4] * length for length in answers], [1.0] * len(answers))
    bucket = packing.Bucket(group.tokens + 1, group.answer_tokens)
    (batch,) = tiny.pack([group], bucket)
    return statistics.batch_operations(policy, batch)


def test_flop_count_matches_a_manual_count() -> None:
    policy = PolicyConfig(10, 4, 3, 2, 1, 8, 6)
    weights = 3 * (4 * 2 * 8 + 2 * 4 * 8 + 2 * 8 * 4 + 3 * 4 * 6)  # q, k and v, o, mlp
    head = 6 * 10 * 4 * 6  # 6 answer tokens
    shared_pairs = 5 * 5 / 2 + 6 * 5 + 3 * 2 * 2 / 2
    shared = group_operations(policy, 5, [2] * 3)
    assert shared == pytest.approx(6 * weights * 11 + 12 * 3 * 2 * 8 * shared_pairs + head)
    repeated = 3 * group_operations(policy, 5, [2])
    assert repeated == pytest.approx(6 * weights * 21 + 12 * 3 * 2 * 8 * 3 * 7 * 7 / 2 + head)
    experts = dataclasses.replace(policy, experts=4, experts_per_token=2)
    expert_operations = group_operations(experts, 5, [2] * 3)
    assert expert_operations - shared == 6 * 11 * 3 * (3 * 4 * 6 + 4 * 4)
    adapted = dataclasses.replace(policy, lora=LoraConfig(2), qkv_bias=True)
    adapter_operations = group_operations(adapted, 5, [2] * 3)
    assert shared - adapter_operations == 2 * (weights * 11 + 10 * 4 * 6)


def test_operations_of_a_tree_count_shared_tokens_once() -> None:
    """The second question adds its own two prompt tokens and its answer."""
    groups = [tiny.group([3, 3, 3, 3, i], [[9, 9]], [1.0]) for i in range(2)]
    (batch,) = tiny.pack(groups, packing.Bucket(12, 4))
    pairs = 4 * 4 / 2 + 2 * (4.5 + 2 * 5 + 2 * 2 / 2)
    assert statistics.batch_operations(tiny.POLICY, batch) == pytest.approx(
        statistics.operations(tiny.POLICY, 4 + 2 * 3, 4, pairs)
    )


def test_operations_of_attention_end_at_the_window_of_a_layer() -> None:
    """A prompt of 5 tokens with 3 answers of 2, and a window of 3 tokens in one of 3 layers."""
    policy = PolicyConfig(10, 4, 3, 2, 1, 8, 6)
    windows = dataclasses.replace(policy, window=3, window_layers=(1,))
    of_prompt, of_answer = 1 + 2 + 3 + 3 + 3, 3 + 3
    pairs_of_window = of_prompt + 3 * of_answer - 11 / 2
    pairs = 5 * 5 / 2 + 6 * 5 + 3 * 2 * 2 / 2
    saved = group_operations(policy, 5, [2] * 3) - group_operations(windows, 5, [2] * 3)
    assert saved == pytest.approx(12 * 2 * 8 * (pairs - pairs_of_window))


def test_operations_equal_the_sum_over_single_tokens():
    """Add the cost of single tokens: products with weights, and attention to earlier keys."""
    policy, prompt, answers = tiny.POLICY, 5, [2, 4]
    c = policy
    weights = c.layers * (c.width * c.head_size * (2 * c.heads + 2 * c.kv_heads))
    weights += c.layers * 3 * c.width * c.feed_forward
    keys = sum(i + 0.5 for i in range(prompt))
    keys += sum(prompt + i + 0.5 for length in answers for i in range(length))
    expected_operations = 6 * weights * 11 + 6 * c.vocab_size * c.width * 6
    expected_operations += 12 * c.layers * c.heads * c.head_size * keys
    assert group_operations(policy, prompt, answers) == pytest.approx(expected_operations)


def test_utilization_covers_all_devices_and_is_none_if_unknown():
    assert statistics.utilization(989e12, [device("NVIDIA H200")] * 4) == pytest.approx(0.25)
    assert statistics.utilization(197e11, [device("TPU v5 lite")]) == pytest.approx(0.1)
    assert statistics.utilization(1e12, [device("cpu")]) is None


def test_speed_divides_by_the_seconds_of_updates():
    numbers = {"trained_tokens": 300.0, "operations": 4 * 275e12}
    speeds = statistics.speed([numbers], 2.0, [device("TPU v4")] * 8)
    assert speeds == {"tokens_per_second/trained": (300.0, 2.0), "mfu": (0.25, 1.0)}
    assert statistics.speed([numbers], 2.0, [device("cpu")]).keys() == {"tokens_per_second/trained"}


def learner(**layout: Any) -> Learner:
    config = packing.PackingConfig((packing.Bucket(48, 32),), 96, **layout)
    return Learner(
        tiny.POLICY,
        OptimizerConfig(learning_rate=0.0),
        LossConfig(),
        config,
        update.meshes.make_mesh(None, update.jax.devices()[:1]),
        group_names=("questioner", "responder", "verifier"),
    )


@pytest.mark.slow
def test_trained_tokens_include_repeated_prompts():
    groups = [tiny.group([3] * 40, [[4] * 6, [5] * 7, [6] * 8], [1.0, -1.0, 0.0])]
    for shared in packing.SHARED_PREFIXES:
        tiny_learner = learner(shared_prefix=shared)
        _, numbers = tiny_learner.update(tiny_learner.init(tiny.weights()), groups)
        # With 40 prompt tokens a row of 48 has room for one answer: the prompt is repeated.
        assert numbers["trained_tokens"] == 3 * 40 + 21
        expected_operations = sum(group_operations(tiny.POLICY, 40, [n]) for n in (6, 7, 8))
        assert numbers["operations"] == pytest.approx(expected_operations)


@pytest.mark.slow
def test_entropy_is_reported_by_group_name():
    """A name's entropy equals an update with its group alone; other names have none."""
    tiny_learner = learner()
    answers = {"questioner": [7] * 3, "responder": [9] * 5, "verifier": [11], "row": [13] * 9}
    groups = {role: tiny.group([3, 4], [answer], [1.0], role) for role, answer in answers.items()}

    def numbers(*roles: str) -> dict[str, float]:
        return tiny_learner.update(
            tiny_learner.init(tiny.weights()), [groups[role] for role in roles]
        )[1]

    alone = {role: numbers(role)["entropy"] for role in groups}
    assert len(set(np.round(list(alone.values()), 4))) == 4
    every = numbers(*groups)
    role_entropies = {name: value for name, value in every.items() if name.startswith("entropy/")}
    reported_roles = ("questioner", "responder", "verifier")
    assert role_entropies == pytest.approx(
        {f"entropy/{role}": alone[role] for role in reported_roles}, rel=1e-5
    )
    mean = sum(alone[role] * len(answers[role]) for role in groups) / 18
    assert every["entropy"] == pytest.approx(mean, rel=1e-5)
    assert not any(name.startswith("entropy/") for name in numbers("row"))


def test_sampler_difference_skips_answers_without_new_logprobs():
    before = [tiny.group([1], [[2, 3], [4]], [1.0, 1.0], logprobs=[[-1.0, -2.0], [-3.0]])]
    # The second answer did not fit.
    new_logprobs = [np.float32([-1.5, -1.75]), np.float32([np.nan])]
    after = [before[0].with_logprobs(new_logprobs)]
    assert statistics.sampler_difference(before, after) == {"sampler_difference": 0.375}
    assert statistics.sampler_difference([], []) == {}
