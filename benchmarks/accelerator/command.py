"""The command: plays sections in processes of their own and keeps the numbers of each."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from benchmarks.accelerator import child
from benchmarks.accelerator.results import FILE, NOT_RUN, START, Results
from benchmarks.base import BenchmarkCommand
from spell_jax.runtime import code_version

_OUT = "runs/accelerator"


@dataclasses.dataclass(frozen=True)
class Section:
    """A section's module, and the seconds that it may take."""

    module: str
    seconds: float


# In order of worth. Their sum is above the default of --minutes: a second run plays the rest.
SECTIONS = {
    name: Section(f"benchmarks.accelerator.{name}", seconds)
    for name, seconds in {
        "peaks": 60,
        "kernels_right": 120,
        "kernels_fast": 180,
        "update": 180,
        "decode": 150,
        "step": 330,
        "bits": 200,
        "train": 600,
    }.items()
}
_SPAWN_SECONDS = 120  # until a process has listed its cases
_FREE_BYTES = 2**30  # of the disk: compiled programs and logs


@dataclasses.dataclass
class Accelerator(BenchmarkCommand):
    """Measures kernels, update, decode and whole steps on this machine's accelerator.

    Every section runs in its own process, in order of worth: peaks (products, copies, calls),
    kernels_right (largest errors), kernels_fast (attention beside other kernels; tiles), update,
    decode, step (beside TRL and transformers), bits (runs repeat to the bit), train (SPELL on the
    weights and clusters of --train, for the time that is left).

    OUT/results.jsonl has a line for each case, OUT/logs what the processes printed, OUT/cache
    compiled programs. A second run in the same folder plays only what has no numbers yet. The exit
    status is 1 if a case failed or was not run. --tiny plays everything on a CPU, with interpreted
    kernels, in minutes; its numbers mean nothing.
    """

    out: Annotated[str, f"folder of results, logs and programs; empty: {_OUT}[_tiny]"] = ""
    minutes: Annotated[float, "time for all sections; 0 prints the table of an earlier run"] = 8.0
    sections: Annotated[str, "names of sections, separated by commas; empty: all"] = ""
    train: Annotated[str, "folder with weights and clusters for the section train"] = ""
    tiny: Annotated[bool, "sizes for a CPU"] = False
    again: Annotated[bool, "play also cases that have numbers"] = False
    commit: Annotated[str, "commit of this tree; empty: git is asked"] = ""

    def __post_init__(self) -> None:
        self.out = self.out or f"{_OUT}{'_tiny' * self.tiny}"

    def play(self) -> Results:
        """Play the sections; return all results of the folder.

        A full disk is their `fault`; the results before it are returned.
        """
        names, out = self.names(), pathlib.Path(self.out).resolve()
        if not 0 <= self.minutes < math.inf:
            raise ValueError(f"minutes = {self.minutes}: must be at least 0")
        if self.train and not pathlib.Path(self.train).is_dir():
            raise ValueError(
                f"train = {self.train!r}: must be a folder (docs/howto/accelerator.md)"
            )
        if not self.minutes:
            if not (out / FILE).exists():
                raise FileNotFoundError(f"out = {self.out!r}: has no {FILE}")
            return Results(out)
        (out / "logs").mkdir(parents=True, exist_ok=True)
        # A disk that is full from the start must say so at once, not after the first section.
        free = shutil.disk_usage(out).free
        if free < _FREE_BYTES:
            free_mib, least_mib = free >> 20, _FREE_BYTES >> 20
            text = f"out = {self.out!r}: {free_mib} MiB free, must be {least_mib} or more"
            return Results(out, fault=text)
        # Two runs on one device would measure each other. The lock ends with the process.
        with (out / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"out = {self.out!r}: another run uses it") from None
            results = Results(out)
            runner = _Runner(self, out, results, time.monotonic() + 60 * self.minutes)
            try:
                runner.play(names)
            except OSError as error:  # a disk that has become full
                results.fault = str(error)
            return results

    def names(self) -> list[str]:
        """List the chosen sections."""
        names = [name.strip() for name in self.sections.split(",") if name.strip()]
        for name in names:
            if name not in SECTIONS:
                raise ValueError(f"sections: {name!r} must be one of {', '.join(SECTIONS)}")
        if "train" in names and not self.train and not self.tiny:
            raise ValueError("train = '': the section train needs a folder")
        playable = [name for name in SECTIONS if name != "train" or self.train or self.tiny]
        return list(dict.fromkeys(names or playable))

    def head(self) -> str:
        """Return the commit of the tree."""
        return self.commit or code_version.head_commit()


# A process for each section: a crash, a hang or memory that a library keeps ends with it.
class _Process:
    """The process of a section, which waits for its turn once it has imported everything."""

    def __init__(self, section: str, out: pathlib.Path, tiny: bool):
        read, write = os.pipe()
        self.log = out / "logs" / f"{section}.log"
        log = self.log.open("ab")
        self._printed = log.tell()  # by earlier processes
        environment = {child.PIPE: str(write), "PYTHONUNBUFFERED": "1", "USE_JAX": "0"}
        # One GPU: TRL refuses several, and our side would use them.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
        # PyTorch and child processes need memory beside jax.
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        if tiny:
            # Tiny programs run for less time than XLA takes to optimize them.
            quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
            environment |= quick | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        self.section = section
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.accelerator.child", SECTIONS[section].module],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(write,),
            # Above jax's default of .75, because the section is alone on the device.
            env={"XLA_PYTHON_CLIENT_MEM_FRACTION": ".92"} | os.environ | environment,
            start_new_session=True,  # so that its own children end with it
        )
        os.close(write)
        log.close()
        # A thread reads the pipe, because a read of a pipe has no time limit, and a queue has one.
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, args=(read,), daemon=True).start()

    def _listen(self, read: int) -> None:
        with os.fdopen(read) as pipe:
            for text in pipe:
                self._messages.put(json.loads(text))
        self._messages.put({"ended": True})

    def order(self, **content: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its death is noticed by `next`
            self.process.stdin.write(json.dumps(content).encode() + b"\n")
            self.process.stdin.flush()

    def next(self, seconds: float) -> dict[str, Any]:
        """Return the next message, "late" after `seconds`, or "ended" with the process."""
        try:
            return self._messages.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return {"late": True}

    def end(self, seconds: float = 0.0) -> int:
        """Wait for the process, kill it and its children, and return its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        # The group, also after a clean end: a section's own commands may still run.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def last_line(self) -> str:
        """Return the last line that the process printed, cut."""
        with self.log.open("rb") as log:
            log.seek(self._printed)  # an earlier process's last line would be the wrong reason
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no output")


class _Stop(NamedTuple):
    """End of a section's process: the cases that it played, and whether others need a new one."""

    played: list[str]
    has_others: bool


class _Runner:
    """Plays sections one after the other until a deadline (of time.monotonic)."""

    def __init__(self, options: Accelerator, out: pathlib.Path, results: Results, deadline: float):
        self._options, self._out, self._results = options, out, results
        self._deadline = deadline
        self._commit = options.head()
        self._waiting: _Process | None = None

    def play(self, names: Sequence[str]) -> None:
        """Play sections; the next section's process is started before its turn."""
        # A request to end, as of a machine that is taken away, ends the processes too.
        earlier = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            for name, following in zip(names, [*names[1:], ""], strict=True):
                process = self._waiting or self._start(name)
                # Imports take seconds on the host, while this section uses the device.
                self._waiting = self._start(following) if following else None
                self._play_section(name, process)
        finally:
            if self._waiting:
                self._waiting.end()
            signal.signal(signal.SIGTERM, earlier)

    def _start(self, name: str) -> _Process:
        return _Process(name, self._out, self._options.tiny)

    def _play_section(self, name: str, process: _Process) -> None:
        """Play a section; after a crash or a hang, its other cases get a new process."""
        # A section that is slow on this device must not take the time of the sections after it.
        seconds = math.inf if self._options.tiny else SECTIONS[name].seconds
        end = min(self._deadline, time.monotonic() + seconds)
        skip = [] if self._options.again else self._results.finished(name)
        together = True
        while True:
            try:
                self._order(process, skip, together, end)
                stop = self._follow(process, name, skip, together, end)
            finally:
                process.end()
            if not stop.has_others or time.monotonic() >= end:
                return
            skip = [*skip, *stop.played]
            # A preparation that crashed is found by preparing the cases one by one.
            together = together and bool(stop.played)
            process = self._start(name)

    def _order(self, process: _Process, skip: Sequence[str], together: bool, end: float) -> None:
        process.order(
            together=together,
            out=str(self._out),
            tiny=self._options.tiny,
            train=self._options.train,
            commit=self._commit,
            skip=skip,
            seconds=end - time.monotonic(),
            # Shares need the peaks, and ratios need other cases' seconds.
            before=self._results.numbers(),
        )

    def _follow(
        self, process: _Process, name: str, skip: Sequence[str], together: bool, end: float
    ) -> _Stop:
        """Keep what a process reports, until it ends or its time is over."""
        machine: Mapping[str, Any] = {}
        left: list[str] = []
        played: list[str] = []
        current, began = "", time.monotonic()
        limit = began + _SPAWN_SECONDS

        def keep(case: str, seconds: float, **content: Any) -> None:
            line = {"section": name, "case": case, "seconds": round(seconds, 3)}
            self._results.add(line | {"machine": machine} | content)
            print(self._results.row(name, case), flush=True)
            played.append(case)
            if case in left:
                left.remove(case)

        def stop(reason: str, seconds: float) -> _Stop:
            """Blame the current case; without one, the preparation of all cases."""
            if current:
                keep(current, seconds, error=reason)
            elif not (together and left):  # else another process plays the cases that are left
                for case in [*left] or [START]:
                    keep(case, seconds, error=reason)
            return _Stop(played, bool(left))

        while True:
            fields = process.next(min(limit, end) - time.monotonic())
            seconds = time.monotonic() - began
            match fields:
                case {"ended": _}:
                    status = process.end(2.0)
                    reason = f"its process ended with {status}: {process.last_line()}"
                    return stop(reason, seconds)
                case {"late": _} if time.monotonic() >= end:
                    for case in [*left] if machine else [START]:
                        keep(case, seconds if case == current else 0.0, error=NOT_RUN)
                    return _Stop(played, False)
                case {"late": _}:
                    return stop(f"ended after {seconds:.1f} s", seconds)
                case {"refused": _}:
                    keep(START, seconds, error=fields["refused"])
                    return _Stop(played, False)
                case {"cases": _}:
                    machine = fields["machine"]
                    if other_machine := self._results.other_machine(machine):
                        raise ValueError(
                            f"out = {self._options.out!r}: has results of {other_machine}; another "
                            "device or size needs another folder"
                        )
                    # Only the process knows its cases: they depend on the platform.
                    left = [case for case in fields["cases"] if case not in skip]
                case {"prepare": _}:
                    limit = time.monotonic() + fields["limit"]
                case {"begin": _}:
                    current, began = fields["begin"], time.monotonic()
                    limit = began + fields["limit"]
                case {"result": _}:
                    keep(fields["result"], fields["seconds"], numbers=fields["numbers"])
                    current = ""  # a crash from here on is not this case's
                case {"error": _}:
                    keep(fields["error"], fields["seconds"], error=fields["message"])
                    current = ""
                case {"end": _}:
                    return _Stop(played, False)
