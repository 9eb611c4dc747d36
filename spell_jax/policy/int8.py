"""int8 weights for rollouts: half the bytes of bfloat16 kernels.

The kernels of attention and MLP become int8 (NAME_kernel), with one float32 scale per output
(NAME_scale) set by its largest weight. A product multiplies by the int8 kernel and scales its
outputs (transformer.py). Embeddings, norms, biases and adapters are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spell_jax.policy.config import PolicyConfig

_ROOMS = ("attention", "mlp")


def check(config: PolicyConfig) -> None:
    """Check that a policy's kernels can be quantized.

    Raises:
      ValueError: if the policy is a mixture of experts.
    """
    if config.experts:
        raise ValueError(
            "sampler.weights_dtype = 'int8': a mixture of experts has no weights of eight bits; "
            "must be 'compute'"
        )


def kernels(tree: dict[str, Any]) -> dict[str, Any]:
    """Select the kernels to quantize from params (or a tree like it), by module and name."""
    layers = tree["layers"]
    return {
        room: {name: leaf for name, leaf in layers[room].items() if name.endswith("_kernel")}
        for room in _ROOMS
    }


def joined(tree: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Replace the kernels of a tree by the result of `small_kernels`; other leaves are shared."""
    layers = tree["layers"]
    return tree | {"layers": layers | {room: layers[room] | small[room] for room in _ROOMS}}


def small_kernels(whole: dict[str, Any]) -> dict[str, Any]:
    """Quantize the result of `kernels` to int8 kernels and float32 scales.

    Jit this with the shardings from `placements`.
    """

    def split(kernel: jax.Array, inputs: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        kernel = kernel.astype(jnp.float32)
        scale = jnp.max(jnp.abs(kernel), axis=inputs, keepdims=True) / 127
        small = jnp.round(kernel / jnp.maximum(scale, 1e-30)).astype(jnp.int8)
        return small, jnp.squeeze(scale, inputs)

    return _map_kernels(whole, split)


def placements(places: dict[str, Any]) -> dict[str, Any]:
    """Shardings of `small_kernels` from those of `kernels`; outputs keep their sharding."""

    def split(place: NamedSharding, inputs: tuple[int, ...]) -> tuple[NamedSharding, NamedSharding]:
        outputs = [axis for i, axis in enumerate(place.spec) if i not in inputs]
        return place, NamedSharding(place.mesh, PartitionSpec(*outputs))

    return _map_kernels(places, split)


def _map_kernels(
    whole: dict[str, Any], split: Callable[[Any, tuple[int, ...]], tuple[Any, Any]]
) -> dict[str, Any]:
    """Apply split(kernel, input axes) -> (kernel, scale) to each kernel, by module and name.

    Axis 0 of a kernel is the layer. Input axes follow: heads and head size for the attention output
    (o_kernel), one axis for all others.
    """
    found: dict[str, Any] = {room: {} for room in whole}
    for room, some in whole.items():
        for name, kernel in some.items():
            inputs = (1, 2) if name == "o_kernel" else (1,)
            scale = name.replace("_kernel", "_scale")
            found[room][name], found[room][scale] = split(kernel, inputs)
    return found
