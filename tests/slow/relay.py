"""A relay of IP packets between network namespaces that can delay packets and break connections.

Each namespace has a tun device, whose other end is a file descriptor of this process. A thread
forwards every packet to the namespace of its destination.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import ipaddress
import os
import random
import select
import struct
import threading
import time
from collections.abc import Mapping

DEVICE = "tun0"
_TUNSETIFF, _IFF_TUN_NO_PI = 0x400454CA, 0x1001
_TCP, _RST = 6, 4


class Relay:
    """Forwards packets between namespaces, given by name and IPv4 address, until `close`.

    `delays` are seconds that packets from an address wait. Each TCP packet with data breaks its
    connection with the probability `broken`: both sides then get a reset.
    """

    def __init__(self, namespaces: Mapping[str, str], seed: int = 0) -> None:
        self.delays: dict[str, float] = {}
        self.broken = 0.0
        self.breaks = 0  # connections broken so far
        self._random = random.Random(seed)
        self._waiting: list[tuple[float, int, bytes]] = []  # due time, number, packet
        self._number = 0
        self._is_over = threading.Event()
        self._ends: dict[bytes, int] = {}  # file descriptors by packed address
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(dict(namespaces),), daemon=True)
        self._thread.start()
        assert self._is_ready.wait(30), "no tun device"

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        for end in self._ends.values():
            os.close(end)

    def _run(self, namespaces: dict[str, str]) -> None:
        for name, address in namespaces.items():
            self._ends[ipaddress.ip_address(address).packed] = _open(name)
        self._is_ready.set()
        addresses = {end: str(ipaddress.ip_address(key)) for key, end in self._ends.items()}
        while not self._is_over.is_set():
            for end in select.select(list(self._ends.values()), [], [], 0.02)[0]:
                packet = os.read(end, 1 << 16)
                if packet[0] >> 4 != 4:
                    continue  # IPv6, of which the hosts have no addresses
                if self._must_break(packet):
                    self.breaks += 1
                    for reset in _resets(packet):
                        self._forward(reset)
                    continue
                due = time.monotonic() + self.delays.get(addresses[end], 0.0)
                self._number += 1
                heapq.heappush(self._waiting, (due, self._number, packet))
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                self._forward(heapq.heappop(self._waiting)[2])

    def _must_break(self, packet: bytes) -> bool:
        if not self.broken or packet[9] != _TCP:
            return False
        header = 4 * (packet[0] & 15)
        has_data = len(packet) > header + 4 * (packet[header + 12] >> 4)
        return has_data and self._random.random() < self.broken

    def _forward(self, packet: bytes) -> None:
        end = self._ends.get(packet[16:20])
        if end is not None:
            try:
                os.write(end, packet)
            except OSError:  # the device is down: the packet is lost
                return


def _open(namespace: str) -> int:
    """Open the other end of a namespace's tun device; the calling thread moves to the namespace."""
    folder = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(folder, 0):
        raise OSError(ctypes.get_errno(), "setns", namespace)
    os.close(folder)
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN_NO_PI))
    return end


def _resets(packet: bytes) -> list[bytes]:
    """Make resets for both sides of a packet's connection, with the number that a side accepts."""
    header = 4 * (packet[0] & 15)
    source, target = packet[12:16], packet[16:20]
    ports, sequence, acknowledged = (
        packet[header : header + 4],
        packet[header + 4 : header + 8],
        (packet[header + 8 : header + 12]),
    )
    return [
        _reset(source, target, ports, sequence),
        _reset(target, source, ports[2:] + ports[:2], acknowledged),
    ]


def _reset(source: bytes, target: bytes, ports: bytes, sequence: bytes) -> bytes:
    tcp = bytearray(ports + sequence + bytes(4) + bytes([5 << 4, _RST]) + bytes(6))
    tcp[16:18] = _checksum(source + target + struct.pack("!HH", _TCP, len(tcp)) + tcp)
    ip = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, _TCP, 0))
    ip += source + target
    ip[10:12] = _checksum(bytes(ip))
    return bytes(ip + tcp)


def _checksum(data: bytes) -> bytes:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)
