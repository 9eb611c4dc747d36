"""Worker processes of Beam's local runner: a killed worker ends the build, and a build its workers.

With --direct_running_mode=multi_processing, FnApiRunner starts worker processes. If a worker is
killed, for example because memory ran out, a thread of the runner reports the loss, but the main
thread would wait for the worker for ever. Ctrl-C and SIGTERM kill the workers first: the runner's
cleanup waits for them, for ever after Ctrl-C, and they would outlive this process. After SIGKILL of
this process the workers end themselves (local_worker.py).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.transforms.environments import SubprocessSDKEnvironment

# Name of the thread in which Beam waits for a worker process. Its exceptions end in
# threading.excepthook, and nowhere else.
_THREAD = "run_worker"
# A signal reaches the main thread while it waits for the workers; an exception of another thread
# does not.
_SIGNAL = signal.SIGUSR1


class LostWorkerError(RuntimeError):
    """A worker process that ended before its work was done."""


def make_runner(options: PipelineOptions) -> FnApiRunner:
    """Create Beam's local runner, with worker processes that end when this process ends."""
    direct = options.view_as(DirectOptions)
    if direct.direct_running_mode != "multi_processing":
        return FnApiRunner()
    direct.direct_running_mode = None  # with the mode the runner would start workers of its own
    # Beam starts a shell. `exec` replaces it: the worker's parent must be this process.
    command = f"exec {shlex.quote(sys.executable)} -m data_pipeline.local_worker {os.getpid()}"
    return FnApiRunner(SubprocessSDKEnvironment.from_command_string(command))


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
    report, causes, is_ending = threading.excepthook, [], threading.Event()

    def note(failure: threading.ExceptHookArgs) -> None:
        if is_ending.is_set():
            return
        if failure.thread is None or failure.thread.name != _THREAD:
            report(failure)
            return
        causes.append(failure.exc_value)
        assert main.ident is not None
        signal.pthread_kill(main.ident, _SIGNAL)

    def fail(number: int, frame: FrameType | None) -> None:
        raise LostWorkerError(
            f"{work}: {causes[0]}; -9 is a kill, often for lack of memory: start again with a "
            "lower --direct_num_workers, and the stages that are done are kept"
        )

    def killing(handle: Any) -> Any:
        if not callable(handle):
            return handle

        @functools.wraps(handle)  # runtime/hosts/sigterm.py knows its handler by the module's name
        def end(number: int, frame: FrameType | None) -> None:
            is_ending.set()
            logging.getLogger("apache_beam").setLevel(logging.CRITICAL)  # of the lost workers
            _kill_descendants()
            handle(number, frame)

        return end

    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handler = signal.signal(_SIGNAL, fail)
    threading.excepthook = note
    for number, handle in old.items():
        signal.signal(number, killing(handle))
    try:
        yield
    finally:
        # Threads of Beam fail until the process has ended, each with a traceback.
        if not is_ending.is_set():
            threading.excepthook = report
        signal.signal(_SIGNAL, handler)
        for number, handle in old.items():
            signal.signal(number, handle)


def _kill_descendants() -> None:
    """Kill the processes below this one: the workers, and the shells that started them.

    Nothing happens on a system without /proc.
    """
    children: dict[int, list[int]] = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            # The second field, the command in parentheses, may contain spaces and parentheses.
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    pids = [os.getpid()]
    for pid in pids:
        # The list grows while it is read: a breadth-first walk to all descendants.
        pids += children.get(pid, [])
    for pid in pids[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
