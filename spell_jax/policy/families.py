"""Model families: what each model type of Hugging Face fixes, and what its files may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Fields of PolicyConfig that no config.json has, with the values of the plainest family.
_PLAIN: dict[str, Any] = {
    "qkv_bias": False,
    "qk_norm": False,
    "joint_qk_norm": False,
    "norms": "before",
    "centered_norms": False,
    "activation": "silu",
    "scaled_embedding": False,
}
# Fields of PolicyConfig that only some families have in their config.json.
_SPECIAL = (
    "experts",
    "window",
    "window_layers",
    "window_rope",
    "unrotated_layers",
    "score_scale",
)


@dataclasses.dataclass(frozen=True)
class Family:
    """A model type of transformers.

    Attributes:
      architecture: name of the class in transformers.
      features: fields of PolicyConfig in which all models differ from the plainest family.
      defaults: fields that a config.json may lack, because every published file without one means
        this value.
      derived: fields that a config.json may lack, because they follow from width and heads.
      windows: rule for the layers with a window where `layer_types` is missing: "all", "three of
        four", or the field that has them; "" if no layer has one.
      switch: field that says whether layers have windows: "use_sliding_window", or "sliding_window"
        (null is no); "" if they always have.
      has_layer_types: whether `layer_types` may depart from the rule.
      has_window_rope: whether the rope of window layers may differ from the others.
      has_score_scale: whether the scores of attention have a scale of their own.
      has_unrotated_layers: whether layers may lack position embeddings.
      has_experts: whether the feed-forward parts are mixtures of experts.
    """

    architecture: str
    features: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    derived: tuple[str, ...] = ("head_dim",)
    windows: str = ""
    switch: str = ""
    has_layer_types: bool = False
    has_window_rope: bool = False
    has_score_scale: bool = False
    has_unrotated_layers: bool = False
    has_experts: bool = False

    def fits(self, config: Any) -> bool:
        """Return whether a model of the family can compute the function of a PolicyConfig."""
        features = {**_PLAIN, **self.features}
        is_uniform = len(config.window_layers) == config.layers
        return (
            all(getattr(config, name) == value for name, value in features.items())
            and self.has_experts == (config.experts > 0)
            and (self.has_layer_types or not config.window or (bool(self.windows) and is_uniform))
            and (self.has_window_rope or config.window_rope in (None, config.rope))
            and (self.has_unrotated_layers or not config.unrotated_layers)
            and (self.has_score_scale or config.score_scale is None)
        )


_NO_TIES = {"tie_word_embeddings": False}
_QWEN = _NO_TIES | {"rms_norm_eps": 1e-6}
_QWEN_WINDOWS: dict[str, Any] = {
    "windows": "max_window_layers",
    "switch": "use_sliding_window",
    "has_layer_types": True,
}
_OLMO = {"qk_norm": True, "joint_qk_norm": True, "norms": "after"}
_GEMMA3 = {
    "qk_norm": True,
    "norms": "both",
    "centered_norms": True,
    "activation": "gelu",
    "scaled_embedding": True,
}
# By model type. A policy is written as the first family that fits it.
FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}, _QWEN, **_QWEN_WINDOWS),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, _QWEN, derived=(), **_QWEN_WINDOWS),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True},
        _QWEN | {"norm_topk_prob": False},
        windows="all",
        switch="use_sliding_window",
        has_experts=True,
    ),
    "llama": Family("LlamaForCausalLM", {}, _QWEN, derived=("head_dim", "num_key_value_heads")),
    "mistral": Family("MistralForCausalLM", {}, _NO_TIES, windows="all", switch="sliding_window"),
    "ministral": Family(
        "MinistralForCausalLM",
        {},
        _NO_TIES,
        windows="all",
        switch="sliding_window",
        has_layer_types=True,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {},
        {"tie_word_embeddings": True, "no_rope_layer_interval": 4},
        windows="no_rope_layers",
        switch="use_sliding_window",
        has_layer_types=True,
        has_unrotated_layers=True,
    ),
    "olmo2": Family("Olmo2ForCausalLM", _OLMO, _NO_TIES),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _OLMO,
        _NO_TIES,
        windows="three of four",
        has_layer_types=True,
        has_window_rope=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA3,
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "sliding_window_pattern": 6},
        (),
        windows="sliding_window_pattern",
        has_layer_types=True,
        has_window_rope=True,
        has_score_scale=True,
    ),
}
# A text model with a model of images, which is left out.
MULTIMODAL = "gemma3"
MODEL_TYPES = (*FAMILIES, MULTIMODAL)


def find(config: Any) -> str:
    """Return the model type that can compute the function of a PolicyConfig.

    Raises ValueError if there is none.
    """
    for model_type, family in FAMILIES.items():
        if family.fits(config):
            return model_type
    plain = _PLAIN | dict.fromkeys(_SPECIAL)
    parts = {name: getattr(config, name) for name in plain}
    special = {name: part for name, part in parts.items() if part and part != plain[name]}
    raise ValueError(
        ", ".join(f"policy.{name} = {part!r}" for name, part in special.items())
        + ": no Hugging Face architecture has these parts"
    )
