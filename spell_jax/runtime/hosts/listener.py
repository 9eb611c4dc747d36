"""Listening sockets for the processes of a run, which strangers may reach too.

A port of a run is open to port scanners, health checks and other runs. A stranger must not end the
run, take its file descriptors or its time, or keep a process of the run from being heard.
"""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import logging
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

# A connection that was closed (OSError), or any error of parsing a line that a stranger has sent.
NOT_A_PEER = (OSError, ValueError, LookupError, TypeError, RecursionError)
LONGEST_LINE = 1 << 16  # bytes; a state of a process has some hundred

_LONGEST_NAME = 256  # bytes of the line in which a caller says who it is
# Time for that line. A process needs milliseconds, and 4 s on a network that delays packets by 2 s.
_NAME_S = 10.0
# Connections that have not said who they are: 1,000 idle ones must not use up the descriptors.
_MOST_UNKNOWN = 64
_LOG_EVERY_S = 60.0  # a port scanner must not fill the log
_PAUSE_S = 0.05  # pause if this process has no descriptor for a caller

log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Connection:
    """An accepted connection.

    Attributes:
      line: socket, which does not block.
      address: address of the caller.
      opened: time of acceptance, in monotonic seconds.
      greeting: first line sent to the caller.
      caller: identity of the caller; None until the caller has said who it is.
      text: bytes of a line that has not ended yet.
      is_open: whether it is not closed yet.
    """

    line: socket.socket
    address: str
    opened: float
    greeting: bytes
    caller: Any = None
    text: bytearray = dataclasses.field(default_factory=bytearray)
    is_open: bool = True


class Listener:
    """Connections at listening sockets, served by one thread; a context that closes all sockets.

    A caller first says who it is in a line of at most 256 bytes, within 10 s. At most 64
    connections may wait for that line. A further one replaces the oldest from the address with the
    most, so that idle connections neither use up descriptors nor keep a process of the run outside.
    The listener counts the connections that it closes for such reasons, and logs their number and
    the last address at most once a minute.

    Args:
      servers: listening sockets.
      answer: function of a connection and a line, without its end, to the bytes of the answer. It
        sets `caller`. If it raises an error of NOT_A_PEER with a reason, the connection is closed.
      lose: function that is called with a known connection after it was closed.
      greet: function that returns the first line of a connection, without its end; "" for none.
    """

    def __init__(
        self,
        servers: Sequence[socket.socket],
        answer: Callable[[Connection, bytes], bytes],
        lose: Callable[[Connection], None],
        greet: Callable[[], bytes] = bytes,
    ) -> None:
        self._servers, self._answer, self._lose, self._greet = servers, answer, lose, greet
        self._connections: dict[socket.socket, Connection] = {}  # in the order of acceptance
        self._selector = selectors.DefaultSelector()
        self._refused, self._last_refusal, self._next_log = 0, "", time.monotonic()
        for server in servers:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        if self._refused:
            self._log_refused(time.monotonic())
        for line in [*self._connections, *self._servers]:
            line.close()
        self._selector.close()

    def exchange(self, wait: float) -> None:
        """Wait at most `wait` seconds for callers; accept connections and answer lines."""
        for key, _ in self._selector.select(wait):
            line = key.fileobj
            assert isinstance(line, socket.socket)
            if key.data is None:
                self._accept(line)
            # An answer to another line may have closed this connection since the wait.
            elif key.data.is_open:
                self._read_lines(key.data)
        now = time.monotonic()
        for connection in self._unknown():
            if now > connection.opened + _NAME_S:
                self.refuse(connection, f"did not say who it is within {_NAME_S:g} s")
        if self._refused and now >= self._next_log:
            self._log_refused(now)

    def close(self, connection: Connection) -> None:
        """Close a connection, unless it is closed already."""
        if connection.is_open:
            connection.is_open = False
            del self._connections[connection.line]
            self._selector.unregister(connection.line)
            connection.line.close()
            if connection.caller is not None:
                self._lose(connection)

    def send(self, connection: Connection, data: bytes) -> None:
        """Send bytes; a connection that does not take them at once is closed."""
        try:
            # The socket does not block: a slow caller must not stop the thread that hears all
            # callers.
            connection.line.sendall(data)
        except OSError:
            self.close(connection)

    def refuse(self, connection: Connection, why: str) -> None:
        """Close a connection, and log the reason later."""
        self.close(connection)
        self._refused += 1
        self._last_refusal = f"{connection.address} {why}"

    def _accept(self, server: socket.socket) -> None:
        unknown = self._unknown()
        if len(unknown) >= _MOST_UNKNOWN:
            # The oldest connection of the address with the most: a stranger with many connections
            # replaces its own, and not a process that is about to say who it is.
            counts = Counter(connection.address for connection in unknown)
            excess = max(unknown, key=lambda connection: counts[connection.address])
            self.refuse(excess, f"was one of {_MOST_UNKNOWN} that did not say who they are")
        try:
            line, address = server.accept()
        except BlockingIOError:  # the caller has hung up
            return
        except OSError:
            # No descriptor is free. The caller still waits, so the next select returns at once:
            # without a pause this thread would spin.
            time.sleep(_PAUSE_S)
            return
        line.setblocking(False)
        connection = Connection(line, plain(address[0]), time.monotonic(), self._greet())
        self._connections[line] = connection
        self._selector.register(line, selectors.EVENT_READ, connection)
        if connection.greeting:
            self.send(connection, connection.greeting + b"\n")

    def _read_lines(self, connection: Connection) -> None:
        try:
            if not (received := connection.line.recv(LONGEST_LINE)):
                raise ConnectionError("hung up before it said who it is")
            connection.text += received
            while connection.is_open:
                # The length counts before the line has ended: a caller that ends no line must not
                # fill the memory.
                end = connection.text.find(b"\n")
                size = end if end >= 0 else len(connection.text)
                longest = _LONGEST_NAME if connection.caller is None else LONGEST_LINE
                if size > longest:
                    raise ValueError(f"sent a line of more than {longest} bytes")
                if end < 0:
                    return
                line = bytes(connection.text[:end])
                del connection.text[: end + 1]
                if answer := self._answer(connection, line):
                    self.send(connection, answer)
        except NOT_A_PEER as error:
            # A known caller that hangs up is lost, as `lose` hears. Anything else is a stranger's
            # doing, or looks like it, and is logged.
            if connection.caller is not None and isinstance(error, OSError):
                self.close(connection)
            else:
                self.refuse(connection, str(error))

    def _unknown(self) -> list[Connection]:
        return [value for value in self._connections.values() if value.caller is None]

    def _log_refused(self, now: float) -> None:
        ports = ", ".join(str(server.getsockname()[1]) for server in self._servers)
        log.warning(
            "port %s of this run: closed connections: %d, the last because %s",
            ports,
            self._refused,
            self._last_refusal,
        )
        self._refused, self._next_log = 0, now + _LOG_EVERY_S


def plain(address: str) -> str:
    """Return an address without the IPv6 form of IPv4 addresses: 10.0.0.2 for ::ffff:10.0.0.2."""
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at `port` (0: any free port) of the addresses of `host`.

    A name stands for all addresses of this machine, and so does an address of another machine. An
    address of this machine, or localhost, stands for itself.
    """
    # A name or a foreign address may be a service of the cluster that leads to this machine, and
    # Debian has the machine's own name at 127.0.1.1.
    try:
        address = "127.0.0.1" if host == "localhost" else host
        family = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
        return socket.create_server((address, port), family=family)
    except ValueError:  # a name
        pass
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=has_both)
