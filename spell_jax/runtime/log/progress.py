"""Progress of a run or command: phase, step, a few numbers, elapsed and remaining time."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from absl import logging as absl_logging
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from spell_jax.runtime import terminal
from spell_jax.runtime.hosts import distributed

log = logging.getLogger(__name__)

# In the moving average of seconds per step. One slow step (a validation, a compilation) should not
# double the remaining time; a lasting change should show within 10 steps.
_NEWEST_WEIGHT = 0.2
_TIMES_A_SECOND = 4  # redraws of the line
_BAR = 30  # maximum width in columns
TICK_S = 10.0  # between two log lines of a Ticker


class Progress:
    """A progress line: live on a terminal, below all other output, otherwise printed at intervals.

    A resumed run has done `start` of `total` > 0 steps (else ValueError). The line goes to `stream`
    (standard error), without a terminal every `plain_every` seconds. Only the first process is
    `enabled`.
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
            raise ValueError(f"total = {total}: must be at least 1 step")
        if not 0 <= start <= total:
            raise ValueError(f"start = {start}: must be 0 to total = {total}")
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        # The line has control sequences of its own; its texts are names of phases and metrics.
        console = Console(file=terminal.raw(self._stream))
        self._plain_every = plain_every
        self._enabled = enabled
        self._clock = clock
        self._began = self._step_began = clock()
        self._step = start
        self._first_step = start + 1
        self._step_seconds: float | None = None
        self._limited: tuple[float, float] | None = None  # start and end of the time limit
        self._has_logged_limit = False  # whether the log says that the time limit is over
        self._last_plain: float | None = None
        self._phase, self._numbers = "", {}
        self._spinner = Spinner("dots")
        self._handlers: list[logging.StreamHandler[TextIO]] = []  # redirected above the line
        self._live: Live | None = None
        if enabled and console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                self,
                console=console,
                refresh_per_second=_TIMES_A_SECOND,
                # Streams that are not this terminal, such as files, are not redirected.
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=self._stream is sys.stderr,
            )

    def update(
        self, step: int, phase: str, numbers: Mapping[str, float | str] | None = None
    ) -> None:
        """Show a phase ("update"), the number of finished steps, and short values by name."""
        now = self._clock()
        if step > self._step:
            newest = (now - self._step_began) / (step - self._step)
            old = self._step_seconds
            # The first step compiles, often for longer than ten steps: the second replaces it.
            if old is not None and self._step > self._first_step:
                newest = old + _NEWEST_WEIGHT * (newest - old)
            self._step_seconds = newest
            self._step, self._step_began = step, now
        self._phase, self._numbers = phase, dict(numbers or {})
        if self._live is not None:
            self._show(self._live)
        elif self._enabled and self._is_due(now):
            self._stream.write("  ".join([self._where(), *self._facts(now)]) + "\n")
            self._stream.flush()
            self._last_plain = now

    def limit(self, seconds: float | None) -> None:
        now = self._clock()
        self._limited = None if seconds is None else (now, now + seconds)

    def is_over(self) -> bool:
        """Return whether the time limit is reached, by the clock of process 0."""
        if self._limited is None:
            return False
        end = self._limited[1]
        # Clocks of hosts differ: if each decided alone, one would stop while another waits for it.
        is_late = distributed.broadcast(lambda: self._clock() >= end)
        if is_late and self._enabled and not self._has_logged_limit:
            self._has_logged_limit = True
            seconds = self._limited[1] - self._limited[0]
            log.info("max_minutes = %g: time is up, no further rollout starts", seconds / 60)
        return is_late

    def close(self) -> None:
        if self._live is not None:
            for handler in self._handlers:
                handler.setStream(self._stream)
            self._handlers.clear()
            self._live.stop()

    def _show(self, live: Live) -> None:
        if not live.is_started:
            live.start()
            terminal.guard()  # escapes output that is redirected above the line
            # Log handlers hold the stream itself, and would write into the middle of the line.
            absl_handler = absl_logging.get_absl_handler().python_handler
            for handler in (*logging.getLogger().handlers, absl_handler):
                if isinstance(handler, logging.StreamHandler) and handler.stream is self._stream:
                    handler.setStream(sys.stderr)
                    self._handlers.append(handler)
        live.refresh()

    def _is_due(self, now: float) -> bool:
        # A log without a terminal always has the first and the last line.
        if self._last_plain is None or self._step >= self._total:
            return True
        return now - self._last_plain >= self._plain_every

    def _where(self) -> str:
        return f"{self._phase:<8} step {self._step:>{len(str(self._total))}}/{self._total}"

    def _facts(self, now: float) -> list[str]:
        facts = [f"{name} {_short(value)}" for name, value in self._numbers.items()]
        facts.append(f"{format_seconds(now - self._began)} gone")
        if self._step_seconds is not None:
            # The time since the last step counts as done, so that the display counts down within a
            # step.
            left = self._step_seconds * (self._total - self._step) - (now - self._step_began)
            if self._limited is not None:
                left = min(left, self._limited[1] - now)
            facts.append(f"{format_seconds(max(left, 0.0))} left")
        return facts

    def _share(self, now: float) -> float:
        """Return the finished share of the run: by steps or by time limit, whichever is larger."""
        began, end = self._limited or (now, math.inf)
        return min(max(self._step / self._total, (now - began) / (end - began)), 1.0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the current line, which never wraps."""
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


def format_seconds(seconds: float) -> str:
    """Format seconds (>= 0) as m:ss or h:mm:ss, such as 1:05 or 2:00:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
