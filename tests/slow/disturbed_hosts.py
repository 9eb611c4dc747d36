"""Hosts in network namespaces that run tests/slow/cut_off.py, and faults of one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from spell_jax.runtime.hosts import distributed
from tests.slow import namespaces

LIMIT = 12  # seconds without a sign of life
DELAYED_S = 10  # duration of the delay
PATIENCE_S = 400  # until processes end: more than a loaded machine needs
# Also "kill", which tests/slow/test_several_hosts.py tests.
FAULTS = ("cut_off", "stop", "disk", "clock", "delay", "break")
HARMLESS = ("clock", "delay")  # the run goes on


@dataclasses.dataclass(frozen=True)
class Disturbance:
    """A fault of one host, when its process passes a point of runtime/fault_injection.py.

    `point` is NAME:COUNT as in tests/slow/cut_off.py. `folder` is empty before, and of this
    disturbance only.
    """

    fault: str
    point: str
    host: int
    folder: pathlib.Path

    def variables(self) -> dict[str, str]:
        """Compile host_faults.c; return the environment that loads it into the host's process."""
        library = self.folder / "host_faults.so"
        source = pathlib.Path(__file__).with_name("host_faults.c")
        command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True)
        return {"LD_PRELOAD": str(library), "SPELL_HOST_FAULTS": str(self.folder)}


class Hosts:
    """Processes of one start of a run on hosts of a network; a context that kills what is left.

    Each has one device. `settings` are config fields by dotted name.
    """

    def __init__(
        self,
        network: namespaces.Network,
        count: int,
        policy: pathlib.Path,
        workdir: pathlib.Path,
        settings: dict[str, Any] | None = None,
        disturbance: Disturbance | None = None,
    ) -> None:
        self._network, self._disturbance, self._workdir = network, disturbance, workdir
        workdir.mkdir(exist_ok=True)
        self.processes: list[subprocess.Popen[bytes]] = []
        for index in range(count):
            variables = {
                "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
                distributed.COORDINATOR: f"{namespaces.address(0)}:7000",
                distributed.PROCESSES: str(count),
                distributed.PROCESS: str(index),
                distributed.JOIN_SECONDS: "120",
                distributed.LOST_SECONDS: str(LIMIT),
            }
            fault_arguments = ["", ""]
            if disturbance is not None and index == disturbance.host:
                variables |= disturbance.variables()
                fault_arguments = [str(disturbance.folder), disturbance.point]
            program = [sys.executable, "-m", "tests.slow.cut_off", str(policy), str(workdir)]
            command = network.command(
                index, [*program, json.dumps(settings or {}), *fault_arguments]
            )
            with self._log(index).open("wb") as log:  # not a pipe, which could be full
                process = subprocess.Popen(
                    command, env=os.environ | variables, stdout=subprocess.DEVNULL, stderr=log
                )
            self.processes.append(process)

    def disturb(self) -> bool:
        """Wait for the point, then begin the fault; return False if all processes end before."""
        disturbance = self._disturbance
        assert disturbance is not None
        while not (disturbance.folder / "reached").exists():
            if all(process.poll() is not None for process in self.processes):
                return False
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[disturbance.host].wait(0.05)
        if disturbance.fault == "kill":
            self.processes[disturbance.host].kill()
        elif disturbance.fault == "cut_off":
            self._network.cut_off(disturbance.host)
        elif disturbance.fault == "stop":
            os.kill(self.processes[disturbance.host].pid, signal.SIGSTOP)
        elif disturbance.fault in ("disk", "clock"):
            (disturbance.folder / disturbance.fault).touch()
        elif disturbance.fault == "delay":
            self._network.relay.delays[namespaces.address(disturbance.host)] = 2.0
        elif disturbance.fault == "break":
            self._network.relay.broken = 0.05
        (disturbance.folder / "go").touch()
        if disturbance.fault == "delay":
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[0].wait(DELAYED_S)
            self._network.relay.delays.clear()
        return True

    def ends(
        self, indices: Iterable[int] | None = None, patience: float = PATIENCE_S
    ) -> dict[int, tuple[int, str]]:
        """Return (exit status, standard error) by host, by default of all hosts not stopped."""
        if indices is None:
            disturbance = self._disturbance
            stopped = (
                disturbance.host
                if disturbance is not None and disturbance.fault == "stop"
                else None
            )
            indices = [index for index in range(len(self.processes)) if index != stopped]
        return {i: (self.processes[i].wait(patience), self._error(i)) for i in indices}

    def _log(self, index: int) -> pathlib.Path:
        return self._workdir / f"stderr_{index}"

    def _error(self, index: int) -> str:
        return self._log(index).read_text(errors="replace")

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def finish(
    count: int,
    policy: pathlib.Path,
    workdir: pathlib.Path,
    settings: dict[str, Any] | None = None,
    patience: float = PATIENCE_S,
) -> None:
    """Run on `count` undisturbed hosts to the end of the run."""
    with (
        namespaces.network(count) as network,
        Hosts(network, count, policy, workdir, settings) as hosts,
    ):
        ended = hosts.ends(patience=patience)
    assert [code for code, _ in ended.values()] == [0] * count, ended[0][1][-3000:]
