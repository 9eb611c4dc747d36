"""The processes of a run: they meet before it, and if one is lost or fails, all others end.

1. `wait_for_all`: every process connects to process 0 and sends its index. When all have
   connected, or at the time limit, process 0 tells them which are missing. It then frees the port
   for jax, and listens for heartbeats only at the addresses by which the processes reached it.
2. `Heartbeats`: process 0 greets every process with a random challenge. The process answers with
   an HMAC of the challenge, which proves that it knows the run's token. It then sends its state as
   a line of JSON several times within the limit: phase, step, last checkpoint, error.
3. Process 0 answers each line with its own state. It judges that the run is over if a process has
   been silent for the limit, has closed its connection without a word, or reports an error.
4. The answers then carry the verdict. Each process prints it and ends with EXIT_CODE; one that
   failed raises its own error. Process 0 ends last.
5. A process that does not hear process 0 for the limit judges that process 0 is missing.

jax.distributed has a time limit and heartbeats, too. In jax 0.10.2 their end is an abort (SIGABRT)
that no Python code can catch, and the time limit's message names no process. With the flag
jax_enable_recoverability its private get_live_nodes names lost processes, but not during
initialize(), and the end of process 0 still aborts all.

Collectives, and Orbax's waits for other processes, cannot be interrupted. So a thread ends the
process, whatever its main thread waits for.

The token is known once jax.distributed has started. Until then the processes wait for it, and a
process that ends is missing after the limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import hmac
import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from spell_jax.runtime import terminal
from spell_jax.runtime.hosts import listener
from spell_jax.runtime.hosts.listener import LONGEST_LINE, NOT_A_PEER, Connection, Listener

EXIT_CODE = 69  # EX_UNAVAILABLE of sysexits.h: another process is missing or has failed

_ALL_THERE = "all there "
_MISSING = "missing: "
_ANSWER = re.compile(rf"{_ALL_THERE}\d{{1,5}}|{_MISSING}[\w ,]+")
_CALL_EVERY_S = 0.3  # pause between two calls of process 0
# Seconds to wait for process 0 after the time limit: it answers at its own limit, which may come
# later, with the names of missing processes.
_ANSWER_S = 5.0
_LONGEST_WAIT_S = 1.0  # between two looks at the time limit

_LONGEST_BEAT_S = 1.0
# Time between a reported error and the verdict. Connections of a killed process close one by one:
# the process that reports an error may only be the first to notice, and must not be blamed.
_GRACE_S = 1.0
_LONGEST_ERROR = 600  # characters
_MOST_NAMED = 10  # processes in a verdict, which must fit into a line
_CHALLENGE_BYTES = 16  # random for each connection, so that an overheard proof proves nothing
_LONGEST_CHALLENGE = 256  # characters


# ----------------------------------------------------------------------------------------- Joining


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Result of `wait_for_all`.

    Attributes:
      index, count: index of this process, and number of processes.
      hub: listening sockets for heartbeats on process 0; elsewhere their host and port.
      addresses: on process 0, address from which each process called, by index; elsewhere the host
        of process 0.
    """

    index: int
    count: int
    hub: Sequence[socket.socket] | tuple[str, int]
    addresses: Mapping[int, str]


def wait_for_all(address: str, count: int, index: int, limit: float) -> Meeting:
    """Wait until all `count` >= 2 processes of a run have called this, at most `limit` seconds.

    `address` is host:port of process 0. TimeoutError names the missing processes; OSError if
    process 0 cannot listen at the port.
    """
    host, port = split(address)
    deadline = time.monotonic() + limit
    if index == 0:
        return _await_all(host, port, count, deadline)
    hub_port = _call((host, port), _name(index, count), deadline)
    return Meeting(index, count, (host, hub_port), {0: host})


def split(address: str) -> tuple[str, int]:
    """Split host:port, or [host]:port, into host and port."""
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


def _name(index: int, count: int) -> str:
    return f"process {index} of {count}"


def _await_all(host: str, port: int, count: int, deadline: float) -> Meeting:
    indices = {_name(index, count).encode(): index for index in range(1, count)}
    callers: dict[int, Connection] = {}

    def answer(connection: Connection, line: bytes) -> bytes:
        if (index := indices.get(line)) is None or connection.caller is not None:
            raise ValueError("is no process of this run")
        # A second call comes from a restarted process. If instead a stranger takes the place of a
        # process, that process sees the end of its connection, calls again, and takes it back.
        if index in callers:
            door.refuse(callers[index], f"was replaced by {connection.address} as {line.decode()}")
        connection.caller = index
        callers[index] = connection
        return b""

    def lose(connection: Connection) -> None:
        if callers.get(connection.caller) is connection:
            del callers[connection.caller]

    with Listener([listener.listen(host, port)], answer, lose) as door:
        while len(callers) < len(indices) and (seconds := deadline - time.monotonic()) > 0:
            door.exchange(min(seconds, _LONGEST_WAIT_S))
        missing = [name.decode() for name, index in indices.items() if index not in callers]
        if missing:
            for caller in list(callers.values()):
                door.send(caller, f"{_MISSING}{', '.join(missing)}\n".encode())
            raise TimeoutError(f"{_MISSING}{', '.join(missing)}")
        addresses = {index: caller.address for index, caller in callers.items()}
        # Heartbeats listen only at addresses that processes called: at all addresses, strangers of
        # other networks could call, too.
        hubs: dict[str, socket.socket] = {}
        for caller in list(callers.values()):
            reached = listener.plain(caller.line.getsockname()[0])
            if reached not in hubs:
                hubs[reached] = listener.listen(reached)
            port = hubs[reached].getsockname()[1]
            door.send(caller, f"{_ALL_THERE}{port}\n".encode())
    return Meeting(0, count, list(hubs.values()), addresses)


def _call(address: tuple[str, int], name: str, deadline: float) -> int:
    """Connect until process 0 answers; return its port for heartbeats."""
    while (seconds := deadline - time.monotonic()) > 0:
        answer = _ask(address, name, seconds)
        if answer.startswith(_ALL_THERE):
            return int(answer.removeprefix(_ALL_THERE))
        if answer:
            raise TimeoutError(answer)
        # No answer is no error yet: process 0 may not listen yet, or may be restarting.
        time.sleep(_CALL_EVERY_S)
    raise TimeoutError(f"{_MISSING}process 0, which does not answer at {address[0]}:{address[1]}")


def _ask(address: tuple[str, int], name: str, seconds: float) -> str:
    """Return the answer of process 0, or "" if none comes in `seconds` + _ANSWER_S seconds."""
    try:
        with socket.create_connection(address, timeout=seconds) as line:
            line.sendall(f"{name}\n".encode())
            line.settimeout(seconds + _ANSWER_S)
            answer = line.makefile("rb").readline(LONGEST_LINE).decode("ascii", "replace")
    except OSError:
        return ""
    # Another server may listen at the port, with an answer of its own.
    return answer.strip() if _ANSWER.fullmatch(answer.strip()) else ""


# -------------------------------------------------------------------------------------- Heartbeats


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Reason for which a run is over: one line, and the processes that are missing or failed."""

    text: str
    to_blame: tuple[int, ...]


@dataclasses.dataclass
class _Peer:
    """Another process, as this process knows it; times are seconds of a _Clock."""

    index: int
    count: int
    heard: float  # when it was last heard
    address: str = ""  # address of its last call, or at which it listens
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    line: Connection | socket.socket | None = None  # the open connection
    closed: float | None = None  # when the last connection was closed

    def hear(self, values: Any, now: float) -> None:
        self.state, self.heard, self.closed = _check_state(values, self.index), now, None

    def lose(self, now: float) -> None:
        if self.line is not None:
            self.line, self.closed = None, now

    @property
    def error(self) -> str:
        return self.state.get("error", "")

    @property
    def is_ended(self) -> bool:
        """State of a process that said that it is done or has failed."""
        return bool(self.error or self.state.get("is_done"))

    def is_missing(self, now: float, limit: float, patience: float) -> bool:
        if self.state.get("is_done"):
            return False
        is_silent = now - self.heard > limit
        return is_silent or (self.closed is not None and now - self.closed > patience)

    def describe_event(self, event: str) -> str:
        host = f"host {self.state['host']}" if self.state else ""
        where = ", ".join(filter(None, [host, self.address]))
        place = "during {phase} after step {step}".format_map(self.state or _SETUP)
        return f"{_name(self.index, self.count)}{where and f' ({where})'} {event} {place}"


_SETUP = {"phase": "setup", "step": 0, "saved": None, "error": "", "is_done": False}
_KINDS = {
    "index": int,
    "host": str,
    "phase": str,
    "step": int,
    "saved": int | None,
    "error": str,
    "is_done": bool,
}


def _check_state(values: Any, index: int) -> dict[str, Any]:
    """Return JSON values as the state of process `index`; ValueError for other values."""
    if not isinstance(values, dict) or values.get("index") != index:
        raise ValueError(f"sent no state of process {index}")
    for name, kind in _KINDS.items():
        if not isinstance(values.get(name), kind):
            raise ValueError(f"sent no state of process {index}: {name} is wrong")
    return {name: values[name] for name in _KINDS}


def _prove(token: bytes, challenge: bytes, index: int) -> bytes:
    """Return the message with which process `index` proves that it knows the token."""
    # The index is part of the proof: it serves no other process.
    proof = hmac.new(token, b"%d %b" % (index, challenge), hashlib.sha256).hexdigest()
    return b"%d %b" % (index, proof.encode())


def _make_challenge() -> bytes:
    return secrets.token_hex(_CHALLENGE_BYTES).encode()


def _missing(peers: Iterable[_Peer], now: float, limit: float, patience: float) -> list[_Peer]:
    """Return the peers that are missing and have reported no error."""
    return [peer for peer in peers if not peer.error and peer.is_missing(now, limit, patience)]


class _Clock:
    """Monotonic seconds; the time between two calls counts at most `longest` seconds."""

    def __init__(self, longest: float, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._longest, self._counted, self._last = longest, 0.0, seconds()

    def now(self) -> float:
        # After a stop (SIGSTOP, a suspended machine) all other processes would seem to have been
        # silent.
        last, self._last = self._last, self._seconds()
        self._counted += min(self._last - last, self._longest)
        return self._counted


class Heartbeats:
    """Heartbeats of one process; `start` starts the thread.

    Args:
      meeting: result of `wait_for_all`.
      limit: seconds without a sign of life after which a process is missing. After a closed
        connection a quarter of the limit suffices.
      end: called with an exit status to end this process.
    """

    def __init__(
        self, meeting: Meeting, limit: float, end: Callable[[int], Any] = os._exit
    ) -> None:
        index, count = meeting.index, meeting.count
        self._index, self._count, self._hub = index, count, meeting.hub
        self._limit, self._end = limit, end
        # At least 20 heartbeats within the limit: one that is late decides nothing.
        self._every = min(_LONGEST_BEAT_S, limit / 20)
        # A closed connection says more than silence: the process has ended, or must call again.
        self._patience = limit / 4
        # No wait below is longer than the patience, so a longer one was a stop of this process.
        self._clock = _Clock(self._patience)
        now = self._clock.now()
        self._peers = {
            peer: _Peer(peer, count, now, meeting.addresses.get(peer, ""))
            for peer in (range(1, count) if index == 0 else (0,))
        }
        self._token: bytes | None = None
        self.state = {"index": index, "host": socket.gethostname()} | _SETUP
        self._verdict: Verdict | None = None
        self._is_judged = threading.Event()

    def start(self) -> None:
        run = self._serve if self._index == 0 else self._call
        threading.Thread(target=run, args=(self._hub,), name="peers", daemon=True).start()

    def trust(self, token: bytes) -> None:
        """Set the token of the run; from then on, processes that know the token are heard."""
        self._token = token

    def fail(self, error: BaseException) -> None:
        """Tell all processes of an error that ends this process; return when they know.

        The caller then has a quarter of the limit to end. If another process is missing, and the
        error a consequence, this ends the process with EXIT_CODE. Returns at once if no process can
        know, because this process is not process 0 and has no token yet.
        """
        if self._token is None and self._index != 0:
            return
        if not self.state["error"]:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self.state["error"] = text[:_LONGEST_ERROR]
        self._is_judged.wait(3 * self._limit)
        if self._verdict is not None and self._index not in self._verdict.to_blame:
            traceback.print_exception(error)
            self._leave(EXIT_CODE)

    # --------------------------------------------------------------------------------- Process 0

    def _serve(self, servers: Sequence[socket.socket]) -> None:
        other_peers = list(self._peers.values())
        address = servers[0].getsockname()[0]
        failed_at: float | None = None
        with Listener(servers, self._answer, self._lose, _make_challenge) as self._listener:
            while self._verdict is None:
                self._listener.exchange(self._every)
                now = self._clock.now()
                hub_peer = _Peer(0, self._count, now, address, self.state)
                failed = [peer for peer in (hub_peer, *other_peers) if peer.error]
                gone = [
                    peer for peer in other_peers if peer.closed is not None and not peer.is_ended
                ]
                lost = _missing(other_peers, now, self._limit, self._patience)
                if failed and failed_at is None:
                    failed_at = now
                if lost:
                    # A cut in the network silences several processes at nearly the same time: the
                    # verdict names all that are suspect by now.
                    lost = _missing(other_peers, now, self._limit / 2, 0.0)
                    self._verdict = self._judge(lost, now)
                elif failed_at is not None and now > failed_at + _GRACE_S and not gone:
                    self._verdict = self._judge(failed, now)
            # All other processes end first: jax ends a process at once if process 0 is gone.
            deadline = self._clock.now() + 2 * self._patience
            living = [peer for peer in other_peers if peer not in lost]
            while any(peer.line for peer in living) and self._clock.now() < deadline:
                self._listener.exchange(self._every)
        self._conclude()

    def _answer(self, connection: Connection, line: bytes) -> bytes:
        """Admit a process that knows the token; answer its states with the state of process 0."""
        peer = connection.caller
        if peer is None:
            connection.caller = self._admit(connection, line)
            return b""
        peer.hear(json.loads(line), self._clock.now())
        verdict = self._verdict and dataclasses.astuple(self._verdict)
        return json.dumps(self.state | {"verdict": verdict}).encode() + b"\n"

    def _admit(self, connection: Connection, line: bytes) -> _Peer:
        index = line.partition(b" ")[0]
        peer = self._peers.get(int(index)) if index.isdigit() else None
        if self._token is None or peer is None:
            raise ValueError("is no process of this run")
        # compare_digest takes equal time wherever the texts differ, so a caller cannot guess a
        # proof byte by byte.
        if not hmac.compare_digest(line, _prove(self._token, connection.greeting, peer.index)):
            raise ValueError(f"does not know the token of this run, as process {peer.index} does")
        # After a broken connection a process often calls again before the old connection ends here.
        if isinstance(peer.line, Connection):
            self._listener.close(peer.line)
        peer.line, peer.address = connection, connection.address
        return peer

    def _lose(self, connection: Connection) -> None:
        if connection.caller.line is connection:
            connection.caller.lose(self._clock.now())

    # ------------------------------------------------------------------------------ Other processes

    def _call(self, address: tuple[str, int]) -> None:
        hub = self._peers[0]
        while self._verdict is None:
            if self._token is not None:
                with contextlib.suppress(*NOT_A_PEER):
                    self._converse(address, hub, self._token)
            now = self._clock.now()
            hub.lose(now)
            # When the run is over, process 0 may end before its last state arrives here.
            patience = self._limit if self.state["is_done"] else self._patience
            if self._verdict is None and hub.is_missing(now, self._limit, patience):
                self._verdict = self._judge([hub], now)
                self._conclude()
            time.sleep(self._every)

    def _converse(self, address: tuple[str, int], hub: _Peer, token: bytes) -> None:
        """Exchange states with process 0 until the verdict; NOT_A_PEER if the connection breaks."""
        with (
            socket.create_connection(address, timeout=self._patience) as line,
            line.makefile("rb") as answers,
        ):
            challenge = answers.readline(_LONGEST_CHALLENGE).rstrip(b"\n")
            line.sendall(_prove(token, challenge, self._index) + b"\n")
            hub.line, hub.address = line, line.getpeername()[0]
            while True:
                line.sendall(json.dumps(self.state).encode() + b"\n")
                values = json.loads(answers.readline(LONGEST_LINE))
                hub.hear(values, self._clock.now())
                if values.get("verdict"):
                    text, to_blame = values["verdict"]
                    self._verdict = Verdict(str(text), tuple(to_blame))
                    # Inside of the connection: process 0 waits as long as it is open.
                    return self._conclude()
                time.sleep(self._every)

    # -------------------------------------------------------------------------------------- The end

    def _judge(self, peers: Sequence[_Peer], now: float) -> Verdict:
        reasons = [
            f"{peer.describe_event('failed')}: {peer.error}"
            if peer.error
            else f"{peer.describe_event('is missing: last heard')}, {now - peer.heard:.0f} s ago"
            for peer in peers[:_MOST_NAMED]
        ]
        if len(peers) > _MOST_NAMED:
            reasons.append(f"{len(peers) - _MOST_NAMED} more processes")
        saved_steps = [
            state.get("saved") for state in (self.state, *(peer.state for peer in peers))
        ]
        saved = max((step for step in saved_steps if step is not None), default=None)
        start = "its last checkpoint" if saved is None else f"checkpoint {saved} or a later one"
        remedy = f"end what is left of it, start all again: the run resumes from {start}"
        return Verdict("; ".join([*reasons, remedy]), tuple(peer.index for peer in peers))

    def _conclude(self) -> None:
        """Print the verdict and end the process, unless its own error ends it in time."""
        assert self._verdict is not None
        # A closed terminal must not keep the process alive.
        with contextlib.suppress(OSError, ValueError):
            # Names and errors come from other processes, and could control the terminal.
            text = terminal.printable(" ".join(self._verdict.text.split()))
            print(f"spell_jax: {text}", file=sys.stderr, flush=True)
        self._is_judged.set()
        if self.state["error"]:
            time.sleep(self._patience)
        self._leave(1 if self.state["error"] else EXIT_CODE)

    def _leave(self, status: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        # os._exit by default: a collective, in which the main thread may wait, ends by no
        # exception.
        self._end(status)


# ---------------------------------------------------------------------------------- Of this process

_heartbeats: Heartbeats | None = None


def start(meeting: Meeting, limit: float) -> None:
    """Start the heartbeats of this process, with the arguments of Heartbeats."""
    global _heartbeats
    _heartbeats = Heartbeats(meeting, limit)
    _heartbeats.start()
    # jax aborts a process that loses its connection to process 0, and has no hook for that.
    ctypes.CDLL(None).signal(signal.SIGABRT, _announce_abort)


def is_running() -> bool:
    return _heartbeats is not None


def trust(token: bytes) -> None:
    """Set the token of the run for the heartbeats of this process."""
    assert _heartbeats is not None
    _heartbeats.trust(token)


def note(**state: Any) -> None:
    """Record the `phase`, `step` (steps done), `saved` (last checkpoint) or `is_done`."""
    if _heartbeats is not None:
        _heartbeats.state.update(state)


def fail(error: BaseException) -> None:
    """Call Heartbeats.fail for this process; do nothing if it is alone."""
    if _heartbeats is not None:
        _heartbeats.fail(error)


@contextlib.contextmanager
def announced() -> Iterator[None]:
    """Report an exception to all processes before it propagates.

    Otherwise an outer context would wait for processes that still run. SystemExit is not reported,
    because every process raises it.
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
