"""How processes wait for each other before they begin, and who is missing when they do not come.

1. Process 0 listens at an address that all know; every other one calls it and says its number.
2. When all have called they are told so, and the port is free again for what follows.
3. When time is up they are told who is missing. (jax's own waiting ends the process instead, with
   nobody named.)
"""

from __future__ import annotations

import contextlib
import socket
import time

_ALL_THERE = "all there"
_PAUSE = 0.3  # seconds between two calls at a closed door
_PATIENCE = 5.0  # seconds for a caller to say its number, or for process 0 to say who is missing
_LONGEST = 4096  # bytes of what is said


def meet(address: str, count: int, index: int, limit: float) -> None:
    """Returns when all processes of a run are there; each one calls this.

    Args:
      address: host:port of process 0, whose port is free.
      count: of processes, at least 2.
      index: of this one, from 0.
      limit: seconds.

    Raises:
      TimeoutError: time is up; says who is missing.
      OSError: process 0 cannot listen at the port.
    """
    host, port = address.rsplit(":", 1)
    deadline = time.monotonic() + limit
    if index == 0:
        _await_all(int(port), count, deadline)
    else:
        _call((host.strip("[]"), int(port)), _name(index, count), deadline)


def _name(index: int, count: int) -> str:
    return f"process {index} of {count}"


def _await_all(port: int, count: int, deadline: float) -> None:
    names = [_name(index, count) for index in range(1, count)]
    callers: dict[str, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(port))
        while len(callers) < len(names):
            server.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                caller = stack.enter_context(server.accept()[0])
            except (TimeoutError, BlockingIOError):
                break
            name = _read(caller)
            if name in names:  # one that calls again was started again
                callers[name] = caller
        missing = [name for name in names if name not in callers]
        for caller in callers.values():
            with contextlib.suppress(OSError):
                caller.sendall((", ".join(missing) or _ALL_THERE).encode())
    if missing:
        raise TimeoutError(f"missing: {', '.join(missing)}")


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _call(address: tuple[str, int], name: str, deadline: float) -> None:
    """Calls until process 0 has answered; one that hangs up without a word may be starting anew."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as line:
                line.sendall(name.encode())
                line.shutdown(socket.SHUT_WR)
                line.settimeout(left + _PATIENCE)
                answer = line.recv(_LONGEST).decode(errors="replace")
        except OSError:
            answer = ""
        if answer == _ALL_THERE:
            return
        if answer:
            raise TimeoutError(f"missing: {answer}")
        time.sleep(_PAUSE)
    raise TimeoutError(f"missing: process 0, which does not answer at {address[0]}:{address[1]}")


def _read(caller: socket.socket) -> str:
    """What a caller says, which may be a stranger; empty if nothing."""
    caller.settimeout(_PATIENCE)
    with contextlib.suppress(OSError):
        return caller.recv(_LONGEST).decode(errors="replace")
    return ""
