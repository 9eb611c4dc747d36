"""Checks that numbers from files and from rules of the user are finite numbers."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

# Largest float32 is 3.4028e38: a larger number of a file would become infinite in float32.
LARGEST_FLOAT32 = 3.4e38


def is_finite(value: Any, largest: float = sys.float_info.max) -> bool:
    """Return whether a value is a number, neither NaN nor beyond `largest`."""
    value = value.item() if isinstance(value, np.generic) else value
    # False for NaN too: every comparison with NaN is false.
    return isinstance(value, int | float) and abs(value) <= largest


def check_finite(values: ArrayLike, name: str) -> None:
    """Raise ValueError for the first value that is no finite number, such as None, "1" or NaN."""
    # A rule of the user may return anything. A conversion to float is no check, because NumPy takes
    # None for NaN and "1" for 1: so the kind of the array counts.
    try:
        array = np.asarray(values)
    except ValueError as error:  # lists of several lengths
        raise ValueError(f"{name}: {values!r:.200} must be finite numbers ({error})") from error
    if array.dtype.kind in "biuf" and np.isfinite(array.astype(np.float64)).all():
        return
    for index, value in enumerate(np.asarray(values, object).ravel().tolist()):
        if not is_finite(value):
            raise ValueError(f"{name}[{index}] = {value!r}: must be a finite number")
