"""Architecture of a policy, converted from and to a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

from spell_jax.attention.attend import NAMES as ATTENTION
from spell_jax.policy import rope as ropes
from spell_jax.policy.rope import RopeConfig
from spell_jax.runtime.config import check_choice, check_least

REMAT_POLICIES = ("none", "block", "attention", "dots", "offload")
MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe", "llama")
_POSITIVE = (
    "vocab_size",
    "width",
    "layers",
    "heads",
    "kv_heads",
    "head_size",
    "feed_forward",
    "max_positions",
)
# Our linear layers by module, with the Hugging Face names that `pattern` is matched against.
_LAYERS = {
    "attention": {name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    "mlp": {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_NAMES = {name: hf for room in _LAYERS.values() for name, hf in room.items()}


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """LoRA hyper-parameters.

    Attributes:
      rank: columns of A and rows of B, R; at least 1.
      alpha: numerator of the scale alpha / rank of A B; above 0.
      pattern: regular expression searched for in names such as self_attn.q_proj and mlp.gate_proj;
        matching layers get adapters. Experts have none.
    """

    rank: int = 16
    alpha: float = 32.0
    pattern: str = "_proj"

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"lora.rank = {self.rank}: must be at least 1")
        if not self.alpha > 0:
            raise ValueError(f"lora.alpha = {self.alpha}: must be above 0")
        try:
            re.compile(self.pattern)
        except re.error as error:
            message = f"lora.pattern = {self.pattern!r}: not a regular expression ({error})"
            raise ValueError(message) from error

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """Whether the linear layer "q", "k", "v", "o", "gate", "up" or "down" has adapters."""
        return re.search(self.pattern, _NAMES[name]) is not None

    def targets(self, has_experts: bool) -> dict[str, str]:
        """Path of each adapted kernel, such as attention/q -> its Hugging Face name.

        Raises:
          ValueError: if the pattern matches no name.
        """
        rooms = {"attention": _LAYERS["attention"]} if has_experts else _LAYERS
        names = [(room, name) for room, layers in rooms.items() for name in layers]
        found = {f"{room}/{name}": _NAMES[name] for room, name in names if self.adapts(name)}
        if not found:
            known = sorted(_NAMES[name] for _, name in names)
            raise ValueError(f"lora.pattern = {self.pattern!r}: is in none of {known}")
        return found


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Architecture of a decoder-only transformer.

    Letters in brackets are those of the shape code.

    Attributes:
      vocab_size: rows of the embedding table [V].
      width: model width [D].
      layers: number of blocks [L].
      heads: query heads [N].
      kv_heads: key/value heads [K]; must divide N.
      head_size: size of one head [H].
      feed_forward: hidden width of the SwiGLU, or of each expert in a mixture of experts [F].
      rope: rotary position embedding.
      max_positions: longest context the weights were trained for, in tokens.
      norm_epsilon: constant added to the mean square inside RMSNorm.
      qkv_bias: whether the q, k and v projections have a bias (Qwen2).
      qk_norm: whether each q and k head is normalized by RMSNorm (Qwen3).
      tied_embeddings: whether the output projection shares the embedding table.
      experts: experts per layer [E]; 0 means one dense SwiGLU.
      experts_per_token: experts that process each token; 0 without experts.
      normalized_router: whether the router weights of a token's experts are scaled to sum to 1.
      lora: LoRA adapters, the only trained parameters; None trains every parameter.
      attention: attention kernel for training rows and prompts, see attention/attend.py.
      ring: whether keys and values travel around a ring (True) or are all-gathered (False) when the
        tokens of a row are sharded over devices, see attention/context.py.
      remat: values that the backward pass recomputes: "none"; "block" (everything inside a block);
        "attention" (everything but the attention output); "dots" (everything but the products with
        weights); "offload" (like "block", with block inputs offloaded to host memory).
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    max_positions: int = 32_768
    norm_epsilon: float = 1e-6
    qkv_bias: bool = True
    qk_norm: bool = False
    tied_embeddings: bool = True
    experts: int = 0
    experts_per_token: int = 0
    normalized_router: bool = True
    lora: LoraConfig | None = None
    remat: str = "none"
    attention: str = "auto"
    ring: bool = False

    def __post_init__(self):
        check_least(self, "policy.", **dict.fromkeys(_POSITIVE, 1))
        if self.heads % self.kv_heads:
            raise ValueError(
                f"policy.kv_heads = {self.kv_heads}: must divide policy.heads = {self.heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"policy.head_size = {self.head_size}: must be even (rotary pairs)")
        if not self.norm_epsilon > 0:
            raise ValueError(f"policy.norm_epsilon = {self.norm_epsilon}: must be above 0")
        if self.experts < 0:
            raise ValueError(f"policy.experts = {self.experts}: must be 0 or more")
        if not min(1, self.experts) <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"policy.experts_per_token = {self.experts_per_token}: must be from 1 to "
                f"policy.experts = {self.experts} (0 without experts)"
            )
        check_choice(self, "policy.", remat=REMAT_POLICIES, attention=ATTENTION)
        if self.lora is not None:
            self.lora.targets(has_experts=self.experts > 0)

    def check_length(self, tokens: int) -> None:
        """Check that a prompt and its answer fit the context.

        Args:
          tokens: length of the longest prompt and answer together.

        Raises:
          ValueError: if `tokens` exceeds max_positions.
        """
        if tokens > self.max_positions:
            raise ValueError(
                f"sampler: the longest prompt and answer have {tokens} tokens together, must be at "
                f"most the policy's max_position_embeddings = {self.max_positions} "
                "(policy.rope_scaling makes that longer)"
            )

    def stretched(self, kind: str, factor: float) -> PolicyConfig:
        """Extend the context by RoPE scaling.

        Args:
          kind: one of rope.KINDS.
          factor: ratio of the new context length to the old one, at least 1.

        Returns:
          This config with the new rope and with max_positions times `factor`.

        Raises:
          ValueError: if `kind` is unknown, `factor` is below 1, or the rope is scaled already.
        """
        if self.rope.kind != "default":
            raise ValueError(
                f"policy.rope_scaling = {kind!r}: the folder's rope is {self.rope.kind!r} already"
            )
        rope = dataclasses.replace(
            self.rope, kind=kind, factor=factor, original_positions=self.max_positions
        )
        return dataclasses.replace(self, rope=rope, max_positions=int(self.max_positions * factor))

    @property
    def model_type(self) -> str:
        """Hugging Face model type with the same parts.

        Raises:
          ValueError: if there is none.
        """
        parts = (self.qkv_bias, self.qk_norm, self.experts > 0)
        if parts not in _MODEL_TYPES:
            raise ValueError(
                f"policy.qkv_bias = {self.qkv_bias}, policy.qk_norm = {self.qk_norm}, "
                f"policy.experts = {self.experts}: no Hugging Face architecture has these parts"
            )
        return _MODEL_TYPES[parts]

    @classmethod
    def from_hf(cls, source: str | pathlib.Path | dict[str, Any]) -> PolicyConfig:
        """Read a Hugging Face config (a path to config.json, or its parsed content).

        Raises:
          ValueError: if a field is missing, has the wrong type, or asks for something that is not
            implemented. The message names the field.
        """
        if isinstance(source, dict):
            return _from_hf(source)
        path = pathlib.Path(source)
        try:
            return _from_hf(_read_json(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """Convert to the config.json that transformers reads.

        Raises:
          ValueError: if no Hugging Face architecture has these parts.
        """
        architecture = _ARCHITECTURES[self.model_type]
        fields = {
            "architectures": [architecture],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.feed_forward,
            **ropes.to_hf(self.rope),
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_epsilon,
            "tie_word_embeddings": self.tied_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
        }
        if self.experts:
            fields |= {
                "moe_intermediate_size": self.feed_forward,
                "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "norm_topk_prob": self.normalized_router,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        return fields


# (qkv_bias, qk_norm, has experts) -> model type.
_MODEL_TYPES = {
    (True, False, False): "qwen2",
    (False, True, False): "qwen3",
    (False, True, True): "qwen3_moe",
    (False, False, False): "llama",
}
_ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
}
# Values that every supported model has in these fields, where present. Other values would change
# the function that the model computes.
_FIXED: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (False, None),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "quantization_config": (None,),
    "use_mrope": (False, None),
    "is_encoder_decoder": (False, None),
}


def _from_hf(raw: dict[str, Any]) -> PolicyConfig:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise ValueError(f"model_type = {model_type!r}: must be one of {MODEL_TYPES}")
    for field, allowed in _FIXED.items():
        if field in raw and raw[field] not in allowed:
            raise ValueError(f"{field} = {raw[field]!r}: must be {allowed[0]!r}, no other is built")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"layer_types = {kinds!r}: must all be 'full_attention'")
    heads, width = _whole(raw, "num_attention_heads"), _whole(raw, "hidden_size")
    max_positions = _whole(raw, "max_position_embeddings")
    # The default of a missing field in transformers depends on the class, so few may be missing.
    kv_heads = _whole(raw, "num_key_value_heads", heads if model_type == "llama" else None)
    head_size = _whole(raw, "head_dim", None if model_type == "qwen3" else width // heads)
    experts = {}
    if model_type == "qwen3_moe":
        # transformers 5 writes num_local_experts but reads num_experts.
        field = "num_experts" if "num_experts" in raw else "num_local_experts"
        experts = {
            "experts": _whole(raw, field),
            "experts_per_token": _whole(raw, "num_experts_per_tok"),
            "normalized_router": _flag(raw, "norm_topk_prob", False),
        }
    return PolicyConfig(
        vocab_size=_whole(raw, "vocab_size"),
        width=width,
        layers=_whole(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        feed_forward=_whole(raw, "moe_intermediate_size" if experts else "intermediate_size"),
        rope=ropes.from_hf(raw, max_positions),
        max_positions=max_positions,
        norm_epsilon=_number(raw, "rms_norm_eps", 1e-6),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type.startswith("qwen3"),
        tied_embeddings=_flag(raw, "tie_word_embeddings", False),
        **experts,
    )


def _whole(raw: dict[str, Any], field: str, default: int | None = None) -> int:
    value = raw.get(field)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueError(f"{field} = {value!r}: must be a whole number from 1 on")
    return value


def _number(raw: dict[str, Any], field: str, default: float) -> float:
    value = raw.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field} = {value!r}: must be a number")
    return float(value)


def _flag(raw: dict[str, Any], field: str, default: bool) -> bool:
    value = raw.get(field, default)
    if not isinstance(value, bool):
        raise ValueError(f"{field} = {value!r}: must be true or false")
    return value


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"holds a {type(raw).__name__}, must be an object")
    return raw
