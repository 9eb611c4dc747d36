"""Background work on one thread, in the order of submission."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

# Queue length. If the disk is slower, the caller blocks before memory is full.
WAITING = 8


class Background:
    """A thread for work whose result is not needed; a context that ends when all work is done.

    The first error is raised by every later `submit` and `flush`, and at the end of the context
    unless another error ends it. Work submitted after an error still runs.

    Args:
      waiting: maximum number of queued items, at least 1; `submit` blocks while the queue is full.
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
        """Queues work(*given).

        The work must not use a device: programs of several hosts would then run in different
        orders.
        """
        self._queue.put(lambda: work(*given))
        self._raise()

    def flush(self) -> None:
        """Waits until all submitted work is done."""
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
