"""Writing beside the work: one thread does what it is given, in order, while its caller goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

# So many things may wait; behind a slower disk the caller waits too, before memory is full.
WAITING = 8


class Background:
    """A thread for work whose result nobody waits for; a context, at whose end all of it is done.

    The first error of it is raised by every `submit` and `flush` behind it, and at the end of the
    context unless that is left by another one. What is handed in is tried all the same.

    Args:
      waiting: how much may wait at once; `submit` waits while there is more. At least 1.
    """

    def __init__(self, waiting: int = WAITING) -> None:
        self._queue: queue.Queue[Callable[[], Any] | None] = queue.Queue(waiting)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, _type: Any, error: BaseException | None, _traceback: Any) -> None:
        self._queue.put(None)
        self._thread.join()
        if error is None:
            self._raise()

    def submit(self, work: Callable[..., Any], *given: Any) -> None:
        """Hands in work(*given), which must not ask a device: programs of several hosts would run
        in other orders."""
        self._queue.put(lambda: work(*given))
        self._raise()

    def flush(self) -> None:
        """Waits until all that was handed in is done."""
        self._queue.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException as error:
                self._error = self._error or error
            self._queue.task_done()
