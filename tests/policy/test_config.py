"""Tests of PolicyConfig: valid shapes, and the fields that a config.json must have."""

import dataclasses
import json
import math
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spell_jax.policy import transformer
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.rope import RopeConfig
from tests import tiny
from tests.policy import families

BIASED = tiny.POLICY
QWEN3 = dataclasses.replace(tiny.POLICY, qkv_bias=False, qk_norm=True)
LLAMA = dataclasses.replace(tiny.POLICY, qkv_bias=False, rope=RopeConfig(5e5, "linear", 4.0))
MOE = dataclasses.replace(
    QWEN3, experts=8, experts_per_token=2, normalized_router=False, tied_embeddings=False
)
FIRST: dict[str, Any] = {"window": 16, "window_layers": (0,)}
EVERY: dict[str, Any] = {"window": 16, "window_layers": (0, 1)}
OLMO = dataclasses.replace(QWEN3, joint_qk_norm=True, norms="after", tied_embeddings=False)
GEMMA = dataclasses.replace(
    QWEN3, norms="both", centered_norms=True, activation="gelu", scaled_embedding=True
)
LINEAR, YARN = RopeConfig(1e6, "linear", 8.0), RopeConfig(5e5, "yarn", 8.0, 32)
# By model type, and what is special.
TYPES = {
    "qwen2": BIASED,
    "qwen2 windows": dataclasses.replace(BIASED, window=16, window_layers=(1,)),
    "qwen3": QWEN3,
    "qwen3 windows": dataclasses.replace(QWEN3, **FIRST),
    "llama": LLAMA,
    "qwen3_moe": MOE,
    "qwen3_moe windows": dataclasses.replace(MOE, **EVERY),
    "mistral": dataclasses.replace(LLAMA, **EVERY),
    "ministral": dataclasses.replace(LLAMA, **FIRST),
    "smollm3": dataclasses.replace(LLAMA, unrotated_layers=(1,)),
    "smollm3 windows": dataclasses.replace(LLAMA, unrotated_layers=(0, 1), **FIRST),
    "olmo2": OLMO,
    "olmo3": dataclasses.replace(OLMO, rope=YARN, window_rope=RopeConfig(5e5), **FIRST),
    "olmo3 thetas": dataclasses.replace(OLMO, window_rope=RopeConfig(7e3), **EVERY),
    "gemma3_text": dataclasses.replace(
        GEMMA, rope=LINEAR, window_rope=RopeConfig(), score_scale=24**-0.5, **FIRST
    ),
    "gemma3_text ropes": dataclasses.replace(GEMMA, window_rope=YARN, **EVERY),
    "gemma3_text full": GEMMA,
}


@pytest.mark.parametrize("case", TYPES)
def test_hf_config_round_trip(case: str) -> None:
    policy = dataclasses.replace(TYPES[case], norm_epsilon=1e-5, max_positions=256)
    raw = json.loads(json.dumps(policy.to_hf()))
    assert raw["model_type"] == case.split()[0] == policy.model_type
    assert PolicyConfig.from_hf(raw) == policy


GEMMA_TEXT: dict[str, Any] = {"sliding_window": 1024, "model_type": "gemma3_text"}
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
}
# Fields of files as older versions of transformers write them.
OLDER: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 7},
    "qwen2 off": {"sliding_window": 16, "max_window_layers": 7},
    "qwen3_moe": {
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 7,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "mistral": {"sliding_window": 16},
    "mistral off": {"sliding_window": None},
    "smollm3": {"no_rope_layers": [1, 1, 0, 1, 1, 0, 1, 1, 0]},
    "smollm3 interval": {},
    "smollm3 windows": {"use_sliding_window": True, "sliding_window": 16},
    "ministral": {"sliding_window": 16},
    "llama": {},
    "qwen3": {"head_dim": 8},
    "olmo2": {},
    "olmo3": {
        "sliding_window": 16,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.2079441541679836,
        },
    },
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 7e3,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
    },
    # As of Gemma 3 4B and 27B: only fields that differ from the defaults of the class.
    "gemma3": {"text_config": GEMMA_TEXT | {"hidden_size": 2560, "num_hidden_layers": 34}},
    "gemma3 large": {
        "tie_word_embeddings": True,
        "text_config": GEMMA_TEXT
        | {
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    },
}


@pytest.mark.parametrize("case", OLDER)
def test_older_files_mean_what_transformers_reads(case: str) -> None:
    transformers = pytest.importorskip("transformers", reason=families.REASON)
    model_type = case.split()[0]
    raw = {"model_type": model_type} | ({} if model_type == "gemma3" else _SIZES) | OLDER[case]
    policy = PolicyConfig.from_hf(json.loads(json.dumps(raw)))
    model_config = transformers.AutoConfig.for_model(**raw)
    theirs = model_config.get_text_config()
    types = getattr(theirs, "layer_types", None)
    if types is None:
        has_windows = getattr(theirs, "sliding_window", None) is not None
        types = ["sliding_attention" if has_windows else "full_attention"] * 9
    windows = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    assert policy.window_layers == windows
    assert policy.window == (theirs.sliding_window if windows else 0)
    rotated = getattr(theirs, "no_rope_layers", [1] * theirs.num_hidden_layers)
    assert policy.unrotated_layers == tuple(i for i, rotates in enumerate(rotated) if not rotates)
    for layer, rope in enumerate(policy.layer_ropes):
        fields = theirs.rope_parameters.get(types[layer], theirs.rope_parameters)
        if rotated[layer]:
            assert rope is not None
            assert (rope.kind, rope.theta) == (fields["rope_type"], fields["rope_theta"])
            assert rope.factor == fields.get("factor", 1.0)
    assert policy.width == theirs.hidden_size and policy.vocab_size == theirs.vocab_size
    assert policy.tied_embeddings == model_config.tie_word_embeddings
    assert policy.norm_epsilon == theirs.rms_norm_eps
    if policy.experts:
        assert policy.normalized_router == theirs.norm_topk_prob
    if model_type.startswith("gemma3"):
        scale = policy.score_scale or policy.head_size**-0.5
        assert scale == theirs.query_pre_attn_scalar**-0.5
    assert PolicyConfig.from_hf(policy.to_hf()) == policy


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
        (
            {"model_type": "mixtral"},
            r"model_type = 'mixtral' \(.*\): must be one of \('qwen2',",
        ),
        ({"model_type": ["qwen2"]}, r"model_type = \['qwen2'\]: must be one of"),
        ({"use_sliding_window": True}, r"^sliding_window = None: must be a positive"),
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


_REMOVED = object()
_NEW_VALUES = _VALUES | st.just(_REMOVED) | st.integers(0, 3)


@pytest.mark.slow
@given(st.sampled_from(list(TYPES)), st.data())
def test_arbitrary_config_change_is_read_or_rejected(case: str, data) -> None:
    raw = TYPES[case].to_hf()
    names = set(raw)
    for field in data.draw(st.lists(st.sampled_from(list(raw)), max_size=3)):
        raw[field] = data.draw(_NEW_VALUES)
    raw = {name: value for name, value in raw.items() if value is not _REMOVED}
    try:
        policy = PolicyConfig.from_hf(raw)
    except ValueError as error:
        assert any(name in str(error) for name in (*names, "policy.", "rope", "num_local_experts"))
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


SWITCHED = {"use_sliding_window": True, "sliding_window": 16}
SLIDING = ["sliding_attention"] * 2
BOTH = ["sliding_attention", "full_attention"]
MIXED = ["sliding_attention", 3]
ROPE = {"rope_type": "default", "rope_theta": 5e5}
ROPES = {"full_attention": ROPE, "sliding_attention": ROPE | {"rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("qwen2", {"max_window_layers": None} | SWITCHED, "^max_window_layers = None: must be"),
        ("qwen2", {"layer_types": MIXED} | SWITCHED, "^layer_types = .* for each layer"),
        ("qwen2", {"layer_types": ["full_attention"]}, "^layer_types = .* for each layer"),
        ("qwen2", {"layer_types": SLIDING}, "^layer_types = .*: must all be 'full_attention'"),
        ("qwen3_moe windows", {"layer_types": BOTH}, "must all be 'sliding_attention', by"),
        ("mistral", {"layer_types": BOTH}, "must all be 'sliding_attention', by"),
        ("mistral", {"sliding_window": 0}, "^sliding_window = 0: must be a positive"),
        ("mistral", {"sliding_window": 2**31}, r"^policy\.window = 2147483648: must be 1 to"),
        ("mistral", {"use_sliding_window": False}, "^use_sliding_window = False: must be True"),
        ("mistral", {"rms_norm_eps": None}, "^rms_norm_eps = None: must be a number"),
        ("mistral", {"rope_theta": None}, "^rope_theta: is missing"),
        ("ministral", {"sliding_window": None}, "must all be 'full_attention'"),
        (
            "ministral",
            {"rope_theta": None, "rope_scaling": None, "rope_parameters": ROPES},
            "^rope_parameters = .*same",
        ),
        ("smollm3", {"no_rope_layers": [1]}, "^no_rope_layers = .* for each of 2 layers"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "^no_rope_layers = .* for each of 2 layers"),
        ("smollm3", {"num_hidden_layers": 10**9}, "^num_hidden_layers = 10+: must be at most"),
        ("olmo3", {"rope_theta": 1e4}, "^rope of 'sliding_attention': rope_theta = 10000.0: must"),
        ("olmo3", {"rope_scaling": ROPES}, "^rope_scaling = .*must have the fields of one rope"),
        ("olmo3", {"sliding_window": None}, "^sliding_window = None: must be"),
        ("olmo3 thetas", {"rope_parameters": ROPE}, "^rope_parameters = .* for each layer type"),
        ("gemma3_text", {"hidden_activation": "relu"}, "^hidden_activation = 'relu': must be 'ge"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "^attn_logit_softcapping = 50.0: must"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "^final_logit_softcapping = 30.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "^use_bidirectional_attention"),
        ("gemma3_text", {"query_pre_attn_scalar": None}, "^query_pre_attn_scalar = None: must"),
        ("gemma3_text", {"query_pre_attn_scalar": 2**40}, "^query_pre_attn_scalar = .* at most"),
        ("gemma3_text", {"head_dim": None}, "^head_dim = None: must be"),
        ("gemma3_text", {"rope_local_base_freq": "7"}, "^rope of 'sliding_attention': .*theta"),
    ],
)
def test_unsupported_values_of_a_family_are_rejected(case, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyConfig.from_hf(TYPES[case].to_hf() | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "^text_config = None: must be an object"),
        ({"text_config": {"model_type": "llama"}}, "^model_type = 'llama': must be 'gemma3_text'"),
        ({"quantization_config": {"bits": 4}}, "^quantization_config = "),
        ({"text_config": {"attention_bias": True}}, "^attention_bias = True: must be False"),
    ],
)
def test_unsupported_multimodal_files_are_rejected(change: dict, message: str) -> None:
    raw = {"model_type": "gemma3", "text_config": GEMMA_TEXT} | change
    with pytest.raises(ValueError, match=message):
        PolicyConfig.from_hf(raw)


def test_scaling_of_a_run_leaves_the_rope_of_window_layers_alone() -> None:
    """As in OLMo 3, whose YaRN is for the other layers; Qwen2's scaling is for all layers."""
    for case, window_kind in (("olmo3 thetas", "default"), ("qwen2 windows", "yarn")):
        longer = TYPES[case].with_rope_scaling("yarn", 2.0)
        kinds = {layer: rope.kind for layer, rope in enumerate(longer.layer_ropes) if rope}
        assert [kinds[layer] for layer in longer.window_layers] == [window_kind] * len(
            longer.window_layers
        )
        assert longer.rope.kind == "yarn"
        assert PolicyConfig.from_hf(longer.to_hf()) == longer


@pytest.mark.parametrize(
    "change",
    [
        {"qk_norm": True},
        {"experts": 2, "experts_per_token": 1},
        {"norms": "after"},
        {"unrotated_layers": (1,)},
        {"score_scale": 0.5},
        {"window": 4, "window_layers": (1,), "window_rope": RopeConfig(2e4)},
    ],
)
def test_policy_without_a_hugging_face_architecture_is_rejected(change: dict) -> None:
    with pytest.raises(
        ValueError, match=r"^policy\..*no Hugging Face architecture has these parts"
    ):
        dataclasses.replace(tiny.POLICY, **change).to_hf()
