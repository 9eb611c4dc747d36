"""Tests of rotary positions: exact in float32 at any distance, scaled like transformers."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spell_jax.policy import rope, transformer, weights
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.rope import RopeConfig
from tests import tiny
from tests.policy import families

FAR = 131_072
_NO_ROPE = {"rope_theta": None, "rope_scaling": None, "max_position_embeddings": 128}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _rotate(x: np.ndarray, positions: list[int], theta: float = 1e4):
    angles = rope.rotary(jnp.array([positions]), x.shape[-1], RopeConfig(theta))
    return np.asarray(rope.rotate(jnp.asarray(x), *angles))


def test_rotation_equals_complex_multiplication() -> None:
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 8)).astype(np.float32)
    positions = [0, 5, 1000]
    angles = np.outer(positions, 1e4 ** -(np.arange(4) / 4))[None, :, None]
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
    expected_rotation = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(_rotate(x, positions), expected_rotation, atol=2e-4)
    np.testing.assert_allclose(_rotate(x, positions)[:, :2], expected_rotation[:, :2], atol=2e-6)


def test_dot_products_depend_only_on_the_distance() -> None:
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 1, 16)).astype(np.float32)
    near_score = np.sum(_rotate(q, [9]) * _rotate(k, [4]))
    far_score = np.sum(_rotate(q, [20_009]) * _rotate(k, [20_004]))
    assert abs(near_score - far_score) < 0.02
    assert abs(near_score - np.sum(_rotate(q, [9]) * _rotate(k, [3]))) > 0.1


@pytest.mark.slow
def test_adjacent_positions_differ_in_bfloat16() -> None:
    x = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    turned = rope.rotate(x, *rope.rotary(jnp.array([[256, 257]]), 8, RopeConfig(1e4)))
    assert turned.dtype == jnp.bfloat16
    assert jnp.abs(turned[0, 0] - turned[0, 1]).max() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theta", "head_size", "scaling"),
    [
        (1e6, 128, {"rope_type": "default"}),
        (5e5, 128, {"rope_type": "default"}),
        (1e4, 64, {"rope_type": "linear", "factor": 8.0}),
        (5e5, 128, LLAMA3),
        (1e6, 128, YARN),
        (1e6, 64, YARN | {"truncate": False, "beta_fast": 16, "beta_slow": 2}),
        (1e4, 80, YARN | {"factor": 32.0, "attention_factor": 1.25}),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else str(value),
)
def test_angles_of_every_position_equal_transformers(theta, head_size, scaling) -> None:
    """Compare all 131,072 positions.

    One unit in the last place of one frequency could be an error of .008. The largest difference is
    4e-6, where transformers' power is rounded the other way.
    """
    torch = pytest.importorskip("torch", reason=families.REASON)
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3", reason=families.REASON)
    fields = {"rope_parameters": scaling | {"rope_theta": theta}, "max_position_embeddings": FAR}
    config = qwen3.Qwen3Config(
        head_dim=head_size, hidden_size=head_size, num_attention_heads=1, **fields
    )
    table = qwen3.Qwen3RotaryEmbedding(config)
    expected_rotary = table(torch.zeros(1), torch.arange(FAR)[None])
    rotary = jax.jit(rope.rotary, static_argnums=(1, 2))(
        jnp.arange(FAR)[None], head_size, rope.from_hf(fields, FAR)
    )
    for ours, theirs in zip(rotary, expected_rotary, strict=True):
        assert ours.dtype == jnp.float32
        difference = np.abs(ours[0, :, 0] - theirs[0, :, : head_size // 2].numpy())
        assert difference.max() < 1e-5


THETA = {"rope_theta": 50_000.0}
SHORT = {"rope_type": "yarn", "factor": 4.0}
FROM_32 = {"original_max_position_embeddings": 32}
DEFAULT = {"rope_type": "default"}
# Fields of a config.json with 128 positions -> our context in tokens.
ACCEPTED: dict[str, tuple[dict, int]] = {
    "default": (THETA, 128),
    "theta inside": ({"rope_parameters": DEFAULT | THETA}, 128),
    "theta twice": (THETA | {"rope_parameters": DEFAULT | THETA}, 128),
    "default with inert fields": (THETA | {"rope_scaling": DEFAULT | FROM_32 | {"factor": 3}}, 128),
    "whole head": (THETA | {"rope_parameters": DEFAULT | {"partial_rotary_factor": 1.0}}, 128),
    "linear": (THETA | {"rope_scaling": {"type": "linear", "factor": 4.0}}, 128),
    "linear, original": (THETA | {"rope_scaling": {"type": "linear", "factor": 3.0} | FROM_32}, 96),
    "llama3": (THETA | {"rope_parameters": LLAMA3 | FROM_32}, 128),
    # The wavelength of a pair lies between the bounds.
    "llama3, mixed": (
        THETA | {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}},
        128,
    ),
    "llama3, original at the top": (THETA | FROM_32 | {"rope_parameters": LLAMA3}, 128),
    "yarn": (THETA | {"rope_parameters": SHORT}, 512),
    "yarn of a card": (
        THETA | {"rope_scaling": SHORT | {"original_max_position_embeddings": 128}},
        512,
    ),
    "yarn, original": (THETA | {"rope_scaling": SHORT | FROM_32}, 128),
    "yarn, both names of the type": (
        THETA | {"rope_scaling": SHORT | FROM_32 | {"type": "yarn"}},
        128,
    ),
    "yarn, original at the top": (THETA | FROM_32 | {"rope_scaling": SHORT}, 128),
    "yarn, the top has priority": (
        THETA | FROM_32 | {"rope_scaling": SHORT | {"original_max_position_embeddings": 100}},
        128,
    ),
    "yarn, null fields": (
        THETA | {"rope_scaling": SHORT | FROM_32 | {"attention_factor": None, "beta_fast": None}},
        128,
    ),
    "yarn, attention factor": (
        THETA | {"rope_scaling": SHORT | FROM_32 | {"attention_factor": 0.9}},
        128,
    ),
    "yarn, mscales": (
        THETA | {"rope_scaling": SHORT | FROM_32 | {"mscale": 1.5, "mscale_all_dim": 0.7}},
        128,
    ),
    "yarn, betas": (
        THETA | {"rope_scaling": SHORT | FROM_32 | {"beta_fast": 8, "beta_slow": 0.5}},
        128,
    ),
    "yarn, exact bounds": (THETA | {"rope_scaling": SHORT | FROM_32 | {"truncate": False}}, 128),
    "by layer type": ({"rope_parameters": {"full_attention": SHORT | FROM_32 | THETA}}, 128),
}
# Forms that transformers reads otherwise: it fails.
NOT_IN_TRANSFORMERS = {"by layer type"}


@pytest.mark.parametrize("case", ACCEPTED)
def test_context_and_export_of_every_form(case: str) -> None:
    fields, positions = ACCEPTED[case]
    config = PolicyConfig.from_hf(tiny.POLICY.to_hf() | _NO_ROPE | fields)
    assert config.rope.theta == 50_000.0
    assert config.max_positions == positions
    assert PolicyConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted({*ACCEPTED} - NOT_IN_TRANSFORMERS))
def test_logits_of_every_form_equal_transformers(case: str, tmp_path) -> None:
    """transformers reads our config.json to equal logits."""
    torch = pytest.importorskip("torch", reason=families.REASON)
    transformers = pytest.importorskip("transformers", reason=families.REASON)
    raw = tiny.POLICY.to_hf() | _NO_ROPE | ACCEPTED[case][0]
    model = families.make("qwen2", vocab_size=64, head_dim=8)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    their_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    config, params = weights.load(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 64, size=(1, 120)).astype(np.int32)
    with torch.no_grad():
        expected_logits = their_model.eval()(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    logits = jax.jit(transformer.logits, static_argnums=0)(config, params, tokens)
    assert np.abs(expected_logits).max() > 1.0
    np.testing.assert_allclose(logits, expected_logits, atol=2e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "rope_theta: is missing; must be the base .* of type 'qwen2'"),
        ({"rope_scaling": SHORT}, "rope_theta: is missing"),
        (
            {"rope_parameters": DEFAULT | THETA, "rope_scaling": SHORT},
            "rope_parameters = .* and rope_scaling = .*: describe the rope twice; remove one",
        ),
        (
            {"rope_parameters": SHORT | THETA, "rope_scaling": SHORT},  # transformers mixes them
            "rope_parameters = .* and rope_scaling = .*: describe the rope twice",
        ),
        (
            {"rope_theta": 1e6, "rope_parameters": DEFAULT | THETA},
            r"rope_theta = 1000000\.0 and rope_parameters\.rope_theta = 50000\.0: contradict",
        ),
        (
            {"rope_parameters": {"full_attention": DEFAULT, "rope_theta": 1e6}},
            "rope_parameters = .*: must have the fields of one rope, or an object",
        ),
        ({"rope_parameters": {"sliding_attention": DEFAULT | THETA}}, "'full_attention' among"),
        ({"rope_parameters": {"full_attention": DEFAULT}}, "rope_theta: is missing"),
        ({"rope_scaling": {"factor": 4.0}} | THETA, r"rope_scaling\.rope_type: is missing"),
        ({"rope_scaling": [1]} | THETA, r"rope_scaling = \[1\]: must be an object"),
        ({"rope_parameters": ""} | THETA, "rope_parameters = '': must be an object"),
    ],
    ids=str,
)
def test_contradictory_or_missing_fields_are_one_error(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyConfig.from_hf(tiny.POLICY.to_hf() | _NO_ROPE | fields)


def test_theta_of_the_first_llama_files_has_a_default() -> None:
    assert rope.from_hf({"model_type": "llama"}, 2048).theta == 10_000.0


def test_yarn_frequencies_and_scale_by_hand() -> None:
    """Fast pairs keep their frequency, slow pairs get a quarter, and scores grow."""
    stretched = rope.from_hf({"rope_scaling": YARN, "rope_theta": 1e6}, 131_072)
    ratio = rope.frequencies(stretched, 128) / rope.frequencies(RopeConfig(1e6), 128)
    turns = 32_768 * rope.frequencies(RopeConfig(1e6), 128) / (2 * math.pi)
    np.testing.assert_allclose(ratio[turns > 40], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 0.8], 0.25, rtol=1e-6)
    assert (np.diff(ratio) <= 1e-6).all()
    cosines, _ = rope.rotary(jnp.array([[0]]), 128, stretched)
    np.testing.assert_allclose(cosines, 0.1 * math.log(4) + 1, rtol=1e-6)


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", [LLAMA3, YARN, {"type": "linear", "factor": 2}], ids=str)
def test_both_config_fields_for_scaling_are_read(field: str, scaling: dict) -> None:
    raw = {field: scaling | ({"rope_theta": 5e5} if field == "rope_parameters" else {})}
    rope_config = rope.from_hf(raw | {"rope_theta": 5e5}, FAR)
    assert (rope_config.theta, rope_config.kind) == (
        5e5,
        scaling.get("rope_type", scaling.get("type")),
    )
    assert rope_config.factor == scaling["factor"]
    assert rope.from_hf(rope.to_hf(rope_config), FAR) == rope_config


def test_missing_fields_have_defaults() -> None:
    assert rope.from_hf({"rope_theta": 7, "rope_scaling": None}, 2048) == RopeConfig(7.0)
    rope_config = rope.from_hf(
        {"rope_theta": 7, "rope_scaling": {"type": "yarn", "factor": 2}}, 2048
    )
    assert rope_config.original_positions == 2048 and rope_config.truncate
    assert rope.to_hf(RopeConfig()) == {"rope_theta": 1e4, "rope_scaling": None}


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "dynamic", "factor": 2.0}, "'dynamic': .*contradict keys"),
        ({"rope_type": "longrope"}, r"rope_scaling\.rope_type = 'longrope': must be one of"),
        ({"rope_type": ["yarn"]}, r"rope_scaling\.rope_type = \['yarn'\]: must be one of"),
        ({"rope_type": "yarn"}, r"rope_scaling\.factor: is missing"),
        ({"rope_type": "linear", "factor": "4"}, r"rope\.factor = '4': must be float"),
        ({"rope_type": "linear", "factor": 10**400}, r"rope\.factor = 10+: too large"),
        ({"rope_type": "linear", "factor": 0}, r"rope\.factor = 0\.0: must be at least 1"),
        (YARN | {"truncate": "no"}, r"rope\.truncate = 'no': must be bool"),
        (LLAMA3 | {"original_max_position_embeddings": 2.5}, r"original_positions = 2\.5"),
        ({"rope_type": "linear", "factor": 0.5}, r"rope\.factor = 0\.5: must be at least 1"),
        ({"rope_type": "linear", "factor": math.nan}, r"rope\.factor = nan"),
        (LLAMA3 | {"high_freq_factor": 1.0}, r"rope\.low_frequency = 1\.0: must be .* below"),
        (YARN | {"mscale": 0.7}, r"mscale = 0\.7 and .*mscale_all_dim = None: .* together"),
        (YARN | {"mscale": 1, "mscale_all_dim": 0}, r"mscale_all_dim = 0: must be above 0"),
        (
            YARN | {"mscale": 1, "mscale_all_dim": 1, "attention_factor": 1.5},
            r"mscale = 1 and .*without attention_factor",
        ),
        (YARN | {"short_factor": [1.0]}, r"rope_scaling\.short_factor = .*is not implemented"),
        (YARN | {"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5: is not implem"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
        (
            {"rope_type": "yarn", "type": "linear", "factor": 2},
            r"'yarn' and .*'linear': contradict",
        ),
        (YARN | {"original_max_position_embeddings": 2**30}, r"at most 2147483647 positions"),
        (YARN | {"original_max_position_embeddings": 10**400}, r"original_positions = 10+: must"),
        (YARN | {"beta_fast": 0.5}, r"rope\.beta_slow = 1\.0: must be"),
        (YARN | {"attention_factor": -1.0}, r"rope\.attention_factor = -1\.0: must be above 0"),
        (
            {"rope_type": "yarn", "factor": 2, "rope_theta": True},
            r"rope_theta = 1000000\.0 and rope_scaling\.rope_theta = True: contradict",
        ),
        ("yarn", r"rope_scaling = 'yarn': must be an object or null"),
    ],
    ids=str,
)
def test_invalid_scaling_is_rejected(scaling, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope.from_hf({"rope_scaling": scaling, "rope_theta": 1e6}, 2048)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=3,
)


@given(
    st.fixed_dictionaries(
        {"rope_type": st.sampled_from([*rope.KINDS, "dynamic", 3])},
        optional=dict.fromkeys(
            (*list(LLAMA3)[1:], "beta_fast", "truncate", "attention_factor"), _JSON
        ),
    )
)
def test_arbitrary_scaling_is_read_or_rejected(scaling: dict) -> None:
    try:
        rope_config = rope.from_hf({"rope_scaling": scaling, "rope_theta": 1e4}, 2048)
        positions = rope.context(rope_config, 2048)
    except ValueError as error:
        assert "rope" in str(error)
    else:
        assert 0 < positions < 2**31
        frequencies = rope.frequencies(rope_config, 64)
        assert frequencies.dtype == np.float32
        assert np.isfinite(frequencies).all() and (frequencies >= 0).all()


def test_invalid_rope_config_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"rope\.kind = 'ntk': must be one of"):
        RopeConfig(kind="ntk")
    with pytest.raises(ValueError, match=r"rope\.theta = 1: must be a number above 1"):
        RopeConfig(theta=1)
    with pytest.raises(ValueError, match=r"rope\.original_positions = None: must be the context"):
        dataclasses.replace(RopeConfig(), kind="yarn")
