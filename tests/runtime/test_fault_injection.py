"""Tests of fault points: no effect without the variable, else a fault at the Nth pass of one."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys

import pytest

from spell_jax.runtime import fault_injection

PASSES = """
from spell_jax.runtime import fault_injection
for step in (1, 2, 3):
    print("rollout", step, flush=True)
    fault_injection.point("rolled_out")
    print("update", step, flush=True)
    fault_injection.point("updated")
"""


@pytest.fixture(autouse=True)
def _nothing_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_injection, "_passed", collections.Counter())


def test_points_do_nothing_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, ""):
        monkeypatch.delenv(fault_injection.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(fault_injection.VARIABLE, value)
        for name in fault_injection.POINTS:
            fault_injection.point(name)


def test_count_applies_only_to_the_named_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fault_injection.VARIABLE, "updated:2:raise")
    fault_injection.point("rolled_out")
    fault_injection.point("updated")
    fault_injection.point("rolled_out")
    with pytest.raises(fault_injection.Fault, match="updated:2:raise"):
        fault_injection.point("updated")
    fault_injection.point("updated")  # once only


@pytest.mark.parametrize(
    ("fault", "code"), [("updated:2", -signal.SIGKILL), ("updated:2:term", -signal.SIGTERM)]
)
def test_fault_kills_the_process_at_the_given_pass(fault: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PASSES],
        env=os.environ | {fault_injection.VARIABLE: fault},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert ended.returncode == code
    assert ended.stdout.splitlines() == ["rollout 1", "update 1", "rollout 2", "update 2"]


@pytest.mark.parametrize(
    "setting",
    ["updated", "updated:", "updated:0", "updated:x", "update:1", "updated:1:kill", "updated:1:"],
)
def test_invalid_fault_variable_is_rejected(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fault_injection.VARIABLE, setting)
    with pytest.raises(ValueError, match=rf"SPELL_FAULT = '{setting}': must be NAME:COUNT"):
        fault_injection.point("rolled_out")
