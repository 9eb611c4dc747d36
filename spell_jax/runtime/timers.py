"""Where the time of one thread goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping


class Stopwatch:
    """Seconds by what they were spent on: at every moment one thing is going on.

    Args:
      clock: returns seconds; replaced in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._name = "start"
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, name: str) -> None:
        """What is going on from now on."""
        now = self._clock()
        self._seconds[self._name] += now - self._since
        self._name, self._since = name, now

    def spend(self, seconds: Mapping[str, float]) -> None:
        """So many of the seconds of what is going on went to these things."""
        for name, some in seconds.items():
            self._seconds[name] += some
            self._seconds[self._name] -= some

    def spent(self, name: str) -> float:
        """Seconds of one thing since they were taken, of what is going on without the newest."""
        return self._seconds[name]

    def take(self) -> dict[str, float]:
        """Seconds by name since they were taken last, which together are all that have gone by."""
        self.enter(self._name)
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken
