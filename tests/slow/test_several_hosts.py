"""Tests that a run of several processes equals that of one with the same number of devices.

If one process dies, all end, and a new start resumes the run.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from spell_jax.policy import weights
from spell_jax.runtime import fault_injection
from spell_jax.runtime.hosts import peers
from spell_jax.runtime.log.metrics import read_metrics
from tests import noise
from tests.slow import several_hosts

DEVICES = 4
LOST_SECONDS = 10
STEPS = several_hosts.STEPS


def play(
    processes: int,
    *arguments: object,
    devices: int = DEVICES,
    killed: int | None = None,
    step: int = STEPS,
) -> list[tuple[int, str, float]]:
    """Run on `devices` devices; return (exit code, standard error, end time) of each process.

    Process `killed` is killed after the update of `step`, before it is saved.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices // processes}"
    common = os.environ | {"XLA_FLAGS": flags}
    if processes > 1:
        common["SPELL_COORDINATOR"] = f"localhost:{port}"
        common["SPELL_PROCESSES"] = str(processes)
        common["SPELL_JOIN_SECONDS"] = "120"
        common["SPELL_LOST_SECONDS"] = str(LOST_SECONDS)
    command = [sys.executable, "-m", "tests.slow.several_hosts", *map(str, arguments)]
    running = [
        subprocess.Popen(
            command,
            env=common
            | ({"SPELL_PROCESS": str(index)} if processes > 1 else {})
            | ({fault_injection.VARIABLE: f"updated:{step}"} if index == killed else {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for index in range(processes)
    ]
    try:
        return _wait(running)
    finally:
        for process in running:
            process.kill()


def _wait(running: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, float]]:
    def wait(process: subprocess.Popen[str]) -> tuple[int, str, float]:
        error = process.communicate(timeout=600)[1]
        return process.returncode, error, time.monotonic()

    with ThreadPoolExecutor(len(running)) as pool:
        return list(pool.map(wait, running))


def succeed(processes: int, *arguments: object, devices: int = DEVICES) -> list[str]:
    """Run to the end; return the standard error of each process."""
    ended = play(processes, *arguments, devices=devices)
    assert [code for code, *_ in ended] == [0] * processes, ended[-1][1][-3000:]
    return [error for _, error, _ in ended]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


@pytest.fixture(scope="module")
def alone(policy, tmp_path_factory) -> pathlib.Path:
    """Train in one process with all devices; return the workdir."""
    workdir = tmp_path_factory.mktemp("alone")
    succeed(1, "train", policy, workdir)
    return workdir


def assert_same_run(
    workdir: pathlib.Path,
    other_workdir: pathlib.Path,
    policy: pathlib.Path,
    ignored: Set[str] = frozenset(),
    steps: int = STEPS,
) -> None:
    """Assert equal episodes (bytes), metrics (up to rounding, no times), weights (to 1e-5)."""
    for step in range(1, steps + 1):
        name = f"episodes/step_{step:06d}.jsonl.gz"
        assert (workdir / name).read_bytes() == (other_workdir / name).read_bytes(), name
    assert_same_learning(workdir, other_workdir, policy, ("policy", "best"), ignored, steps)


def assert_same_learning(
    workdir: pathlib.Path,
    other_workdir: pathlib.Path,
    policy: pathlib.Path,
    folders: Sequence[str],
    ignored: Set[str] = frozenset(),
    steps: int = STEPS,
) -> None:
    """Assert as assert_same_run does, without the episodes; the metrics `ignored` may differ."""
    lines, expected_lines = (
        list(map(noise.steady, read_metrics(run))) for run in (workdir, other_workdir)
    )
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line, expected_line in zip(lines, expected_lines, strict=True):
        assert line.keys() == expected_line.keys() and line.keys() >= ignored
        for key in line.keys() - ignored:
            np.testing.assert_allclose(line[key], expected_line[key], 1e-4, 1e-6, err_msg=key)
    for folder in folders:
        params, other_params = (weights.load(run / folder)[1] for run in (workdir, other_workdir))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 0, 1e-5), params, other_params)
    before = weights.load(policy)[1]["embedding"]
    assert np.abs(weights.load(other_workdir / "policy")[1]["embedding"] - before).max() > 1e-4


def test_two_processes_train_like_one(alone, policy, tmp_path) -> None:
    error_texts = succeed(2, "train", policy, tmp_path)
    assert_same_run(tmp_path, alone, policy)
    for index, text in enumerate(error_texts):
        assert "waiting for 2 processes at localhost" in text
        assert f"this is process {index} of 2" in text


@pytest.mark.long
def test_four_processes_train_like_one(alone, policy, tmp_path) -> None:
    succeed(4, "train", policy, tmp_path)
    assert_same_run(tmp_path, alone, policy)


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_killed_process_ends_all_and_a_restart_resumes(killed, alone, policy, tmp_path) -> None:
    ended = play(2, "train", policy, tmp_path, killed=killed)
    (code, *_, died), (left, error, end) = ended[killed], ended[1 - killed]
    assert code == -signal.SIGKILL and left == peers.EXIT_CODE, error[-3000:]
    where = f"host {socket.gethostname()}, 127.0.0.1"
    assert f"process {killed} of 2 ({where}) is missing: last heard" in error
    assert f"resumes from checkpoint {STEPS - 1} or a later one" in error
    assert end - died < LOST_SECONDS + 15  # a margin for a loaded machine
    first = tmp_path / "episodes" / "step_000001.jsonl.gz"
    written = first.stat().st_mtime_ns
    succeed(2, "train", policy, tmp_path)
    assert first.stat().st_mtime_ns == written  # the step was not run again
    assert_same_run(tmp_path, alone, policy)


@pytest.mark.long
def test_killed_split_run_of_two_processes_ends_like_one_process(policy, tmp_path) -> None:
    """Each process trains and samples; process 1 is killed, and both start again."""
    split = {"staleness": 2, "checkpoint_every": 4, "steps": 5}

    def arguments(workdir: pathlib.Path, rollout_devices: int) -> tuple[object, ...]:
        settings = json.dumps(split | {"mesh.rollout_devices": rollout_devices})
        return "train", policy, workdir, settings

    succeed(1, *arguments(tmp_path / "one", 2))
    ended = play(2, *arguments(tmp_path / "two", 1), killed=1, step=5)
    assert [code for code, *_ in ended] == [peers.EXIT_CODE, -signal.SIGKILL]
    assert "process 1 of 2" in ended[0][1] and "resumes from checkpoint 4" in ended[0][1]
    succeed(2, *arguments(tmp_path / "two", 1))
    assert_same_run(tmp_path / "two", tmp_path / "one", policy, steps=5)


# Metrics of decode slots, which are per device.
DECODE_SLOTS = {f"rollout/sampler/{name}" for name in ("padded_group_slots", "starved_slots")}
EXPERTS = {"qkv_bias": False, "qk_norm": True, "experts": 4, "experts_per_token": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("parts", "settings", "per_host"),
    [
        pytest.param({}, {}, False, id="dense"),
        pytest.param({}, {}, True, id="fewer_devices"),
        pytest.param(
            EXPERTS, {"mesh.context": 2, "mesh.expert": 2}, False, id="experts_and_context"
        ),
    ],
)
def test_run_goes_on_with_fewer_hosts(parts, settings, per_host, request, tmp_path) -> None:
    """Step 1 on four hosts, step 2 on two, step 3 on one; with `per_host`, of one device each."""
    if parts or settings:
        policy, expected_workdir = (
            noise.save_policy(tmp_path / "policy", **parts),
            tmp_path / "alone",
        )
        succeed(1, "train", policy, expected_workdir, json.dumps(settings))
    else:
        policy, expected_workdir = map(request.getfixturevalue, ("policy", "alone"))
    workdir = tmp_path / "moved"
    for steps, hosts in enumerate((4, 2, 1), start=1):
        options = {"devices": hosts} if per_host else {}
        error_texts = succeed(
            hosts, "train", policy, workdir, json.dumps(settings | {"steps": steps}), **options
        )
        assert (f"resumed at step {steps - 1}\n" in error_texts[0]) == (steps > 1)
    losses, expected_losses = (
        [line["train/loss"] for line in read_metrics(run)] for run in (workdir, expected_workdir)
    )
    np.testing.assert_allclose(losses, expected_losses, 0, 1e-5)
    assert_same_run(workdir, expected_workdir, policy, DECODE_SLOTS if per_host else set())


@pytest.mark.long
def test_two_processes_fine_tune_like_one(policy, tmp_path) -> None:
    rows = [
        {"prompt": f"- Arvo city {c}", "completion": f"answer is {c}"} for c in ("Oslo", "Rome")
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for processes in (1, 2):
        succeed(processes, "sft", policy, tmp_path / str(processes), source)
    assert_same_learning(tmp_path / "2", tmp_path / "1", policy, ["policy"])
