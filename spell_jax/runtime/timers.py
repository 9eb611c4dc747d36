"""Timing of the phases of one thread."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping


class PhaseTimer:
    """Seconds by phase; at every moment exactly one phase is running."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        # A first phase from the beginning: the seconds of all phases add up to the time that
        # passed.
        self._name = "start"
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, name: str) -> None:
        now = self._clock()
        self._seconds[self._name] += now - self._since
        self._name, self._since = name, now

    def reassign(self, seconds: Mapping[str, float]) -> None:
        """Move seconds from the current phase to the named phases."""
        for name, value in seconds.items():
            self._seconds[name] += value
            self._seconds[self._name] -= value

    def spent(self, name: str) -> float:
        """Return a phase's seconds since the last `take`, less the time since the last `enter`."""
        return self._seconds[name]

    def take(self) -> dict[str, float]:
        """Return and reset the seconds by phase; their sum is the time since the last call."""
        # Entering the current phase again adds its seconds until now.
        self.enter(self._name)
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
