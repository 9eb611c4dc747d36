"""Bootstrap intervals of means (Efron 1979)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# With 2,000 samples the ends of an interval are accurate to about 3 % of its width.
SAMPLES = 2000
_ENDS = (2.5, 97.5)  # percentiles


def resample_means(values: Sequence[float], seed: Sequence[int]) -> np.ndarray:
    """Return the means of SAMPLES samples of the values with replacement, float [SAMPLES]."""
    # A generator of its own: a table that is printed again shows the same interval.
    indices = np.random.default_rng([*seed]).integers(len(values), size=(SAMPLES, len(values)))
    return np.asarray(values, float)[indices].mean(axis=1)


def interval(means: np.ndarray) -> tuple[float, float]:
    """Return the ends (low, high) of the 95 % interval of resampled means [SAMPLES]."""
    # Percentiles, not mean ± 1.96 deviations: an accuracy near 0 or 1 has a skewed interval, and
    # its ends must stay between 0 and 1.
    low, high = np.percentile(means, _ENDS).tolist()
    return low, high
