"""Peaks of the device: products, copies and calls, the denominators of all other sections."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from benchmarks.accelerator.section import Case, Numbers, Setting, seconds_of

# (name, dtype, precision) of the products. On NVIDIA GPUs a float32 product of the default
# precision runs on the tensor cores with 10 bits of mantissa (TF32).
_PRODUCTS = (
    ("bfloat16", jnp.bfloat16, "default"),
    ("float32", jnp.float32, "highest"),
    ("float32_default", jnp.float32, "default"),
)
_ROUND_TRIPS = 200


def cases(setting: Setting) -> Sequence[Case]:
    side = 256 if setting.tiny else 8192  # large enough for products to be bound by operations
    products = [
        Case(f"gemm_{name}", _product(side, name, dtype, precision))
        for name, dtype, precision in _PRODUCTS
    ]
    return [
        *products,
        Case("copy", lambda: _copy(2**20 if setting.tiny else 2**30)),
        Case("calls", _calls),
    ]


def _product(side: int, name: str, dtype, precision: str):
    """Make a function that times the product of two random square matrices in their dtype."""

    def run() -> Numbers:
        keys = jax.random.split(jax.random.key(0))
        a, b = (jax.random.normal(key, (side, side), dtype) for key in keys)
        multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
        timed = seconds_of(lambda: multiply(a, b))
        return {f"{name}_tflops": 2 * side**3 / timed["seconds"] / 1e12, **timed}

    return run


def _copy(elements: int) -> Numbers:
    """Time a bfloat16 copy, and y = x + 1 by XLA; GB/s count bytes read and bytes written."""
    x = jax.random.normal(jax.random.key(0), (elements,), jnp.bfloat16)
    copy, add = jax.jit(jnp.copy), jax.jit(lambda x: x + 1)
    seconds = [seconds_of(lambda f=f: f(x))["seconds"] for f in (copy, add)]
    # 2 bytes read and 2 written for each element.
    rates = [4 * elements / s / 1e9 for s in seconds]
    return dict(zip(("copy_gb_per_s", "add_gb_per_s"), rates, strict=True))


def _calls() -> Numbers:
    """Time a tiny program: a call in a batch, and a round trip with the result on the host."""
    add = jax.jit(lambda x: x + 1)
    x = jax.device_put(jnp.zeros((), jnp.int32))
    # Calls in a batch overlap on the device; a round trip waits for each result.
    dispatched = seconds_of(lambda: add(x))
    clock = time.perf_counter()
    for _ in range(_ROUND_TRIPS):
        jax.device_get(add(x))
    waited = (time.perf_counter() - clock) / _ROUND_TRIPS
    return {"call_us": 1e6 * dispatched["seconds"], "round_trip_us": 1e6 * waited}
