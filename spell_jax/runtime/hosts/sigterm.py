"""SIGTERM, by which a machine announces its end: a process that gets it exits with EXIT_CODE.

`ending` is the context of a whole command (runtime/entry.py has it): the signal ends the command as
Ctrl-C does, by an exception. A run that saves first enters `Preemption` inside `ending`. A command
writes every file under another name and renames it, or appends whole lines, so that the command can
be started again.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: a temporary failure, try again
# A preempted machine of Google's is gone 30 s after the signal: 5 s remain for the exit.
LIMIT_S = 25.0

_CLOSE, _ELSEWHERE, _AGAIN = b"\xff", b"\xfe", b"\xfd"  # control bytes; not signal numbers
_PAUSE_S = 0.01  # until a signal is sent again, so that its handler is called elsewhere
log = logging.getLogger(__name__)


class Terminated(SystemExit):
    """The end of a command by SIGTERM; the process exits with EXIT_CODE."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class SigtermWatch:
    """Context in which SIGTERM calls `handle`, and the process ends if it goes on for too long.

    It must be entered in the main thread; at its exit the previous handlers are restored. A process
    that has not left the context `limit_s` seconds after the first SIGTERM exits with EXIT_CODE; a
    second SIGTERM ends it at once.

    Args:
      limit_s: seconds, above 0 and finite.
      handle: called in the main thread, between two steps of the interpreter; it may raise.
      note: called in the thread, at once.
      end: called with an exit code to end the process.
    """

    def __init__(
        self,
        limit_s: float,
        handle: Callable[[], None],
        note: Callable[[], None],
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._limit, self._handle, self._note, self._end = limit_s, handle, note, end

    def __enter__(self) -> SigtermWatch:
        self._main = threading.get_ident()
        # The interpreter's C code writes each signal to this pair, and a thread reads it. A Python
        # handler alone would not run until the main thread returns from the device.
        self._reads, self._writes = socket.socketpair()
        # Otherwise a full pair could block the interpreter in its signal handler.
        self._writes.setblocking(False)
        self._old_descriptor = signal.set_wakeup_fd(self._writes.fileno())
        self._old_handler = signal.signal(signal.SIGTERM, lambda number, frame: self._handle())
        self.thread = threading.Thread(target=self._read_signals, name="SIGTERM", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGTERM, self._old_handler or signal.SIG_DFL)
        signal.set_wakeup_fd(self._old_descriptor)
        self._writes.send(_CLOSE)
        self.thread.join()
        self._reads.close()
        self._writes.close()

    def start_limit(self) -> None:
        """Start the time limit, as the first SIGTERM does."""
        self._writes.send(_ELSEWHERE)

    def pass_on(self) -> None:
        """Hand a SIGTERM to the previous handler, if that is a function of Python.

        The context must have been left.
        """
        if callable(self._old_handler):
            signal.raise_signal(signal.SIGTERM)

    def send_again(self) -> None:
        """Send the signal again a moment later, so that `handle` is called again."""
        self._writes.send(_AGAIN)

    def _read_signals(self) -> None:
        """Read signals, one byte each, until the context is left or the time limit is reached."""
        deadline, signals, resent = math.inf, 0, 0
        while True:
            seconds = deadline - time.monotonic()
            self._reads.settimeout(max(seconds, 1e-3) if seconds < math.inf else None)
            try:
                byte = self._reads.recv(1)
            except TimeoutError:
                return self._give_up(f"SIGTERM: not ended within {self._limit:g} s")
            if byte == _CLOSE:
                return None
            if byte == _AGAIN:
                time.sleep(_PAUSE_S)
                # Counted, so that the process's own signal is not taken for a second SIGTERM of the
                # machine.
                resent += 1
                signal.pthread_kill(self._main, signal.SIGTERM)
                continue
            if byte == bytes([signal.SIGTERM]):
                if resent:
                    resent -= 1
                    continue
                signals += 1
                # Whoever sends a second signal does not want to wait for the first.
                if signals == 2:
                    return self._give_up("a second SIGTERM")
                self._note()
            elif byte != _ELSEWHERE:
                continue  # another signal
            deadline = min(deadline, time.monotonic() + self._limit)

    def _give_up(self, why: str) -> None:
        log.error("%s: ends at once, what is saved counts", why)
        self._end(EXIT_CODE)


_is_ending = False  # whether `ending` is entered


@contextlib.contextmanager
def ending(end: Callable[[int], None] = os._exit) -> Iterator[None]:
    """Raise Terminated inside the context at a SIGTERM, and lose no Ctrl-C there.

    A process that still runs LIMIT_S seconds later, for example because the main thread compiles or
    Python waits for another thread at its exit, ends at once. An inner context does nothing, and so
    does a context outside of the main thread, where Python handles no signals.
    """
    global _is_ending
    if _is_ending or threading.current_thread() is not threading.main_thread():
        yield
        return

    is_collecting = is_reporting = False  # where Python drops the exception of a handler

    def handle() -> None:
        if is_collecting or is_reporting:
            watch.send_again()
        else:
            raise Terminated

    def note_collection(phase: str, info: object) -> None:
        # The garbage collector calls finalizers, and a finalizer may catch every exception.
        nonlocal is_collecting
        is_collecting = phase == "start"

    def report_or_repeat(dropped: sys.UnraisableHookArgs) -> None:
        # Python drops what is raised in a callback of its garbage collector (jax has one) or in a
        # __del__: of 9 signals during imports, 3 were dropped.
        nonlocal is_reporting
        is_reporting = True
        try:
            if issubclass(dropped.exc_type, Terminated):
                watch.send_again()
            elif issubclass(dropped.exc_type, KeyboardInterrupt):
                main = threading.main_thread().ident
                threading.Timer(_PAUSE_S, signal.pthread_kill, (main, signal.SIGINT)).start()
            else:
                report(dropped)
        finally:
            is_reporting = False

    _is_ending, report = True, sys.unraisablehook
    watch = SigtermWatch(LIMIT_S, handle, lambda: None, end)
    gc.callbacks.append(note_collection)
    try:
        with watch:
            sys.unraisablehook = report_or_repeat
            yield
    except Terminated:
        late = threading.Timer(LIMIT_S, end, (EXIT_CODE,))
        # A daemon does not keep the process alive, but ends it if another thread keeps it.
        late.daemon = True
        late.start()
        raise
    finally:
        gc.callbacks.remove(note_collection)
        sys.unraisablehook = report
        _is_ending = False


def reclaim() -> None:
    """Install Python's handler of SIGTERM again: the C code of a library may have replaced it."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


_masks = threading.local()  # of each thread that forks


def _before_fork() -> None:
    _masks.old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.old)


def _after_fork_in_child() -> None:
    """Restore the default: a signal to the child would otherwise reach the parent's pipe."""
    handler: Any = signal.getsignal(signal.SIGTERM)
    if getattr(handler, "__module__", "") == __name__:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork()


# The signal is blocked meanwhile: it may come to the child before its default is restored.
os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
