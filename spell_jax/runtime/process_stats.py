"""Resource use of a process: host memory, device memory, and compiled programs."""

from __future__ import annotations

import os
import pathlib
import resource
import sys
from collections.abc import Sequence
from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_STATUS_FILE = pathlib.Path("/proc/self/statm")  # Linux; the second number counts resident pages


class ProcessStats:
    """Counts the programs that XLA compiles or loads from its cache, starting now."""

    def __init__(self) -> None:
        self._programs = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_) -> None:
        self._programs += event == _COMPILED

    def numbers(self) -> dict[str, float]:
        """Resident memory (MiB), programs compiled since the start, and `device_memory`."""
        numbers = {"resident_mib": resident_bytes() / 2**20, "programs": float(self._programs)}
        return numbers | device_memory(jax.local_devices())

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._hear)


def device_memory(devices: Sequence[Any]) -> dict[str, float]:
    """Memory use of the fullest device: device_mib (now) and device_peak_mib (peak so far).

    Empty if the devices do not report memory, such as CPUs.
    """
    stats = [device.memory_stats() or {} for device in devices]
    keys = {"device_mib": "bytes_in_use", "device_peak_mib": "peak_bytes_in_use"}
    return {
        name: max(device[key] for device in stats) / 2**20
        for name, key in keys.items()
        if all(key in device for device in stats)
    }


def resident_bytes() -> int:
    """Resident memory of this process, in bytes (its peak if there is no /proc)."""
    if _STATUS_FILE.exists():
        return int(_STATUS_FILE.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
