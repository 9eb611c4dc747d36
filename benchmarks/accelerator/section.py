"""Cases of a section, the setting in which they run, and how a device function is timed."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

Numbers = dict[str, Any]
FAULT = "fault"  # name of a text that says what is wrong with the numbers beside it


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
      name: unique in its section.
      run: the measurement. It returns JSON-able numbers. A text under the name FAULT says that the
        numbers are there but wrong, such as an error above its bound.
      limit: seconds after which the measurement counts as hanging.
      prepare: work that may run in a thread beside the same work of other cases, such as
        compilation. It runs before all cases of the section.
    """

    name: str
    run: Callable[[], Numbers]
    limit: float = 60.0
    prepare: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """The circumstances that a section may depend on.

    Attributes:
      platform: "gpu", "tpu" or "cpu", from jax.
      tiny: whether every size is cut down to what a CPU plays in seconds.
      out: folder for files that a section keeps, such as checkpoints.
      seconds: time that the section has.
      train: folder with weights and clusters for the section `train`, or "".
      before: numbers of the cases played so far, by section and case.
    """

    platform: str
    tiny: bool
    out: pathlib.Path
    seconds: float = 60.0
    train: str = ""
    before: Mapping[str, Mapping[str, Numbers]] = dataclasses.field(default_factory=dict)

    def peak(self, name: str) -> float | None:
        """Return a number of the section `peaks`; None if it was not measured."""
        for numbers in self.before.get("peaks", {}).values():
            if name in numbers:
                return float(numbers[name])
        return None

    def share(self, value: float, peak: str) -> float | None:
        """Divide `value` by a number of the section `peaks`; None if it was not measured."""
        measured = self.peak(peak)
        return value / measured if measured else None


def seconds_of(
    call: Callable[[], Any], batches: int = 5, batch_seconds: float = 0.03, max_seconds: float = 5.0
) -> Numbers:
    """Time a call that dispatches device work, in batches that end with a wait for the device.

    A batch has as many calls as take `batch_seconds`, so that the wait itself does not count. No
    new batch starts after `max_seconds`. The first call, which may compile, is not timed; the
    second one alone is, if it takes more than half of `max_seconds`.

    Returns:
      "seconds" per call (median over batches), "fastest_s", "slowest_s" and "timed_calls".
    """
    jax.block_until_ready(call())
    clock = time.perf_counter()
    jax.block_until_ready(call())
    once = max(time.perf_counter() - clock, 1e-7)  # a clock's resolution, never 0
    # A program that takes seconds must not run six times: the second call then is the measurement.
    calls = max(1, int(batch_seconds / once))
    timed: list[float] = [once] if once > max_seconds / 2 else []
    began = time.perf_counter()
    while len(timed) < batches and (not timed or time.perf_counter() - began < max_seconds - once):
        clock = time.perf_counter()
        for _ in range(calls):  # dispatched without waiting, so that the device never idles
            result = call()
        jax.block_until_ready(result)
        timed.append((time.perf_counter() - clock) / calls)
    return {
        "seconds": statistics.median(timed),
        "fastest_s": min(timed),
        "slowest_s": max(timed),
        "timed_calls": calls * len(timed),
    }
