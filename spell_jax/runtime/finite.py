"""Finite numbers: checks of what files and rules of the user give, and JSON without NaN."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
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


def finite_or_none(value: Any) -> tuple[Any, int]:
    """Return `value` as plain JSON, and the number of its non-finite numbers, which become None.

    Accepts dataclasses, mappings, sequences, numpy or jax numbers and arrays; else TypeError.
    """
    # JSON has no NaN and no infinity: a strict reader of another language would refuse the line.
    if value is None or isinstance(value, str | bool | int):
        return value, 0
    if isinstance(value, float):
        return (value, 0) if math.isfinite(value) else (None, 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return finite_or_none({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        items, count = finite_or_none(list(value.values()))
        return dict(zip(map(str, value), items, strict=True)), count
    if isinstance(value, list | tuple):
        pairs = [finite_or_none(item) for item in value]
        return [item for item, _ in pairs], sum(count for _, count in pairs)
    if (to_python := getattr(value, "tolist", None)) is not None:
        return finite_or_none(to_python())
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")
