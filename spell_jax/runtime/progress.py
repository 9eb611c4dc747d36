"""One line that says where a run is: phase, step, a few numbers, time gone, time left.

On a terminal it stands below everything else and moves (rich); elsewhere, in a file or a pipe, a
plain line is printed every so often.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

import numpy as np
from absl import logging as absl_logging
from jax.experimental import multihost_utils
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

# Weight of the newest step in the moving average of the seconds a step. One slow step (a
# validation, a compilation) should not double the time left, and a lasting change should show in
# ten steps.
_NEWEST_WEIGHT = 0.2
_TIMES_A_SECOND = 4  # that the line is drawn
_BAR = 30  # columns at most


class Progress:
    """A progress line, at the foot of a terminal, else printed every so often.

    What is logged or printed on the same terminal meanwhile stands above it.

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
        self._plain_every = plain_every
        self._enabled = enabled
        self._clock = clock
        self._began = self._step_began = clock()
        self._step = start
        self._first_step = start + 1
        self._seconds_a_step: float | None = None
        self._limited: tuple[float, float] | None = None  # from when to when
        self._last_plain: float | None = None
        self._phase, self._numbers = "", {}
        self._spinner = Spinner("dots")
        console = Console(file=self._stream)
        self._handlers: list[logging.StreamHandler[TextIO]] = []  # whose logs were led above it
        self._live: Live | None = None
        if enabled and console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                self,
                console=console,
                refresh_per_second=_TIMES_A_SECOND,
                # What goes elsewhere, as into a file, stays as it is.
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=self._stream is sys.stderr,
            )

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
        self._phase, self._numbers = phase, dict(numbers or {})
        if self._live is not None:
            self._show(self._live)
        elif self._enabled and self._is_due(now):
            self._stream.write("  ".join([self._where(), *self._facts(now)]) + "\n")
            self._stream.flush()
            self._last_plain = now

    def limit(self, seconds: float | None) -> None:
        """From now on so many seconds are left, whatever the steps (None: as many as they take)."""
        now = self._clock()
        self._limited = None if seconds is None else (now, now + seconds)

    def is_over(self) -> bool:
        """Whether they are gone, by the clock of process 0: all processes end at the same step."""
        if self._limited is None:
            return False
        late = np.array(self._clock() >= self._limited[1])
        return bool(multihost_utils.broadcast_one_to_all(late))

    def close(self) -> None:
        """Leaves the line standing and moves to the next one."""
        if self._live is not None:
            for handler in self._handlers:
                handler.setStream(self._stream)
            self._handlers.clear()
            self._live.stop()

    def _show(self, live: Live) -> None:
        """Draws the line, and from the first time on leads above it what handlers of logs, which
        hold the stream itself, write there."""
        if not live.is_started:
            live.start()
            every = [*logging.getLogger().handlers, absl_logging.get_absl_handler().python_handler]
            for handler in every:
                if isinstance(handler, logging.StreamHandler) and handler.stream is self._stream:
                    handler.setStream(sys.stderr)
                    self._handlers.append(handler)
        live.refresh()

    def _is_due(self, now: float) -> bool:
        if self._last_plain is None or self._step >= self._total:
            return True
        return now - self._last_plain >= self._plain_every

    def _where(self) -> str:
        return f"{self._phase:<8} step {self._step:>{len(str(self._total))}}/{self._total}"

    def _facts(self, now: float) -> list[str]:
        facts = [f"{name} {_short(value)}" for name, value in self._numbers.items()]
        facts.append(f"{format_seconds(now - self._began)} gone")
        if self._seconds_a_step is not None:
            # The current step's seconds so far are spent; at worst it ends right now.
            left = self._seconds_a_step * (self._total - self._step) - (now - self._step_began)
            if self._limited is not None:
                left = min(left, self._limited[1] - now)
            facts.append(f"{format_seconds(max(left, 0.0))} left")
        return facts

    def _share(self, now: float) -> float:
        """Of the run that is done, by its steps or by its limited time: whichever ends it first."""
        done = self._step / self._total
        if self._limited is not None:
            began, end = self._limited
            done = max(done, (now - began) / (end - began))
        return min(done, 1.0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The line as it is now; one line, however narrow the terminal."""
        now = self._clock()
        facts = "  ".join(self._facts(now))
        grid = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(2):
            grid.add_column(no_wrap=True, overflow="crop")
        where = Text(self._where(), "bold", no_wrap=True)
        room = options.max_width - len(where) - len(facts) - 8
        bar = ProgressBar(1.0, self._share(now), width=max(0, min(_BAR, room)))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, overflow="crop")
        grid.add_row(self._spinner, where, bar, Text(facts, no_wrap=True))
        yield grid


def format_seconds(seconds: float) -> str:
    """Seconds (>= 0) as m:ss or h:mm:ss, such as 1:05 or 2:00:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
