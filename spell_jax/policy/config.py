"""Architecture of a policy, converted from and to a Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import re
from collections import Counter
from typing import Any

from spell_jax.attention.attend import NAMES as ATTENTION
from spell_jax.policy import families, hf_config
from spell_jax.policy.choices import BASE_DTYPES
from spell_jax.policy.products import ACTIVATIONS
from spell_jax.policy.rope import RopeConfig
from spell_jax.runtime.config import check_choice, check_least

NORMS = ("before", "after", "both")
# Layers without a window see this many tokens, more than max_positions may be: positions and
# windows add up to less than 2^31.
UNLIMITED = 2**30
REMAT_POLICIES = ("none", "block", "attention", "dots", "offload")
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
_NAMES = {name: hf for layers in _LAYERS.values() for name, hf in layers.items()}


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """LoRA hyper-parameters.

    Attributes:
      rank: columns of A and rows of B, R; at least 1.
      alpha: numerator of the scale alpha / rank of A B; above 0.
      pattern: regular expression searched for in names such as self_attn.q_proj and mlp.gate_proj;
        matching layers get adapters. Experts have none.
      base_dtype: dtype of the frozen weights, "compute" (the compute dtype) or "int8" (int8.py).
    """

    rank: int = 16
    alpha: float = 32.0
    pattern: str = "_proj"
    base_dtype: str = "compute"

    def __post_init__(self):
        check_choice(self, "policy.", base_dtype=BASE_DTYPES)
        if self.rank < 1:
            raise ValueError(f"policy.lora_rank = {self.rank}: must be at least 1")
        if not self.alpha > 0:
            raise ValueError(f"policy.lora_alpha = {self.alpha}: must be above 0")
        try:
            re.compile(self.pattern)
        except re.error as error:
            message = f"policy.lora_pattern = {self.pattern!r}: not a regular expression ({error})"
            raise ValueError(message) from error

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """Return whether linear layer "q", "k", "v", "o", "gate", "up" or "down" has adapters."""
        return re.search(self.pattern, _NAMES[name]) is not None


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Architecture of a decoder-only transformer. Letters in brackets are its sizes in shapes.

    Attributes:
      vocab_size: rows of the embedding table [V].
      width: width of hidden states [D].
      layers: number of layers [L].
      heads: query heads [N].
      kv_heads: key/value heads [K]; must divide N.
      head_size: width of a head [H], even.
      feed_forward: hidden width of the gated feed-forward part, or of each expert in a mixture of
        experts [F].
      rope: rotary position embeddings (rope.py).
      max_positions: longest context the weights were trained for, in tokens.
      norm_epsilon: constant added to the mean square inside RMSNorm.
      qkv_bias: whether the q, k and v projections have a bias (Qwen2).
      qk_norm: whether each q and k head is normalized by RMSNorm (Qwen3).
      joint_qk_norm: whether, with `qk_norm`, all q heads of a token are normalized together, and
        all k heads (OLMo 2).
      norms: where a layer's attention and feed-forward part have an RMSNorm, one of NORMS: "before"
        their input, "after" their output (OLMo 2), or "both" (Gemma 3).
      centered_norms: whether the parameter of an RMSNorm is its scale less 1 (Gemma 3).
      activation: function of the gate of a feed-forward part, one of products.ACTIVATIONS.
      scaled_embedding: whether the embedding is multiplied by the root of D (Gemma 3).
      score_scale: factor of the scores of attention; None is H^-.5.
      window: tokens that a query of a window layer sees, itself included; 0 without window layers.
      window_layers: numbers of the layers whose queries see only a window, in ascending order.
      window_rope: rotary position embeddings of window layers; None is `rope`.
      unrotated_layers: numbers of the layers without position embeddings, in ascending order
        (SmolLM3).
      tied_embeddings: whether the output projection shares the embedding table.
      experts: experts per layer [E]; 0 means one dense feed-forward part.
      experts_per_token: experts that process each token; 0 without experts.
      normalized_router: whether the router weights of a token's experts are scaled to sum to 1.
      lora: LoRA adapters, the only trained parameters; None trains every parameter.
      attention: attention kernel for training rows and prompts, see attention/attend.py.
      ring: whether keys and values travel around a ring (True) or are all-gathered (False) when the
        tokens of a row are sharded over devices, see attention/context.py; False if layers have
        windows.
      remat: values that the backward pass recomputes, see ModelConfig (model.py).
      unused_ids: half-open ranges, in order, of ids below V without a token: gaps of the tokenizer
        and the padding of the tables. Their probability is 0, in sampling and in training.
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
    joint_qk_norm: bool = False
    norms: str = "before"
    centered_norms: bool = False
    activation: str = "silu"
    scaled_embedding: bool = False
    score_scale: float | None = None
    window: int = 0
    window_layers: tuple[int, ...] = ()
    window_rope: RopeConfig | None = None
    unrotated_layers: tuple[int, ...] = ()
    tied_embeddings: bool = True
    experts: int = 0
    experts_per_token: int = 0
    normalized_router: bool = True
    lora: LoraConfig | None = None
    remat: str = "none"
    attention: str = "auto"
    ring: bool = False
    unused_ids: tuple[tuple[int, int], ...] = ()

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
        check_choice(self, "policy.", norms=NORMS, activation=tuple(ACTIVATIONS))
        self._check_layers()
        # Sorted bounds are also disjoint ranges, as embedding.has_token needs.
        bounds = [0, *itertools.chain(*self.unused_ids), self.vocab_size]
        unused = sum(stop - start for start, stop in self.unused_ids)
        if bounds != sorted(bounds) or unused == self.vocab_size:
            raise ValueError(
                f"policy.unused_ids = {self.unused_ids}: must be ranges in order that leave some "
                f"of the ids below policy.vocab_size = {self.vocab_size}"
            )
        if self.lora is not None and not self.lora_targets:
            raise ValueError(
                f"policy.lora_pattern = {self.lora.pattern!r}: is in none of "
                f"{sorted(self._lora_layers().values())}"
            )

    def _check_layers(self) -> None:
        """Raise ValueError if the fields that differ between layers contradict each other."""
        if self.joint_qk_norm and not self.qk_norm:
            raise ValueError("policy.joint_qk_norm = True: needs policy.qk_norm = True")
        if self.score_scale is not None and not self.score_scale > 0:
            raise ValueError(f"policy.score_scale = {self.score_scale}: must be above 0")
        for name in ("window_layers", "unrotated_layers"):
            numbers = getattr(self, name)
            if list(numbers) != sorted({n for n in numbers if n in range(self.layers)}):
                raise ValueError(
                    f"policy.{name} = {numbers}: must be ascending numbers below policy.layers = "
                    f"{self.layers}"
                )
        if not 0 <= self.window < UNLIMITED or bool(self.window) != bool(self.window_layers):
            raise ValueError(
                f"policy.window = {self.window}: must be 1 to {UNLIMITED - 1} if "
                "policy.window_layers names layers, else 0"
            )
        if self.ring and self.window:
            raise ValueError(
                "policy.ring = True: must be False in a policy with windows, where a device "
                "receives only the keys that its queries see"
            )
        if self.window_rope is not None and not self.window:
            raise ValueError("policy.window_rope: must be None without policy.window_layers")

    @functools.cached_property
    def layer_windows(self) -> tuple[int, ...]:
        """Tokens that a query of each layer sees, itself included; UNLIMITED without a window."""
        return tuple(
            self.window if layer in self.window_layers else UNLIMITED
            for layer in range(self.layers)
        )

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        """Rotary position embeddings of each layer, None for a layer without them."""
        ropes: list[RopeConfig | None] = [self.rope] * self.layers
        for layer in self.window_layers:
            ropes[layer] = self.window_rope or self.rope
        for layer in self.unrotated_layers:
            ropes[layer] = None
        return tuple(ropes)

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The different values of `layer_ropes`, in order of their first layer."""
        return tuple(dict.fromkeys(self.layer_ropes))

    @functools.cached_property
    def _layers_of_windows(self) -> Counter[int]:
        return Counter(self.layer_windows)

    def mean_pairs(self, before: int, tokens: int) -> float:
        """Return the mean over the layers of the pairs of a query and a key that it sees.

        The queries are `tokens` tokens of a text after its first `before` tokens; they see
        themselves too.
        """
        total = 0
        for window, layers in self._layers_of_windows.items():
            short = min(max(window - before, 0), tokens)  # queries whose window has the whole text
            pairs = short * before + short * (short + 1) // 2 + (tokens - short) * window
            total += layers * pairs
        return total / self.layers

    def with_layers(self, layers: int) -> PolicyConfig:
        """Return the architecture of the first `layers` layers."""
        window_layers = tuple(layer for layer in self.window_layers if layer < layers)
        changes = {} if window_layers else {"window": 0, "window_rope": None}
        return dataclasses.replace(
            self,
            layers=layers,
            window_layers=window_layers,
            unrotated_layers=tuple(n for n in self.unrotated_layers if n < layers),
            **changes,
        )

    def check_length(self, tokens: int, fields: str = "sampler") -> None:
        """Raise ValueError if the longest prompt and answer together exceed max_positions.

        `fields` begins the message: the fields that bound the tokens, with their values.
        """
        if tokens <= self.max_positions:
            return
        remedy = "policy.rope_scaling, or --rope_scaling of evaluate, makes that longer"
        if self.rope.kind != "default":  # with_rope_scaling refuses to scale it again
            remedy = (
                f"its rope is {self.rope.kind!r} with factor {self.rope.factor:g}: a larger "
                "policy.rope_factor makes that longer if the run's config scaled the rope, else "
                "other values in the folder's config.json"
            )
        raise ValueError(
            f"{fields}: the longest prompt and answer have {tokens} tokens together, must be at "
            f"most the policy's max_position_embeddings = {self.max_positions} ({remedy}); a lower "
            "sampler.max_prompt or sampler.max_tokens, or --max_input of evaluate, fits too"
        )

    def with_rope_scaling(self, kind: str, factor: float) -> PolicyConfig:
        """Extend the context to max_positions times `factor` by RoPE scaling of type `kind`.

        Raises ValueError if `kind` is unknown, `factor` is below 1, or the rope is scaled already.
        """
        if self.rope.kind != "default":
            raise ValueError(
                f"policy.rope_scaling = {kind!r}: the rope of the folder's config.json is "
                f"{self.rope.kind!r} already, with {self.max_positions} positions; must be '', or "
                "the scaling there be removed"
            )
        rope = dataclasses.replace(
            self.rope, kind=kind, factor=factor, original_positions=self.max_positions
        )
        return dataclasses.replace(self, rope=rope, max_positions=int(self.max_positions * factor))

    @property
    def has_int8_base(self) -> bool:
        """Whether the weights that LoRA does not train are int8 (int8.py)."""
        return self.lora is not None and self.lora.base_dtype == "int8"

    def _lora_layers(self) -> dict[str, str]:
        """Map the path of each linear layer that may have adapters to its Hugging Face name."""
        # PEFT's names address linear layers; the experts of a layer are one array.
        modules = ("attention",) if self.experts else ("attention", "mlp")
        return {f"{m}/{name}": hf for m in modules for name, hf in _LAYERS[m].items()}

    @property
    def lora_targets(self) -> dict[str, str]:
        """Path of each adapted kernel, such as attention/q -> its Hugging Face name."""
        assert self.lora is not None
        return {
            path: hf
            for path, hf in self._lora_layers().items()
            if self.lora.adapts(path.split("/")[1])
        }

    @property
    def model_type(self) -> str:
        """Hugging Face model type with the same parts; ValueError if there is none."""
        return families.find(self)

    @classmethod
    def from_hf(cls, source: str | pathlib.Path | dict[str, Any]) -> PolicyConfig:
        """Read a Hugging Face config (a path to config.json, or its parsed content).

        Raises ValueError, which names the field, if one is missing, has the wrong type, or asks for
        something that is not implemented.
        """
        if isinstance(source, dict):
            return cls(**hf_config.read(source))
        path = pathlib.Path(source)
        try:
            raw = json.loads(path.read_bytes())
            if not isinstance(raw, dict):
                raise ValueError(f"must be a JSON object, is a {type(raw).__name__}")
            return cls(**hf_config.read(raw))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """Convert to the config.json of transformers; ValueError if there is no model_type."""
        return hf_config.write(self)
