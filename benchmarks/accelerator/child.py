"""The process of one section: python -m benchmarks.accelerator.child MODULE.

1. The process imports everything that the section needs and waits for a line of JSON on its
   standard input, the setting. A section's imports thus run while the section before it measures.
2. Messages to the parent are lines of JSON in the pipe $ACCELERATOR_PIPE: the cases, each case's
   begin and its numbers or its error, and the end. Output of libraries goes to the section's log.
3. An exception, such as one of a device that is out of memory, ends its case, not the process.
4. A module with ONLY_COMMANDS = True measures commands in processes of their own. Its own process
   does not open the devices.
"""

from __future__ import annotations

import concurrent.futures
import gc
import importlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from benchmarks.accelerator.section import Case, Setting

PIPE = "ACCELERATOR_PIPE"
_DESCRIBE = "--describe"
_PREPARE_SECONDS = 150.0  # for what all cases of a section prepare together
_ERROR_CHARACTERS = 500  # kept of an error's text: a compiler's message starts with the figures
_VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "torch", "transformers")


def machine_of(commit: str) -> dict[str, Any]:
    """Describe the device, its number and memory, versions of the packages, and the commit."""
    device = jax.devices()[0]
    machine: dict[str, Any] = {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "commit": commit,
    }
    limit = (device.memory_stats() or {}).get("bytes_limit")  # a CPU has none
    if limit:
        machine["memory_gib"] = round(limit / 2**30, 1)
    driver = pathlib.Path("/proc/driver/nvidia/version")
    if driver.exists():
        words = driver.read_text().split()
        machine["driver"] = next((w for w in words if w[:1].isdigit() and w.count(".") >= 1), "")
    for name in _VERSIONS:
        try:
            machine[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return machine


def play(
    cases: Sequence[Case], skip: Sequence[str], together: bool, send: Callable[..., None]
) -> None:
    """Prepare and run the cases that are not skipped.

    They are prepared together, in threads, or each right before it runs. After a crash, the second
    way shows the parent which preparation crashed.
    """
    planned_cases = [case for case in cases if case.name not in skip]
    unprepared = _prepare(planned_cases, send) if together else {}
    for case in planned_cases:
        limit = case.limit if together or not case.prepare else case.limit + _PREPARE_SECONDS
        send(begin=case.name, limit=limit)
        clock = time.perf_counter()
        text, reason = "", unprepared.get(case.name, "")
        if not reason:
            try:
                if case.prepare and not together:
                    case.prepare()
                text = json.dumps(finite(case.run()))
            # SystemExit too: a library that exits ends its case, not the section.
            except (Exception, SystemExit) as error:
                reason = _text_of(error)
        seconds = time.perf_counter() - clock
        if reason:
            send(error=case.name, message=reason, seconds=seconds)
        else:
            send(result=case.name, numbers=json.loads(text), seconds=seconds)
        gc.collect()  # a case's arrays, before the next case needs the device's memory


def finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by their names, such as "nan"."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _prepare(cases: Sequence[Case], send: Callable[..., None]) -> dict[str, str]:
    """Run what cases prepare, in threads; return the reasons of failed preparations, by name."""
    jobs = [(case.name, case.prepare) for case in cases if case.prepare]
    if not jobs:
        return {}
    send(prepare=len(jobs), limit=_PREPARE_SECONDS + 30)
    # Not a `with` block: it would wait for a compilation that hangs.
    pool = concurrent.futures.ThreadPoolExecutor(max(2, min(12, (os.cpu_count() or 2) - 2)))
    # XLA compiles without Python's lock, so threads compile side by side.
    futures = {pool.submit(job): name for name, job in jobs}
    finished, hanging = concurrent.futures.wait(futures, timeout=_PREPARE_SECONDS)
    reasons = {futures[f]: f"compiled for over {_PREPARE_SECONDS:.0f} s" for f in hanging}
    for future in finished:
        if error := future.exception():
            reasons[futures[future]] = _text_of(error)
    pool.shutdown(wait=False, cancel_futures=True)
    return reasons


def _end_with_parent() -> None:
    """Kill this process and its children when the parent has ended, however it ended."""
    # The pipe closes when the parent ends, also by SIGKILL, which no handler catches.
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def _text_of(error: BaseException) -> str:
    """Make one line of an exception; its traceback goes to the log."""
    traceback.print_exception(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_ERROR_CHARACTERS]


def describe(commit: str) -> dict[str, Any]:
    """Return the platform of the devices and the machine; opens the devices."""
    return {"platform": jax.default_backend(), "machine": machine_of(commit)}


def _describe_elsewhere(commit: str) -> dict[str, Any]:
    """Return what `describe` does, from a process that ends: one process holds a TPU at a time."""
    command = [sys.executable, "-m", "benchmarks.accelerator.child", _DESCRIBE, commit]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        error = process.stderr[-_ERROR_CHARACTERS:]
        raise RuntimeError(f"{' '.join(command[1:])} failed: {error}")
    return json.loads(process.stdout.splitlines()[-1])


def main(module_name: str) -> None:
    module = importlib.import_module(module_name)
    pipe = os.fdopen(int(os.environ[PIPE]), "w", buffering=1)

    def send(**message: Any) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    text = sys.stdin.readline()
    if not text:  # the parent ended before this section's turn
        return
    threading.Thread(target=_end_with_parent, daemon=True).start()
    order: Mapping[str, Any] = json.loads(text)
    # A second run in the same folder compiles nothing again, so its minutes go to cases.
    cache = pathlib.Path(order["out"]) / "cache"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    only_commands = getattr(module, "ONLY_COMMANDS", False)
    here = (_describe_elsewhere if only_commands else describe)(order["commit"])
    # The section's commands need the device, which a TPU lends to one process only.
    if only_commands:
        jax.config.update("jax_platforms", "cpu")  # for arrays that are compared
    # Without this check, full sizes would run for hours on a machine without a driver.
    if here["platform"] == "cpu" and not order["tiny"]:
        send(refused="no accelerator: jax finds only the CPU; --tiny plays all sections on it")
        return
    fields = {name: order[name] for name in ("tiny", "seconds", "train", "before")}
    setting = Setting(here["platform"], out=pathlib.Path(order["out"]), **fields)
    cases = module.cases(setting)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    send(cases=names, machine=here["machine"] | {"tiny": order["tiny"]})
    play(cases, order["skip"], order["together"], send)
    send(end=True)
    pipe.close()
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads that hang


if __name__ == "__main__":
    if sys.argv[1] == _DESCRIBE:
        print(json.dumps(describe(sys.argv[2])))
    else:
        main(sys.argv[1])
