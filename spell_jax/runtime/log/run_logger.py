"""Logging of a run: metrics, episodes, external loggers, and a progress line.

A background thread writes, so no step waits for a disk or a network. `flush` waits for it, as
before a checkpoint: everything up to that step is then on disk, also after a loss of power.
"""

from __future__ import annotations

import os
import pathlib
import queue
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from absl import logging
from etils import epath

from spell_jax.runtime.files import durable, paths
from spell_jax.runtime.files.episodes import EpisodeWriter
from spell_jax.runtime.hosts import peers
from spell_jax.runtime.log.loggers import Wandb
from spell_jax.runtime.log.metrics import Metrics, MetricsWriter
from spell_jax.runtime.log.progress import Progress

_COMPILED = "/jax/core/compile/backend_compile_duration"
_STATUS_FILE = pathlib.Path("/proc/self/statm")  # Linux; the second number counts resident pages
_MOST_EMPTY = 3  # empty updates in a row before the log explains them


class Background:
    """A thread that does submitted work in order; a context that ends when all work is done.

    The first error is raised by every later `submit` and `flush`, and at the end of the context
    unless another error ends it. Work submitted after an error still runs. `submit` blocks while
    `max_queued` items are queued.
    """

    def __init__(self, max_queued: int = 8) -> None:
        # Bounded: if the disk is slower than the steps, memory must not fill up.
        self._queue: queue.Queue[Callable[[], Any] | None] = queue.Queue(max_queued)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._do_work, name="background", daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, _type: Any, error: BaseException | None, _traceback: Any) -> None:
        self._queue.put(None)
        self._thread.join()
        if error is None:
            self._raise()

    def submit(self, work: Callable[..., Any], *args: Any) -> None:
        """Queue work(*args), which must not use a device."""
        # All hosts must start collectives in the same order, which a second thread would not keep.
        self._queue.put(lambda: work(*args))
        self._raise()

    def flush(self) -> None:
        self._queue.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _do_work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException as error:
                # Kept for `submit` and `flush`: raised here, the error would end only this thread.
                # The first error counts, because later ones often follow from it.
                self._error = self._error or error
            self._queue.task_done()


class PhaseTimer:
    """Seconds by phase; at every moment exactly one phase is running."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        # A first phase from the beginning: the seconds of all phases add up to the time that
        # passed.
        self._name = "start"
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, name: str) -> None:
        now = self._clock()
        self._seconds[self._name] += now - self._since
        self._name, self._since = name, now

    def reassign(self, seconds: Mapping[str, float]) -> None:
        """Move seconds from the current phase to the named phases."""
        for name, value in seconds.items():
            self._seconds[name] += value
            self._seconds[self._name] -= value

    def spent(self, name: str) -> float:
        """Return a phase's seconds since the last `take`, less the time since the last `enter`."""
        return self._seconds[name]

    def take(self) -> dict[str, float]:
        """Return and reset the seconds by phase; their sum is the time since the last call."""
        # Entering the current phase again adds its seconds until now.
        self.enter(self._name)
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds


class ProcessStats:
    """Counts the programs that XLA compiles or loads from its cache, starting now."""

    def __init__(self) -> None:
        self._programs = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_) -> None:
        self._programs += event == _COMPILED

    def numbers(self) -> dict[str, float]:
        """Return resident memory (MiB), programs compiled since the start, and `device_memory`."""
        numbers = {"resident_mib": resident_bytes() / 2**20, "programs": float(self._programs)}
        return numbers | device_memory(jax.local_devices())

    def close(self) -> None:
        # jax before 0.9 cannot unregister a listener; it then counts on, and is not read.
        unregister = getattr(jax.monitoring, "unregister_event_duration_listener", None)
        if unregister is not None:
            unregister(self._hear)


def device_memory(devices: Sequence[Any]) -> dict[str, float]:
    """Return MiB in use on the fullest device, now and at peak; {} if a device reports none."""
    stats = [device.memory_stats() or {} for device in devices]
    keys = {"device_mib": "bytes_in_use", "device_peak_mib": "peak_bytes_in_use"}
    return {
        name: max(device[key] for device in stats) / 2**20
        for name, key in keys.items()
        if all(key in device for device in stats)
    }


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes (its peak if there is no /proc)."""
    if _STATUS_FILE.exists():
        return int(_STATUS_FILE.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # ru_maxrss is in bytes on macOS, in KiB on Linux.
    return peak if sys.platform == "darwin" else peak * 1024


def explain_all_empty(lines: Sequence[Mapping[str, Any]], hints: Mapping[str, str]) -> str:
    """Explain why all updates of a run were empty; "" if one was not.

    `lines` are the lines of metrics.jsonl, `hints` as in RunLogger.
    """
    if not lines or not all(line.get("train/empty_update") for line in lines):
        return ""
    means = {
        name: sum(values) / len(values)
        for name in hints
        if (values := [line[name] for line in lines if line.get(name) is not None])
    }
    updates = f"all {len(lines)} updates were" if len(lines) > 1 else "the only update was"
    text = f"{updates} empty, the weights did not change. "
    return (text + _main_cause(means, hints)).strip()


def _main_cause(means: Mapping[str, float], hints: Mapping[str, str]) -> str:
    """Return the largest metric of the hints, with its value and hint; "" without one."""
    shares = {name: means[name] for name in hints if name in means}
    if not shares:
        return ""
    name = max(shares, key=lambda name: shares[name])
    return f"{name} = {shares[name]:.2f}: {hints[name]}"


class RunLogger:
    """Everything that a run writes and shows between two checkpoints; a context.

    Every process makes one and calls it in the same way; only process 0 writes. The run has done
    `finished_steps` of `steps` steps; data of later steps in the folder is dropped. `saved` is the
    `state` in the last checkpoint. `episodes` is the maximum number of characters per step, as in
    EpisodeWriter. Nothing is written if the folder was removed or renamed (durable.GoneError).
    `wandb` is a project of Weights & Biases; the project also gets the config. `timer` is given if
    the caller reads it too. `hints` are metric -> cause and remedy of empty updates in which this
    metric is the largest of them (AlgorithmConfig.hints). ValueError as MetricsWriter, ImportError
    as loggers.Wandb.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        steps: int,
        finished_steps: int = 0,
        saved: Mapping[str, Any] | None = None,
        *,
        episodes: int = 0,
        wandb: str = "",
        config: Mapping[str, Any] | None = None,
        timer: PhaseTimer | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> None:
        is_writer = jax.process_index() == 0
        # Without a finished step there is nothing to resume: the files start anew.
        folder, resume_step = epath.Path(workdir), finished_steps or None
        saved = saved or {}
        tail, queued = saved.get("metrics", ()), saved.get("episodes", {})
        self._workdirs = list(saved.get("workdirs", ()))
        loggers = [Wandb(wandb, folder, resume_step, config)] if wandb and is_writer else []
        self._background = Background()
        self._metrics = MetricsWriter(folder, resume_step, is_writer, tail, self._submit, loggers)
        self._watch = durable.FolderWatch(folder)
        workdirs = self._workdirs
        self._episodes = EpisodeWriter(
            *(folder, episodes, resume_step, is_writer),
            **{"queued": queued, "workdirs": workdirs, "submit": self._submit},
        )
        if paths.absolute(folder) not in workdirs:
            workdirs.append(paths.absolute(folder))
        self._process_stats = ProcessStats()
        self._shown: dict[str, float | str] = {}
        # Also holds the time limit.
        self.progress = Progress(steps, start=finished_steps, enabled=is_writer)
        self._timer = timer or PhaseTimer()
        self._empty_in_a_row, self._hints = 0, hints or {}

    def __enter__(self) -> RunLogger:
        self._background.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.progress.close()
        self._process_stats.close()
        self._background.__exit__(*error)
        if error[0] is None:
            self._metrics.close()

    def enter(
        self, phase: str, finished_steps: int, shown: Mapping[str, float | str] | None = None
    ) -> None:
        """Start a phase of the run, after `finished_steps` steps, and show the newest numbers."""
        self._shown |= shown or {}
        self._timer.enter(phase)
        peers.note(phase=phase, step=finished_steps)
        self.progress.update(finished_steps, phase, self._shown)

    def write(self, step: int, metrics: Metrics, episodes: Iterable[Any] = ()) -> None:
        """Write a step's metrics, the time since the last step, and the step's episodes.

        Raises the error of an earlier background write.
        """
        seconds = self._timer.take()
        metrics.add("time/step_seconds", sum(seconds.values()))
        for name, phase_seconds in seconds.items():
            metrics.add(f"time/seconds/{name}", phase_seconds)
        for name, value in self._process_stats.numbers().items():
            metrics.add(f"process/{name}", value)
        self._explain_empty(metrics.means())
        try:
            self._metrics.write(step, metrics)
        finally:
            # The next checkpoint must hold the episodes too, even if the disk is full.
            self._episodes.write(step, episodes)

    def _submit(self, work: Callable[..., Any], *args: Any) -> None:
        # Just before the work: a write by path would make the removed folder again.
        def check_and_work() -> None:
            self.check_folder()
            work(*args)

        self._background.submit(check_and_work)

    def _explain_empty(self, means: Mapping[str, float]) -> None:
        """Warn once about _MOST_EMPTY empty updates in a row, with the most frequent cause."""
        self._empty_in_a_row = self._empty_in_a_row + 1 if means.get("train/empty_update") else 0
        # Equal, not at least: one warning for each row of empty updates.
        if self._empty_in_a_row == _MOST_EMPTY and (cause := _main_cause(means, self._hints)):
            logging.warning(
                "%d updates in a row were empty, the weights did not change. %s",
                *(_MOST_EMPTY, cause),
            )

    def flush(self) -> None:
        """Wait until everything is on disk; raise the error of an earlier write, like `write`."""
        self._background.flush()

    def check_folder(self) -> None:
        """Raise GoneError if the folder was removed or renamed."""
        self._watch.check_folder()

    def tail(self) -> list[str]:
        return self._metrics.tail()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: last metrics, episodes not on disk yet, folders."""
        episodes, workdirs = self._episodes.queued(), list(self._workdirs)
        return {"metrics": self.tail(), "episodes": episodes, "workdirs": workdirs}
