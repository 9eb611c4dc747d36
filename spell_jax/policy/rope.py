"""Rotary position embeddings with float32 angles, and context extension by RoPE scaling.

RoPE scaling lowers all frequencies ("linear"), or those of pairs that turn too rarely in the
original context to distinguish positions ("llama3", "yarn"). Frequencies are compile-time
constants, so that training, prefill and decode rotate by the same bits. A "dynamic" kind is not
supported: its frequencies change with the text length, but keys in the KV cache were rotated with
older ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding and its scaling.

    Attributes:
      theta: base of the frequencies, above 1.
      kind: scaling method, one of KINDS.
      factor: ratio of the scaled to the original context length, at least 1.
      original_positions: context length before scaling, in tokens ("llama3", "yarn").
      low_frequency: "llama3": pairs with fewer turns than this in the original context are slowed
        down by `factor`.
      high_frequency: "llama3": pairs with more turns than this are unchanged.
      beta_slow: "yarn": the lower bound in turns, like low_frequency.
      beta_fast: "yarn": the upper bound in turns, like high_frequency.
      attention_factor: "yarn": scale of cosines and sines; None means 0.1 ln(factor) + 1.
      truncate: "yarn": whether the bounds are rounded to whole pairs.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_positions: int | None = None
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"rope.kind = {self.kind!r}: must be one of {KINDS}")
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise ValueError(f"rope.theta = {self.theta}: must be a number above 1")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"rope.factor = {self.factor}: must be at least 1")
        if self.kind in ("llama3", "yarn") and (self.original_positions or 0) < 1:
            raise ValueError(
                f"rope.original_positions = {self.original_positions}: must be the context before "
                f"stretching, for kind {self.kind!r}"
            )
        if not 0 < self.low_frequency < self.high_frequency:
            raise ValueError(
                f"rope.low_frequency = {self.low_frequency}: must be above 0 and below "
                f"high_frequency = {self.high_frequency}"
            )
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"rope.beta_slow = {self.beta_slow}: must be above 0 and below beta_fast = "
                f"{self.beta_fast}"
            )
        if self.attention_factor is not None and not self.attention_factor > 0:
            raise ValueError(f"rope.attention_factor = {self.attention_factor}: must be above 0")

    @property
    def scale(self) -> float:
        """Factor of cosines and sines (YaRN, arXiv:2309.00071, Eq. 22); scales scores twice."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0


# Field of a Hugging Face rope_scaling -> ours, by kind.
_HF_FIELDS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_positions",
        "low_freq_factor": "low_frequency",
        "high_freq_factor": "high_frequency",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_positions",
        "beta_slow": "beta_slow",
        "beta_fast": "beta_fast",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    },
}
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}


def from_hf(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Read rope_theta and rope_scaling (or the newer rope_parameters) from a config.json.

    `max_positions`, its max_position_embeddings, is the original context length if none is given,
    as in transformers. Raises ValueError if a field is unknown, missing or out of range.
    """
    field = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = raw.get(field) or {}
    if not isinstance(scaling, dict):
        raise ValueError(f"{field} = {scaling!r}: must be an object or null")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in KINDS:
        why = ""
        if kind == "dynamic":
            why = "; dynamic frequencies contradict keys that are already in the cache"
        raise ValueError(f"{field}.rope_type = {kind!r}: must be one of {KINDS}{why}")
    for name in _REQUIRED.get(kind, ()):
        if scaling.get(name) is None:
            raise ValueError(f"{field}.{name}: is missing, rope_type {kind!r} needs it")
    known = {"rope_type", "type", "rope_theta", *_HF_FIELDS[kind]}
    # Some files give a default rope a factor or an original context, which are then ignored.
    for name in sorted(set(scaling) - known if kind != "default" else ()):
        if scaling[name] is not None:
            raise ValueError(f"{field}.{name} = {scaling[name]!r}: is not implemented")
    given = {
        ours: scaling[hf] for hf, ours in _HF_FIELDS[kind].items() if scaling.get(hf) is not None
    }
    if kind == "yarn":
        given.setdefault("original_positions", max_positions)
    given["theta"] = scaling.get("rope_theta", raw.get("rope_theta", 10_000.0))
    try:
        return RopeConfig(kind=kind, **{name: _typed(name, v) for name, v in given.items()})
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


def _typed(name: str, value: Any) -> Any:
    kind = {"original_positions": int, "truncate": bool}.get(name, float)
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or isinstance(value, bool) != (kind is bool):
        raise ValueError(f"rope.{name} = {value!r}: must be {kind.__name__}")
    try:
        return kind(value)
    except OverflowError as error:
        raise ValueError(f"rope.{name} = {value!r}: too large") from error


def to_hf(rope: RopeConfig) -> dict[str, Any]:
    """Fields rope_theta and rope_scaling of a config.json, for any version of transformers."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    values = {hf: getattr(rope, ours) for hf, ours in _HF_FIELDS[rope.kind].items()}
    scaling = {name: value for name, value in values.items() if value is not None}
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": rope.kind, **scaling}}


def frequencies(rope: RopeConfig, head_size: int) -> np.ndarray:
    """Rotation of each of the H/2 pairs per position, in radians, float32 [H/2].

    Powers are computed in float64 and rounded once; all else is float32, as in transformers: at
    position 131,071 one unit in the last place of a frequency is up to 0.008 radians.

    Sources: Su et al. (arXiv:2104.09864), Eq. 15; Peng et al. (YaRN, arXiv:2309.00071), section 3;
    Llama 3.1's smooth interpolation by wavelength.
    """
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    wave = (rope.theta ** exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / wave
    factor = np.float32(rope.factor)
    if rope.kind == "linear":
        return plain / factor
    if rope.kind == "llama3":
        assert rope.original_positions is not None
        turns = rope.original_positions / (2 * np.pi / plain)
        span = rope.high_frequency - rope.low_frequency
        share = ((turns - rope.low_frequency) / span).astype(np.float32)
        between = (1 - share) * plain / factor + share * plain
        kept = np.where(turns > rope.high_frequency, plain, between)
        return np.where(turns < rope.low_frequency, plain / factor, kept).astype(np.float32)
    if rope.kind == "yarn":
        share = 1 - _slow_share(rope, head_size)
        return np.float32(1) / (factor * wave) * (1 - share) + plain * share
    return plain


def _slow_share(rope: RopeConfig, head_size: int) -> np.ndarray:
    """YaRN's ramp [H/2]: 0 for fast pairs, 1 for slow ones, by turns in the original context."""
    original = rope.original_positions
    assert original is not None

    def pair(turns: float) -> float:
        """Pair number, as a real number, with this many turns in the original context."""
        radians = original / (turns * 2 * math.pi)
        return head_size * math.log(radians) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001  # one pair is the whole ramp
    pairs = np.arange(head_size // 2, dtype=np.float32)
    return np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)


def rotary(positions: jax.Array, head_size: int, rope: RopeConfig) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 [B, T, 1, H/2] each, of the angles of int32 positions [B, T].

    Positions stay integers until they meet float32 frequencies: bfloat16 cannot tell 256 from 257.
    """
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies(rope, head_size)
    return jnp.cos(angles) * rope.scale, jnp.sin(angles) * rope.scale


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + H/2) of x [B, T, heads, H], the layout of Hugging Face weights."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=-1
    )
    return rotated.astype(x.dtype)
