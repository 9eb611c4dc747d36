"""A profiler trace of a call: time without a kernel, gaps between programs, the longest kernels."""

from __future__ import annotations

import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.accelerator.section import Numbers

_GAP_NS = 50_000  # between two kernels; launches within a program are less apart
# Lines of single kernels: a GPU's streams, a TPU's operations. Other lines sum these up.
_KERNEL_LINES = re.compile(r"Stream|^XLA Ops$")
_LONGEST = 12  # kernels that are named
_NUMBER = re.compile(r"(?<=[a-z])[._]\d+.*$")  # of a kernel among its like, in its name


def profile(call: Callable[[], Any], folder: pathlib.Path) -> Numbers:
    """Trace a call in a subfolder, which is deleted.

    Returns:
      "idle_share" (of the time from the first kernel to the last, in which none ran), "gaps" of
      more than 50 microseconds, their "gap_share" of the time and their "median_gap_us", and
      "kernels", the shares of the longest kinds of kernels. Nothing on a device without a trace,
      and "not_traced", the reason, if the profiler fails: what was timed before is worth keeping.
    """
    try:
        with tempfile.TemporaryDirectory(dir=folder) as traces:
            with jax.profiler.trace(traces):
                jax.block_until_ready(call())
            (path,) = pathlib.Path(traces).rglob("*.xplane.pb")
            spans = _kernels(path)
    except Exception as error:
        return {"not_traced": " ".join(str(error).split())[:200]}
    return _summary(spans) if spans else {}


def _kernels(path: pathlib.Path) -> list[tuple[float, float, str]]:
    """List (begin, end, name) of all kernels on the devices, in nanoseconds, by begin."""
    spans = []
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            if _KERNEL_LINES.search(line.name):
                spans += [(e.start_ns, e.start_ns + e.duration_ns, e.name) for e in line.events]
    return sorted(spans)


def _summary(spans: list[tuple[float, float, str]]) -> Numbers:
    begin = end = spans[0][0]
    idle, gaps = 0.0, []
    nanoseconds: dict[str, float] = {}
    # Kernels of several streams overlap: the device is idle only after the latest end so far.
    for first, last, name in spans:
        if first > end:
            idle += first - end
            if first - end > _GAP_NS:
                gaps.append(first - end)
        end = max(end, last)
        kind = _NUMBER.sub("", name)[:60]  # layers have numbered copies of the same kernel
        nanoseconds[kind] = nanoseconds.get(kind, 0.0) + last - first
    longest = sorted(nanoseconds, key=lambda kind: -nanoseconds[kind])[:_LONGEST]
    return {
        "idle_share": idle / (end - begin),
        "gaps": len(gaps),
        "gap_share": sum(gaps) / (end - begin),
        "median_gap_us": float(np.median(gaps)) / 1e3 if gaps else 0.0,
        "kernels": {kind: nanoseconds[kind] / (end - begin) for kind in longest},
    }
