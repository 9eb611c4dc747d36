"""Attention kernel interface, and the one custom VJP used around every kernel.

1. A kernel is a pair of functions. `forward` returns the output and the log-sum-exp of each
   query's scores. `backward` takes the log-sum-exp merged over all keys, so that it also works on
   a part of the keys that the queries see.
2. Kernels compose: a kernel wrapped to also read the keys of other devices (context.py) is again
   a kernel.
3. No kernel differentiates its own log-sum-exp. The gradient rule in this file is the only one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

KEPT = "attention"  # checkpoint name of the output and its log-sum-exp


class Kernel(NamedTuple):
    """Forward and backward functions of attention for packed rows on one device.

    Shapes use R = N / K, the query heads per key head.

    Attributes:
      forward: function of (q [B, Tq, K, R, H], k [B, Tk, K, H], v [B, Tk, K, H], q_index [B, Tq],
        k_index [B, Tk], last_query [B, Tk]) that returns (out like q, lse float32 [B, K, R, Tq]).
        A query that sees no key gets output 0 and lse 1e30.
      backward: function of (the same six arrays, lse, delta float32 [B, K, R, Tq], d_out like q)
        that returns (dq, dk, dv), the contribution of these keys. delta is the sum over H of
        d_out * out.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply a single-row function to the rows of a batch one after the other."""
    return lambda *rows: jax.lax.map(lambda row: function(*row), rows)


def vmapped(forward: Callable[..., Any], backward: Callable[..., Any]) -> Kernel:
    """Make a kernel from single-row functions by vmap."""
    return Kernel(jax.vmap(forward), jax.vmap(backward))


def row_loop(forward: Callable[..., Any], backward: Callable[..., Any]) -> Kernel:
    """Make a kernel from single-row functions by a loop, for rows whose loop lengths differ."""
    return Kernel(over_rows(forward), over_rows(backward))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    kernel: Kernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_index: jax.Array,
    k_index: jax.Array,
    last_query: jax.Array,
) -> jax.Array:
    """Differentiable attention: kernel.forward, with gradients for q, k and v.

    Args:
      kernel: the kernel. Pass the same object every time, or jit compiles the program again.
      q: queries [B, Tq, N, H]; query head n reads key head n // (N / K).
      k: keys [B, Tk, K, H].
      v: values [B, Tk, K, H].
      q_index: row indices of the queries, int32 [B, Tq].
      k_index: row indices of the keys, int32 [B, Tk].
      last_query: the mask, int32 [B, Tk]; see masks.py.

    Returns:
      [B, Tq, N, H] in q's dtype, with zeros for queries that see no key.
    """
    return _forward(kernel, q, k, v, q_index, k_index, last_query)[0]


def _forward(kernel: Kernel, q, k, v, *indices):
    out, lse = kernel.forward(_grouped(q, k), k, v, *indices)
    # A remat policy that saves these names need not run the kernel again.
    out, lse = checkpoint_name(out.reshape(q.shape), KEPT), checkpoint_name(lse, KEPT)
    return out, (q, k, v, *indices, out, lse)


def _backward(kernel: Kernel, kept, d_out):
    q, k, v, *indices, out, lse = kept
    grouped, d_out = _grouped(q, k), _grouped(d_out.astype(q.dtype), k)
    delta = jnp.einsum("bqkrh,bqkrh->bkrq", d_out.astype(jnp.float32), _grouped(out, k))
    dq, dk, dv = kernel.backward(grouped, k, v, *indices, lse, delta, d_out)
    return dq.reshape(q.shape), dk, dv, None, None, None


def _grouped(x: jax.Array, k: jax.Array) -> jax.Array:
    """Reshape [B, T, N, H] to [B, T, K, R, H]."""
    rows, time, _, size = x.shape
    return x.reshape(rows, time, k.shape[2], -1, size)


attend.defvjp(_forward, _backward)
