"""Weights of eight bits, to play with: half the bytes of bfloat16 for each token that is drawn.

Kernels of attention and MLP become int8, with a float32 scale for each output beside them
(NAME_kernel, NAME_scale), by its largest weight. A product takes them as they are and multiplies
its outputs by the scales (transformer.py). Embeddings, norms, biases and adapters stay as they are.
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
    """Raises ValueError for policies whose kernels this does not take."""
    if config.experts:
        raise ValueError(
            "sampler.weights_dtype = 'int8': a mixture of experts has no weights of eight bits; "
            "must be 'compute'"
        )


def quantise(params: dict[str, Any]) -> dict[str, Any]:
    """A policy's params with int8 kernels and their scales."""

    def split(kernel: jax.Array, inputs: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        kernel = kernel.astype(jnp.float32)
        scale = jnp.max(jnp.abs(kernel), axis=inputs, keepdims=True) / 127
        small = jnp.round(kernel / jnp.maximum(scale, 1e-30)).astype(jnp.int8)
        return small, jnp.squeeze(scale, inputs)

    return _map_kernels(params, split)


def placements(places: dict[str, Any]) -> dict[str, Any]:
    """Those of quantised params, by those of params: outputs lie as before."""

    def split(place: NamedSharding, inputs: tuple[int, ...]) -> tuple[NamedSharding, NamedSharding]:
        outputs = [axis for i, axis in enumerate(place.spec) if i not in inputs]
        return place, NamedSharding(place.mesh, PartitionSpec(*outputs))

    return _map_kernels(places, split)


def _map_kernels(
    tree: dict[str, Any], split: Callable[[Any, tuple[int, ...]], tuple[Any, Any]]
) -> dict[str, Any]:
    """The tree with (kernel, scale) = split(kernel, its axes of inputs) for each kernel.

    Kernels have their layers in front, then inputs: a head and its numbers for the output of
    attention, else one axis.
    """
    layers = dict(tree["layers"])
    for room in _ROOMS:
        kept = dict(layers[room])
        for name in [name for name in kept if name.endswith("_kernel")]:
            inputs = (1, 2) if name == "o_kernel" else (1,)
            kept[name], kept[name.replace("_kernel", "_scale")] = split(kept[name], inputs)
        layers[room] = kept
    return tree | {"layers": layers}
