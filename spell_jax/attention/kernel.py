"""Attention kernel interface, and the one custom VJP used around every kernel.

`backward` takes the log-sum-exp merged over all keys, so that it also works on a part of the keys
that the queries see. Kernels compose: a wrapper that adds the keys of other devices (context.py) is
again a kernel. No kernel differentiates its own log-sum-exp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from spell_jax.runtime.bits import as_bits, from_bits

CHECKPOINT_NAME = "attention"  # checkpoint name of the output and its log-sum-exp


class Inputs(NamedTuple):
    """Queries and keys of a row, or of a part of a row; Kernel adds a leading axis B.

    Query i sees key j iff k_index[j] <= q_index[i] <= last_query[j], and in a layer with a window
    q_position[i] <= last_position[j]; see masks.py. Indices and positions are int32.

    Attributes:
      q: queries [Tq, K, R, H], with R = N / K query heads per key head.
      k: keys [Tk, K, H], in q's dtype.
      v: values [Tk, K, H], in q's dtype.
      q_index: row indices of the queries, [Tq], in any order.
      k_index: row indices of the keys, [Tk], in any order.
      last_query: mask, [Tk].
      q_position: positions of the queries, [Tq]; None in layers without a window.
      last_position: last position of a query that sees the key, [Tk]; None like `q_position`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_index: jax.Array
    k_index: jax.Array
    last_query: jax.Array
    q_position: jax.Array | None = None
    last_position: jax.Array | None = None

    @property
    def of_queries(self) -> tuple[jax.Array, ...]:
        """Numbers of each query that decide what the query sees; see masks.sees."""
        return tuple(x for x in (self.q_index, self.q_position) if x is not None)

    @property
    def of_keys(self) -> tuple[jax.Array, ...]:
        """Numbers of each key that decide which queries see the key; see masks.sees."""
        numbers = self.k_index, self.last_query, self.last_position
        return tuple(x for x in numbers if x is not None)


class Kernel(NamedTuple):
    """Forward and backward functions of attention for packed rows on one device.

    Attributes:
      forward: function of Inputs that returns (out like q, lse float32 [B, K, R, Tq]), where lse is
        the log-sum-exp of the scaled scores. A query that sees no key gets output 0 and lse 1e30.
      backward: function of (Inputs, lse, delta float32 [B, K, R, Tq], d_out like q) that returns
        (dq, dk, dv), the contribution of the keys in Inputs. lse is over all keys that a query
        attends to; delta is the sum over H of d_out * out.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply a single-row function to the rows of a batch in a loop."""

    # The loop cuts a row out of every array, hence bits (runtime/bits.py).
    def on_row(row: tuple[Any, ...]) -> Any:
        return jax.tree.map(as_bits, function(*jax.tree.map(from_bits, row)))

    return lambda *rows: jax.tree.map(from_bits, jax.lax.map(on_row, jax.tree.map(as_bits, rows)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    kernel: Kernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_index: jax.Array,
    k_index: jax.Array,
    last_query: jax.Array,
    q_position: jax.Array | None = None,
    last_position: jax.Array | None = None,
) -> jax.Array:
    """Compute kernel.forward, differentiable in q, k and v.

    Arrays are as in Inputs with a leading axis B, but q and the result are [B, Tq, N, H]; query
    head n reads key head n // (N / K). Pass the same kernel object every time, or jit compiles the
    program again.
    """
    indices = q_index, k_index, last_query, q_position, last_position
    return _forward(kernel, q, k, v, *indices)[0]


def _forward(kernel: Kernel, q, k, v, *indices):
    out, lse = kernel.forward(Inputs(_grouped(q, k), k, v, *indices))
    # A remat policy that saves these names need not run the kernel again.
    out, lse = (
        checkpoint_name(out.reshape(q.shape), CHECKPOINT_NAME),
        checkpoint_name(lse, CHECKPOINT_NAME),
    )
    # Residuals as bits: the loop over layers stacks them and cuts them out again.
    return out, (*map(as_bits, (q, k, v, out)), lse, *indices)


def _backward(kernel: Kernel, residuals, d_out):
    (q, k, v, out), (lse, *indices) = map(from_bits, residuals[:4]), residuals[4:]
    inputs, d_out = Inputs(_grouped(q, k), k, v, *indices), _grouped(d_out.astype(q.dtype), k)
    # The row sum of FlashAttention-2 (arXiv:2307.08691, Algorithm 2). It equals the sum of weight
    # times gradient over all keys, of which a kernel may have only a part.
    delta = jnp.einsum("bqkrh,bqkrh->bkrq", d_out.astype(jnp.float32), _grouped(out, k))
    dq, dk, dv = kernel.backward(inputs, lse, delta, d_out)
    return dq.reshape(q.shape), dk, dv, *[None] * len(indices)


def _grouped(x: jax.Array, k: jax.Array) -> jax.Array:
    """Reshape [B, T, N, H] to [B, T, K, R, H]."""
    rows, time, _, size = x.shape
    return x.reshape(rows, time, k.shape[2], -1, size)


attend.defvjp(_forward, _backward)
