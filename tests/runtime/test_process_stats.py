from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax

from spell_jax.runtime.run_logger import device_memory


def device(**stats: int) -> Any:
    return SimpleNamespace(memory_stats=lambda: stats or None)


def test_device_memory_is_the_maximum_over_devices():
    full = [
        device(bytes_in_use=2**20, peak_bytes_in_use=2**23),
        device(bytes_in_use=2**21, peak_bytes_in_use=2**22),
    ]
    assert device_memory(full) == {"device_mib": 2, "device_peak_mib": 8}
    assert device_memory([device(bytes_in_use=2**20)]) == {"device_mib": 1}
    assert device_memory([device()]) == device_memory(jax.local_devices()[:1]) == {}
