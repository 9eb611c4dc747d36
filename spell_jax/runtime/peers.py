"""Heartbeats between the processes of a run: if one is lost or fails, all others end and name it.

1. Process 0 listens at a port. Every other process connects and sends its state as a line of JSON
   several times within the limit: phase, step, last checkpoint, and the error that ends it.
2. Process 0 answers each line with its own state. It judges that the run is over if a process has
   been silent for the limit, has closed its connection without a word, or reports an error.
3. The answers then carry the verdict. Each process prints it and ends with EXIT_CODE; one that
   failed raises its own error. Process 0 ends last.
4. A process that does not hear process 0 for the limit judges that process 0 is missing.

Collectives, and Orbax's waits for other processes, cannot be interrupted. So a thread ends the
process, whatever its main thread waits for.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

EXIT_CODE = 69  # EX_UNAVAILABLE of sysexits.h: another process is missing or has failed

_LONGEST_BEAT_S = 1.0
_GRACE_S = 1.0  # the connections of a killed process close one by one: wait for ours before judging
_LONGEST_LINE = 1 << 16  # bytes; a state has some hundred
_LONGEST_ERROR = 600  # characters
_NOT_A_PEER = (OSError, ValueError, LookupError, TypeError)  # a connection is closed, or a stranger


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Reason for which a run is over: one line, and the processes that are missing or failed."""

    text: str
    to_blame: tuple[int, ...]


@dataclasses.dataclass
class _Peer:
    """Another process as this one knows it; times are those of a _Clock."""

    index: int
    count: int
    heard: float  # when it was last heard
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    line: socket.socket | None = None  # the open connection
    closed: float | None = None  # when the last connection was closed

    def hear(self, state: dict[str, Any], line: socket.socket, now: float) -> None:
        self.state, self.line, self.heard, self.closed = state, line, now, None

    def lose(self, now: float) -> None:
        if self.line is not None:
            self.line, self.closed = None, now

    @property
    def error(self) -> str:
        return self.state.get("error", "")

    @property
    def is_ended(self) -> bool:
        """Whether it said that it is done or has failed."""
        return bool(self.error or self.state.get("is_done"))

    def is_missing(self, now: float, limit: float, patience: float) -> bool:
        if self.state.get("is_done"):
            return False
        is_silent = now - self.heard > limit
        return is_silent or (self.closed is not None and now - self.closed > patience)

    def describe(self, what: str) -> str:
        host = f" (host {self.state['host']})" if self.state else ""
        place = "during {phase} after step {step}".format_map(self.state or _SETUP)
        return f"process {self.index} of {self.count}{host} {what} {place}"


_SETUP = {"phase": "setup", "step": 0, "saved": None, "error": "", "is_done": False}


def _missing(peers: Iterable[_Peer], now: float, limit: float, patience: float) -> list[_Peer]:
    """Those that are missing and have reported no error."""
    return [peer for peer in peers if not peer.error and peer.is_missing(now, limit, patience)]


class _Clock:
    """Monotonic seconds, of which a time when this process was stopped counts as `longest`."""

    def __init__(self, longest: float) -> None:
        self._longest, self._counted, self._last = longest, 0.0, time.monotonic()

    def now(self) -> float:
        last, self._last = self._last, time.monotonic()
        self._counted += min(self._last - last, self._longest)
        return self._counted


class Peers:
    """Heartbeats of one process; `start` starts the thread.

    Args:
      index, count: of this process, and number of processes.
      hub: the listening socket on process 0; else its host and port.
      limit: seconds without a sign of life after which a process is missing. One whose connection
        is closed is missing after a quarter of it.
      end: called with an exit status to end this process.
    """

    def __init__(
        self,
        index: int,
        count: int,
        hub: socket.socket | tuple[str, int],
        limit: float,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self._index, self._count, self._hub, self._limit, self._end = index, count, hub, limit, end
        self._every = min(_LONGEST_BEAT_S, limit / 20)
        self._patience = limit / 4
        self._clock = _Clock(self._patience)  # no wait below is longer
        self.state = {"index": index, "host": socket.gethostname()} | _SETUP
        self._verdict: Verdict | None = None
        self._is_judged = threading.Event()

    def start(self) -> None:
        run = self._serve if self._index == 0 else self._call
        threading.Thread(target=run, args=(self._hub,), name="peers", daemon=True).start()

    def fail(self, error: BaseException) -> None:
        """Tells all processes of an error that ends this one; returns when they know.

        The caller then has a quarter of the limit to end. If another process is missing, and the
        error a consequence, this ends the process with EXIT_CODE.
        """
        if not self.state["error"]:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self.state["error"] = text[:_LONGEST_ERROR]
        self._is_judged.wait(3 * self._limit)
        if self._verdict is not None and self._index not in self._verdict.to_blame:
            traceback.print_exception(error)
            self._leave(EXIT_CODE)

    # --------------------------------------------------------------------------------- Process 0

    def _serve(self, server: socket.socket) -> None:
        others = [_Peer(i, self._count, self._clock.now()) for i in range(1, self._count)]
        failed_at: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while self._verdict is None:
                self._exchange(selector, others)
                now = self._clock.now()
                own = _Peer(0, self._count, now, self.state)
                failed = [peer for peer in (own, *others) if peer.error]
                gone = [peer for peer in others if peer.closed is not None and not peer.is_ended]
                lost = _missing(others, now, self._limit, self._patience)
                if failed and failed_at is None:
                    failed_at = now
                if lost:  # names all that are suspect by now, as after a cut in the network
                    lost = _missing(others, now, self._limit / 2, 0.0)
                    self._verdict = self._judge(lost, now)
                elif failed_at is not None and now > failed_at + _GRACE_S and not gone:
                    self._verdict = self._judge(failed, now)
            # All others end first: jax ends a process at once if process 0 is gone.
            deadline = self._clock.now() + 2 * self._patience
            living = [peer for peer in others if peer not in lost]
            while any(peer.line for peer in living) and self._clock.now() < deadline:
                self._exchange(selector, others)
        self._conclude()

    def _exchange(self, selector: selectors.BaseSelector, others: Sequence[_Peer]) -> None:
        """Accepts connections and answers states, for at most the time of a beat."""
        for key, _ in selector.select(self._every):
            line = key.fileobj
            assert isinstance(line, socket.socket)
            if line is self._hub:
                with contextlib.suppress(OSError):
                    caller = line.accept()[0]
                    caller.setblocking(False)
                    selector.register(caller, selectors.EVENT_READ, bytearray())
                continue
            try:
                self._answer(line, key.data, others)
            except _NOT_A_PEER:
                selector.unregister(line)
                line.close()
                for peer in others:
                    if peer.line is line:
                        peer.lose(self._clock.now())

    def _answer(self, line: socket.socket, text: bytearray, others: Sequence[_Peer]) -> None:
        received = line.recv(_LONGEST_LINE)
        text.extend(received)
        if not received or len(text) > _LONGEST_LINE:
            raise ConnectionError
        if text.endswith(b"\n"):
            state = json.loads(text.splitlines()[-1])
            text.clear()
            peer = {peer.index: peer for peer in others}[state["index"]]
            peer.hear(state, line, self._clock.now())
            verdict = self._verdict and dataclasses.astuple(self._verdict)
            line.sendall(json.dumps(self.state | {"verdict": verdict}).encode() + b"\n")

    # ------------------------------------------------------------------------------ Other processes

    def _call(self, address: tuple[str, int]) -> None:
        hub = _Peer(0, self._count, self._clock.now())
        while self._verdict is None:
            with contextlib.suppress(*_NOT_A_PEER):
                self._converse(address, hub)
            now = self._clock.now()
            hub.lose(now)
            # When the run is over, process 0 may end before its last state arrives here.
            patience = self._limit if self.state["is_done"] else self._patience
            if self._verdict is None and hub.is_missing(now, self._limit, patience):
                self._verdict = self._judge([hub], now)
                self._conclude()
            time.sleep(self._every)

    def _converse(self, address: tuple[str, int], hub: _Peer) -> None:
        """Exchanges states with process 0 until the verdict; _NOT_A_PEER if that breaks."""
        with (
            socket.create_connection(address, timeout=self._patience) as line,
            line.makefile("r", encoding="utf-8") as answers,
        ):
            while True:
                line.sendall(json.dumps(self.state).encode() + b"\n")
                state = json.loads(answers.readline())
                hub.hear(state, line, self._clock.now())
                if state["verdict"]:
                    self._verdict = Verdict(*state["verdict"])
                    return self._conclude()  # while the connection is open, process 0 waits
                time.sleep(self._every)

    # -------------------------------------------------------------------------------------- The end

    def _judge(self, peers: Sequence[_Peer], now: float) -> Verdict:
        reasons = [
            f"{peer.describe('failed')}: {peer.error}"
            if peer.error
            else f"{peer.describe('is missing: last heard')}, {now - peer.heard:.0f} s ago"
            for peer in peers
        ]
        found = [state.get("saved") for state in (self.state, *(peer.state for peer in peers))]
        saved = max((step for step in found if step is not None), default=None)
        start = "its last checkpoint" if saved is None else f"checkpoint {saved} or a later one"
        remedy = f"end what is left of it, start all again: the run resumes from {start}"
        return Verdict("; ".join([*reasons, remedy]), tuple(peer.index for peer in peers))

    def _conclude(self) -> None:
        """Ends the process after the verdict, unless it ends by its own error in time."""
        assert self._verdict is not None
        with contextlib.suppress(OSError, ValueError):  # a closed terminal must not keep us
            print(f"spell_jax: {self._verdict.text}", file=sys.stderr, flush=True)
        self._is_judged.set()
        if self.state["error"]:
            time.sleep(self._patience)
        self._leave(1 if self.state["error"] else EXIT_CODE)

    def _leave(self, status: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        self._end(status)


# ------------------------------------------------------------------------- Those of this process

_mine: Peers | None = None


def start(index: int, count: int, hub: socket.socket | tuple[str, int], limit: float) -> None:
    """Starts the heartbeats of this process, with arguments as of Peers."""
    global _mine
    _mine = Peers(index, count, hub, limit)
    _mine.start()
    # jax aborts a process whose connection to process 0 is closed; it has no hook for that.
    ctypes.CDLL(None).signal(signal.SIGABRT, _announce_abort)


def is_running() -> bool:
    return _mine is not None


def note(**state: Any) -> None:
    """Notes the `phase`, `step` (steps done), `saved` (last checkpoint) or `is_done`."""
    if _mine is not None:
        _mine.state.update(state)


def fail(error: BaseException) -> None:
    """Peers.fail of this process; nothing if it is alone."""
    if _mine is not None:
        _mine.fail(error)


@contextlib.contextmanager
def announced() -> Iterator[None]:
    """Context that tells all processes of an error at once, before outer contexts wait for them.

    SystemExit passes: all processes raise it together.
    """
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        fail(error)
        raise


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _announce_abort(_: int) -> None:
    fail(RuntimeError("a library aborted this process, see its message above"))
    os._exit(1)  # as after every error of its own, and not with the status of the signal
