"""Rendezvous: processes wait for each other before a run, and missing ones are named.

Every process connects to process 0 and sends its index. When all have connected, or at the time
limit, process 0 tells them which are missing and frees the port. (jax's own wait ends the process
at the limit, without naming any.)
"""

from __future__ import annotations

import contextlib
import socket
import time

_ALL_THERE = "all there "
_PAUSE = 0.3  # seconds between connection attempts
_PATIENCE = 5.0  # seconds to wait for a caller's index, or for the answer of process 0
_LONGEST = 4096  # maximum size of a message in bytes


def wait_for_all(address: str, count: int, index: int, limit: float, news: str = "") -> str:
    """Waits until all `count` >= 2 processes of a run have called this, at most `limit` seconds.

    `address` is host:port of process 0, whose `news`, a short line, all get back. TimeoutError
    names the missing processes; OSError if process 0 cannot listen at the port.
    """
    host, port = address.rsplit(":", 1)
    deadline = time.monotonic() + limit
    if index == 0:
        _await_all(int(port), count, deadline, news)
        return news
    return _call((host.strip("[]"), int(port)), _name(index, count), deadline)


def listen(port: int) -> socket.socket:
    """A socket that listens at the port, by IPv6 too where there is IPv6; 0 is any free port."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=has_both)


def _name(index: int, count: int) -> str:
    return f"process {index} of {count}"


def _await_all(port: int, count: int, deadline: float, news: str) -> None:
    names = [_name(index, count) for index in range(1, count)]
    callers: dict[str, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(listen(port))
        while len(callers) < len(names):
            server.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                caller = stack.enter_context(server.accept()[0])
            except (TimeoutError, BlockingIOError):
                break
            name = _read(caller)
            if name in names:  # a second call comes from a restarted process
                callers[name] = caller
        missing = [name for name in names if name not in callers]
        for caller in callers.values():
            with contextlib.suppress(OSError):
                caller.sendall((", ".join(missing) or _ALL_THERE + news).encode())
    if missing:
        raise TimeoutError(f"missing: {', '.join(missing)}")


def _call(address: tuple[str, int], name: str, deadline: float) -> str:
    """Connects until process 0 answers, with its news.

    A process 0 that closes without an answer may be restarting.
    """
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as line:
                line.sendall(name.encode())
                line.shutdown(socket.SHUT_WR)
                line.settimeout(left + _PATIENCE)
                answer = line.recv(_LONGEST).decode(errors="replace")
        except OSError:
            answer = ""
        if answer.startswith(_ALL_THERE):
            return answer.removeprefix(_ALL_THERE)
        if answer:
            raise TimeoutError(f"missing: {answer}")
        time.sleep(_PAUSE)
    raise TimeoutError(f"missing: process 0, which does not answer at {address[0]}:{address[1]}")


def _read(caller: socket.socket) -> str:
    caller.settimeout(_PATIENCE)
    with contextlib.suppress(OSError):
        return caller.recv(_LONGEST).decode(errors="replace")
    return ""
