"""A machine that is taken away: the run saves, and ends with a code that says "start me again".

1. SIGTERM, or a notice of the cloud's metadata server, is noted at once, whatever the process does.
2. At the end of a phase every host asks `should_stop`; all get the same answer, for they exchange
   their notices. The trainer then saves and raises Preempted.
3. Who has not left the Preemption context `limit_s` seconds after the first SIGTERM is ended with
   the same code, and so is, at once, who gets a second SIGTERM: the last checkpoint counts.

Signals are read by a thread of their own, from a pipe that the interpreter's C code writes: a
handler in Python waits until the main thread is back from the device.
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

from spell_jax.runtime import distributed

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, try again
METADATA_HOST = "metadata.google.internal"
METADATA_VARIABLE = "GCE_METADATA_HOST"  # HOST or HOST:PORT, as Google's own libraries read it

# What the metadata server says, by key, when this machine goes away. A maintenance event that
# migrates the machine (MIGRATE_ON_HOST_MAINTENANCE) does not stop it.
_NOTICES = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE", "preempted": "TRUE"}
_WAIT_S = 10  # the server answers after so long, if nothing changes before
_PAUSE_S = 10.0  # after an answer that was none
_LONGEST_ANSWER = 1024  # bytes; a good one has 29 at most

_CLOSE, _ELSEWHERE = b"\xff", b"\xfe"  # no numbers of signals
log = logging.getLogger(__name__)


class Preempted(SystemExit):
    """The run has saved because its machine is taken away; the process ends with EXIT_CODE."""

    def __init__(self, why: str):
        super().__init__(EXIT_CODE)
        self.why = why

    def __str__(self) -> str:
        return f"preempted ({self.why})"


class Preemption:
    """Within this context the process learns that its machine is taken away.

    Entered in the main thread, after jax.distributed.initialize (which sets a handler of SIGTERM
    too); left when everything is saved. What stood before is then restored.

    Args:
      limit_s: seconds from the first SIGTERM, here or (once `should_stop` has told) on another
        host, until the process is ended.
      metadata: HOST or HOST:PORT of the metadata server; by default $GCE_METADATA_HOST, or
        Google's name for it where that name resolves, which it does on their machines only.
      end: ends the process with a code; replaced in tests.

    Raises:
      ValueError: limit_s is not above 0, or not finite.
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
        self._notice = ""  # of this host, the first one
        self._is_closed = threading.Event()
        self.why = ""

    def __enter__(self) -> Preemption:
        self._reads, self._writes = socket.socketpair()
        self._writes.setblocking(False)  # or a full pipe could hold the interpreter up
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
        """Whether any host has a notice, `why` being all of them; the same on all hosts.

        A collective: all hosts ask at the same points of the program, the ends of its phases.
        """
        notices = [part[0].decode() for part in distributed.gather_bytes([self._notice.encode()])]
        told = [f"host {host}: {notice}" for host, notice in enumerate(notices) if notice]
        self.why = "; ".join(told)
        if "SIGTERM" in notices:
            self._writes.send(_ELSEWHERE)
        return bool(told)

    def _handle(self, number, frame) -> None:
        """So that a signal which the main thread sends itself is there when it asks next."""
        self._notice = "SIGTERM"

    def _note(self, notice: str) -> None:
        log.warning("%s: will stop at the end of this phase", notice)
        # A SIGTERM is told even behind a notice that came before it: it limits the others' time.
        if not self._notice or notice == "SIGTERM":
            self._notice = notice

    def _watch(self) -> None:
        """Reads what came, a byte each, until the context is left or time is up."""
        deadline, signals = math.inf, 0
        while True:
            left = deadline - time.monotonic()
            self._reads.settimeout(max(left, 1e-3) if left < math.inf else None)
            try:
                came = self._reads.recv(1)
            except TimeoutError:
                return self._give_up(f"not saved within {self._limit:g} s")
            if came == _CLOSE:
                return None
            if came == bytes([signal.SIGTERM]):
                signals += 1
                if signals == 2:
                    return self._give_up("a second SIGTERM")
                self._note("SIGTERM")
            elif came != _ELSEWHERE:
                continue  # another signal of the process
            deadline = min(deadline, time.monotonic() + self._limit)

    def _give_up(self, why: str) -> None:
        log.error("%s: ends at once, the last checkpoint counts", why)
        self._end(EXIT_CODE)

    def _poll(self, key: str) -> None:
        """Asks the metadata server for a key until it says that the machine goes away."""
        server = self._metadata or METADATA_HOST
        if not self._metadata:
            try:
                socket.getaddrinfo(server, 80)
            except OSError:
                return  # not on Google's machines
        failures = 0
        while not self._is_closed.is_set():
            try:
                value = _ask(server, key)
            except (OSError, http.client.HTTPException, ValueError) as error:
                failures += 1
                if failures == 1:
                    log.warning("metadata server %s, %s: %s; asks again", server, key, error)
                self._is_closed.wait(_PAUSE_S)
                continue
            if value == _NOTICES[key] and not self._is_closed.is_set():
                return self._note(f"{key} {value}")


def _ask(server: str, key: str) -> str:
    """The value of a key when it changes, or as it is after _WAIT_S seconds.

    Raises:
      OSError, http.client.HTTPException, ValueError: there is no answer, or it is another one's.
    """
    # Not through urllib, which would ask a proxy.
    connection = http.client.HTTPConnection(server, timeout=2 * _WAIT_S)
    with contextlib.closing(connection):
        path = f"/computeMetadata/v1/instance/{key}?wait_for_change=true&timeout_sec={_WAIT_S}"
        connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        value = answer.read(_LONGEST_ANSWER).decode(errors="replace").strip()
        if answer.status != 200 or answer.getheader("Metadata-Flavor") != "Google":
            raise ValueError(f"answers {answer.status} {value[:80]!r}")
        return value
