"""Tests of SIGTERM in a command: exit status 75 from the first line of `main` to the last.

python -m tests.runtime.hosts.test_sigterm PORT PROCESS    # one of two; the second gets the signal
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from spell_jax.runtime import entry
from spell_jax.runtime.hosts import distributed, peers, sigterm
from spell_jax.runtime.hosts.preemption import METADATA_VARIABLE, Preemption
from spell_jax.runtime.hosts.sigterm import Terminated
from tests.runtime.hosts.test_distributed import connect, end_two

PATIENCE_S = 60.0  # generous: on an idle machine, everything awaited here takes under a second

PROGRAM = """
import os, signal, sys, threading, time
from absl import flags
from spell_jax.runtime import entry

def parse(argv):
    if "--parsing" in argv:  # a config file may import jax: seconds
        os.kill(os.getpid(), signal.SIGTERM)
    return flags.FLAGS(argv, known_only=True)

def main(_):
    if "--thread" in sys.argv:  # Python waits for it at its exit
        threading.Thread(target=time.sleep, args=(600,)).start()
    try:
        print("main", flush=True)
        time.sleep(600)
    finally:
        print("left", flush=True)

entry.sigterm.LIMIT_S = 3.0
entry.run_main(main, parse)
"""


def send() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


def test_sigterm_ends_the_outermost_context_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated) as ended, sigterm.ending([].append), sigterm.ending():
        send()
        time.sleep(PATIENCE_S)
    assert ended.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_process_that_goes_on_for_too_long_ends(monkeypatch) -> None:
    """Whether the main thread or, after it, another one does."""
    monkeypatch.setattr(sigterm, "LIMIT_S", 0.05)
    ended: list[int] = []
    with contextlib.suppress(Terminated), sigterm.ending(ended.append):
        try:
            send()
            time.sleep(PATIENCE_S)
        finally:
            wait_for(lambda: ended == [75])
    wait_for(lambda: ended == [75, 75])


def test_a_second_sigterm_ends_the_process_at_once() -> None:
    ended: list[int] = []
    with contextlib.suppress(Terminated), sigterm.ending(ended.append):
        with contextlib.suppress(Terminated):
            send()
            time.sleep(PATIENCE_S)
        with contextlib.suppress(Terminated):
            send()
            time.sleep(PATIENCE_S)
        wait_for(lambda: ended == [75])


def test_a_signal_in_a_callback_of_the_garbage_collector_is_not_lost() -> None:
    """Python prints and drops an exception there."""
    before, ended, calls = sys.unraisablehook, [], []
    is_entered = False

    def callback(phase: str, info: object) -> None:
        # Python may also collect before the context is entered, where a SIGTERM ends the tests.
        if is_entered and not calls:
            calls.append(phase)
            send()
            sum(range(3))  # here the handler is called

    gc.callbacks.append(callback)
    try:
        with pytest.raises(Terminated), sigterm.ending(ended.append):
            is_entered = True
            gc.collect()
            time.sleep(PATIENCE_S)
    finally:
        gc.callbacks.remove(callback)
    assert calls and not ended and sys.unraisablehook is before


def test_a_signal_in_a_finalizer_that_catches_everything_is_not_lost() -> None:
    """The garbage collector calls the finalizer; nobody learns of the exception."""
    calls = []

    class Careless:
        def __init__(self) -> None:
            self.itself = self  # only the collector frees it

        def __del__(self) -> None:
            with contextlib.suppress(BaseException):
                calls.append("began")
                send()
                sum(range(3))  # here the handler is called
                calls.append("went on")

    callbacks, ended = list(gc.callbacks), []
    with pytest.raises(Terminated), sigterm.ending(ended.append):
        Careless()  # not earlier: without the context a SIGTERM ends the tests
        gc.collect()
        time.sleep(PATIENCE_S)
    assert calls == ["began", "went on"]
    assert not ended and gc.callbacks == callbacks


def test_a_signal_while_a_dropped_exception_is_reported_is_not_lost(monkeypatch) -> None:
    """Python prints and drops an exception there as well."""
    reported, ended = [], []

    def report(dropped: sys.UnraisableHookArgs) -> None:
        send()
        sum(range(3))  # here the handler is called
        reported.append(dropped.exc_type)

    class Failing:
        def __del__(self) -> None:
            raise ValueError("of a finalizer")

    monkeypatch.setattr(sys, "unraisablehook", report)
    with pytest.raises(Terminated), sigterm.ending(ended.append):
        Failing()
        time.sleep(PATIENCE_S)
    assert reported == [ValueError] and not ended


def test_a_notice_after_the_last_question_is_handed_on(monkeypatch) -> None:
    """It came in the last save of a run; the final evaluation must not go on nevertheless."""
    monkeypatch.setenv(METADATA_VARIABLE, "127.0.0.1:9")
    with pytest.raises(Terminated), sigterm.ending([].append):
        with Preemption(PATIENCE_S) as preemption:
            assert not preemption.should_stop()
            send()
        time.sleep(PATIENCE_S)


def test_other_threads_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    handlers = []

    def enter() -> None:
        with sigterm.ending():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_a_handler_that_c_code_replaced_is_installed_again() -> None:
    import ctypes

    with pytest.raises(Terminated), sigterm.ending([].append):
        ctypes.CDLL(None).signal(signal.SIGTERM, None)  # SIG_DFL, as Python does not know
        sigterm.reclaim()
        send()
        time.sleep(PATIENCE_S)


def test_a_fork_ends_by_the_signal_and_its_parent_goes_on() -> None:
    """A program of its own, because a fork of this process would copy jax's threads."""
    code = (
        "import os, signal, time\n"
        "from spell_jax.runtime.hosts import sigterm\n"
        "with sigterm.ending():\n"
        "    child = os.fork()\n"
        "    if not child: time.sleep(600)\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "    time.sleep(.1)\n"
    )
    process = subprocess.run(
        [sys.executable, "-Wignore", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "-15\n", "")


def test_a_signal_before_main_while_flags_are_parsed() -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--parsing"], capture_output=True, text=True, timeout=60
    )
    assert (process.returncode, process.stdout) == (75, "")
    assert process.stderr == "ended by SIGTERM; start the same command again\n"


@pytest.mark.parametrize("option", ["", pytest.param("--thread", marks=pytest.mark.slow)])
def test_a_command_ends_with_one_line_and_status_75(option: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *option.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "main\n"
    process.send_signal(signal.SIGTERM)
    output, error = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (75, "left\n")
    assert error == "ended by SIGTERM; start the same command again\n"


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_ends_both() -> None:
    """Process 0 waits in an exchange; watch restarts both, because one status is 75."""
    (status_0, _, error_0), (status_1, _, error_1) = end_two("tests.runtime.hosts.test_sigterm")
    assert (status_0, status_1) == (peers.EXIT_CODE, 75), error_0 + error_1
    assert "ended by SIGTERM; start the same command again\n" in error_1
    assert "process 1 of 2" in error_0 and "Terminated" in error_0


def main() -> None:
    with entry.user_errors():
        if connect(*sys.argv[1:]):
            send()
        distributed.gather_bytes([b""])


if __name__ == "__main__":
    main()


def test_ctrl_c_is_not_lost_in_a_callback_of_the_garbage_collector():
    hits = []

    def interrupt(phase, info):
        if phase == "start" and not hits:
            hits.append(phase)
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), sigterm.ending([].append):
            gc.collect()
            time.sleep(10)
    finally:
        gc.callbacks.remove(interrupt)
    assert hits
