"""A command of the repository that gets a signal at a chosen file operation.

python -m tests.slow.ended_commands FOLDER COUNT SIGNAL MODULE [ARGUMENTS]

Operations that open a file for writing, rename, remove or make something in FOLDER are counted; the
process sends itself SIGNAL before the COUNT-th. With COUNT 0 nothing happens, and the last line of
standard error has the number of operations.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import signal
import sys
from typing import Any

import jax

OPERATIONS = "operations: "
_WRITES = os.O_WRONLY | os.O_RDWR
_EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link")


class Signaler:
    """An audit hook that counts operations in a folder and sends one signal."""

    def __init__(self, folder: pathlib.Path, count: int, number: int) -> None:
        self._folder, self._count, self._number = f"{folder}/", count, number
        self.passed = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & _WRITES:
                return
        elif event in _EVENTS:
            path = arguments[0]
        else:
            return
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self._folder):
            self.passed += 1
            if self.passed == self._count:
                os.kill(os.getpid(), self._number)


def main() -> None:
    folder, count, name, module, *arguments = sys.argv[1:]
    signaler = Signaler(pathlib.Path(folder).resolve(), int(count), signal.Signals[name])
    sys.addaudithook(signaler)
    jax.config.update("jax_disable_most_optimizations", True)  # less to compile
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        print(f"{OPERATIONS}{signaler.passed}", file=sys.stderr)


if __name__ == "__main__":
    main()
