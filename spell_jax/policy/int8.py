"""int8 weights for rollouts: half the bytes of bfloat16 kernels.

The kernels of attention and MLP become int8 (NAME_kernel), with one float32 scale per output
(NAME_scale) set by its largest weight. A product with the int8 kernel is scaled afterwards
(transformer.py). Embeddings, norms, biases and adapters are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spell_jax.policy.config import PolicyConfig

_MODULES = ("attention", "mlp")


def check_quantizable(config: PolicyConfig) -> None:
    """Raise ValueError if the policy is a mixture of experts, which cannot be quantized."""
    # Ragged products (moe.py) take kernels in the tokens' dtype.
    if config.experts:
        raise ValueError(
            "sampler.weights_dtype = 'int8': a mixture of experts has no weights of eight bits; "
            "must be 'compute'"
        )


def kernels(tree: dict[str, Any]) -> dict[str, Any]:
    """Select the kernels to quantize from params (or a tree like it), by module and name."""
    layers = tree["layers"]
    return {
        module: {name: leaf for name, leaf in layers[module].items() if name.endswith("_kernel")}
        for module in _MODULES
    }


def with_int8(tree: dict[str, Any], quantized: dict[str, Any]) -> dict[str, Any]:
    """Replace the kernels of a tree by results of `quantize_kernels`; other leaves are shared."""
    layers = tree["layers"]
    modules = {module: layers[module] | quantized[module] for module in _MODULES}
    return tree | {"layers": layers | modules}


def quantize_kernels(kernels: dict[str, Any]) -> dict[str, Any]:
    """Quantize `kernels` to int8 and float32 scales; jit with shardings from `int8_shardings`."""

    def quantize(kernel: jax.Array, inputs: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        kernel = kernel.astype(jnp.float32)
        # One scale per output, so that a product is scaled after its sum: one multiplication per
        # output.
        scale = jnp.max(jnp.abs(kernel), axis=inputs, keepdims=True) / 127
        # Where all weights of an output are 0, so is the scale, and 0 / 1e-30 stays 0.
        quantized = jnp.round(kernel / jnp.maximum(scale, 1e-30)).astype(jnp.int8)
        return quantized, jnp.squeeze(scale, inputs)

    return _map_kernels(quantize, kernels)


def int8_shardings(shardings: dict[str, Any]) -> dict[str, Any]:
    """Derive the shardings of `quantize_kernels` from the shardings of `kernels`."""

    def with_scale(sharding: NamedSharding, inputs: tuple[int, ...]):
        # A scale lies where its output lies, so that scaling moves nothing between devices.
        outputs = [axis for i, axis in enumerate(sharding.spec) if i not in inputs]
        return sharding, NamedSharding(sharding.mesh, PartitionSpec(*outputs))

    return _map_kernels(with_scale, shardings)


def _map_kernels(
    with_scale: Callable[[Any, tuple[int, ...]], tuple[Any, Any]], tree: dict[str, Any]
) -> dict[str, Any]:
    """Apply with_scale(kernel, input axes) -> (kernel, scale) to each kernel.

    Axis 0 of a kernel is the layer. Input axes follow: two (heads, head size) in o_kernel, else
    one.
    """
    result: dict[str, Any] = {module: {} for module in tree}
    for module, kernels in tree.items():
        for name, kernel in kernels.items():
            inputs = (1, 2) if name == "o_kernel" else (1,)
            scale = name.replace("_kernel", "_scale")
            result[module][name], result[module][scale] = with_scale(kernel, inputs)
    return result
