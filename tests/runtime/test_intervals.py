"""Tests of 95 % intervals: Wilson's for shares, Newcombe's for pairs of them, a bootstrap."""

import math

import numpy as np
import pytest

from spell_jax.runtime import intervals
from spell_jax.runtime.intervals import Estimate


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Published values: Newcombe (1998), table I, score method without continuity correction.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_intervals_are_those_of_the_literature(right, count, low, high):
    share = intervals.wilson(right / count, count)
    assert share.mean == right / count
    assert share[1:] == pytest.approx((low, high), abs=6e-5)


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_intervals_of_none_and_all_have_a_width(count):
    """A bootstrap of 3 right answers of 3 is from 1 to 1."""
    none, every = (intervals.estimate([x] * count, is_share=True) for x in (0.0, True))
    assert none.mean == none.low == 0.0 and none.high == pytest.approx(1 - every.low)
    assert every.mean == every.high == 1.0 and every.low == pytest.approx(
        count / (count + 3.8415), abs=1e-4
    )


def paired(right: int, lost: int, gained: int, wrong: int) -> tuple[list[float], list[float]]:
    """Make scores of questions from the numbers of right ones, before and after."""
    pairs = [(1, 1)] * right + [(1, 0)] * lost + [(0, 1)] * gained + [(0, 0)] * wrong
    first, second = zip(*pairs, strict=True)
    return list(map(float, first)), list(map(float, second))


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    # Published values: Newcombe (1998, Statistics in Medicine 17:2635), method 10.
    [
        ((36, 2, 12, 0), 0.0569, 0.3404),
        ((20, 2, 12, 16), 0.0562, 0.3292),
        ((54, 0, 0, 0), -0.0664, 0.0664),
    ],
)
def test_paired_intervals_are_those_of_the_literature(counts, low, high):
    gap = intervals.paired_difference(*paired(*counts))
    assert gap.mean == pytest.approx((counts[2] - counts[1]) / sum(counts))
    assert gap[1:] == pytest.approx((low, high), abs=6e-5)
    mirrored = intervals.paired_difference(*reversed(paired(*counts)))
    assert mirrored == pytest.approx((-gap.mean, -gap.high, -gap.low))


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_paired_intervals_of_equal_differences_have_a_width(count):
    every = intervals.paired_difference([0.0] * count, [1.0] * count)
    # Two shares at their ends are independent: their distances add up as squares.
    assert every == pytest.approx(
        (1.0, 1 - math.sqrt(2) * 3.8415 / (count + 3.8415), 1.0), abs=1e-4
    )
    none = intervals.paired_difference([1.0] * count, [1.0] * count)
    assert none.mean == 0 and none.high == -none.low > 0.003


def test_means_of_scores_between_0_and_1_are_resampled():
    values = np.random.default_rng(0).random(400).tolist()
    mean = intervals.estimate(values)
    half = 1.96 * float(np.std(values)) / math.sqrt(400)
    assert mean == pytest.approx((np.mean(values), mean.mean - half, mean.mean + half), abs=0.003)
    assert mean == intervals.estimate(values) != intervals.estimate(values, (1,))
    # As shares of right answers, with which only the number of questions counts.
    assert intervals.estimate(values, is_share=True) == intervals.wilson(mean.mean, 400)


def test_mean_of_estimates_keeps_the_skew_of_its_parts():
    parts = [Estimate(0.5, 0.4, 0.7), Estimate(1.0, 0.6, 1.0)]
    expected = 0.75, 0.75 - math.hypot(0.1, 0.4) / 2, 0.75 + 0.2 / 2
    assert intervals.mean_of(parts) == pytest.approx(expected)
    # The mean of two independent ones is narrower by sqrt(2).
    share = intervals.wilson(0.3, 200)
    mean = intervals.mean_of([share, share])
    assert mean.high - mean.low == pytest.approx((share.high - share.low) / math.sqrt(2))


def test_a_mean_of_no_values_is_rejected():
    with pytest.raises(ValueError, match="a mean of no values"):
        intervals.estimate([])
