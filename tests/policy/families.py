"""Tiny models of every family, made and saved by transformers."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

REASON = "the comparison needs torch and transformers (extra 'test')"
VOCAB = 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DEFAULT = {"rope_type": "default"}
THETA = {"rope_theta": 50_000.0}
WINDOW = {"sliding_window": 10}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
SWITCHED = WINDOW | {"use_sliding_window": True}
# Name -> (class in transformers without its suffix, fields besides the common ones).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 untied, yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 untied, linear": ("Qwen3", {"head_dim": 8, "rope_parameters": LINEAR}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe, plain router, yarn": (
        "Qwen3Moe",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "rope_parameters": YARN | {"beta_fast": 4.0, "attention_factor": 1.3},
        },
    ),
    "llama, llama3": ("Llama", {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "llama tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2, windows": ("Qwen2", SWITCHED | {"max_window_layers": 1}),
    "qwen3, windows": ("Qwen3", SWITCHED | MIXED | {"head_dim": 16, "rope_parameters": YARN}),
    "qwen3_moe, windows": (
        "Qwen3Moe",
        SWITCHED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "mistral": ("Mistral", WINDOW | {"head_dim": 16}),
    "mistral, no windows": ("Mistral", {"sliding_window": None}),
    "ministral": ("Ministral", WINDOW | MIXED | {"head_dim": 8}),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True, "no_rope_layer_interval": 2}),
    "smollm3, windows": ("SmolLM3", SWITCHED | MIXED | {"no_rope_layers": [0, 1]}),
    "olmo2": ("Olmo2", {}),
    "olmo3, yarn": (
        "Olmo3",
        WINDOW
        | MIXED
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT}},
    ),
    "gemma3": (
        "Gemma3Text",
        WINDOW
        | MIXED
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": DEFAULT | {"rope_theta": 500.0},
            },
        },
    ),
    "gemma3, no windows": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"full_attention": DEFAULT},
        },
    ),
}
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rope_parameters": DEFAULT,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def make(family: str, seed: int = 0, **changes: Any) -> Any:
    """Create a model of transformers in float32 with logits of the order of 1 to 10.

    `changes` are fields of the model's config.
    """
    torch = pytest.importorskip("torch", reason=REASON)
    transformers = pytest.importorskip("transformers", reason=REASON)
    name, fields = FAMILIES[family]
    settings = _COMMON | fields | changes
    rope = settings["rope_parameters"]
    by_type = "full_attention" in rope
    settings["rope_parameters"] = (
        {layer_type: THETA | rope[layer_type] for layer_type in rope} if by_type else THETA | rope
    )
    config = getattr(transformers, f"{name}Config")(**settings)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def with_images(text: Any) -> Any:
    """Create a Gemma 3 with a model of images around a model of `make`."""
    transformers = pytest.importorskip("transformers", reason=REASON)
    config = transformers.Gemma3Config(
        text_config=text.config.to_dict(),
        vision_config=_IMAGES,
        mm_tokens_per_image=4,
        image_token_index=3,
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    return model


def save(family: str, folder: pathlib.Path, seed: int = 0) -> Any:
    """Write the model as transformers does, and return it."""
    model = make(family, seed)
    model.save_pretrained(folder)
    return model
