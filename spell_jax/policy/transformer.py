"""The policy: a decoder-only transformer in Flax linen, one for training, prefill and decoding.

1. A block is RMSNorm, attention, RMSNorm, SwiGLU, with residuals; the L blocks are scanned.
2. How queries meet keys is handed in as `attend`, so that packed training rows, prefill and
   decoding behind a shared prompt use the same parameters and the same block.
3. Every parameter is declared once, with logical axes; a table (runtime/mesh.py) maps those to a
   mesh. Boxes are removed at init: params are a plain nested dict.
4. Hidden states come out; projecting them to the vocabulary is the caller's business, because
   prompt positions never need it.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import spmd

from spell_jax.attention import dense
from spell_jax.policy import mimetic, rope
from spell_jax.policy.config import PolicyConfig

Params = dict[str, Any]


class Attend(Protocol):
    """How queries meet keys: (q [B,T,N,H], k, v [B,T,K,H], cache, context) -> (out, new cache).

    `cache` is this layer's slice of the caller's cache (or None); `context` is shared by all
    layers; the second result is stacked over layers and returned to the caller.
    """

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, context: Any
    ) -> tuple[jax.Array, Any]: ...


def _kernel(axes: tuple[str, ...], inputs: int) -> Any:
    """An initialiser of variance 1 / inputs, whose values come in a box with their axes."""
    return nn.with_logical_partitioning(nn.initializers.normal(inputs**-0.5), axes)


def _constant(initializer, *axes: str) -> Any:
    return nn.with_logical_partitioning(initializer, axes)


class RMSNorm(nn.Module):
    """x / rms(x) * scale, the statistics in float32."""

    epsilon: float
    axis: str = "embed"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", _constant(nn.initializers.ones, self.axis), (x.shape[-1],))
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        return (x32 * scale.astype(jnp.float32)).astype(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    config: PolicyConfig
    attend: Attend

    def _project(self, x: jax.Array, name: str, heads: int, axis: str) -> jax.Array:
        c = self.config
        kernel = self.param(
            f"{name}_kernel",
            _kernel(("embed", axis, "head"), c.width),
            (c.width, heads, c.head_size),
        )
        out = jnp.einsum("btd,dnh->btnh", x, kernel)
        if c.qkv_bias:
            bias = self.param(
                f"{name}_bias",
                _constant(nn.initializers.zeros, axis, "head"),
                (heads, c.head_size),
            )
            out = out + bias
        return out

    @nn.compact
    def __call__(self, x: jax.Array, cache: Any, context: Any) -> tuple[jax.Array, Any]:
        c = self.config
        q = self._project(x, "q", c.heads, "heads")
        k = self._project(x, "k", c.kv_heads, "kv_heads")
        v = self._project(x, "v", c.kv_heads, "kv_heads")
        if c.qk_norm:
            q = RMSNorm(c.norm_epsilon, "head", name="q_norm")(q)
            k = RMSNorm(c.norm_epsilon, "head", name="k_norm")(k)
        q = rope.rotate(q, *context["rotary"])
        k = rope.rotate(k, *context["rotary"])
        out, new_cache = self.attend(q, k, v, cache, context)
        kernel = self.param(
            "o_kernel",
            _kernel(("heads", "head", "embed"), c.heads * c.head_size),
            (c.heads, c.head_size, c.width),
        )
        return jnp.einsum("btnh,nhd->btd", out, kernel), new_cache


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    config: PolicyConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        wide = (c.width, c.feed_forward)
        gate = self.param("gate_kernel", _kernel(("embed", "mlp"), c.width), wide)
        up = self.param("up_kernel", _kernel(("embed", "mlp"), c.width), wide)
        down = self.param("down_kernel", _kernel(("mlp", "embed"), c.feed_forward), wide[::-1])
        return (nn.silu(x @ gate) * (x @ up)) @ down


class Block(nn.Module):
    """One layer; the signature (carry, scanned cache, broadcast context) is nn.scan's."""

    config: PolicyConfig
    attend: Attend

    @nn.compact
    def __call__(self, x: jax.Array, cache: Any, context: Any) -> tuple[jax.Array, Any]:
        epsilon = self.config.norm_epsilon
        attention = Attention(self.config, self.attend, name="attention")
        out, new_cache = attention(RMSNorm(epsilon, name="attention_norm")(x), cache, context)
        x = x + out
        x = x + SwiGLU(self.config, name="mlp")(RMSNorm(epsilon, name="mlp_norm")(x))
        return spmd.with_logical_constraint(x, ("rows", "time", None)), new_cache


class Transformer(nn.Module):
    """Token embedding, L scanned blocks, final norm."""

    config: PolicyConfig
    attend: Attend

    @nn.compact
    def __call__(self, tokens: jax.Array, cache: Any, context: Any) -> tuple[jax.Array, Any]:
        c = self.config
        table_shape = (c.vocab_size, c.width)
        table = self.param("embedding", _kernel(("vocab", "embed"), c.width), table_shape)
        if not c.tied_embeddings:  # declared here so that init makes it; read by unembed()
            self.param("unembedding", _kernel(("vocab", "embed"), c.width), table_shape)
        x = spmd.with_logical_constraint(jnp.take(table, tokens, axis=0), ("rows", "time", None))
        block = nn.remat(Block, prevent_cse=False) if c.remat == "block" else Block
        in_axes: Any = (0, nn.broadcast)  # flax declares an int, and takes one an argument
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=in_axes,
            out_axes=0,
            length=c.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, new_cache = layers(c, self.attend, name="layers")(x, cache, context)
        return RMSNorm(c.norm_epsilon, name="final_norm")(x), new_cache


def boxed_init(config: PolicyConfig, key: jax.Array) -> Any:
    """Random float32 parameters (see mimetic.py), each in a box that carries its logical axes."""
    token = jnp.zeros((1, 1), jnp.int32)
    context = _context(config, token, {"last_reader": token})
    model = Transformer(config, dense.attend_packed)
    params: Any = model.init(key, token, None, context)["params"]
    boxes = params["layers"]["attention"]
    weights = mimetic.attention_weights(config, nn.unbox(boxes))
    replaced = {name: boxes[name].replace_boxed(value) for name, value in weights.items()}
    return params | {"layers": params["layers"] | {"attention": boxes | replaced}}


def init(config: PolicyConfig, key: jax.Array) -> Params:
    """Random float32 parameters as a plain nested dict."""
    return nn.unbox(boxed_init(config, key))


@functools.cache
def abstract_params(config: PolicyConfig) -> tuple[Params, Params]:
    """(shapes, logical axes): trees of jax.ShapeDtypeStruct and of PartitionSpec of axis names."""
    boxed = jax.eval_shape(functools.partial(boxed_init, config), jax.random.key(0))
    return nn.unbox(boxed), nn.get_partition_spec(boxed)


def _context(config: PolicyConfig, positions: jax.Array, context: dict[str, Any]) -> dict:
    return {**context, "rotary": rope.rotary(positions, config.head_size, config.rope_theta)}


def hidden_states(
    config: PolicyConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    cache: Any = None,
    context: dict[str, Any] | None = None,
) -> tuple[jax.Array, Any]:
    """Runs the blocks.

    Args:
      config: the architecture.
      params: parameters in the compute dtype.
      tokens: int32 [B, T].
      positions: int32 [B, T], rotary positions (not row indices).
      attend: how queries meet keys.
      cache: pytree with a leading layer axis, sliced per layer and handed to `attend`.
      context: pytree handed to `attend` in every layer.

    Returns:
      Final hidden states [B, T, D] in the compute dtype, and what `attend` returned as new cache,
      stacked over layers.
    """
    model = Transformer(config, attend)
    return model.apply(
        {"params": params}, tokens, cache, _context(config, positions, context or {})
    )


def unembed(config: PolicyConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Float32 logits [..., V] of hidden states [..., D]."""
    table = params["embedding"] if config.tied_embeddings else params["unembedding"]
    return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)


def logits(config: PolicyConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Float32 logits [B, T, V] of plain causal rows [B, T]; for small inputs and tests."""
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    last_reader = jnp.full((rows, length), length - 1, jnp.int32)
    hidden, _ = hidden_states(
        config, params, tokens, positions, dense.attend_packed, None, {"last_reader": last_reader}
    )
    return unembed(config, params, hidden)
