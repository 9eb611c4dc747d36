"""Tests of evaluations of a model at an endpoint, with a local server in the place of the model."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import subprocess
import sys
import threading
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spell_jax.evaluation import answering, endpoint_respondent, runner
from spell_jax.evaluation.answering import EvaluationSampling
from spell_jax.evaluation.endpoint_respondent import Traffic
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy.model import TINY_POLICY
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime import fault_injection
from spell_jax.runtime.endpoint import ChatRequest, Endpoint, EndpointConfig
from tests import evaluating
from tests.rollout.test_judge import Answer, Server, completion, server

__all__ = ["server"]  # the fixture

WORDS = tokenizers.load(TINY_POLICY)
FILES = (runner.SAMPLES, runner.SUMMARY, runner.TABLE)
QUESTIONS = [f"{name}-{i}" for name in ("number", "text") for i in range(evaluating.ITEMS)]
ALL = len(QUESTIONS) * evaluating.SAMPLES
# The last request is the one that a reply belongs to.
ONE_WORKER = Traffic(1, attempts=1)


@pytest.fixture(autouse=True)
def _synthetic(monkeypatch) -> None:
    monkeypatch.setattr(runner.registry, "load", evaluating.load)
    monkeypatch.setattr(fault_injection, "_passed", collections.Counter())
    monkeypatch.delenv(fault_injection.VARIABLE, raising=False)


def say(prompt: str, sample: int) -> str:
    """Write a model's reply to a prompt, different for each sample."""
    return f"The answer is {zlib.crc32(prompt.encode()) % 97} {'ab'[sample % 2]}"


def reply(server: Server) -> Answer:
    """Answer the last request by its seed, so that the order of requests does not matter."""
    body, _ = server.requests[-1]
    return completion(say(body["messages"][0]["content"], body["seed"]))


def evaluate(
    server: Server,
    out: pathlib.Path,
    sampling=None,
    traffic: Traffic = ONE_WORKER,
    **changes: Any,
) -> dict[str, Any]:
    fields = {"policy": "", "benchmarks": ("number", "text"), "data": "x", "max_input": (0,)}
    fields |= {"endpoint": server.url, "model": "m"} | changes
    sampling = sampling or EvaluationSampling(evaluating.SAMPLES, 0.7, 0.95)
    config = runner.EvaluationConfig(**fields, sampling=sampling)
    return runner.evaluate(config, out, "m", traffic=traffic)


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_requests_have_the_local_prompts_and_the_sampling_options(server, tmp_path, monkeypatch):
    monkeypatch.setenv(endpoint_respondent.ENDPOINT_KEY, "a-key")
    server.respond = lambda *_: reply(server)
    evaluate(server, tmp_path / "out")
    bodies = [body for body, _ in server.requests]
    assert {key for _, key in server.requests} == {"Bearer a-key"} and len(bodies) == ALL
    prompts = [item.prompt for n in ("number", "text") for item in evaluating.load(n, "").items]
    sent = [body["messages"] for body in bodies]
    assert sent == [[{"role": "user", "content": p}] for p in prompts for _ in range(2)]
    assert {(b["model"], b["temperature"], b["top_p"]) for b in bodies} == {("m", 0.7, 0.95)}
    assert [body["max_tokens"] for body in bodies] == [4] * (ALL // 2) + [5] * (ALL // 2)
    seeds = [body["seed"] for body in bodies]
    assert len(set(seeds)) == ALL and all(0 <= seed < 2**31 for seed in seeds)
    server.requests.clear()
    evaluate(server, tmp_path / "other", EvaluationSampling(evaluating.SAMPLES, 0.7, 0.95, seed=1))
    assert not {body["seed"] for body, _ in server.requests} & set(seeds)
    assert "a-key" not in "".join(p.read_text() for p in tmp_path.rglob("*.json*"))


class Scripted(TextModel):
    """Policy that says what the server says."""

    def __init__(self) -> None:
        self.config: Any = SimpleNamespace(max_positions=10**6)
        self.tokenizer: Any = SimpleNamespace(
            chat=WORDS.chat, open_thought=lambda prompt: "", decode=lambda text: text
        )

    def sample(self, prompts, group, keys, options, prompt_indices):
        texts = [item.prompt for n in ("number", "text") for item in evaluating.load(n, "").items]
        for i in prompt_indices:
            yield (
                i,
                [
                    SimpleNamespace(tokens=[1], content=say(texts[i], number), stopped=True)
                    for number in range(group)
                ],
            )


def test_scores_equal_the_local_protocols(server, tmp_path):
    server.respond = lambda *_: reply(server)
    summary = evaluate(server, tmp_path)
    benchmarks = [evaluating.load(name, "") for name in ("number", "text")]
    questions = answering.tokenize(Scripted().encode, benchmarks, 10**6)
    sampling = EvaluationSampling(evaluating.SAMPLES)
    local: dict[Any, list[Any]] = dict(
        answering.sample_answers(sampling, Scripted(), questions, 0, set())  # type: ignore[arg-type]
    )
    answered = [(q, row) for q in questions for row in local[q.key(0)]]
    answering.score(answered)

    # A local sample is known by its number, a sample here by its seed.
    def scores(rows):
        keyed = [(r["id"], r["text"], r["rule"], r["prediction"], r["final"]) for r in rows]
        return sorted(keyed)

    rows = read(tmp_path / runner.SAMPLES)
    assert scores(rows) == scores(row for _, row in answered)
    assert set(rows[0]) == set(answered[0][1])
    (row,) = summary["rows"]
    for name in ("number", "text"):
        finals = [r["final"] for _, r in answered if r["benchmark"] == name]
        assert row["benchmarks"][name]["pass@1"]["mean"] == pytest.approx(np.mean(finals))
    assert "left_out" not in row and not (tmp_path / runner.LEFT_OUT).exists()
    assert "| uncut | m |" in (tmp_path / runner.TABLE).read_text()


def test_a_prompt_over_the_limit_loses_its_middle(server, tmp_path):
    server.respond = lambda *_: completion("The answer is 5")
    evaluate(server, tmp_path, max_input=(24, 40), tokenizer=str(TINY_POLICY))
    rows = read(tmp_path / runner.SAMPLES)
    layout = len(WORDS.chat("a")) - len(WORDS.encode("a"))
    items = [item for n in ("number", "text") for item in evaluating.load(n, "").items]
    expected = []
    for limit in (24, 40):
        for item in items:
            ids = WORDS.encode(item.prompt)
            room = limit - layout
            if len(ids) > room:
                ids = [*ids[: room // 2], *ids[len(ids) - (room - room // 2) :]]
            expected += [WORDS.decode(ids)] * 2
    assert [body["messages"][0]["content"] for body, _ in server.requests] == expected
    cut = [len(WORDS.chat(item.prompt)) > limit for limit in (24, 40) for item in items]
    assert [row["truncated"] for row in rows[::2]] == cut and {True, False} == set(cut)
    lengths = [min(len(WORDS.chat(item.prompt)), limit) for limit in (24, 40) for item in items]
    assert [row["tokens_in"] for row in rows[::2]] == lengths
    assert {row["tokens_out"] for row in rows} == {WORDS.count("The answer is 5")}
    with pytest.raises(ValueError, match=f"max_input = {layout}: must leave room"):
        evaluate(server, tmp_path / "x", max_input=(layout,), tokenizer=str(TINY_POLICY))


def test_counts_of_the_server_and_replies_at_the_limit_are_kept(server, tmp_path):
    choice = {"message": {"content": "The answer is 5"}, "finish_reason": "length"}
    usage = {"prompt_tokens": 21, "completion_tokens": 4}
    server.respond = lambda *_: (200, json.dumps({"choices": [choice], "usage": usage}))
    summary = evaluate(server, tmp_path)
    row = read(tmp_path / runner.SAMPLES)[0]
    assert (row["text"], row["stopped"]) == ("The answer is 5", False)  # a cut text is scored
    assert (row["tokens_in"], row["tokens_out"], row["truncated"]) == (21, 4, False)
    numbers = summary["rows"][0]["benchmarks"]["text"]
    assert (numbers["tokens_in"], numbers["answers_truncated"]) == (21, 1.0)


def test_questions_without_a_reply_are_left_out_counted_and_asked_again(server, tmp_path, caplog):
    first = evaluating.load("text", "").items[0].prompt

    def respond(prompt: str, times: int) -> Answer:
        return (500, "") if prompt == first and times == 2 else reply(server)

    server.respond = respond
    summary = evaluate(server, tmp_path)
    (row,) = summary["rows"]
    assert row["left_out"] == {"text": 1} and row["benchmarks"]["text"]["questions"] == 2
    left_out = {"max_input": 0, "benchmark": "text", "id": "text-0"}
    assert read(tmp_path / runner.LEFT_OUT) == [left_out]
    assert len(read(tmp_path / runner.SAMPLES)) == ALL - 2
    assert len(read(tmp_path / endpoint_respondent.REPLIES)) == ALL - 1
    assert "1 questions lack a reply and are left out of the means" in caplog.text
    table = (tmp_path / runner.TABLE).read_text()
    assert "† m, uncut: no reply to 1 questions of TEXT, which the means leave out." in table
    line = table.splitlines()[4]
    assert [("†" in cell) for cell in line.split("|")[3:6]] == [False, True, True]
    server.requests.clear()
    server.respond = lambda *_: reply(server)
    (row,) = evaluate(server, tmp_path)["rows"]
    assert len(server.requests) == 1  # the sample without a reply, and no other
    assert "left_out" not in row and not (tmp_path / runner.LEFT_OUT).exists()
    evaluate(server, tmp_path / "whole")
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_benchmark_without_any_reply_has_an_empty_column(server, tmp_path):
    refused = {item.prompt for item in evaluating.load("text", "").items}
    too_long = 400, '{"message": "too long"}'
    server.respond = lambda prompt, _: too_long if prompt in refused else reply(server)
    (row,) = evaluate(server, tmp_path)["rows"]
    assert row["left_out"] == {"text": evaluating.ITEMS} and row["columns"]["text"] == {}
    assert row["benchmarks"]["number"]["pass@1"]["mean"] >= 0 and row["average"] == {}
    cells = (tmp_path / runner.TABLE).read_text().splitlines()[4].split("|")[3:6]
    assert [cell.strip() for cell in cells[1:]] == ["†", "†"] and cells[0].strip()[0].isdecimal()


def test_a_killed_evaluation_sends_only_what_lacks_a_reply(server, tmp_path, monkeypatch):
    server.respond = lambda *_: reply(server)
    evaluate(server, tmp_path / "whole")
    out = tmp_path / "out"
    monkeypatch.setenv(fault_injection.VARIABLE, "sampled:2:raise")
    with pytest.raises(fault_injection.Fault):
        evaluate(server, out)
    monkeypatch.delenv(fault_injection.VARIABLE)
    reply_count = len(read(out / endpoint_respondent.REPLIES))
    assert 4 <= reply_count < ALL and not (out / runner.SUMMARY).exists()
    # The kill came between a reply and the samples of its question, inside of a line.
    lines = (out / runner.SAMPLES).read_text().splitlines(keepends=True)
    (out / runner.SAMPLES).write_text("".join(lines[:-1]))
    with (out / endpoint_respondent.REPLIES).open("a") as file:
        file.write('{"max_input": 0, "ben')
    server.requests.clear()
    evaluate(server, out)
    assert len(server.requests) == ALL - reply_count
    for name in FILES:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    with pytest.raises(ValueError, match=r"model = 'n': was 'm' .* another --out"):
        evaluate(server, out, model="n")


def test_an_evaluation_without_any_reply_ends_with_the_servers_words(server, tmp_path):
    server.respond = lambda *_: (404, '{"message": "no such model"}')
    message = r"no reply of 'm' to the first 12 requests \(404 no such model\); check the model's"
    with pytest.raises(ValueError, match=f"^endpoint = '{server.url}': {message}"):
        evaluate(server, tmp_path)
    assert not (tmp_path / runner.SUMMARY).exists()
    server.requests.clear()
    with pytest.raises(ValueError, match="to the first 16 requests"):
        evaluate(server, tmp_path / "more", EvaluationSampling(8))
    assert len(server.requests) <= 18  # not all 48


def test_a_server_that_hangs_ends_the_evaluation_after_the_first_timeout(
    server, tmp_path, monkeypatch
):
    monkeypatch.setattr(endpoint_respondent, "_FIRST_SECONDS", 1.0)
    released = threading.Event()

    def hang(*_: object) -> Answer:
        released.wait(10)
        return 500, ""

    server.respond = hang
    with pytest.raises(ValueError, match=r"to the first 3 requests \(APITimeoutError: "):
        evaluate(server, tmp_path, traffic=Traffic(3, attempts=8))
    released.set()
    assert len(server.requests) == 3  # no second attempt, and no further request


def test_a_busy_server_is_asked_again_for_its_first_reply(server, tmp_path):
    refused = 429, "", {"Retry-After": "0"}
    server.respond = lambda _, times: refused if times == 1 else reply(server)
    evaluate(server, tmp_path, traffic=Traffic(1, attempts=2), benchmarks=("number",))
    assert len(read(tmp_path / runner.SAMPLES)) == ALL // 2


def test_fields_that_an_endpoint_refuses_are_left_out(server, caplog):
    def respond(*_: object) -> Answer:
        body, _ = server.requests[-1]
        if "seed" in body:
            return 400, '{"message": "Unknown parameter: seed"}'
        if "max_tokens" in body:
            return 400, '{"message": "use max_completion_tokens"}'
        return completion("yes")

    server.respond = respond
    endpoint = Endpoint(EndpointConfig(server.url, "m", workers=1, key_name="A_KEY"))
    requests = [ChatRequest("a", 9, 1), ChatRequest("b", 7, 2)]
    assert [r and r.text for _, r in sorted(endpoint.chat(requests))] == ["yes", "yes"]
    assert len(server.requests) == 4 and server.requests[-1][0]["max_completion_tokens"] == 7
    assert caplog.text.count("takes no seed, so replies cannot repeat") == 1


def test_a_reply_that_a_filter_withheld_is_a_failure(server):
    choice = {"message": {"content": ""}, "finish_reason": "content_filter"}
    server.respond = lambda *_: (200, json.dumps({"choices": [choice]}))
    endpoint = Endpoint(EndpointConfig(server.url, "m", key_name="A_KEY"))
    assert dict(endpoint.chat([ChatRequest("a")])) == {0: None}
    assert endpoint.failures == {"FilteredError": 1} and len(server.requests) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"endpoint": "ftp://host"}, r"endpoint's url = 'ftp://host': must start with http"),
        ({"max_input": (16_384,)}, r"max_input = \(16384,\): needs --tokenizer=FOLDER"),
        ({"max_input": (0,), "tokenizer": str(TINY_POLICY)}, "must be at least 1"),
    ],
)
def test_mistakes_are_named_before_anything_is_sent(server, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        evaluate(server, tmp_path, **changes)
    assert not server.requests


@pytest.mark.slow
def test_command_line_ends_mistakes_with_one_line(server, tmp_path):
    server.respond = lambda *_: completion("The answer is 5")
    (tmp_path / "test.jsonl").write_text('{"question": "2 + 3?", "answer": "#### 5"}\n' * 2)
    common = [f"--data={tmp_path}", "--benchmarks=gsm8k", "--limit=2", "--samples=2"]

    def run(*flags: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "spell_jax.evaluate", *common, *flags]
        process = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
        return process.returncode, process.stdout, process.stderr

    out = f"--out={tmp_path / 'out'}"
    status, _, errors = run(out, "--endpoint=host/v1", "--model=m")
    assert status == 2 and "error: endpoint's url = 'host/v1'" in errors
    status, _, errors = run(out, f"--endpoint={server.url}")
    assert status == 2 and "error: --endpoint and --model go together" in errors
    status, _, errors = run(out, f"--endpoint={server.url}", "--model=m", "--max_input=16384")
    assert status == 2 and "needs --tokenizer=FOLDER" in errors and "Traceback" not in errors
    status, table, errors = run(out, f"--endpoint={server.url}", "--model=m")
    assert status == 0, errors
    assert "| uncut | m | 100.0" in table and len(server.requests) == 4
