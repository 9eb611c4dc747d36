"""Tests of runs on hosts in network namespaces, one of which is disturbed at a chosen moment.

All hosts end and name the one that is missing or has failed, or the run goes on; in both cases it
ends with the same bits as an undisturbed run, after a restart if need be. docs/launching.md has a
table of the cells.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from spell_jax.runtime import distributed
from spell_jax.runtime.metrics import read_metrics
from spell_jax.runtime.peers import EXIT_CODE
from tests import noise
from tests.slow import namespaces
from tests.slow.cut_off import STEPS

LIMIT = 16  # seconds without a sign of life
DELAYED_S = 10  # duration of the delay
PATIENCE_S = 400  # of the test; more than a loaded machine needs
PHASES = {
    "join": "joined:1",
    "rollout": "answered:20",
    "update": "rolled_out:2",
    "save": "saving:2",
}
FAULTS = ("cut_off", "stop", "disk", "clock", "delay", "break")
# Cells (fault, phase, number of hosts) of `make test-slow`; the others are those of test-long.
FIRST = {("cut_off", "rollout", 2), ("stop", "save", 2), ("disk", "save", 2), ("clock", "join", 2)}
CELLS = [
    *((fault, phase, 2) for fault in FAULTS for phase in PHASES),
    *(("cut_off", "rollout", 4), ("stop", "save", 4), ("disk", "save", 4), ("break", "update", 4)),
]

pytestmark = pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not())


def cell_id(cell: tuple[str, str, int]) -> str:
    return "-".join(map(str, cell))


class Hosts:
    """Processes of one start of a run; host `disturbed` waits at `point` for `go`."""

    def __init__(
        self,
        network: namespaces.Network,
        count: int,
        run: tuple[pathlib.Path, pathlib.Path],
        faults: pathlib.Path | None = None,
        disturbed: int = 0,
        point: str = "",
    ) -> None:
        self._faults = faults
        self.processes = []
        for index in range(count):
            environment = os.environ | {
                "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
                distributed.COORDINATOR: f"{namespaces.address(0)}:7000",
                distributed.PROCESSES: str(count),
                distributed.PROCESS: str(index),
                distributed.JOIN_SECONDS: "120",
                distributed.LOST_SECONDS: str(LIMIT),
            }
            folder = ""
            if faults is not None and index == disturbed:
                folder = str(faults)
                library = str(faults / "host_faults.so")
                environment |= {"LD_PRELOAD": library, "SPELL_HOST_FAULTS": folder}
            arguments = [*map(str, run), folder, point]
            self.processes.append(
                subprocess.Popen(
                    network.command(
                        index, [sys.executable, "-m", "tests.slow.cut_off", *arguments]
                    ),
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                )
            )

    def wait_for_point(self) -> None:
        assert self._faults is not None
        while not (self._faults / "reached").exists():
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.05)
                    raise AssertionError(process.communicate()[1][-3000:])

    def go(self) -> None:
        assert self._faults is not None
        (self._faults / "go").touch()

    def ends(self, indices: Sequence[int]) -> dict[int, tuple[int, str]]:
        """(exit status, standard error) of these hosts."""
        ended = {}
        for index in indices:
            error = self.processes[index].communicate(timeout=PATIENCE_S)[1]
            ended[index] = self.processes[index].returncode, error
        return ended

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def finish(network: namespaces.Network, count: int, run: tuple[pathlib.Path, pathlib.Path]) -> str:
    """Start the run and let it go on to its end; returns the standard error of process 0."""
    with Hosts(network, count, run) as hosts:
        ended = hosts.ends(range(count))
    assert [code for code, _ in ended.values()] == [0] * count, ended[0][1][-3000:]
    return ended[0][1]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("library") / "host_faults.so"
    source = pathlib.Path(__file__).with_name("host_faults.c")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(path), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return path


_undisturbed: dict[int, pathlib.Path] = {}


@pytest.fixture
def undisturbed(policy, tmp_path_factory):
    """The workdir of an undisturbed run, by number of hosts."""

    def run(count: int) -> pathlib.Path:
        if count not in _undisturbed:
            _undisturbed[count] = tmp_path_factory.mktemp("undisturbed")
            with namespaces.network(count) as network:
                finish(network, count, (policy, _undisturbed[count]))
        return _undisturbed[count]

    return run


def disturb(fault: str, network: namespaces.Network, hosts: Hosts, index: int, faults) -> None:
    if fault == "cut_off":
        network.cut_off(index)
    elif fault == "stop":
        os.kill(hosts.processes[index].pid, signal.SIGSTOP)
    elif fault in ("disk", "clock"):
        (faults / fault).touch()
    elif fault == "delay":
        network.relay.delays[namespaces.address(index)] = 2.0
    else:
        network.relay.broken = 0.05


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=() if cell in FIRST else pytest.mark.long, id=cell_id(cell))
        for cell in CELLS
    ],
)
def test_disturbed_run_ends_on_all_hosts_or_goes_on(
    cell, policy, library, undisturbed, tmp_path
) -> None:
    fault, phase, count = cell
    index, others = count - 1, range(count - 1)
    wanted = undisturbed(count)
    faults, workdir = tmp_path / "faults", tmp_path / "run"
    faults.mkdir()
    (faults / "host_faults.so").symlink_to(library)
    with (
        namespaces.network(count) as network,
        Hosts(network, count, (policy, workdir), faults, index, PHASES[phase]) as hosts,
    ):
        hosts.wait_for_point()
        disturb(fault, network, hosts, index, faults)
        hosts.go()
        if fault == "delay":
            with contextlib.suppress(subprocess.TimeoutExpired):
                hosts.processes[0].wait(DELAYED_S)
            network.relay.delays.clear()
        ended = hosts.ends(others if fault == "stop" else range(count))
    codes = [code for code, _ in ended.values()]
    name = f"process {index} of {count} (host host{index})"
    if fault in ("clock", "delay"):
        assert codes == [0] * count, ended[0][1][-3000:]
    elif fault in ("cut_off", "stop"):
        for other in others:
            assert ended[other][0] == EXIT_CODE, ended[other][1][-3000:]
            assert f"{name} is missing: last heard during" in ended[other][1]
            assert "start all again: the run resumes from" in ended[other][1]
        if fault == "cut_off":
            assert codes[index] == EXIT_CODE, ended[index][1][-3000:]
            assert f"process 0 of {count} (host host0) is missing: last heard" in ended[index][1]
    elif fault == "disk":
        assert codes == [1] * count, ended[0][1][-3000:]
        for _, error in ended.values():
            assert f"host {index}: " in error and "No space left on device" in error
            assert "start all again: the run resumes from" in error
    else:
        assert set(codes) <= {1, EXIT_CODE}, ended
        for _, error in ended.values():
            assert "start all again: the run resumes from" in error
    if set(codes) != {0}:
        with namespaces.network(count) as network:
            finish(network, count, (policy, workdir))
    assert_same_run(workdir, wanted)


def assert_same_run(workdir: pathlib.Path, other: pathlib.Path) -> None:
    """Metrics, episodes and the policy to the bit."""
    lines, wanted = (list(map(noise.steady, read_metrics(run))) for run in (workdir, other))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines == wanted, "metrics"
    for folder in ("episodes", "policy"):
        for path in (other / folder).iterdir():
            assert (workdir / folder / path.name).read_bytes() == path.read_bytes(), path
