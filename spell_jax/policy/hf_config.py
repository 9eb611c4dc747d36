"""config.json of Hugging Face, read into fields of PolicyConfig and written from them.

A field is read as transformers reads it. The default of a missing field in transformers depends on
the class, and published files may mean another value, so few fields may be missing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from spell_jax.policy import families, unsupported
from spell_jax.policy import rope as ropes
from spell_jax.policy.families import FAMILIES, MODEL_TYPES, MULTIMODAL, Family

# Values that every supported model has in these fields, where present. Other values would change
# the function that the model computes, so they are refused and never ignored.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "quantization_config": (None,),
    "use_mrope": (False, None),
    "is_causal": (True,),
    "is_encoder_decoder": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
}
_REMEDIES = {
    "quantization_config": "; quantized weights are not read, so take the same model's folder in "
    "bfloat16, float16 or float32",
}
# Our activations by their Hugging Face names; Gemma 3 has them in a field of its own.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_pytorch_tanh"}
_ACTIVATION_FIELDS = ("hidden_act", "hidden_activation")
_TYPES = ropes.LAYER_TYPES
_FULL, _WINDOW = _TYPES
# A file of a multimodal Gemma 3 leaves out each field of its text model that has this value, the
# default of its class in transformers.
_TEXT_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
# Larger values of query_pre_attn_scalar do not survive the float that is their root.
_MOST_SCALAR = 2**30
_MOST_LAYERS = 1000  # lists with an entry per layer stay small


# ----------------------------------------------------------------------------------------- Reading


def read(raw: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of PolicyConfig; raises as PolicyConfig.from_hf."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        reason = unsupported.explain(model_type)
        raise ValueError(f"model_type = {model_type!r}{reason}: must be one of {MODEL_TYPES}")
    if model_type == MULTIMODAL:
        _check_fixed(raw, _FIXED)
        raw = _text_config(raw)
        model_type = raw["model_type"]
    family = FAMILIES[model_type]
    activation = _ACTIVATIONS[family.features.get("activation", "silu")]
    _check_fixed(raw, _FIXED | dict.fromkeys(_ACTIVATION_FIELDS, (activation,)))
    heads, width = _field(raw, "num_attention_heads"), _field(raw, "hidden_size")
    derived = {"num_key_value_heads": heads, "head_dim": width // heads}
    defaults = {**family.defaults, **{name: derived[name] for name in family.derived}}
    field = functools.partial(_field, raw, defaults=defaults)
    layers = field("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers = {layers}: must be at most {_MOST_LAYERS}")
    fields: dict[str, Any] = {
        "vocab_size": field("vocab_size"),
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": field("num_key_value_heads"),
        "head_size": field("head_dim"),
        "feed_forward": field(
            "moe_intermediate_size" if family.has_experts else "intermediate_size"
        ),
        "norm_epsilon": field("rms_norm_eps", float),
        "tied_embeddings": field("tie_word_embeddings", bool),
        # config.json does not mention these: transformers' classes have them fixed.
        **{"qkv_bias": False, **family.features},
    }
    if family.has_experts:
        # transformers 5 writes num_local_experts but reads num_experts.
        fields["experts"] = field("num_experts" if "num_experts" in raw else "num_local_experts")
        fields["experts_per_token"] = field("num_experts_per_tok")
        fields["normalized_router"] = field("norm_topk_prob", bool)
    if family.has_unrotated_layers:
        fields["unrotated_layers"] = _unrotated_layers(raw, layers, defaults)
    if family.has_score_scale:
        fields["score_scale"] = _score_scale(raw, fields["head_size"])
    window_layers = _window_layers(raw, family, layers, fields.get("unrotated_layers", ()))
    if window_layers:
        fields |= {"window": field("sliding_window"), "window_layers": window_layers}
    return fields | _ropes(raw, family, bool(window_layers))


_KINDS = {int: "a positive integer", float: "a number", bool: "true or false"}


def _field(
    raw: dict[str, Any], name: str, kind: type = int, defaults: Mapping[str, Any] | None = None
) -> Any:
    """Read a positive int, a float or a bool; null counts as missing."""
    value: Any = raw.get(name)
    # transformers writes null for a field without a value.
    value = (defaults or {}).get(name) if value is None else value
    if kind is float and type(value) is int:
        value = float(value)
    # Exact types: in Python True is an int, and a width of True is a mistake.
    if type(value) is not kind or (kind is int and value < 1):
        raise ValueError(f"{name} = {value!r}: must be {_KINDS[kind]}")
    return value


def _check_fixed(raw: dict[str, Any], fixed: Mapping[str, tuple[Any, ...]]) -> None:
    for field, allowed in fixed.items():
        if field in raw and raw[field] not in allowed:
            remedy = _REMEDIES.get(field, "")
            raise ValueError(f"{field} = {raw[field]!r}: must be {allowed[0]!r}{remedy}")


def _text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a text model in a multimodal config, as in a file of its own."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"text_config = {text!r}: must be an object, the config of the text model")
    if text.get("model_type") not in ("gemma3_text", None):
        raise ValueError(f"model_type = {text['model_type']!r}: must be 'gemma3_text' here")
    fields = {name: value for name, value in text.items() if value is not None}
    # The head belongs to the whole model, not to its text part.
    ties = {"tie_word_embeddings": raw.get("tie_word_embeddings")}
    return _TEXT_DEFAULTS | fields | ties | {"model_type": "gemma3_text"}


def _unrotated_layers(
    raw: dict[str, Any], layers: int, defaults: Mapping[str, Any]
) -> tuple[int, ...]:
    """Read the layers without position embeddings: 0 in no_rope_layers, or each n-th layer."""
    rotates = raw.get("no_rope_layers")
    if rotates is None:
        interval = _field(raw, "no_rope_layer_interval", defaults=defaults)
        return tuple(range(interval - 1, layers, interval))
    if not (isinstance(rotates, list) and len(rotates) >= layers) or any(
        type(value) is not int or value not in (0, 1) for value in rotates
    ):
        raise ValueError(
            f"no_rope_layers = {rotates!r}: must have for each of {layers} layers a 1, or a 0 if "
            "the layer has no position embeddings"
        )
    return tuple(layer for layer in range(layers) if not rotates[layer])


def _score_scale(raw: dict[str, Any], head_size: int) -> float | None:
    scalar = _field(raw, "query_pre_attn_scalar")
    if scalar > _MOST_SCALAR:
        raise ValueError(f"query_pre_attn_scalar = {scalar}: must be at most {_MOST_SCALAR}")
    return None if scalar == head_size else scalar**-0.5


def _window_layers(
    raw: dict[str, Any], family: Family, layers: int, unrotated_layers: Sequence[int]
) -> tuple[int, ...]:
    """Read the numbers of the layers with a window."""
    has_windows = _has_windows(raw, family)
    kinds = raw.get("layer_types")
    named = None if kinds is None else _named_window_layers(kinds, layers)
    if named is not None and has_windows and family.has_layer_types:
        return named
    ruled = _ruled_window_layers(raw, family, layers, unrotated_layers) if has_windows else ()
    if named not in (None, ruled):
        # Models of this type ignore the field, or lack the mask for it.
        raise ValueError(
            f"layer_types = {kinds!r}: must all be {(_WINDOW if ruled else _FULL)!r}, by the "
            "model's type and its other fields"
        )
    return ruled


def _has_windows(raw: dict[str, Any], family: Family) -> bool:
    """Return whether layers may have windows, by the field that the family has for that."""
    switch = family.switch
    if switch == "use_sliding_window":
        return _field(raw, switch, bool, {switch: False})
    if switch and switch not in raw:
        # The default of transformers is a window, which most published models do not have.
        raise ValueError(f"{switch}: is missing; must be null, or the tokens that a query sees")
    has_windows = bool(family.windows) and not (switch and raw[switch] is None)
    if (ignored := raw.get("use_sliding_window")) not in (None, has_windows):
        # transformers ignores the field in these models, other programs do not.
        raise ValueError(
            f"use_sliding_window = {ignored!r}: must be {has_windows} or removed, by the model's "
            "type and its sliding_window"
        )
    return has_windows


def _named_window_layers(kinds: Any, layers: int) -> tuple[int, ...]:
    """Return the layers with a window by `layer_types`."""
    if not isinstance(kinds, list) or len(kinds) != layers or any(x not in _TYPES for x in kinds):
        raise ValueError(f"layer_types = {kinds!r}: must have one of {_TYPES} for each layer")
    return tuple(layer for layer in range(layers) if kinds[layer] == _WINDOW)


def _ruled_window_layers(
    raw: dict[str, Any], family: Family, layers: int, unrotated_layers: Sequence[int]
) -> tuple[int, ...]:
    """Return the layers with a window by the family's rule, without `layer_types`."""
    rule = family.windows
    if rule == "no_rope_layers":
        return tuple(unrotated_layers)
    if rule == "max_window_layers":  # counts the layers without a window, which come first
        first = raw.get(rule)
        if type(first) is not int or first < 0:
            raise ValueError(f"{rule} = {first!r}: must be an integer of at least 0")
        return tuple(range(first, layers))
    if rule == "sliding_window_pattern":
        return _without_each(_field(raw, rule, defaults=family.defaults), layers)
    return _without_each(4, layers) if rule == "three of four" else tuple(range(layers))


def _without_each(interval: int, layers: int) -> tuple[int, ...]:
    """Return the numbers of all layers but each `interval`-th."""
    return tuple(layer for layer in range(layers) if (layer + 1) % interval)


def _ropes(raw: dict[str, Any], family: Family, has_windows: bool) -> dict[str, Any]:
    """Read the ropes and the context."""
    max_positions = _field(raw, "max_position_embeddings")
    rope = ropes.from_hf(raw, max_positions)
    fields = {"rope": rope, "max_positions": ropes.context(rope, max_positions)}
    if not has_windows:
        return fields
    try:
        window_rope = ropes.from_hf(raw, max_positions, _WINDOW)
    except ValueError as error:
        raise ValueError(f"rope of {_WINDOW!r}: {error}") from error
    if family.has_window_rope:
        # Also where both are equal: a scaling that a run adds is for the other layers alone.
        return fields | {"window_rope": window_rope}
    if window_rope != rope:
        raise ValueError(
            f"rope_parameters = {raw.get('rope_parameters')!r}: must be the same for every layer "
            f"type in a model of type {raw['model_type']!r}"
        )
    return fields


# ----------------------------------------------------------------------------------------- Writing


def write(config: Any) -> dict[str, Any]:
    """Convert a PolicyConfig; ValueError if no Hugging Face architecture has its parts."""
    model_type = families.find(config)
    family = FAMILIES[model_type]
    fields = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.feed_forward,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": False,
        "pad_token_id": None,  # written out: a class may have a default beyond the vocabulary
        **_written_windows(config, family),
    }
    activation = _ACTIVATIONS[config.activation]
    # Files of Gemma have both fields.
    names = _ACTIVATION_FIELDS if activation != "silu" else _ACTIVATION_FIELDS[:1]
    fields |= dict.fromkeys(names, activation)
    window_rope = (config.window_rope or config.rope) if config.window else None
    fields |= ropes.to_hf(config.rope, window_rope, model_type)
    if family.has_experts:
        fields |= {
            "moe_intermediate_size": config.feed_forward,
            "num_experts": config.experts,
            "num_experts_per_tok": config.experts_per_token,
            "norm_topk_prob": config.normalized_router,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if family.has_unrotated_layers:
        unrotated = config.unrotated_layers
        fields["no_rope_layers"] = [int(n not in unrotated) for n in range(config.layers)]
    if family.has_score_scale:
        fields["query_pre_attn_scalar"] = _scalar(config)
    return fields


def _scalar(config: Any) -> int:
    """Return query_pre_attn_scalar, the inverse square of the scale of scores."""
    if config.score_scale is None:
        return config.head_size
    scalar = round(config.score_scale**-2)
    if scalar < 1 or scalar**-0.5 != config.score_scale:
        raise ValueError(
            f"policy.score_scale = {config.score_scale}: must be the inverse root of an integer, "
            "to be written as query_pre_attn_scalar"
        )
    return scalar


def _written_windows(config: Any, family: Family) -> dict[str, Any]:
    """Return the fields about windows, for new and old versions of transformers."""
    layers, window_layers = config.layers, config.window_layers
    fields: dict[str, Any] = {}
    if family.switch == "use_sliding_window" or not family.windows:
        # Written out: other programs would fill in a default that depends on their class.
        fields["use_sliding_window"] = bool(config.window)
    # Gemma 3 needs a window even where no layer has one.
    is_gemma = family.windows == "sliding_window_pattern"
    if not config.window and not is_gemma:
        return fields
    fields["sliding_window"] = config.window or config.max_positions
    if family.has_layer_types:
        fields["layer_types"] = [_WINDOW if n in window_layers else _FULL for n in range(layers)]
    if family.windows == "max_window_layers":
        fields["max_window_layers"] = window_layers[0]
    if is_gemma:
        intervals = (family.defaults["sliding_window_pattern"], *range(1, layers + 2))
        fits = [n for n in intervals if _without_each(n, layers) == window_layers]
        fields["sliding_window_pattern"] = fits[0] if fits else None
    return fields
