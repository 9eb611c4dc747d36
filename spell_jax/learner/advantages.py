"""Advantages, on the host, in float32 (paper Eq. 3, 8 and 9; spec section 8)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

EPSILON = 1e-6  # added to the deviation


def group_advantages(
    rewards: ArrayLike, *, divide_by_deviation: bool = True
) -> NDArray[np.float32]:
    """Rewards [..., G] to advantages [..., G]: distance from the group's mean in its deviations.

    Eq. 8, for responder and verifier. The deviation is the sample deviation (ddof 1) plus 1e-6. A
    group of one has no statistics: it counts as mean 0, deviation 1. With `divide_by_deviation`
    off only the mean is taken off. Raises ValueError for a reward that is not finite or a scalar.
    """
    values = _checked(rewards)
    if values.ndim == 0:
        raise ValueError("rewards: a scalar; its last axis must be the group")
    deviation = np.ones_like(values)
    if values.shape[-1] > 1:
        values = values - values.mean(axis=-1, keepdims=True)
        deviation = values.std(axis=-1, ddof=1, keepdims=True)
    if divide_by_deviation:
        values = values / (deviation + EPSILON)
    return values.astype(np.float32)


def questioner_advantages(rewards: ArrayLike, tasks: Sequence[str]) -> NDArray[np.float32]:
    """Rewards [B] of questioner rows and their task names [B] to advantages [B] (Eq. 9, by task).

    Each task is normalized by its own rows, so that a hard task is not punished for being hard. A
    task with a single row is normalized by the whole batch; a batch of one row gets 0.
    Raises ValueError for lengths that differ or a reward that is not finite.
    """
    values = _checked(rewards)
    if values.shape != (len(tasks),):
        raise ValueError(f"rewards: shape {values.shape}; it must be ({len(tasks)},), as tasks")
    if len(tasks) < 2:
        return np.zeros(values.shape, np.float32)
    advantages = group_advantages(values)  # for the tasks with a single row
    names = np.asarray(tasks)
    for name in dict.fromkeys(tasks):
        rows = names == name
        if rows.sum() > 1:
            advantages[rows] = group_advantages(values[rows])
    return advantages


def _checked(rewards: ArrayLike) -> NDArray[np.float64]:
    """Float64: the mean of equal rewards is then exact enough for an advantage of 0."""
    values = np.asarray(rewards, np.float64)
    if not np.isfinite(values).all():
        raise ValueError("rewards: NaN or infinity among them; every reward must be finite")
    return values
