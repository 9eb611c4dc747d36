"""What an attention kernel is, and the one gradient rule around any of them.

1. A kernel is a pair of functions. `forward` gives the output and the log-sum-exp of each query's
   scores; `backward` takes the merged log-sum-exp of all parts, so that the keys it is given may be
   a part of what the queries see.
2. Kernels compose: what is made of one and meets the keys of other devices too (context.py) is
   a kernel again.
3. No kernel differentiates its own log-sum-exp: the rule here is the only one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

KEPT = "attention"  # what remat policies call the output and its log-sum-exp


class Kernel(NamedTuple):
    """Attention of packed rows on one device; R = N / K query heads a key head.

    Attributes:
      forward: (q [B, Tq, K, R, H], k, v [B, Tk, K, H], q_index [B, Tq], k_index, last_query
        [B, Tk]) -> (out as q, lse float32 [B, K, R, Tq]). A query that sees nothing gets zeros, and
        an lse of 1e30.
      backward: (the same six, lse, delta float32 [B, K, R, Tq], d_out as q) -> (dq, dk, dv), these
        keys' share; delta is the sum over H of d_out * out.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function for one row applied to one after the other."""
    return lambda *rows: jax.lax.map(lambda row: function(*row), rows)


def vmapped(forward: Callable[..., Any], backward: Callable[..., Any]) -> Kernel:
    """A kernel of functions for one row: the rows are one batch."""
    return Kernel(jax.vmap(forward), jax.vmap(backward))


def row_loop(forward: Callable[..., Any], backward: Callable[..., Any]) -> Kernel:
    """A kernel of functions for one row: one row after the other, as their loops differ in
    length."""
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
    """What kernel.forward computes, differentiable by q, k and v.

    Args:
      kernel: which one; one object, or compiled programs are not found again.
      q: [B, Tq, N, H]; query head n reads key head n // (N / K).
      k, v: [B, Tk, K, H].
      q_index: int32 [B, Tq], row indices of the queries.
      k_index, last_query: int32 [B, Tk], of the keys; see masks.py.

    Returns:
      [B, Tq, N, H] in q's dtype; zeros for a query that sees nothing.
    """
    return _forward(kernel, q, k, v, q_index, k_index, last_query)[0]


def _forward(kernel: Kernel, q, k, v, *indices):
    out, lse = kernel.forward(_grouped(q, k), k, v, *indices)
    # Named here, so that a remat policy that keeps them need not run the kernel again.
    out, lse = checkpoint_name(out.reshape(q.shape), KEPT), checkpoint_name(lse, KEPT)
    return out, (q, k, v, *indices, out, lse)


def _backward(kernel: Kernel, kept, d_out):
    q, k, v, *indices, out, lse = kept
    grouped, d_out = _grouped(q, k), _grouped(d_out.astype(q.dtype), k)
    delta = jnp.einsum("bqkrh,bqkrh->bkrq", d_out.astype(jnp.float32), _grouped(out, k))
    dq, dk, dv = kernel.backward(grouped, k, v, *indices, lse, delta, d_out)
    return dq.reshape(q.shape), dk, dv, None, None, None


def _grouped(x: jax.Array, k: jax.Array) -> jax.Array:
    """[B, T, N, H] as [B, T, K, R, H]."""
    rows, time, _, size = x.shape
    return x.reshape(rows, time, k.shape[2], -1, size)


attend.defvjp(_forward, _backward)
