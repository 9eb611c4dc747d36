"""Tests of what is not implemented: each model type and field is refused, or without effect."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from spell_jax.policy import unsupported
from spell_jax.policy.config import PolicyConfig
from spell_jax.policy.families import MODEL_TYPES
from tests.policy import families

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
QWEN3 = LLAMA | {
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 1e6,
}
GEMMA3 = QWEN3 | {
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 8,
    "sliding_window": 16,
    "hidden_activation": "gelu_pytorch_tanh",
}
LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
# Name -> (a file that is partly supported, the start of the error).
PARTLY = {
    "biases of attention": (LLAMA | {"attention_bias": True}, "attention_bias = True: "),
    "biases of the MLP": (LLAMA | {"mlp_bias": True}, "mlp_bias = True: "),
    "another activation": (LLAMA | {"hidden_act": "relu2"}, "hidden_act = 'relu2': "),
    "dynamic rope": (
        LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_scaling.rope_type = 'dynamic': ",
    ),
    "long rope": (LLAMA | {"rope_scaling": LONG}, "rope_scaling.rope_type = 'longrope': "),
    "partial rope": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: "),
    "partial rope, new": (
        LLAMA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "rope_parameters.*partial_rotary_factor",
    ),
    "gptq": (
        LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "quantization_config = ",
    ),
    "awq": (QWEN3 | {"quantization_config": {"quant_method": "awq"}}, "quantization_config = "),
    "fp8": (QWEN3 | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = "),
    "text encoder": (QWEN3 | {"is_causal": False}, "is_causal = False: "),
    "biases of Qwen3": (QWEN3 | {"attention_bias": True}, "attention_bias = True: "),
    "linear attention": (
        QWEN3 | {"layer_types": ["linear_attention", "full_attention"]},
        "layer_types = .*linear_attention",
    ),
    "chunked attention": (
        GEMMA3 | {"layer_types": ["chunked_attention", "full_attention"]},
        "layer_types = .*chunked_attention",
    ),
    "scores of Gemma 2": (
        GEMMA3 | {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping = 50.0: ",
    ),
    "logits of Gemma 2": (
        GEMMA3 | {"final_logit_softcapping": 30.0},
        "final_logit_softcapping = 30.0: ",
    ),
    "embeddings of Gemma": (
        GEMMA3 | {"use_bidirectional_attention": True},
        "use_bidirectional_attention = True: ",
    ),
    "another text model": (
        {"model_type": "gemma3", "text_config": {"model_type": "gemma2"}},
        "model_type = 'gemma2': ",
    ),
    "no text model": ({"model_type": "gemma3"}, "text_config = None: "),
    "window of Mistral": (
        QWEN3 | {"model_type": "mistral", "rms_norm_eps": 1e-5},
        "sliding_window: is missing",
    ),
    "odd rotation": (
        QWEN3 | {"model_type": "smollm3", "rms_norm_eps": 1e-6, "no_rope_layers": [1, 2]},
        r"no_rope_layers = \[1, 2\]: ",
    ),
}


@pytest.mark.parametrize("name", PARTLY)
def test_part_that_is_not_implemented_is_named(name: str) -> None:
    raw, message = PARTLY[name]
    with pytest.raises(ValueError, match=f"^{message}") as error:
        PolicyConfig.from_hf(raw)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", sorted(unsupported.MISSING))
def test_well_known_type_is_explained(model_type: str) -> None:
    assert model_type not in MODEL_TYPES
    message = f"model_type = '{model_type}' (not implemented: {unsupported.MISSING[model_type]}): "
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        PolicyConfig.from_hf(LLAMA | {"model_type": model_type})


def test_text_model_of_a_known_type_is_explained_too() -> None:
    with pytest.raises(ValueError, match=r"^model_type = 'qwen3_5_text' \(not .* linear attention"):
        PolicyConfig.from_hf(LLAMA | {"model_type": "qwen3_5_text"})


@pytest.mark.slow
def test_every_other_language_model_of_transformers_is_refused() -> None:
    """The default config of each class; some classes need arguments."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto", reason=families.REASON)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    model_types = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*MODEL_TYPES}
    assert len(model_types) > 150
    for model_type in sorted(model_types):
        try:
            raw = CONFIG_MAPPING[model_type]().to_dict()
        except (TypeError, ValueError, ImportError, StrictDataclassError):
            raw = {}
        with pytest.raises(ValueError, match=f"^model_type = '{re.escape(model_type)}'") as error:
            PolicyConfig.from_hf(raw | {"model_type": model_type})
        assert "\n" not in str(error.value)


# ------------------------------------------------------------------- Fields of implemented families

# Fields that a class of transformers does not declare, but its model reads.
_UNDECLARED = {"is_causal": True, "head_dim": 8, "partial_rotary_factor": 1.0}
_OTHER_LISTS = {
    "layer_types": [
        ["full_attention", "full_attention"],
        ["sliding_attention", "sliding_attention"],
        ["full_attention", "sliding_attention"],
    ],
    "no_rope_layers": [[1, 1], [0, 0], [1, 0]],
    "mlp_only_layers": [[1]],
}
_THETA = {"rope_theta": 50_000.0}
_OTHER_ROPES = [
    {"rope_type": "default", "rope_theta": 900.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8} | _THETA,
    {"rope_type": "default", "partial_rotary_factor": 0.5} | _THETA,
]
_BY_TYPE = ("full_attention", "sliding_attention")
FIELD_FAMILIES = (
    "qwen2, windows",
    "qwen3, windows",
    "qwen3_moe, windows",
    "llama tied",
    "mistral",
    "ministral",
    "smollm3, windows",
    "olmo2",
    "olmo3, yarn",
    "gemma3",
)


def other_values(name: str, value: Any) -> list[Any]:
    """Return values of a field besides `value`; transformers may refuse some."""
    if name == "rope_parameters":
        if "full_attention" not in value:
            return _OTHER_ROPES
        return [value | {kind: rope} for kind in _BY_TYPE for rope in _OTHER_ROPES]
    if name in _OTHER_LISTS:
        return [numbers for numbers in _OTHER_LISTS[name] if numbers != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, max(value // 2, 1)]
    if isinstance(value, float):
        return [0.5, value * 8]
    return ["relu", "gelu"] if isinstance(value, str) else [4, 5.0, True]


def their_logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.arange(40)[None] * 7 % families.VOCAB).logits.numpy()


def changes_function(base: Any, model: Any) -> bool:
    """Return whether a model with the weights of `base` computes something else."""
    weights = base.state_dict()
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    if shapes != {name: value.shape for name, value in weights.items()}:
        return True
    model.load_state_dict(weights)
    return not np.array_equal(their_logits(base), their_logits(model))


@pytest.mark.slow
@pytest.mark.parametrize("family", FIELD_FAMILIES)
def test_field_of_transformers_is_read_or_refused_or_without_effect(family: str) -> None:
    base = families.make(family)
    policy = PolicyConfig.from_hf(base.config.to_dict())
    declared = {field.name for field in dataclasses.fields(base.config)}
    names = sorted(declared - {"architectures", "dtype", "id2label", "label2id"})
    count = 0
    for name in [*names, *(_UNDECLARED.keys() - declared)]:
        for value in other_values(name, getattr(base.config, name, _UNDECLARED.get(name))):
            try:
                model = families.make(family, **{name: value})
                differs = changes_function(base, model)
            except Exception:  # transformers refuses the value, or fails with it
                continue
            raw = model.config.to_dict() | {name: value}
            count += 1
            try:
                read = PolicyConfig.from_hf(raw)
            except ValueError:
                continue
            assert not differs or read != policy, f"{name} = {value!r} is ignored"
    assert count > 30
