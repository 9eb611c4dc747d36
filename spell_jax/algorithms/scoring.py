"""What evaluations return: nested shares with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

# {section: {row: {column: (mean, half width of the 95 % interval)}}}
Report = dict[str, dict[str, dict[str, tuple[float, float]]]]


def share(outcomes: Sequence[bool | float]) -> tuple[float, float]:
    """Mean and half width of its normal 95 % interval; ValueError of nothing."""
    if not outcomes:
        raise ValueError("a share of no outcomes")
    mean = sum(outcomes) / len(outcomes)
    variance = sum((x - mean) ** 2 for x in outcomes) / len(outcomes)
    return mean, 1.96 * math.sqrt(variance / len(outcomes))
