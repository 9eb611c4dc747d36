"""Tests of background work: order, errors, and blocking."""

from __future__ import annotations

import threading

import pytest

from spell_jax.runtime.log.run_logger import Background


def fail(text: str) -> None:
    raise OSError(text)


def test_jobs_run_in_order_on_one_background_thread():
    finished_jobs, threads = [], set()
    with Background(max_queued=2) as background:
        for number in range(20):
            background.submit(
                lambda n: (finished_jobs.append(n), threads.add(threading.get_ident())), number
            )
    assert finished_jobs == list(range(20))
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_only_flush_waits_for_slow_work():
    gate, finished_jobs = threading.Event(), []
    with Background(max_queued=3) as background:
        background.submit(gate.wait)
        background.submit(finished_jobs.append, 1)
        assert finished_jobs == []
        threading.Timer(0.1, gate.set).start()
        background.flush()
        assert finished_jobs == [1]


def test_full_queue_blocks_submit():
    gate, finished_jobs = threading.Event(), []
    with Background(max_queued=2) as background:
        background.submit(gate.wait)

        def hand_in() -> None:
            for number in range(5):
                background.submit(finished_jobs.append, number)
                submitted_jobs.append(number)

        submitted_jobs: list[int] = []
        submitter = threading.Thread(target=hand_in)
        submitter.start()
        submitter.join(0.3)
        # Two items are queued, besides the item in progress, which may not have left the queue.
        assert submitter.is_alive() and len(submitted_jobs) in (1, 2) and not finished_jobs
        gate.set()
        submitter.join()
    assert finished_jobs == list(range(5))


def test_first_error_is_raised_by_later_calls_and_other_jobs_run():
    gate, finished_jobs = threading.Event(), []
    with pytest.raises(OSError, match="first") as error, Background() as background:
        background.submit(gate.wait)
        background.submit(fail, "first")
        background.submit(fail, "second")
        background.submit(finished_jobs.append, 1)
        gate.set()
        with pytest.raises(OSError, match="first") as flush_error:
            background.flush()
        assert finished_jobs == [1]
        with pytest.raises(OSError, match="first"):
            background.submit(finished_jobs.append, 2)
    assert finished_jobs == [1, 2] and error.value is flush_error.value


def test_pending_error_is_raised_on_exit():
    with pytest.raises(OSError, match="alone"), Background() as background:
        background.submit(fail, "alone")


def test_error_of_the_body_takes_precedence_and_queued_jobs_run():
    finished_jobs = []
    with pytest.raises(ValueError, match="another"), Background() as background:
        background.submit(fail, "disk")
        with pytest.raises(OSError):
            background.flush()
            background.submit(finished_jobs.append, 0)
        raise ValueError("another")
    with pytest.raises(ValueError, match="another"), Background() as background:
        background.submit(finished_jobs.append, 1)
        raise ValueError("another")
    assert finished_jobs == [1]


def test_system_exit_in_a_job_is_raised_and_the_thread_survives():
    def leave() -> None:
        raise SystemExit(3)

    finished_jobs = []
    with pytest.raises(SystemExit), Background() as background:
        background.submit(leave)
        with pytest.raises(SystemExit):
            background.flush()
        with pytest.raises(SystemExit):
            background.submit(finished_jobs.append, 1)
    assert finished_jobs == [1]
