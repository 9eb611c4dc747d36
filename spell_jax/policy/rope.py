"""Rotary position embeddings with float32 angles, and context extension by RoPE scaling.

RoPE scaling lowers all frequencies ("linear"), or only the frequencies of pairs that turn too
rarely in the original context to distinguish positions ("llama3", "yarn"). Frequencies are
compile-time constants, so that training, prefill and decode rotate by the same bits. "dynamic" is
not supported: its frequencies change with the text length, but keys in the KV cache were rotated
with older frequencies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

KINDS = ("default", "linear", "llama3", "yarn")
MOST_POSITIONS = 2**31 - 1  # positions are int32
FIELDS = ("rope_parameters", "rope_scaling")  # of config.json; transformers 5 writes the first
LAYER_TYPES = ("full_attention", "sliding_attention")  # without and with a window
_FULL, _WINDOW = LAYER_TYPES
# Model types for which files without rope_theta exist (Llama 1 and 2, Gemma 3), and their theta.
# Models of other families have several values, so that no default would be right for all.
_DEFAULT_THETA = {"llama": 10_000.0, "gemma3_text": 1_000_000.0}
# Model types whose layers with a window have a rope of their own, and its theta if a file has none.
# rope_scaling and rope_theta are for the other layers.
_WINDOW_THETA = {"gemma3_text": 10_000.0, "olmo3": 500_000.0}
_LOCAL_THETA = {"gemma3_text": "rope_local_base_freq"}  # field with this theta in older files


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding and its scaling.

    Attributes:
      theta: base of the frequencies, above 1.
      kind: scaling method, one of KINDS.
      factor: ratio of the scaled to the original context length, at least 1.
      original_positions: context length before scaling, in tokens ("llama3", "yarn"; "linear" takes
        only the context from it).
      low_frequency: "llama3": pairs with fewer turns than this in the original context are slowed
        down by `factor`.
      high_frequency: "llama3": pairs with more turns than this are unchanged.
      beta_slow: "yarn": the lower bound in turns, like low_frequency.
      beta_fast: "yarn": the upper bound in turns, like high_frequency.
      attention_factor: "yarn": scale of cosines and sines; None means 0.1 ln(factor) + 1.
      truncate: "yarn": whether the bounds are rounded to whole pairs.
    """

    SECTION: ClassVar[str] = "rope"

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
        original = self.original_positions or 0
        if not (0 <= original <= MOST_POSITIONS and original * self.factor <= MOST_POSITIONS):
            raise ValueError(
                f"rope.original_positions = {self.original_positions}: must be above 0, and "
                f"give at most {MOST_POSITIONS} positions with rope.factor = {self.factor}"
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
_ORIGINAL = "original_max_position_embeddings"
_HF_FIELDS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor", _ORIGINAL: "original_positions"},
    "llama3": {
        "factor": "factor",
        _ORIGINAL: "original_positions",
        "low_freq_factor": "low_frequency",
        "high_freq_factor": "high_frequency",
    },
    "yarn": {
        "factor": "factor",
        _ORIGINAL: "original_positions",
        "beta_slow": "beta_slow",
        "beta_fast": "beta_fast",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    },
}
_MSCALES = ("mscale", "mscale_all_dim")  # "yarn": together they give the attention factor
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor",),
}
# Fields that scaled kinds have, and that a default rope may have without effect.
_SCALED = {name for fields in _HF_FIELDS.values() for name in fields} | {*_MSCALES}


def from_hf(
    raw: Mapping[str, Any], max_positions: int, layer_type: str = "full_attention"
) -> RopeConfig:
    """Read the rope of a config.json: rope_theta, and rope_parameters or the older rope_scaling.

    `layer_type` is one of LAYER_TYPES. As in transformers, `max_positions`, the config's
    max_position_embeddings, is yarn's original context length if no other is given, and
    original_max_position_embeddings beside rope_scaling overrides the field inside. Raises
    ValueError if a field is unknown, missing or out of range, if both objects are there, or if two
    fields contradict each other.
    """
    if layer_type == _WINDOW and raw.get("model_type") in _WINDOW_THETA:
        raw = _of_windows(raw)
    field, scaling = _scaling(raw, layer_type)
    kind = _kind(field, scaling)
    if kind not in KINDS:
        why = ""
        if kind == "dynamic":
            why = "; dynamic frequencies contradict keys that are already in the cache"
        raise ValueError(f"{field}.rope_type = {kind!r}: must be one of {KINDS}{why}")
    if kind != "default" and raw.get(_ORIGINAL) is not None:
        scaling[_ORIGINAL] = raw[_ORIGINAL]
    for name in _REQUIRED.get(kind, ()):
        if scaling.get(name) is None:
            raise ValueError(f"{field}.{name}: is missing, rope_type {kind!r} needs it")
    if scaling.get("partial_rotary_factor") == 1:
        del scaling["partial_rotary_factor"]  # the whole head, as without the field
    implemented = {"rope_type", "type", "rope_theta", *_HF_FIELDS[kind]}
    # Some files give a default rope a factor or an original context, which are then ignored.
    implemented |= {"default": _SCALED, "yarn": {*_MSCALES}}.get(kind, set())
    for name in sorted(set(scaling) - implemented):
        if scaling[name] is not None:
            raise ValueError(f"{field}.{name} = {scaling[name]!r}: is not implemented")
    values = {
        ours: scaling[hf] for hf, ours in _HF_FIELDS[kind].items() if scaling.get(hf) is not None
    }
    if kind == "yarn":
        values.setdefault("original_positions", max_positions)
        values |= _attention_factor(field, scaling)
    values["theta"] = _theta(raw, layer_type)
    try:
        return RopeConfig(kind=kind, **{name: _typed(name, v) for name, v in values.items()})
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


def context(rope: RopeConfig, max_positions: int) -> int:
    """Return the longest context in tokens, given config.json's max_position_embeddings."""
    # "yarn" and "linear" stretch the original context by their factor, and many files (by the cards
    # of Qwen2.5 and Qwen3) keep the unscaled max_position_embeddings. Llama 3.1's factor of 8 is
    # not the ratio of its contexts of 131,072 and 8,192 positions.
    if rope.kind in ("yarn", "linear") and rope.original_positions:
        return int(rope.original_positions * rope.factor)
    return max_positions


def _of_windows(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for layers with a window, where these have a rope of their own."""
    model_type, theta = raw["model_type"], raw.get("rope_theta")
    field = _LOCAL_THETA.get(model_type)
    if field is None and not raw.get(FIELDS[0]) and theta != _WINDOW_THETA[model_type]:
        # transformers 4 gives it to all layers, transformers 5 only to those without a window.
        raise ValueError(
            f"rope_theta = {theta!r}: must be {_WINDOW_THETA[model_type]} in a model of type "
            f"{model_type!r}; rope_parameters may have another for each of {LAYER_TYPES}"
        )
    own_theta = raw.get(field) if field else None
    return {**raw, "rope_theta": own_theta, "rope_scaling": None}


def _scaling(raw: Mapping[str, Any], layer_type: str) -> tuple[str, dict[str, Any]]:
    """Return the field that describes the rope, and a copy of its object (empty without one)."""
    objects = {}
    for field in FIELDS:
        value = raw.get(field)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{field} = {value!r}: must be an object or null")
        if value:
            objects[field] = _flat(raw, field, layer_type)
    if len(objects) == 2:  # transformers 5 reads a mixture of both, even where they are equal
        raise ValueError(
            f"rope_parameters = {raw['rope_parameters']!r} and rope_scaling = "
            f"{raw['rope_scaling']!r}: describe the rope twice; remove one of them (transformers 5 "
            "writes rope_parameters only)"
        )
    return next(iter(objects.items()), (FIELDS[1], {}))


def _flat(raw: Mapping[str, Any], field: str, layer_type: str) -> dict[str, Any]:
    """Return the fields of a layer type's rope without nulls; {} if only other types have one."""
    scaling = {name: value for name, value in raw[field].items() if value is not None}
    nested = [name for name, value in scaling.items() if isinstance(value, dict)]
    if raw.get("model_type") in _WINDOW_THETA:
        # transformers reads rope_scaling of these models as one rope, rope_parameters by type.
        is_valid = _FULL in nested if field == FIELDS[0] else not nested
    else:
        is_valid = _FULL in nested or not nested
    if not is_valid or 0 < len(nested) < len(scaling):
        raise ValueError(
            f"{field} = {scaling!r}: must have the fields of one rope, or an object of them for "
            f"each layer type, {_FULL!r} among them"
        )
    if not nested:
        return scaling
    return dict(scaling.get(layer_type, {}))


def _kind(field: str, scaling: Mapping[str, Any]) -> str:
    new, old = scaling.get("rope_type"), scaling.get("type")
    if None not in (new, old) and new != old:
        raise ValueError(
            f"{field}.rope_type = {new!r} and {field}.type = {old!r}: contradict each other; "
            "remove type, the older name"
        )
    kind = old if new is None else new
    # To ignore the factor would run the model on positions that it was not trained for.
    if kind is None and scaling.get("factor") is not None:
        raise ValueError(f"{field}.rope_type: is missing, must say what the factor does")
    kind = "default" if kind is None else kind
    if not isinstance(kind, str):
        raise ValueError(f"{field}.rope_type = {kind!r}: must be one of {KINDS}")
    return kind


def _theta(raw: Mapping[str, Any], layer_type: str) -> Any:
    """Return the rope_theta of config.json, which may be in several places if all agree."""
    places = {"rope_theta": raw.get("rope_theta")}
    for field in FIELDS:
        if raw.get(field):
            places[f"{field}.rope_theta"] = _flat(raw, field, layer_type).get("rope_theta")
    values = [(place, value) for place, value in places.items() if value is not None]
    for place, value in values[1:]:
        if value != values[0][1]:
            raise ValueError(
                f"{values[0][0]} = {values[0][1]!r} and {place} = {value!r}: contradict each "
                "other; remove one of them"
            )
    if values:
        return values[0][1]
    model_type = raw.get("model_type")
    if (theta := default_theta(model_type, layer_type)) is not None:
        return theta
    raise ValueError(
        "rope_theta: is missing; must be the base of the rotary frequencies that the weights were "
        f"trained with (no default is right for every model of type {model_type!r})"
    )


def default_theta(model_type: Any, layer_type: str = "full_attention") -> float | None:
    """Return the rope_theta that files of a model type may leave out; None for other types."""
    thetas = _DEFAULT_THETA if layer_type == _FULL else _WINDOW_THETA
    return thetas.get(model_type) if isinstance(model_type, str) else None


def _attention_factor(field: str, scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"attention_factor": ...} by mscale and mscale_all_dim (DeepSeek), {} without both."""
    mscale, all_dim = (scaling.get(name) for name in _MSCALES)
    if mscale is None and all_dim is None:
        return {}
    place = f"{field}.mscale = {mscale!r} and {field}.mscale_all_dim = {all_dim!r}"
    if None in (mscale, all_dim) or scaling.get("attention_factor") is not None:
        raise ValueError(
            f"{place}: must be given together, without attention_factor; or give attention_factor, "
            "the scale of cosines and sines, instead of them"
        )
    factor = _typed("factor", scaling["factor"])
    weights = _typed(_MSCALES[0], mscale), _typed(_MSCALES[1], all_dim)
    if not (factor >= 1 and all(0 < weight < math.inf for weight in weights)):
        raise ValueError(f"{place}: must be above 0, for a factor of at least 1")
    # The form of YaRN's Eq. 22, once with each of DeepSeek's two weights.
    above, below = (0.1 * weight * math.log(factor) + 1.0 for weight in weights)
    return {"attention_factor": above / below}


def _typed(name: str, value: Any) -> Any:
    kind = {"original_positions": int, "truncate": bool}.get(name, float)
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or isinstance(value, bool) != (kind is bool):
        raise ValueError(f"rope.{name} = {value!r}: must be {kind.__name__}")
    try:
        return kind(value)
    except OverflowError as error:
        raise ValueError(f"rope.{name} = {value!r}: too large") from error


def to_hf(
    rope: RopeConfig, window_rope: RopeConfig | None = None, model_type: str = ""
) -> dict[str, Any]:
    """Return the fields of the ropes in a config.json, for any version of transformers.

    `window_rope` is for layers with a window. A rope that only transformers 5 can give to them is
    written as rope_parameters, which older versions ignore.
    """
    theta = {"rope_theta": rope.theta}
    fields = theta | {"rope_scaling": _scaling_to_hf(rope) if rope.kind != "default" else None}
    if window_rope is None or (window_rope == rope and model_type not in _WINDOW_THETA):
        return fields
    if window_rope.kind == "default" and model_type in _LOCAL_THETA:
        return fields | {_LOCAL_THETA[model_type]: window_rope.theta}
    if window_rope == RopeConfig(rope.theta) and rope.theta == _WINDOW_THETA.get(model_type):
        return fields
    pairs = zip(LAYER_TYPES, (rope, window_rope), strict=True)
    return {
        "rope_parameters": {
            layer_type: {"rope_theta": of_type.theta, **_scaling_to_hf(of_type)}
            for layer_type, of_type in pairs
        }
    }


def _scaling_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """Return the fields of rope_scaling."""
    values = {hf: getattr(rope, ours) for hf, ours in _HF_FIELDS[rope.kind].items()}
    scaling = {name: value for name, value in values.items() if value is not None}
    return {"rope_type": rope.kind, **scaling}


def frequencies(rope: RopeConfig, head_size: int) -> np.ndarray:
    """Compute the rotation of each of the H/2 pairs per position, in radians, float32 [H/2].

    Sources: Su et al. (arXiv:2104.09864), Eq. 15; Peng et al. (YaRN, arXiv:2309.00071), section 3;
    Llama 3.1's smooth interpolation by wavelength.
    """
    # Powers are computed in float64 and rounded once; all else is float32, as in transformers. At
    # position 131,071 one unit in the last place of a frequency is up to 0.008 radians.
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    wave = (rope.theta ** exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / wave
    factor = np.float32(rope.factor)
    if rope.kind == "linear":
        return plain / factor
    if rope.kind == "llama3":
        assert rope.original_positions is not None
        # Turns of a pair in the original context: context length over wavelength.
        turns = rope.original_positions / (2 * np.pi / plain)
        span = rope.high_frequency - rope.low_frequency
        share = ((turns - rope.low_frequency) / span).astype(np.float32)
        between = (1 - share) * plain / factor + share * plain
        blend = np.where(turns > rope.high_frequency, plain, between)
        return np.where(turns < rope.low_frequency, plain / factor, blend).astype(np.float32)
    if rope.kind == "yarn":
        share = 1 - _slow_share(rope, head_size)
        return np.float32(1) / (factor * wave) * (1 - share) + plain * share
    return plain


def _slow_share(rope: RopeConfig, head_size: int) -> np.ndarray:
    """Compute YaRN's ramp [H/2]: 0 for fast pairs, 1 for slow, by turns in the original context."""
    original = rope.original_positions
    assert original is not None

    def pair(turns: float) -> float:
        """Return the real-valued pair number with this many turns in the original context."""
        radians = original / (turns * 2 * math.pi)
        return head_size * math.log(radians) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    # Bounds as in YaRN's code: head_size - 1, although there are only H/2 pairs.
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001  # one pair is the whole ramp
    pairs = np.arange(head_size // 2, dtype=np.float32)
    return np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)


def rotary(
    positions: Int32[Array, "B T"], head_size: int, rope: RopeConfig
) -> tuple[Float32[Array, "B T 1 half_H"], Float32[Array, "B T 1 half_H"]]:
    """Compute cosines and sines of the angles of positions."""
    # Positions are integers until they meet float32 frequencies: bfloat16 cannot tell 256 from 257.
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies(rope, head_size)
    # Scaled here, once per position, YaRN's factor reaches every score through both q and k.
    return jnp.cos(angles) * rope.scale, jnp.sin(angles) * rope.scale


def rotaries(
    positions: Int32[Array, "B T"], head_size: int, ropes: Sequence[RopeConfig | None]
) -> tuple[Float32[Array, "ropes B T 1 half_H"], Float32[Array, "ropes B T 1 half_H"]]:
    """Stack the `rotary` of several ropes; None rotates nothing."""
    tables = [
        # No rotation is a rotation by position 0.
        rotary(positions if rope else positions * 0, head_size, rope or RopeConfig())
        for rope in ropes
    ]
    cosines, sines = zip(*tables, strict=True)
    return jnp.stack(cosines), jnp.stack(sines)


def rotate(
    x: Float[Array, "B T heads H"],
    cosines: Float32[Array, "B T 1 half_H"],
    sines: Float32[Array, "B T 1 half_H"],
) -> Float[Array, "B T heads H"]:
    """Rotate the pairs (i, i + H/2) of x, the layout of Hugging Face weights."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=-1
    )
    return rotated.astype(x.dtype)
