"""A watch on the worker processes of Beam's local runner: a killed worker ends the build.

With --direct_running_mode=multi_processing, FnApiRunner starts worker processes. If a worker is
killed, for example because memory ran out, a thread of the runner reports the loss, but the main
thread would wait for the worker for ever.
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
    """A worker process that ended before its work was done."""


@contextlib.contextmanager
def watched(work: str) -> Iterator[None]:
    """Raise LostWorkerError in the main thread if a worker process is killed inside the context.

    `work` names the work in the message. In other threads, to which Python delivers no signals, the
    context does nothing.
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
            f"{work}: {causes[0]}; 137 is a kill, often for lack of memory: start again with a "
            "lower --direct_num_workers, and the stages that are done are kept"
        )

    handler = signal.signal(_SIGNAL, fail)
    threading.excepthook = note
    try:
        yield
    finally:
        threading.excepthook = report
        signal.signal(_SIGNAL, handler)
