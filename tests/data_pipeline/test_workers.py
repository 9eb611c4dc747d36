"""Tests of worker processes of the local runner that are killed, as for lack of memory."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import apache_beam as beam
import pytest

from data_pipeline import workers
from data_pipeline.stages import DONE, Stages
from spell_jax.runtime.hosts import sigterm

OPTIONS = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]


def kill_worker(number: int, parent: int) -> tuple[str, str]:
    """Kill the worker process that gets the number 7."""
    if number == 7 and os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    return "read", "source"


def make_counts(pipeline: beam.Pipeline, parent: int):
    numbers = pipeline | beam.Create(range(20)) | beam.Reshuffle()
    return {"counts": numbers | beam.Map(functools.partial(kill_worker, parent=parent))}


@pytest.mark.slow
def test_a_killed_worker_ends_the_stage_with_its_remedy(tmp_path) -> None:
    """Beam alone waits for the worker for ever."""
    before = signal.getsignal(signal.SIGUSR1), threading.excepthook
    stages = Stages(str(tmp_path / "stages"), OPTIONS)
    message = r"^stage dies: .*exited with return code -9; .* a lower --direct_num_workers"
    with pytest.raises(workers.LostWorkerError, match=message):
        stages.run_stage("dies", {}, functools.partial(make_counts, parent=os.getpid()))
    assert not (tmp_path / "stages" / "dies" / DONE).exists()
    assert (signal.getsignal(signal.SIGUSR1), threading.excepthook) == before


def wait_in_worker(number: int, folder: pathlib.Path) -> tuple[str, str]:
    """Write the worker's process id into a file, and wait as a long stage does."""
    (folder / str(os.getpid())).touch()
    time.sleep(100)
    return "read", "source"


def make_waits(pipeline: beam.Pipeline, folder: pathlib.Path):
    numbers = pipeline | beam.Create(range(20)) | beam.Reshuffle()
    return {"counts": numbers | beam.Map(functools.partial(wait_in_worker, folder=folder))}


def wait_until(is_true: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not is_true() and time.monotonic() < end:
        time.sleep(0.05)
    return is_true()


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended; a zombie has ended."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_workers_end_soon_after_sigkill_of_their_build(tmp_path) -> None:
    """Beam's own workers waited for ever."""
    code = (
        "import functools, pathlib\n"
        "from data_pipeline.stages import Stages\n"
        "from tests.data_pipeline import test_workers\n"
        f"folder = pathlib.Path({str(tmp_path / 'pids')!r})\n"
        f"stages = Stages({str(tmp_path / 'stages')!r}, test_workers.OPTIONS)\n"
        "make = functools.partial(test_workers.make_waits, folder=folder)\n"
        "stages.run_stage('waits', {}, make)\n"
    )
    pids = tmp_path / "pids"
    pids.mkdir()
    build = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: len(list(pids.iterdir())) == 2, 60)
    finally:
        build.kill()
        build.wait()
    workers_left = [int(path.name) for path in pids.iterdir()]
    try:
        assert wait_until(lambda: not any(map(is_running, workers_left)), 5)
    finally:
        for pid in filter(is_running, workers_left):
            os.kill(pid, signal.SIGKILL)


def test_errors_of_other_threads_are_reported_as_before(monkeypatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: reported.append(str(failure[1])))

    def fail() -> None:
        raise ValueError("elsewhere")

    with workers.watched("stage"):
        thread = threading.Thread(target=fail, name="another")
        thread.start()
        thread.join()
    assert reported == ["elsewhere"]


def test_other_threads_may_run_a_stage() -> None:
    entered: list[bool] = []

    def enter() -> None:
        with workers.watched("stage"):
            entered.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_that_ends_the_build_kills_workers_before_the_runner_waits_for_them(
    number, monkeypatch, capsys, request
):
    """Beam's cleanup waited for them 25 s after SIGTERM, and without end after Ctrl-C."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # restored after the test
    log = logging.getLogger("apache_beam")
    request.addfinalizer(functools.partial(log.setLevel, log.level))
    with (
        pytest.raises((KeyboardInterrupt, SystemExit)),
        sigterm.ending(print),
        workers.watched("stage"),
    ):
        shell = subprocess.Popen("sleep 60 & echo $!; wait", shell=True, stdout=subprocess.PIPE)
        assert shell.stdout is not None
        shell.stdout.readline()  # both run
        try:
            signal.raise_signal(number)
        finally:
            assert shell.wait(10) == -signal.SIGKILL
            assert shell.stdout.read() == b""  # the worker, which has it open too, has ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    late = threading.Thread(target=lambda: 1 / 0, name="read_grpc_client_inputs")
    late.start()
    late.join()
    log.error("Failed to read inputs in the data plane")
    assert capsys.readouterr().err == ""  # threads of Beam that lost their workers say nothing
