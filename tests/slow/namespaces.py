"""Hosts in network namespaces of this machine, each with an address and a host name of its own.

They need root and /dev/net/tun; everything that is made is removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from tests.slow.relay import DEVICE, Relay

_ETC = pathlib.Path("/etc/netns")


def why_not() -> str:
    """Return the reason why there can be no namespaces here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "unshare") if not shutil.which(name)]
    if missing or not os.access("/dev/net/tun", os.W_OK):
        return f"network namespaces need {', '.join(missing) or '/dev/net/tun'}"
    return ""


class Network:
    """Hosts of a network; host INDEX is named hostINDEX."""

    def __init__(self, names: Sequence[str], relay: Relay) -> None:
        self._names, self.relay = names, relay

    def command(self, index: int, command: Sequence[str]) -> list[str]:
        """Return a command line that runs `command` on a host, with the process id of `command`."""
        script = f'hostname host{index} && exec "$@"'
        inside = ["ip", "netns", "exec", self._names[index], "unshare", "--uts"]
        return [*inside, "sh", "-c", script, "sh", *command]

    def cut_off(self, index: int) -> None:
        """Take the network device of a host down."""
        _ip("-n", self._names[index], "link", "set", DEVICE, "down")


def address(index: int) -> str:
    return f"10.77.0.{index + 1}"


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    names = [f"spell{os.getpid()}_{index}" for index in range(count)]
    hosts = "".join(f"{address(index)} host{index}\n" for index in range(count))
    with contextlib.ExitStack() as stack:
        for index, name in enumerate(names):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
            (_ETC / name).mkdir(parents=True)
            stack.callback(shutil.rmtree, _ETC / name)
            (_ETC / name / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
            _ip("-n", name, "tuntap", "add", "dev", DEVICE, "mode", "tun")
            _ip("-n", name, "address", "add", f"{address(index)}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip("-n", name, "link", "set", device, "up")
        relay = Relay({name: address(index) for index, name in enumerate(names)})
        stack.callback(relay.close)
        yield Network(names, relay)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
