"""Commands of spell_jax in processes of their own, for sections that measure whole runs."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.accelerator.section import Setting

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_POLL_SECONDS = 0.2


class RunningCommand:
    """A running `python -m spell_jax.MODULE`; its output goes to OUT/logs/SECTION_NAME.log.

    Attributes:
      log: the file of its output.
    """

    def __init__(
        self,
        setting: Setting,
        section: str,
        name: str,
        module: str,
        flags: Mapping[str, Any],
        variables: Mapping[str, str] | None = None,
    ):
        """Start the command with `flags` and, besides this process's, environment `variables`.

        Compiled programs are kept in OUT/cache, which all commands share.
        """
        self.log = setting.out / "logs" / f"{section}_{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._name, self._began = name, time.monotonic()
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(setting.out / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        }
        if setting.tiny:
            cache["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # its programs run for a second
        names = sorted(flags, key=lambda name: name != "config")  # before flags of its fields
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *(f"--{name}={flags[name]}" for name in names)],
                stdin=subprocess.DEVNULL,  # the section's own input has its setting
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | cache | dict(variables or {}),
            )

    def wait(self, seconds: float, expected: int = 0) -> float:
        """Wait for the end of the command; return the seconds since its start.

        TimeoutError if it takes longer than `seconds`, after which it is killed; RuntimeError with
        the last line of its output if its exit status is not `expected`.
        """
        try:
            status = self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"{self._name}: killed after {seconds:.0f} s") from None
        if status != expected:
            raise RuntimeError(f"{self._name}: ended with {status}: {self.last_line()}")
        return time.monotonic() - self._began

    def wait_or_stop(self, stop_at: float, kill_at: float, enough: Callable[[], bool]) -> int:
        """Wait for the end; from `stop_at` on, or once there is `enough`, ask to save and end.

        The command is asked by SIGTERM, as a machine that is taken away asks. `stop_at` and
        `kill_at`, at which it is killed, are times of time.monotonic. Returns the exit status.
        """
        # Asked once: a second SIGTERM could interrupt the saving.
        is_asked = False
        while (status := self._process.poll()) is None:
            now = time.monotonic()
            if now >= kill_at:
                self.kill()
            elif not is_asked and (now >= stop_at or enough()):
                self._process.send_signal(signal.SIGTERM)
                is_asked = True
            time.sleep(_POLL_SECONDS)
        return status

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def last_line(self) -> str:
        """Return the last line of the output, cut."""
        # The last line of a traceback is the error, and the reason why a case failed.
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no output")


def make_folder(setting: Setting, section: str) -> pathlib.Path:
    """Make the folder OUT/SECTION, if it is not there."""
    folder = setting.out / section
    folder.mkdir(parents=True, exist_ok=True)
    return folder
