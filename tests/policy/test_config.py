"""Shapes of policies, and what a config.json may ask for."""

import dataclasses
import json

import pytest

from spell_jax.policy.config import PolicyConfig
from tests import tiny


def test_round_trip() -> None:
    policy = dataclasses.replace(tiny.POLICY, rope_theta=5e5, norm_epsilon=1e-5)
    assert PolicyConfig.from_hf(policy.to_hf()) == policy
    untied = dataclasses.replace(policy, tied_embeddings=False)
    assert PolicyConfig.from_hf(untied.to_hf()) == untied


def test_what_a_real_config_leaves_out() -> None:
    raw = {
        "model_type": "qwen2",
        "vocab_size": 100,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    policy = PolicyConfig.from_hf(raw)
    assert (policy.kv_heads, policy.head_size, policy.rope_theta) == (4, 16, 1e6)
    assert not policy.tied_embeddings and policy.qkv_bias


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, r"model_type = 'llama': must be 'qwen2'"),
        ({"use_sliding_window": True}, r"use_sliding_window = true"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope_scaling = .*yarn"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu': must be 'silu'"),
        ({"num_hidden_layers": None}, r"num_hidden_layers = None: must be a whole number"),
        ({"hidden_size": "32"}, r"hidden_size = '32': must be a whole number"),
    ],
)
def test_what_is_not_implemented_is_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyConfig.from_hf(tiny.POLICY.to_hf() | change)


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_file_that_is_no_config_is_named(content: str, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"config\.json: (not JSON|holds a list)"):
        PolicyConfig.from_hf(path)
    path.write_text(json.dumps(tiny.POLICY.to_hf()))
    assert PolicyConfig.from_hf(path) == tiny.POLICY


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, r"policy\.layers = 0: must be at least 1"),
        ({"head_size": 0}, r"policy\.head_size = 0: must be at least 1"),
        ({"head_size": 7}, r"policy\.head_size = 7: must be even"),
        ({"kv_heads": 3}, r"policy\.kv_heads = 3: must divide policy\.heads = 4"),
        ({"remat": "all"}, r"policy\.remat = 'all': must be one of \('none', 'block'\)"),
    ],
)
def test_shapes_that_cannot_be_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny.POLICY, **change)


@pytest.mark.parametrize("change", [{"qk_norm": True}, {"qkv_bias": False}])
def test_shapes_without_a_hugging_face_form_are_named(change: dict) -> None:
    with pytest.raises(ValueError, match="the qwen2 format needs"):
        dataclasses.replace(tiny.POLICY, **change).to_hf()
