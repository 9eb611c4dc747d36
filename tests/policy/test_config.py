"""Tests of PolicyConfig: valid shapes, and the fields that a config.json must have."""

import dataclasses
import json
import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.rope import RopeConfig
from tests import tiny

BIASED = tiny.POLICY
QWEN3 = dataclasses.replace(tiny.POLICY, qkv_bias=False, qk_norm=True)
LLAMA = dataclasses.replace(tiny.POLICY, qkv_bias=False, rope=RopeConfig(5e5, "linear", 4.0))
MOE = dataclasses.replace(
    QWEN3, experts=8, experts_per_token=2, normalized_router=False, tied_embeddings=False
)
TYPES = {"qwen2": BIASED, "qwen3": QWEN3, "llama": LLAMA, "qwen3_moe": MOE}


@pytest.mark.parametrize("model_type", TYPES)
def test_hf_config_round_trip(model_type: str) -> None:
    policy = dataclasses.replace(TYPES[model_type], norm_epsilon=1e-5, max_positions=999)
    raw = json.loads(json.dumps(policy.to_hf()))
    assert raw["model_type"] == model_type == policy.model_type
    assert PolicyConfig.from_hf(raw) == policy


REAL = {
    "Qwen2.5-7B-Instruct": PolicyConfig(
        152_064, 3584, 28, 28, 4, 128, 18_944, RopeConfig(1e6), tied_embeddings=False
    ),
    "Qwen3-4B": PolicyConfig(
        151_936, 2560, 36, 32, 8, 128, 9728, RopeConfig(1e6), 40_960, qkv_bias=False, qk_norm=True
    ),
    "Qwen3-30B-A3B": PolicyConfig(
        *(151_936, 2048, 48, 32, 4, 128, 768, RopeConfig(1e6), 40_960),
        qkv_bias=False,
        qk_norm=True,
        tied_embeddings=False,
        experts=128,
        experts_per_token=8,
    ),
    "Llama-3.1-8B": PolicyConfig(
        *(128_256, 4096, 32, 32, 8, 128, 14_336),
        RopeConfig(5e5, "llama3", 8.0, 8192),
        131_072,
        norm_epsilon=1e-5,
        qkv_bias=False,
        tied_embeddings=False,
    ),
}
PARAMETERS = {  # as published, in millions
    "Qwen2.5-7B-Instruct": 7616,
    "Qwen3-4B": 4022,
    "Qwen3-30B-A3B": 30_532,
    "Llama-3.1-8B": 8030,
}


@pytest.mark.parametrize("name", REAL)
def test_published_config_files_are_read(name: str, spell_data) -> None:
    policy = PolicyConfig.from_hf(spell_data / "hf_configs" / f"{name}.json")
    assert policy == REAL[name]
    shapes, _ = transformer.abstract_params(policy)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert round(count / 1e6) == PARAMETERS[name]


def test_missing_config_fields_have_defaults_or_raise() -> None:
    raw = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 2048,
    }
    policy = PolicyConfig.from_hf(raw)
    assert (policy.kv_heads, policy.head_size, policy.rope) == (4, 16, RopeConfig())
    assert not policy.tied_embeddings and policy.norm_epsilon == 1e-6
    with pytest.raises(ValueError, match="num_key_value_heads = None: must be"):
        PolicyConfig.from_hf(raw | {"model_type": "qwen2"})
    with pytest.raises(ValueError, match="head_dim = None: must be"):
        PolicyConfig.from_hf(raw | {"model_type": "qwen3", "num_key_value_heads": 4})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, r"model_type = 'mistral': must be one of \('qwen2',"),
        ({"model_type": ["qwen2"]}, r"model_type = \['qwen2'\]: must be one of"),
        ({"use_sliding_window": True}, r"use_sliding_window = True: must be False"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types = .*sliding"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, r"rope_scaling\.rope_type"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5: must be 1"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu': must be 'silu'"),
        ({"attention_bias": True}, r"attention_bias = True: must be False"),
        ({"mlp_bias": True}, r"mlp_bias = True: must be False"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config = \{'bits': 4\}"),
        ({"num_hidden_layers": None}, r"num_hidden_layers = None: must be a positive integer"),
        ({"hidden_size": "32"}, r"hidden_size = '32': must be a positive integer"),
        ({"vocab_size": 0}, r"vocab_size = 0: must be a positive integer"),
        ({"num_key_value_heads": 3}, r"policy\.kv_heads = 3: must divide"),
        ({"rms_norm_eps": "small"}, r"rms_norm_eps = 'small': must be a number"),
        ({"rms_norm_eps": 0}, r"policy\.norm_epsilon = 0\.0: must be above 0"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings = 'yes': must be true or false"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]: must be \[\]"),
        ({"decoder_sparse_step": 2}, r"decoder_sparse_step = 2: must be 1"),
        ({"num_experts": 1}, r"policy\.experts_per_token = 2: must be from 1 to"),
        ({"norm_topk_prob": 1}, r"norm_topk_prob = 1: must be true or false"),
    ],
    ids=str,
)
def test_unsupported_config_values_are_rejected(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyConfig.from_hf(MOE.to_hf() | change)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@pytest.mark.slow
@given(st.sampled_from(list(TYPES)), st.data())
def test_arbitrary_config_change_is_read_or_rejected(model_type: str, data) -> None:
    raw = TYPES[model_type].to_hf()
    for field in data.draw(st.lists(st.sampled_from(list(raw)), max_size=3)):
        raw[field] = data.draw(_VALUES)
    try:
        policy = PolicyConfig.from_hf(raw)
    except ValueError as error:
        assert any(name in str(error) for name in (*raw, "policy.", "rope."))
    else:
        assert PolicyConfig.from_hf(policy.to_hf()) == policy


def test_rope_scaling_extends_the_context() -> None:
    longer = tiny.POLICY.with_rope_scaling("yarn", 4.0)
    assert longer.max_positions == 4 * tiny.POLICY.max_positions
    assert longer.rope == RopeConfig(1e4, "yarn", 4.0, tiny.POLICY.max_positions)
    assert PolicyConfig.from_hf(longer.to_hf()) == longer
    longer.check_length(4 * tiny.POLICY.max_positions)
    with pytest.raises(ValueError, match=r"policy\.rope_scaling = 'yarn': .* is 'linear' already"):
        LLAMA.with_rope_scaling("yarn", 2.0)
    with pytest.raises(
        ValueError, match=r"1025 .* = 1024 \(its rope is 'yarn' .*rope_factor makes"
    ):
        longer.check_length(1025)


def test_messages_about_the_context_do_not_send_to_each_other() -> None:
    """Qwen2.5's card: yarn in config.json gives its positions, and no field scales them again."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    raw = BIASED.to_hf() | {"max_position_embeddings": 32_768, "rope_scaling": yarn}
    policy = PolicyConfig.from_hf(raw)
    policy.check_length(131_072)
    with pytest.raises(
        ValueError, match=r"= 131072 \(.* other values in the folder's conf"
    ) as long:
        policy.check_length(131_073)
    with pytest.raises(ValueError, match=r"'yarn' already, with 131072 positions; must be ''"):
        policy.with_rope_scaling("yarn", 4.0)
    assert "policy.rope_scaling" not in str(long.value)


@pytest.mark.parametrize(
    "unused",
    [((5, 4),), ((60, 65),), ((-1, 2),), ((0, 64),), ((3, 5), (4, 6)), ((0, 30), (30, 64))],
)
def test_unused_ids_out_of_order_or_range_are_rejected(unused) -> None:
    with pytest.raises(ValueError, match=r"policy\.unused_ids = .*: must be ranges in order"):
        dataclasses.replace(tiny.POLICY, unused_ids=unused)


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_file_that_is_not_a_config_is_reported(content: str, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"config\.json: (.*line 1|must be a JSON object)"):
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
        ({"remat": "all"}, r"policy\.remat = 'all': must be one of \('none', 'block',"),
        ({"experts": -1}, r"policy\.experts = -1: must be 0 or more"),
        ({"experts_per_token": 1}, r"policy\.experts_per_token = 1: must be .* \(0 without"),
        ({"norm_epsilon": 0.0}, r"policy\.norm_epsilon = 0\.0: must be above 0"),
    ],
)
def test_impossible_policy_shapes_are_rejected(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny.POLICY, **change)


@pytest.mark.parametrize("change", [{"qk_norm": True}, {"experts": 2, "experts_per_token": 1}])
def test_policy_without_a_hugging_face_architecture_is_rejected(change: dict) -> None:
    with pytest.raises(ValueError, match="no Hugging Face architecture has these parts"):
        dataclasses.replace(tiny.POLICY, **change).to_hf()
