"""Timing of the activities of one thread."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping


class PhaseTimer:
    """Seconds by activity; at every moment exactly one activity is running.

    Args:
      clock: function that returns seconds; replaced in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._name = "start"
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, name: str) -> None:
        """Ends the current activity and starts another one."""
        now = self._clock()
        self._seconds[self._name] += now - self._since
        self._name, self._since = name, now

    def reassign(self, seconds: Mapping[str, float]) -> None:
        """Moves seconds from the current activity to the named ones."""
        for name, some in seconds.items():
            self._seconds[name] += some
            self._seconds[self._name] -= some

    def spent(self, name: str) -> float:
        """Seconds of one activity since the last `take`.

        For the current activity, the time since its last `enter` is not included.
        """
        return self._seconds[name]

    def take(self) -> dict[str, float]:
        """Returns and resets the seconds by activity; their sum is the time since the last call."""
        self.enter(self._name)
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken
