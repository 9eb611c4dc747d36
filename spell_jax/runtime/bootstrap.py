"""Bootstrap intervals of means (Efron 1979)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SAMPLES = 2000  # the ends of an interval are accurate to about 3 % of its width
_ENDS = (2.5, 97.5)  # percentiles


def resample_means(values: Sequence[float], seed: Sequence[int]) -> np.ndarray:
    """Return the means of SAMPLES samples of the values with replacement, float [SAMPLES]."""
    indices = np.random.default_rng([*seed]).integers(len(values), size=(SAMPLES, len(values)))
    return np.asarray(values, float)[indices].mean(axis=1)


def interval(means: np.ndarray) -> tuple[float, float]:
    """Return the ends of the 95 % interval of resampled means."""
    low, high = np.percentile(means, _ENDS).tolist()
    return low, high
