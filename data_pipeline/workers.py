"""Worker processes of Beam's local runner: one that is killed ends the build instead of hanging it.

With --direct_running_mode=multi_processing, FnApiRunner starts worker processes. A worker that is
killed, for example because memory ran out, is reported in a thread of the runner; the main thread
would wait for the worker for ever.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_THREAD = "run_worker"  # Beam's name of the thread that waits for a worker process
_SIGNAL = signal.SIGUSR1


class LostWorkerError(RuntimeError):
    """A worker process ended before its work was done."""


@contextlib.contextmanager
def watched(what: str) -> Iterator[None]:
    """Context that raises LostWorkerError in the main thread if a worker process is killed.

    `what` is the work's name in the message. Outside of the main thread, to which alone Python
    delivers signals, the context does nothing.
    """
    main = threading.current_thread()
    if main is not threading.main_thread():
        yield
        return
    report, causes = threading.excepthook, []

    def note(failure: threading.ExceptHookArgs) -> None:
        if failure.thread is None or failure.thread.name != _THREAD:
            report(failure)
            return
        causes.append(failure.exc_value)
        assert main.ident is not None
        signal.pthread_kill(main.ident, _SIGNAL)

    def fail(number: int, frame: FrameType | None) -> None:
        raise LostWorkerError(
            f"{what}: {causes[0]}; 137 is a kill, often for lack of memory: start again with a "
            "lower --direct_num_workers, and the stages that are done are kept"
        )

    handler = signal.signal(_SIGNAL, fail)
    threading.excepthook = note
    try:
        yield
    finally:
        threading.excepthook = report
        signal.signal(_SIGNAL, handler)
