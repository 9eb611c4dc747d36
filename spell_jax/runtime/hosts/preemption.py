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
import socket
import threading
from collections.abc import Callable
from typing import NoReturn

from spell_jax.runtime.hosts import distributed
from spell_jax.runtime.hosts.sigterm import EXIT_CODE, SigtermWatch

METADATA_HOST = "metadata.google.internal"
# Read as Google's own libraries read it: HOST or HOST:PORT.
METADATA_VARIABLE = "GCE_METADATA_HOST"

# These announce a preemption; a migration (MIGRATE_ON_HOST_MAINTENANCE) does not stop the machine.
_NOTICES = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE", "preempted": "TRUE"}
# The server answers at once when the value changes, otherwise after this time: no notice waits for
# the next poll, and a run asks only 6 times a minute.
_WAIT_S = 10
_PAUSE_S = 10.0  # pause after a failed request
_LONGEST_ANSWER = 1024  # bytes; a valid answer has at most 29

_SIGTERM = "SIGTERM"  # the notice of a signal
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

    Enter it in the main thread, and leave it when everything is saved. The previous handlers are
    then restored.

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
        self._metadata = metadata or os.environ.get(METADATA_VARIABLE)
        self._watch = SigtermWatch(limit_s, self._handle, lambda: self._note(_SIGTERM), end)
        self._notice = ""  # first notice of this host
        self._is_closed = threading.Event()
        self.why = ""

    def __enter__(self) -> Preemption:
        self._watch.__enter__()
        for key in _NOTICES:
            threading.Thread(target=self._poll, args=(key,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._is_closed.set()
        self._watch.__exit__(kind, *error)
        # A SIGTERM after the last `should_stop` stopped no run. The handler of the whole command
        # (runtime/hosts/sigterm.py) gets it, because what follows may take longer than the machine
        # lives.
        if kind is None and self._notice == _SIGTERM:
            self._watch.pass_on()

    def should_stop(self) -> bool:
        """Return whether any host has a notice, and set `why` to all notices. A collective."""
        notices = distributed.gather_text(self._notice)
        self.why = "; ".join(f"host {host}: {text}" for host, text in enumerate(notices) if text)
        # All hosts save together, so all share the time limit of the host that got the signal.
        if _SIGTERM in notices:
            self._watch.start_limit()
        return bool(self.why)

    def stop(self) -> NoReturn:
        """Raise Preempted; call this after everything is saved."""
        log.warning("all is saved; the same command goes on")
        raise Preempted(self.why)

    def _handle(self) -> None:
        # In the main thread: a signal that it sends to itself is known at its next `should_stop`.
        self._notice = _SIGTERM

    def _note(self, notice: str) -> None:
        log.warning("%s: will stop at the end of this phase", notice)
        # SIGTERM replaces an earlier notice, because it starts the time limit on the other hosts.
        if not self._notice or notice == _SIGTERM:
            self._notice = notice

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
    """Return a metadata key's value once it changes, or its value after _WAIT_S seconds."""
    # Not urllib, which would use a proxy.
    connection = http.client.HTTPConnection(server, timeout=2 * _WAIT_S)
    with contextlib.closing(connection):
        path = f"/computeMetadata/v1/instance/{key}?wait_for_change=true&timeout_sec={_WAIT_S}"
        connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        value = answer.read(_LONGEST_ANSWER).decode(errors="replace").strip()
        # Only Google's server sends this header: another server at the address must not stop a run.
        if answer.status != 200 or answer.getheader("Metadata-Flavor") != "Google":
            raise ValueError(f"answers {answer.status} {value[:80]!r}")
        return value
