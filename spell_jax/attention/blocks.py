"""Steps that blockwise kernels share: padding, products and the online softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from spell_jax.attention.kernel import Inputs
from spell_jax.attention.masks import MASKED

LOG2_E = math.log2(math.e)


def pad(x: jax.Array, axis: int, block: int, value: float = 0) -> jax.Array:
    """Pad an axis to whole blocks."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths, constant_values=value)


def pad_inputs(inputs: Inputs, block_q: int, block_k: int) -> Inputs:
    """Pad a row to whole blocks of queries and keys; no query sees a padded key.

    The caller drops the outputs of padded queries, and pads their d_out and delta with 0.
    """
    q, k, v, q_index, k_index, last_query, q_position, last_position = inputs
    more_queries, more_keys = (0, -len(q) % block_q), (0, -len(k) % block_k)

    # Padded row indices and positions repeat the last one, so that the limits of a block do not
    # change.
    def pad_edge(x: jax.Array | None, widths: tuple[int, int]) -> Any:
        return None if x is None else jnp.pad(x, widths, mode="edge")

    return Inputs(
        pad(q, 0, block_q),
        pad(k, 0, block_k),
        pad(v, 0, block_k),
        pad_edge(q_index, more_queries),
        pad_edge(k_index, more_keys),
        # Every row index is above the smallest int32.
        pad(last_query, 0, block_k, jnp.iinfo(jnp.int32).min),
        pad_edge(q_position, more_queries),
        pad_edge(last_position, more_keys),
    )


def dot(a: jax.Array, b: jax.Array, b_transposed: bool = False) -> jax.Array:
    """Multiply a [m, n] by b [n, p] (transposed: [p, n]) into float32, for Pallas kernels."""
    # By default accelerators round float32 factors, TPUs to bfloat16 and NVIDIA GPUs to TF32.
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if b_transposed else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def einsum(spec: str, *arrays: jax.Array) -> jax.Array:
    """Compute an einsum into float32, for kernels in plain XLA."""
    return jnp.einsum(spec, *arrays, preferred_element_type=jnp.float32)


class Softmax(NamedTuple):
    """State of an online softmax over keys, float32."""

    out: jax.Array  # weighted sum of values [..., queries, H]
    top: jax.Array  # running maximum of the scores [..., queries]
    total: jax.Array  # sum of weights [..., queries]

    @classmethod
    def start(cls, shape: tuple[int, ...]) -> Softmax:
        """Return the state for outputs of a shape [..., queries, H] before any key."""
        # The maximum starts above MASKED: a masked score has weight exp(MASKED / 2) = 0 even before
        # the first visible key.
        numbers = shape[:-1]
        return cls(
            jnp.zeros(shape, jnp.float32),
            jnp.full(numbers, MASKED / 2, jnp.float32),
            jnp.zeros(numbers, jnp.float32),
        )

    def add(
        self,
        scores: jax.Array,
        weighted_sum: Callable[[jax.Array], jax.Array],
        base2: bool = False,
    ) -> Softmax:
        """Add keys with scaled scores [..., queries, keys], in base 2 or e; MASKED for unseen ones.

        `weighted_sum` multiplies float32 weights, shaped like the scores, by the keys' values.
        """
        exp = jnp.exp2 if base2 else jnp.exp
        top = jnp.maximum(self.top, jnp.max(scores, axis=-1))
        weights = exp(scores - top[..., None])
        # The weights so far were relative to the old maximum.
        shrink = exp(self.top - top)
        total = self.total * shrink + jnp.sum(weights, axis=-1)
        return Softmax(self.out * shrink[..., None] + weighted_sum(weights), top, total)

    def finish(self, unseeing: float, base2: bool = False) -> tuple[jax.Array, jax.Array]:
        """Return the output and the natural log-sum-exp of the scores.

        The log-sum-exp of a query that saw no key is `unseeing`.
        """
        # A query that saw no key has 0 / 1e-30 = 0 as its output; 0 / 0 would be NaN.
        positive = jnp.maximum(self.total, 1e-30)
        log, unit = (jnp.log2, LOG2_E) if base2 else (jnp.log, 1)
        lse = (self.top + log(positive)) / unit
        return self.out / positive[..., None], jnp.where(self.total > 0, lse, unseeing)
