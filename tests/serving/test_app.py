"""Tests of the HTTP routes: errors, limits, keys, cancellation, shared prefixes, streams."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable

import httpx
import numpy as np
import pytest

from spell_jax.serving import app as apps
from spell_jax.serving.app import is_loopback
from tests.serving.running import CHAT, CONFIG, NAME, RunningServer, running


def events_of(text: str) -> list[dict]:
    """Return the events of a stream before its end."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "does not come true"
        time.sleep(0.01)


def is_idle(demo: RunningServer) -> bool:
    state = demo.service.state
    return state.running == state.waiting == state.pages == 0


# ------------------------------------------------------------------------------------------ Errors


def check_error(reply: httpx.Response, status: int, message: str) -> dict:
    """Check that a reply is an error in the protocol's form, and return its fields."""
    error = reply.json()["error"]
    assert reply.status_code == status and error.keys() == {"message", "type", "param", "code"}
    assert re.search(message, error["message"]), error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "status", "message", "param"),
    [
        ({"temprature": 1}, 400, "temprature: unknown field", "temprature"),
        ({"temperature": float("nan")}, 400, "temperature = NaN: must be a number", "temperature"),
        ({"n": 0}, 400, "n = 0: must be an integer from 1 to 128", "n"),
        ({"temperature": 1e-10}, 400, "temperature = 1e-10: must be 0, or at least", "temperature"),
        ({"stop": "\ud800"}, 400, "stop: has a lone surrogate", "stop"),
        ({"\ud800x": 1}, 400, r"\?x: unknown field", "?x"),
        (
            {"n": 128, "logprobs": 20, "echo": True, "prompt": ["a"] * 8, "max_tokens": 256},
            400,
            "logprobs: the reply could have",
            "logprobs",
        ),
        ({"model": "gpt"}, 404, "model = 'gpt': not served here, must be 'demo'", "model"),
        (
            {"prompt": "city " * 700},
            400,
            r"prompt: a prompt of \d+ tokens is over this server's limit of 640 tokens",
            "prompt",
        ),
        ({"prompt": [5, 896]}, 400, "token ids must be from 0 to 895", "prompt"),
        ({"prompt": [-1]}, 400, "token ids must be from 0 to 895", "prompt"),
        ({"prompt": ""}, 400, "prompt: a prompt has no tokens", "prompt"),
        ({"prompt": "\ud800"}, 400, "prompt: has a lone surrogate", "prompt"),
        ({"model": None}, 400, "model: is missing, must be 'demo'", "model"),
        (
            {"prompt": None, "messages": CHAT},
            400,
            "prompt: is missing; messages go to /v1/chat/completions",
            "prompt",
        ),
        ({"prompt": ["a"] * 1025}, 400, "1025 prompts in a request, at most 1024", "prompt"),
    ],
)
def test_bad_requests_have_errors_of_the_protocol(demo, fields, status, message, param):
    error = check_error(demo.complete(**fields), status, message)
    assert error["param"] == param


def test_max_tokens_above_the_limit_of_the_server_is_its_limit(demo):
    options = {"prompt": [5, 6, 7], "temperature": 5, "seed": 3, "n": 4}
    choices, expected_choices = (
        demo.complete(max_tokens=count, **options).json()["choices"] for count in (100_000, 256)
    )
    assert choices == expected_choices
    assert "length" in {choice["finish_reason"] for choice in choices}


def test_offsets_of_a_stream_are_the_offsets_of_the_whole_reply(demo):
    fields = {"max_tokens": 40, "logprobs": 0, "temperature": 5, "seed": 3}
    (choice,) = demo.complete(**fields).json()["choices"]
    lines = demo.complete(stream=True, **fields).text.splitlines()
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    offsets = [offset for part in logprobs if part for offset in part["text_offset"]]
    assert len(logprobs) > 2 and offsets == choice["logprobs"]["text_offset"]


def test_chat_without_messages_names_the_other_route(demo):
    reply = demo.post("/v1/chat/completions", {"model": NAME, "prompt": "a"})
    check_error(reply, 400, "messages: is missing; a prompt without turns goes to /v1/completions")


def test_ids_without_a_token_are_refused(demo, monkeypatch):
    """Their logprobs are -inf, which JSON does not have."""
    assert demo.app._has_token.sum() == demo.model.tokenizer.vocab_size
    monkeypatch.setattr(demo.app, "_has_token", np.arange(896) != 7)
    check_error(demo.complete(prompt=[5, 7]), 400, "to 895, and stand for a token")
    assert demo.complete(prompt=[5, 8]).is_success


def test_layout_that_refuses_messages_is_an_error(demo):
    messages = [{"role": "system", "content": "a"}, *CHAT]
    error = check_error(demo.chat(messages=messages), 400, "messages: this layout has turns of")
    assert error["param"] == "messages"


def test_broken_bodies_and_routes_have_errors_of_the_protocol(demo):
    path = "/v1/completions"
    check_error(demo.post(path, b"{"), 400, "the body is not JSON")
    check_error(demo.post(path, b""), 400, "the body is not JSON")
    plain = {"Content-Type": "text/plain"}
    check_error(demo.post(path, {}, headers=plain), 415, "Content-Type = 'text/plain': must be")
    check_error(
        demo.post("/v1/embeddings", {}), 404, "POST /v1/embeddings: not found; must be POST"
    )
    check_error(demo.post(f"{path}/", {}), 404, "not found")  # no redirect
    bad = {"model": NAME, "messages": [{"role": "user", "content": "a", "\ud800": 1}]}
    check_error(demo.post("/v1/chat/completions", bad), 400, r"messages\[0\]\.\?: not supported")
    check_error(httpx.get(f"{demo.url}{path}"), 405, "GET /v1/completions: method not allowed")
    check_error(httpx.get(f"{demo.url}/v1/models/gpt"), 404, "model = 'gpt': not served here")


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_are_refused(demo, chunked):
    body = json.dumps({"model": NAME, "prompt": "a" * (17 << 20)}).encode()
    content = iter([body[i : i + 65536] for i in range(0, len(body), 65536)]) if chunked else body
    headers = {"Content-Type": "application/json"}
    try:
        reply = httpx.post(f"{demo.url}/v1/completions", content=content, headers=headers)
    except httpx.TransportError:  # the server closed the connection before the end of the body
        assert chunked
        return
    check_error(reply, 400, "the body is longer than 16777216 bytes")


@pytest.mark.slow
def test_bodies_of_10_mb_within_the_limit_are_answered(demo):
    """The prompt is too long, which both numbers tell."""
    check_error(demo.complete(prompt="city " * 2_000_000), 400, r"\d{7} tokens is over .* 640")


def test_slow_bodies_are_ended(demo, monkeypatch):
    monkeypatch.setattr(apps, "BODY_S", 0.1)
    host, port = demo.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
        client.settimeout(10)
        assert b" 408 " in client.recv(4096).split(b"\r\n")[0]


@pytest.mark.slow
def test_over_capacity_is_429_with_retry_after():
    with running(max_queued=2) as demo:
        check_error(demo.complete(prompt=["a"] * 3), 429, "at most 2 may; ask again later")
        replies: list[httpx.Response] = []
        # 16 slots; the requests for several answers fill them.
        ask = lambda seed: replies.append(  # noqa: E731
            demo.chat(n=16, max_tokens=60, temperature=5, seed=seed)
        )
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        statuses = [reply.status_code for reply in replies]
        assert {*statuses} == {200, 429}
        refused = replies[statuses.index(429)]
        assert refused.headers["Retry-After"] == "1"
        assert check_error(refused, 429, "prompts wait already")["code"] == "rate_limit_exceeded"
        wait_until(lambda: is_idle(demo))
        assert demo.chat(max_tokens=2).status_code == 200


# -------------------------------------------------------------------------------------------- Keys


def test_key_is_needed_and_never_logged(caplog):
    key = "sk-secret-123"
    with running(key=key) as demo:
        right = {"Authorization": f"Bearer {key}"}
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": key}):
            for reply in (
                httpx.get(f"{demo.url}/v1/models", headers=headers),
                httpx.get(f"{demo.url}/metrics", headers=headers),
                demo.post("/v1/completions", {"model": NAME, "prompt": "a"}, headers=headers),
            ):
                error = check_error(reply, 401, "the key is missing or wrong")
                assert error["code"] == "invalid_api_key"
                assert reply.headers["WWW-Authenticate"] == "Bearer"
        assert httpx.get(f"{demo.url}/health").json() == {"status": "ok"}
        # With a key, other names of the host are right.
        assert httpx.get(f"{demo.url}/v1/models", headers=right | {"Host": "x.org"}).is_success
        assert demo.post(
            "/v1/completions", {"model": NAME, "prompt": "a"}, headers=right
        ).is_success
    assert key not in caplog.text


def test_other_host_names_are_refused_without_a_key(demo):
    for host in ("evil.example", "evil.example:8000", "", "[x"):
        reply = httpx.get(f"{demo.url}/v1/models", headers={"Host": host})
        assert reply.status_code in (400, 403), host
    for host in ("localhost:8000", "127.0.0.1", "[::1]:80"):
        assert httpx.get(f"{demo.url}/v1/models", headers={"Host": host}).is_success, host


def test_loopback_addresses():
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "10.0.0.1", "::", "", "example.org", "127.0.0.1.example.org"):
        assert not is_loopback(host)


# ----------------------------------------------------------------------------------------- Answers


def test_models_and_metrics_tell_what_is_served(demo):
    (model,) = httpx.get(f"{demo.url}/v1/models").json()["data"]
    assert model["id"] == NAME and model["max_model_len"] == 1024
    assert httpx.get(f"{demo.url}/v1/models/demo").json() == model
    usage = demo.chat(max_tokens=3).json()["usage"]
    text = httpx.get(f"{demo.url}/metrics").text
    values = dict(re.findall(r"^(spell_\w+) ([\d.e+]+)$", text, re.M))
    assert float(values["spell_prompt_tokens_total"]) >= usage["prompt_tokens"] > 0
    assert float(values["spell_sampled_tokens_total"]) >= usage["completion_tokens"] > 0
    assert float(values["spell_pages"]) == CONFIG.kv_cache_tokens // CONFIG.page_size
    assert 'spell_requests_total{route="/v1/chat/completions",status="200"}' in text


def test_shared_prefix_is_read_once(demo):
    """The second question about a document takes the whole pages of the document's tokens."""
    rng = np.random.default_rng(0)
    document = rng.integers(10, 800, size=300).tolist()
    cached = []
    for number in range(3):
        reply = demo.complete(prompt=[*document, 20 + number], max_tokens=2)
        cached.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 288, 288]  # nine pages of 32


@pytest.mark.parametrize("is_stream", [False, True])
def test_client_that_leaves_frees_its_slots_and_pages(demo, is_stream):
    wait_until(lambda: is_idle(demo))
    canceled = demo.app.metrics.canceled._value.get()
    fields = {"model": NAME, "messages": CHAT, "n": 16, "temperature": 5, "stream": is_stream}
    url = f"{demo.url}/v1/chat/completions"
    with httpx.Client(timeout=30) as client:
        if is_stream:
            with client.stream("POST", url, json=fields) as reply:
                next(reply.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(url, json=fields, timeout=0.1)
    wait_until(lambda: is_idle(demo))
    wait_until(lambda: demo.app.metrics.canceled._value.get() == canceled + 1)


def test_stream_and_body_are_equal(demo):
    fields = {"n": 3, "max_tokens": 40, "temperature": 1.2, "seed": 5, "logprobs": True}
    body = demo.chat(**fields).json()
    reply = demo.chat(**fields, stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events_of(reply.text)
    assert last["choices"] == []
    same = {key: body["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    assert same.items() <= last["usage"].items()
    for choice in body["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        entries = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        values = bytes(value for entry in entries for value in entry["bytes"])
        text = values.removesuffix(b"</s>").decode(errors="replace")
        assert text.replace("\ufffd", "") == choice["message"]["content"].replace("\ufffd", "")
    assert len(chunks) > 9  # several calls of the sampler


def test_streamed_completions_stop_at_strings(demo):
    (choice,) = demo.complete(max_tokens=40, temperature=0).json()["choices"]
    text = choice["text"]
    string = text[5:9]
    fields = {"max_tokens": 40, "temperature": 0, "stop": ["never there", string]}
    (choice,) = demo.complete(**fields).json()["choices"]
    assert choice["text"] == text[: text.index(string)] and choice["finish_reason"] == "stop"
    chunks = events_of(demo.complete(**fields, stream=True).text)
    assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]


def test_end_of_a_stream_that_looks_like_a_stop_string_is_sent(demo):
    """It is held back until the cap of tokens ends the answer."""
    fields = {"max_tokens": 4, "temperature": 0}
    (choice,) = demo.complete(**fields).json()["choices"]
    assert choice["finish_reason"] == "length"
    stop = choice["text"][-2:] + "zz"
    chunks = events_of(demo.complete(**fields, stop=stop, stream=True).text)
    assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]


def test_stop_ids_end_answers(demo):
    fields = {"max_tokens": 12, "temperature": 0, "logprobs": 0}
    ids = demo.model.tokenizer.encode
    (plain,) = demo.complete(**fields).json()["choices"]
    stop_id = ids(plain["logprobs"]["tokens"][2])[-1]
    (choice,) = demo.complete(**fields, stop_token_ids=[stop_id]).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"] == plain["logprobs"]["tokens"][:3]
    assert plain["text"].startswith(choice["text"]) and len(choice["text"]) < len(plain["text"])


def test_new_requests_are_refused_while_the_server_stops():
    with running() as demo:
        demo.app._is_stopping = True
        check_error(demo.chat(), 503, "the server stops")
        assert httpx.get(f"{demo.url}/health").status_code == 503


def test_streams_end_with_an_error_when_the_server_stops():
    with running(grace_s=0.0) as demo:
        fields = {"model": NAME, "messages": CHAT, "n": 16, "temperature": 5, "stream": True}
        texts: list[str] = []
        url = f"{demo.url}/v1/chat/completions"
        ask = lambda: texts.append(httpx.post(url, json=fields, timeout=60).text)  # noqa: E731
        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: demo.service.state.running > 0)
    thread.join()
    *_, last = [line for line in texts[0].split("\n\n") if line]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and "the server stops" in error["message"]
