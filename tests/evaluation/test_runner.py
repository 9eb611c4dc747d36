"""Tests of evaluations: requests, files, resumption, several hosts."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from absl import app

from spell_jax.evaluation import protocol, runner
from spell_jax.evaluation.answering import EvaluationSampling
from spell_jax.policy import tokenizer as tokenizers
from spell_jax.policy import weights
from spell_jax.rollout import judge as judging
from spell_jax.rollout import text_model
from spell_jax.rollout.repliers import PolicyReplier
from spell_jax.rollout.text_model import TextModel
from spell_jax.runtime import fault_injection
from spell_jax.sampler.requests import Options
from spell_jax.sampler.session import Session
from tests import evaluating, noise

FILES = (runner.SAMPLES, runner.SUMMARY, runner.TABLE, "plots/text.png")
QUESTIONS = len(evaluating.LIMITS) * 2 * evaluating.ITEMS


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> pathlib.Path:
    return noise.save_policy(tmp_path_factory.mktemp("policy") / "noise")


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> pathlib.Path:
    """Save a noise policy with room for a judge's prompt."""
    return noise.save_policy(tmp_path_factory.mktemp("judge") / "noise", max_positions=1024)


def use_synthetic_benchmarks(monkeypatch) -> list:
    """Use synthetic benchmarks on one device; return the requests that the sampler gets."""
    requests, submit = [], Session.submit

    def record(self, request):
        requests.append(request)
        return submit(self, request)

    noise.use_one_device(monkeypatch)
    monkeypatch.setattr(runner.registry, "load", evaluating.load)
    monkeypatch.setattr(Session, "submit", record)
    monkeypatch.setattr(fault_injection, "_passed", collections.Counter())
    monkeypatch.delenv(fault_injection.VARIABLE, raising=False)
    return requests


@pytest.fixture(autouse=True)
def sampler_requests(monkeypatch) -> list:
    return use_synthetic_benchmarks(monkeypatch)


@pytest.fixture(scope="module")
def uninterrupted(policy, tmp_path_factory) -> tuple[pathlib.Path, list]:
    """Run an uninterrupted evaluation; return the folder and the requests to the sampler."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        requests = use_synthetic_benchmarks(monkeypatch)
        evaluating.run(policy, out)
    return out, requests


@pytest.fixture
def uninterrupted_out(uninterrupted) -> pathlib.Path:
    return uninterrupted[0]


def read(out: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (out / runner.SAMPLES).read_text().splitlines()]


def assert_same(out: pathlib.Path, expected_out: pathlib.Path) -> None:
    for name in FILES:
        assert (out / name).read_bytes() == (expected_out / name).read_bytes(), name


def test_every_sample_has_a_row_and_its_score(uninterrupted_out):
    rows = read(uninterrupted_out)
    expected_keys = [
        (limit, name, f"{name}-{i}", sample)
        for limit in evaluating.LIMITS
        for name in ("number", "text")
        for i in range(evaluating.ITEMS)
        for sample in range(evaluating.SAMPLES)
    ]
    keys = [(r["max_input"], r["benchmark"], r["id"], r["sample"]) for r in rows]
    assert keys == expected_keys
    kinds = collections.Counter(str(row["judge"]) for row in rows)
    assert {"1", "0", "malformed", "unanswered"} & set(kinds) and kinds["None"]
    for row in rows:
        item = next(i for i in evaluating.load("text", "").items if i.id[-1] == row["id"][-1])
        benchmark = evaluating.load(row["benchmark"], "")
        assert row["rule"] == benchmark.score(row["text"], item)
        assert row["prediction"] == benchmark.extract(row["text"], item)
        may_ask = row["benchmark"] == "text" and row["rule"] < 1 and row["prediction"]
        assert (row["judge"] is not None) == bool(may_ask)
        assert row["final"] == max(row["rule"], float(row["judge"] == 1))
        assert 1 <= row["tokens_out"] <= benchmark.max_tokens
    assert len({row["text"] for row in rows}) > len(rows) / 2  # samples of a question differ


def test_summary_breaks_down_scores_by_a_field(uninterrupted_out):
    rows = read(uninterrupted_out)
    assert {str(row.get("by")) for row in rows if row["benchmark"] == "number"} == {"None"}
    summary = json.loads((uninterrupted_out / runner.SUMMARY).read_text())
    for summary_row in summary["rows"]:
        assert "by" not in summary_row["benchmarks"]["number"]
        parts = summary_row["benchmarks"]["text"]["by"]
        assert [(part["parity"], part["questions"]) for part in parts] == [("even", 2), ("odd", 1)]
        for part in parts:
            finals = [
                row["final"]
                for row in rows
                if row["max_input"] == summary_row["max_input"]
                and row.get("by") == {"parity": part["parity"]}
            ]
            assert part["pass@1"]["mean"] == pytest.approx(sum(finals) / len(finals))
            assert part["pass@1"]["low"] <= part["pass@1"]["mean"] <= part["pass@1"]["high"]
            assert part["pass@2"]["mean"] >= part["pass@1"]["mean"]
    assert [path.name for path in (uninterrupted_out / runner.PLOTS).iterdir()] == ["text.png"]
    assert (uninterrupted_out / "plots" / "text.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_are_truncated_in_the_middle(policy, uninterrupted):
    out, requests = uninterrupted
    tokenizer = tokenizers.load(policy)
    names = [(limit, name) for limit in evaluating.LIMITS for name in ("number", "text")]
    places = [
        (*limit_and_name, item)
        for limit_and_name in names
        for item in evaluating.load(limit_and_name[1], "").items
    ]
    rows = {(row["max_input"], row["id"]): row for row in read(out)}
    for (limit, _, item), request in zip(places, requests, strict=True):
        ids = np.array(tokenizer.chat(item.prompt))
        assert np.array_equal(request.prompt, protocol.truncate(ids, limit))
        row = rows[limit, item.id]
        assert row["truncated"] == (len(ids) > limit)
        assert row["tokens_in"] == min(len(ids), limit)
    assert len({tuple(request.key) for request in requests}) == len(requests) == QUESTIONS
    assert {request.group for request in requests} == {evaluating.SAMPLES}


@pytest.mark.slow
def test_samples_depend_only_on_their_question(policy, uninterrupted_out, tmp_path):
    """Samples depend neither on the other questions nor on their order (except for the shape)."""
    evaluating.run(policy, tmp_path / "out", benchmarks=("text", "number"), max_input=(40, 24))

    def by_place(out: pathlib.Path) -> dict:
        return {(r["max_input"], r["id"], r["sample"]): r["text"] for r in read(out)}

    assert by_place(tmp_path / "out") == by_place(uninterrupted_out)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["sampled:8", "judged:1"])
def test_interrupted_evaluation_resumes_bit_identically(
    fault, policy, uninterrupted_out, sampler_requests, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    monkeypatch.setenv(fault_injection.VARIABLE, f"{fault}:raise")
    with pytest.raises(fault_injection.Fault):
        evaluating.run(policy, out)
    monkeypatch.delenv(fault_injection.VARIABLE)
    assert not (out / runner.SUMMARY).exists()
    lines = (out / runner.SAMPLES).read_text().splitlines(keepends=True)
    finished_count = QUESTIONS if fault.startswith("judged") else int(fault[-1])
    assert len(lines) == finished_count * evaluating.SAMPLES
    # The last question lacks a sample, and the last line is incomplete.
    (out / runner.SAMPLES).write_text("".join(lines[:-1]) + '{"max_input": 2')
    sampler_requests.clear()
    evaluating.run(policy, out)
    assert len(sampler_requests) == QUESTIONS - finished_count + 1
    assert_same(out, uninterrupted_out)
    sampler_requests.clear()
    evaluating.run(policy, out)  # nothing is left to do
    assert not sampler_requests
    assert_same(out, uninterrupted_out)


def test_corrected_rule_rescores_existing_samples(
    policy, uninterrupted_out, sampler_requests, tmp_path, monkeypatch
):
    out = shutil.copytree(uninterrupted_out, tmp_path / "out")
    correct = evaluating.load

    def load(name, folder, limit, *_):
        return dataclasses.replace(correct(name, folder, limit), score=lambda text, item: 1.0)

    monkeypatch.setattr(runner.registry, "load", load)
    summary = evaluating.run(policy, out)
    assert not sampler_requests
    assert summary["rows"][0]["average"]["pass@1"]["mean"] == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("limit", 1),
        ("max_input", (24,)),
        ("sampling", EvaluationSampling(3)),
        ("benchmarks", ("text",)),
    ],
)
def test_changed_settings_require_another_folder(field, value, policy, uninterrupted_out):
    with pytest.raises(ValueError, match=f"{field} = .*: was .*or another --out"):
        evaluating.run(policy, uninterrupted_out, **{field: value})


def test_changed_weights_require_another_folder(policy, uninterrupted_out, tmp_path, monkeypatch):
    """The new weights are at the same path, as after more training."""
    changed_policy = noise.save_policy(tmp_path / "noise")
    before = TextModel(changed_policy).fingerprint()
    config, params = weights.load(changed_policy)
    params["final_norm"]["scale"] = params["final_norm"]["scale"] * 1.01
    weights.save(changed_policy, config, params, tokenizers.load(changed_policy))
    after = TextModel(changed_policy).fingerprint()
    assert after != before == TextModel(policy).fingerprint()
    monkeypatch.setattr(TextModel, "fingerprint", lambda self: after)
    with pytest.raises(ValueError, match="weights = "):
        evaluating.run(policy, uninterrupted_out)


def test_changed_questions_require_another_folder(policy, uninterrupted_out, monkeypatch):
    """The questions keep their ids, as in a folder of replaced files."""

    def load(*arguments):
        benchmark = evaluating.load(*arguments)
        items = [dataclasses.replace(item, prompt=item.prompt + "!") for item in benchmark.items]
        return dataclasses.replace(benchmark, items=tuple(items))

    monkeypatch.setattr(runner.registry, "load", load)
    with pytest.raises(ValueError, match=r"questions = .*or another --out"):
        evaluating.run(policy, uninterrupted_out)


@pytest.mark.slow
def test_policy_judge_counts_malformed_verdicts_and_resumes(
    policy, judge, sampler_requests, tmp_path, monkeypatch
):
    """Noise gives no verdict: replies are malformed, counted, kept, and not asked for again."""
    noise.finish_replies(monkeypatch)

    def evaluated(out):
        ask = PolicyReplier(TextModel(judge, sizes=evaluating.SIZES), 4)
        return evaluating.run(
            policy, out, ask, max_input=(24,), sampling=EvaluationSampling(8, 1.0, 1.0)
        )

    out = tmp_path / "out"
    summary = evaluated(tmp_path / "whole")
    rows, text_metrics = read(tmp_path / "whole"), summary["rows"][0]["benchmarks"]["text"]
    judged = [row for row in rows if row["judge"] is not None]
    assert text_metrics["judged"] == text_metrics["malformed"] == len(judged) > 2
    assert all(row["judge"] == "malformed" and row["final"] == row["rule"] for row in judged)
    reply_lines = (tmp_path / "whole" / judging.REPLIES).read_text().splitlines()
    assert 2 < len(reply_lines) <= len(judged)
    greedy = [request for request in sampler_requests if request.group == 1]
    assert len(greedy) == len(reply_lines)
    assert {(r.options.temperature, r.options.max_tokens) for r in greedy} == {(0.0, 4)}

    monkeypatch.setenv(fault_injection.VARIABLE, "judged:2:raise")
    monkeypatch.setattr(fault_injection, "_passed", collections.Counter())
    with pytest.raises(fault_injection.Fault):
        evaluated(out)
    monkeypatch.delenv(fault_injection.VARIABLE)
    assert len((out / judging.REPLIES).read_text().splitlines()) == 2
    sampler_requests.clear()
    evaluated(out)
    assert len(sampler_requests) == len(reply_lines) - 2
    assert_same(out, tmp_path / "whole")


@pytest.mark.slow
def test_policy_judge_checks_its_context_and_skips_long_prompts(policy):
    for cap in (0, 256):
        with pytest.raises(ValueError, match=f"judge_max_tokens = {cap}: .* = 256"):
            PolicyReplier(TextModel(policy), cap)
    judge = PolicyReplier(TextModel(policy, sizes=evaluating.SIZES), 4)
    chat = judge.model.tokenizer.chat
    longest = max((" a" * n for n in range(256) if len(chat(" a" * n)) <= 252), key=len)
    prompts = [longest + " a", "too long " * 200, longest]
    assert len(chat(longest)) <= 252 < len(chat(prompts[0])) <= 256
    replies = dict(judge(prompts))
    assert replies[0] is replies[1] is None and isinstance(replies[2], str)
    assert judge.model._params is None  # the next policy has the memory to itself


@pytest.mark.slow
def test_evaluation_without_judge_is_compared_with_another(
    policy, uninterrupted_out, tmp_path, caplog
):
    """Only the rule scores; the table has the rows of both evaluations."""
    changed = evaluating.config(policy, max_input=(24,), answer_format="sections")
    sizes, columns = evaluating.SIZES, {"Both": ("number", "text")}
    summary = runner.evaluate(
        changed, tmp_path, "second", None, sizes, [uninterrupted_out], columns
    )
    assert list(summary["rows"][0]["columns"]) == ["Both"]
    hashes = [
        json.loads((out / "config.json").read_text())["questions"]
        for out in (tmp_path, uninterrupted_out)
    ]
    assert hashes[0]["text"] != hashes[1]["text"]  # the format is part of the prompts
    assert summary["judge"] is None and "by the rule alone" in caplog.text
    assert all(row["judge"] is None and row["final"] == row["rule"] for row in read(tmp_path))
    rows = [line.split("|")[1:3] for line in (tmp_path / "table.md").read_text().splitlines()[4:7]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["24", "second"],
        ["24", "noise"],
        ["40", "noise"],
    ]
    with pytest.raises(FileNotFoundError):
        runner.evaluate(changed, tmp_path / "x", "third", None, sizes, compare=[tmp_path / "no"])
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"benchmarks": ()}, "benchmarks = "),
        ({"benchmarks": ("text", "text")}, "benchmarks = "),
        ({"max_input": (0,)}, "max_input = "),
        ({"limit": -1}, "limit = -1"),
        ({"answer_format": "essay"}, "answer_format = 'essay'"),
    ],
)
def test_error_names_invalid_setting(changes, message, policy):
    with pytest.raises(ValueError, match=message):
        evaluating.config(policy, **changes)
    for field, value in (("samples", 0), ("max_tokens", -1), ("temperature", -1.0), ("top_p", 0.0)):
        with pytest.raises(ValueError, match=field):
            EvaluationSampling(**{field: value})


def test_too_short_context_is_rejected_before_sampling(policy, sampler_requests, tmp_path):
    """The error comes before any sampling, though the first limit would fit."""
    with pytest.raises(ValueError, match=r"have 260 tokens .* = 256"):
        evaluating.run(policy, tmp_path, sampling=EvaluationSampling(1, max_tokens=220))
    assert evaluating.LIMITS == (24, 40) and not sampler_requests


def test_sampler_shapes_depend_on_all_prompts(policy, monkeypatch):
    """The sampler's sizes do not depend on which questions are wanted.

    So a resumed evaluation samples like an uninterrupted one.
    """
    configs = []

    def stop(config, sampler, *arguments):
        configs.append(sampler)
        raise InterruptedError

    monkeypatch.setattr(text_model, "Sampler", stop)
    prompts = [np.zeros(length, np.int32) for length in (9, 20, 30)]
    options = [Options(max_tokens=cap) for cap in (2, 7, 4)]
    model, keys = TextModel(policy, sizes=evaluating.SIZES), np.zeros((3, 2), np.uint32)
    for indices in (None, [0], [2, 1]):
        with pytest.raises(InterruptedError):
            next(model.sample(prompts, 2, keys, options, indices))
    assert configs == [configs[0]] * 3
    assert (configs[0].max_prompt, configs[0].max_tokens, configs[0].slots) == (30, 7, 6)


# ----------------------------------------------------------------------------------------- Programs


def start(processes: int, *arguments: object, **environment: str) -> list[int]:
    """Run an evaluation on two devices in `processes` processes; return the exit codes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={2 // processes}"
    common = os.environ | {"XLA_FLAGS": flags} | environment
    if processes > 1:
        common |= {"SPELL_COORDINATOR": f"localhost:{port}", "SPELL_PROCESSES": str(processes)}
    command = [sys.executable, "-m", "tests.evaluating", *map(str, arguments)]
    running = [
        subprocess.Popen(command, env=common | ({"SPELL_PROCESS": str(i)} if processes > 1 else {}))
        for i in range(processes)
    ]
    try:
        return [process.wait(600) for process in running]
    finally:
        for process in running:
            process.kill()


@pytest.mark.slow
def test_killed_evaluation_resumes_as_two_processes(policy, judge, tmp_path):
    """A policy is the judge. The result equals the result of one uninterrupted process."""
    assert start(1, policy, tmp_path / "one", judge) == [0]
    killed = start(1, policy, tmp_path / "out", judge, SPELL_FAULT="sampled:4")
    assert killed == [-signal.SIGKILL]
    assert len(read(tmp_path / "out")) == 4 * evaluating.SAMPLES
    assert start(2, policy, tmp_path / "out", judge) == [0, 0]
    assert_same(tmp_path / "out", tmp_path / "one")
    assert any(row["judge"] == "malformed" for row in read(tmp_path / "one"))


@pytest.mark.slow
def test_command_line_evaluates_generated_benchmarks(tmp_path):
    """RULER, a grid of needles and a run's own questions, with a noise policy."""
    policy = noise.save_policy(tmp_path / "noise", max_positions=1200)
    data, out = tmp_path / "data", tmp_path / "out"
    (data / "needle").mkdir(parents=True)
    (data / "needle" / "a.txt").write_text("Rain fell on the town. Nobody went out.\n" * 40)
    episode = {"task": "general_qa", "cluster": "a", "status": "accepted", "question": "Who?"}
    episode |= {"reference": "Ann", "documents": ["An came.", "Bob went."]}
    evaluating.write_episodes(data / "own_questions", {1: [episode], 2: [episode]})
    command = [sys.executable, "-m", "spell_jax.evaluate", f"--policy={policy}", f"--data={data}"]
    command += [f"--out={out}", "--benchmarks=ruler_vt_1024,needle_600,own_questions"]
    command += ["--max_input=1024", "--samples=2", "--limit=12", "--max_tokens=8"]
    command += ["--kv_cache_tokens=4096", "--slots=16", "--prefill_tokens=2048"]
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert process.returncode == 0, process.stderr[-3000:]
    (row,) = json.loads((out / runner.SUMMARY).read_text())["rows"]
    names = ["ruler_vt_1024", "needle_600", "own_questions"]
    assert list(row["benchmarks"]) == names and "needle in a haystack" in process.stdout
    vt, needle, own_questions = (row["benchmarks"][name] for name in names)
    assert vt["questions"] == needle["questions"] == 12 and own_questions["questions"] == 2
    for metrics in (vt, needle):  # lengths include the chat template: nothing is truncated
        assert metrics["truncated"] == 0 and metrics["rule"] == 0 and metrics["tokens_out"] <= 8
    assert 0.95 * (1024 - 128) <= vt["tokens_in"] <= 1024 - 128  # the benchmark's own answer fits
    cells = [(part["length"], part["depth"], part["questions"]) for part in needle["by"]]
    assert cells == [(600, i / 10, 2 if i == 0 else 1) for i in range(11)]
    assert [(part["step"], part["questions"]) for part in own_questions["by"]] == [(1, 1), (2, 1)]
    pictures = sorted(path.name for path in (out / "plots").iterdir())
    assert pictures == ["needle_600.png", "own_questions.png"]


def test_error_names_wrong_command_line_flags(tmp_path):
    flag_values = {"policy": None, "workdir": None, "max_input": ["16384"], "thinking": ""}
    flag_values |= {"endpoint": "", "model": "", "tokenizer": "", "rope_scaling": ""}
    flag_values |= {
        "rule": "match_or_judge",
        "judge_url": "",
        "judge_model": "",
        "judge_policy": "",
    }
    api = {"endpoint": "http://host/v1", "model": "m"}
    for changes, message in (
        ({}, "--workdir or --policy"),
        ({"policy": "p", "workdir": "w"}, "--workdir or --policy"),
        ({"policy": "p", "max_input": ["16K"]}, "--max_input"),
        ({"endpoint": "http://host/v1"}, "--endpoint and --model go together"),
        ({"policy": "p", "model": "m"}, "--endpoint and --model go together"),
        (api | {"policy": "p"}, "--policy: has no effect with --endpoint"),
        (api | {"thinking": "on"}, "--thinking: has no effect with --endpoint"),
        ({"policy": "p", "tokenizer": "t"}, "--tokenizer: has no effect without --endpoint"),
        ({"policy": "p", "rule": "judge"}, "--rule=judge: --judge_url and --judge_model, or"),
    ):
        with pytest.raises(app.UsageError, match=message):
            runner.from_flags(SimpleNamespace(**flag_values | changes))
    endpoint = {"judge_url": "http://x", "judge_model": "", "judge_policy": ""}
    for changes in ({}, {"judge_model": "m", "judge_policy": "p"}):
        with pytest.raises(app.UsageError, match="--judge_url and --judge_model"):
            judging.judge_of_flags(
                SimpleNamespace(**endpoint | changes), tmp_path, evaluating.SIZES
            )
    no_judge = SimpleNamespace(**endpoint | {"judge_url": ""})
    assert judging.judge_of_flags(no_judge, tmp_path, evaluating.SIZES) is None
