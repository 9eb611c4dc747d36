"""int8 weights: half the bytes of bfloat16 kernels, for rollouts or as the base of adapters.

The kernels of attention and MLP become int8 (NAME_kernel), with one float32 scale per output
(NAME_scale) set by its largest weight. A product with the int8 kernel is scaled afterwards
(products.py). Norms, biases and adapters are unchanged.

Of the base of adapters, an embedding that no output projection shares is quantized too, with one
scale per token (embedding_scale). The output projection is not: its rounding errors would be errors
of logits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from spell_jax.policy.config import PolicyConfig

Flat = dict[str, Any]  # leaves of params, or of a tree like them, by path
_KERNELS = re.compile(r"layers/(attention|mlp)/\w+_kernel")


def check_quantizable(config: PolicyConfig, field: str) -> None:
    """Raise ValueError if the policy is a mixture of experts, which cannot be quantized.

    `field` names the config's field that asks for int8.
    """
    # Ragged products (moe.py) take kernels in the tokens' dtype.
    if config.experts:
        raise ValueError(
            f"{field} = 'int8': a mixture of experts has no weights of eight bits; must be "
            "'compute'"
        )


def kernels(tree: dict[str, Any]) -> Flat:
    """Select the kernels of attention and MLP from params (or a tree like it), by path."""
    flat = flatten_dict(tree, sep="/")
    return {path: leaf for path, leaf in flat.items() if _KERNELS.fullmatch(path)}


def base_weights(tree: dict[str, Any]) -> Flat:
    """Select what is int8 in the base of adapters, from params or a tree like it, by path."""
    is_shared = "unembedding" not in tree
    return kernels(tree) | ({} if is_shared else {"embedding": tree["embedding"]})


def with_int8(tree: dict[str, Any], quantized: Flat) -> dict[str, Any]:
    """Replace the weights of a tree by results of `quantize`; other leaves are shared."""
    return unflatten_dict(flatten_dict(tree, sep="/") | quantized, sep="/")


def quantize(weights: Flat) -> Flat:
    """Quantize `kernels` or `base_weights` to int8 and float32 scales, by path.

    Jit it with shardings from `int8_shardings`.
    """

    def to_int8(weight: jax.Array, inputs: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        weight = weight.astype(jnp.float32)
        # One scale per output, so that a product is scaled after its sum: one multiplication per
        # output.
        scale = jnp.max(jnp.abs(weight), axis=inputs, keepdims=True) / 127
        # Where all weights of an output are 0, so is the scale, and 0 / 1e-30 stays 0.
        quantized = jnp.round(weight / jnp.maximum(scale, 1e-30)).astype(jnp.int8)
        return quantized, jnp.squeeze(scale, inputs)

    return _map_weights(to_int8, weights)


def quantize_base(params: dict[str, Any]) -> dict[str, Any]:
    """Quantize the `base_weights` of params; int8 weights are left as they are."""
    weights = base_weights(params)
    wide = {path: leaf for path, leaf in weights.items() if leaf.dtype != jnp.int8}
    return with_int8(params, quantize(wide))


def dequantize(path: str, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the float32 values of an int8 weight (a kernel has its axis of layers) and scales."""
    return weight.astype(jnp.float32) * jnp.expand_dims(scale, _input_axes(path))


def cast(params: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Cast params to the compute dtype, except int8 weights and their scales."""

    def cast_leaf(path: str, leaf: Any) -> jax.Array:
        is_kept = leaf.dtype == jnp.int8 or path.endswith("_scale")
        return leaf if is_kept else leaf.astype(dtype)

    flat = flatten_dict(params, sep="/")
    return unflatten_dict({path: cast_leaf(path, leaf) for path, leaf in flat.items()}, sep="/")


def int8_shardings(shardings: Flat) -> Flat:
    """Derive the shardings of `quantize` from the shardings of its weights."""

    def with_scale(sharding: NamedSharding, inputs: tuple[int, ...]):
        # A scale lies where its output lies, so that scaling moves nothing between devices.
        return sharding, NamedSharding(sharding.mesh, _without(sharding.spec, inputs))

    return _map_weights(with_scale, shardings)


def int8_axes(axes: dict[str, Any]) -> dict[str, Any]:
    """Derive the logical axes of `quantize_base` from the axes of params."""
    weights = _map_weights(lambda spec, inputs: (spec, _without(spec, inputs)), base_weights(axes))
    return with_int8(axes, weights)


def scale_path(path: str) -> str:
    """Return the path of a weight's scales."""
    return path.removesuffix("_kernel") + "_scale"


def _without(spec: PartitionSpec, inputs: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec(*(axis for i, axis in enumerate(spec) if i not in inputs))


def _input_axes(path: str) -> tuple[int, ...]:
    """Return the axes that one scale spans: all inputs of an output, or the width of a token.

    Axis 0 of a kernel is the layer. Input axes follow: two (heads, head size) in o_kernel, else
    one.
    """
    return (1, 2) if path.endswith("/o_kernel") else (1,)


def _map_weights(with_scale: Callable[[Any, tuple[int, ...]], tuple[Any, Any]], flat: Flat) -> Flat:
    """Apply with_scale(weight, input axes) -> (weight, scale) to each weight."""
    result: Flat = {}
    for path, weight in flat.items():
        result[path], result[scale_path(path)] = with_scale(weight, _input_axes(path))
    return result
