"""Matrix products of the policy, in the form that is fast on the platform of the program.

1. Accelerators sum a product of bfloat16 in float32 and round the result once. XLA for CPUs does
   this fast only if the product's own type is float32: 423 instead of 199 GFLOP/s (2,048 x 512 x
   1,536, 2 cores with AVX512-BF16; float32 has 216).
2. A kernel's gradient is a sum over tokens. XLA for CPUs reads its first factor column by column,
   unless that is transposed before: 380 instead of 169 GFLOP/s in bfloat16 (3,072 tokens, 1,536 x
   512), 173 instead of 123 in float32 (6,240 tokens, 256 x 768).
3. What the loop over layers cuts up, or keeps for the gradient, are bits (runtime/bits.py).
"""

from __future__ import annotations

import functools
import logging
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh

from spell_jax.runtime import collectives
from spell_jax.runtime import mesh as meshes
from spell_jax.runtime.bits import as_bits, from_bits
from spell_jax.runtime.hosts import distributed


class Int8Kernel(NamedTuple):
    """A kernel of int8 weights, frozen: it has no gradient.

    Its float32 values, weights * scale, never exist: products are scaled.
    """

    weights: jax.Array  # int8 [*into, *out]
    scale: jax.Array  # float32 [*out]


Kernels = tuple[jax.Array | Int8Kernel, ...]
Outputs = tuple[jax.Array, ...]
log = logging.getLogger(__name__)

# Instructions of x86 for products of bfloat16, as Linux names them, and the vendor of the CPUs that
# gain from them ("": any). Measured beside float32: AMX is 4 to 5 times as fast, AVX512-BF16 of AMD
# 1.9 to 2.2 times, of Intel .55 to .65 times (160 to 178 against 250 to 300 GFLOP/s on 2 cores).
# What is not a product gets slower in bfloat16, which XLA converts to float32 and back.
_BFLOAT16_INSTRUCTIONS = {"amx_bf16": "", "avx512_bf16": "AuthenticAMD"}
_CPU_INFO = pathlib.Path("/proc/cpuinfo")


def sum_dtype() -> jnp.dtype | None:
    """Return the dtype of a product before it is rounded; None for the factors' own dtype."""
    # See 1. above: on accelerators the sum is float32 anyway.
    return jnp.dtype(jnp.float32) if collectives.is_for_cpu() else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def multiply(x: jax.Array, kernels: Kernels, into: int) -> Outputs:
    """Multiply x [..., *into] by each kernel [*into, *out] -> [..., *out]; `into` counts axes.

    Gradients of kernels are summed over tokens and devices in float32.
    """
    return _forward(x, kernels, into)[0]


def _forward(x: jax.Array, kernels: Kernels, into: int):
    # Inlined: a remat policy that saves products does not look into the custom_vjp `multiply`.
    out = tuple(_apply_kernel(x, kernel, into).astype(x.dtype) for kernel in kernels)
    # An int8 kernel is kept as int8: a cast one would be kept in the compute dtype by all layers.
    return out, (as_bits(x), kernels)


def _apply_kernel(x: jax.Array, kernel: jax.Array | Int8Kernel, into: int) -> jax.Array:
    if not isinstance(kernel, Int8Kernel):
        return _product(x, kernel, into)
    # The cast is exact: int8 has 7 bits besides its sign, bfloat16 8.
    return _product(x, kernel.weights.astype(x.dtype), into).astype(jnp.float32) * kernel.scale


def _backward(into: int, residuals: tuple[jax.Array, Kernels], d_outs: Outputs):
    x, kernels = from_bits(residuals[0]), residuals[1]
    d_xs, d_kernels = [], []
    for kernel, d_out in zip(kernels, d_outs, strict=True):
        if isinstance(kernel, Int8Kernel):
            scaled = (d_out.astype(jnp.float32) * kernel.scale).astype(x.dtype)
            out = tuple(range(-kernel.scale.ndim, 0))
            d_xs.append(_product(scaled, kernel.weights.astype(x.dtype), (out, out)))
            d_kernels.append(None)
            continue
        out = tuple(range(-(kernel.ndim - into), 0))
        d_xs.append(_product(d_out, kernel, (out, out)))
        # A sum over tokens, which are sharded over devices: it stays float32 until the devices'
        # parts are added.
        d_kernel = sum_of_outer_products(x, d_out, x.ndim - into)
        d_kernels.append(collectives.rounded(d_kernel, kernel.dtype))
    return sum(d_xs[1:], start=d_xs[0]).astype(x.dtype), tuple(d_kernels)


multiply.defvjp(_forward, _backward)


def _product(a: jax.Array, b: jax.Array, axes) -> jax.Array:
    return jnp.tensordot(a, b, axes=axes, preferred_element_type=sum_dtype())


# PolicyConfig.activation -> function of the gate.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def gated(gate: jax.Array, up: jax.Array, activation: str = "silu") -> jax.Array:
    """Compute activation(gate) * up, arrays [..., F]; keeps only these two for the gradient."""
    return ACTIVATIONS[activation](gate) * up


def _gated_forward(gate: jax.Array, up: jax.Array, activation: str):
    return gated(gate, up, activation), (as_bits(gate), as_bits(up))


def _gated_backward(activation: str, residuals: tuple[jax.Array, jax.Array], d_out: jax.Array):
    # Written by hand, so that the backward pass needs gate and up alone: autodiff would also keep
    # activation(gate).
    gate, up, d_out32 = (from_bits(x).astype(jnp.float32) for x in (*residuals, d_out))
    active, pull_back = jax.vjp(ACTIVATIONS[activation], gate)
    (d_gate,) = pull_back(d_out32 * up)
    return d_gate.astype(d_out.dtype), (d_out32 * active).astype(d_out.dtype)


gated.defvjp(_gated_forward, _gated_backward)


def sum_of_outer_products(x: jax.Array, y: jax.Array, tokens: int) -> jax.Array:
    """Sum the outer products of x [*tokens, *a] and y [*tokens, *b] over tokens: float32 [*a, *b].

    `tokens` is the number of leading axes that are summed over.
    """
    if not collectives.is_for_cpu():
        axes = tuple(range(tokens))
        return jnp.tensordot(x, y, axes=(axes, axes), preferred_element_type=jnp.float32)
    count, shape = math.prod(x.shape[:tokens]), (*x.shape[tokens:], *y.shape[tokens:])
    columns = with_layout_constraint(x.reshape(count, -1).T, Layout((0, 1)))
    product = jnp.dot(columns, y.reshape(count, -1), preferred_element_type=jnp.float32)
    return product.reshape(shape)


def sum_over_tokens(x: jax.Array, tokens: int) -> jax.Array:
    """Sum x [*tokens, *shape] over its `tokens` leading axes: float32 [*shape]."""
    if not collectives.is_for_cpu():
        return jnp.sum(x, axis=tuple(range(tokens)), dtype=jnp.float32)
    # XLA for CPUs is faster at a product with ones than at a sum over rows: the gradient of a norm
    # (3,072 x 512) takes 8 instead of 20 ms of CPU time. The axes are not joined: tokens that are
    # split over devices would move.
    return jnp.tensordot(jnp.ones(x.shape[:tokens]), x.astype(jnp.float32), tokens)


def kernels_as_bits(params: dict[str, Any]) -> dict[str, Any]:
    """Replace the layers' bfloat16 kernels by their bits in a program for CPUs without gradient."""
    # XLA for CPUs would convert the whole stack to cut out one layer: a decode pass of 16 rows (8
    # layers, width 512, 2 cores) takes 14 ms instead of 25.

    def stored(path: Any, leaf: jax.Array) -> jax.Array:
        return as_bits(leaf) if path[-1].key.endswith("_kernel") else leaf

    return params | {"layers": jax.tree.map_with_path(stored, params["layers"])}


def resolve_dtype(compute_dtype: str, mesh: Mesh | AbstractMesh) -> str:
    """Return "float32" or "bfloat16" for a `compute_dtype` of choices.COMPUTE_DTYPES on a mesh.

    "auto" is bfloat16 on accelerators, and on CPUs with fast instructions for products of bfloat16.
    """
    # No timing decides: beside other work, two runs of one config would differ in dtype.
    if compute_dtype != "auto":
        return compute_dtype
    is_faster = not meshes.is_of_cpus(mesh) or _multiplies_bfloat16()
    return "bfloat16" if is_faster else "float32"


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Return whether CPUs multiply bfloat16 faster than float32; one process decides for all."""
    # Hosts may have different CPUs, but compile one program.
    names = distributed.broadcast(bfloat16_instructions)
    reason = f"has {', '.join(names)}" if names else "has no fast products of bfloat16"
    log.info("compute_dtype = auto: the CPU %s", reason)
    return bool(names)


def bfloat16_instructions() -> list[str]:
    """Return the instruction sets of _BFLOAT16_INSTRUCTIONS by which this CPU gains, sorted.

    [] where XLA may not use them, or the system does not name them as Linux on x86 does.
    """
    # The flag may forbid the instructions that the CPU has.
    if "xla_cpu_max_isa" in os.environ.get("XLA_FLAGS", ""):
        return []
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    pairs = [line.partition(":") for line in reversed(lines)]  # the first CPU's come last and stay
    words = {name.strip(): text.split() for name, _, text in pairs}
    flags, vendors = words.get("flags", []), ["", *words.get("vendor_id", [])]
    gains = _BFLOAT16_INSTRUCTIONS.items()
    return [name for name, vendor in gains if name in flags and vendor in vendors]
