"""One line that says where a run is: phase, step, a few numbers, time gone, time left."""

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

import numpy as np
from jax.experimental import multihost_utils

# Weight of the newest step in the moving average of the seconds a step. One slow step (a
# validation, a compilation) should not double the time left, and a lasting change should show in
# ten steps.
_NEWEST_WEIGHT = 0.2


class Progress:
    """A progress line, rewritten in place on a terminal, else printed every so often.

    Args:
      total: steps of the whole run, > 0.
      start: steps done before this process began (a resumed run); 0 <= start <= total.
      stream: where it goes; standard error if not given.
      plain_every: seconds between plain lines where there is no terminal.
      enabled: False prints nothing (every process but the first).
      clock: returns seconds; replaced in tests.

    Raises:
      ValueError: total or start is out of range.
    """

    def __init__(
        self,
        total: int,
        start: int = 0,
        stream: TextIO | None = None,
        plain_every: float = 30.0,
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if total < 1:
            raise ValueError(f"total is {total}, want at least 1 step")
        if not 0 <= start <= total:
            raise ValueError(f"start is {start}, want 0 to total, which is {total}")
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._in_place = self._stream.isatty()
        self._plain_every = plain_every
        self._enabled = enabled
        self._clock = clock
        self._began = self._step_began = clock()
        self._step = start
        self._first_step = start + 1
        self._seconds_a_step: float | None = None
        self._deadline: float | None = None
        self._last_plain: float | None = None
        self._open_line = False

    def update(
        self, step: int, phase: str, numbers: Mapping[str, float | str] | None = None
    ) -> None:
        """Shows the phase that is going on and the steps that are done.

        Args:
          step: steps done; may repeat while the phases of the next step go by.
          phase: a word or two, such as "play" or "learn".
          numbers: short values to show, such as {"solved": 0.43}.
        """
        now = self._clock()
        if step > self._step:
            newest = (now - self._step_began) / (step - self._step)
            old = self._seconds_a_step
            # The first step compiles, often for longer than ten others: the second replaces it.
            if old is None or self._step <= self._first_step:
                self._seconds_a_step = newest
            else:
                self._seconds_a_step = old + _NEWEST_WEIGHT * (newest - old)
            self._step, self._step_began = step, now
        if not self._enabled:
            return
        line = self._line(phase, numbers or {}, now)
        if self._in_place:
            # One column stays free: a full line would wrap and could not be overwritten.
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r" + line[:width] + "\x1b[K")
            self._open_line = True
        elif self._is_due(now):
            self._stream.write(line + "\n")
            self._last_plain = now
        self._stream.flush()

    def limit(self, seconds: float | None) -> None:
        """From now on so many seconds are left, whatever the steps (None: as many as they take)."""
        self._deadline = None if seconds is None else self._clock() + seconds

    def is_over(self) -> bool:
        """Whether they are gone, by the clock of process 0: all processes end at the same step."""
        if self._deadline is None:
            return False
        late = np.array(self._clock() >= self._deadline)
        return bool(multihost_utils.broadcast_one_to_all(late))

    def close(self) -> None:
        """Leaves the line standing and moves to the next one."""
        if self._open_line:
            self._stream.write("\n")
            self._stream.flush()
            self._open_line = False

    def _is_due(self, now: float) -> bool:
        if self._last_plain is None or self._step >= self._total:
            return True
        return now - self._last_plain >= self._plain_every

    def _line(self, phase: str, numbers: Mapping[str, float | str], now: float) -> str:
        parts = [f"{phase:<8} step {self._step:>{len(str(self._total))}}/{self._total}"]
        parts += [f"{name} {_short(value)}" for name, value in numbers.items()]
        parts.append(f"{format_seconds(now - self._began)} gone")
        if self._seconds_a_step is not None:
            # The current step's seconds so far are spent; at worst it ends right now.
            left = self._seconds_a_step * (self._total - self._step) - (now - self._step_began)
            if self._deadline is not None:
                left = min(left, self._deadline - now)
            parts.append(f"{format_seconds(max(left, 0.0))} left")
        return "  ".join(parts)


def format_seconds(seconds: float) -> str:
    """Seconds (>= 0) as m:ss or h:mm:ss, such as 1:05 or 2:00:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"
