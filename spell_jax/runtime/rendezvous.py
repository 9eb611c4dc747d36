"""Rendezvous: processes wait for each other before a run, and missing ones are named.

Every process connects to process 0 and sends its index. When all have connected, or at the time
limit, process 0 tells them which are missing and frees the port. Process 0 then listens for
heartbeats only at the addresses by which the other processes have reached it.
"""

from __future__ import annotations

import dataclasses
import re
import socket
import time
from collections.abc import Mapping, Sequence

from spell_jax.runtime import listener
from spell_jax.runtime.listener import Connection, Listener

_ALL_THERE = "all there "
_MISSING = "missing: "
_ANSWER = re.compile(rf"{_ALL_THERE}\d{{1,5}}|{_MISSING}[\w ,]+")
_PAUSE = 0.3  # seconds between connection attempts
# Seconds to wait for process 0 after the time limit: it answers at its own limit, which may come
# later, with the names of missing processes.
_PATIENCE = 5.0
_LONGEST_WAIT = 1.0  # seconds between two looks at the time limit


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Result of a rendezvous.

    Attributes:
      hub: listening sockets for heartbeats on process 0; elsewhere their host and port.
      addresses: on process 0, address from which each process called, by index; elsewhere the host
        of process 0.
    """

    hub: Sequence[socket.socket] | tuple[str, int]
    addresses: Mapping[int, str]


def wait_for_all(address: str, count: int, index: int, limit: float) -> Meeting:
    """Wait until all `count` >= 2 processes of a run have called this, at most `limit` seconds.

    `address` is host:port of process 0. TimeoutError names the missing processes; OSError if
    process 0 cannot listen at the port.
    """
    # Before jax's own wait, which ends the process at its limit without naming a missing process.
    host, port = split(address)
    deadline = time.monotonic() + limit
    if index == 0:
        return _await_all(host, port, count, deadline)
    return Meeting((host, _call((host, port), _name(index, count), deadline)), {0: host})


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
            door.exchange(min(seconds, _LONGEST_WAIT))
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
    return Meeting(list(hubs.values()), addresses)


def _call(address: tuple[str, int], name: str, deadline: float) -> int:
    """Connect until process 0 answers; return its port for heartbeats."""
    while (seconds := deadline - time.monotonic()) > 0:
        answer = _ask(address, name, seconds)
        if answer.startswith(_ALL_THERE):
            return int(answer.removeprefix(_ALL_THERE))
        if answer:
            raise TimeoutError(answer)
        # No answer is no error yet: process 0 may not listen yet, or may be restarting.
        time.sleep(_PAUSE)
    raise TimeoutError(f"{_MISSING}process 0, which does not answer at {address[0]}:{address[1]}")


def _ask(address: tuple[str, int], name: str, seconds: float) -> str:
    """Return the answer of process 0, or "" if none comes in `seconds` + _PATIENCE seconds."""
    try:
        with socket.create_connection(address, timeout=seconds) as line:
            line.sendall(f"{name}\n".encode())
            line.settimeout(seconds + _PATIENCE)
            answer = line.makefile("rb").readline(listener.LONGEST_LINE).decode("ascii", "replace")
    except OSError:
        return ""
    # Another server may listen at the port, with an answer of its own.
    return answer.strip() if _ANSWER.fullmatch(answer.strip()) else ""
