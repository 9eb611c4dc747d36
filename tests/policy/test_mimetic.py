"""Tests of mimetic initialization."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest

from spell_jax.policy import mimetic, transformer
from spell_jax.policy.config import PolicyConfig
from tests import tiny

pytestmark = pytest.mark.slow

POLICY = dataclasses.replace(tiny.POLICY, layers=3)


def attention(policy: PolicyConfig) -> dict:
    return transformer.init(policy, jax.random.key(0))["layers"]["attention"]


@pytest.mark.parametrize("head_size", [8, 12])  # 12: heads * head_size is not the width
def test_initial_heads_attend_to_equal_tokens_and_copy_them(head_size):
    params = attention(dataclasses.replace(POLICY, head_size=head_size))
    for head in range(POLICY.heads):
        group = head // 2
        np.testing.assert_array_equal(
            params["q_kernel"][:, :, head], params["k_kernel"][:, :, group]
        )
        np.testing.assert_allclose(
            params["o_kernel"][:, head] * (4 * head_size / 32) ** 0.5,
            np.swapaxes(params["v_kernel"][:, :, group], 1, 2),
            rtol=1e-6,
        )
    assert not np.array_equal(params["k_kernel"][:, :, 0], params["k_kernel"][:, :, 1])
    assert not np.array_equal(params["k_kernel"][0], params["k_kernel"][1])


def test_initial_biases_are_large_and_equal_for_all_seeds():
    params, other_params = attention(POLICY), transformer.init(POLICY, jax.random.key(1))
    for name in ("q_bias", "k_bias"):
        assert 0.8 < np.std(params[name]) / mimetic.TASTE < 1.2
        np.testing.assert_array_equal(params[name], other_params["layers"]["attention"][name])
    assert not np.any(params["v_bias"])


@pytest.mark.parametrize("biases", [True, False])
def test_heads_of_a_group_differ_initially(biases):
    """Equal heads have equal gradients and stay equal forever."""
    params = attention(dataclasses.replace(POLICY, qkv_bias=biases, qk_norm=not biases))
    name = "q_bias" if biases else "q_kernel"
    heads = np.moveaxis(params[name], -2, 0)
    assert not np.array_equal(heads[0], heads[1])


def test_logical_axes_are_kept():
    boxes = transformer.boxed_init(POLICY, jax.random.key(0))["layers"]["attention"]
    axes = nn.get_partition_spec(boxes)
    assert tuple(axes["q_kernel"]) == ("layers", "embed", "heads", "head")
    assert tuple(axes["o_kernel"]) == ("layers", "heads", "head", "embed")
    assert tuple(axes["q_bias"]) == ("layers", "heads", "head")
