"""Small GGUF files, written by the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

Quantization = gguf.GGMLQuantizationType
COUNTS = ("block_count", "context_length", "embedding_length", "feed_forward_length")
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
# Gemma 3 has a norm before and after each part.
_GEMMA3_BLOCK = _BLOCK | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write(path: Path, architecture: str, fields: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Write fields and tensors; a tensor is an array or (array, quantization)."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, value in tensors.items():
        array, kind = value if isinstance(value, tuple) else (value, Quantization.F32)
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def architecture(config: Any) -> str:
    """Return llama.cpp's name of an architecture, given a config of transformers."""
    return {"gemma3_text": "gemma3", "mistral": "llama"}.get(config.model_type, config.model_type)


def model_fields(config: Any) -> dict[str, Any]:
    """Return the fields of the architecture, given a config of transformers."""
    name = architecture(config)
    rope = config.rope_parameters
    fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
    }
    if name == "gemma3":
        fields["attention.sliding_window"] = config.sliding_window
    return {f"{name}.{key}": value for key, value in fields.items()}


def model_tensors(model: Any, kind: Quantization = Quantization.F32) -> dict[str, Any]:
    """Return a transformers model's tensors as llama.cpp stores them, with matrices quantized."""
    config, tensors = model.config, {}
    name_of_architecture = architecture(config)
    blocks = _GEMMA3_BLOCK if name_of_architecture == "gemma3" else _BLOCK
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, _, suffix = name.rpartition(".")
        array, last = value.numpy(), module.rpartition(".")[2]
        if name_of_architecture == "gemma3" and last.endswith("norm"):
            array = array + 1
        if name_of_architecture == "llama" and last in heads:  # halves of a head to pairs
            halves = array.reshape(heads[last], 2, -1, array.shape[-1])
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        if module.startswith("model.layers."):
            _, _, layer, layer_module = module.split(".", 3)
            module = f"blk.{layer}.{blocks[layer_module]}"
        else:
            module = _TOP[module]
        tensors[f"{module}.{suffix}"] = (array, kind) if array.ndim > 1 else array
    return tensors


def byte_level_fields(description: dict[str, Any], pre: str) -> dict[str, Any]:
    """Return the tokenizer fields for the content of a tokenizer.json with byte-level BPE."""
    vocabulary = dict(description["model"]["vocab"])
    special = {token["content"]: token["special"] for token in description["added_tokens"]}
    vocabulary |= {token["content"]: token["id"] for token in description["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            1 if text not in special else 3 if special[text] else 4 for text in tokens
        ],
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in description["model"]["merges"]
        ],
    }
