"""Tests of the command: keys, sizes, addresses, and its end by a signal."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest
from absl import app

from spell_jax.policy.model import TINY_POLICY
from spell_jax.serving import server
from tests.paths import ROOT
from tests.serving.running import CHAT, demo_model

# ------------------------------------------------------------------------------------------- Flags


def read_key(monkeypatch, value: str | None, name="SPELL_SERVE_KEY", named=False, host="127.0.0.1"):
    if value is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, value)
    return server.read_key(name, named, host)


def test_key_is_read_from_the_environment(monkeypatch):
    assert read_key(monkeypatch, None) is None
    assert read_key(monkeypatch, "sk-12345") == "sk-12345"
    assert read_key(monkeypatch, "sk-12345", "MY_KEY", True, "0.0.0.0") == "sk-12345"


@pytest.mark.parametrize("value", ["", "short", "with space 1", "line\nbreak1", "ключключ"])
def test_unusable_keys_are_refused_without_being_repeated(monkeypatch, value):
    with pytest.raises(ValueError, match="a key of at least 8 visible ASCII") as caught:
        read_key(monkeypatch, value)
    assert not value or value not in str(caught.value)


def test_named_variable_must_have_a_key(monkeypatch):
    with pytest.raises(ValueError, match="with this name must hold a key"):
        read_key(monkeypatch, None, "MY_KEY", True)


@pytest.mark.parametrize("name", ["sk-abc123", "abcdef", "", "A B"])
def test_key_as_the_value_of_the_flag_is_refused(name):
    with pytest.raises(ValueError, match="must be the name of an environment variable") as caught:
        server.read_key(name, True, "127.0.0.1")
    assert not name or name not in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org", ""])
def test_other_machines_need_a_key(monkeypatch, host):
    with pytest.raises(ValueError, match="other machines can reach it, which needs a key"):
        read_key(monkeypatch, None, host=host)


def sizes(**changes) -> SimpleNamespace:
    values = {"max_tokens": None, "max_prompt": None, "slots": 8, "prefill_tokens": 256}
    types = {"cache_dtype": "compute", "weights_dtype": "compute", "kv_cache_tokens": 1024}
    return SimpleNamespace(**values | types | changes)


def test_sizes_follow_from_the_context():
    config = server.sampler_config(sizes(), demo_model())
    assert (config.max_prompt, config.max_tokens) == (512, 512)
    config = server.sampler_config(sizes(max_tokens=24), demo_model())
    assert (config.max_prompt, config.max_tokens) == (1000, 24)
    assert config.kv_cache_tokens >= 1024 + 1024
    assert config.samples_per_prompt_batch == 8
    with pytest.raises(ValueError, match=r"max_prompt = 1000 and --max_tokens = 512: .* of 1024"):
        server.sampler_config(sizes(max_prompt=1000), demo_model())
    with pytest.raises(ValueError, match=r"--max_tokens = 1024: .* of 1024 tokens"):
        server.sampler_config(sizes(max_tokens=1024), demo_model())


def test_address_in_use_is_a_mistake_of_the_user():
    with server.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with (
            pytest.raises(app.UsageError, match=f"--port = {port}: address already in use"),
            server.listen("127.0.0.1", port),
        ):
            pass
    with (
        pytest.raises(app.UsageError, match=r"--host = 'no\.such\.host\.invalid'"),
        server.listen("no.such.host.invalid", 0),
    ):
        pass


# ------------------------------------------------------------------------------------------ Process


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "spell_jax.serve", f"--policy={TINY_POLICY}", *arguments]


def environment(**changes: str) -> dict[str, str]:
    values = {name: value for name, value in os.environ.items() if name != "SPELL_SERVE_KEY"}
    return values | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""} | changes


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen, str]]:
    """Start the command at a free port; return the process and its address."""
    arguments = ("--port=0", "--slots=4", "--grace_s=1", "--prefill_tokens=128")
    with subprocess.Popen(
        command(*arguments), stderr=subprocess.PIPE, text=True, env=environment()
    ) as serving:
        assert serving.stderr
        lines = [serving.stderr.readline()]
        while lines[-1] and " serves " not in lines[-1]:
            lines.append(serving.stderr.readline())
        assert " serves tiny_policy: prompts of up to 512 tokens" in lines[-1], lines
        try:
            yield serving, lines[-1].split()[0]
        finally:
            serving.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_streams_with_an_error_and_the_command_with_0(process, number):
    serving, url = process
    fields = {"model": "tiny_policy", "messages": CHAT, "max_tokens": 512, "n": 100, "stream": True}
    fields |= {"temperature": 8}
    with httpx.Client(timeout=60) as client:
        with client.stream("POST", f"{url}/chat/completions", json=fields) as reply:
            lines = reply.iter_lines()
            next(lines)
            serving.send_signal(number)
            begin = time.monotonic()
            last = [line for line in lines if line][-1]
        assert "the server stops" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert serving.wait(20) == 0 and 0.9 < time.monotonic() - begin < 10
    text = serving.stderr.read()
    assert "Traceback" not in text and CHAT[0]["content"] not in text


@pytest.mark.slow
def test_signal_lets_running_requests_end(process):
    serving, url = process
    fields = {"model": "tiny_policy", "messages": CHAT, "stream": True, "max_tokens": 100}
    with httpx.stream("POST", f"{url}/chat/completions", json=fields, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        serving.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert serving.wait(20) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--host=0.0.0.0"], "error: --host = '0.0.0.0': other machines can reach it"),
        (["--api_key=sk-abc"], "error: --api_key: must be the name of an environment variable"),
        (["--adapters=/nowhere"], "error: --adapters = '/nowhere': no such folder"),
        (["--max_prompt=2000"], "error: --max_prompt = 2000 and --max_tokens = 512: together"),
        (["--max_tokens=1024"], "error: --max_tokens = 1024: must leave room for a prompt in the"),
        (["--max_queued=0"], "error: flag --max_queued=0"),
    ],
)
def test_mistakes_are_one_line(arguments, line):
    ended = subprocess.run(
        command("--port=0", *arguments), capture_output=True, text=True, env=environment()
    )
    assert ended.returncode == 2 and ended.stderr.startswith(line), ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.slow
def test_address_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ended = subprocess.run(
            command(f"--port={port}"), capture_output=True, text=True, env=environment()
        )
    assert ended.returncode == 2
    assert ended.stderr == f"error: --host = '127.0.0.1', --port = {port}: address already in use\n"
