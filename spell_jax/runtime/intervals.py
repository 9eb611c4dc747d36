"""95 % intervals of means over questions: Wilson (1927) for shares, a bootstrap for the others."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

# With 2,000 samples the ends of an interval are accurate to about 3 % of its width.
SAMPLES = 2000
_ENDS = (2.5, 97.5)  # percentiles
_Z = 1.959964  # the 97.5 % quantile of the normal distribution


class Estimate(NamedTuple):
    """A mean over questions with the ends of its 95 % interval, in the unit of the values."""

    mean: float
    low: float
    high: float


def estimate(
    values: Sequence[float], seed: Sequence[int] = (0,), is_share: bool = False
) -> Estimate:
    """Estimate the mean of one value per question [N]; ValueError without values.

    `is_share` says that the values are shares of right answers, in [0, 1]: the interval is
    Wilson's. Otherwise it is a bootstrap with this seed.
    """
    if not values:
        raise ValueError("a mean of no values")
    return (
        wilson(math.fsum(values) / len(values), len(values)) if is_share else resample(values, seed)
    )


def is_binary(values: Collection[float]) -> bool:
    """Return whether every value is 0 or 1, as the scores of single answers are."""
    return all(value in (0, 1) for value in values)


def wilson(mean: float, count: int) -> Estimate:
    """Return a share of `count` >= 1 questions with its Wilson interval.

    With several answers per question, `count` still counts questions: the answers to one question
    depend on each other. The interval is then wider than needed, never too narrow.
    """
    # Not mean ± 1.96 deviations, nor a bootstrap: 3 right answers of 3 would have an interval
    # without width, from 1 to 1. Wilson's is from 0.44 to 1.
    spread = _Z * _Z / count
    center = (mean + spread / 2) / (1 + spread)
    half = math.sqrt(spread * mean * (1 - mean) + spread * spread / 4) / (1 + spread)
    # The interval holds the mean and stays in [0, 1]; rounding would break both at 0 and 1.
    return Estimate(mean, min(mean, max(0.0, center - half)), max(mean, min(1.0, center + half)))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Estimate the mean of second - first [N], values 0 or 1, with Newcombe's interval.

    It is method 10 of Newcombe (1998, Statistics in Medicine 17:2635); N must be above 0.
    """
    # As for Wilson's: three questions that all went from wrong to right would have a bootstrap from
    # 1 to 1. Newcombe's interval is from 0.21 to 1.
    count, old, new = len(first), math.fsum(first), math.fsum(second)
    right_twice = math.fsum(a * b for a, b in zip(first, second, strict=True))
    old_share, new_share = wilson(old / count, count), wilson(new / count, count)
    # The correlation of the pairs. A positive one makes the interval narrower, so that it is
    # corrected for continuity.
    product = right_twice * (count - old - new + right_twice)
    product -= (old - right_twice) * (new - right_twice)
    if product > 0:
        product = max(product - count / 2, 0.0)
    scale = math.sqrt(old * (count - old) * new * (count - new))
    correlation = product / scale if scale else 0.0

    def add(a: float, b: float) -> float:
        """Return the distance from the mean to an end, from the distances of both shares."""
        return math.sqrt(a * a - 2 * correlation * a * b + b * b)

    mean = new_share.mean - old_share.mean
    below = add(new_share.mean - new_share.low, old_share.high - old_share.mean)
    above = add(new_share.high - new_share.mean, old_share.mean - old_share.low)
    return Estimate(mean, max(-1.0, mean - below), min(1.0, mean + above))


def resample(values: Sequence[float], seed: Sequence[int]) -> Estimate:
    """Return the mean of values [N] with its bootstrap interval (Efron 1979)."""
    # A generator of its own: a table that is printed again shows the same interval.
    indices = np.random.default_rng([*seed]).integers(len(values), size=(SAMPLES, len(values)))
    means = np.asarray(values, float)[indices].mean(axis=1)
    low, high = np.percentile(means, _ENDS).tolist()
    return Estimate(math.fsum(values) / len(values), low, high)


def mean_of(estimates: Collection[Estimate]) -> Estimate:
    """Return the unweighted mean of independent estimates, at least one."""
    mean = math.fsum(term.mean for term in estimates) / len(estimates)
    # Distances from the means to the ends add up like standard deviations (Newcombe 1998): the
    # ends of skewed intervals keep their skew.
    below = math.hypot(*(term.mean - term.low for term in estimates)) / len(estimates)
    above = math.hypot(*(term.high - term.mean for term in estimates)) / len(estimates)
    return Estimate(mean, mean - below, mean + above)
