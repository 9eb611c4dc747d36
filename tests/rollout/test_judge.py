"""Tests of the external judge against a local server: verdicts, retries, cache, failures."""

import functools
import gzip
import json
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spell_jax.rollout.judge import Judge, VerdictWatch
from spell_jax.rollout.repliers import PolicyReplier
from spell_jax.runtime import endpoint as endpoints
from spell_jax.runtime.endpoint import Endpoint, EndpointConfig
from spell_jax.selfplay import prompts
from spell_jax.selfplay.verdicts import (
    JUDGE_TEMPLATES,
    MALFORMED,
    UNANSWERED,
)

Answer = tuple[int, str] | tuple[int, str, dict[str, str]]  # status, body, headers


def completion(text: str) -> Answer:
    return 200, json.dumps({"choices": [{"message": {"content": text}}]})


class Server(ThreadingHTTPServer):
    """Server that records its requests and answers with `respond`.

    Its arguments are the prompt and the number of requests with this prompt so far.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.respond: Callable[[str, int], Answer] = lambda prompt, _: completion("[[YES]]")
        self.requests: list[tuple[dict, str | None]] = []
        self.body = b""  # in the place of every text
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log nothing: a client that gives up waiting is part of a test."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/chat/completions"


class Handler(BaseHTTPRequestHandler):
    server: Server  # type of the attribute of the base class, narrowed

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        with self.server.lock:
            self.server.requests.append((body, self.headers["Authorization"]))
            requested_prompts = [sent["messages"][0]["content"] for sent, _ in self.server.requests]
        status, text, *headers = self.server.respond(prompt, requested_prompts.count(prompt))
        if not self.server.url.endswith(self.path):
            status = 404
        self.send_response(status)
        for name, value in (headers[0] if headers else {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.server.body or text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


class Time:
    """A clock that only sleeping advances; `sleeps` records all sleeps."""

    def __init__(self) -> None:
        self.now, self.sleeps, self.lock = 0.0, [], threading.Lock()

    def sleep(self, seconds: float) -> None:
        with self.lock:
            self.now += seconds
            self.sleeps.append(seconds)

    def clock(self) -> float:
        return self.now


def make_judge(url: str, time: Time | None = None, cache: dict | None = None, **changes) -> Judge:
    fields = {"timeout_s": 5.0, "key_name": "SPELL_JUDGE_KEY", **changes}
    config = EndpointConfig(url=url, model="judge-model", **fields)
    time = time or Time()
    endpoint = Endpoint(config, time.sleep, time.clock)
    return Judge(endpoint, lambda q, p, r: f"{q}|{p}|{r}", config.model, **(cache or {}))


def item(name: str) -> tuple[str, str, str]:
    return f"question {name}", "prediction", "reference"


def test_verdicts_are_returned_in_order(server):
    replies = {"a": "[[YES]]", "b": "No doubt: [[NO]]", "c": "<think>YES", "d": "[[YES]]", "e": ""}
    server.respond = lambda prompt, _: completion(replies[prompt[9]])
    judge = make_judge(server.url, api_key="key", max_tokens=77)
    assert judge.judge([item(name) for name in "abcde"]) == [1, 0, MALFORMED, 1, MALFORMED]
    assert judge.counts == {"asked": 5, "cached": 0, "failed": 0, "malformed": 2}
    body, authorization = server.requests[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge-model", 0.0, 77)
    assert authorization == "Bearer key"


def test_cut_off_reply_gives_no_verdict(server, caplog):
    message = {"message": {"content": "[[YES]] only if both agree. The first"}}
    body = json.dumps({"choices": [message | {"finish_reason": "length"}]})
    server.respond = lambda prompt, _: (200, body)
    judge = make_judge(server.url, max_tokens=9)
    assert judge.judge([item("a"), item("b")]) == [MALFORMED, MALFORMED]
    assert len(server.requests) == 2  # and none is asked again
    assert caplog.text.count("a reply was cut off at 9 tokens: not read") == 1


def test_cut_off_reply_is_not_kept_for_a_larger_limit(server, tmp_path):
    message = {"message": {"content": "[[YES]]"}, "finish_reason": "length"}
    cut_off = 200, json.dumps({"choices": [message]})
    server.respond = lambda prompt, count: cut_off if count == 1 else completion("[[YES]]")
    cache = {"cache_file": tmp_path / "judge.jsonl"}
    assert make_judge(server.url, cache=cache, max_tokens=9).judge([item("a")]) == [MALFORMED]
    assert make_judge(server.url, cache=cache, max_tokens=99).judge([item("a")]) == [1]
    assert make_judge(server.url, cache=cache).judge([item("a")]) == [1]
    assert len(server.requests) == 2


@pytest.mark.parametrize("key", ["hunter2\n", "hunter2\r", " hunter2", "hünter2", "hunter2\0"])
def test_key_that_http_cannot_send_is_refused_without_being_repeated(key):
    with pytest.raises(ValueError, match=r"^the key of http://host/v1: .*SPELL_JUDGE_KEY") as info:
        EndpointConfig("http://host/v1", "m", key, key_name="SPELL_JUDGE_KEY")
    assert "nter2" not in str(info.value)
    assert "hunter2" not in repr(EndpointConfig("http://host/v1", "m", "hunter2", key_name="A"))


def test_endpoint_accepts_repeated_prompts(server):
    server.respond = lambda prompt, times: completion(f"{prompt} {times}")
    endpoint = Endpoint(EndpointConfig(server.url, "m", workers=1, top_p=0.5, key_name="A_KEY"))
    replies = dict(endpoint(["a", "b", "a"]))
    assert replies == {0: "a 1", 1: "b 1", 2: "a 2"}
    assert [body["top_p"] for body, _ in server.requests] == [0.5] * 3
    dict(Endpoint(EndpointConfig(server.url, "m", key_name="A_KEY"))(["c"]))
    assert "top_p" not in server.requests[-1][0]


@pytest.mark.parametrize("ending", ["", "/"])
def test_base_url_of_the_api_is_accepted(server, ending):
    url = server.url.removesuffix("/chat/completions") + ending
    assert make_judge(url).judge([item("a")]) == [1]


def test_api_key_of_another_server_is_not_sent(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of another server")
    assert make_judge(server.url).judge([item("a")]) == [1]
    assert server.requests[0][1] is None


def test_lone_surrogate_is_sent_as_a_question_mark(server):
    assert make_judge(server.url).judge([item("\ud83d")]) == [1]
    assert server.requests[0][0]["messages"][0]["content"].startswith("question ?|")


def test_repeated_items_are_requested_once(server):
    judge = make_judge(server.url)
    assert judge.judge([item("a"), item("a"), item("b")]) == [1, 1, 1]
    assert judge.judge([item("a"), item("b")]) == [1, 1]
    assert len(server.requests) == 2
    assert judge.counts["asked"] == 2
    assert judge.counts["cached"] == 3


def test_cache_evicts_the_least_recently_used_reply(server):
    judge = make_judge(server.url, cache={"cache_size": 2})
    for name in "abaca":
        judge.judge([item(name)])
    assert len(server.requests) == 3
    judge.judge([item("b")])
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    "failure",
    [
        *((status, "") for status in (408, 429, 500)),
        *((200, text) for text in ("not json", "[]", '{"choices": []}')),
        (200, '{"choices": [{"message": {"content": null}}]}'),
    ],
)
def test_transient_failures_are_retried_with_backoff(server, failure):
    server.respond = lambda _, times: failure if times < 4 else completion("[[NO]]")
    time = Time()
    judge = make_judge(server.url, time, backoff_s=0.5)
    assert judge.judge([item("a")]) == [0]
    assert time.sleeps == [0.5, 1.0, 2.0]
    assert judge.counts["failed"] == 0


def test_persistent_failures_are_counted_and_not_cached(server):
    server.respond = lambda prompt, _: (503, "") if "a" in prompt[9:10] else completion("[[YES]]")
    judge = make_judge(server.url, attempts=2)
    assert judge.judge([item("a"), item("b")]) == [UNANSWERED, 1]
    assert judge.counts["failed"] == 1
    server.respond = lambda *_: completion("[[YES]]")
    assert judge.judge([item("a")]) == [1]


def test_unauthorized_request_is_not_retried(server):
    server.respond = lambda *_: (401, "")
    assert make_judge(server.url).judge([item("a")]) == [UNANSWERED]
    assert len(server.requests) == 1


def test_silent_server_times_out(server):
    release = threading.Event()

    def wait(*_: object) -> Answer:
        release.wait(10)
        return completion("[[YES]]")

    server.respond = wait
    judge = make_judge(server.url, timeout_s=0.2, attempts=2)
    began = time.monotonic()
    try:
        assert judge.judge([item("a")]) == [UNANSWERED]
        assert time.monotonic() - began < 8
    finally:
        release.set()
    assert judge.counts["failed"] == 1


def test_unreachable_server_is_logged(caplog):
    judge = make_judge("http://127.0.0.1:9/", attempts=2)
    assert judge.judge([item("a")]) == [UNANSWERED]
    assert "judge-model: no reply to 1 of 1 prompts" in caplog.text
    assert judge.judge([]) == []


def test_concurrent_requests_are_limited_to_workers(server):
    running, peak_running, lock = 0, 0, threading.Lock()
    full = threading.Barrier(2, timeout=5)

    def respond(*_: object) -> Answer:
        nonlocal running, peak_running
        with lock:
            running += 1
            peak_running = max(peak_running, running)
        full.wait()  # two requests at once are needed to continue
        time.sleep(0.05)  # a third one would be counted here
        with lock:
            running -= 1
        return completion("[[YES]]")

    server.respond = respond
    assert make_judge(server.url, workers=2).judge([item(name) for name in "abcdef"]) == [1] * 6
    assert peak_running == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", "file:///etc/passwd"),
        ("url", "http://x/v1?version=1"),
        ("attempts", 0),
        ("workers", 0),
        ("timeout_s", -1.0),
        ("requests_per_s", -1.0),
    ],
)
def test_config_errors_name_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        EndpointConfig(**{"url": "http://x/", "model": "m", "key_name": "A_KEY", field: value})


def test_judge_template_has_its_own_prompt_and_parser(tmp_path):
    item, full = ("q?", "said", "true"), prompts.load("full")
    texts = []
    for name, (write, parse) in JUDGE_TEMPLATES.items():
        reply = {"yes_no": "[[YES]]", "grades": "A"}[name]
        ask = lambda texts, reply=reply: ((index, reply) for index in range(len(texts)))  # noqa: E731
        write_prompt = functools.partial(write, full)
        cache_file = tmp_path / name
        judge = Judge(ask, write_prompt, "m", parse, cache_file=cache_file)
        assert judge.judge([item]) == [1]
        restarted_judge = Judge(lambda _: (), write_prompt, "m", parse, cache_file=cache_file)
        assert restarted_judge.judge([item]) == [1]  # replies of the file are parsed alike
        texts.append(write_prompt(*item))
    assert texts == [full.judge(*item), full.judge_grades(*item)] and texts[0] != texts[1]


NEWER = json.dumps(
    {
        "error": {
            "message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
            "'max_completion_tokens' instead.",
            "type": "invalid_request_error",
            "code": "unsupported_parameter",
        }
    }
)


def test_endpoint_that_asks_for_max_completion_tokens_gets_it(server):
    def respond(*_: object) -> Answer:
        body, _ = server.requests[-1]
        return (400, NEWER) if "max_tokens" in body else completion("[[YES]]")

    server.respond = respond
    judge = make_judge(server.url, max_tokens=77, workers=1)
    assert judge.judge([item("a"), item("b")]) == [1, 1]
    fields = [sorted({"max_tokens", "max_completion_tokens"} & {*b}) for b, _ in server.requests]
    # Remembered: only the first prompt is sent twice.
    assert fields == [["max_tokens"], ["max_completion_tokens"], ["max_completion_tokens"]]
    assert server.requests[-1][0]["max_completion_tokens"] == 77
    assert judge.counts["failed"] == 0


def test_endpoint_that_refuses_both_fields_is_asked_twice(server, caplog):
    server.respond = lambda *_: (400, NEWER)
    assert make_judge(server.url).judge([item("a")]) == [UNANSWERED]
    assert len(server.requests) == 2
    assert "(400 Unsupported parameter: 'max_tokens' is not supported" in caplog.text


@pytest.mark.parametrize(
    "status, body, words",
    [
        (
            401,
            '{"error": {"message": "bad key"}}',
            ["(401 bad key)", "SPELL_JUDGE_KEY, is missing"],
        ),
        (403, '{"error": "not yours"}', ["(403 not yours)", "SPELL_JUDGE_KEY may not use"]),
        (404, '{"message": "no model"}', ["(404 no model)", "'judge-model'", "ends in /v1"]),
        (400, "<html>no</html>", ["(400 <html>no</html>)"]),
        (422, "", ["(422)"]),
        (307, "", ["(307)", "redirects to"]),
    ],
)
def test_first_failure_is_a_warning_with_the_remedy(server, caplog, status, body, words):
    server.respond = lambda *_: (status, body)
    judge = make_judge(server.url, workers=1)
    assert judge.judge([item("a"), item("b")]) == [UNANSWERED, UNANSWERED]
    records = [r for r in caplog.records if r.levelname == "WARNING"]
    first, total = (r.getMessage() for r in records)  # once, and the sum
    assert first.startswith(f"{server.url}: no reply of judge-model (")
    assert all(word in first for word in words), first
    assert "no reply to 2 of 2 prompts; the rule's scores stand" in total
    assert total.endswith(f". Last: {first.partition('judge-model ')[2]}")
    assert judge._ask.failures == {f"HTTP {status}": 2}


def test_network_failure_is_a_warning_with_its_cause(caplog):
    assert make_judge("http://127.0.0.1:9/", attempts=1).judge([item("a")]) == [UNANSWERED]
    assert "http://127.0.0.1:9/: no reply of judge-model (APIConnectionError: " in caplog.text


def test_words_of_a_server_are_cut_and_without_the_key(server, caplog):
    server.respond = lambda *_: (401, "key sk-secret is wrong " + "\x1b[2J" + "a" * 10**6)
    make_judge(server.url, api_key="sk-secret").judge([item("a")])
    message = caplog.records[0].getMessage()
    assert "key [key] is wrong \\x1b[2J" in message and "sk-secret" not in caplog.text
    assert len(message) < 600


@pytest.mark.parametrize(
    "body",
    [
        "x" * (endpoints.ERROR_SHOWN - 4) + "sk-secret of a team",
        "x" + " " * (endpoints.ERROR_BYTES - 8) + "sk-secret",
    ],
)
def test_a_key_across_the_cut_of_a_servers_words_is_not_logged(server, caplog, body):
    server.respond = lambda *_: (401, body)
    make_judge(server.url, api_key="sk-secret").judge([item("a")])
    assert "(401 x" in caplog.text and "sk-" not in caplog.text


def test_error_of_a_compressed_body_is_bounded(server, caplog):
    bomb = gzip.compress(bytes(50_000_000))
    server.respond = lambda *_: (500, "", {"Content-Encoding": "gzip"})
    server.body = bomb
    assert make_judge(server.url, attempts=1).judge([item("a")]) == [UNANSWERED]
    assert "(500" in caplog.text


def test_silent_judge_ends_a_run_at_once_only_if_it_never_spoke():
    watch = VerdictWatch(0)
    assert not watch.ends_run(0, 0) and not watch.ends_run(3, 3)  # nothing, or too little, asked
    assert watch.ends_run(8, 8)
    watch = VerdictWatch(0)
    steps = [(7, 8), (8, 8), (8, 8), (7, 8), (8, 8), (0, 0), (8, 8)]
    assert not any(watch.ends_run(failed, num_asked) for failed, num_asked in steps)
    assert watch.ends_run(8, 8)


def test_a_run_that_resumes_outlives_two_silent_steps():
    watch = VerdictWatch(500)
    assert not watch.ends_run(8, 8) and not watch.ends_run(8, 8)
    assert watch.ends_run(8, 8)


def test_a_policy_that_cannot_reply_has_no_words_of_a_failure(caplog):
    refusing = types.SimpleNamespace(ask=lambda *_, **__: [(0, None)], release=lambda: None)
    refusing.config = types.SimpleNamespace(max_positions=9)
    judge = Judge(PolicyReplier(refusing, 4), lambda *item: item[1], "m")  # type: ignore[arg-type]
    assert judge.judge([item("a")]) == [UNANSWERED]
    assert caplog.messages[-1].endswith("the rule's scores stand where there is a rule")


def test_replies_without_any_verdict_are_a_warning(caplog):
    texts = {"a": "hmm", "b": "well", "c": "[[YES]]"}
    judge = Judge(lambda ps: ((i, texts[p[-1]]) for i, p in enumerate(ps)), lambda *x: x[1], "m")
    assert judge.judge([("q", "a", "r"), ("q", "b", "r")]) == [MALFORMED] * 2
    assert "m: no verdict in any of 2 replies" in caplog.text
    caplog.clear()
    assert judge.judge([("q", "a", "r"), ("q", "c", "r")]) == [MALFORMED, 1] and not caplog.text


def test_a_missing_openai_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    message = r"^http://x/v1: models at endpoints need openai; pip install 'spell_jax\[judge\]'$"
    with pytest.raises(ImportError, match=message):
        Endpoint(EndpointConfig("http://x/v1", "m", key_name="KEY"))
