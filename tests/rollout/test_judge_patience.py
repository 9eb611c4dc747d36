"""Tests of a judge with a rate-limited, slow or dying server, and a killed process."""

import email.utils
import json
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from spell_jax.runtime import endpoint, fault_injection
from spell_jax.runtime.endpoint import EndpointConfig, read_retry_after
from spell_jax.selfplay.verdicts import MALFORMED, UNANSWERED
from tests.rollout.test_judge import (
    Answer,
    Server,
    Time,
    completion,
    item,
    make_judge,
    server,
)

__all__ = ["server"]  # the fixture


def test_retry_after_header_extends_shorter_backoff(server: Server):
    limited = (429, "", {"Retry-After": "7"})
    server.respond = lambda _, times: limited if times == 1 else completion("[[YES]]")
    clock = Time()
    assert make_judge(server.url, clock, backoff_s=2.0).judge([item("a")]) == [1]
    assert clock.sleeps == [2.0, 5.0]  # the pause, and the rest of the 7 seconds


def test_rate_limit_response_delays_other_prompts(server: Server):
    """One worker, so that the second prompt is sent after the first one was rate-limited."""
    limited = (429, "", {"Retry-After": "30"})
    server.respond = lambda prompt, _: limited if "a" in prompt[9:10] else completion("[[YES]]")
    clock = Time()
    judge = make_judge(server.url, clock, attempts=1, workers=1)
    assert judge.judge([item("a"), item("b")]) == [UNANSWERED, 1]
    assert clock.sleeps == [30.0]


def test_retry_after_header_is_capped(server: Server):
    limited = (503, "", {"Retry-After": "86400"})
    server.respond = lambda _, times: limited if times < 3 else completion("[[YES]]")
    clock = Time()
    judge = make_judge(server.url, clock, backoff_s=50.0, longest_wait_s=60.0)
    assert judge.judge([item("a")]) == [1]
    assert clock.sleeps == [50.0, 10.0, 60.0]


def test_requests_respect_the_configured_rate(server: Server):
    clock = Time()
    judge = make_judge(server.url, clock, workers=1, requests_per_s=4.0)
    assert judge.judge([item(name) for name in "abcd"]) == [1] * 4
    assert clock.sleeps == [0.25] * 3


def test_idle_time_allows_no_burst(server: Server):
    clock = Time()
    judge = make_judge(server.url, clock, workers=1, requests_per_s=4.0)
    clock.now += 100.0
    assert judge.judge([item(name) for name in "abc"]) == [1] * 3
    assert clock.sleeps == [0.25] * 2


def test_configured_rate_overrides_shorter_retry_after_header(server: Server):
    limited = (429, "", {"Retry-After": "30"})
    server.respond = lambda _, times: limited if times == 1 else completion("[[YES]]")
    clock = Time()
    judge = make_judge(server.url, clock, workers=1, requests_per_s=0.01, backoff_s=1.0)
    assert judge.judge([item("a")]) == [1]
    assert clock.sleeps == [1.0, 99.0]


def test_oversized_reply_is_rejected(server: Server, monkeypatch):
    server.respond = lambda *_: completion("[[YES]]" + " " * 9000)
    assert make_judge(server.url, attempts=1).judge([item("a")]) == [1]
    monkeypatch.setattr(endpoint, "MAX_REPLY_BYTES", 8000)
    assert make_judge(server.url, attempts=1).judge([item("b")]) == [UNANSWERED]


def test_retry_after_header_is_read_in_all_forms():
    assert read_retry_after("120") == read_retry_after(" 120 ") == 120.0
    later = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert 95 < read_retry_after(later) <= 100
    assert read_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0  # is over
    for nothing in (None, "", "soon", "-3", "1.5", "9" * 400 + "x", "Wed, 99 Oct 2015 07:28 GMT"):
        assert read_retry_after(nothing) == 0.0
    assert read_retry_after("9" * 400) > 1e9


@pytest.fixture(params=["200 OK", "503 Service Unavailable"])
def dripping(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the address of a server that sends one byte of its reply every 50 ms, forever."""
    ended = threading.Event()

    class Drip(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(f"HTTP/1.1 {request.param}\r\n\r\n".encode())
            while not ended.wait(0.05):
                self.request.sendall(b" ")

    class Quiet(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Log nothing: the client hung up, as it should."""

    with Quiet(("127.0.0.1", 0), Drip) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}/"
        ended.set()
        running.shutdown()
        thread.join()


def test_endless_reply_times_out(dripping, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    judge = make_judge(dripping, timeout_s=0.3, attempts=1)
    began = time.monotonic()
    assert judge.judge([item("a")]) == [UNANSWERED]
    assert time.monotonic() - began < 5


@pytest.fixture
def judge_cache(tmp_path, monkeypatch):
    fault_injection._passed.clear()
    monkeypatch.delenv(fault_injection.VARIABLE, raising=False)
    return {"cache_file": tmp_path / "judge.jsonl"}


def test_replies_on_disk_are_not_requested_again(server: Server, judge_cache):
    replies = {"a": "[[YES]]", "b": "[[NO]]", "c": "I cannot say"}
    server.respond = lambda prompt, _: completion(replies[prompt[9]])
    items = [item(name) for name in "abc"]
    assert make_judge(server.url, cache=judge_cache).judge(items) == [1, 0, MALFORMED]
    restarted_judge = make_judge(server.url, cache=judge_cache)
    assert restarted_judge.judge([*items, item("a")]) == [1, 0, MALFORMED, 1]
    assert len(server.requests) == 3
    assert restarted_judge.counts == {"asked": 0, "cached": 4, "failed": 0, "malformed": 0}
    other_judge = make_judge(server.url, cache=judge_cache)
    other_judge.model = "another"  # its replies are its own
    assert other_judge.judge([item("a")]) == [1]
    assert len(server.requests) == 4


def test_restarted_judge_requests_only_missing_replies(server: Server, judge_cache, monkeypatch):
    items = [item(name) for name in "abcdefgh"]

    def respond(prompt: str, _: int) -> Answer:
        if prompt[9] > "c":
            time.sleep(0.3)  # the judge has stopped long before the last prompt
        return completion("[[YES]]")

    server.respond = respond
    monkeypatch.setenv(fault_injection.VARIABLE, "judged:3:raise")
    with pytest.raises(fault_injection.Fault):
        make_judge(server.url, cache=judge_cache, workers=1).judge(items)
    monkeypatch.delenv(fault_injection.VARIABLE)
    with judge_cache["cache_file"].open("a") as file:
        file.write('{"key": "torn')
    sent = len(server.requests)
    assert sent < 8  # no requests after the fault
    assert make_judge(server.url, cache=judge_cache).judge(items) == [1] * 8
    assert len(server.requests) == sent + 5
    lines = judge_cache["cache_file"].read_text().splitlines()
    assert len(lines) == 9 and [json.loads(line)["reply"] for line in lines[4:]] == ["[[YES]]"] * 5
    assert make_judge(server.url, cache=judge_cache).judge(items) == [1] * 8
    assert len(server.requests) == sent + 5


def test_failures_are_not_cached(server: Server, judge_cache):
    server.respond = lambda *_: (503, "")
    assert make_judge(server.url, cache=judge_cache, attempts=1).judge([item("a")]) == [UNANSWERED]
    server.respond = lambda *_: completion("[[NO]]")
    assert make_judge(server.url, cache=judge_cache).judge([item("a")]) == [0]


def test_invalid_lines_of_the_cache_file_are_skipped(server: Server, judge_cache):
    judge_cache["cache_file"].write_text('[]\n{"key": "k", "reply": 3}\n{"key": "k"}\nno JSON\n')
    assert make_judge(server.url, cache=judge_cache).judge([item("a")]) == [1]


def test_replies_may_arrive_out_of_order(server: Server):
    """The first reply comes last; verdicts stay with their prompts."""
    others_arrived, lock = threading.Event(), threading.Lock()
    count = 0

    def respond(prompt: str, _: int) -> Answer:
        nonlocal count
        number = int(prompt.split("|")[0].split()[1])
        if number == 1:
            others_arrived.wait(5)
        with lock:
            count += 1
            if count == 9:
                others_arrived.set()
        return completion("[[YES]]" if number % 2 else "[[NO]]")

    server.respond = respond
    items = [(f"question {n}", "prediction", "reference") for n in range(1, 11)]
    assert make_judge(server.url, workers=4).judge(items) == [n % 2 for n in range(1, 11)]


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_out_of_range_are_rejected(size):
    with pytest.raises(ValueError, match="cache_size"):
        make_judge("http://localhost/", cache={"cache_size": size})
    with pytest.raises(ValueError, match="longest_wait_s"):
        EndpointConfig("http://localhost/", "m", longest_wait_s=-1, key_name="A_KEY")
