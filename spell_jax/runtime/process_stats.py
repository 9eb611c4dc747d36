"""What a process takes as it goes on: memory, its own and its devices', and programs it has built.

A run that leaks, or that compiles in the middle, shows it in its own metrics.
"""

from __future__ import annotations

import os
import pathlib
import resource
import sys
from collections.abc import Sequence
from typing import Any

import jax

_BUILT = "/jax/core/compile/backend_compile_duration"
_STATUS = pathlib.Path("/proc/self/statm")  # Linux; the second number is resident pages


class Footprint:
    """Counts the programs that XLA builds, or reads from its cache, from here on."""

    def __init__(self) -> None:
        self._programs = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_) -> None:
        self._programs += event == _BUILT

    def numbers(self) -> dict[str, float]:
        """resident_mib: of this process, now (where there is no /proc: at most so far);
        programs: built since the start; and `device_memory`."""
        numbers = {"resident_mib": resident_bytes() / 2**20, "programs": float(self._programs)}
        return numbers | device_memory(jax.local_devices())

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._hear)


def device_memory(devices: Sequence[Any]) -> dict[str, float]:
    """device_mib, in use now, and device_peak_mib, at most so far: of the fullest of the devices.
    Nothing where they do not tell, as CPUs."""
    stats = [device.memory_stats() or {} for device in devices]
    names = {"device_mib": "bytes_in_use", "device_peak_mib": "peak_bytes_in_use"}
    return {
        name: max(some[told] for some in stats) / 2**20
        for name, told in names.items()
        if all(told in some for some in stats)
    }


def resident_bytes() -> int:
    """Memory of this process that is in RAM, in bytes."""
    if _STATUS.exists():
        return int(_STATUS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
