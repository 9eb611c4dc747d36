"""The command: plays sections in processes of their own and keeps what each of them found."""

from __future__ import annotations

import contextlib
import dataclasses
import json
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
from typing import Annotated, Any

from benchmarks.accelerator import child
from benchmarks.accelerator.results import NOT_RUN, Results
from benchmarks.base import Benchmark


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
class Accelerator(Benchmark):
    """Measures kernels, update, decode and whole steps on this machine's accelerator.

    Every section runs in its own process, in order of worth: peaks (products, copies, calls),
    kernels_right (largest errors), kernels_fast (attention beside other kernels; tiles), update,
    decode, step (beside TRL and transformers), bits (runs repeat to the bit), train (SPELL on the
    weights and clusters of --train, for the time that is left).

    DIR/results.jsonl has a line for each case, DIR/logs what the processes printed, DIR/cache
    compiled programs. A second run in the same folder plays only what has no numbers yet. The exit
    status is 1 if a case failed or was not run. --tiny plays everything on a CPU, with interpreted
    kernels, in minutes; its numbers mean nothing.
    """

    out: Annotated[str, "folder of results, logs and compiled programs"] = "runs/accelerator"
    minutes: Annotated[float, "time for all sections; 0 prints the table of an earlier run"] = 8.0
    sections: Annotated[str, "names of sections, separated by commas; empty: all"] = ""
    train: Annotated[str, "folder with weights and clusters for the section train"] = ""
    tiny: Annotated[bool, "sizes for a CPU"] = False
    commit: Annotated[str, "commit of this tree; empty: git is asked"] = ""

    def play(self) -> Results:
        """Play the sections; return all results of the folder."""
        names = self.names()
        if self.minutes < 0:
            raise ValueError(f"minutes = {self.minutes}: must be at least 0")
        out = pathlib.Path(self.out).resolve()
        (out / "logs").mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out).free
        if free < _FREE_BYTES:
            raise OSError(f"out = {self.out!r}: {free / 2**20:.0f} MiB free, must be 1024 or more")
        results = Results(out)
        if self.minutes:
            _Runner(self, out, results, time.monotonic() + 60 * self.minutes).play(names)
        return results

    def names(self) -> list[str]:
        """Chosen sections."""
        names = [name for name in self.sections.split(",") if name] or list(SECTIONS)
        for name in names:
            if name not in SECTIONS:
                raise ValueError(f"sections: {name!r} must be one of {', '.join(SECTIONS)}")
        return names

    def head(self) -> str:
        """The commit of the tree."""
        if self.commit:
            return self.commit
        command = ["git", "describe", "--always", "--dirty"]
        try:
            return subprocess.run(
                command, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"


class _Process:
    """The process of a section, which waits for its turn once it has imported everything."""

    def __init__(self, section: str, out: pathlib.Path, tiny: bool):
        read, write = os.pipe()
        log = (out / "logs" / f"{section}.log").open("ab")
        place = {child.PIPE: str(write), "PYTHONUNBUFFERED": "1", "USE_JAX": "0"}
        # One GPU: TRL refuses several, and our side would use them.
        place["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        # PyTorch and child processes need memory beside jax.
        place["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        if tiny:
            # Tiny programs run for less time than XLA takes to optimize them.
            quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
            place |= quick | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        self.section = section
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.accelerator.child", SECTIONS[section].module],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(write,),
            env={"XLA_PYTHON_CLIENT_MEM_FRACTION": ".92"} | os.environ | place,
            start_new_session=True,  # so that its own children end with it
        )
        os.close(write)
        log.close()
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

    def end(self) -> int:
        """Kill the process and its children; return its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


class _Runner:
    """Plays sections one after the other until a deadline (of time.monotonic)."""

    def __init__(self, options: Accelerator, out: pathlib.Path, results: Results, deadline: float):
        self._options, self._out, self._results = options, out, results
        self._deadline = deadline
        self._commit = options.head()
        self._waiting: _Process | None = None

    def play(self, names: Sequence[str]) -> None:
        """Play sections; the next section's process is started before its turn."""
        try:
            for name, following in zip(names, [*names[1:], ""], strict=True):
                process = self._waiting or self._start(name)
                self._waiting = self._start(following) if following else None
                self._play_section(name, process)
        finally:
            if self._waiting:
                self._waiting.end()

    def _start(self, name: str) -> _Process:
        return _Process(name, self._out, self._options.tiny)

    def _play_section(self, name: str, process: _Process) -> None:
        """Play a section; after a crash or a hang, its other cases get a new process."""
        end = min(self._deadline, time.monotonic() + SECTIONS[name].seconds)
        skip = self._results.finished(name)
        while True:
            try:
                self._order(process, skip, end)
                played, has_others = self._follow(process, name, skip, end)
            finally:
                process.end()
            if not has_others or time.monotonic() >= end:
                return
            skip += played
            process = self._start(name)

    def _order(self, process: _Process, skip: Sequence[str], end: float) -> None:
        process.order(
            out=str(self._out),
            tiny=self._options.tiny,
            train=self._options.train,
            commit=self._commit,
            skip=skip,
            seconds=end - time.monotonic(),
            before=self._results.numbers(),
        )

    def _follow(
        self, process: _Process, name: str, skip: Sequence[str], end: float
    ) -> tuple[list[str], bool]:
        """Keep what a process reports.

        Returns the cases that were played, and whether the process crashed or hung before others.
        """
        played: list[str] = []
        machine: Mapping[str, Any] = {}
        left: list[str] = []
        current, began = "", time.monotonic()
        limit = began + _SPAWN_SECONDS

        def keep(case: str, seconds: float, **content: Any) -> None:
            line = {"section": name, "case": case, "seconds": round(seconds, 3)}
            self._results.add(line | {"machine": machine} | content)
            print(self._results.row(name, case), flush=True)
            played.append(case)
            if case in left:
                left.remove(case)

        while True:
            fields = process.next(min(limit, end) - time.monotonic())
            seconds = time.monotonic() - began
            match fields:
                case {"ended": _}:
                    status = process.end()
                    reason = f"its process ended with {status}: {_last_line(self._out, name)}"
                    keep(current or "start", seconds, error=reason)
                    return played, bool(current and left)
                case {"late": _} if time.monotonic() >= end:
                    for case in [*left] if machine else ["start"]:
                        keep(case, seconds if case == current else 0.0, error=NOT_RUN)
                    return played, False
                case {"late": _}:
                    keep(current or "start", seconds, error=f"ended after {seconds:.1f} s")
                    return played, bool(current and left)
                case {"refused": _}:
                    keep("start", seconds, error=fields["refused"])
                    return played, False
                case {"cases": _}:
                    machine = fields["machine"]
                    left = [case for case in fields["cases"] if case not in skip]
                case {"prepare": _}:
                    limit = time.monotonic() + fields["limit"]
                case {"begin": _}:
                    current, began = fields["begin"], time.monotonic()
                    limit = began + fields["limit"]
                case {"result": _}:
                    keep(fields["result"], fields["seconds"], numbers=fields["numbers"])
                case {"error": _}:
                    keep(fields["error"], fields["seconds"], error=fields["message"])
                case {"end": _}:
                    return played, False


def _last_line(out: pathlib.Path, section: str) -> str:
    """The last line of a section's log, cut."""
    lines = (out / "logs" / f"{section}.log").read_text(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no output")
