"""Tests of preemption with real signals and a fake metadata server: notices, limits, exits.

python -m tests.runtime.hosts.test_preemption MODE LIMIT_S [PORT PROCESS]  # a run that is preempted
"""

from __future__ import annotations

import contextlib
import ctypes
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from spell_jax.runtime.hosts import preemption
from spell_jax.runtime.hosts.preemption import Preempted, Preemption
from tests.runtime.hosts.test_distributed import connect

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
NOWHERE = "127.0.0.1:9"  # refuses connections
PATIENCE_S = 60.0  # generous: on an idle machine, everything awaited here takes under a second


@pytest.fixture(autouse=True)
def _not_on_a_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the metadata server's name not resolve, and set no other address."""
    resolve = socket.getaddrinfo

    def fail(host, *arguments, **options):
        if host == preemption.METADATA_HOST:
            raise socket.gaierror("no such name")
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.delenv(preemption.METADATA_VARIABLE, raising=False)


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


# ---------------------------------------------------------------------------------- In one process


def test_sigterm_is_detected_and_old_handlers_are_restored() -> None:
    pipe = socket.socketpair()
    pipe[1].setblocking(False)
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descriptor = signal.set_wakeup_fd(pipe[1].fileno())
    try:
        for error in (None, Preempted("SIGTERM"), ValueError("something else")):
            with contextlib.suppress(Preempted, ValueError), Preemption(PATIENCE_S) as notice:
                assert not notice.should_stop() and notice.why == ""
                os.kill(os.getpid(), signal.SIGTERM)
                assert notice.should_stop() and notice.why == "host 0: SIGTERM"
                if error is not None:
                    raise error
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            assert signal.set_wakeup_fd(pipe[1].fileno()) == pipe[1].fileno()
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.set_wakeup_fd(descriptor)
        for end in pipe:
            end.close()


def test_time_limit_runs_from_first_sigterm_to_context_exit() -> None:
    ended: list[int] = []
    with Preemption(0.05, end=ended.append) as notice:
        time.sleep(0.2)
        assert ended == []
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: bool(ended))
        assert ended == [preemption.EXIT_CODE] == [75]
        assert notice.should_stop()
    with Preemption(PATIENCE_S, end=ended.append) as notice:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(notice.should_stop)
    assert ended == [75] and not notice._watch.thread.is_alive()


def test_other_signals_are_ignored() -> None:
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    ended: list[int] = []
    try:
        with Preemption(0.05, end=ended.append) as notice:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.2)
            assert not notice.should_stop()
        assert ended == []
    finally:
        signal.signal(signal.SIGUSR1, handler)


def test_preempted_exits_with_code_75() -> None:
    with pytest.raises(SystemExit) as error:
        raise Preempted("host 0: SIGTERM")
    assert error.value.code == 75
    assert str(error.value) == "preempted (host 0: SIGTERM)"


def test_a_stopped_run_says_how_to_go_on(caplog) -> None:
    with Preemption(10.0) as preemption:
        preemption.why = "host 0: SIGTERM"
        with pytest.raises(Preempted, match="host 0: SIGTERM"):
            preemption.stop()
    assert "the same command goes on" in caplog.text


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_time_limit_is_rejected(limit: float) -> None:
    with pytest.raises(ValueError, match=r"preemption_limit_s = .*: must be above 0"):
        Preemption(limit)


# ------------------------------------------------------------------------------- Metadata server

NONE, STALL, GONE = b"NONE\n", b"stall", b"TERMINATE_ON_HOST_MAINTENANCE\n"
GOOGLE = {"Metadata-Flavor": "Google"}


class Metadata:
    """A fake server: each key's answers in turn; the last one repeats.

    An answer is (status, headers, body); STALL as a body is never sent.
    """

    def __init__(self, answers: dict[str, list[tuple[int, dict[str, str], bytes]]]):
        self.requested_paths: list[str] = []
        self.flavors: set[str | None] = set()
        self._is_over = threading.Event()
        pending_answers = {key: iter(key_answers) for key, key_answers in answers.items()}
        last: dict[str, tuple[int, dict[str, str], bytes]] = {}
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                key = self.path.split("?")[0].rsplit("/", 1)[1]
                fake.requested_paths.append(self.path)
                fake.flavors.add(self.headers.get("Metadata-Flavor"))
                last[key] = next(pending_answers[key], None) or last[key]
                status, headers, body = last[key]
                if body == STALL:
                    fake._is_over.wait()
                    return
                time.sleep(0.01)
                with contextlib.suppress(OSError):  # the client may be gone
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Metadata:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        self._server.shutdown()
        self._server.server_close()


def answers(*bodies: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    return [(200, GOOGLE, body) for body in bodies]


FALSE = answers(b"FALSE\n")


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_PAUSE_S", 0.01)
    monkeypatch.setattr(preemption, "_WAIT_S", 0.25)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("by_variable", [False, True], ids=["argument", "variable"])
def test_maintenance_event_stops_the_run_without_time_limit(by_variable: bool, monkeypatch) -> None:
    """Only a SIGTERM starts the time limit."""
    ended: list[int] = []
    with Metadata({"maintenance-event": answers(NONE, NONE, GONE), "preempted": FALSE}) as server:
        if by_variable:
            monkeypatch.setenv(preemption.METADATA_VARIABLE, server.address)
        address = None if by_variable else server.address
        with Preemption(0.05, address, ended.append) as notice:
            wait_for(notice.should_stop)
            assert notice.why == "host 0: maintenance-event TERMINATE_ON_HOST_MAINTENANCE"
            time.sleep(0.2)
            assert ended == []
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: bool(ended))
            assert notice.should_stop() and notice.why == "host 0: SIGTERM"
    instance = "/computeMetadata/v1/instance/"
    event_paths = {
        path for path in server.requested_paths if path.startswith(f"{instance}maintenance-event")
    }
    assert event_paths == {f"{instance}maintenance-event?wait_for_change=true&timeout_sec=0.25"}
    assert server.flavors == {"Google"}


@pytest.mark.usefixtures("_impatient")
def test_stalled_and_invalid_answers_are_requested_again(caplog) -> None:
    """A valid answer of another kind of server (a proxy, a captive portal) is ignored."""
    garbage = [
        (200, GOOGLE, b"\xff\x00" * 5000),
        (500, GOOGLE, GONE),
        (200, {}, b"TRUE\n"),
        (200, {"Metadata-Flavor": "Other"}, b"TRUE\n"),
        (200, GOOGLE, b""),
        (200, GOOGLE, STALL),
        (200, GOOGLE, b"TRUE\n"),
    ]
    migrated = answers(NONE, b"MIGRATE_ON_HOST_MAINTENANCE")
    with (
        Metadata({"maintenance-event": migrated, "preempted": garbage}) as server,
        Preemption(PATIENCE_S, server.address) as notice,
    ):

        def count(key: str) -> int:
            return sum(f"/{key}?" in path for path in server.requested_paths)

        wait_for(notice.should_stop)
        assert notice.why == "host 0: preempted TRUE"
        assert count("preempted") == 7 and count("maintenance-event") > 2
    # A watcher that an earlier test has stopped may still say that its server is gone.
    messages = [r.getMessage() for r in caplog.records if server.address in r.getMessage()]
    warnings = [message for message in messages if "asks again" in message]
    assert len(warnings) == 1 and "answers 500 'TERMINATE_ON_HOST_MAIN" in warnings[0]


@pytest.mark.usefixtures("_impatient")
def test_unreachable_metadata_server_does_not_stop_the_run() -> None:
    before = threading.active_count()
    with Preemption(PATIENCE_S, NOWHERE) as notice:
        time.sleep(0.1)
        assert not notice.should_stop()
    wait_for(lambda: threading.active_count() <= before)
    with Preemption(PATIENCE_S) as notice:  # the name does not resolve: no request is sent
        wait_for(lambda: threading.active_count() <= before + 1)
        assert not notice.should_stop()


# -------------------------------------------------------------------------------- Other processes


@contextlib.contextmanager
def started(mode: str, limit_s: float, *arguments: str) -> Iterator[subprocess.Popen]:
    """Run this file as a program; it prints "ready" once it handles signals."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.runtime.hosts.test_preemption",
            mode,
            str(limit_s),
            *arguments,
        ],
        env=os.environ | {preemption.METADATA_VARIABLE: NOWHERE},
        stdout=subprocess.PIPE,
        text=True,
    )
    late = threading.Timer(5 * PATIENCE_S, process.kill)
    late.start()
    try:
        yield process
    finally:
        late.cancel()
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen, prefix: str) -> list[str]:
    """Read output lines up to the first that starts with `prefix`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith(prefix):
            return lines
    raise AssertionError(f"{prefix!r} is not in {lines}")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["saves", "distributed"])
def test_run_that_stops_in_time_exits_with_code_75(mode: str) -> None:
    """Also if jax.distributed has installed its own handler before."""
    with started(mode, PATIENCE_S) as process:
        read_until(process, "ready")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert output.splitlines()[-1] == "saved, host 0: SIGTERM"
        assert process.returncode == 75


@pytest.mark.slow
def test_second_sigterm_ends_a_hanging_run() -> None:
    """The main thread waits in C, where no Python signal handler can run."""
    with started("hangs", 10 * PATIENCE_S) as process:
        read_until(process, "ready")
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE_S) == 75


@pytest.mark.slow
def test_hanging_run_is_ended_at_its_time_limit() -> None:
    with started("hangs", 1.0) as process:
        read_until(process, "ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE_S) == 75


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "limit_s"), [("saves", PATIENCE_S), ("hangs_later", 6.0)])
def test_all_hosts_stop_at_the_same_phase(mode: str, limit_s: float) -> None:
    """Only one process gets the signal; each limit starts when its process is notified."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    with started(mode, limit_s, port, "0") as first, started(mode, limit_s, port, "1") as second:
        processes = first, second
        for process in processes:
            read_until(process, "ready")
        second.send_signal(signal.SIGTERM)
        phase_lines = [read_until(process, "phase")[-1] for process in processes]
        assert [process.wait(timeout=PATIENCE_S) for process in processes] == [75, 75]
    assert phase_lines[0] == phase_lines[1] and phase_lines[0].endswith(", host 1: SIGTERM")


def hang() -> None:
    """Wait forever for a locked lock, in C, which signals do not interrupt."""
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def main() -> None:
    mode, limit_s, *place = sys.argv[1:]
    if place:
        connect(*place)
    if mode == "distributed":
        import jax

        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        jax.distributed.initialize(f"localhost:{port}", 1, 0)
    with Preemption(float(limit_s)) as notice:
        assert not notice.should_stop()  # the first exchange compiles: not within the limit
        print("ready", flush=True)
        if mode == "hangs":
            hang()
        phase = 1
        while not notice.should_stop():
            phase += 1
            time.sleep(0.01)
        print(f"phase {phase}, {notice.why}" if place else f"saved, {notice.why}", flush=True)
        if mode == "hangs_later":
            hang()
        raise Preempted(notice.why)


if __name__ == "__main__":
    main()
