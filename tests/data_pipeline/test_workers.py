"""Tests of worker processes of the local runner that are killed, as for lack of memory."""

from __future__ import annotations

import functools
import os
import signal
import threading

import apache_beam as beam
import pytest

from data_pipeline import workers
from data_pipeline.stages import DONE, Stages

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
    message = r"^stage dies: .*exited with return code 137; .* a lower --direct_num_workers"
    with pytest.raises(workers.LostWorkerError, match=message):
        stages.run("dies", {}, functools.partial(make_counts, parent=os.getpid()))
    assert not (tmp_path / "stages" / "dies" / DONE).exists()
    assert (signal.getsignal(signal.SIGUSR1), threading.excepthook) == before


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
