"""Tests of judgments of answers on disk, with a scripted judge at a local address."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from absl import app

from spell_jax.evaluation import judgments, runner
from spell_jax.evaluation.benchmarks.base import Benchmark, BenchmarkItem
from spell_jax.rollout import flags as policy_flags
from spell_jax.rollout import judge as judging
from spell_jax.runtime.files.jsonl import write_records
from tests import evaluating
from tests.rollout.test_judge import Server, completion, server

__all__ = ["server"]  # the fixture

DOWN = 400, "no such model"


def make_flags(url: str, judgment: str, answers: Path, **changes: Any) -> SimpleNamespace:
    values = {"judgment": judgment, "answers": str(answers), "judge_template": "grades"}
    values |= {"judge_url": url, "judge_model": "m", "judge_policy": "", "max_input": None}
    values |= {"judge_max_tokens": 9, "judge_workers": 2, "judge_rate": 0.0}
    return SimpleNamespace(**values | changes)


def judge(
    server: Server,
    replies: Mapping[str, Any],
    flag_values: SimpleNamespace,
    out: Path,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return result and judged lines; a prompt gets the reply of the word that it contains."""

    def respond(prompt: str, _: int) -> Any:
        reply = next(reply for word, reply in replies.items() if word in prompt)
        return completion(reply) if isinstance(reply, str) else reply

    server.respond = respond
    result = judgments.judge_answers(flag_values, out, evaluating.SIZES)
    assert result == json.loads((out / judgments.RESULT).read_text())
    lines = (out / judgments.JUDGED).read_text().splitlines()
    return result, [json.loads(line) for line in lines]


def tree_line(question: str, stated: str | None, right: bool, **fields: Any) -> dict[str, Any]:
    line = {"question": question, "answer": "Paris", "stated": stated, "right": right}
    return line | {"reasonings": []} | fields


def test_judge_decides_on_the_outcome_of_trees(server, tmp_path):
    lines = [
        tree_line("Q0?", "either Paris or London", True),  # covers the answer, and is wrong
        tree_line("Q1?", "the capital of France", False),
        tree_line("Q2?", None, False),
        tree_line("Q3?", "Paris", True),  # the judge writes no grade: the rule's score stands
        tree_line("Q4?", "Rome", False),  # no reply, likewise
        {"question": "Q5?", "stated": "Rome"},  # no known answer
    ]
    write_records(tmp_path / "tree.jsonl", lines)
    flag_values = make_flags(server.url, "outcome", tmp_path / "tree.jsonl")
    replies = {"Q0?": "B", "Q1?": "A", "Q3?": "Let me see", "Q4?": DOWN}
    result, judged = judge(server, replies, flag_values, tmp_path / "out")
    assert result["shares"] == {"wrong": pytest.approx(0.6), "right": pytest.approx(0.4)}
    counts = {"answers": 5, "asked": 4, "malformed": 1, "unanswered": 1}
    assert {name: result[name] for name in counts} == counts
    assert [line["verdict"] for line in judged] == ["wrong", "right", "wrong", "right", "wrong"]
    assert judgments.describe(result).splitlines() == [
        "outcome of 5: wrong 60.0 %, right 40.0 %",
        "no verdict on 2 of 4 that were asked: 1 malformed, 1 unanswered",
    ]
    # A restart asks only about the missing reply.
    request_count = len(server.requests)
    result, _ = judge(server, {"Q4?": "A"}, flag_values, tmp_path / "out")
    assert len(server.requests) == request_count + 1 and result["shares"]["right"] == pytest.approx(
        0.6
    )


def path(reasoning: str, answer: str = "Paris") -> dict[str, Any]:
    sections = ("analysis", "a"), ("evidence", "e"), ("reasoning", reasoning), ("answer", answer)
    return {"text": "".join(f"<{name}>{text}</{name}>" for name, text in sections)}


def test_judge_compares_the_reasonings_of_a_question(server, tmp_path):
    lines = [
        tree_line("Q0?", "Paris", True, reasonings=[path("x0"), path("y0"), {"text": "bad"}]),
        tree_line("Q1?", "Paris", True, reasonings=[path("x1"), path("y1", "Rome")]),
        # The paths of all sets of evidence count before the reasonings from one of them.
        tree_line("Q2?", "Paris", True, reasonings=[path("x2")], paths=[path("y2"), path("z2")]),
        tree_line("Q3?", "Paris", True, reasonings=[path("x3")]),
        tree_line("Q4?", "Paris", True, reasonings=[path("x4"), path("y4")]),
        tree_line("Q5?", "Paris", True, reasonings=[path("x5"), path("y5")]),
    ]
    write_records(tmp_path / "tree.jsonl", lines)
    flag_values = make_flags(server.url, "diversity", tmp_path / "tree.jsonl")
    replies = {"Q0?": "A", "Q1?": "**B**", "Q2?": "A: consistent", "Q4?": "C", "Q5?": DOWN}
    result, judged = judge(server, replies, flag_values, tmp_path / "out")
    assert result["shares"] == {"consistent": pytest.approx(2 / 3), "diverse": pytest.approx(1 / 3)}
    assert (result["answers"], result["malformed"], result["unanswered"]) == (5, 1, 1)
    assert [line["missing"] for line in judged] == ["", "", "", "malformed", "unanswered"]
    prompts = [body["messages"][0]["content"] for body, _ in server.requests]
    assert any("[1]\nx1\nParis\n[2]\ny1\nRome" in prompt for prompt in prompts)
    assert any("y2\nParis" in prompt and "x2" not in prompt for prompt in prompts)
    write_records(tmp_path / "tree.jsonl", lines[3:4])
    with pytest.raises(ValueError, match="no question has 2 well-formed reasonings; sample them"):
        judge(server, {}, flag_values, tmp_path / "out")


def write_evaluation(folder: Path, finals: Mapping[str, tuple[float, str]]) -> None:
    folder.mkdir()
    common = {"max_input": 9, "sample": 0}
    rows = [
        common | {"benchmark": "lb", "id": name, "final": final, "text": text}
        for name, (final, text) in finals.items()
    ]
    write_records(folder / runner.SAMPLES, [*rows, rows[0] | {"benchmark": "other"}])
    (folder / runner.SUMMARY).write_text("{}")


def load(name: str, *_: Any) -> Benchmark:
    items = (BenchmarkItem(str(i), "long prompt", f"Q{i}?", ("B",)) for i in range(9))
    return Benchmark(name, "LB", tuple(items), lambda *_: None, lambda *_: 0.0)


def test_judge_sorts_errors_into_kinds(server, tmp_path, monkeypatch):
    monkeypatch.setattr(judgments.registry, "load", load)
    write_evaluation(
        tmp_path / "in",
        {
            **{"0": (1.0, "right"), "1": (0.0, "<think>x</think>quotes"), "2": (0.0, "Q")},
            **{"3": (0.0, "R"), "4": (0.0, "S"), "5": (0.0, "<think>cut off"), "6": (1.0, "T")},
            "7": (1.0, "U"),
        },
    )
    fields = {"benchmarks": ["lb"], "data": str(tmp_path)}
    flag_values = make_flags(server.url, "errors", tmp_path / "in", **fields)
    replies = {"Q1?": "A", "Q2?": "B", "Q3?": "A (evidence)", "Q4?": "(B)."}
    result, judged = judge(server, replies, flag_values, tmp_path / "out")
    # Of 8 answers 4 are asked about; the reply to Q3 is malformed, so 3 verdicts stand for 4.
    assert result["shares"] == {
        "evidence": pytest.approx(4 / 3 / 8),
        "reasoning": pytest.approx(8 / 3 / 8),
        "other": pytest.approx(1 / 8),
    }
    assert (result["answers"], result["asked"], result["malformed"]) == (8, 4, 1)
    verdicts = ["right", "evidence", "reasoning", "", "reasoning", "other", "right", "right"]
    assert [line["verdict"] for line in judged] == verdicts
    prompts = [body["messages"][0]["content"] for body, _ in server.requests]
    assert not any("think" in prompt or "long prompt" in prompt for prompt in prompts)


def test_errors_at_several_limits_are_not_one_share(server, tmp_path, monkeypatch):
    monkeypatch.setattr(judgments.registry, "load", load)
    write_evaluation(tmp_path / "in", {"0": (0.0, "a"), "1": (1.0, "b")})
    path = tmp_path / "in" / runner.SAMPLES
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_records(path, [*rows, rows[0] | {"max_input": 20}])
    fields = {"benchmarks": ["lb"], "data": str(tmp_path)}
    flag_values = make_flags(server.url, "errors", tmp_path / "in", **fields)
    with pytest.raises(ValueError, match="has answers at the limits 9, 20; --max_input must name"):
        judge(server, {}, flag_values, tmp_path / "out")
    flag_values.max_input = ["20"]
    result, _ = judge(server, {"": "A"}, flag_values, tmp_path / "out")
    assert (result["answers"], result["shares"]["evidence"]) == (1, 1.0)
    flag_values.max_input = ["21"]
    with pytest.raises(ValueError, match="has no answers of lb at --max_input=21"):
        judge(server, {}, flag_values, tmp_path / "out")


def test_endpoint_that_is_down_gives_no_judgments(server, tmp_path, monkeypatch):
    monkeypatch.setattr(judgments.registry, "load", load)
    write_evaluation(tmp_path / "in", {"0": (0.0, "a"), "1": (1.0, "b")})
    fields = {"benchmarks": ["lb"], "data": str(tmp_path)}
    flag_values = make_flags(server.url, "errors", tmp_path / "in", **fields)
    with pytest.raises(
        ValueError, match=r"judge: no reply to any of 1 prompts, .* check --judge_url"
    ):
        judge(server, {"": DOWN}, flag_values, tmp_path / "out")
    assert not (tmp_path / "out" / "judgments.json").exists()
    (tmp_path / "in" / runner.SUMMARY).unlink()
    with pytest.raises(FileNotFoundError, match="must be the folder of a finished evaluation"):
        judge(server, {}, flag_values, tmp_path / "out")


def test_question_that_the_benchmark_lacks_is_named(server, tmp_path, monkeypatch):
    monkeypatch.setattr(judgments.registry, "load", load)
    write_evaluation(tmp_path / "in", {"x": (0.0, "a")})
    for benchmark, message in (("lb", "lb: no question 'x' in --data"), ("c", "no answers of c")):
        fields = {"benchmarks": [benchmark], "data": str(tmp_path)}
        flag_values = make_flags(server.url, "errors", tmp_path / "in", **fields)
        with pytest.raises(ValueError, match=message):
            judge(server, {}, flag_values, tmp_path / "out")


@pytest.mark.parametrize("judgment", judgments.VERDICTS)
def test_all_flags_without_effect_on_a_judgment_are_refused(judgment):
    useful = {*judgments.COMMON_FLAGS, *judgments.OWN_FLAGS[judgment]}
    assert useful < set(evaluating.FLAGS)
    arguments = [f"--{name}=1" for name in useful - {"judgment"}]
    judgments.check_flags(evaluating.parse_flags(f"--judgment={judgment}", *arguments))
    useless = set(evaluating.FLAGS) - useful
    assert {"lengths", "endpoint", "model", "tokenizer", "endpoint_rate", "rule"} <= useless
    for name in useless:
        values = evaluating.parse_flags(f"--judgment={judgment}", *arguments, f"--{name}=1")
        with pytest.raises(
            app.UsageError, match=f"--{name}: has no effect with --judgment={judgment}"
        ):
            judgments.check_flags(values)


def test_every_judgment_has_verdicts_a_reader_and_flags():
    names = set(policy_flags.JUDGMENTS)
    assert names == {*judgments.VERDICTS} == {*judgments.READERS} == {*judgments.OWN_FLAGS}


def test_flags_of_a_judgment_are_checked(tmp_path):
    judgments.check_flags(
        evaluating.parse_flags("--judgment=outcome", "--answers=a", "--judge_template=b")
    )
    judgments.check_flags(
        evaluating.parse_flags("--judgment=errors", "--answers=a", "--data=b", "--benchmarks=c")
    )
    for arguments, message in (
        (("outcome",), "--answers: must be given with --judgment=outcome"),
        (("outcome", "--answers=a", "--data=b"), "--data: has no effect with --judgment=outcome"),
        (("diversity", "--answers=a", "--judge_template=b"), "--judge_template: has no effect"),
        (("diversity", "--answers=a", "--policy=b"), "--policy: has no effect"),
        (("errors", "--answers=a", "--data=b"), "--benchmarks: must be given"),
    ):
        with pytest.raises(app.UsageError, match=message):
            judgments.check_flags(
                evaluating.parse_flags(f"--judgment={arguments[0]}", *arguments[1:])
            )
    no_judge = make_flags("", "outcome", tmp_path, judge_model="")
    with pytest.raises(app.UsageError, match="--judgment=outcome: --judge_url and --judge_model"):
        judgments.judge_answers(no_judge, tmp_path, evaluating.SIZES)


def test_replies_of_judgments_are_kept_beside_the_result(server, tmp_path):
    write_records(tmp_path / "tree.jsonl", [tree_line("Q0?", "Paris", True)])
    flag_values = make_flags(server.url, "outcome", tmp_path / "tree.jsonl")
    judge(server, {"Q0?": "A"}, flag_values, tmp_path / "out")
    (line,) = (tmp_path / "out" / judging.REPLIES).read_text().splitlines()
    assert json.loads(line)["reply"] == "A"
