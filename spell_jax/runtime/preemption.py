"""Preemption: the run saves, then exits with a code that asks for a restart.

SIGTERM, or a notice from the cloud's metadata server, is recorded at once. At the end of a phase
every host calls `should_stop`; the trainer then saves and raises Preempted. A process that has not
left the Preemption context `limit_s` seconds after the first SIGTERM is ended with the same code; a
second SIGTERM ends it at once.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from spell_jax.runtime import distributed

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: a temporary failure, try again
METADATA_HOST = "metadata.google.internal"
METADATA_VARIABLE = "GCE_METADATA_HOST"  # HOST or HOST:PORT, as Google's own libraries read it

# These announce a preemption; a migration (MIGRATE_ON_HOST_MAINTENANCE) does not stop the machine.
_NOTICES = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE", "preempted": "TRUE"}
_WAIT_S = 10  # the server answers after this time if the value does not change before
_PAUSE_S = 10.0  # pause after a failed request
_LONGEST_ANSWER = 1024  # bytes; a valid answer has at most 29

_CLOSE, _ELSEWHERE = b"\xff", b"\xfe"  # control bytes; not signal numbers
log = logging.getLogger(__name__)


class Preempted(SystemExit):
    """The run has saved because its machine is preempted; the process exits with EXIT_CODE."""

    def __init__(self, why: str):
        super().__init__(EXIT_CODE)
        self.why = why

    def __str__(self) -> str:
        return f"preempted ({self.why})"


class Preemption:
    """Context in which the process detects that its machine is preempted.

    Enter it in the main thread, after jax.distributed.initialize (which also sets a SIGTERM
    handler), and leave it when everything is saved. The previous handlers are then restored. A
    thread reads signals from a pipe that the interpreter's C code writes to: a Python handler would
    not run until the main thread returns from the device.

    Args:
      limit_s: seconds, above 0 and finite, until the process is ended, counted from the first
        SIGTERM on this host, or on another host once `should_stop` has reported it.
      metadata: HOST or HOST:PORT of the metadata server. By default $GCE_METADATA_HOST, or Google's
        host name if it resolves.
    """

    def __init__(
        self,
        limit_s: float,
        metadata: str | None = None,
        end: Callable[[int], None] = os._exit,
    ):
        if not 0 < limit_s < math.inf:
            raise ValueError(f"preemption_limit_s = {limit_s}: must be above 0, and finite")
        self._limit = limit_s
        self._metadata = metadata or os.environ.get(METADATA_VARIABLE)
        self._end = end
        self._notice = ""  # first notice of this host
        self._is_closed = threading.Event()
        self.why = ""

    def __enter__(self) -> Preemption:
        self._reads, self._writes = socket.socketpair()
        self._writes.setblocking(False)  # otherwise a full pipe could block the interpreter
        self._old_descriptor = signal.set_wakeup_fd(self._writes.fileno())
        self._old_handler = signal.signal(signal.SIGTERM, self._handle)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        for key in _NOTICES:
            threading.Thread(target=self._poll, args=(key,), daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self._is_closed.set()
        signal.signal(signal.SIGTERM, self._old_handler or signal.SIG_DFL)
        signal.set_wakeup_fd(self._old_descriptor)
        self._writes.send(_CLOSE)
        self._watcher.join()
        self._reads.close()
        self._writes.close()

    def should_stop(self) -> bool:
        """Whether any host has a notice; sets `why` to all notices. A collective."""
        notices = distributed.gather_text(self._notice)
        self.why = "; ".join(f"host {host}: {text}" for host, text in enumerate(notices) if text)
        if "SIGTERM" in notices:
            self._writes.send(_ELSEWHERE)
        return bool(self.why)

    def stop(self) -> NoReturn:
        """Raises Preempted, after all was saved."""
        log.warning("all is saved; the same command goes on")
        raise Preempted(self.why)

    def _handle(self, number, frame) -> None:
        # In the main thread: a signal that it sends to itself is known at its next `should_stop`.
        self._notice = "SIGTERM"

    def _note(self, notice: str) -> None:
        log.warning("%s: will stop at the end of this phase", notice)
        # SIGTERM replaces an earlier notice, because it starts the time limit on the other hosts.
        if not self._notice or notice == "SIGTERM":
            self._notice = notice

    def _watch(self) -> None:
        """Reads signals, one byte each, until the context is left or the time limit is reached."""
        deadline, signals = math.inf, 0
        while True:
            left = deadline - time.monotonic()
            self._reads.settimeout(max(left, 1e-3) if left < math.inf else None)
            try:
                byte = self._reads.recv(1)
            except TimeoutError:
                return self._give_up(f"not saved within {self._limit:g} s")
            if byte == _CLOSE:
                return None
            if byte == bytes([signal.SIGTERM]):
                signals += 1
                if signals == 2:
                    return self._give_up("a second SIGTERM")
                self._note("SIGTERM")
            elif byte != _ELSEWHERE:
                continue  # another signal
            deadline = min(deadline, time.monotonic() + self._limit)

    def _give_up(self, why: str) -> None:
        log.error("%s: ends at once, the last checkpoint counts", why)
        self._end(EXIT_CODE)

    def _poll(self, key: str) -> None:
        server = self._metadata or METADATA_HOST
        if not self._metadata:
            try:
                socket.getaddrinfo(server, 80)
            except OSError:
                return  # not a Google machine
        has_failed = False
        while not self._is_closed.is_set():
            try:
                value = _fetch_metadata(server, key)
            except (OSError, http.client.HTTPException, ValueError) as error:
                if not has_failed:
                    log.warning("metadata server %s, %s: %s; asks again", server, key, error)
                has_failed = True
                self._is_closed.wait(_PAUSE_S)
                continue
            if value == _NOTICES[key] and not self._is_closed.is_set():
                return self._note(f"{key} {value}")


def _fetch_metadata(server: str, key: str) -> str:
    """Value of a metadata key when it changes, or its current value after _WAIT_S seconds."""
    # Not urllib, which would use a proxy.
    connection = http.client.HTTPConnection(server, timeout=2 * _WAIT_S)
    with contextlib.closing(connection):
        path = f"/computeMetadata/v1/instance/{key}?wait_for_change=true&timeout_sec={_WAIT_S}"
        connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        value = answer.read(_LONGEST_ANSWER).decode(errors="replace").strip()
        if answer.status != 200 or answer.getheader("Metadata-Flavor") != "Google":
            raise ValueError(f"answers {answer.status} {value[:80]!r}")
        return value
