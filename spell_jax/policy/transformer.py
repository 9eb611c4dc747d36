"""Decoder-only transformer in Flax linen, shared by training, prefill and decode.

The caller passes the attention as `attend`, so that all three use the same parameters and blocks.
Every parameter is declared once, with logical axes that runtime/mesh.py maps to a mesh. Boxes are
removed at init: params are a plain nested dict. The model returns hidden states, because prompt
positions never need logits.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import spmd
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Int, Int32

from spell_jax.attention import attend as kernels
from spell_jax.attention.kernel import CHECKPOINT_NAME as ATTENTION
from spell_jax.policy import embedding, int8, mimetic, moe, products, rope
from spell_jax.policy.config import LoraConfig, PolicyConfig
from spell_jax.runtime import collectives
from spell_jax.runtime.bits import from_bits

Params = dict[str, Any]
_HIDDEN = ("rows", "time", "width")  # logical axes of hidden states [B, T, D]
_BLOCK_INPUT = "block input"
# Checkpoint policy of a block by PolicyConfig.remat: the values saved for the backward pass.
_CHECKPOINT_POLICIES = {
    "block": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(ATTENTION),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


class Attend(Protocol):
    """Attention of a layer: from queries, keys, values, cache and context to output and cache.

    `cache`, the pages of the sampler's KV cache or None in training, passes from layer to layer.
    `context` is a dict with "positions" (int32 [B, T]) and entries of the caller, the same for all
    layers, and of a layer "layer", its number, and if layers have windows "window", the number of
    tokens that a query of the layer sees (int32 scalars).
    """

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        cache: Any,
        context: Any,
    ) -> tuple[Float[Array, "B T N H"], Any]: ...


def _kernel(axes: tuple[str, ...], inputs: int) -> Any:
    """Return a boxed normal initializer of variance 1 / inputs, with logical axes."""
    return nn.with_logical_partitioning(nn.initializers.normal(inputs**-0.5), axes)


def _constant(initializer, *axes: str) -> Any:
    return nn.with_logical_partitioning(initializer, axes)


@jax.custom_vjp
def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiply x, float32 [*tokens, *shape], by a parameter of any dtype [*shape].

    The parameter's gradient is summed over tokens and devices in float32.
    """
    return x * scale.astype(jnp.float32)


def _scaled_backward(residuals: tuple[jax.Array, jax.Array], d_out: jax.Array):
    x, scale = residuals
    # Autodiff would round the sum to the parameter's dtype before the devices' parts are added.
    d_scale = products.sum_over_tokens(d_out * x, x.ndim - scale.ndim)
    return d_out * scale.astype(jnp.float32), collectives.rounded(d_scale, scale.dtype)


_scaled.defvjp(lambda x, scale: (_scaled(x, scale), (x, scale)), _scaled_backward)


@jax.custom_vjp
def _shifted(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Add a parameter to x, like `_scaled`."""
    return x + bias.astype(jnp.float32)


def _shifted_backward(like: jax.Array, d_out: jax.Array):
    d_bias = products.sum_over_tokens(d_out, d_out.ndim - like.ndim)
    return d_out, collectives.rounded(d_bias, like.dtype)


_shifted.defvjp(lambda x, bias: (_shifted(x, bias), bias), _shifted_backward)


class RMSNorm(nn.Module):
    """Root-mean-square norm, x / rms(x) * scale, with float32 statistics.

    `axes` are the logical names of the trailing axes that are normalized together. The parameter is
    the scale, or with `centered_norms` the scale less 1.
    """

    config: PolicyConfig
    axes: tuple[str, ...] = ("embed",)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, trailing = self.config, tuple(range(-len(self.axes), 0))
        start = nn.initializers.zeros if c.centered_norms else nn.initializers.ones
        scale = self.param("scale", _constant(start, *self.axes), x.shape[-len(self.axes) :])
        # A mean of squares in bfloat16 would have 8 significant bits.
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(x32 * x32, axis=trailing, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(mean + c.norm_epsilon)
        out = _scaled(x32, scale)
        # Not x32 * (1 + scale): the sum would be rounded to the parameter's dtype.
        return (out + x32 if c.centered_norms else out).astype(x.dtype)


class _Linear(NamedTuple):
    """Parameters of a linear layer with axes [*into] -> [*out]; None for parameters it lacks."""

    kernel: jax.Array | products.Int8Kernel  # [*into, *out]
    a: jax.Array | None  # LoRA adapters, [*into, rank] and [rank, *out]
    b: jax.Array | None
    bias: jax.Array | None  # [*out]

    @classmethod
    def declare(
        cls,
        module: nn.Module,
        name: str,
        into: dict[str, int],
        out: dict[str, int],
        lora: LoraConfig | None,
        has_bias: bool,
    ) -> _Linear:
        """Declare a layer's parameters in its module, as NAME_kernel and so on.

        `into` and `out` have the size of each axis by its logical name.
        """
        inputs, shape = math.prod(into.values()), (*into.values(), *out.values())
        kernel: Any = module.param(f"{name}_kernel", _kernel((*into, *out), inputs), shape)
        a = b = bias = None
        if kernel.dtype == jnp.int8:
            scale = module.get_variable("params", f"{name}_scale")
            kernel = products.Int8Kernel(kernel, scale)
        else:
            kernel = from_bits(kernel)

        def uniform(key, shape, dtype=jnp.float32):  # variance 1 / (3 inputs), as in PEFT
            return jax.random.uniform(key, shape, dtype, -(inputs**-0.5), inputs**-0.5)

        def zeros(*axes: str):
            return _constant(nn.initializers.zeros, *axes)

        if lora is not None and lora.adapts(name):
            low, high = (*into.values(), lora.rank), (lora.rank, *out.values())
            a = module.param(f"{name}_lora_a", _constant(uniform, *into, "rank"), low)
            b = module.param(f"{name}_lora_b", zeros("rank", *out), high)
        if has_bias:
            bias = module.param(f"{name}_bias", zeros(*out), tuple(out.values()))
        return cls(kernel, a, b, bias)


def _project(
    module: nn.Module,
    x: jax.Array,
    into: dict[str, int],
    outputs: dict[str, dict[str, int]],
    lora: LoraConfig | None = None,
    has_bias: bool = False,
) -> list[jax.Array]:
    """Apply linear layers and their LoRA adapters to x [..., *into] -> [..., *out] each.

    `outputs` has the output axes of each layer by the layer's name; see _Linear.
    """
    layers = [
        _Linear.declare(module, name, into, out, lora, has_bias) for name, out in outputs.items()
    ]
    kernels = [layer.kernel for layer in layers]
    # In one call, so that x is kept once for the gradients of all projections and adapters.
    kernels += [layer.a for layer in layers if layer.a is not None]
    projected: Any = products.multiply(x, tuple(kernels), len(into))
    lows = iter(projected[len(layers) :])
    results = []
    for layer, result in zip(layers, projected, strict=False):
        if lora is not None and layer.b is not None:
            adapted: Any = products.multiply(next(lows), (layer.b,), 1)
            result += adapted[0] * lora.scale
        if layer.bias is not None:
            result = _shifted(result.astype(jnp.float32), layer.bias).astype(x.dtype)
        results.append(result)
    return results


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    config: PolicyConfig
    attend: Attend

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, context: Any
    ) -> tuple[Float[Array, "B T D"], Any]:
        c = self.config
        heads = {"heads": c.heads, "head": c.head_size}
        kv_heads = {"kv_heads": c.kv_heads, "head": c.head_size}
        outputs = {"q": heads, "k": kv_heads, "v": kv_heads}
        q, k, v = _project(self, x, {"embed": c.width}, outputs, c.lora, c.qkv_bias)
        if c.qk_norm:
            q = RMSNorm(c, ("heads", "head") if c.joint_qk_norm else ("head",), name="q_norm")(q)
            k = RMSNorm(c, ("kv_heads", "head") if c.joint_qk_norm else ("head",), name="k_norm")(k)
        q = rope.rotate(q, *context["rotary"])
        k = rope.rotate(k, *context["rotary"])
        if c.score_scale is not None:
            # Kernels scale scores by H^-.5.
            q = q * (c.score_scale * c.head_size**0.5)
        out, cache = self.attend(q, k, v, cache, context)
        # Heads stay on their devices; only the product with o is summed over `tensor`.
        out = spmd.with_logical_constraint(out, ("rows", "time", "heads", None))
        (out,) = _project(self, out, heads, {"o": {"embed": c.width}}, c.lora)
        return out, cache


class GatedLayer(nn.Module):
    """Gated feed-forward layer, down(activation(gate(x)) * up(x))."""

    config: PolicyConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        narrow, wide = {"embed": c.width}, {"mlp": c.feed_forward}
        gate, up = _project(self, x, narrow, {"gate": wide, "up": wide}, c.lora)
        hidden: Any = products.gated(gate, up, c.activation)
        (down,) = _project(self, hidden, wide, {"down": narrow}, c.lora)
        return down


class Experts(nn.Module):
    """Mixture of experts (moe.py): output and routing of a layer.

    `recorded` replaces the experts that the router would choose.
    """

    config: PolicyConfig
    record: bool  # whether the routing has the chosen experts

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        real: Bool[Array, "B T"],
        recorded: Int[Array, "B T k"] | None,
    ) -> tuple[Float[Array, "B T D"], moe.Routing]:
        c = self.config
        # The router is a product in the compute dtype, the softmax over its logits is float32
        # (moe.route).
        (logits,) = _project(self, x, {"embed": c.width}, {"router": {"router": c.experts}})
        weights, experts = moe.route(logits, c.experts_per_token, c.normalized_router)
        differing = None
        if recorded is not None:
            differing = moe.count_differing(experts, recorded, real)
            weights, experts = moe.replay(logits, experts, recorded, c.normalized_router)
        shape = (c.experts, c.width, c.feed_forward)
        wide = _kernel(("experts", "embed", "mlp"), c.width)
        narrow = _kernel(("experts", "mlp", "embed"), c.feed_forward)
        gate = self.param("gate_kernel", wide, shape)
        up = self.param("up_kernel", wide, shape)
        down = self.param("down_kernel", narrow, (c.experts, c.feed_forward, c.width))
        gate, up, down = (from_bits(kernel) for kernel in (gate, up, down))
        out = moe.mix(x, weights.astype(x.dtype), experts, (gate, up, down))
        record = experts.astype(moe.no_experts(c).dtype) if self.record else None
        return out, moe.Routing(moe.count_load(experts, c.experts, real), record, differing)


class Layer(NamedTuple):
    """Arrays with an entry for each layer; the loop over layers cuts out the entry of a layer."""

    number: jax.Array  # int32 [L]
    experts: jax.Array | None  # recorded experts, int [L, B, T, k]
    rotary: jax.Array | None  # which of context["rotaries"] a layer has, int32 [L]; None: one alone
    window: jax.Array | None  # tokens that a query sees, itself included, int32 [L]; None: all

    @classmethod
    def stack(cls, config: PolicyConfig, experts: jax.Array | None) -> Layer:
        """Return the arrays of all layers."""
        rotary = window = None
        if len(config.ropes) > 1:
            rotary = jnp.array([config.ropes.index(x) for x in config.layer_ropes], jnp.int32)
        if config.window:
            window = jnp.array(config.layer_windows, jnp.int32)
        return cls(jnp.arange(config.layers), experts, rotary, window)

    def context(self, shared: dict[str, Any]) -> dict[str, Any]:
        """Return the context of this layer, from the context of all layers."""
        rotary = shared["rotaries"]
        which = 0 if self.rotary is None else self.rotary
        of_layer = {"layer": self.number, "rotary": jax.tree.map(lambda x: x[which], rotary)}
        return shared | of_layer | ({} if self.window is None else {"window": self.window})


class Block(nn.Module):
    """One transformer layer, with the signature of nn.scan: carry, Layer, context."""

    config: PolicyConfig
    attend: Attend
    record_experts: bool = False

    @nn.compact
    def __call__(
        self, carry: tuple[jax.Array, Any], layer: Layer, context: dict[str, Any]
    ) -> tuple[tuple[jax.Array, Any], moe.Routing | None]:
        x, cache = carry
        c, context = self.config, layer.context(context)
        x = checkpoint_name(x, _BLOCK_INPUT)
        attention = Attention(c, self.attend, name="attention")
        out, cache = attention(self._norm("attention_norm", "before", x), cache, context)
        x = x + self._norm("attention_out_norm", "after", out)
        normed = self._norm("mlp_norm", "before", x)
        if c.experts:
            experts = Experts(c, self.record_experts, name="moe")
            out, routing = experts(normed, context["real"], layer.experts)
        else:
            out, routing = GatedLayer(c, name="mlp")(normed), None
        x = x + self._norm("mlp_out_norm", "after", out)
        return (spmd.with_logical_constraint(x, _HIDDEN), cache), routing

    def _norm(self, name: str, place: str, x: jax.Array) -> jax.Array:
        """Normalize the input ("before") or output ("after") of a part, if the policy does so."""
        return RMSNorm(self.config, name=name)(x) if self.config.norms in (place, "both") else x


class Transformer(nn.Module):
    """Token embedding, L scanned blocks and the final norm."""

    config: PolicyConfig
    attend: Attend
    record_experts: bool = False

    @nn.compact
    def __call__(
        self,
        tokens: Int32[Array, "B T"],
        cache: Any,
        context: Any,
        experts: Int[Array, "L B T k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any, moe.Routing | None]:
        c = self.config
        table_shape = (c.vocab_size, c.width)
        head = table = self.param("embedding", _kernel(("vocab", "embed"), c.width), table_shape)
        if not c.tied_embeddings:  # created by init, used by unembed()
            head = self.param("unembedding", _kernel(("vocab", "embed"), c.width), table_shape)
        scale = None
        if table.dtype == jnp.int8:
            scale = self.get_variable("params", "embedding_scale")
        # Of an int8 base, the head alone is in the compute dtype.
        x = embedding.lookup(table, tokens, scale).astype(head.dtype)
        x = spmd.with_logical_constraint(x, _HIDDEN)
        if c.scaled_embedding:
            x = x * jnp.asarray(c.width**0.5, x.dtype)  # rounded first, as Gemma was trained
        block = Block
        if c.remat != "none":
            # Inside a scan XLA cannot merge the recomputation with the forward pass, and barriers
            # against that (prevent_cse) would only cost time.
            block = nn.remat(Block, prevent_cse=False, policy=_CHECKPOINT_POLICIES[c.remat])
        in_axes: Any = (0, nn.broadcast)  # Flax types this as int but accepts one per argument
        # Scanned: 28 layers compile, forward and backward, in 1.6 s instead of 6.1 s unrolled (jax
        # 0.10.2, 2 CPU cores).
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=in_axes,
            out_axes=0,
            length=c.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        blocks = layers(c, self.attend, self.record_experts, name="layers")
        (x, cache), routing = blocks((x, cache), Layer.stack(c, experts), context)
        return RMSNorm(c, name="final_norm")(x), cache, routing


def boxed_init(config: PolicyConfig, key: jax.Array) -> Any:
    """Initialize random float32 parameters (see mimetic.py), each boxed with its logical axes."""
    token = jnp.zeros((1, 1), jnp.int32)
    context = _context(config, token, {"last_query": token})
    model = Transformer(config, kernels.packed())
    params: Any = model.init(key, token, None, context)["params"]
    boxes = params["layers"]["attention"]
    weights = mimetic.attention_weights(config, nn.unbox(boxes))
    # Boxes carry the logical axes; only the values change.
    replaced = {name: boxes[name].replace_boxed(value) for name, value in weights.items()}
    return params | {"layers": params["layers"] | {"attention": boxes | replaced}}


def init(config: PolicyConfig, key: jax.Array) -> Params:
    """Initialize random parameters as a plain nested dict: float32, or an int8 base."""
    params = nn.unbox(boxed_init(config, key))
    return int8.quantize_base(params) if config.has_int8_base else params


@functools.cache
def abstract_params(config: PolicyConfig) -> tuple[Params, Params]:
    """Return shapes (jax.ShapeDtypeStruct) and logical axes (PartitionSpec) of all parameters."""
    # The key is created inside the trace, so that no device is touched.
    boxed = jax.eval_shape(lambda: boxed_init(config, jax.random.key(0)))
    params, axes = nn.unbox(boxed), nn.get_partition_spec(boxed)
    if config.has_int8_base:
        return jax.eval_shape(int8.quantize_base, params), int8.int8_axes(axes)
    return params, axes


def _context(config: PolicyConfig, positions: jax.Array, context: dict[str, Any]) -> dict:
    last_query = context.get("last_query", positions)
    return {
        **context,
        # Computed once per call and shared by all layers.
        "rotaries": rope.rotaries(positions, config.head_size, config.ropes),
        "positions": positions,
        "real": last_query >= 0,
    }


def hidden_states(
    config: PolicyConfig,
    params: Params,
    tokens: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    attend: Attend,
    cache: Any = None,
    context: dict[str, Any] | None = None,
    experts: Int[Array, "B T L k"] | None = None,
    record_experts: bool = False,
) -> tuple[Float[Array, "B T D"], Any, moe.Routing | None]:
    """Run the embedding, the blocks and the final norm.

    `params` are in the compute dtype, some may be int8 (int8.py). `positions` are rotary, not row
    indices. `attend` receives `cache` and `context` in every layer; context["last_query"] (int32
    [B, T], negative at padding) excludes padding from the token counts of the experts. `experts`
    replace the experts that the router chooses; see moe.no_experts.

    Returns:
      Final hidden states in the compute dtype; the cache after the last layer; and for a mixture of
      experts the routing in all layers, which has `experts` if `record_experts`.
    """
    variables, full = {"params": params}, _context(config, positions, context or {})
    by_layer = None if experts is None else jnp.moveaxis(experts, 2, 0)
    model = Transformer(config, attend, record_experts)
    result: Any = model.apply(variables, tokens, cache, full, by_layer)
    return result


def unembed(
    config: PolicyConfig, params: Params, hidden: Float[Array, "*B D"]
) -> Float32[Array, "*B V"]:
    """Project hidden states to logits, -inf for ids without a token."""
    table = params["embedding"] if config.tied_embeddings else params["unembedding"]
    logits = jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)
    return without_unused_ids(config, logits)


def without_unused_ids(
    config: PolicyConfig, logits: Float32[Array, "*B V"]
) -> Float32[Array, "*B V"]:
    """Set the logits of ids without a token to -inf."""
    if not config.unused_ids:
        return logits
    # -inf: the probability is exactly 0 at any temperature.
    ids = jnp.arange(config.vocab_size, dtype=jnp.int32)
    return jnp.where(embedding.has_token(ids, config.unused_ids), logits, -jnp.inf)


def logits(
    config: PolicyConfig, params: Params, tokens: Int[ArrayLike, "B T"]
) -> Float32[Array, "B T V"]:
    """Compute logits of plain causal rows; for small inputs and tests."""
    tokens = jnp.asarray(tokens, jnp.int32)
    rows, length = tokens.shape
    return unembed(config, params, _causal(config, params, tokens, jnp.full(rows, length)))


def embed(
    config: PolicyConfig,
    params: Params,
    tokens: Int32[Array, "B T"],
    lengths: Int32[Array, " B"],
) -> Float32[Array, "B D"]:
    """Embed whole texts by the hidden state of their last token, as Qwen3-Embedding does.

    `tokens` are padded after `lengths` tokens, at least 1. Returns unit vectors.
    """
    hidden = _causal(config, params, tokens, lengths)
    last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0]
    last = last.astype(jnp.float32)
    return last / jnp.linalg.norm(last, axis=-1, keepdims=True)


def _causal(
    config: PolicyConfig, params: Params, tokens: Int32[Array, "B T"], lengths: Int32[Array, " B"]
) -> Float[Array, "B T D"]:
    """Compute hidden states of plain causal rows, padded after their lengths."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    last_query = jnp.where(positions < lengths[:, None], lengths[:, None] - 1, -1)
    attend = kernels.packed(config.attention, config.ring)
    context = {"last_query": last_query}
    return hidden_states(config, params, tokens, positions, attend, None, context)[0]
