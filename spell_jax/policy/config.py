"""Shape of a policy: one frozen dataclass, read from and written to a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

REMAT_POLICIES = ("none", "block")
# Fields of a config.json without which there is no shape.
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Architecture of a decoder-only transformer.

    Attributes (letter code of the shapes in brackets):
      vocab_size: tokens in the embedding [V].
      width: model width [D].
      layers: number of blocks [L].
      heads: query heads [N].
      kv_heads: key/value heads [K]; N must be a multiple of K.
      head_size: size of one head [H].
      feed_forward: hidden width of the SwiGLU [F].
      rope_theta: base of the rotary angles.
      max_positions: longest context that the weights were made for, in tokens.
      norm_epsilon: added to the mean square inside RMSNorm.
      qkv_bias: whether q, k and v projections have a bias (Qwen2).
      qk_norm: whether each q and k head goes through an RMSNorm (Qwen3).
      tied_embeddings: whether the output projection is the embedding.
      remat: what the backward pass recomputes: "none" or "block" (everything inside a block).
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    rope_theta: float = 10_000.0
    max_positions: int = 32_768
    norm_epsilon: float = 1e-6
    qkv_bias: bool = True
    qk_norm: bool = False
    tied_embeddings: bool = True
    remat: str = "none"

    def __post_init__(self):
        for field in (
            "vocab_size",
            "width",
            "layers",
            "heads",
            "kv_heads",
            "head_size",
            "feed_forward",
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"policy.{field} = {getattr(self, field)}: must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"policy.kv_heads = {self.kv_heads}: must divide policy.heads = {self.heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"policy.head_size = {self.head_size}: must be even (rotary pairs)")
        if self.remat not in REMAT_POLICIES:
            raise ValueError(f"policy.remat = {self.remat!r}: must be one of {REMAT_POLICIES}")

    @classmethod
    def from_hf(cls, source: str | pathlib.Path | dict[str, Any]) -> PolicyConfig:
        """Reads a Hugging Face config (a path to config.json, or its content).

        Raises:
          ValueError: naming the field, when it is missing or asks for something that is not
            implemented.
        """
        raw = source if isinstance(source, dict) else _read_json(pathlib.Path(source))
        if raw.get("model_type") != "qwen2":
            raise ValueError(f"model_type = {raw.get('model_type')!r}: must be 'qwen2'")
        if raw.get("use_sliding_window"):
            raise ValueError("use_sliding_window = true: only full attention is implemented")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ValueError(f"rope_scaling = {rope}: only the default rope is implemented")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act = {raw['hidden_act']!r}: must be 'silu'")
        for field in _REQUIRED:
            if not isinstance(raw.get(field), int):
                raise ValueError(f"{field} = {raw.get(field)!r}: must be a whole number")
        heads = raw["num_attention_heads"]
        return cls(
            vocab_size=raw["vocab_size"],
            width=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads", heads),
            head_size=raw.get("head_dim") or raw["hidden_size"] // heads,
            feed_forward=raw["intermediate_size"],
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0))),
            max_positions=raw.get("max_position_embeddings", 32_768),
            norm_epsilon=raw.get("rms_norm_eps", 1e-6),
            tied_embeddings=raw.get("tie_word_embeddings", False),
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json that transformers reads for this policy.

        Raises:
          ValueError: when the shape is not one that the Qwen2 architecture can express.
        """
        if not self.qkv_bias or self.qk_norm:
            raise ValueError(
                f"policy.qkv_bias = {self.qkv_bias}, policy.qk_norm = {self.qk_norm}: "
                "the qwen2 format needs qkv_bias = True and qk_norm = False"
            )
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.feed_forward,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_epsilon,
            "tie_word_embeddings": self.tied_embeddings,
            "hidden_act": "silu",
            "use_sliding_window": False,
            "torch_dtype": "float32",
        }


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: holds a {type(raw).__name__}, must be an object")
    return raw
