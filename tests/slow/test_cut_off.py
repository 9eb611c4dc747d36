"""Tests of runs on hosts in network namespaces, one of which is disturbed at a chosen moment.

All hosts end and name the one that is missing or has failed, or the run goes on. In both cases it
ends with the same bits as an undisturbed run, after a restart if need be. docs/launching.md has a
table of the cells.
"""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable

import pytest

from spell_jax.runtime.hosts.peers import EXIT_CODE
from spell_jax.runtime.log.metrics import read_metrics
from tests import noise
from tests.slow import namespaces
from tests.slow.cut_off import STEPS
from tests.slow.disturbed_hosts import FAULTS, HARMLESS, Disturbance, Hosts, finish

PHASES = {
    "join": "joined:1",
    "rollout": "answered:20",
    "update": "rolled_out:2",
    "save": "saving:2",
}
# Cells (fault, phase, number of hosts, disturbed host). Those of FIRST are in make test-slow, the
# others in make test-long.
FIRST = [("clock", "join", 2, 1)]
CELLS = [
    *((fault, phase, 2, 1) for fault in FAULTS for phase in PHASES),
    ("cut_off", "rollout", 4, 3),
    ("stop", "save", 4, 3),
    ("disk", "save", 4, 3),
    ("break", "update", 4, 3),
    ("cut_off", "save", 2, 0),
    ("stop", "rollout", 2, 0),
    ("disk", "save", 2, 0),
]
REMEDY = "start all again: the run resumes from"

pytestmark = pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not())


def cell_id(cell: tuple[str, str, int, int]) -> str:
    """Return FAULT-PHASE-HOSTS, with -first if process 0 is disturbed and not the last process."""
    fault, phase, count, host = cell
    return f"{fault}-{phase}-{count}" + ("" if host else "-first")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


@pytest.fixture(scope="module")
def undisturbed(policy, tmp_path_factory) -> Callable[[int], pathlib.Path]:
    """Return a function from a number of hosts to the workdir of an undisturbed run."""

    @functools.cache
    def run(count: int) -> pathlib.Path:
        workdir = tmp_path_factory.mktemp("undisturbed")
        finish(count, policy, workdir)
        return workdir

    return run


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=() if cell in FIRST else pytest.mark.long, id=cell_id(cell))
        for cell in CELLS
    ],
)
def test_disturbed_run_ends_on_all_hosts_or_goes_on(cell, policy, undisturbed, tmp_path) -> None:
    fault, phase, count, host = cell
    expected_workdir = undisturbed(count)
    (tmp_path / "faults").mkdir()
    disturbance = Disturbance(fault, PHASES[phase], host, tmp_path / "faults")
    with (
        namespaces.network(count) as network,
        Hosts(network, count, policy, tmp_path / "run", None, disturbance) as hosts,
    ):
        is_reached = hosts.disturb()
        ended = hosts.ends()
    assert is_reached, f"all hosts ended before: {ended}"
    if fault in HARMLESS:
        assert [code for code, _ in ended.values()] == [0] * count, ended[0][1][-3000:]
    else:
        assert_named(cell, ended)
        finish(count, policy, tmp_path / "run")
    assert_same_run(tmp_path / "run", expected_workdir)


def assert_named(cell: tuple[str, str, int, int], ended: dict[int, tuple[int, str]]) -> None:
    """Assert that all hosts name the disturbed host, or a host that it cannot reach."""
    fault, _, count, host = cell
    for index, (code, error) in ended.items():
        assert REMEDY in error, error[-3000:]
        if fault in ("cut_off", "stop"):
            missing = host if index != host else 0 if host else 1
            # One that is lost while the hosts join has not said its name.
            where = rf"\((host host{missing}, )?{namespaces.address(missing)}\)"
            name = rf"process {missing} of {count} {where} is missing: last heard"
            assert code == EXIT_CODE and re.search(name, error), error[-3000:]
        elif fault == "disk":
            assert code == 1 and f"host {host}: " in error, error[-3000:]
            assert "No space left on device" in error, error[-3000:]
        else:
            assert code in (1, EXIT_CODE), error[-3000:]


def assert_same_run(workdir: pathlib.Path, other_workdir: pathlib.Path) -> None:
    """Assert that metrics, episodes and the policy of two runs are equal to the bit."""
    lines, expected_lines = (
        list(map(noise.steady, read_metrics(run))) for run in (workdir, other_workdir)
    )
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines == expected_lines, "metrics"
    for folder in ("episodes", "policy"):
        for path in (other_workdir / folder).iterdir():
            assert (workdir / folder / path.name).read_bytes() == path.read_bytes(), path
