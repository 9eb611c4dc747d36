"""Advantages of groups and of questioner rows (paper Eq. 3, 8 and 9; spec section 8).

Lists and NumPy arrays are computed in float64 on the host and checked for NaN. JAX arrays and
tracers are computed in float32 with jax.numpy and unchecked, so the functions also run under jit.
"""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from spell_jax.runtime.finite import check_finite

# Added to the deviation: the public code's constant. The paper's quotients (Eq. 3, 8, 9) have none;
# it changes an advantage of unequal binary rewards of G = 8 by less than 4 in a million.
EPSILON = 1e-6

Array = Any  # numpy on the host, jax under jit


def group_advantages(
    rewards: ArrayLike | jax.Array, *, divide_by_deviation: bool = True, ddof: int = 1
) -> Array:
    """Normalize responder and verifier rewards [..., G] per group to advantages [..., G] (Eq. 8).

    An advantage is (reward - group mean) / (deviation + EPSILON); without `divide_by_deviation`,
    the difference alone. The deviation divides the sum of squares by G - `ddof`: 1 for the sample's
    (the paper's code), 0 for the population's (the plain deviation of the equations). Equal rewards
    have advantage exactly 0. A group of one has no statistics: its mean counts as 0 and its
    deviation as 1. Advantages are float32. Raises ValueError if the rewards are a scalar, or a
    reward on the host is not finite.
    """
    xp, values = _as_array(rewards)
    message = "rewards: a scalar; its last axis must be the group"
    chex.assert_shape(values, (..., None), custom_message=message, exception_type=ValueError)
    deviation = 1.0
    if values.shape[-1] > 1:
        # Makes equal rewards 0 first. Their mean may be rounded: seven times .1 has a mean that is
        # not .1, in float32 and in float64.
        values = values - values[..., :1]
        values = values - xp.mean(values, axis=-1, keepdims=True)
        deviation = xp.std(values, axis=-1, ddof=ddof, keepdims=True)
    if divide_by_deviation:
        values = values / (deviation + EPSILON)
    return values.astype(xp.float32)


def questioner_advantages(
    rewards: ArrayLike | jax.Array, tasks: Sequence[str] | None = None, *, ddof: int = 1
) -> Array:
    """Normalize questioner rewards [B] over the batch (Eq. 9) or per task to advantages [B].

    With `tasks`, a name per row, each task is normalized by its own rows, so that a hard task is
    not punished for being hard. A task with a single row is normalized by the whole batch. A batch
    of one row has advantage 0. `ddof` is as in group_advantages. Advantages are float32; `tasks` is
    static under jit. Raises ValueError if rewards are not a vector as long as `tasks`, or one on
    the host is not finite.
    """
    xp, values = _as_array(rewards)
    rows = len(tasks) if tasks is not None else values.size
    message = f"rewards: shape {values.shape}; it must be ({rows},)"
    chex.assert_shape(values, (rows,), custom_message=message, exception_type=ValueError)
    if rows < 2:
        return xp.zeros(values.shape, xp.float32)
    by_batch = group_advantages(values, ddof=ddof)
    if tasks is None:
        return by_batch
    names = np.asarray(tasks)
    members = [np.flatnonzero(names == name) for name in dict.fromkeys(tasks)]
    parts = [group_advantages(values[m], ddof=ddof) if len(m) > 1 else by_batch[m] for m in members]
    return xp.concatenate(parts)[np.argsort(np.concatenate(members))]


def _as_array(rewards: ArrayLike | jax.Array) -> tuple[Any, Array]:
    """Return the rewards' array module (numpy or jax.numpy) and the rewards as its array."""
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(rewards)):
        return jnp, jnp.asarray(rewards, jnp.float32)
    check_finite(rewards, "rewards")
    return np, np.asarray(rewards, np.float64)
