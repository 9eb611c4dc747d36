"""Tests of rotary positions: exact in float32 at any distance, scaled like transformers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spell_jax.policy import rope
from spell_jax.policy.rope import RopeConfig
from tests.policy import families

FAR = 131_072
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
    wanted = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(_rotate(x, positions), wanted, atol=2e-4)
    np.testing.assert_allclose(_rotate(x, positions)[:, :2], wanted[:, :2], atol=2e-6)


def test_dot_products_depend_only_on_the_distance() -> None:
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 1, 16)).astype(np.float32)
    near = np.sum(_rotate(q, [9]) * _rotate(k, [4]))
    far = np.sum(_rotate(q, [20_009]) * _rotate(k, [20_004]))
    assert abs(near - far) < 0.02
    assert abs(near - np.sum(_rotate(q, [9]) * _rotate(k, [3]))) > 0.1


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
    wanted = table(torch.zeros(1), torch.arange(FAR)[None])
    found = jax.jit(rope.rotary, static_argnums=(1, 2))(
        jnp.arange(FAR)[None], head_size, rope.from_hf(fields, FAR)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == jnp.float32
        difference = np.abs(ours[0, :, 0] - theirs[0, :, : head_size // 2].numpy())
        assert difference.max() < 1e-5


def test_yarn_frequencies_and_scale_by_hand() -> None:
    """Fast pairs keep their frequency, slow ones get a quarter of it, and scores grow."""
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
    read = rope.from_hf(raw | {"rope_theta": 5e5}, FAR)
    assert (read.theta, read.kind) == (5e5, scaling.get("rope_type", scaling.get("type")))
    assert read.factor == scaling["factor"]
    assert rope.from_hf(rope.to_hf(read), FAR) == read


def test_missing_fields_have_defaults() -> None:
    assert rope.from_hf({}, 2048) == RopeConfig()
    assert rope.from_hf({"rope_theta": 7, "rope_scaling": None}, 2048) == RopeConfig(7.0)
    read = rope.from_hf({"rope_scaling": {"type": "yarn", "factor": 2}}, 2048)
    assert read.original_positions == 2048 and read.truncate
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
        (YARN | {"mscale": 0.7}, r"rope_scaling\.mscale = 0\.7: is not implemented"),
        (YARN | {"beta_fast": 0.5}, r"rope\.beta_slow = 1\.0: must be"),
        (YARN | {"attention_factor": -1.0}, r"rope\.attention_factor = -1\.0: must be above 0"),
        ({"rope_type": "yarn", "factor": 2, "rope_theta": True}, r"rope\.theta = True: must be"),
        ("yarn", r"rope_scaling = 'yarn': must be an object or null"),
    ],
    ids=str,
)
def test_invalid_scaling_is_rejected(scaling, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope.from_hf({"rope_scaling": scaling}, 2048)


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
        read = rope.from_hf({"rope_scaling": scaling}, 2048)
    except ValueError as error:
        assert "rope" in str(error)
    else:
        frequencies = rope.frequencies(read, 64)
        assert frequencies.dtype == np.float32
        assert np.isfinite(frequencies).all() and (frequencies >= 0).all()


def test_invalid_rope_config_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"rope\.kind = 'ntk': must be one of"):
        RopeConfig(kind="ntk")
    with pytest.raises(ValueError, match=r"rope\.theta = 1: must be a number above 1"):
        RopeConfig(theta=1)
    with pytest.raises(ValueError, match=r"rope\.original_positions = None: must be the context"):
        dataclasses.replace(RopeConfig(), kind="yarn")
