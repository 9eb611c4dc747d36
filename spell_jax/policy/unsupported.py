"""Well-known model types that are not implemented, with the part that their models need."""

from __future__ import annotations

from typing import Any

_SOFTCAPPING = "softcapping of scores and logits"
_LATENT = "latent attention and experts with shared ones"
_LINEAR = "layers of linear attention"
_SHARED_EXPERTS = "shared experts"
_IMAGES = "images and rotary positions in three axes"
_STATE_SPACE = "state space layers"
_PARALLEL = "parallel attention and feed-forward parts, and LayerNorm"
_MULTIPLIERS = "multipliers of embeddings, residuals, scores and logits"
# Model type of config.json -> missing part.
MISSING = {
    "apertus": "the activation xIELU",
    "bailing_moe": _SHARED_EXPERTS,
    "bamba": _STATE_SPACE,
    "chatglm": "fused and interleaved rotary projections",
    "cohere": _PARALLEL,
    "cohere2": _PARALLEL,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "ernie4_5": "interleaved rotary pairs",
    "ernie4_5_moe": "interleaved rotary pairs and shared experts",
    "exaone4": "norms of each head beside norms after each part",
    "falcon": _PARALLEL,
    "falcon_h1": _STATE_SPACE,
    "gemma": "its norms: centered, and before each part only",
    "gemma2": _SOFTCAPPING,
    "gemma3n": "embeddings per layer and alternating updates",
    "gemma4": "heads of two sizes, embeddings per layer",
    "glm": "partial and interleaved rotary positions",
    "glm4": "partial and interleaved rotary positions",
    "glm4_moe": "partial rotary positions and shared experts",
    "gpt2": "learned positions and LayerNorm",
    "gpt_neox": _PARALLEL,
    "gpt_oss": "attention sinks",
    "granite": _MULTIPLIERS,
    "granitemoe": _MULTIPLIERS,
    "hunyuan_v1_dense": "norms of heads after the rotation",
    "internlm2": "a fused projection of queries, keys and values",
    "jamba": _STATE_SPACE,
    "lfm2": "convolution layers",
    "llama4": "chunked attention and shared experts",
    "mamba": _STATE_SPACE,
    "mamba2": _STATE_SPACE,
    "minicpm": "multipliers of embeddings, residuals and logits",
    "minicpm3": "latent attention",
    "ministral3": "scores that grow with the position",
    "mistral3": "a model of images around its text model",
    "mixtral": "the names of its experts' tensors",
    "nemotron": "LayerNorm and the squared ReLU",
    "olmo": "LayerNorm without parameters",
    "olmoe": "norms of all heads together in a mixture of experts",
    "phi": "partial rotary positions and LayerNorm",
    "phi3": "fused projections, partial and long rotary positions",
    "phimoe": "LayerNorm and its own router",
    "qwen2_moe": _SHARED_EXPERTS,
    "qwen2_vl": _IMAGES,
    "qwen2_5_vl": _IMAGES,
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": _LINEAR,
    "qwen3_next": _LINEAR,
    "qwen3_vl": _IMAGES,
    "seed_oss": "biases of attention",
    "stablelm": "partial rotary positions and LayerNorm",
    "starcoder2": "LayerNorm and biases",
}


def explain(model_type: Any) -> str:
    """Return a parenthesis with what a model type lacks here; "" for values that are not known."""
    # Multimodal files name their text model with a suffix.
    missing = MISSING.get(str(model_type).removesuffix("_text"))
    return f" (not implemented: {missing})" if missing else ""
