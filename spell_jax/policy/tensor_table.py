"""Names and layouts of Hugging Face tensors: one table per model family, for both directions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

from spell_jax.policy.config import PolicyConfig


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Mapping of one parameter to its Hugging Face tensors.

    Letters are axes: L layers, E experts, D width, F feed-forward, N query heads, K key/value
    heads, H head size, V vocabulary.
    """

    name: str  # tensor name; one tensor for each value of "{layer}" and "{expert}"
    theirs: str  # axes of one tensor; axes in one word are flattened ("NH D" is a matrix)
    ours: str = ""  # our axes of one tensor, in our order; by default the axes of `theirs`

    @property
    def letters(self) -> str:
        """Unflattened axes of one tensor, in their order."""
        return self.theirs.replace(" ", "")

    @property
    def layered(self) -> bool:
        return "{layer}" in self.name

    @property
    def expertwise(self) -> bool:
        return "{expert}" in self.name

    def their_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(math.prod(sizes[axis] for axis in word) for word in self.theirs.split())

    def our_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of our parameter, with leading axes L for layers and E for experts."""
        axes = "L" * self.layered + "E" * self.expertwise + (self.ours or self.letters)
        return tuple(sizes[axis] for axis in axes)

    def in_their_order(self, ours: np.ndarray) -> np.ndarray:
        """Transpose our axes of one tensor to their order, unflattened; a view."""
        return ours.transpose([(self.ours or self.letters).index(axis) for axis in self.letters])


UNEMBEDDING = "lm_head.weight"
_LAYER = "model.layers.{layer}."
_EXPERT = _LAYER + "mlp.experts.{expert}."
_OUTER = {
    "embedding": TensorEntry("model.embed_tokens.weight", "V D"),
    "unembedding": TensorEntry(UNEMBEDDING, "V D"),
    "final_norm/scale": TensorEntry("model.norm.weight", "D"),
}
# Our norms of a layer by PolicyConfig.norms. Llama's post_attention_layernorm is before the
# feed-forward part, OLMo's and Gemma's is after attention.
_NORM_NAMES = {
    "before": {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    },
    "after": {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    "both": {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}
_NORMS = {
    norms: {
        f"layers/{ours}/scale": TensorEntry(f"{_LAYER}{theirs}.weight", "D")
        for ours, theirs in names.items()
    }
    for norms, names in _NORM_NAMES.items()
}
_ATTENTION = {
    "layers/attention/q_kernel": TensorEntry(_LAYER + "self_attn.q_proj.weight", "NH D", "DNH"),
    "layers/attention/k_kernel": TensorEntry(_LAYER + "self_attn.k_proj.weight", "KH D", "DKH"),
    "layers/attention/v_kernel": TensorEntry(_LAYER + "self_attn.v_proj.weight", "KH D", "DKH"),
    "layers/attention/o_kernel": TensorEntry(_LAYER + "self_attn.o_proj.weight", "D NH", "NHD"),
}
_QKV_BIAS = {
    "layers/attention/q_bias": TensorEntry(_LAYER + "self_attn.q_proj.bias", "NH"),
    "layers/attention/k_bias": TensorEntry(_LAYER + "self_attn.k_proj.bias", "KH"),
    "layers/attention/v_bias": TensorEntry(_LAYER + "self_attn.v_proj.bias", "KH"),
}
_QK_NORM = {
    "layers/attention/q_norm/scale": TensorEntry(_LAYER + "self_attn.q_norm.weight", "H"),
    "layers/attention/k_norm/scale": TensorEntry(_LAYER + "self_attn.k_norm.weight", "H"),
}
_JOINT_QK_NORM = {
    "layers/attention/q_norm/scale": TensorEntry(_LAYER + "self_attn.q_norm.weight", "NH"),
    "layers/attention/k_norm/scale": TensorEntry(_LAYER + "self_attn.k_norm.weight", "KH"),
}
_DENSE = {
    "layers/mlp/gate_kernel": TensorEntry(_LAYER + "mlp.gate_proj.weight", "F D", "DF"),
    "layers/mlp/up_kernel": TensorEntry(_LAYER + "mlp.up_proj.weight", "F D", "DF"),
    "layers/mlp/down_kernel": TensorEntry(_LAYER + "mlp.down_proj.weight", "D F", "FD"),
}
_EXPERTS = {
    "layers/moe/router_kernel": TensorEntry(_LAYER + "mlp.gate.weight", "E D", "DE"),
    "layers/moe/gate_kernel": TensorEntry(_EXPERT + "gate_proj.weight", "F D", "DF"),
    "layers/moe/up_kernel": TensorEntry(_EXPERT + "up_proj.weight", "F D", "DF"),
    "layers/moe/down_kernel": TensorEntry(_EXPERT + "down_proj.weight", "D F", "FD"),
}
_LLAMA = _OUTER | _NORMS["before"] | _ATTENTION | _DENSE
_OLMO = _OUTER | _NORMS["after"] | _ATTENTION | _JOINT_QK_NORM | _DENSE
# Model type -> our parameter path -> Hugging Face tensors.
TABLES = {
    "qwen2": _OUTER | _NORMS["before"] | _ATTENTION | _QKV_BIAS | _DENSE,
    "qwen3": _OUTER | _NORMS["before"] | _ATTENTION | _QK_NORM | _DENSE,
    "qwen3_moe": _OUTER | _NORMS["before"] | _ATTENTION | _QK_NORM | _EXPERTS,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "smollm3": _LLAMA,
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "gemma3_text": _OUTER | _NORMS["both"] | _ATTENTION | _QK_NORM | _DENSE,
}


def table(config: PolicyConfig) -> dict[str, TensorEntry]:
    """Return all parameters' entries by path; ValueError if no Hugging Face architecture fits."""
    entries = dict(TABLES[config.model_type])
    if config.tied_embeddings:
        del entries["unembedding"]
    return entries


def sizes_of(config: PolicyConfig) -> dict[str, int]:
    """Return the size of each axis by its letter."""
    return {
        "L": config.layers,
        "E": config.experts,
        "D": config.width,
        "F": config.feed_forward,
        "N": config.heads,
        "K": config.kv_heads,
        "H": config.head_size,
        "V": config.vocab_size,
    }


def tensors_in_order(config: PolicyConfig) -> Iterator[tuple[str, int | None, list[str]]]:
    """Yield (path, layer, tensor names) in file order, with one name, or one per expert."""
    entries = table(config)
    for path, entry in entries.items():
        if not entry.layered:
            yield path, None, [entry.name]
    for layer in range(config.layers):
        for path, entry in entries.items():
            if entry.layered:
                experts = range(config.experts if entry.expertwise else 1)
                yield path, layer, [entry.name.format(layer=layer, expert=e) for e in experts]
