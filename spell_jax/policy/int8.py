"""Weights of eight bits, to play with: half the bytes that bfloat16 kernels are read with.

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


def kernels(tree: dict[str, Any]) -> dict[str, Any]:
    """What becomes int8, of params or a tree like them, by room and name."""
    layers = tree["layers"]
    return {
        room: {name: leaf for name, leaf in layers[room].items() if name.endswith("_kernel")}
        for room in _ROOMS
    }


def joined(tree: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """The tree with `small_kernels` in place of its kernels; all else is the same arrays."""
    layers = tree["layers"]
    return tree | {"layers": layers | {room: layers[room] | small[room] for room in _ROOMS}}


def small_kernels(whole: dict[str, Any]) -> dict[str, Any]:
    """int8 kernels and their scales, of `kernels`; to be jitted with `placements`."""

    def split(kernel: jax.Array, inputs: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        kernel = kernel.astype(jnp.float32)
        scale = jnp.max(jnp.abs(kernel), axis=inputs, keepdims=True) / 127
        small = jnp.round(kernel / jnp.maximum(scale, 1e-30)).astype(jnp.int8)
        return small, jnp.squeeze(scale, inputs)

    return _map_kernels(whole, split)


def placements(places: dict[str, Any]) -> dict[str, Any]:
    """Those of `small_kernels`, by those of `kernels`: outputs lie as before."""

    def split(place: NamedSharding, inputs: tuple[int, ...]) -> tuple[NamedSharding, NamedSharding]:
        outputs = [axis for i, axis in enumerate(place.spec) if i not in inputs]
        return place, NamedSharding(place.mesh, PartitionSpec(*outputs))

    return _map_kernels(places, split)


def _map_kernels(
    whole: dict[str, Any], split: Callable[[Any, tuple[int, ...]], tuple[Any, Any]]
) -> dict[str, Any]:
    """(kernel, scale) = split(kernel, its axes of inputs) for each kernel, by room and name.

    Kernels have their layers in front, then inputs: a head and its numbers for the output of
    attention, else one axis.
    """
    found: dict[str, Any] = {room: {} for room in whole}
    for room, some in whole.items():
        for name, kernel in some.items():
            inputs = (1, 2) if name == "o_kernel" else (1,)
            scale = name.replace("_kernel", "_scale")
            found[room][name], found[room][scale] = split(kernel, inputs)
    return found
