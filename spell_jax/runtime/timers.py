"""Timing of the phases of one thread, and log lines about a long command."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

TICK_S = 10.0
log = logging.getLogger(__name__)


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


class Ticker:
    """Log lines about a long command: one when a phase begins, then one every TICK_S seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._phase, self._last = clock, "", clock()

    def enter(self, phase: str) -> None:
        log.info("%s", phase)
        self._phase, self._last = phase, self._clock()

    def tick(self, text: str, *values: int) -> None:
        """Log the phase and a text with values, at most every TICK_S seconds."""
        if (now := self._clock()) - self._last >= TICK_S:
            log.info("%s: %s", self._phase, text.format(*values))
            self._last = now
